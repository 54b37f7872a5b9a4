"""From the local tier to --save: at the rate that is asked for, and nothing that is not what was written."""

from __future__ import annotations

import pytest
from checkpoint_cases import example, loads, pairs, save_in_shards

from megatron.checkpoint import drain, manifest
from megatron.checkpoint.drain import BURST, copy_shard, limited
from megatron.checkpoint.index import Index
from megatron.checkpoint.manifest import CheckpointError


class Clock:
    """Time that passes in sleep alone."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


@pytest.mark.parametrize("sizes", [[10_000_000], [1] * 100 + [999_900, 3], [300_000, 7_000_000, 0, 12]])
@pytest.mark.parametrize("rate", [0.5, 3.0])
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


def test_without_a_rate_parts_pass_as_they_are():
    parts = [memoryview(bytes(10)), memoryview(b"")]
    assert list(limited(iter(parts), None)) == parts


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "CHUNK", 256)
    tensors = pairs(example(1))
    return save_in_shards(tmp_path / "local", 1, [tensors[::2], tensors[1::2]], {})


def test_a_copy_is_the_shard(source, tmp_path):
    records = Index(source).manifest["shards"]
    target = tmp_path / "copy"
    target.mkdir()
    for number, record in enumerate(records):
        assert copy_shard(source / manifest.shard_file(number), target, number, record | {"rank": 3}, None) == record
    (target / manifest.MANIFEST).write_bytes((source / manifest.MANIFEST).read_bytes())
    loads(target, example(1))


@pytest.mark.parametrize("at", [3, 8, 100, -1, -300])
def test_a_damaged_local_copy_is_refused(source, tmp_path, monkeypatch, at):
    record = Index(source).manifest["shards"][0]
    path = source / manifest.shard_file(0)
    raw = bytearray(path.read_bytes())
    raw[at] ^= 4
    path.write_bytes(raw)
    (tmp_path / "copy").mkdir()
    with pytest.raises(CheckpointError, match="local copy of shard-00000.safetensors is damaged"):
        copy_shard(path, tmp_path / "copy", 0, record, None)


def test_a_copy_that_is_not_compared_is_caught(source, tmp_path, monkeypatch):
    """The mutant of the test above: the damage is digested anew and looks whole."""
    path = source / manifest.shard_file(0)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 4
    path.write_bytes(raw)
    (tmp_path / "copy").mkdir()
    record = drain.copy_shard(path, tmp_path / "copy", 0, {"file": Any(), "bytes": Any(), "table_digest": Any()}, None)
    assert record["table_digest"] != Index(source).manifest["shards"][0]["table_digest"]


class Any:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None
