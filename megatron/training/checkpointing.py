"""Where a run's checkpoints come from and go to: find the one to load, read it into the run, write one."""

from __future__ import annotations

import tempfile
from pathlib import Path

from megatron.checkpoint.manifest import CheckpointError
from megatron.checkpoint.ranks import Ranks
from megatron.checkpoint.reader import Checkpoint, find_checkpoint
from megatron.checkpoint.writer import save_checkpoint
from megatron.config.groups import Config
from megatron.model.layout import owns
from megatron.training.run import Run
from megatron.training.resume import run_state


def locate_checkpoint(config: Config, ranks: Ranks) -> Checkpoint | None:
    """The checkpoint that --load names, as rank 0 finds it; None for a first start. Raises CheckpointError when it must exist and does not."""
    folder, step = config.checkpoint.load, config.checkpoint.ckpt_step
    if folder is None:
        return None
    path = ranks.agree(lambda: str(find_checkpoint(folder, step) or "") if ranks.first else "")[0]
    if path:
        return Checkpoint(path)
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
    boxes = [*run.optimizer.weight_boxes(), *(run.optimizer.state_boxes() if run.config.checkpoint.save_optim else ())]
    own = [(box, tensor) for box, tensor in boxes if owns(box, run.groups)]
    try:
        path = save_checkpoint(folder, run.progress.iteration, own, run_state(run), ranks=Ranks(run.groups.world, run.device))
    except (CheckpointError, OSError) as error:
        print(f"warning: iteration {run.progress.iteration} was NOT saved; older checkpoints are untouched. {error}", flush=True)
        return False
    print(f" saved checkpoint {path}", flush=True)
    return True


def prepare_save_folder(config: Config) -> None:
    """Make --save and write into it once: an unwritable disk is found before training, not at the first checkpoint. Raises CheckpointError."""
    if config.checkpoint.save is None:
        return
    try:
        Path(config.checkpoint.save).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=config.checkpoint.save) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        raise CheckpointError(f"--save {config.checkpoint.save}: cannot be written to: {error.strerror}; make it writable and free space on its disk, "
                              "or choose another folder") from error
