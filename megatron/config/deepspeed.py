"""A DeepSpeed configuration file read against our flags: never a second source of settings, only a
comparison.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from megatron.config.derive import DEFAULTS, GROUP_OF, METADATA, data_parallel_size
from megatron.config.errors import UserError, first_faults, shortened
from megatron.config.groups import Config
from megatron.config.input_files import KINDS, SETTINGS_LIMIT, read_json
from megatron.config.metadata import flag_name

# DeepSpeed's key -> group and field of our flag.
SAME = {
    key: (GROUP_OF[field], field) for field, rules in METADATA.items() for key in rules["deepspeed"]
}

# What gradients are sent in: values of communication_data_type -> --grad-reduce-in-bf16.
WIRE = {"fp32": False, "bf16": True, "bfp16": True}

Answer = tuple[str, str]  # a note and a fault, of which one is empty

OFFLOAD = (
    "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_optimizer.nvme_path",
)

PARTITION = "activation_checkpointing.partition_activations"
INPUTS_ON_HOST = "activation_checkpointing.cpu_checkpointing"

# Keys that are refused with these values, and what to do.
REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "zero_optimization.offload_optimizer.device": (
        lambda value: value not in ("cpu", "nvme", "none", None),
        "no such place here; use cpu or nvme",
    ),
    "zero_optimization.offload_param.device": (
        lambda value: value not in ("cpu", "none", None),
        "weights are kept on the device or in host memory, not in files; use cpu "
        "(--param-cpu-offload; master weights and moments may be in files: "
        "--optimizer-nvme-offload DIR)",
    ),
    "zero_optimization.zero_hpz_partition_size": (
        lambda value: value != 1,
        "no second copy of the weights is kept inside a node; to gather inside a node give "
        "--zero-shard-size, which shards all of the stage there, and take this out",
    ),
    **dict.fromkeys(
        (
            "zero_optimization.zero_quantized_weights",
            "zero_optimization.zero_quantized_nontrainable_weights",
            "zero_optimization.zero_quantized_gradients",
            "zero_optimization.zeropp_loco_param",
        ),
        (bool, "weights and gradients are never quantized on the wire; take it out"),
    ),
    "data_types.grad_accum_dtype": (
        lambda value: value not in ("fp32", "bf16", None),
        "gradients are accumulated in fp32, or in bf16 with --main-grads-dtype bf16; take it out",
    ),
}

# Keys (and everything under them) that change nothing about the result.
NOTED = {
    "steps_per_print": "--log-interval sets how often a line is printed",
    "wall_clock_breakdown": "--timing-log-level 1 logs timers",
    "memory_breakdown": "memory is always logged",
    "dump_state": "--print-config prints the settings",
    "tensorboard": "use --tensorboard-dir",
    "wandb": "use --wandb-project",
    "csv_monitor": "metrics.jsonl is always written",
    "comet": "metrics.jsonl is always written",
    "flops_profiler": "throughput and MFU are always logged",
    "comms_logger": "communication is not logged",
    "activation_checkpointing": (
        "--checkpoint-activations switches recompute on, and --recompute-num-layers says how many "
        "layers share a saved input"
    ),
    "zero_allow_untested_optimizer": "DeepSpeed's optimizers are not used",
    "zero_force_ds_cpu_optimizer": "DeepSpeed's optimizers are not used",
    "prescale_gradients": "gradients are summed over ranks, and scaled once",
    "gradient_predivide_factor": "gradients are summed over ranks, and scaled once",
    "data_types.grad_accum_dtype": "--main-grads-dtype says what gradients are accumulated in",
    "zero_optimization": (
        "layers are gathered and reduced whole, in the order in which they come: no such "
        "size or threshold is to be chosen"
    ),
    "zero_optimization.overlap_comm": (
        "see --overlap-grad-reduce and --overlap-param-gather, which are on"
    ),
    "zero_optimization.reduce_scatter": "gradients are always reduce-scattered",
    "zero_optimization.offload_optimizer": (
        "how the offloaded optimizer moves its data is chosen here: see --optimizer-cpu-offload"
    ),
    "zero_optimization.offload_param": (
        "how offloaded weights are moved is chosen here: see --param-cpu-offload"
    ),
    "zero_optimization.cpu_offload_use_pin_memory": (
        "how the offloaded optimizer moves its data is chosen here: see --optimizer-cpu-offload"
    ),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": (
        "checkpoints are independent of the ZeRO stage"
    ),
    "zero_optimization.gather_16bit_weights_on_model_save": (
        "checkpoints are independent of the ZeRO stage"
    ),
    "zero_optimization.load_from_fp32_weights": "checkpoints are independent of the ZeRO stage",
    "zero_optimization.elastic_checkpoint": "checkpoints are independent of the ZeRO stage",
    "pipeline.partition": "--pipeline-model-parallel-layout says how layers are shared out",
    "pipeline.activation_checkpoint_interval": "--checkpoint-activations switches recompute on",
    "pipeline.seed_layers": "every draw is computed from --seed",
    "pipeline.pipe_partitioned": "--sequence-parallel divides what travels between pipeline ranks",
    "pipeline.grad_partitioned": "--sequence-parallel divides what travels between pipeline ranks",
    "fp16.auto_cast": "inputs are token ids",
    "bf16.immediate_grad_update": (
        "weight gradients are added where they are accumulated as they are computed"
    ),
}


# Types of values, where our field does not give them: of SAME the text, and other numbers.
TEXT = ("optimizer.type", "data_types.grad_accum_dtype", "zero_optimization.offload_param.device")
NUMBERS = ("gradient_accumulation_steps", "zero_optimization.zero_hpz_partition_size")
WIRE_KEYS = ("communication_data_type", "fp32_allreduce")
SINGLE = {*SAME, *REFUSED, *OFFLOAD, *NUMBERS, *WIRE_KEYS}  # keys that are no sections


def compare_with_deepspeed(path: str, config: Config) -> tuple[list[str], list[str]]:
    """Notes (keys that equal our flags or need none) and faults (contradictions, unsupported keys)
    of a DeepSpeed file.
    """
    try:
        content = read_json(path, dict, SETTINGS_LIMIT)
    except UserError as problem:
        return [], [f"--deepspeed_config {path}: cannot be read: {problem}"]
    notes = []
    faults = []
    for names, value in _flatten(content):
        key = ".".join(names)
        shown = f"{key[:80]} = {shortened(json.dumps(value), 80)}"
        if any("." in name for name in names):
            note = ""
            fault = "a key with a dot is no section with a setting; write sections as objects"
        elif any(".".join(names[:count]) in SINGLE for count in range(1, len(names))):
            note = ""
            fault = "expected a single value, found an object"
        else:
            note, fault = _answer(key, value, content, config)
        if note:
            notes.append(f"DeepSpeed's {shown}: {note}")
        if fault:
            faults.append(f"--deepspeed_config {path}: {shown}: {fault}")
    return notes, first_faults(faults, f"--deepspeed_config {path}")


def _flatten(
    content: dict, sections: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each setting as the names that lead to it, and its value."""
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, (*sections, key))
        else:
            yield (*sections, key), value


def _kind_fault(key: str, value: Any) -> str:
    """What is wrong with the type or size of a value that is compared; empty when nothing is."""
    kind: type
    if key in TEXT:
        kind = str
    elif key in SAME and isinstance(DEFAULTS[SAME[key][1]], bool):
        kind = bool
    elif key in SAME or key in NUMBERS:
        kind = float
    else:
        return ""
    if kind is float and not (type(value) in (int, float) and abs(value) < 2**63):
        return "expected a number"
    if kind is not float and type(value) is not kind:
        return f"expected {KINDS[kind]}"
    if key == "fp16.initial_scale_power" and not 0 <= value <= 127:
        return "expected a power of two from 0 to 127, the largest in fp32"
    return ""


def _answer(key: str, value: Any, content: dict, config: Config) -> Answer:
    """The note or the fault (the other is empty) that answers one key."""
    if value == "auto":
        return "follows the flags", ""
    section = content.get(key.partition(".")[0])
    switched_off = isinstance(section, dict) and section.get("enabled") is False
    if switched_off and not key.endswith(".enabled"):
        return "its section is not enabled", ""
    if value is not None and (fault := _kind_fault(key, value)):
        return "", fault
    if key == "optimizer.params.betas":
        return _betas(value, config)
    if key in WIRE_KEYS and value is not None and value is not False:
        return _wire(key, value, config)
    if key in REFUSED and REFUSED[key][0](value):
        return "", REFUSED[key][1]
    if key in OFFLOAD:
        device = content["zero_optimization"]["offload_optimizer"].get("device")
        return _offload(key, value, device, config)
    if key in (PARTITION, INPUTS_ON_HOST) and (idle := _without_recompute(key, config)):
        return idle, ""
    unsaid = key == "data_types.grad_accum_dtype" and value is None
    if key in SAME and not unsaid:
        group, field = SAME[key]
        ours = getattr(getattr(config, group), field)
        return _compare(_in_our_terms(key, value), ours, flag_name(field))
    if key == "gradient_accumulation_steps":
        return _accumulation(value, config)
    return _without_a_flag(key, value)


def _without_recompute(key: str, config: Config) -> str:
    """Why nothing becomes of a key that says where the layer inputs are which full recomputation
    keeps; empty where something does. Shares are of copies that tensor-parallel ranks would keep.
    """
    distributed = config.distributed
    several = distributed.tensor_model_parallel_size > 1 and not distributed.sequence_parallel
    if config.training.recompute_granularity == "full" and (several or key != PARTITION):
        return ""
    where = " on several tensor-parallel ranks" if key == PARTITION else ""
    return f"acts only where layers are recomputed{where}"


def _without_a_flag(key: str, value: Any) -> Answer:
    """The answer for a key that none of our flags equals."""
    names = [name for name in NOTED if key == name or key.startswith(name + ".")]
    if names:
        return NOTED[max(names, key=len)], ""
    if value is False or value is None or value == {}:
        return "off here too", ""
    return "", "not supported; take it out"


def _betas(value: Any, config: Config) -> Answer:
    if not isinstance(value, list) or not all(type(beta) in (int, float) for beta in value):
        return "", "expected a list of two numbers"
    ours = [config.optimizer.adam_beta1, config.optimizer.adam_beta2]
    return _compare(value, ours, "--adam-beta1 and --adam-beta2")


def _wire(key: str, value: Any, config: Config) -> Answer:
    """What gradients are sent in; --main-grads-dtype bf16 says that too."""
    named = "fp32" if value is True and key == "fp32_allreduce" else value
    if not isinstance(named, str) or named.lower() not in WIRE:
        return (
            "",
            "gradients are sent in fp32, or in bf16 with --grad-reduce-in-bf16; take it out",
        )
    in_bf16 = WIRE[named.lower()]
    if config.optimizer.main_grads_dtype == "bf16":
        return _compare("bf16" if in_bf16 else "fp32", "bf16", "--main-grads-dtype")
    return _compare(in_bf16, config.distributed.grad_reduce_in_bf16, "--grad-reduce-in-bf16")


def _in_our_terms(key: str, value: Any) -> Any:
    """DeepSpeed's value in the units of our flag."""
    if key == "fp16.loss_scale" and value == 0:
        return None  # dynamic
    if key == "fp16.initial_scale_power" and isinstance(value, (int, float)):
        return 2.0**value
    if key == "zero_optimization.offload_param.device":
        return value == "cpu"
    if key == "zero_optimization.mics_shard_size" and value == -1:
        return None  # all ranks
    if key == "optimizer.type" and str(value).lower() in ("adam", "adamw", "fusedadam"):
        return "adam"
    return value.lower() if isinstance(value, str) else value


def _offload(key: str, value: Any, device: str | None, config: Config) -> Answer:
    """Where the optimizer's state is: in files under a path, in host memory, or with the
    weights.
    """
    in_files = config.optimizer.optimizer_nvme_offload
    flag = "--optimizer-nvme-offload"
    if key == OFFLOAD[1]:
        return (
            _compare(value, in_files, flag)
            if device == "nvme"
            else ("acts only with the device nvme", "")
        )
    if device == "nvme":
        return (f"equals {flag}", "") if in_files is not None else ("", f"give {flag} DIR")
    if in_files is not None:
        return "", f"contradicts {flag} {in_files}; drop the flag or change the file"
    return _compare(
        device == "cpu", config.optimizer.optimizer_cpu_offload, "--optimizer-cpu-offload"
    )


def _compare(theirs: Any, ours: Any, flag: str) -> Answer:
    if theirs == ours:
        return (f"equals no {flag}" if ours is None or ours is False else f"equals {flag}"), ""
    if ours is None or ours is False:
        return "", f"give {flag}" + ("" if theirs is True else f" {theirs}")
    if ours is True:
        return "", f"contradicts {flag}; drop the flag or change the file"
    return "", f"contradicts {flag} {ours}; " + (
        f"give {flag} {theirs}" if theirs is not None else "drop the flag"
    ) + " or change the file"


def _accumulation(steps: Any, config: Config) -> Answer:
    micro = config.training.micro_batch_size
    batch = config.training.global_batch_size
    world = config.distributed.world_size
    if type(steps) is not int or steps < 1 or not micro or not batch:
        return (
            "",
            (
                "give --micro-batch-size and --global-batch-size, which say how many steps are "
                "accumulated"
            ),
        )
    unit = micro * steps
    # only a dry run knows its ranks here
    ranks = batch // unit if world is None else data_parallel_size(config, world)
    if ranks and batch == unit * ranks:
        return (
            (
                f"equals --global-batch-size {batch} with --micro-batch-size {micro} on {ranks} "
                "data-parallel rank(s)"
            ),
            "",
        )
    means = (
        f"a multiple of {unit}"
        if world is None
        else f"{unit * ranks} on {ranks} data-parallel rank(s)"
    )
    return "", f"with --micro-batch-size {micro} the --global-batch-size is {means}, not {batch}"
