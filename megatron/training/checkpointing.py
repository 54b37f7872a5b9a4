"""Where a run's checkpoints come from and go to: find the one to load, read it into the run, write one."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from megatron.checkpoint.manifest import CheckpointError
from megatron.checkpoint.progress import Saved
from megatron.checkpoint.ranks import ONE, Ranks
from megatron.checkpoint.reader import Checkpoint, open_checkpoint
from megatron.checkpoint.replicas import check_replicas
from megatron.checkpoint.retention import Policy
from megatron.checkpoint.saver import Saver, staging_bytes
from megatron.checkpoint.share import own_part
from megatron.checkpoint.writer import try_folder
from megatron.config.groups import Config
from megatron.dist.together import together
from megatron.model.layout import Box
from megatron.observe.metrics import save_metrics
from megatron.observe.tracking import Tracker
from megatron.optimizer.optimizer import Optimizer
from megatron.training.resume import run_state
from megatron.training.run import Run


def locate_checkpoint(config: Config, ranks: Ranks = ONE) -> Checkpoint | None:
    """The checkpoint that --load names; None for a first start. Rank 0 finds it and the others open that one, whatever appears meanwhile.

    Raises ValueError when it must exist and does not, is damaged, or is not the same one on every rank.
    """
    options = config.checkpoint
    if options.load is None:
        return None
    checkpoint = open_checkpoint(options.load, options.ckpt_step, ranks=ranks, older=options.allow_older_checkpoint)
    with together(ranks.world, ranks.device):
        first_start = options.load == options.save and options.ckpt_step is None and not options.exit_on_missing_checkpoint
        if checkpoint is None and (not first_start or config.evaluation.skip_train):
            raise CheckpointError(f"--load {options.load}: no checkpoint there; give the folder that --save wrote to, or drop --load to start a new run")
    return checkpoint


def load(checkpoint: Checkpoint, run: Run) -> None:
    """Read weights, and unless --finetune or --no-load-optim optimizer state, into the run's buffers."""
    run.optimizer.fill_weights(checkpoint.read_all)
    if run.config.checkpoint.finetune or not run.config.checkpoint.load_optim or run.config.evaluation.skip_train:
        return
    missing = [name for name in run.optimizer.states if not any(held.startswith(f"optimizer.{name}.") for held in checkpoint.names)]
    if missing:
        raise CheckpointError(f"{checkpoint.path}: holds no optimizer state {' and '.join(missing)} (--no-save-optim, or another --optimizer); "
                              "give --no-load-optim to start with fresh state")
    run.optimizer.fill_states(checkpoint.read_all)
    run.optimizer.steps.fill_(checkpoint.state["optimizer_steps"])
    run.scaler.load(checkpoint.state["scaler"])


def make_saver(config: Config, optimizer: Optimizer, ranks: Ranks, tracker: Tracker | None) -> Saver | None:
    """What writes the run's checkpoints and tells the tracker of them; None without --save."""
    options = config.checkpoint
    if options.save is None:
        return None
    memory = staging_bytes(_own_pairs(config, optimizer), options.async_save_host_memory) if options.async_save else None

    def report(iteration: int, saved: Saved) -> None:
        if tracker is not None:
            tracker.log(iteration, save_metrics(size=saved.bytes, seconds=saved.seconds, stall=saved.stall))

    return Saver(options.save, ranks, memory, retention=Policy(options.save_retain_interval, options.save_keep_last), verify=options.verify_integrity,
                 report=report)


def _own_pairs(config: Config, optimizer: Optimizer) -> list[tuple[Box, Tensor]]:
    """What this rank writes of weights and optimizer state."""
    options = config.checkpoint
    pairs = [*optimizer.weight_boxes(), *(optimizer.state_boxes() if options.save_optim else ())]
    return own_part(pairs, optimizer.holder, balanced=options.ckpt_parallel_write == "balanced")


def save(run: Run) -> None:
    """Write a checkpoint of the run as it stands, or begin to, when --save is given. A failed save is said, and stops nothing."""
    if run.saver is not None:
        run.zero.settle()  # a checkpoint is of weights after the step
        check = partial(check_replicas, run.optimizer, run.saver.ranks)
        run.saver.save(run.progress.iteration, _own_pairs(run.config, run.optimizer), run_state(run), check)


def drain(run: Run) -> bool:
    """Wait for a save under way; whether the last one went well."""
    return run.saver is None or run.saver.drain()


def prepare_save_folder(config: Config, ranks: Ranks = ONE) -> None:
    """Make --save, and write into it from every rank: what is wrong with it is found before training, not at the first checkpoint.

    Raises ValueError on every rank when one cannot.
    """
    if config.checkpoint.save is not None:
        try_folder(config.checkpoint.save, ranks)
