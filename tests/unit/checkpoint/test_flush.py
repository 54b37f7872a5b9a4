"""From the local tier to --save: at the rate that is asked for, and nothing that is not what was
written.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from checkpoint_cases import example, flip, loads, pairs, save_in_shards
from logged import silently

from megatron.checkpoint import background, manifest
from megatron.checkpoint.background import BURST, Background, limited
from megatron.checkpoint.index import Index
from megatron.checkpoint.local import checkpoints
from megatron.checkpoint.local.checkpoints import LocalCheckpoints
from megatron.checkpoint.local.nodes import RunId
from megatron.checkpoint.manager import CheckpointManager, staging_bytes
from megatron.checkpoint.manifest import CheckpointError
from megatron.checkpoint.ranks import SINGLE_RANK
from megatron.checkpoint.reader import open_checkpoint


class Clock:
    """Time that passes in sleep alone."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


@pytest.mark.parametrize(
    ("sizes", "rate"), [([2_000_000], 0.5), ([1] * 100 + [999_900, 0, 3], 3.0)]
)
def test_bytes_go_at_the_rate_and_unchanged(sizes, rate):
    """Of any stretch of time no more than the rate and the burst, and in all no less."""
    clock, raw = Clock(), bytes(i % 251 for i in range(sum(sizes)))
    cuts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    parts, came = (memoryview(raw)[start:stop] for start, stop in zip(cuts, cuts[1:])), []
    for piece in limited(parts, rate, clock=clock, sleep=clock.sleep):
        came.append((clock.now, bytes(piece)))
    assert b"".join(piece for _, piece in came) == raw
    done = 0
    for now, piece in came:
        done += len(piece)
        assert done <= rate * 1e6 * (now + BURST) + 1
    assert clock.now == pytest.approx(max(0.0, sum(sizes) / (rate * 1e6) - BURST), abs=1e-6)


def test_time_in_which_nothing_came_is_not_saved_up():
    clock = Clock()

    def parts():
        for _ in range(20):
            clock.now += 1.0  # the writer was slower
            yield memoryview(bytes(1000))
        yield memoryview(bytes(1_000_000))

    sent = list(limited(parts(), 1.0, clock=clock, sleep=clock.sleep))
    assert clock.now == pytest.approx(20 + 1 - BURST + 0.001) and sum(map(len, sent)) == 1_020_000


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "CHUNK", 256)
    tensors = pairs(example(1))
    return save_in_shards(tmp_path / "local", 1, [tensors[::2], tensors[1::2]], {})


def copy(source: Path, number: int, record: dict, target: Path) -> dict:
    """What the writer process does with a shard that lies in a local folder."""
    target.mkdir(exist_ok=True)
    options = {"index": number, "rate": None, "verify": False, "iteration": 1, "record": record}
    where = {"source": str(source / manifest.shard_file(number)), "folder": str(target)}
    return background.WORK["copy"](options | where, memoryview(b""), None)


@pytest.mark.parametrize("at", [3, 100, -1])
def test_a_damaged_local_copy_is_refused(source, tmp_path, at):
    record = Index(source).manifest["shards"][0]
    flip(source / manifest.shard_file(0), at)
    with pytest.raises(CheckpointError, match="local copy of shard-00000.safetensors is damaged"):
        copy(source, 0, record, tmp_path / "copy")


# ---- a saver with a local tier -------------------------------------------------------------------


def tensors(iteration: int = 1) -> dict[str, torch.Tensor]:
    """About 4 MB."""
    g = torch.Generator().manual_seed(iteration)
    return {"a": torch.randn(1000, 1001, generator=g), "b": torch.randn(3, generator=g)}


@pytest.fixture
def saver(tmp_path):
    """saver(rate, local): one that saves in the background under tmp_path/shared; closed in the
    end.
    """
    made: list[CheckpointManager] = []

    def make(rate: float | None = None, local: bool = True) -> CheckpointManager:
        tier = LocalCheckpoints(tmp_path / "local", SINGLE_RANK, "none") if local else None
        if local:
            tier.run = RunId("c" * 32, "here")
        made.append(
            CheckpointManager(
                tmp_path / "shared",
                SINGLE_RANK,
                staging_bytes(pairs(tensors()), None),
                local_checkpoints=tier,
                rate=rate,
            )
        )
        return made[-1]

    yield make
    for each in made:
        each.close()


def held_up(each: CheckpointManager, iteration: int, during) -> bool:
    """Save; the writer process begins when `during` is over. Whether the save went well."""
    each.background.start()
    os.kill(each.background.process.pid, signal.SIGSTOP)
    each.save(iteration, pairs(tensors(iteration)), {})
    during()
    os.kill(each.background.process.pid, signal.SIGCONT)
    return each.finalize()


@pytest.mark.parametrize("by_name", [False, True])
def test_what_is_removed_locally_is_copied_to_its_end(saver, tmp_path, monkeypatch, by_name):
    """Two local saves later the one on its way is gone from the node; the mutant would look for it
    by its name.
    """
    each = saver()
    if by_name:
        send = Background.send

        def send_name(self, command: dict) -> None:
            if "source" in command:
                command = command | {"source": os.readlink(command["source"])}
            send(self, command)

        monkeypatch.setattr(Background, "send", send_name)

    def two_more() -> None:
        for i in (2, 3):
            each.local_checkpoints.save(i, pairs(tensors(i)), {})

    assert held_up(each, 1, two_more) == (not by_name)
    if not by_name:
        loads(silently(open_checkpoint, tmp_path / "shared").path, tensors(1))
    assert sorted(path.name for path in tmp_path.glob("local/*/*")) == [
        "iter_0000002",
        "iter_0000003",
    ]


def test_damage_on_the_node_does_not_reach_the_shared_folder(saver, tmp_path, log_lines):
    each = saver()

    def damage() -> None:
        flip(next(tmp_path.glob("local/*/*/*.safetensors")))

    assert not held_up(each, 1, damage)
    assert "iteration 1 was NOT saved" in log_lines[-1]
    assert "local copy of shard-00000.safetensors is damaged" in log_lines[-1]
    assert list(tmp_path.glob("shared/*")) == [] and held_up(each, 2, lambda: None)
    loads(silently(open_checkpoint, tmp_path / "shared").path, tensors(2))


def test_without_room_on_the_node_the_save_goes_to_the_shared_folder_at_once(
    saver, tmp_path, monkeypatch, log_lines
):
    each = saver()

    def full(*args: object) -> None:
        raise CheckpointError("no room")

    monkeypatch.setattr(checkpoints, "save_local", full)
    each.save(1, pairs(tensors()), {})
    assert each.pending is None
    assert log_lines[0] == "warning: iteration 1 was NOT saved locally. no room" and each.finalize()
    loads(silently(open_checkpoint, tmp_path / "shared").path, tensors())


@pytest.mark.parametrize("local", [True, False])
def test_the_writer_keeps_to_the_rate(saver, local):
    """4 MB/s of 4 MB, less the burst; from the node and from memory. The control has no rate."""
    each = saver(4.0, local)
    each.background.start()

    def seconds(iteration: int) -> float:
        began = time.monotonic()
        each.save(iteration, pairs(tensors(iteration)), {})
        assert each.finalize()
        return time.monotonic() - began

    limited_to = seconds(1)
    each.rate = None
    assert limited_to >= 4e6 / 4e6 - BURST
    assert min(seconds(iteration) for iteration in range(2, 7)) < limited_to
