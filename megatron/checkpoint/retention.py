"""Which checkpoints stay (--save-retain-interval, --save-keep-last), and how the others go. Nothing
here imports torch.

What goes is first renamed to `.trash-*`, and only then deleted: a half-deleted folder never has a
checkpoint's name, and what a kill leaves of it the next save removes (files.clean).
"""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.files import sync_folder
from megatron.checkpoint.index import Index, newest_first
from megatron.checkpoint.manifest import CheckpointError, iteration_folder

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Policy:
    """Multiples of `interval` stay, and of all others the newest `last`; without any of the two
    everything stays.
    """

    interval: int | None = None
    last: int | None = None

    @property
    def newest(self) -> int | None:
        """How many of the newest stay; None: all."""
        return 1 if self.last is None and self.interval is not None else self.last


def retire(root: Path, policy: Policy, newest: int) -> list[int]:
    """Delete the checkpoints under `root` that `policy` does not keep, now that iteration `newest`
    is committed; returns theirs, newest first.

    A checkpoint counts, and is deleted, only when it can be opened: what is damaged or of another
    program stays, and is no reason to delete a whole one. Iterations later than `newest` stay too:
    they come from another pass over the same iterations. Once the run has passed them, those that
    were superseded when it went back count as older than all others. Nothing is deleted unless
    `newest` can be opened. An error of the file system ends the deletion, is logged, and fails no
    save.
    """
    if policy.newest is None:
        return []
    gone = []
    try:
        attempt = Index(root / iteration_folder(newest)).manifest["attempt"]
        for iteration in _surplus(root, policy, newest):
            os.rename(root / iteration_folder(iteration), _trash(root, iteration, attempt))
            gone.append(iteration)
    except (CheckpointError, OSError) as error:
        logger.warning(
            f"{root}: older checkpoints that --save-keep-last or "
            f"--save-retain-interval do not keep were not deleted: {error}"
        )
    if gone:
        try:
            # else a power loss could leave part of a checkpoint under its old name
            sync_folder(root)
        except OSError:
            return gone
        for iteration in gone:
            # the next save removes the rest
            shutil.rmtree(_trash(root, iteration, attempt), ignore_errors=True)
    return gone


def _surplus(root: Path, policy: Policy, newest: int) -> list[int]:
    kept = 0
    surplus = []
    counting, superseded = newest_first(root)
    for iteration in counting + superseded:
        spared = policy.interval is not None and iteration % policy.interval == 0
        if (
            iteration > newest
            or spared
            and kept >= policy.newest
            or not _is_whole(root / iteration_folder(iteration))
        ):
            continue
        if kept < policy.newest:
            kept += 1
        elif not spared:
            surplus.append(iteration)
    return surplus


def _is_whole(folder: Path) -> bool:
    if folder.is_symlink():
        return False
    try:
        Index(folder)
    except CheckpointError:
        return False
    return True


def _trash(root: Path, iteration: int, attempt: str) -> Path:
    return root / f".trash-iter-{iteration}-{attempt}"
