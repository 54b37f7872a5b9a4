"""Warnings of ranks above 0 are heard with their rank's name; what rank 0 says, nobody repeats."""

from __future__ import annotations

import contextlib
import io
import time
import warnings
from unittest import mock

import torch.distributed as dist

from megatron.distributed import speech


def heard(late: bool) -> tuple[str, str]:
    """What this rank writes to stdout and stderr: a line of every rank, a warning of all, one of
    rank 2, one of ranks 1 and 2, and Python's.
    """
    rank, out, err = dist.get_rank(), io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(speech, "PATIENCE", 1.0),
        mock.patch.object(speech.Other.__init__, "__defaults__", (1.0,)),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("always")
        with speech.one_voice():
            print("an ordinary line", flush=True)
            if rank == 0 and late:
                time.sleep(0.4)  # the others come first
            print(f"warning: known to all{late}", flush=True)
            warnings.warn(f"of the library{late}", stacklevel=1)
            if rank == 2:
                print(f"warning: the disk of this node is nearly full{late}", flush=True)
                warnings.warn(f"of this rank{late}", stacklevel=1)
            if rank > 0:
                print(f"warning: not on the first node{late}", flush=True)
            time.sleep(0 if not late else 1.5)
            dist.barrier()
    return out.getvalue(), err.getvalue()


def check(told: list[tuple[str, str]], late: bool) -> None:
    out, err = told[0]
    assert (
        out == f"an ordinary line\nwarning: known to all{late}\n"
        and err.count(f"UserWarning: of the library{late}") == 1
    )
    assert [out for out, _ in told[1:]] == ["", ""]
    lines = [line for _, err in told[1:] for line in err.splitlines()]
    assert sum("not on the first node" in line for line in lines) == 1
    others = [line for line in lines if "not on the first node" not in line]
    assert others[0] == f"rank 2: warning: the disk of this node is nearly full{late}"
    assert (
        others[1].startswith(f"rank 2: warning: UserWarning: of this rank{late} (")
        and len(others) == 2
    )


def test_others_are_heard_and_nothing_is_said_twice(gloo_world):
    # rank 0 speaks first, or after the others; texts differ, for the world's store outlives a run
    for late in (False, True):
        check(gloo_world(3).run(heard, late), late)


def test_one_process_is_left_alone(capsys):
    with speech.one_voice():
        print("warning: as it is")
    assert capsys.readouterr().out == "warning: as it is\n"
