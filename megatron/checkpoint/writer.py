"""Write a checkpoint so that it appears whole or not at all, and never in the place of another one (docs/checkpoint.md).

Shards, digest tables and the manifest are written and fsynced in `.tmp-iter-N-<attempt>/`, which one rename turns into
`iter_000000N/`. Every rank writes its own shard; the first adds the manifest and renames when it has word from all. Bytes stream from the
tensors to the file in chunks of 1 MiB; no second copy of a tensor is made.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.checkpoint import manifest as m
from megatron.checkpoint.manifest import CheckpointError
from megatron.checkpoint.ranks import ONE, Ranks
from megatron.checkpoint.reader import Checkpoint

if TYPE_CHECKING:
    from megatron.model.layout import Box

FOLDER_MODE, FILE_MODE = 0o750, 0o640  # the umask may take more away
PIECE = 16 << 20  # bytes copied at a time from tensors that lie on a device or are strided
BUFFERS = 1024  # most buffers that one writev takes


def save_checkpoint(
    root: str | Path, iteration: int, tensors: Iterable[tuple[Box, Tensor]], state: dict[str, Any], say: Callable[[str], None] = print,
    ranks: Ranks = ONE,
) -> Path:
    """Write iteration `iteration` under `root` and return its folder. All `ranks` call this together; each that owns boxes writes one shard.

    `tensors`: (box, local tensor) pairs that this rank owns; the boxes of all ranks cover each logical tensor exactly once. `state`: JSON,
    the same on every rank. `root` lies on a file system that all ranks share.
    An iteration that exists already is never overwritten: when it is whole and bit-equal to this one it is kept and returned, when it
    is whole and differs CheckpointError is raised, when it is damaged or foreign it is moved aside, and the first rank's `say` is told.
    Raises CheckpointError when anything prevents the save on any rank, on several the same ValueError on each; older checkpoints are
    untouched by that.
    """
    root, pairs = Path(root), [(box, tensor) for box, tensor in tensors if math.prod(box.extent)]
    with _Attempt(root, iteration, ranks, partial(_not_saved, root, iteration)) as attempt:
        told = attempt.agree(lambda: (bool(pairs), m.state_digests({"iteration": iteration, **state})))
        for rank, (_, digests) in enumerate(told):
            differing = [key for key in {**told[0][1], **digests} if digests.get(key) != told[0][1].get(key)]
            if differing:
                raise CheckpointError(f"{root}: the checkpoint of iteration {iteration} was not saved: the state of rank {rank} differs from that of "
                                      f"rank 0 in {', '.join(differing)}: they no longer carry out the same run. Go on from an older checkpoint.")
        owners = [rank for rank, (owns, _) in enumerate(told) if owns]
        assert owners, "a checkpoint without tensors"

        def write() -> dict[str, Any] | None:
            return write_shard(attempt.folder, owners.index(ranks.world.rank), len(owners), iteration, pairs) if pairs else None

        shards = [record for record in attempt.agree(write) if record is not None]
        attempt.agree(lambda: commit(root, attempt.folder, iteration, attempt.name, shards, state, say).name if ranks.first else None)
    return root / m.iteration_folder(iteration)


def try_folder(root: str | Path, ranks: Ranks = ONE) -> None:
    """Write a byte from every rank where checkpoints will go: a full disk is found before there is something to save.

    Raises CheckpointError, on several ranks the same ValueError on each, when one cannot write there or does not see what the first made.
    """
    root = Path(root)

    def write() -> None:
        with _new_file(attempt.folder / f"rank-{ranks.world.rank}") as file:
            _write_all(file, [memoryview(b"x")])

    with _Attempt(root, 0, ranks, partial(_not_writable, root)) as attempt:
        attempt.agree(write)


class _Attempt:
    """The temporary `folder` of one save: made and in the end removed by the first rank, held by all while they live."""

    def __init__(self, root: Path, iteration: int, ranks: Ranks, explain: Callable[[Exception], str]) -> None:
        self.root, self.ranks, self.explain, self.lock = root, ranks, explain, -1
        self._choose(iteration, secrets.token_hex(8))

    def _choose(self, iteration: int, name: str) -> None:
        self.iteration, self.name, self.folder = iteration, name, self.root / f".tmp-iter-{iteration}-{name}"

    def agree(self, part: Callable[[], Any]) -> list[Any]:
        """As Ranks.agree, with errors of the file system, of memory and of the device in words."""

        def explained() -> Any:
            try:
                return part()
            except (OSError, MemoryError, RuntimeError) as error:
                raise CheckpointError(self.explain(error)) from error

        return self.ranks.agree(explained)

    def __enter__(self) -> _Attempt:
        try:
            self._choose(self.iteration, self.agree(self._make)[0])
            self.agree(self._join)
        except BaseException as error:
            self.__exit__(error)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.ranks.first:
            shutil.rmtree(self.folder, ignore_errors=True)  # gone already when it was committed
        if self.lock >= 0:
            os.close(self.lock)

    def _make(self) -> str | None:
        if not self.ranks.first:
            return None
        _make_root(self.root)
        _clean(self.root, self.name)
        self.folder.mkdir(mode=FOLDER_MODE)
        self.lock = _hold(self.folder)
        return self.name

    def _join(self) -> None:
        if self.ranks.first:
            return
        try:
            self.lock = _hold(self.folder)
        except FileNotFoundError as error:
            raise CheckpointError(f"{self.root}: the folder {self.folder.name} that rank 0 made there cannot be seen from this rank: "
                                  "is --save on a file system that all nodes share?") from error


def write_shard(folder: Path, index: int, shards: int, iteration: int, pairs: list[tuple[Box, Tensor]]) -> dict[str, Any]:
    """Write shard `index` of `shards` and its digest table into `folder`, durably; return the shard's entry in the manifest."""
    pairs = sorted(pairs, key=lambda pair: -pair[1].element_size())  # stable; keeps every tensor aligned to its item size
    shapes = json.dumps({box.name: list(box.shape) for box, _ in pairs}, separators=(",", ":"))
    metadata = {"iteration": str(iteration), "shard": str(index), "shards": str(shards), "shapes": shapes}
    header = m.encode_header([(m.box_key(box.name, box.offset), tensor.dtype, tuple(box.extent)) for box, tensor in pairs], metadata)
    with _new_file(folder / m.shard_file(index)) as file:
        _write_all(file, [memoryview(header)])
        stream = _ChunkStream(file)
        for box, tensor in pairs:
            for piece in _host_pieces(box.view(tensor.detach())):
                stream.append(memoryview(piece.reshape(-1).view(torch.uint8).numpy()))
        stream.finish()
        size = len(header) + stream.size
    table = m.DigestTable(m.CHUNK, len(header), size, m.chunk_digest(header), tuple(stream.digests)).encode()
    with _new_file(folder / m.table_file(index)) as file:
        _write_all(file, [memoryview(table)])
    if index > 0:
        _sync_folder(folder)  # the commit syncs it for the first rank, on whose node this one's names may not be known yet
    return {"file": m.shard_file(index), "bytes": size, "table_digest": m.table_digest(table)}


def commit(
    root: Path, temporary: Path, iteration: int, attempt: str, shards: list[dict[str, Any]], state: dict[str, Any],
    say: Callable[[str], None],
) -> Path:
    """Add the manifest to `temporary`, whose shards are durable, and make it the checkpoint of `iteration`; return its folder."""
    content = {
        "format": m.FORMAT, "version": m.VERSION, "iteration": iteration, "attempt": attempt,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"), "shards": shards, "state": state,
    }
    with _new_file(temporary / m.MANIFEST) as file:
        _write_all(file, [memoryview(m.encode_manifest(content))])
    _sync_folder(temporary)
    Checkpoint(temporary).close()  # what could not be opened later is not committed now
    target = root / m.iteration_folder(iteration)
    try:
        os.rename(temporary, target)  # fails when the target exists and is not empty
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        fault = _fault_of(target, shards, state)
        if fault is None:
            return target
        aside = root / f"{target.name}.damaged-{attempt}"
        os.rename(target, aside)
        os.rename(temporary, target)
        say(f"{fault}. It was moved to {aside.name}, and a new checkpoint of iteration {iteration} is in its place")
    _sync_folder(root)
    _write_tracker(root, iteration, attempt)
    return target


def _fault_of(target: Path, shards: list[dict[str, Any]], state: dict[str, Any]) -> str | None:
    """What is damaged in an existing checkpoint; None when it is whole and equals what was to be saved.

    Raises CheckpointError when it is whole and differs.
    """
    try:
        with Checkpoint(target) as old:
            old.verify()
    except CheckpointError as error:
        return str(error)
    theirs, ours = ({key: json.dumps(value) for key, value in each.items()} for each in (old.state, json.loads(json.dumps(state))))
    what = "tensors" if len(old.shards) == len(shards) else "how tensors are cut into shards"
    differing = [] if old.manifest["shards"] == shards else [what]
    differing += [key for key in sorted({*theirs, *ours}) if theirs.get(key) != ours.get(key)]
    if differing:
        raise CheckpointError(
            f"{target} exists already, is whole, and differs from this run in: {', '.join(differing)}. It was kept and nothing was saved. "
            "It comes from another run or from an earlier pass over this iteration: give another --save folder, or move it away."
        )
    return None


def _write_tracker(root: Path, iteration: int, attempt: str) -> None:
    temporary = root / f".tmp-iter-{iteration}-{attempt}.txt"
    with suppress(OSError):  # only a hint: without it the save has succeeded all the same
        with _new_file(temporary) as file:
            _write_all(file, [memoryview(f"{iteration}\n".encode())])
        os.rename(temporary, root / m.TRACKER)
        _sync_folder(root)


class _ChunkStream:
    """Writes a stream of buffers, without copying them, and digests every m.CHUNK bytes of it.

    Half a chunk at a time is written, then digested: the write has left it in the cache.
    """

    def __init__(self, file: int) -> None:
        self.file, self.digests, self.size = file, [], 0
        self.parts: list[memoryview] = []  # of the half chunk that is not full yet
        self.room = self.half = m.CHUNK // 2
        self.hasher = m.chunk_hasher()

    def append(self, data: memoryview) -> None:
        while len(data):
            part, data = data[: self.room], data[self.room :]
            self.parts.append(part)
            self.room -= len(part)
            if self.room == 0:
                self._write()

    def _write(self) -> None:
        self.size += _write_all(self.file, self.parts)
        for part in self.parts:
            self.hasher.update(part)
        self.parts, self.room = [], self.half
        if self.size % m.CHUNK == 0:
            self.digests.append(self.hasher.digest())
            self.hasher.reset()

    def finish(self) -> None:
        """Write what has come since the last full half."""
        if self.parts:
            self._write()
        if self.size % m.CHUNK:
            self.digests.append(self.hasher.digest())


def _host_pieces(view: Tensor) -> Iterator[Tensor]:
    """Contiguous CPU tensors that hold `view`'s elements in order: the memory itself where possible, else copies of at most PIECE bytes."""
    size = view.numel() * view.element_size()
    if view.is_contiguous() and (view.device.type == "cpu" or size <= PIECE):
        yield view.cpu()
    elif view[0].numel() * view.element_size() > PIECE:
        for part in view:
            yield from _host_pieces(part)
    else:
        step = max(1, PIECE * len(view) // size)
        for start in range(0, len(view), step):
            yield view[start : start + step].contiguous().cpu()


# ---- files ------------------------------------------------------------------------------------------------------------


@contextmanager
def _new_file(path: Path) -> Iterator[int]:
    """A descriptor of a file that did not exist before; durable when the block ends without an error."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    try:
        yield file
        os.fsync(file)
    finally:
        os.close(file)


def _write_all(file: int, buffers: list[memoryview]) -> int:
    """Write them one after the other; returns their bytes. A short write is gone on with, or raises what is wrong."""
    total, left = sum(map(len, buffers)), [data for data in buffers if len(data)]
    while left:
        written = os.writev(file, left[:BUFFERS])
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left:
            left[0] = left[0][written:]
    return total


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _make_root(root: Path) -> None:
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
        _sync_folder(folder.parent)


def _hold(folder: Path) -> int:
    """Mark `folder` as in use while this process lives: a shared lock, which the kernel drops with the process."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        pass  # a file system without locks: others may clear the folder away, which then ends this save with an error
    return descriptor


def _is_held(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _clean(root: Path, attempt: str) -> None:
    """Remove what attempts that are no longer alive have left.

    Renamed before it is deleted: a writer that lives after all (on another node, where locks do not reach) either renames first
    and has a whole checkpoint, or finds its folder gone and fails; a half-deleted folder can never become a checkpoint.
    """
    for entry in list(os.scandir(root)):
        path = Path(entry.path)
        if re.fullmatch(r"\.tmp-iter-\d+-[0-9a-f]{16}", entry.name) and not _is_held(path):
            trash = root / f".trash-{entry.name.removeprefix('.tmp-')}-{attempt}"
            try:
                os.rename(path, trash)
            except FileNotFoundError:
                continue  # it was committed, or cleared away by another
            shutil.rmtree(trash, ignore_errors=True)
        elif re.fullmatch(r"\.trash-iter-\d+-[0-9a-f-]+", entry.name):
            shutil.rmtree(path, ignore_errors=True)
        elif re.fullmatch(r"\.tmp-iter-\d+-[0-9a-f]{16}\.txt", entry.name):
            path.unlink(missing_ok=True)


def _not_saved(root: Path, iteration: int, error: Exception) -> str:
    text = f"{root}: the checkpoint of iteration {iteration} was not saved: {_words(error)} ({getattr(error, 'filename', None) or root})."
    number = getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        text += " Free space, raise the quota, or give another --save folder."
    elif number in (errno.EACCES, errno.EPERM, errno.EROFS):
        text += " Give a --save folder that this user may write to."
    elif number == errno.ENOENT:
        text += " Its temporary folder vanished: another run is saving to this folder; give each its own --save."
    with suppress(CheckpointError):
        kept = m.list_iterations(root)
        text += f" Older checkpoints are untouched (newest: iteration {kept[0]})." if kept else ""
    return text


def _not_writable(root: Path, error: Exception) -> str:
    return f"--save {root}: cannot be written to: {_words(error)}; make it writable and free space on its disk, or choose another folder"


def _words(error: Exception) -> str:
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
