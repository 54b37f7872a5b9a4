"""Several threads write a shard: the same files as by one, one error that ends all of them, and no more in memory than a chunk for each."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch
from checkpoint_cases import example, loads, pairs

from megatron.checkpoint import files, manifest, writer
from megatron.checkpoint.manifest import CheckpointError
from megatron.checkpoint.reader import find_checkpoint
from megatron.checkpoint.writer import save_checkpoint

CHUNK = 256


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(manifest, "CHUNK", CHUNK)


def use(monkeypatch, threads: int) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != manifest.MANIFEST}


@pytest.mark.parametrize("threads", [2, 3, 64])
def test_the_files_are_those_of_one_thread(tmp_path, monkeypatch, threads):
    """Whatever the order in which chunks reach the file, short writes too."""
    use(monkeypatch, 1)
    alone = save_checkpoint(tmp_path / "alone", 1, pairs(example()), {})
    written, told, real = set(), [], os.pwritev

    def slow(file, buffers, at):
        time.sleep((at // CHUNK * 7 % 5) * 1e-4)
        written.add(threading.get_ident())
        return real(file, [b"".join(buffers)[: 200 + at % 100]], at)

    monkeypatch.setattr(os, "pwritev", slow)
    monkeypatch.setattr(writer, "Progress", lambda *_: told.append)
    use(monkeypatch, threads)
    path = save_checkpoint(tmp_path / "several", 1, pairs(example()), {}, verify=True)
    assert contents(path) == contents(alone) and sum(told) == writer.shard_bytes(pairs(example()))
    assert 2 <= len(written - {threading.get_ident()}) <= writer.THREADS


def test_an_error_of_one_ends_all(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, 1, pairs(example(1)), {})
    use(monkeypatch, 3)
    calls, real = [], os.pwritev

    def full(file, buffers, at):
        calls.append(at)
        if len(calls) == 5:
            raise OSError(28, os.strerror(28))
        time.sleep(1e-3)
        return real(file, buffers, at)

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(CheckpointError, match=r"iteration 2 was not saved: No space left on device.*newest: iteration 1"):
        save_checkpoint(tmp_path, 2, pairs(example(2)), {})
    assert 5 <= len(calls) <= 5 + 2 * 2, "the others wrote on"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000001", manifest.TRACKER]
    loads(find_checkpoint(tmp_path), example(1))


def test_an_error_of_the_data_is_raised(tmp_path):
    def data():
        yield memoryview(bytes(10 * CHUNK))
        raise MemoryError("of the device")

    with pytest.raises(MemoryError, match="of the device"):
        files.write_shard_file(tmp_path, 0, b"h" * 8, data(), threads=3)
    assert not (tmp_path / manifest.table_file(0)).exists()


@pytest.mark.parametrize("threads", [1, 3])
def test_only_a_chunk_for_each_thread_is_under_way(tmp_path, monkeypatch, threads):
    """With one thread what has been taken is written before more is asked for: a buffer may be filled anew."""
    taken = done = most = 0
    real = os.pwritev

    def data():
        nonlocal taken, most
        for _ in range(40):
            most = max(most, taken - done)
            taken += CHUNK
            yield memoryview(bytes(CHUNK))

    def counted(file, buffers, at):
        nonlocal done
        time.sleep(1e-3)
        count = real(file, buffers, at)
        done += count
        return count

    header = b"h" * CHUNK
    taken += CHUNK
    monkeypatch.setattr(os, "pwritev", counted)
    record = files.write_shard_file(tmp_path, 0, header, data(), threads=threads)
    assert record["bytes"] == 41 * CHUNK and most <= (threads - 1) * CHUNK and (most > 0) == (threads > 1)
