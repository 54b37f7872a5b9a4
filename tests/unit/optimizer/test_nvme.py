"""The ring through which the optimizer's state in files passes never hands out what is not there
yet; faults of the disk. Whole runs: test_offload.py.
"""

from __future__ import annotations

import errno
import os
import random
import time
import types
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from parity.layouts import BASE
from parity.worker import run_case
from unit.optimizer.test_offload import SMALL, same_checkpoints

from megatron.checkpoint import writer
from megatron.checkpoint.reader import open_checkpoint
from megatron.optimizer import nvme

DTYPES = {"master": torch.float32, "exp_avg": torch.bfloat16, "exp_avg_sq": torch.float64}
FLAGS = (*BASE, "--micro-batch-size", "2", "--lr-warmup-iters", "0")


# ---------------------------------------------------------------- the ring by itself


class Held:
    """As much of a block as the files know."""

    def __init__(self, size: int):
        self.own = 64, 64 + size


def use_at_random(module: types.ModuleType, folder: Path, seed: int = 0) -> None:
    """Passes over all parts, whole ones and others that are cut short, on a disk that takes its
    time; what is read must be what was written last.
    """
    draw = random.Random(seed)
    blocks = [Held(size) for size in (3 * SMALL, 64, 2 * SMALL + 128, SMALL, 5 * SMALL - 64)]
    with mock.patch.object(module, "PART", SMALL), slow_disk(draw):
        files = module.StateFiles(folder, blocks, DTYPES)
        assert sum(map(len, files.parts.values())) == len(files.order) == 3 + 1 + 3 + 1 + 5
        truth = {
            (id(part), kind): torch.zeros(part.size, dtype=dtype)
            for part in files.order
            for kind, dtype in DTYPES.items()
        }
        for count in range(24):
            kinds = tuple(DTYPES) if draw.random() < 0.6 else (draw.choice(list(DTYPES)),)
            fill, change = draw.choice([(False, True), (False, True), (False, False), (True, True)])
            first = draw.choice([0, 0, draw.randrange(len(files.order))])
            if draw.random() < 0.3:
                files.expect(kinds)
            for part in files.order[first : draw.choice([None, None, first + 2])]:
                for kind, tensor in files.use(part, kinds, read=not fill).items():
                    want = truth[id(part), kind] * (not fill)
                    assert tensor.dtype == DTYPES[kind] and torch.equal(tensor, want), count
                    if change:
                        tensor.copy_(torch.arange(part.size) % 251 + count)
                        truth[id(part), kind] = tensor.clone()
                if change:
                    files.write(part)
        assert os.listdir(folder) == []


def slow_disk(draw: random.Random) -> mock._patch:
    """Half of all writes take a while, as do some reads."""

    def slowly(move, share):
        def moved(*args):
            if draw.random() < share:
                time.sleep(0.002)
            return move(*args)

        return moved

    return mock.patch.multiple(os, pwritev=slowly(os.pwritev, 0.5), preadv=slowly(os.preadv, 0.2))


@pytest.mark.parametrize("lacking", ["nothing", "O_DIRECT", "O_TMPFILE"])
def test_what_is_read_is_what_was_written_last(tmp_path, lacking):
    def without(call, flag, code):
        def called(first, second, *args):
            if (args[0] if call is nvme.fcntl.fcntl and args else second) & flag == flag:
                raise OSError(code, os.strerror(code))
            return call(first, second, *args)

        return called

    lacks = {
        "nothing": mock.patch.object(nvme, "PART", SMALL),
        "O_DIRECT": mock.patch.object(
            nvme.fcntl, "fcntl", without(nvme.fcntl.fcntl, os.O_DIRECT, errno.EINVAL)
        ),
        "O_TMPFILE": mock.patch.object(
            os, "open", without(os.open, os.O_TMPFILE, errno.EOPNOTSUPP)
        ),
    }
    with lacks[lacking]:
        use_at_random(nvme, tmp_path)


# ---------------------------------------------------------------- faults


def start(folder: str, fault: str = "") -> str:
    """The error of a rank when the files cannot be made; on the last rank alone there is the
    fault.
    """

    def full(path):
        return os.statvfs_result((4096, 4096, 10**6, 10, 5, 0, 0, 0, 0, 255))

    def fails(code: int) -> mock.Mock:
        return mock.Mock(side_effect=OSError(code, os.strerror(code)))

    broken = {
        "": mock.patch.object(nvme, "PART", SMALL),
        "full": mock.patch.object(os, "statvfs", full),
        "filled later": mock.patch.object(os, "posix_fallocate", fails(errno.ENOSPC)),
        "read-only": mock.patch.object(os, "open", fails(errno.EROFS)),
    }
    with broken[fault if dist.get_rank() == 1 else ""], pytest.raises(ValueError) as caught:
        run_case((*FLAGS, "--optimizer-nvme-offload", folder))
    return str(caught.value)


NEEDS = "No space left on device; this rank needs 442,368 bytes there and "


@pytest.mark.parametrize(
    "fault, words",
    [
        ("full", f"{NEEDS}20,480 are free; free space"),
        ("filled later", NEEDS),
        ("read-only", "Read-only file system; give a folder on a local disk of every node that"),
        ("", "No such file or directory; give a folder on a local disk of every node"),
    ],
)
def test_a_folder_that_will_not_do_ends_all_ranks_before_training(
    gloo_world, tmp_path, fault, words
):
    folder = str(tmp_path) if fault else str(tmp_path / "missing")
    cannot = f"--optimizer-nvme-offload {folder}: cannot hold the optimizer's state: {words}"
    for error in gloo_world(2).run(start, folder, fault):
        assert error.startswith(f"rank 1: {cannot}" if fault else cannot)


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
@pytest.mark.default("pwritev")
def test_a_disk_that_fails_in_a_step_leaves_the_last_checkpoint(tmp_path, one_thread, call):
    disk, save, real = tmp_path / "disk", tmp_path / "save", getattr(os, call)
    disk.mkdir()
    words = f"--train-iters 4 --save-interval 2 --optimizer-nvme-offload {disk}"
    flags = (*FLAGS, *words.split())

    def failing(file, buffers, offset):
        on_disk = os.readlink(f"/proc/self/fd/{file}").startswith(str(disk))
        if on_disk and (save / "iter_0000002").exists():
            if call == "preadv":
                return 0  # as at the end of a file that was cut off
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(file, buffers, offset)

    with mock.patch.object(nvme, "PART", SMALL):
        message = f"^--optimizer-nvme-offload {disk}: .* written or read back: Input/output error"
        with mock.patch.object(os, call, failing), pytest.raises(nvme.StorageError, match=message):
            run_case((*flags, "--save", str(save)))
        with open_checkpoint(save) as checkpoint:
            assert checkpoint.iteration == 2
            checkpoint.verify()
        run_case((*flags, "--save", str(save), "--load", str(save)))
        run_case((*flags, "--save", str(tmp_path / "never failed")))
    assert same_checkpoints(save, tmp_path / "never failed", 4)


def test_a_save_reads_one_part_at_a_time(tmp_path, one_thread, monkeypatch):
    """Of the one ring, also on a rank whose several cores would write several shards at a time."""
    monkeypatch.setattr(nvme, "PART", SMALL)
    monkeypatch.setattr(writer, "MIN_SHARD_BYTES", 1000)
    disk, flags = tmp_path / "disk", (*FLAGS, "--train-iters", "2")
    disk.mkdir()
    with mock.patch.object(torch, "get_num_threads", lambda: 4), slow_disk(random.Random(0)):
        in_files = "--optimizer-nvme-offload", str(disk), "--save", str(tmp_path / "files")
        run_case((*flags, *in_files))
    run_case((*flags, "--save", str(tmp_path / "memory")))
    assert same_checkpoints(tmp_path / "files", tmp_path / "memory", 2)


def test_what_was_lost_is_not_read_again(tmp_path):
    """A failed write may be reported in a save, which a run survives; it must not go on with what
    the file held before.
    """
    blocks = [Held(2 * SMALL)]
    with mock.patch.object(nvme, "PART", SMALL):
        files = nvme.StateFiles(tmp_path, blocks, DTYPES)
        broken = mock.Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO)))
        with mock.patch.object(os, "pwritev", broken):
            files.use(files.order[0], tuple(DTYPES))
            files.write(files.order[0])
            files.wait(files.ring[1])  # of the other part
            with pytest.raises(nvme.StorageError):
                files.wait(files.ring[0])
        for _ in range(2):
            with pytest.raises(nvme.StorageError, match="Input/output error"):
                files.use(files.order[0], ("master",))
