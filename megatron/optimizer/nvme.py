"""Master weights and moments in files on a local disk, used through a small ring of buffers
(ZeRO-Infinity, Rajbhandari et al. 2021).

A rank has a file for each kind of tensor, without a name, so that nothing of it outlives the
process: checkpoints hold the truth. What a block keeps there is used in parts of PART elements:
while one is in use, the next ones are read and those before it are written, by threads and around
the page cache where the file system allows it (O_DIRECT). Host memory is that of the ring, whatever
the model's size.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megatron.config.errors import UserError
from megatron.model.spec import Box
from megatron.parallel.blocks import Block

# what O_DIRECT wants addresses, offsets and sizes to be multiples of, in bytes; blocks begin at
# multiples of this number of elements
PAGE = 4096
PART = 1 << 21  # elements: 8 MiB in fp32
SLOTS = 4  # parts that are in memory: the one in use, those on their way in, those on their way out

Use = Literal["read", "change", "fill"]  # of a state; fill: the old values are of no use
Held = tuple[slice, dict[str, Tensor]]  # a part of what a rank updates, and its tensors
Move = Callable[[int, list[Any], int], int]  # preadv or pwritev


class StorageError(UserError):
    """The disk of --optimizer-nvme-offload does not do what is asked of it."""


class StatePart(NamedTuple):
    """Elements `slice` of what this rank updates of a block, from element `position` of each file
    on. `number`: its place in the order in which steps use parts.
    """

    block: Block
    slice: slice
    position: int
    number: int

    @property
    def size(self) -> int:
        return self.slice.stop - self.slice.start


class Slot:
    """Room for a part: page-aligned memory for each kind of tensor, and a thread that reads and
    writes there in the order in which it was asked to.
    """

    def __init__(self, memory: dict[str, mmap.mmap]):
        self.memory = memory
        self.thread = ThreadPoolExecutor(1, "optimizer-files")
        self.work: list[Future] = []
        # the number of the part that is here when all work is done, and its kinds
        self.content: tuple[int, tuple[str, ...]] | None = None


class StateFiles:
    """What a rank keeps of some blocks, by kind: tensors of `dtypes`, zero at first. One part is in
    use at a time.

    A part always passes through the same slot of the ring, whose thread does one thing after the
    other: what is read of a part is what was written last. Raises StorageError where the folder
    cannot hold it; later, when something cannot be read or written, and from then on always: it is
    lost.
    """

    def __init__(self, folder: str | Path, blocks: Sequence[Block], dtypes: dict[str, torch.dtype]):
        self.folder, self.dtypes = Path(folder), dtypes
        self.fault: StorageError | None = None
        self.parts: dict[Block, list[StatePart]] = {block: [] for block in blocks}
        self.order: list[StatePart] = []
        lengths = [block.own[1] - block.own[0] for block in blocks]
        size = 0
        for block, length in zip(blocks, lengths):
            # Parts lie in the files in the order in which steps use them, so reads are sequential.
            for at in range(0, length, PART):
                elements = slice(at, min(at + PART, length))
                part = StatePart(block, elements, size + at, len(self.order))
                self.parts[block].append(part)
                self.order.append(part)
            size += in_pages(length)
        self.files = self._make(size)
        room = part_room(lengths)
        # The ring is all the host memory that this takes: one part in use, the others on their way.
        self.ring = [
            Slot({kind: _aligned(room * dtype.itemsize) for kind, dtype in dtypes.items()})
            for _ in range(SLOTS)
        ]

    def __del__(self):
        for file, _ in getattr(self, "files", {}).values():
            os.close(file)

    def pieces(self, block: Block, kinds: Sequence[str], use: Use) -> Iterator[Held]:
        """The parts of a block one after the other, with their tensors of these kinds."""
        for part in self.parts[block]:
            yield part.slice, self.use(part, tuple(kinds), read=use != "fill")
            if use != "read":
                self.write(part)

    def boxes(self, block: Block, kind: str) -> Iterator[tuple[Box, FileTensor]]:
        """The parts of logical tensors in a block's tensor of this kind."""
        for part in self.parts[block]:
            # The views of a part, without its memory: it is read when a checkpoint asks for it.
            like = torch.empty(part.size, dtype=self.dtypes[kind], device="meta")
            for box, view in block.boxes(like, part.slice):
                yield box, FileTensor(self, part, kind, view)

    def use(
        self, part: StatePart, kinds: tuple[str, ...], *, read: bool = True
    ) -> dict[str, Tensor]:
        """The part's tensors of these kinds, or zeros to be filled in; the caller's until the next
        use. Those that follow in `order` are on their way when it returns: in this order there is
        no waiting but for the disk.
        """
        slot = self.ring[part.number % SLOTS]
        if read:
            self.expect(kinds, part.number)
        self.wait(slot)
        slot.content = part.number, kinds
        found = {
            kind: torch.frombuffer(slot.memory[kind], dtype=self.dtypes[kind], count=part.size)
            for kind in kinds
        }
        return found if read else {kind: tensor.zero_() for kind, tensor in found.items()}

    def write(self, part: StatePart) -> None:
        """Start writing the part in use to the files."""
        slot = self.ring[part.number % SLOTS]
        _, kinds = slot.content
        slot.work.append(slot.thread.submit(self._move, slot, os.pwritev, part, kinds))

    def expect(self, kinds: tuple[str, ...], first: int = 0) -> None:
        """Parts will be used in order, from number `first` on: read as many as have a slot."""
        for part in self.order[first : first + SLOTS]:
            slot = self.ring[part.number % SLOTS]
            # What has been read ahead for another order is of no use.
            if slot.content != (part.number, kinds):
                slot.content = part.number, kinds
                slot.work.append(slot.thread.submit(self._move, slot, os.preadv, part, kinds))

    # ---- the disk

    def _make(self, size: int) -> dict[str, tuple[int, bool]]:
        """A file for each kind, its room reserved: (descriptor, whether it goes around the page
        cache).
        """
        needed, free = {kind: size * dtype.itemsize for kind, dtype in self.dtypes.items()}, None
        try:
            # Room is reserved before training, so that no step finds the disk full.
            disk = os.statvfs(self.folder)
            free = disk.f_bavail * disk.f_frsize
            if free < sum(needed.values()):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return {kind: new_file(self.folder, each) for kind, each in needed.items()}
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                fix = (
                    f"this rank needs {sum(needed.values()):,} bytes there and {free:,} are "
                    "free; free space, or give a folder on a larger disk"
                )
            else:
                fix = "give a folder on a local disk of every node that this user may write to"
            raise StorageError(
                f"--optimizer-nvme-offload {self.folder}: cannot hold the optimizer's state: "
                f"{error.strerror}; {fix}"
            ) from error

    def _move(self, slot: Slot, move: Move, part: StatePart, kinds: tuple[str, ...]) -> None:
        for kind in kinds:
            (file, direct), item = self.files[kind], self.dtypes[kind].itemsize
            # Whole pages: O_DIRECT takes nothing else. The padding is never used.
            data = memoryview(slot.memory[kind])[: in_pages(part.size) * item]
            start = part.position * item
            _all(move, file, data, start)
            if not direct:
                # Else the page cache would hold a copy of all that the ring has passed through.
                os.posix_fadvise(file, start, len(data), os.POSIX_FADV_DONTNEED)

    def wait(self, slot: Slot) -> None:
        """Wait until all reads and writes of a slot are done."""
        work, slot.work = slot.work, []
        for each in work:
            try:
                each.result()
            except OSError as error:
                self.fault = StorageError(
                    f"--optimizer-nvme-offload {self.folder}: the optimizer's state cannot "
                    f"be written or read back: {error.strerror}; the run cannot "
                    "continue. Checkpoints are untouched: check the disk, then resume from "
                    "the last one with --load"
                )
        if self.fault is not None:
            raise self.fault


@dataclass(frozen=True)
class FileTensor:
    """A tensor in files: of a part's tensor of one kind the view that `like` (on the meta device)
    is of its whole. As far as a checkpoint goes it is a tensor, which is read when it is
    detached.
    """

    files: StateFiles
    part: StatePart
    kind: str
    like: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.like.dtype

    @property
    def shape(self) -> torch.Size:
        return self.like.shape

    def element_size(self) -> int:
        return self.like.element_size()

    def __getitem__(self, rows: slice) -> FileTensor:
        return replace(self, like=self.like[rows])

    def detach(self) -> Tensor:
        """A copy in memory. In the order in which an optimizer names them the next ones are on
        their way.
        """
        (tensor,) = self.files.use(self.part, (self.kind,)).values()
        return tensor.as_strided(
            self.like.size(), self.like.stride(), self.like.storage_offset()
        ).clone()


def in_pages(elements: int) -> int:
    """Elements that a number of elements takes up in a file."""
    return -(-elements // PAGE) * PAGE


def part_room(lengths: Sequence[int]) -> int:
    """Elements that a slot has for each kind, for blocks of which a rank keeps these lengths."""
    return min(PART, max(map(in_pages, lengths), default=0))


def new_file(folder: Path, size: int) -> tuple[int, bool]:
    """A file of zeros in `folder` that has no name, and whether it can go around the page cache.
    Raises OSError.
    """
    try:
        # Without a name the file's room is free as soon as the process ends, however it ends.
        file = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
            raise
        path = folder / f".optimizer-{secrets.token_hex(8)}"
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        os.unlink(path)
    try:
        os.posix_fallocate(file, 0, size)
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError as error:
        if error.errno == errno.EINVAL:  # a file system without O_DIRECT
            return file, False
        os.close(file)
        raise
    return file, True


def _aligned(size: int) -> mmap.mmap:
    """Memory on a page's boundary that no child process shares: with one the kernel could let a
    read go to the child's copy.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)
    return memory


def _all(move: Move, file: int, data: memoryview, start: int) -> None:
    """preadv or pwritev all of `data`. Raises OSError."""
    while len(data):
        # A read or write may be cut short by a signal.
        moved = move(file, [data], start)
        if moved == 0:
            raise OSError(errno.EIO, f"{os.strerror(errno.EIO)}: its file ends at byte {start}")
        data, start = data[moved:], start + moved
