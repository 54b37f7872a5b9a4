"""Reads and checks everything that a run depends on, before its model is built."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import fields, replace

import torch

from megatron.checkpoint.local.checkpoints import LocalCheckpoints
from megatron.checkpoint.manifest import CheckpointError
from megatron.checkpoint.ranks import Ranks
from megatron.checkpoint.reader import Checkpoint
from megatron.checkpoint.run_state import from_saved
from megatron.config.groups import Config, GivenConfig
from megatron.config.validate import resolve
from megatron.data.loader import PythonReader, build_data
from megatron.data.tokenizer import Tokenizer, build_tokenizer
from megatron.distributed.rank_errors import raise_on_all_ranks
from megatron.kernels.dispatch import FAULTY
from megatron.kernels.self_check import Variant, faults
from megatron.model.arithmetic import padded_vocab_size
from megatron.model.kernels import choose_kernels, compute_dtype
from megatron.optimizer.lr_schedule import ParamSchedule
from megatron.training.advisor import Advisor
from megatron.training.checkpointing import locate_checkpoint
from megatron.training.kernel_variants import RunShape, kernel_variants
from megatron.training.resume import (
    Change,
    accept_changes,
    changed_data,
    changed_fields,
    check_complete,
    logged_changes,
    resumed_schedule,
)
from megatron.training.run import Prepared, Progress

logger = logging.getLogger(__name__)


def prepare(
    flags: GivenConfig,
    notes: Sequence[str],
    ranks: Ranks,
    advisor: Advisor,
    local_checkpoints: LocalCheckpoints | None = None,
    *,
    world_size: int | None = None,
    planned_for: str | None = None,
    not_done: Sequence[str] = (),
    reader: PythonReader | None = None,
) -> Prepared:
    """Read everything that a run depends on, and refuse what does not fit, on every one of
    `ranks` or on none. A dry run gives the `world_size` and the device (cuda, cpu) that it is
    `planned_for`. `reader`: of the training samples, see `build_data`. Raises UserError.
    """
    world = ranks.world
    world_size, target = world_size or world.size, planned_for or ranks.device.type
    with raise_on_all_ranks(world):
        # 1. Flags.
        tokenizer, config, reasons = _resolved(flags, world_size, target, advisor)
    # 2. The checkpoint: all ranks open the one that rank 0 finds.
    checkpoint = locate_checkpoint(config, ranks, local_checkpoints)
    with raise_on_all_ranks(world):
        # 3. What differs from the run that wrote it.
        progress, ledger = Progress(), None
        changes: list[Change] = []
        if checkpoint is not None:
            progress, changes = _resumed(checkpoint, config, tokenizer)
            # The blends that the run has read so far: the order of samples depends on them.
            ledger = checkpoint.state["ledger"] if progress.iteration > 0 else None
        # 4. The data, at the sample where the run continues. One rank is enough to scan the files
        # of --check-data.
        scanned = config if world.rank == 0 else config.with_fields("data", check_data=False)
        data = build_data(scanned, tokenizer, ledger, progress.consumed_samples, reader)
        prepared = Prepared(
            config=config,
            tokenizer=tokenizer,
            padded_vocab=padded_vocab_size(
                tokenizer.vocab_size, config.model, config.distributed.tensor_model_parallel_size
            ),
            data=data,
            schedule=ParamSchedule.of(config),
            progress=progress,
            advisor=advisor,
            not_done=not_done,
            notes=[*notes, *reasons],
        )
        return prepared if checkpoint is None else _accepted(prepared, checkpoint, changes)


def _resolved(
    flags: GivenConfig, world_size: int, device: str, advisor: Advisor
) -> tuple[Tokenizer, Config, list[str]]:
    """The tokenizer, the configuration with derived and chosen values, and notes about them."""
    # The size of the vocabulary comes from the tokenizer, and other values follow from it. The
    # planner chooses last: it needs all other values.
    tokenizer = build_tokenizer(resolve(flags, world_size, None).config.data)
    rows = tokenizer.vocab_size
    resolved = resolve(flags, world_size, rows)
    config, reasons = advisor.choose_recompute(resolved.config, rows, world_size, device)
    return tokenizer, config, [*resolved.notes, *reasons]


def _resumed(
    checkpoint: Checkpoint, config: Config, tokenizer: Tokenizer
) -> tuple[Progress, list[Change]]:
    """The progress of the checkpoint's run, at the start with --finetune; and the differences from
    it, except those of its data. One that no flag accepts is refused at once.
    """
    state, finetune = checkpoint.state, config.checkpoint.finetune
    # A converted checkpoint has weights and no run. First check that --finetune can use it.
    is_converted = "schedule" not in state
    check_complete(checkpoint, weights_alone=finetune or is_converted)
    changes = changed_fields(state, config, tokenizer.vocab_size, tokenizer.fingerprint)
    if not all(change.accept for change in changes):
        accept_changes(checkpoint, changes, config)
    if finetune:
        return Progress(), changes
    if is_converted:
        raise CheckpointError(
            f"{checkpoint.path}: holds only weights (converted from another format) and no run "
            "to resume; give --finetune"
        )
    # Fields that an older version did not write take their defaults.
    saved = {each.name: state[each.name] for each in fields(Progress) if each.name in state}
    return from_saved(Progress, saved, "state"), changes


def _accepted(prepared: Prepared, checkpoint: Checkpoint, changes: list[Change]) -> Prepared:
    """The inputs of a run that starts from a checkpoint: changes that need permission are refused
    or noted, and the schedule is the checkpoint's or ours.
    """
    config, state = prepared.config, checkpoint.state
    changes = changes + changed_data(state, config, prepared.data.history)
    notes = [*prepared.notes, *accept_changes(checkpoint, changes, config)]
    schedule, lines = resumed_schedule(prepared.schedule, state, config)
    return replace(
        prepared,
        checkpoint=checkpoint,
        schedule=schedule,
        notes=notes,
        changed=logged_changes(state, config) + lines,
        accepted=frozenset(change.accept for change in changes if change.accept),
    )


def check_kernels(
    prepared: Prepared, device: torch.device, ranks: Ranks, *, first_of_node: bool
) -> None:
    """Compare the kernels of this run on a GPU with their definitions, on the first rank of each
    node. No rank uses a kernel that fails on one: `auto` falls back to torch with a warning, and
    `choose_kernels` refuses a flag.
    """
    FAULTY.clear()
    if device.type != "cuda":
        return

    def check() -> dict[str, str]:
        # One rank of a node is enough: the others have the same GPU and versions.
        if not first_of_node:
            return {}
        return faults(variants_of_run(prepared, device), device)

    # All ranks must choose the same kernels, or their sums would differ: one rank's fault counts
    # for all.
    for rank, found in enumerate(ranks.gather_or_raise(check)):
        for operator, fault in found.items():
            FAULTY.setdefault(operator, f"the check at start failed on rank {rank}: {fault}")
    for operator, fault in FAULTY.items():
        logger.warning(
            "%s: our kernels are not used. %s. Versions and GPU are in the banner; "
            "python -m pytest tests/kernels finds what is wrong",
            operator,
            fault,
        )


def variants_of_run(prepared: Prepared, device: torch.device) -> dict[str, list[Variant]]:
    """Operator -> the variants of our kernels that a run launches."""
    config, choices = choose_kernels(prepared.config, device)
    dtype = compute_dtype(config.precision)
    shape = RunShape(config, dtype, prepared.padded_vocab, prepared.tokenizer.vocab_size)
    return kernel_variants(shape, choices)
