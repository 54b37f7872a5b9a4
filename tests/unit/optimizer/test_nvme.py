"""The optimizer's state in files: the same bits as in memory, through a ring that bounds memory and
never hands out what is not there yet.
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
from parity import worker
from parity.layouts import BASE
from parity.worker import run_case
from unit.optimizer.test_offload import RUNS

from megatron.checkpoint.reader import open_checkpoint
from megatron.optimizer import nvme

SMALL = 4096  # elements of a part: layers of these models have several
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


# ---------------------------------------------------------------- whole runs


def in_files(flags: tuple[str, ...], folder: str):
    """A run with the optimizer's state in files: its outcome, what each rank kept in memory of it,
    and what its folder held in the end.
    """
    kept, check = [], worker.published_weights_are_the_masters

    def look(run):
        check(run)
        blocks = [block for block in run.optimizer.blocks if block.on_host]
        assert all(block.in_files and block.master is None for block in blocks)
        files = run.optimizer.files
        kept.append(
            (
                sum(len(memory) for slot in files.ring for memory in slot.memory.values()),
                len(files.order) - len(files.parts),
            )
        )

    with (
        mock.patch.object(nvme, "PART", SMALL),
        mock.patch.object(worker, "published_weights_are_the_masters", look),
    ):
        outcome = run_case((*flags, "--optimizer-nvme-offload", folder))
    return outcome, *kept[0], os.listdir(folder)


def same_bits(one, other) -> None:
    """Logs and weights, but for the last digits of a norm that is summed part by part."""
    assert list(map(repr, one.steps)) == list(map(repr, other.steps))
    assert len(one.metrics) == len(other.metrics)
    for row, same in zip(one.metrics, other.metrics):
        assert row.get("params-norm", 0) == pytest.approx(same.get("params-norm", 0), rel=1e-13)
        assert repr(row | {"params-norm": 0}) == repr(same | {"params-norm": 0})
    ours, theirs = whole(one.weights), whole(other.weights)
    assert ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )


def whole(pieces) -> dict[str, torch.Tensor]:
    """Tensors put together from one rank's pieces; what it does not hold is -9."""
    found: dict[str, torch.Tensor] = {}
    for piece in pieces:
        place = tuple(slice(low, low + size) for low, size in zip(piece.offset, piece.values.shape))
        found.setdefault(piece.name, torch.full(piece.shape, -9.0, dtype=piece.values.dtype))[
            place
        ] = piece.values
    return found


@pytest.mark.parametrize(
    "name, share",
    [
        ("fp32", "1"),
        ("fp16-zero2", "0.6"),
        ("bf16-zero3-kept", "1"),
        ("bf16-zero2-pipeline", "0.6"),
    ],
)
def test_a_step_through_files_has_the_same_bits(gloo_world, tmp_path, name, share):
    flags = (*BASE, "--train-iters", "8", "--micro-batch-size", "2", *RUNS[name].split())
    world = gloo_world(4 if "pipeline" in name else 2)
    plain = world.run(run_case, flags)
    found = world.run(in_files, (*flags, "--optimizer-offload-fraction", share), str(tmp_path))
    for one, (other, ring, beyond, left) in zip(plain, found):
        same_bits(one, other)
        assert ring == nvme.SLOTS * SMALL * 12 and left == []
    assert max(beyond for _, _, beyond, _ in found) > 0  # some block has several parts
    assert any(step.skipped for step in plain[0].steps) == name.startswith("fp16")


def same_checkpoints(one: Path, other: Path, iteration: int) -> bool:
    with open_checkpoint(one, iteration) as a, open_checkpoint(other, iteration) as b:
        assert sorted(a.names) == sorted(b.names) and len(a.names) % 3 == 0
        return all(torch.equal(a[name], b[name]) for name in a.names)


@pytest.mark.parametrize("more", ["--zero-stage 2 --bf16", "--zero-stage 0 --async-save"])
def test_checkpoints_are_those_of_a_run_in_memory(gloo_world, tmp_path, more):
    """Saved from files and from memory, loaded into either, gone on with: always the same bits."""
    flags, disk = (
        (*FLAGS, "--train-iters", "6", "--save-interval", "3", *more.split()),
        str(tmp_path / "disk"),
    )
    folders = memory, files, files_again, memory_again = [
        tmp_path / name for name in ("memory", "files", "files again", "memory again")
    ]
    os.mkdir(disk)
    world = gloo_world(2)
    world.run(run_case, (*flags, "--save", str(memory)))
    world.run(in_files, (*flags, "--save", str(files)), disk)
    assert same_checkpoints(memory, files, 3)
    world.run(
        in_files,
        (*flags, "--load", str(memory), "--ckpt-step", "3", "--save", str(files_again)),
        disk,
    )
    world.run(
        run_case, (*flags, "--load", str(files), "--ckpt-step", "3", "--save", str(memory_again))
    )
    assert all(same_checkpoints(memory, folder, 6) for folder in folders[1:])


# ---------------------------------------------------------------- memory, faults


def start(folder: str, fault: str = "") -> str:
    """The error of a rank when the files cannot be made; on the last rank alone there is the
    fault.
    """

    def full(path):
        return os.statvfs_result((4096, 4096, 10**6, 10, 5, 0, 0, 0, 0, 255))

    def fails(code):
        def call(*args, **kwargs):
            raise OSError(code, os.strerror(code))

        return call

    broken = {
        "": mock.patch.object(nvme, "PART", SMALL),
        "full": mock.patch.object(os, "statvfs", full),
        "filled later": mock.patch.object(os, "posix_fallocate", fails(errno.ENOSPC)),
        "read-only": mock.patch.object(os, "open", fails(errno.EROFS)),
    }
    with broken[fault if dist.get_rank() == 1 else ""], pytest.raises(ValueError) as caught:
        run_case((*FLAGS, "--optimizer-nvme-offload", folder))
    return str(caught.value)


@pytest.mark.parametrize(
    "fault, words",
    [
        (
            "full",
            (
                "No space left on device; this rank needs 442,368 bytes there and 20,480 are "
                "free; free space"
            ),
        ),
        ("filled later", "No space left on device; this rank needs 442,368 bytes there and "),
        (
            "read-only",
            (
                "Read-only file system; give a folder on a local disk of every node that this "
                "user may write to"
            ),
        ),
        ("", "No such file or directory; give a folder on a local disk of every node"),
    ],
)
def test_a_folder_that_will_not_do_ends_all_ranks_before_training(
    gloo_world, tmp_path, fault, words
):
    folder = str(tmp_path) if fault else str(tmp_path / "missing")
    for error in gloo_world(2).run(start, folder, fault):
        assert error.startswith(
            "rank 1: " * bool(fault)
            + f"--optimizer-nvme-offload {folder}: cannot hold the optimizer's state: {words}"
        )


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
@pytest.mark.default("pwritev")
def test_a_disk_that_fails_in_a_step_leaves_the_last_checkpoint(tmp_path, one_thread, call):
    (disk, save), real = (tmp_path / "disk", tmp_path / "save"), getattr(os, call)
    disk.mkdir()
    flags = (
        *FLAGS,
        *"--train-iters 4 --save-interval 2".split(),
        "--optimizer-nvme-offload",
        str(disk),
    )

    def failing(file, buffers, offset):
        if (save / "iter_0000002").exists() and os.readlink(f"/proc/self/fd/{file}").startswith(
            str(disk)
        ):
            if call == "preadv":
                return 0  # as at the end of a file that was cut off
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(file, buffers, offset)

    with mock.patch.object(nvme, "PART", SMALL):
        with (
            mock.patch.object(os, call, failing),
            pytest.raises(
                nvme.StorageError, match="written or read back: Input/output error"
            ) as caught,
        ):
            run_case((*flags, "--save", str(save)))
        assert str(caught.value).startswith(
            f"--optimizer-nvme-offload {disk}: "
        ) and "resume from the last one with --load" in str(caught.value)
        with open_checkpoint(save) as checkpoint:
            assert checkpoint.iteration == 2
            checkpoint.verify()
        run_case((*flags, "--save", str(save), "--load", str(save)))
        run_case((*flags, "--save", str(tmp_path / "never failed")))
    assert same_checkpoints(save, tmp_path / "never failed", 4)


def test_what_was_lost_is_not_read_again(tmp_path):
    """A failed write may be reported in a save, which a run survives; it must not go on with what
    the file held before.
    """
    blocks = [Held(2 * SMALL)]
    with mock.patch.object(nvme, "PART", SMALL):
        files = nvme.StateFiles(tmp_path, blocks, DTYPES)
        with mock.patch.object(
            os,
            "pwritev",
            lambda *args: (_ for _ in ()).throw(OSError(errno.EIO, os.strerror(errno.EIO))),
        ):
            files.use(files.order[0], tuple(DTYPES))
            files.write(files.order[0])
            files.wait(files.ring[1])  # of the other part
            with pytest.raises(nvme.StorageError):
                files.wait(files.ring[0])
        for _ in range(2):
            with pytest.raises(nvme.StorageError, match="Input/output error"):
                files.use(files.order[0], ("master",))
