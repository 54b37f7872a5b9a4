"""Where a run's checkpoints come from and go to: finds, reads and writes them."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from torch import Tensor

from megatron.checkpoint.commit import Policy, not_writable
from megatron.checkpoint.desync import DesyncCheck
from megatron.checkpoint.lease import Lease, take_lease
from megatron.checkpoint.local.checkpoints import LocalCheckpoint, LocalCheckpoints
from megatron.checkpoint.local.nodes import adopt_run_id, is_same
from megatron.checkpoint.manager import CheckpointManager, staging_bytes
from megatron.checkpoint.manifest import CheckpointError
from megatron.checkpoint.ranks import Ranks
from megatron.checkpoint.reader import Checkpoint, open_checkpoint
from megatron.checkpoint.writer import own_part, shard_bytes, try_folder
from megatron.config.groups import Config
from megatron.distributed.launchers import slurm_job
from megatron.distributed.rank_errors import raise_on_all_ranks
from megatron.model.init import fill_initial
from megatron.model.spec import Box
from megatron.observe.metrics import save_metrics
from megatron.observe.tracking import Tracker
from megatron.optimizer.optimizer import Optimizer
from megatron.parallel.blocks import UNTRAINED
from megatron.training.resume import run_state, takes_weights_alone
from megatron.training.run import Run

logger = logging.getLogger(__name__)


def locate_checkpoint(
    config: Config, ranks: Ranks, local_checkpoints: LocalCheckpoints | None
) -> Checkpoint | None:
    """The checkpoint that --load names, or a newer one of the local tier; None for a first start.
    Rank 0 finds it and the others open that one, whatever appears in the meantime.

    Raises UserError when it must exist and does not, is damaged, or is not the same one on every
    rank.
    """
    options = config.checkpoint
    if options.load is None:
        return None
    # The local tier holds newer iterations of the same run; a named iteration, or weights for
    # another run, come from the folder.
    if local_checkpoints is not None and options.ckpt_step is None and not options.finetune:
        checkpoint = local_checkpoints.newest(
            options.load, options.save, options.allow_older_checkpoint
        )
    else:
        checkpoint = open_checkpoint(
            options.load, options.ckpt_step, ranks=ranks, older=options.allow_older_checkpoint
        )
    with raise_on_all_ranks(ranks.world):
        # A job that is requeued has the same command line each time: nothing to load is an error
        # only if it cannot be the first start.
        is_own = is_same(options.load, options.save)
        must_exist = options.exit_on_missing_checkpoint
        first_start = is_own and options.ckpt_step is None and not must_exist
        if checkpoint is None and (not first_start or config.evaluation.skip_train):
            fix = "give the folder that --save wrote to, or drop --load to start a new run"
            if is_own and must_exist:
                fix = "drop --exit-on-missing-checkpoint to start a new run"
            raise CheckpointError(f"--load {options.load}: no checkpoint there; {fix}")
    return checkpoint


def fetch(checkpoint: Checkpoint, run: Run) -> None:
    """Bring what this rank reads of a local checkpoint to its node; all ranks call it."""
    if isinstance(checkpoint, LocalCheckpoint):
        # Only what is read is fetched: an evaluation needs no moments.
        states = () if takes_weights_alone(run.config) else run.optimizer.state_boxes()
        pairs = [*run.optimizer.weight_boxes(), *states]
        size = checkpoint.fetch(box for box, _ in pairs)
        if size:
            logger.info(f" {size / 1e9:.3g} GB of local shards were fetched from other nodes")


def _kept_there(
    checkpoint: Checkpoint, run: Run, pairs: list[tuple[Box, Tensor]]
) -> list[tuple[Box, Tensor]]:
    """What is to be read. With --finetune, what is kept with the weights and not trained begins
    with its initial values where the checkpoint does not have it: another program's weights, or a
    run that needed none.
    """
    # A run that resumes must find all of it.
    if not run.config.checkpoint.finetune:
        return pairs
    known = set(checkpoint.names)
    there = []
    for box, into in pairs:
        if box.group != UNTRAINED or box.name in known:
            there.append((box, into))
        else:
            fill_initial(box, into, run.config.training.seed)
    return there


def load(checkpoint: Checkpoint, run: Run) -> None:
    """Read weights, and unless --finetune or --no-load-optim optimizer state, into the run's
    buffers.
    """
    weights_alone = takes_weights_alone(run.config)
    # Refused before anything is read: a run that resumes with half of its state would train on
    # without an error.
    missing = [
        name
        for name in run.optimizer.state_names
        if not any(held.startswith(f"optimizer.{name}.") for held in checkpoint.names)
    ]
    if missing and not weights_alone:
        raise CheckpointError(
            f"{checkpoint.path}: holds no optimizer state {' and '.join(missing)} "
            "(--no-save-optim, or another --optimizer); "
            "give --no-load-optim to start with fresh state"
        )
    run.optimizer.fill_weights(
        lambda pairs: checkpoint.read_all(_kept_there(checkpoint, run, pairs))
    )
    if weights_alone:
        return
    # The step count is part of Adam's bias correction, the scale of the next step's loss.
    run.optimizer.fill_states(checkpoint.read_all)
    run.optimizer.steps.fill_(checkpoint.state["optimizer_steps"])
    run.scaler.load(checkpoint.state["scaler"])


def make_manager(
    config: Config,
    optimizer: Optimizer,
    ranks: Ranks,
    tracker: Tracker,
    local_checkpoints: LocalCheckpoints | None,
) -> CheckpointManager | None:
    """What writes the run's checkpoints and reports them to the tracker; None without --save.
    Raises UserError when the local tier lacks room.
    """
    options = config.checkpoint
    if options.save is None:
        return None
    pairs = _own_pairs(config, optimizer)
    # Host memory for a save in the background is reserved now, so that no save fails for it later.
    memory = staging_bytes(pairs, options.async_save_host_memory) if options.async_save else None
    if local_checkpoints is not None and not config.evaluation.skip_train:
        local_checkpoints.require_space(shard_bytes(pairs), options.async_save)

    return CheckpointManager(
        Path(options.save),
        ranks,
        memory,
        retention=Policy(options.save_retain_interval, options.save_keep_last),
        verify=options.verify_integrity,
        local_checkpoints=local_checkpoints,
        continues=is_same(options.load, options.save) and not options.finetune,
        report=lambda iteration, **saved: tracker.log(iteration, save_metrics(**saved)),
    )


def _own_pairs(config: Config, optimizer: Optimizer) -> list[tuple[Box, Tensor]]:
    """What this rank writes of weights and optimizer state."""
    options = config.checkpoint
    # Of ranks that hold the same box each writes a share.
    pairs = [*optimizer.weight_boxes(), *(optimizer.state_boxes() if options.save_optim else ())]
    return own_part(pairs, optimizer.holder)


def save(run: Run, *, local_only: bool = False) -> None:
    """Write a checkpoint of the run's current state, or begin to, when --save is given;
    `local_only`: to the local tier, not to --save. A failed save is logged, and training continues.
    """
    manager, iteration = run.checkpoints, run.progress.iteration
    if manager is None:
        return
    with run.timing.events.during("checkpoint", iteration), run.timers("save-checkpoint"):
        run.zero.wait_for_weights()  # a checkpoint is of weights after the step
        pairs, check = _own_pairs(run.config, run.optimizer), DesyncCheck(run.optimizer)
        if local_only:
            agree = partial(check.check, manager.ranks)
            manager.local_checkpoints.save(iteration, pairs, run_state(run), agree)
        else:
            manager.save(iteration, pairs, run_state(run), check)


def finalize(run: Run) -> bool:
    """Wait for a save under way; whether the last one went well."""
    if run.checkpoints is None:
        return True
    # The wait is an event of the run: it is time in which nothing trains.
    if run.checkpoints.pending is None:  # a save that is over has its event already
        return run.checkpoints.finalize()
    with run.timing.events.during("checkpoint-wait", run.progress.iteration):
        return run.checkpoints.finalize()


def claim_save_folder(
    config: Config,
    ranks: Ranks,
    local_checkpoints: LocalCheckpoints | None,
    closing: ExitStack,
    *,
    resumed: bool,
) -> Lease | None:
    """Make --save, and write into it from every rank: what is wrong with it is found before
    training, not at the first checkpoint. No other run may write there until `closing` releases the
    lease, which rank 0 gets. Unless the run has `resumed` the newest from there, it is a new one
    from now on for the local tier.

    Raises UserError on every rank when one cannot, or while another run writes there.
    """
    options, lease = config.checkpoint, None
    if options.save is None:
        return None

    # 1. Two runs that write to one folder would destroy each other's checkpoints.
    def take() -> None:
        nonlocal lease
        try:
            lease = take_lease(options.save, slurm_job())
        except OSError as error:
            raise CheckpointError(not_writable(Path(options.save), error)) from error
        closing.callback(lease.release)

    ranks.from_first(take)

    # 2. Every rank writes: a file system that one node has not mounted is found here.
    try_folder(options.save, ranks)
    if local_checkpoints is not None and not config.evaluation.skip_train:
        # Nodes that are no part of the job may hold later iterations than the one it goes back to.
        continues = resumed and not options.finetune and options.ckpt_step is None
        load = options.load if continues else None
        local_checkpoints.adopt(adopt_run_id(load, options.save, ranks))
    return lease
