"""What a checkpoint holds beside tensors, and what a run that loads one must share with it."""

from __future__ import annotations

import dataclasses
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from megatron.checkpoint.manifest import CheckpointError
from megatron.checkpoint.reader import Checkpoint
from megatron.config.groups import Config, ModelConfig
from megatron.dist.groups import describe_layout
from megatron.optimizer.lr_schedule import Schedule

if TYPE_CHECKING:
    from megatron.training.run import Run

# Model fields that change neither weights nor results, and those a continued run may change on purpose.
_FREE_MODEL_FIELDS = {"attention_backend", "hidden_dropout", "attention_dropout", "z_loss_coeff", "init_method_std"}
_NO_ARITHMETIC = {"init_method_std", "distributed_timeout_minutes", "world_size", "tensor_model_parallel_size", "pipeline_model_parallel_size",
                  "use_tp_pp_dp_mapping", "num_layers_per_virtual_pipeline_stage", "zero3_keep_gathered", "overlap_param_gather"}
_OPTIMIZER_ARITHMETIC = ("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype", "optimizer_cpu_offload", "optimizer_offload_fraction")


def run_state(run: Run) -> dict[str, Any]:
    """The JSON state of a checkpoint."""
    return {
        **asdict(run.progress),
        "optimizer_steps": run.optimizer.steps.item(),
        "scaler": run.scaler.state(),
        "schedule": asdict(run.schedule),
        "ledger": run.data.ledger,
        "config": run.config.to_dict(),
        "vocab_size": run.vocab_size,
        "tokenizer": run.tokenizer_fingerprint,
        "versions": {"torch": torch.__version__},
        "layout": describe_layout(run.groups.layout),
        "device": run.device_names,
    }


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def continuity(checkpoint: Checkpoint, run: Run) -> str:
    """For the log: whether the run goes on with the bits of one that was never interrupted, and if not, what makes them differ."""
    if run.config.checkpoint.finetune or not run.config.checkpoint.load_optim or run.config.evaluation.skip_train:
        return ""
    theirs, ours = _decides_rounding(checkpoint.state), _decides_rounding(run_state(run))
    if run.device.type == "cpu" and _same_sums(checkpoint.state["config"], run.config.to_dict(), run.chunk):
        ours["--zero-stage"] = theirs["--zero-stage"]
    different = [f"{name} {theirs.get(name)} -> {value}" for name, value in ours.items() if theirs.get(name) != value]
    return f"; goes on from the same state, not bit for bit: {', '.join(different)}" if different else "; goes on bit for bit"


def _decides_rounding(state: dict[str, Any]) -> dict[str, Any]:
    config = {group: {**defaults, **state["config"][group]} for group, defaults in Config().to_dict().items()}  # a field may be younger than the state
    fields = {**config["model"], **config["precision"], **config["distributed"], "micro_batch_size": config["training"]["micro_batch_size"],
              **{name: config["optimizer"][name] for name in _OPTIMIZER_ARITHMETIC}}
    flags = {f"--{name.replace('_', '-')}": value for name, value in fields.items() if name not in _NO_ARITHMETIC}
    return {"layout": state.get("layout"), "device": state.get("device"), "torch": state["versions"]["torch"], **flags}


def _same_sums(theirs: dict[str, Any], ours: dict[str, Any], chunk: int) -> bool:
    """Whether the ZeRO stages of two configurations add up gradients and their norm in the same order, `chunk` samples being one micro-batch of all
    ranks: stages 0 and 1 add over micro-batches first, 2 and 3 over ranks first; a norm for clipping is that of the whole at 0, of shards above."""
    stages = [config["distributed"].get("zero_stage", 0) for config in (theirs, ours)]
    accumulates = any(config["training"]["global_batch_size"] > chunk for config in (theirs, ours))
    clips = any(config["optimizer"]["clip_grad"] > 0 for config in (theirs, ours))
    return not (accumulates and (stages[0] < 2) != (stages[1] < 2)) and not (clips and (stages[0] == 0) != (stages[1] == 0))


def refuse_foreign(checkpoint: Checkpoint, config: Config, vocab_size: int, tokenizer_fingerprint: str) -> None:
    """Raise CheckpointError listing every field in which the run may not differ from the checkpoint, with both values."""
    state, faults = checkpoint.state, []
    for field in dataclasses.fields(ModelConfig):
        ours, theirs = getattr(config.model, field.name), state["config"]["model"].get(field.name, field.default)
        if ours != theirs and field.name not in _FREE_MODEL_FIELDS:
            faults.append(f"--{field.name.replace('_', '-')}: checkpoint {theirs}, command line {ours}")
    if vocab_size != state["vocab_size"]:
        faults.append(f"vocabulary: checkpoint {state['vocab_size']}, tokenizer {vocab_size}")
    if config.checkpoint.finetune or state.get("tokenizer") is None:
        pass  # another tokenizer of the same size is the user's choice when weights alone are taken
    else:
        if tokenizer_fingerprint != state["tokenizer"]:
            faults.append("tokenizer: its files are not those of the checkpoint (--finetune takes the weights alone)")
        for name, theirs in (("seed", state["config"]["training"]["seed"]), ("seq_length", state["config"]["data"]["seq_length"])):
            ours = config.training.seed if name == "seed" else config.data.seq_length
            if ours != theirs:
                faults.append(f"--{name.replace('_', '-')}: checkpoint {theirs}, command line {ours}; the data order would change (--finetune takes "
                              "the weights alone)")
    if faults:
        raise CheckpointError(f"{checkpoint.path} does not fit this run:\n" + "\n".join(f"  {fault}" for fault in faults))


def resumed_schedule(ours: Schedule, theirs: dict[str, Any], config: Config) -> Schedule:
    """The schedule to go on with: the command line's when equal or overridden, the checkpoint's when asked for.

    Raises CheckpointError when they differ and neither flag chooses.
    """
    if config.optimizer.use_checkpoint_opt_param_scheduler:
        return Schedule(**theirs)
    different = [f"  {name}: checkpoint {theirs[name]}, command line {value}" for name, value in asdict(ours).items() if theirs[name] != value]
    if different and not config.optimizer.override_opt_param_scheduler:
        raise CheckpointError(
            "the learning-rate or weight-decay schedule differs from the checkpoint's (lengths in samples):\n" + "\n".join(different)
            + "\nchoose with --override-opt-param-scheduler (command line) or --use-checkpoint-opt-param-scheduler (checkpoint)"
        )
    return ours
