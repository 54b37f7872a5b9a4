"""A run's two tiers of checkpoints: those in a folder of each node, saved often, and those of
--save. All ranks call everything together.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron.checkpoint.files import GB
from megatron.checkpoint.index import newest_first, read_manifest
from megatron.checkpoint.local.nodes import RUN_FILE, find_nodes, forget_run, new_run, read_run
from megatron.checkpoint.local.rebuild import LocalCheckpoint, newest_local
from megatron.checkpoint.local.saves import require_redundancy, require_space, save_local
from megatron.checkpoint.manifest import CheckpointError, shard_file
from megatron.checkpoint.ranks import Ranks
from megatron.checkpoint.reader import Checkpoint, open_checkpoint
from megatron.checkpoint.writer import BoxTensor, shard_bytes
from megatron.config.errors import UserError
from megatron.config.input_files import JsonObject

logger = logging.getLogger(__name__)


class LocalCheckpoints:
    """The local tier of a run. `redundancy`: --local-redundancy."""

    def __init__(self, root: str | Path, ranks: Ranks, redundancy: str):
        self.nodes = find_nodes(root, ranks)
        self.redundancy = redundancy
        self.run = ""  # its id, known when it saves
        if redundancy != "none":
            require_redundancy(self.nodes, redundancy)

    def newest(self, load: str, save: str | None, older: bool) -> Checkpoint | None:
        """The newest checkpoint of `load`, or of the local ones where `load` is the folder that the
        run saves to; of one iteration the local one.

        A local one of an iteration before the newest of `load` is taken when that is damaged and
        `older` allows it, else never. Raises as open_checkpoint.
        """
        ranks = self.nodes.ranks
        run, shared, copied = ranks.from_first(lambda: _look(load, save))
        if copied:
            logger.warning(
                f"{load} was copied or moved, which makes it another run's: local "
                "checkpoints are not looked for"
            )
        if run is None:
            return open_checkpoint(load, None, ranks, older)

        # A local one that is as new as --load's newest is taken without opening that.
        newest = max(shared, default=0)
        copies = self.redundancy == "partner"
        found = newest_local(self.nodes, run, 0 if older else newest, copies=copies)
        checkpoint = None
        if found is None or found.iteration < newest:
            try:
                checkpoint = open_checkpoint(load, None, ranks, older)
            except UserError as error:  # the same on all ranks: an older local one may do
                if found is None or not older:
                    raise
                logger.warning(str(error))
        if found is None or (checkpoint is not None and checkpoint.iteration > found.iteration):
            return checkpoint
        damaged = ", which is not whole" if newest > found.iteration else ""
        logger.info(
            f" taking the local checkpoint of iteration {found.iteration} ({self.nodes.root}): "
            f"--load {load} has {f'iteration {newest}' if shared else 'none'}{damaged}"
        )
        return LocalCheckpoint(found)

    def require_space(self, own_bytes: int, flushes: bool) -> None:
        """Raise CheckpointError on every rank when a node has no space for the run's checkpoints,
        `own_bytes` of this rank.
        """
        require_space(self.nodes, self.run, own_bytes, self.redundancy, flushes)

    def save(
        self,
        iteration: int,
        pairs: Sequence[BoxTensor],
        state: JsonObject,
        check: Callable[[], None] = lambda: None,
    ) -> bool:
        """Save locally; whether that went well. A failed save is logged, and stops nothing. `check`
        may refuse with a UserError on all ranks.
        """
        began = time.perf_counter()
        try:
            check()
            save_local(self.nodes, self.run, iteration, pairs, state, self.redundancy)
        except (UserError, OSError) as error:
            logger.warning(f"iteration {iteration} was NOT saved locally. {error}")
            return False
        size = shard_bytes(pairs) / GB
        seconds = time.perf_counter() - began
        logger.info(
            f" saved local checkpoint of iteration {iteration}: {size:.2f} GB of this "
            f"rank in {seconds:.1f} s, {size / seconds:.2f} GB/s"
        )
        return True

    def shard(self, iteration: int, index: int) -> tuple[Path, JsonObject]:
        """(file, entry in the manifest) of a shard that this node has of a local checkpoint. Raises
        CheckpointError.
        """
        folder = self.nodes.folder(self.run, iteration)
        return folder / shard_file(index), read_manifest(folder)["shards"][index]


def _look(load: str, save: str | None) -> tuple[str | None, list[int], bool]:
    """The run that continues, the iterations of `load`, and whether that folder has the id of
    another run.
    """
    resumes = _same(load, save)
    run = read_run(load) if resumes else None
    copied = resumes and run is None and Path(load, RUN_FILE).exists()
    return run, newest_first(Path(load))[0], copied


def _same(load: str | None, save: str | None) -> bool:
    return None not in (load, save) and os.path.realpath(load) == os.path.realpath(save)


def adopt_run_id(load: str | None, save: str, ranks: Ranks, *, local: bool) -> str:
    """The run that saves to `save` from now on; its state was loaded from `load`. A run that
    continues there keeps its id. Any other run gets a new one, so that it does not take the local
    checkpoints of the one before. Empty when it saves nothing locally (`local`).
    """

    def first() -> str:
        resumes = _same(load, save)
        try:
            if local:
                return (read_run(save) if resumes else None) or new_run(save)
            if not resumes:
                forget_run(save)
        except OSError as error:
            raise CheckpointError(
                f"--save {save}: {error.filename}: {error.strerror}: make it writable, or "
                "give another folder"
            ) from error
        return ""

    return ranks.from_first(first)
