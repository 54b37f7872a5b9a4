"""How a checkpoint appears whole or not at all, and never in the place of another one
(docs/checkpoint.md): all files are written and fsynced in `.tmp-iter-N-<attempt>/`, which one
rename turns into `iter_000000N/`. No torch here.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from megatron.checkpoint.files import FOLDER_MODE, clean, make_root, sync_folder, write_file
from megatron.checkpoint.index import Index, newest_first, read_manifest
from megatron.checkpoint.manifest import (
    MANIFEST,
    TRACKER,
    CheckpointError,
    differing,
    encode_manifest,
    iteration_folder,
    list_iterations,
    manifest_of,
    state_digests,
    utc_now,
)
from megatron.config.input_files import JsonObject

if TYPE_CHECKING:
    from megatron.checkpoint.ranks import Ranks

logger = logging.getLogger(__name__)


class Attempt:
    """The temporary `folder` of one save: inside `with` it is there, made and in the end removed by
    the first rank.

    A rank writes `own` of `shards`, from number `index` on (None where it writes none). All ranks
    make an attempt together; CheckpointError is raised on all of them when the JSON that they are
    to save, `state`, differs. `explain`: the message for an error of a rank.
    """

    mode = FOLDER_MODE

    def __init__(
        self,
        root: Path,
        iteration: int,
        ranks: Ranks,
        state: JsonObject | None = None,
        own: int = 0,
        explain: Callable[[Exception], str] | None = None,
    ) -> None:
        self.root = root
        self.iteration = iteration
        self.ranks = ranks
        self.explain = explain or partial(not_saved, root, iteration)
        self.makes = ranks.first
        saved = {"iteration": iteration, **(state or {})}
        gathered = self.gather_or_raise(lambda: (secrets.token_hex(8), own, state_digests(saved)))
        for rank, (_, _, digests) in enumerate(gathered):
            if names := differing(gathered[0][2], digests):
                raise CheckpointError(
                    f"{root}: the checkpoint of iteration {iteration} was not saved: the state of "
                    f"rank {rank} differs from that of rank 0 in {', '.join(names)}: they no "
                    "longer carry out the same run. Resume from an older checkpoint."
                )
        self.name = gathered[0][0]  # the first rank's is the one for all
        self.folder = root / f".tmp-iter-{iteration}-{self.name}"
        counts = [count for _, count, _ in gathered]
        self.index = sum(counts[: ranks.world.rank]) if own else None
        self.shards = sum(counts)

    def __enter__(self) -> Self:
        """Raises CheckpointError on all ranks when the folder cannot be made."""
        try:
            self.gather_or_raise(self._make)
        except BaseException:
            self.__exit__()
            raise
        return self

    def gather_or_raise(self, part: Callable[[], Any]) -> list[Any]:
        """As Ranks.gather_or_raise, with errors of the file system, of memory and of the device
        as messages.
        """

        def explained() -> Any:
            try:
                return part()
            except (OSError, MemoryError, RuntimeError) as error:
                raise CheckpointError(self.explain(error)) from error

        return self.ranks.gather_or_raise(explained)

    def __exit__(self, *_: object) -> None:
        if self.makes:
            shutil.rmtree(self.folder, ignore_errors=True)  # gone already when it was committed

    def _make(self) -> None:
        if self.makes:
            self._make_root()
            clean(self.root, self.name)
            self.folder.mkdir(mode=self.mode)

    def _make_root(self) -> None:
        make_root(self.root)


def commit(
    root: Path,
    temporary: Path,
    iteration: int,
    attempt: str,
    shards: list[JsonObject],
    state: JsonObject,
    before: Collection[int] = (),
    *,
    continues: bool = False,
) -> Path:
    """Add the manifest to `temporary`, whose shards are durable, and make it the checkpoint of
    `iteration`; return its folder. One that is there and whole is kept where it is bit-equal, and
    refused where it differs; a damaged or foreign folder is moved aside, which is logged.

    `before`: iterations that were under `root` when the run began; the later ones among them are of
    a pass that this save supersedes. A run that `continues` the one under `root` has gone back
    before those that it reaches again: they are moved aside where they differ.
    """
    # 1. The manifest, durable before the folder gets its name.
    superseded = {}
    for later in list_iterations(root):
        if later > iteration and later in before:
            superseded[str(later)] = ""  # of one that cannot be read
            with suppress(CheckpointError):
                superseded[str(later)] = read_manifest(root / iteration_folder(later))["attempt"]
    content = manifest_of(iteration, attempt, shards, state, utc_now())
    if superseded:
        content["left"] = superseded
    write_file(temporary / MANIFEST, encode_manifest(content))
    sync_folder(temporary)
    try:
        Index(temporary)  # what could not be opened later is not committed now
    except CheckpointError as error:
        raise CheckpointError(not_saved(root, iteration, error)) from error

    # 2. One rename makes the checkpoint; what is known of the newest one follows.
    target = root / iteration_folder(iteration)
    if not _take_place(temporary, target, content, iteration in before, continues):
        return target
    sync_folder(root)
    tracker = root / f".tmp-iter-{iteration}-{attempt}.txt"
    with suppress(OSError):  # only a hint: without it the save has succeeded all the same
        write_file(tracker, f"{iteration}\n".encode())
        os.rename(tracker, root / TRACKER)
        sync_folder(root)
    if superseded:
        logger.warning(
            f"{root} holds later iterations from before this run, which resumed "
            f"from an earlier one: {', '.join(superseded)}. From now on --load "
            f"takes iteration {iteration}, and none of them without --ckpt-step; move them "
            "away if they are not wanted"
        )
    return target


def _take_place(
    temporary: Path, target: Path, content: JsonObject, is_older: bool, continues: bool
) -> bool:
    """Make `temporary`, whose manifest is `content`, the checkpoint `target`; False when the one
    there is kept as it is. `is_older`: that one was there before the run.
    """
    try:
        os.rename(temporary, target)
        return True
    except OSError as error:  # a folder that is not empty is there, or a file or a link
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise

    # 1. What is there is damaged, differs, or is equal.
    kind = "damaged"
    try:
        old = Index(target)
        old.verify()
    except CheckpointError as error:
        fault = str(error)
    else:
        names = differing(_compared(old.manifest), _compared(content))
        if not names:
            return is_older and _renew(target, content)
        kind = "superseded"
        fault = f"{target} exists already, is whole, and differs from this run in: "
        fault += ", ".join(names)
        if not (is_older and continues):
            raise CheckpointError(
                f"{fault}. It was kept and nothing was saved. "
                "It comes from another run or from an earlier pass over this iteration: give "
                "another --save folder, or move it away."
            )

    # 2. It stays under another name.
    aside = target.with_name(f"{target.name}.{kind}-{content['attempt']}")
    os.rename(target, aside)
    os.rename(temporary, target)
    logger.warning(
        f"{fault}. It was moved to {aside.name}, and a new checkpoint of iteration "
        f"{content['iteration']} is in its place"
    )
    return True


def _compared(manifest: JsonObject) -> dict[str, str]:
    """The values that are equal in equal checkpoints, as JSON texts. The checkpoint and logging
    settings are not compared.
    """
    values = {"tensors, or how they are cut into shards": manifest["shards"], **manifest["state"]}
    for group, fields in values.pop("config", {}).items():
        if group not in ("checkpoint", "logging"):
            values |= {f"config.{group}.{name}": value for name, value in fields.items()}
    return {key: json.dumps(value) for key, value in values.items()}


def _renew(target: Path, content: JsonObject) -> bool:
    """Give a checkpoint that was superseded an equal manifest, of the attempt that has made it
    again: it counts from now on. False when it counts already.
    """
    if content["iteration"] not in newest_first(target.parent)[1]:
        return False
    manifest = target / f".{MANIFEST}-{content['attempt']}"
    write_file(manifest, encode_manifest(content))
    os.rename(manifest, target / MANIFEST)
    sync_folder(target)
    return True


FIXES = {
    **dict.fromkeys(
        (errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
        "free space, raise the quota or give another folder",
    ),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS), "make it writable or give another folder"
    ),
    errno.ENOENT: "its folder has vanished, or is not on a file system that all of its ranks share",
}


def fix_of(error: BaseException | None) -> str:
    """`; ` and what helps against an error, or its cause, of the file system; else nothing."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    return f"; {FIXES[error.errno]}" if error is not None and error.errno in FIXES else ""


def not_saved(root: Path, iteration: int, error: Exception) -> str:
    text = (
        f"{root}: the checkpoint of iteration {iteration} was not saved: {in_words(error)} "
        f"({getattr(error, 'filename', None) or root}){fix_of(error)}."
    )
    with suppress(CheckpointError):
        kept, _ = newest_first(root)
        text += f" Older checkpoints are untouched (newest: iteration {kept[0]})." if kept else ""
    return text


def not_writable(root: Path, error: Exception) -> str:
    fix = fix_of(error) or "; make it writable and free space on its disk, or choose another folder"
    return f"--save {root}: cannot be written to: {in_words(error)}{fix}"


def in_words(error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"


# ---- which checkpoints stay (--save-retain-interval, --save-keep-last), and how the others go ----
#
# What goes is first renamed to `.trash-*`: a half-deleted folder never has a checkpoint's name, and
# what a kill leaves of it the next save removes (files.clean).


@dataclass(frozen=True)
class Policy:
    """Multiples of `interval` stay, and the newest `last` (default: 1); without both, all."""

    interval: int | None = None
    last: int | None = None


def retire(root: Path, policy: Policy, newest: int) -> list[int]:
    """Delete the checkpoints under `root` that `policy` does not keep, now that iteration `newest`
    is committed; returns theirs, newest first.

    A checkpoint counts, and is deleted, only when it can be opened, and none unless `newest` can.
    Iterations later than `newest` stay: they come from another pass over the same iterations. Once
    the run has passed them, those that were superseded when it went back count as the oldest. An
    error of the file system ends the deletion, is logged, and fails no save.
    """
    if policy == Policy():
        return []
    gone = {}
    try:
        attempt = Index(root / iteration_folder(newest)).manifest["attempt"]
        for iteration in _surplus(root, policy, newest):
            trash = trash_folder(root, iteration, attempt)
            os.rename(root / iteration_folder(iteration), trash)
            gone[iteration] = trash
    except (CheckpointError, OSError) as error:
        logger.warning(
            f"{root}: older checkpoints that --save-keep-last or "
            f"--save-retain-interval do not keep were not deleted: {error}"
        )
    with suppress(OSError):  # the next save removes the rest
        if gone:
            # else a power loss could leave part of a checkpoint under its old name
            sync_folder(root)
        for trash in gone.values():
            shutil.rmtree(trash, ignore_errors=True)
    return list(gone)


def _surplus(root: Path, policy: Policy, newest: int) -> list[int]:
    to_keep = policy.last or 1
    surplus = []
    counting, superseded = newest_first(root)
    for iteration in counting + superseded:
        spared = policy.interval is not None and iteration % policy.interval == 0
        if iteration > newest or (spared and to_keep <= 0):
            continue
        folder = root / iteration_folder(iteration)
        with suppress(CheckpointError):
            Index(folder)  # a damaged one stays, and so does a link
            if folder.is_symlink():
                continue
            to_keep -= 1
            if to_keep < 0 and iteration != newest:
                surplus.append(iteration)
    return surplus


def trash_folder(root: Path, iteration: int, attempt: str) -> Path:
    return root / f".trash-iter-{iteration}-{attempt}"
