"""Warnings of ranks above 0 are logged with their rank; what rank 0 logs, no rank repeats."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import time
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from megatron.distributed import logs
from megatron.distributed.peers import MAX_CLONES
from pretrain_gpt import main

logger = logging.getLogger("megatron.tests")


def heard() -> tuple[str, str]:
    """What this rank writes to stdout and stderr: a line of every rank, a warning of all, one of
    rank 2, one of ranks 1 and 2, and Python's.
    """
    rank, out, err = dist.get_rank(), io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("always")
        with logs.job_log():
            logger.info("an ordinary line, 100%")
            for turn in (rank == 0, rank > 0):  # rank 0 logs first
                if turn:
                    logger.warning("known to all")
                    warnings.warn("of the library", stacklevel=1)
                    time.sleep(0.2)  # in which the store has rank 0's texts
                dist.barrier()
            if rank == 2:
                logger.warning("the disk of this node is nearly full")
                warnings.warn("of this rank", stacklevel=1)
            if rank > 0:
                logger.warning("not on the first node")
            dist.barrier()
        logger.info("after the job")
    return out.getvalue(), err.getvalue()


def test_others_are_heard_and_nothing_is_logged_twice(gloo_world):
    shown = gloo_world(3).run(heard)
    out, err = shown[0]
    first, second, third = out.splitlines()
    assert [first, second] == ["an ordinary line, 100%", "warning: known to all"]
    assert third.startswith("warning: ") and third.endswith(": UserWarning: of the library")
    assert err == ""
    assert [out for out, _ in shown[1:]] == ["", ""]
    lines = [line for _, err in shown[1:] for line in err.splitlines()]
    assert sum("not on the first node" in line for line in lines) == 1
    others = [line for line in lines if "not on the first node" not in line]
    assert others[0] == "rank 2: warning: the disk of this node is nearly full"
    assert others[1].startswith("rank 2: warning: ")
    assert others[1].endswith(": UserWarning: of this rank")
    assert len(others) == 2


def test_one_process(capsys):
    with logs.job_log():
        logger.info("as it is")
        logger.warning("with its level")
        try:
            raise ValueError("a fault")
        except ValueError:
            logger.exception("with its cause")
        logger.debug("not written")
    out = capsys.readouterr().out.splitlines()
    assert out[:3] == ["as it is", "warning: with its level", "error: with its cause"]
    assert out[-1] == "ValueError: a fault"


def test_a_log_in_ascii_escapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Banner, a fault of the flags, and the log of a rank whose stream was not set up."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="ascii") for _ in range(2)]
    for name, stream in zip(("stdout", "stderr"), streams):
        monkeypatch.setattr(sys, name, stream)
    folder = tmp_path / "t\u00e9"
    flags = """--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --lr 1e-2
    --micro-batch-size 1 --global-batch-size 1 --train-iters 2 --mock-data --vocab-size 15
    --eval-iters 0""".split()
    assert main([*flags, "--save", str(folder / "run")]) == 0
    assert main([*flags, "--load", str(folder / "missing")]) == 2
    out, err = (stream.buffer.getvalue().decode("ascii") for stream in streams)
    assert r"t\xe9/run" in out and r"t\xe9/missing" in err
    handler = logs.JobHandler()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    handler.emit(logging.LogRecord("megatron", logging.INFO, "", 0, "\u00e9", None, None))


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_a_log_that_cannot_be_written_ends_no_run(capsys):
    with logs.job_log(), contextlib.redirect_stdout(Full()):
        logger.info("lost")
    assert "No space left on device" in capsys.readouterr().err


def test_rank_0_does_not_wait_for_the_store():
    store = mock.Mock(spec=["set"])  # `add` waits for an answer
    record = logging.LogRecord("megatron", logging.WARNING, "", 0, "known", None, None)
    logs.JobHandler(0, store).emit(record)
    store.set.assert_called_once()


@pytest.mark.parametrize(("world", "connections"), [(MAX_CLONES, 1), (MAX_CLONES + 1, 0)])
def test_a_large_job_shares_its_connections_to_the_store(monkeypatch, world, connections):
    cloned = []

    class Counted(HashStore):
        def clone(self):
            cloned.append(self)
            return self

    store = Counted()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: world)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    with logs.job_log():
        logger.warning("known")
    assert len(cloned) == connections and store.num_keys() == 1
