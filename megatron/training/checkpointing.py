"""Where a run's checkpoints come from and go to: find the one to load, read it into the run, write one."""

from __future__ import annotations

from pathlib import Path

from megatron.checkpoint.manifest import CheckpointError
from megatron.checkpoint.ranks import ONE, Ranks
from megatron.checkpoint.reader import Checkpoint, find_checkpoint
from megatron.checkpoint.writer import save_checkpoint, try_folder
from megatron.config.groups import Config
from megatron.dist.together import together
from megatron.training.resume import run_state
from megatron.training.run import Run


def locate_checkpoint(config: Config, ranks: Ranks = ONE) -> Checkpoint | None:
    """The checkpoint that --load names; None for a first start. Rank 0 finds it and the others open that one, whatever appears meanwhile.

    Raises ValueError when it must exist and does not, is damaged, or is not the same one on every rank.
    """
    folder = config.checkpoint.load
    chosen = ranks.agree(lambda: _choose(config) if folder is not None and ranks.first else None)[0]
    if chosen is None:
        return None
    name, attempt = chosen
    path = Path(folder, name)
    with together(ranks.world, ranks.device):
        checkpoint = Checkpoint(path) if path.is_dir() else None
        if checkpoint is None or checkpoint.manifest["attempt"] != attempt:
            raise CheckpointError(f"{path}: the checkpoint that rank 0 found there is not seen from here: is --load on a file system that all nodes "
                                  "share?")
    return checkpoint


def _choose(config: Config) -> tuple[str, str] | None:
    """Folder name and attempt of the checkpoint to load."""
    folder, step = config.checkpoint.load, config.checkpoint.ckpt_step
    path = find_checkpoint(folder, step)
    if path is not None:
        with Checkpoint(path) as checkpoint:
            return path.name, checkpoint.manifest["attempt"]
    first_start = folder == config.checkpoint.save and step is None and not config.checkpoint.exit_on_missing_checkpoint
    if first_start and not config.evaluation.skip_train:
        return None
    raise CheckpointError(f"--load {folder}: no checkpoint{'' if step is None else f' of iteration {step}'} there; give the folder that --save "
                          "wrote to, or drop --load to start a new run")


def load(checkpoint: Checkpoint, run: Run) -> None:
    """Read weights, and unless --finetune or --no-load-optim optimizer state, into the run's buffers."""
    for box, parameter in run.optimizer.weight_boxes():
        checkpoint.read(box, parameter)
    run.optimizer.publish_weights()
    if run.config.checkpoint.finetune or not run.config.checkpoint.load_optim or run.config.evaluation.skip_train:
        return
    missing = [name for name in run.optimizer.states if not any(held.startswith(f"optimizer.{name}.") for held in checkpoint.names)]
    if missing:
        raise CheckpointError(f"{checkpoint.path}: holds no optimizer state {' and '.join(missing)} (--no-save-optim, or another --optimizer); "
                              "give --no-load-optim to start with fresh state")
    for box, buffer in run.optimizer.state_boxes():
        checkpoint.read(box, buffer)
    run.optimizer.steps.fill_(checkpoint.state["optimizer_steps"])
    run.scaler.load(checkpoint.state["scaler"])


def save(run: Run) -> bool:
    """Write a checkpoint of the run as it stands, when --save is given; whether that went well. A failed save is said, and stops nothing."""
    folder = run.config.checkpoint.save
    if folder is None:
        return True
    run.zero.settle()  # a checkpoint is of weights after the step
    boxes = [*run.optimizer.weight_boxes(), *(run.optimizer.state_boxes() if run.config.checkpoint.save_optim else ())]
    own = [(box, tensor) for box, tensor in boxes if run.optimizer.owns(box)]
    try:
        path = save_checkpoint(folder, run.progress.iteration, own, run_state(run), ranks=Ranks(run.groups.world, run.device))
    except (ValueError, OSError) as error:
        print(f"warning: iteration {run.progress.iteration} was NOT saved; older checkpoints are untouched. {error}", flush=True)
        return False
    print(f" saved checkpoint {path}", flush=True)
    return True


def prepare_save_folder(config: Config, ranks: Ranks = ONE) -> None:
    """Make --save, and write into it from every rank: what is wrong with it is found before training, not at the first checkpoint.

    Raises ValueError on every rank when one cannot.
    """
    if config.checkpoint.save is not None:
        try_folder(config.checkpoint.save, ranks)
