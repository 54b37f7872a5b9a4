"""Saves in the background: what they write, when training waits, and what becomes of a fault on one
of the ranks.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from checkpoint_cases import flip, loads, pairs
from logged import silently

from megatron.checkpoint import manager, manifest
from megatron.checkpoint.local import checkpoints
from megatron.checkpoint.local.checkpoints import LocalCheckpoints
from megatron.checkpoint.manager import CheckpointManager, Staging, staging_bytes
from megatron.checkpoint.manifest import CheckpointError
from megatron.checkpoint.ranks import SINGLE_RANK, Ranks
from megatron.checkpoint.reader import open_checkpoint
from megatron.checkpoint.writer import save_checkpoint
from megatron.distributed.groups import Axis

STATE = {"consumed_samples": 16}
ROOT = Path(__file__).resolve().parents[3]


def tensors(iteration: int = 1) -> dict[str, torch.Tensor]:
    """About 7 MB: rows, vectors and scalars-in-rows of two widths, none of them a whole number of
    chunks.
    """
    g = torch.Generator().manual_seed(iteration)
    return {
        "a": torch.randn(1100, 1001, generator=g),
        "b": torch.randn(700_001, generator=g).bfloat16(),
        "c": torch.randn(3, generator=g),
        "d": torch.randn(2, 70_000, generator=g),
    }


@pytest.fixture
def made():
    """Checkpoint managers that end with the test."""
    found: list[CheckpointManager] = []

    def make(root, memory: int | None, ranks: Ranks = SINGLE_RANK, **options) -> CheckpointManager:
        found.append(CheckpointManager(root, ranks, memory, **options))
        return found[-1]

    yield make
    for each in found:
        each.close()


def enough(data: dict[str, torch.Tensor]) -> int:
    return staging_bytes(pairs(data), None)


# ---- one rank ------------------------------------------------------------------------------------


@pytest.mark.parametrize("gib", [None, 0.004, 1e-9])
def test_the_files_are_those_of_a_save_that_waits(tmp_path, made, gib, log_lines):
    """In one wave, in two, and chunk by chunk; and the memory is what was allowed, in addition to
    the header.
    """
    data = tensors()
    memory = staging_bytes(pairs(data), gib)
    assert memory < 3 * manifest.ALIGN + (
        enough(data) if gib is None else max(gib * 2**30, manifest.CHUNK)
    )
    background = made(tmp_path / "background", memory)
    for iteration in (1, 2):  # the second time the process and the memory are there already
        save_checkpoint(tmp_path / "now", iteration, pairs(data), STATE)
        background.save(iteration, pairs(data), STATE)
        assert background.finalize()
        assert f"saved checkpoint {tmp_path / 'background'}" in log_lines[-1]
        for file in ("shard-00000.safetensors", "shard-00000.digests"):
            assert (tmp_path / f"background/iter_000000{iteration}" / file).read_bytes() == (
                tmp_path / f"now/iter_000000{iteration}" / file
            ).read_bytes()
    loads(silently(open_checkpoint, tmp_path / "background").path, data)


def test_a_save_is_of_the_values_at_its_call(tmp_path, made):
    """However late it is written."""
    data = tensors()
    background = made(tmp_path, enough(data))
    os.kill(background.background.process.pid, signal.SIGSTOP)
    background.save(1, pairs(data), STATE)
    for tensor in data.values():
        tensor.zero_()
    os.kill(background.background.process.pid, signal.SIGCONT)
    assert background.finalize()
    loads(silently(open_checkpoint, tmp_path).path, tensors())


def step(each: CheckpointManager) -> None:
    """What the end of a training step does for a save, on one rank."""
    each.advance(each.ready())


def test_training_goes_on_while_it_is_written_and_then_it_stands(tmp_path, made, log_lines):
    background = made(tmp_path, enough(tensors()))
    background.save(1, pairs(tensors()), STATE)
    process = background.background.process.pid
    step(background)  # hands the copy over
    os.kill(process, signal.SIGSTOP)
    for _ in range(3):
        step(background)
    assert background.pending is not None and not log_lines
    os.kill(process, signal.SIGCONT)
    # a job's end reaches all its processes; the trainer decides
    for number in (signal.SIGTERM, signal.SIGUSR1):
        os.kill(process, number)
    end = time.monotonic() + 30
    while background.pending is not None and time.monotonic() < end:
        step(background)
    assert len(log_lines) == 1 and "training waited 0.0 s" in log_lines[0]
    loads(silently(open_checkpoint, tmp_path).path, tensors())


def test_the_next_save_waits_for_the_one_before_and_says_so(tmp_path, made, log_lines):
    background = made(tmp_path, enough(tensors()))
    for iteration in (1, 2):
        background.save(iteration, pairs(tensors(iteration)), STATE)
    assert background.finalize()
    assert [text.split(":")[0].split("/")[0] for text in log_lines] == [
        " saved checkpoint ",
        " the save before was not over",
        " saved checkpoint ",
    ]
    for iteration in (1, 2):
        loads(silently(open_checkpoint, tmp_path, iteration).path, tensors(iteration))


def test_a_save_adds_two_collectives_to_training_steps(tmp_path, made, monkeypatch):
    calls = []
    real = Ranks.gather_or_raise

    def counted(ranks: Ranks, part) -> list:
        calls.append(part)
        return real(ranks, part)

    monkeypatch.setattr(Ranks, "gather_or_raise", counted)
    background = made(tmp_path, enough(tensors()))
    background.save(1, pairs(tensors()), STATE)
    calls.clear()
    while background.pending is not None:
        step(background)
    assert background.went_well and len(calls) == 2


def test_a_commit_that_cannot_start_fails_the_save(tmp_path, made, log_lines):
    background = made(tmp_path, enough(tensors()))
    background.save(1, pairs(tensors()), STATE)
    error = OSError(12, "Cannot allocate memory")
    with mock.patch.object(background.background, "start", side_effect=error):
        assert not background.finalize()
    assert "iteration 1 was NOT saved" in log_lines[-1]
    assert "was not saved: Cannot allocate memory" in log_lines[-1]
    assert list(tmp_path.iterdir()) == []


def test_a_killed_writer_fails_the_save_with_what_can_be_loaded(tmp_path, made, log_lines):
    background = made(tmp_path, enough(tensors()))
    background.save(1, pairs(tensors()), STATE)
    assert background.finalize()
    os.kill(background.background.process.pid, signal.SIGSTOP)
    background.save(2, pairs(tensors()), STATE)
    background.background.process.kill()
    assert not background.finalize()
    assert f"{tmp_path}: the checkpoint of iteration 2 was not saved: the process" in log_lines[-1]
    assert log_lines[-1].endswith("Older checkpoints are untouched (newest: iteration 1).")


def test_a_save_that_close_abandons_did_not_go_well(tmp_path, made):
    background = made(tmp_path, enough(tensors()))
    background.save(1, pairs(tensors()), STATE)
    background.close()
    assert not background.finalize() and list(tmp_path.iterdir()) == []


def test_what_a_failed_start_has_copied_is_not_in_the_next_save(tmp_path, made, log_lines):
    def filled(staging: Staging, file: Iterable[torch.Tensor]) -> None:
        real(staging, file)
        raise OSError(5, "Input/output error")

    background, real = made(tmp_path, enough(tensors())), Staging.fill
    with mock.patch.object(Staging, "fill", filled):
        background.save(1, pairs(tensors()), STATE)
    assert not background.went_well and "Input/output error" in log_lines[-1]
    background.save(2, pairs(tensors(2)), STATE)
    assert background.finalize(), log_lines
    loads(open_checkpoint(tmp_path).path, tensors(2))


def test_training_waits_for_all_of_a_save_at_the_end(tmp_path, made):
    """What is compared between two phases counts, too."""
    reports: list[dict[str, float]] = []
    background = made(
        tmp_path, enough(tensors()), report=lambda iteration, **saved: reports.append(saved)
    )
    replicas = SimpleNamespace(check=lambda ranks: time.sleep(1.0))
    background.save(1, pairs(tensors()), STATE, replicas)
    assert background.finalize() and reports[0]["stall"] >= 1.0


def test_a_manifest_that_cannot_be_read_back_ends_nothing(tmp_path, made, monkeypatch, log_lines):
    """It is read for the log line alone."""
    unreadable = mock.Mock(side_effect=CheckpointError("Input/output error"))
    monkeypatch.setattr(manager, "read_manifest", unreadable)
    each = made(tmp_path, None)
    each.save(1, pairs(tensors()), STATE)
    assert each.finalize()
    line = "warning: iteration 1 was saved, but cannot be read: Input/output error"
    assert log_lines == [line]


# ---- on a GPU ------------------------------------------------------------------------------------

CUDA = torch.device("cuda")


def test_passes_that_are_queued_are_no_stall(tmp_path, made, monkeypatch):
    """The exchange of a phase would wait for them."""
    queued: list[float] = []
    real = Ranks.gather_or_raise

    def drain() -> None:
        while queued:
            time.sleep(queued.pop())

    def exchanged(ranks: Ranks, part) -> list:
        drain()
        return real(ranks, part)

    monkeypatch.setattr(Ranks, "gather_or_raise", exchanged)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=drain))
    background = made(tmp_path, enough(tensors()))
    background.save(1, pairs(tensors()), STATE)
    background.stall = 0.0
    background.ranks = Ranks(Axis("world", 0, (0, 1)), CUDA)
    while background.pending is not None:
        queued[:] = [0.5]
        background.advance([2 * done for done in background.ready()])
    assert background.went_well and background.stall < 0.5


def test_memory_is_pinned_until_the_manager_is_closed(tmp_path, made, monkeypatch):
    pinned: list[int] = []
    cudart = SimpleNamespace(
        cudaHostRegister=lambda address, *_: pinned.append(address) or 0,
        cudaHostUnregister=pinned.remove,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "Stream", mock.Mock())
    background = made(tmp_path, enough(tensors()), Ranks(device=CUDA))
    assert pinned == [background.staging.memory.data_ptr()]
    for _ in range(2):
        background.close()
    assert pinned == []
    cudart.cudaHostRegister = lambda *_: 2
    message = "--async-save: 0.00391 GiB .* cudaHostRegister: error 2; set --async-save-host-memory"
    with pytest.raises(CheckpointError, match=message):
        CheckpointManager(tmp_path, Ranks(device=CUDA), 1 << 22)


# ---- from the local tier to --save: nothing that is damaged --------------------------------------


@pytest.fixture
def saver(tmp_path, made):
    """Saves in the background under tmp_path/shared."""

    tier = LocalCheckpoints(tmp_path / "local", SINGLE_RANK, "none")
    tier.adopt("c" * 32)
    return made(tmp_path / "shared", enough(tensors()), local_checkpoints=tier)


def held_up(each: CheckpointManager, iteration: int, during) -> bool:
    """Save; the writer process begins when `during` is over. Whether the save went well."""
    each.background.start()
    os.kill(each.background.process.pid, signal.SIGSTOP)
    each.save(iteration, pairs(tensors(iteration)), {})
    during()
    os.kill(each.background.process.pid, signal.SIGCONT)
    return each.finalize()


def test_what_is_removed_locally_is_copied_to_its_end(saver, tmp_path):
    """Two local saves later the one on its way is gone from the node."""

    def two_more() -> None:
        for i in (2, 3):
            saver.local_checkpoints.save(i, pairs(tensors(i)), {})

    assert held_up(saver, 1, two_more)
    loads(silently(open_checkpoint, tmp_path / "shared").path, tensors(1))
    assert sorted(path.name for path in tmp_path.glob("local/*/*")) == [
        "iter_0000002",
        "iter_0000003",
    ]


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    "harm",
    [
        *(partial(flip, at=at) for at in (3, 100, -1)),
        halve,
        partial(os.truncate, length=0),
    ],
)
def test_damage_on_the_node_does_not_reach_the_shared_folder(saver, tmp_path, log_lines, harm):
    def damage() -> None:
        harm(next(tmp_path.glob("local/*/*/*.safetensors")))

    assert not held_up(saver, 1, damage)
    assert "iteration 1 was NOT saved" in log_lines[-1]
    assert "local copy of shard-00000.safetensors is damaged" in log_lines[-1]
    assert list(tmp_path.glob("shared/*")) == [] and held_up(saver, 2, lambda: None)
    loads(silently(open_checkpoint, tmp_path / "shared").path, tensors(2))


def test_without_room_on_the_node_the_save_goes_to_the_shared_folder_at_once(
    saver, tmp_path, monkeypatch, log_lines
):
    def full(*args: object) -> None:
        raise CheckpointError("no room")

    monkeypatch.setattr(checkpoints, "save_local", full)
    saver.save(1, pairs(tensors()), {})
    assert saver.pending is None and saver.finalize()
    assert log_lines[0] == "warning: iteration 1 was NOT saved locally. no room"
    loads(silently(open_checkpoint, tmp_path / "shared").path, tensors())
