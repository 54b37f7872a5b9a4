"""A DeepSpeed configuration file read with our flags: a value that a flag contradicts is refused,
and one that no flag gives is taken, as it wins over our default.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from megatron.config import compatibility
from megatron.config.derive import DEFAULTS, GROUP_OF, METADATA, data_parallel_size
from megatron.config.errors import UserError, first_faults, shortened
from megatron.config.groups import LR_DECAYS, Config
from megatron.config.input_files import KINDS, SETTINGS_LIMIT, read_json
from megatron.config.metadata import flag_name

# DeepSpeed's key -> our field.
SAME = {key: name for name, rules in METADATA.items() for key in rules["deepspeed"]}

# Names of data types, of torch and short ones.
DTYPES = {
    f"{module}{name}": short
    for short, names in {
        "fp32": ("fp32", "float32", "float"),
        "bf16": ("bf16", "bfloat16", "bfp16"),
        "fp16": ("fp16", "float16", "half"),
    }.items()
    for name in names
    for module in ("", "torch.")
}

Answer = tuple[str, str]  # a note and a fault, of which one is empty
Load = Callable[[str, Any], Any]  # a field's value from one of a file; raises UserError

OFFLOAD = (
    "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_optimizer.nvme_path",
)

PARTITION = "activation_checkpointing.partition_activations"
INPUTS_ON_HOST = "activation_checkpointing.cpu_checkpointing"

# Sections that are on where they do not specify whether they are enabled; the rest of
# `unsupported`, and these of precisions, are off.
ON_BY_DEFAULT = {
    *("compression_training", "sparse_attention", "weight_quantization", "expert_parallel"),
}
PRECISIONS = {"fp16", "bf16", "bfloat16"}


@functools.cache
def answers(section: str) -> dict[str, Any]:
    """Key -> its answer, of a table of compatibility.toml."""
    table = compatibility.data()["deepspeed"][section]
    each = table.items() if isinstance(table, dict) else ((row["keys"], row) for row in table)
    return {key: answer for keys, answer in each for key in keys.split()}


# Types of values, where our field does not give them: of SAME the text, and other numbers.
TEXT = ("optimizer.type", "data_types.grad_accum_dtype", "zero_optimization.offload_param.device")
NUMBERS = ("gradient_accumulation_steps", "zero_optimization.zero_hpz_partition_size")
WIRE_KEYS = ("communication_data_type", "fp32_allreduce")
DYNAMIC = ("initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")


@dataclass
class Comparison:
    """What a file means: settings that it gives, notes for the banner, and faults. `config` holds
    the settings so far, of which flags have given the fields `chosen`.
    """

    config: Config
    chosen: set[str]
    load: Load
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def settle(self, name: str, theirs: Any) -> Answer:
        """The answer for a value that is one of our field's: it equals, is taken, or contradicts a
        flag.
        """
        group, flag = GROUP_OF[name], flag_name(name)
        ours = getattr(getattr(self.config, group), name)
        if theirs == ours:
            return (f"equals no {flag}" if ours is None or ours is False else f"equals {flag}"), ""
        try:
            value = None if theirs is None else self.load(name, theirs)
        except UserError as problem:
            return "", f"{flag}: {problem}"
        bound = METADATA[name]["bound"]
        if bound is not None and value is not None and not bound.holds(value):
            return "", f"{flag} must be {bound.text}"
        precisions = {"bf16", "fp16", "fp64"}
        if name not in self.chosen and not (name in precisions and precisions & self.chosen):
            self.config = self.config.with_fields(group, **{name: value})
            return f"taken, as no flag sets it: {_spelled(name, value)}", ""
        if name not in self.chosen:
            return "", f"contradicts {' '.join(map(flag_name, precisions & self.chosen))}"
        remedy = "remove the flag" if theirs is None or theirs is False else _spelled(name, value)
        give = "" if remedy.startswith("remove") else "give "
        return "", f"contradicts {_spelled(name, ours)}; {give}{remedy} or change the file"

    def answer(self, key: str, value: Any, content: dict) -> Answer:
        """The note or the fault (the other is empty) that answers one key."""
        if value == "auto":
            return "follows the flags", ""
        if not key.endswith(".enabled") and _is_off(key, content, self.config):
            return "its section is not enabled", ""
        if unsupported := _unsupported(key):
            if value in (False, None, {}):
                return "off here too", ""
            return "", f"{answers('unsupported')[unsupported]}; take the section out"
        if value is None:
            return "not set", ""
        if fault := _kind_fault(key, value):
            return "", fault
        if key == "optimizer.params.betas":
            return self._betas(value)
        if key in WIRE_KEYS and value is not False:
            return self._wire(key, value)
        if fault := _refusal(key, value):
            return "", fault
        if key in OFFLOAD:
            device = content["zero_optimization"]["offload_optimizer"].get("device")
            return self._offload(key, value, device)
        if key in (PARTITION, INPUTS_ON_HOST) and (idle := _without_recompute(key, self.config)):
            return idle, ""
        if key.startswith("fp16.") and key[5:] in DYNAMIC and self._scale_is_static(content):
            return "has no effect with a static loss scale", ""
        if key in SAME:
            return self.settle(SAME[key], _in_our_terms(key, value))
        if key == "gradient_accumulation_steps":
            return self._accumulation(value)
        return _without_a_flag(key, value)

    def _scale_is_static(self, content: dict) -> bool:
        theirs = content["fp16"].get("loss_scale")
        if "loss_scale" in self.chosen or theirs in (None, "auto"):
            return self.config.precision.loss_scale is not None
        return theirs != 0

    def _betas(self, value: Any) -> Answer:
        numbers = isinstance(value, list) and all(type(beta) in (int, float) for beta in value)
        if not numbers or len(value) != 2:
            return "", "expected a list of two numbers"
        return _joined([self.settle("adam_beta1", value[0]), self.settle("adam_beta2", value[1])])

    def _wire(self, key: str, value: Any) -> Answer:
        """What gradients are sent in; --main-grads-dtype bf16 sets that too."""
        named = "fp32" if value is True and key == "fp32_allreduce" else value
        dtype = DTYPES.get(named.lower()) if isinstance(named, str) else None
        if dtype not in ("fp32", "bf16"):
            return (
                "",
                "gradients are sent in fp32, or in bf16 with --grad-reduce-in-bf16; take it out",
            )
        if self.config.optimizer.main_grads_dtype == "bf16":
            return self.settle("main_grads_dtype", dtype)
        return self.settle("grad_reduce_in_bf16", dtype == "bf16")

    def _offload(self, key: str, value: Any, device: str | None) -> Answer:
        """Where the optimizer's state is: in files under a path, in host memory, or with the
        weights.
        """
        in_files = self.config.optimizer.optimizer_nvme_offload
        flag = "--optimizer-nvme-offload"
        if key == OFFLOAD[1]:
            if device != "nvme":
                return "has no effect without the device nvme", ""
            return self.settle("optimizer_nvme_offload", value)
        if device == "nvme":
            has_path = in_files is not None
            return (f"equals {flag}", "") if has_path else ("", f"give {flag} DIR")
        if in_files is not None:
            return "", f"contradicts {flag} {in_files}; drop the flag or change the file"
        return self.settle("optimizer_cpu_offload", device == "cpu")

    def _accumulation(self, steps: Any) -> Answer:
        config = self.config
        micro = config.training.micro_batch_size
        batch = config.training.global_batch_size
        world = config.distributed.world_size
        if type(steps) is not int or steps < 1 or not micro or (not batch and world is None):
            return (
                "",
                "give --micro-batch-size and --global-batch-size, which set how many steps "
                "are accumulated",
            )
        unit = micro * steps
        if not batch:
            return self.settle("global_batch_size", unit * data_parallel_size(config, world or 0))
        # only a dry run knows its ranks here
        ranks = batch // unit if world is None else data_parallel_size(config, world)
        if ranks and batch == unit * ranks:
            return (
                f"equals --global-batch-size {batch} with --micro-batch-size {micro} on {ranks} "
                "data-parallel rank(s)",
                "",
            )
        means = (
            f"a multiple of {unit}"
            if world is None
            else f"{unit * ranks} on {ranks} data-parallel rank(s)"
        )
        return (
            "",
            f"with --micro-batch-size {micro} the --global-batch-size is {means}, not {batch}",
        )

    def scheduler(self, section: dict) -> Answer:
        """The learning-rate schedule of a file as ours. A warm-up is linear here: one that is
        logarithmic by DeepSpeed's default is noted, one that is so by the file refused.
        """
        kind, params = section.get("type"), section.get("params") or {}
        if kind is None:
            return "no schedule", ""
        style = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
        if kind not in style or not isinstance(params, dict):
            return "", (
                "not a schedule here; take the section out and give --lr-decay-style "
                f"{' or '.join(LR_DECAYS)} with --lr-warmup-iters N"
            )
        known = {name: value for name, value in params.items() if value not in ("auto", None)}
        wrong = [
            name
            for name, value in known.items()
            if name != "warmup_type" and type(value) not in (int, float)
        ]
        if wrong:
            return "", f"{wrong[0]}: expected a number"
        values = {"lr_decay_style": style[kind], **_schedule_values(known, self.config)}
        if "warmup_num_steps" not in params:
            values.setdefault("lr_warmup_iters", 1000)
        shown = " ".join(_spelled(name, value) for name, value in values.items())
        if known.get("warmup_type", "linear") != "linear":
            return "", (
                'a warm-up that is not linear is not supported; set warmup_type to "linear", or '
                f"take the section out and give {shown}"
            )
        values, problem = _in_run_units(values, self.config)
        if problem:
            return "", f"{problem}, or take the section out and give {shown}"
        answers = [self.settle(name, value) for name, value in values.items()]
        note, fault = _joined(answers)
        if note and "warmup_type" not in known:
            note += "; the warm-up is linear, where DeepSpeed's default is logarithmic"
        return note, fault


def _schedule_values(known: dict[str, Any], config: Config) -> dict[str, Any]:
    """Our fields of the parameters of a DeepSpeed schedule."""
    names = {
        "warmup_min_lr": "lr_warmup_init",
        "warmup_max_lr": "lr",
        "warmup_num_steps": "lr_warmup_iters",
        "total_num_steps": "lr_decay_iters",
    }
    values = {ours: known[theirs] for theirs, ours in names.items() if theirs in known}
    ratios = {"warmup_min_ratio": "lr_warmup_init", "cos_min_ratio": "min_lr"}
    for theirs, ours in ratios.items():
        if theirs in known and config.optimizer.lr is not None:
            values[ours] = known[theirs] * config.optimizer.lr
    return values


def _in_run_units(values: dict[str, Any], config: Config) -> tuple[dict[str, Any], str]:
    """Lengths in iterations as samples where the run is measured in samples, and what is missing
    for that.
    """
    if config.training.train_samples is None:
        return values, ""
    lengths = [name for name in values if name.endswith("_iters")]
    batch = config.training.global_batch_size
    varies = config.training.rampup_batch_size or config.training.step_batch_size_schedule
    if lengths and (batch is None or varies):
        return values, "the run is measured in --train-samples; give --train-iters"
    return {
        name.replace("_iters", "_samples"): value * (batch or 0) if name in lengths else value
        for name, value in values.items()
    }, ""


def _joined(answers: list[Answer]) -> Answer:
    """Several answers about one key as one."""
    faults = [fault for _, fault in answers if fault]
    if faults:
        return "", "; ".join(faults)
    return "; ".join(dict.fromkeys(note for note, _ in answers if note)), ""


def _spelled(name: str, value: Any) -> str:
    """A field with a value as it is typed."""
    if value is True or value is None:
        return flag_name(name)
    if value is False:
        return METADATA[name]["off"] or flag_name("no_" + name)
    return (
        f"{flag_name(name)} {value:g}"
        if isinstance(value, float)
        else (f"{flag_name(name)} {value}")
    )


def compare_with_deepspeed(path: str, config: Config, chosen: set[str], load: Load) -> Comparison:
    """A DeepSpeed file against the settings of the flags, see Comparison."""
    result = Comparison(config, chosen, load)
    try:
        content = read_json(path, dict, SETTINGS_LIMIT)
    except UserError as problem:
        result.faults.append(f"--deepspeed_config {path}: cannot be read: {problem}")
        return result
    faults: list[str] = []
    for names, value in _flatten(content):
        key = ".".join(names)
        shown = f"{key[:80]} = {shortened(json.dumps(value), 80)}"
        if any("." in name for name in names):
            note = ""
            fault = "a key with a dot is no section with a setting; write sections as objects"
        elif any(_is_single(".".join(names[:count])) for count in range(1, len(names))):
            note = ""
            fault = "expected a single value, found an object"
        elif key == "scheduler":
            note, fault = result.scheduler(value if isinstance(value, dict) else {})
            shown = key
        else:
            note, fault = result.answer(key, value, content)
            shown = _unsupported(key) if fault and _unsupported(key) else shown
        if note:
            result.notes.append(f"DeepSpeed's {shown}: {note}")
        if fault:
            faults.append(f"--deepspeed_config {path}: {shown}: {fault}")
    faults = list(dict.fromkeys(faults))
    result.faults += first_faults(faults, f"--deepspeed_config {path}")
    return result


def _is_single(key: str) -> bool:
    """Whether a key has a value and is no section."""
    return any(key in keys for keys in (SAME, answers("refused"), OFFLOAD, NUMBERS, WIRE_KEYS))


def _flatten(
    content: dict, sections: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each setting as the names that lead to it, and its value; those that equal our fields come
    first, since others are read with them, and the schedule last and whole.
    """
    found = sorted(_leaves(content, sections), key=_order)
    yield from found


def _leaves(content: dict, sections: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in content.items():
        if isinstance(value, dict) and value and (*sections, key) != ("scheduler",):
            yield from _leaves(value, (*sections, key))
        else:
            yield (*sections, key), value


def _order(setting: tuple[tuple[str, ...], Any]) -> int:
    names, _ = setting
    if names == ("scheduler",):
        return 3
    if ".".join(names) in OFFLOAD:  # the path before the device, which may do without
        return 1 if names[-1] == "nvme_path" else 2
    return 0 if ".".join(names) in SAME else 2


def _is_off(key: str, content: dict, config: Config) -> bool:
    """Whether a section around a key is not enabled."""
    section: Any = content
    names = key.split(".")[:-1]
    for depth, name in enumerate(names):
        section = section.get(name) if isinstance(section, dict) else None
        if not isinstance(section, dict):
            return False
        path = ".".join(names[: depth + 1])
        off = (PRECISIONS | answers("unsupported").keys()) - ON_BY_DEFAULT
        enabled = section.get("enabled", path not in off)
        if enabled == "auto":
            ours = {"fp16": config.precision.fp16}
            ours |= dict.fromkeys(("bf16", "bfloat16"), config.precision.bf16)
            enabled = ours.get(path, False)
        if enabled is False:
            return True
    return False


def _unsupported(key: str) -> str:
    """The unsupported section that holds a key, or an empty string."""
    found = (name for name in answers("unsupported") if key == name or key.startswith(name + "."))
    return next(found, "")


def _refusal(key: str, value: Any) -> str:
    """Why a value of a key is refused; empty when it is not."""
    row = answers("refused").get(key)
    if row is None:
        return ""
    named = DTYPES.get(value.lower(), value) if isinstance(value, str) else value
    if "accepted" in row:
        refused = named not in row["accepted"]
    else:
        refused = named in row["refused"] if "refused" in row else bool(value)
    return row["text"] if refused else ""


def _kind_fault(key: str, value: Any) -> str:
    """What is wrong with the type or size of a value that is compared; empty when nothing is."""
    kind: type
    if key in TEXT:
        kind = str
    elif key in SAME and isinstance(DEFAULTS[SAME[key]], bool):
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


def _without_recompute(key: str, config: Config) -> str:
    """Why nothing becomes of a key that specifies where the layer inputs are which full
    recomputation keeps; empty where something does. Shares are of copies that tensor-parallel ranks
    would keep.
    """
    distributed = config.distributed
    several = distributed.tensor_model_parallel_size > 1 and not distributed.sequence_parallel
    if config.training.recompute_granularity == "full" and (several or key != PARTITION):
        return ""
    where = " on several tensor-parallel ranks" if key == PARTITION else ""
    return f"has no effect unless layers are recomputed{where}"


def _without_a_flag(key: str, value: Any) -> Answer:
    """The answer for a key that none of our flags equals."""
    noted = answers("noted")
    names = [name for name in noted if key == name or key.startswith(name + ".")]
    if names:
        return noted[max(names, key=len)], ""
    if value is False or value is None or value == {}:
        return "off here too", ""
    return "", "not supported; take it out"


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
    if key == "data_types.grad_accum_dtype":
        return DTYPES[value.lower()]
    adams = ("adam", "adamw", "fusedadam", "deepspeedcpuadam", "cpuadam")
    if key == "optimizer.type" and str(value).lower() in adams:
        return "adam"
    return value.lower() if isinstance(value, str) else value
