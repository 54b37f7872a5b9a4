"""Nodes: which ranks see the same local folder; messages between them; and the run to which local checkpoints belong."""

from __future__ import annotations

import os
import re
import secrets
import socket
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from megatron.checkpoint.files import new_file, sync_folder, write_all
from megatron.checkpoint.manifest import CheckpointError
from megatron.checkpoint.ranks import Ranks
from megatron.dist.collectives import all_reduce, is_gloo
from megatron.dist.p2p import Receiving, Sending

PIECE = 8 << 20  # bytes of one message
FLYING = 2  # messages on their way at a time
RUN_FILE = "run_id"


@dataclass(frozen=True)
class Nodes:
    """The ranks of the job by the local folder that they see. `root`: --local-checkpoint-dir, the same text on every node."""

    root: Path
    ranks: Ranks
    members: tuple[tuple[int, ...], ...]  # ranks of each node, ascending; nodes in the order of their first ranks
    hosts: tuple[str, ...]  # name of each node's host

    @cached_property
    def index(self) -> int:
        """The node of this rank."""
        return next(i for i, ranks in enumerate(self.members) if self.ranks.world.rank in ranks)

    @property
    def first(self) -> bool:
        """Whether this rank does its node's part of what one rank does."""
        return self.members[self.index][0] == self.ranks.world.rank

    @property
    def place(self) -> int:
        """This rank's place among those of its node."""
        return self.members[self.index].index(self.ranks.world.rank)

    def rank(self, node: int, number: int) -> int:
        """The rank of a node that moves shard `number`: its ranks take turns."""
        return self.members[node][number % len(self.members[node])]


def find_nodes(root: str | Path, ranks: Ranks) -> Nodes:
    """Every rank makes a file in its folder `root` and looks whose it sees. Raises CheckpointError when the folder cannot be used on any rank."""
    root = Path(root)
    token = ranks.agree(lambda: secrets.token_hex(8))[0]

    def mark(rank: int) -> Path:
        return root / f".rank-{token}-{rank}"

    def leave() -> str:
        own_folder(root)
        with _explained(root), new_file(mark(ranks.world.rank)):
            pass
        return socket.gethostname()

    def look() -> list[int]:
        with _explained(root):
            names = set(os.listdir(root))
        return [rank for rank in range(ranks.world.size) if mark(rank).name in names]

    try:
        hosts = ranks.agree(leave)
        seen = ranks.agree(look)
    finally:
        with suppress(OSError):
            mark(ranks.world.rank).unlink(missing_ok=True)
    members = tuple(sorted({tuple(row) for row in seen}))
    if sorted(rank for row in members for rank in row) != list(range(ranks.world.size)):
        raise CheckpointError(f"--local-checkpoint-dir {root}: ranks do not agree on who sees the same folder ({members}): give a folder of the node "
                              "itself, such as one in /dev/shm")
    return Nodes(root, ranks, members, tuple(hosts[row[0]] for row in members))


class _explained:
    """Errors of the file system as CheckpointError."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise CheckpointError(f"--local-checkpoint-dir {self.root}: {error.strerror}: make it writable, or give another folder") from error


def own_folder(root: Path) -> None:
    """Make `root` (0700), or accept one that this user owns and no other may write to: names in places such as /dev/shm can be guessed."""
    with _explained(root):
        with suppress(FileExistsError):
            os.makedirs(root, mode=0o700)
        found = root.lstat()
    wrong = None
    if not stat.S_ISDIR(found.st_mode):
        wrong = "is not a folder (links are not followed)"
    elif found.st_uid != os.geteuid():
        wrong = f"belongs to another user (uid {found.st_uid})"
    elif found.st_mode & 0o022:
        wrong = "may be written to by other users"
    if wrong:
        raise CheckpointError(f"--local-checkpoint-dir {root}: {wrong}: give the name of a new folder in it or beside it, which is made with mode 0700")


# ---- messages ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parcel:
    """Shard `number`, `size` bytes, from a rank that has its file to one that gets it."""

    number: int
    size: int
    source: int
    to: int


def carry(parcels: Iterable[Parcel], ranks: Ranks, path: Callable[[int], Path], write: Callable[[int, Iterator[memoryview]], None]) -> Exception | None:
    """Carry parcels, one after the other as each rank sees it; all ranks call this with the same ones in the same order, so none waits in a circle.

    `path(number)` is the file to send, `write(number, pieces)` takes what arrives. What goes wrong here with a file is returned when all
    has been carried. Over NCCL pieces pass through the device (that way has never run).
    """
    fault: Exception | None = None
    me, device = ranks.world.rank, torch.device("cpu") if ranks.world.size == 1 or is_gloo(ranks.world) else ranks.device
    for parcel in parcels:
        try:
            if parcel.source == me:
                _send(parcel, path(parcel.number), ranks, device)
            elif parcel.to == me:
                pieces = _arriving(parcel, ranks, device)
                try:
                    write(parcel.number, pieces)
                finally:
                    for _ in pieces:  # what was promised is taken, even when it cannot be written
                        pass
        except (OSError, ValueError) as error:
            fault = fault or error
    return fault


def _pieces(parcel: Parcel) -> Iterator[tuple[int, int]]:
    return ((start, min(PIECE, parcel.size - start)) for start in range(0, parcel.size, PIECE))


def _send(parcel: Parcel, path: Path, ranks: Ranks, device: torch.device) -> None:
    """What cannot be read is sent as zeros: the receiver counts on the bytes, and refuses them by their digests."""
    fault, flying = None, []
    try:
        file = open(path, "rb", buffering=0)  # noqa: SIM115  # closed below
    except OSError as error:
        file, fault = None, error
    for start, size in _pieces(parcel):
        piece = torch.zeros(size, dtype=torch.uint8)
        try:
            if file is not None and os.preadv(file.fileno(), [memoryview(piece.numpy())], start) != size:
                raise CheckpointError(f"{path}: ends before byte {start + size}")
        except (OSError, CheckpointError) as error:
            fault = fault or error
        flying.append(Sending(piece.to(device), parcel.to, ranks.world, 0))
        if len(flying) == FLYING:
            flying.pop(0).wait()
    for message in flying:
        message.wait()
    if file is not None:
        file.close()
    if fault is not None:
        raise fault


def _arriving(parcel: Parcel, ranks: Ranks, device: torch.device) -> Iterator[memoryview]:
    """The bytes in pieces, each with memory of its own."""
    sizes, flying = [size for _, size in _pieces(parcel)], []
    while sizes or flying:
        while sizes and len(flying) < FLYING:
            flying.append(Receiving((sizes.pop(0),), torch.uint8, device, parcel.source, ranks.world, 0))
        yield memoryview(flying.pop(0).wait().cpu().numpy())


def share_bytes(parts: dict[int, bytes], sizes: list[int], ranks: Ranks) -> list[bytes]:
    """Every rank gets all of the strings of `sizes` bytes; `parts` are those, by number, that this rank alone has."""
    whole, starts = torch.zeros(sum(sizes), dtype=torch.uint8), [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    for number, data in parts.items():
        whole[starts[number] : starts[number + 1]] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    raw = all_reduce(whole.to(ranks.device), ranks.world).cpu().numpy().tobytes() if sum(sizes) else b""
    return [raw[start:stop] for start, stop in zip(starts, starts[1:])]


# ---- whose local checkpoints ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunId:
    """A run: what it is called in its --save folder, and where that lies, so that a copy of the folder is another run."""

    name: str
    save: str

    @property
    def folder(self) -> str:
        return f"run-{self.name}"


def read_run(save: str | Path) -> RunId | None:
    """The run that --save belongs to; None when it has none yet, and in a copy of another's folder."""
    try:
        name, at = Path(save, RUN_FILE).read_text().splitlines()
    except (OSError, ValueError):
        return None
    run = RunId(name, os.path.realpath(save))
    return run if re.fullmatch("[0-9a-f]{32}", name) and at == run.save else None


def new_run(save: str | Path) -> RunId:
    """Make --save another run's. Raises OSError."""
    run = RunId(secrets.token_hex(16), os.path.realpath(save))
    temporary = Path(save, f".{RUN_FILE}-{run.name}")
    with new_file(temporary) as file:
        write_all(file, [memoryview(f"{run.name}\n{run.save}\n".encode())])
    os.rename(temporary, Path(save, RUN_FILE))
    sync_folder(Path(save))
    return run


def forget_run(save: str | Path) -> None:
    """A run without local checkpoints begins in --save: those of the one before it are not its own."""
    Path(save, RUN_FILE).unlink(missing_ok=True)
