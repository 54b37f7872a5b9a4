"""Nodes: which ranks see the same local folder; and the run to which local checkpoints belong."""

from __future__ import annotations

import os
import re
import secrets
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from megatron.checkpoint.files import sync_folder, write_file
from megatron.checkpoint.manifest import CheckpointError, iteration_folder
from megatron.checkpoint.ranks import Ranks

RUN_FILE = "run_id"


@dataclass(frozen=True)
class Nodes:
    """The ranks of the job by the local folder that they see. `root`: --local-checkpoint-dir, the
    same text on every node; `run`: the id of the run whose checkpoints are meant.
    """

    root: Path
    ranks: Ranks
    # ranks of each node, ascending; nodes in the order of their first ranks
    members: tuple[tuple[int, ...], ...]
    hosts: tuple[str, ...]  # name of each node's host
    run: str = ""

    @cached_property
    def index(self) -> int:
        """The node of this rank."""
        return next(i for i, ranks in enumerate(self.members) if self.ranks.world.rank in ranks)

    @property
    def place(self) -> int:
        """This rank's place among those of its node."""
        return self.members[self.index].index(self.ranks.world.rank)

    @property
    def first(self) -> bool:
        """Whether this rank does its node's part of what one rank does."""
        return self.place == 0

    @property
    def host(self) -> str:
        """This node, for messages."""
        return f"node {self.index} ({self.hosts[self.index]})"

    @property
    def run_folder(self) -> Path:
        """Of the run's checkpoints on this node."""
        return self.root / f"run-{self.run}"

    def folder(self, iteration: int) -> Path:
        return self.run_folder / iteration_folder(iteration)

    def rank(self, node: int, number: int) -> int:
        """The rank of a node that moves shard `number`: its ranks take turns."""
        return self.members[node][number % len(self.members[node])]


def find_nodes(root: str | Path, ranks: Ranks) -> Nodes:
    """Group the ranks by node: of those that see one folder `root` the first to come leaves its
    number there. Raises CheckpointError when the folder cannot be used on any rank.
    """
    root = Path(root)
    token = ranks.gather_or_raise(lambda: secrets.token_hex(8))[0]
    mark = root / f".node-{token}"

    def join() -> tuple[int, str]:
        try:
            own_folder(root)
            with suppress(FileExistsError):  # a link is there with its text, or not at all
                os.symlink(str(ranks.world.rank), mark)
            return int(os.readlink(mark)), socket.gethostname()
        except OSError as error:
            raise CheckpointError(
                f"--local-checkpoint-dir {root}: {error.strerror}: make it writable, or give "
                "another folder"
            ) from error

    try:
        found = ranks.gather_or_raise(join)
    finally:
        with suppress(OSError):
            mark.unlink(missing_ok=True)
    by_node: dict[int, list[int]] = {}
    for rank, (first, _) in enumerate(found):
        by_node.setdefault(first, []).append(rank)
    members = tuple(map(tuple, by_node.values()))
    return Nodes(root, ranks, members, tuple(found[row[0]][1] for row in members))


def own_folder(root: Path) -> None:
    """Make `root` (0700), or accept one that this user owns and no other may write to: names in
    places such as /dev/shm can be guessed. Raises CheckpointError and OSError.
    """
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
        raise CheckpointError(
            f"--local-checkpoint-dir {root}: {wrong}: give the name of a new folder in it or "
            "next to it, which is made with mode 0700"
        )


# ---- whose local checkpoints
#
# RUN_FILE has a run's id and where its --save folder lies: a copy of the folder is another run.


def read_run(save: str | Path) -> str | None:
    """The run that --save belongs to; None when it has none yet, and in a copy of another's
    folder.
    """
    try:
        run, at = Path(save, RUN_FILE).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return None
    return run if re.fullmatch("[0-9a-f]{32}", run) and at == os.path.realpath(save) else None


def is_same(load: str | None, save: str | None) -> bool:
    """Whether a run that loads from `load` and saves to `save` continues there."""
    return None not in (load, save) and os.path.realpath(load) == os.path.realpath(save)


def adopt_run_id(load: str | None, save: str, ranks: Ranks) -> str:
    """The run that saves to `save` from now on; its state was loaded from `load`. A run that
    continues there keeps its id. Any other run gets a new one, so that it does not take the local
    checkpoints of the one before. (A run without local checkpoints removes it when it saves.)
    """

    def first() -> str:
        path = Path(save, RUN_FILE)
        run = read_run(save) if is_same(load, save) else None
        try:
            if run is None:
                run = secrets.token_hex(16)
                temporary = Path(save, f".{RUN_FILE}-{run}")
                write_file(temporary, f"{run}\n{os.path.realpath(save)}\n".encode())
                os.rename(temporary, path)
                sync_folder(Path(save))
        except OSError as error:
            raise CheckpointError(
                f"--save {save}: {error.filename}: {error.strerror}: make it writable, or "
                "give another folder"
            ) from error
        return run

    return ranks.from_first(first)
