"""A DeepSpeed configuration file read with our flags: a value that a flag contradicts is refused,
and one that no flag gives is taken, as it wins over our default. compatibility.toml has the keys.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.config import compatibility, needs
from megatron.config.derive import data_parallel_size, spelled
from megatron.config.errors import UserError, first_faults, shortened
from megatron.config.groups import LR_DECAYS
from megatron.config.input_files import SETTINGS_LIMIT, read_json
from megatron.config.metadata import flag_name
from megatron.config.options import FIELDS
from megatron.config.reading import Reading

PRECISIONS = {"bf16", "fp16", "fp64"}  # fields of which a run has one

DEVICE = "zero_optimization.offload_optimizer.device"
NVME_PATH = "zero_optimization.offload_optimizer.nvme_path"
STEPS = "gradient_accumulation_steps"
BETAS = "optimizer.params.betas"
WIRE_KEYS = ("communication_data_type", "fp32_allreduce")
SINGLE = {DEVICE, NVME_PATH, STEPS, *WIRE_KEYS}  # keys with a value, read by a function

INSTEAD = (
    f"take the section out and give --lr-decay-style {' or '.join(LR_DECAYS)} with "
    "--lr-warmup-iters N"
)

# Sections that are on without a key `enabled`; precisions and other unsupported ones are off.
ON_BY_DEFAULT = {"compression_training", "sparse_attention", "weight_quantization"}
ON_BY_DEFAULT |= {"expert_parallel"}


@functools.cache
def answers(section: str) -> dict[str, Any]:
    """Key -> its answer, of a table of compatibility.toml."""
    table = compatibility.data()["deepspeed"][section]
    each = table.items() if isinstance(table, dict) else ((row["keys"], row) for row in table)
    return {key: answer for keys, answer in each for key in keys.split()}


def field_of(key: str) -> str | None:
    """Our field that a key is compared with."""
    flag = answers("same").get(key)
    return flag and flag[2:].replace("-", "_")


def dtype_of(name: Any) -> Any:
    """fp32, bf16 or fp16 for a name of one of them, as torch's; other values as they are."""
    known = isinstance(name, str)
    return answers("dtypes").get(name.lower().removeprefix("torch."), name) if known else name


# DeepSpeed's value in the units of our flag, where they differ.
CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "fp16.loss_scale": lambda value: None if value == 0 else value,  # 0 is dynamic
    "fp16.initial_scale_power": lambda value: 2.0**value,
    "zero_optimization.offload_param.device": lambda value: value == "cpu",
    "zero_optimization.mics_shard_size": lambda value: None if value == -1 else value,  # all ranks
    "data_types.grad_accum_dtype": dtype_of,
    "optimizer.type": lambda value: answers("optimizers").get(value.lower(), value.lower()),
}


@dataclass
class Comparison:
    """A file's content, and the settings that it is compared with and adds to."""

    reading: Reading
    content: dict[str, Any]

    def settle(self, name: str, theirs: Any) -> str:
        """The note on a value of our field, which equals ours or is taken. Raises UserError for one
        that contradicts a flag.
        """
        flag, ours, bound = flag_name(name), self.reading.value(name), FIELDS[name].bound
        value, chosen = self._value(name, theirs), self.reading.chosen
        is_off = value is None or value is False
        if value == ours:
            return f"equals no {flag}" if is_off else f"equals {flag}"
        if bound is not None and value is not None and not bound.holds(value):
            raise UserError(f"{flag} must be {bound.text}")
        rivals = PRECISIONS & chosen if name in PRECISIONS else set()
        if name in chosen:
            fix = "remove the flag" if is_off else f"give {spelled(name, value)}"
            raise UserError(f"contradicts {spelled(name, ours)}; {fix} or change the file")
        if rivals:
            raise UserError(f"contradicts {' '.join(map(flag_name, rivals))}")
        self.reading.config = self.reading.config.with_fields(FIELDS[name].group, **{name: value})
        return f"taken, as no flag sets it: {spelled(name, value)}"

    def _value(self, name: str, theirs: Any) -> Any:
        try:
            return None if theirs is None else FIELDS[name].load(theirs)
        except UserError as problem:
            raise UserError(f"{flag_name(name)}: {problem}") from None

    def answer(self, key: str, value: Any) -> str:
        """The note that answers one key. Raises UserError with the fault."""
        # 1. Keys and sections that ask for nothing, and those that nothing here does.
        if value == "auto":
            return "follows the flags"
        if not key.endswith(".enabled") and self._is_off(key):
            return "its section is not enabled"
        if unsupported := _section(key, "unsupported"):
            if value in (False, None, {}):
                return "off here too"
            raise UserError(f"{answers('unsupported')[unsupported]}; take the section out")
        if value is None:
            return "not set"
        # 2. Keys with a function, since several of our flags answer them.
        if key in WIRE_KEYS and value is not False:
            return self._wire(key, value)
        _check_refused(key, value)
        if key in (DEVICE, NVME_PATH):
            return self._offload(key, value)
        if key == BETAS:
            return self._betas(value)
        if key == STEPS:
            return self._accumulation(value)
        if key.startswith("scheduler."):
            return self._schedule(key, value)
        # 3. Keys that equal a flag, or that change nothing.
        if name := field_of(key):
            value = self._value(name, _in_our_terms(key, value))
            return self._without_effect(name) or self.settle(name, value)
        if noted := _section(key, "noted"):
            return answers("noted")[noted]
        if value in (False, {}):
            return "off here too"
        raise UserError("not supported; take it out")

    def _is_off(self, key: str) -> bool:
        """Whether a section around a key is not enabled."""
        section, path = self.content, ""
        ours = self.reading.config.precision
        for name in key.split(".")[:-1]:
            section, path = section[name], f"{path}.{name}".lstrip(".")
            is_precision = path in ("fp16", "bf16", "bfloat16")
            default = path in ON_BY_DEFAULT or not (is_precision or path in answers("unsupported"))
            enabled = section.get("enabled", default)
            if enabled == "auto":
                enabled = ours.fp16 if path == "fp16" else is_precision and ours.bf16
            if enabled is False:
                return True
        return False

    def _without_effect(self, name: str) -> str:
        """Why a key changes nothing in this run; an empty string if it does."""
        value = self.reading.value
        if needs.DYNAMIC_SCALE in FIELDS[name].needs:
            theirs = self.content["fp16"].get("loss_scale")
            is_ours = "loss_scale" in self.reading.chosen or theirs in (None, "auto")
            is_static = value("loss_scale") is not None if is_ours else theirs != 0
            return "has no effect with a static loss scale" if is_static else ""
        if name not in ("distribute_saved_activations", "activation_offload"):
            return ""
        # both are about the layer inputs that full recomputation keeps, the first about the
        # copies of tensor-parallel ranks
        shards = name == "distribute_saved_activations"
        copies = value("tensor_model_parallel_size") > 1 and not value("sequence_parallel")
        if value("recompute_granularity") == "full" and (copies or not shards):
            return ""
        where = " on several tensor-parallel ranks" if shards else ""
        return f"has no effect unless layers are recomputed{where}"

    def _betas(self, value: Any) -> str:
        if not isinstance(value, list) or len(value) != 2:
            raise UserError("expected a list of two numbers")
        notes, faults = [], []
        for name, beta in zip(("adam_beta1", "adam_beta2"), value):
            try:
                notes.append(self.settle(name, beta))
            except UserError as problem:
                faults.append(str(problem))
        if faults:
            raise UserError("; ".join(faults))
        return "; ".join(dict.fromkeys(notes))

    def _wire(self, key: str, value: Any) -> str:
        """What gradients are sent in; --main-grads-dtype bf16 sets that too."""
        dtype = "fp32" if value is True and key == "fp32_allreduce" else dtype_of(value)
        if dtype not in ("fp32", "bf16"):
            raise UserError(
                "gradients are sent in fp32, or in bf16 with --grad-reduce-in-bf16; take it out"
            )
        if self.reading.value("main_grads_dtype") == "bf16":
            return self.settle("main_grads_dtype", dtype)
        return self.settle("grad_reduce_in_bf16", dtype == "bf16")

    def _offload(self, key: str, value: Any) -> str:
        """Where the optimizer's state is: in files under a path, in host memory, or with the
        weights.
        """
        in_files, flag = self.reading.value("optimizer_nvme_offload"), "--optimizer-nvme-offload"
        device = self.content["zero_optimization"]["offload_optimizer"].get("device")
        if key == NVME_PATH and device != "nvme":
            return "has no effect without the device nvme"
        if key == NVME_PATH:
            return self.settle("optimizer_nvme_offload", value)
        if device == "nvme" and in_files is None:
            raise UserError(f"give {flag} DIR")
        if device != "nvme" and in_files is not None:
            raise UserError(f"contradicts {flag} {in_files}; drop the flag or change the file")
        if device == "nvme":
            return f"equals {flag}"
        return self.settle("optimizer_cpu_offload", device == "cpu")

    def _accumulation(self, steps: Any) -> str:
        """The global batch; only a dry run knows its ranks here, other runs take what fits."""
        names = "micro_batch_size", "global_batch_size", "world_size"
        micro, batch, world = map(self.reading.value, names)
        if type(steps) is not int or steps < 1 or not micro or (not batch and world is None):
            raise UserError("give --micro-batch-size and --global-batch-size instead")
        unit = micro * steps
        ranks = batch // unit if world is None else data_parallel_size(self.reading.config, world)
        note = self.settle("global_batch_size", unit * max(1, ranks))
        return f"{note}: {micro} x {steps} on {max(1, ranks)} data-parallel rank(s)"

    def _schedule(self, key: str, value: Any) -> str:
        """The kind of a learning-rate schedule, or a parameter of it in the run's units. A warm-up
        is linear here: one that is logarithmic by DeepSpeed's default is noted, one that is so by
        the file refused.
        """
        section, field, get = self.content["scheduler"], field_of(key), self.reading.value
        style = answers("schedules").get(str(section.get("type")))
        if key == "scheduler.type":
            if style is None:
                raise UserError(f"not a schedule here; {INSTEAD}")
            note = self.settle("lr_decay_style", style)
            linear = "; the warm-up is linear, where DeepSpeed's default is logarithmic"
            return note if "warmup_type" in section["params"] else note + linear
        if style is None:
            return "has no effect without a type of schedule"
        if field is None:
            return "has no equal here, and none is needed"
        if type(value) not in (int, float):
            raise UserError("expected a number")
        if key.endswith("_ratio"):
            if get("lr") is None:
                return "a share of --lr, which is not given"
            value *= get("lr")
        if field.endswith("_iters") and get("train_samples") is not None:
            batch = get("global_batch_size")
            if batch is None or get("rampup_batch_size") or get("step_batch_size_schedule"):
                raise UserError(
                    f"the run is measured in --train-samples; give --train-iters, or {INSTEAD}"
                )
            field, value = field.replace("_iters", "_samples"), value * batch
        return self.settle(field, value)


def compare_with_deepspeed(path: str, reading: Reading) -> None:
    """Compare the settings with a DeepSpeed file, and add those that no flag gives."""
    where = f"--deepspeed_config {path}"
    try:
        content = read_json(path, dict, SETTINGS_LIMIT)
    except UserError as problem:
        reading.faults.append(f"{where}: cannot be read: {problem}")
        return
    schedule = content.get("scheduler")
    if isinstance(schedule, dict):
        if not isinstance(schedule.setdefault("params", {}), dict):
            schedule["params"] = {}
        schedule["params"].setdefault("warmup_num_steps", 1000)  # DeepSpeed's default
    file, faults = Comparison(reading, content), []
    # keys that equal our fields come first, since others are read with them; the path before the
    # device, which may do without; the schedule last
    for names, value in sorted(_leaves(file.content), key=_order):
        key = ".".join(names)
        shown = f"{key[:80]} = {shortened(json.dumps(value), 80)}"
        try:
            _check_place(names)
            reading.notes.append(f"DeepSpeed's {shown}: {file.answer(key, value)}")
        except UserError as problem:
            faults.append(f"{where}: {_section(key, 'unsupported') or shown}: {problem}")
    reading.faults += first_faults(list(dict.fromkeys(faults)), where)


def _leaves(content: dict, sections: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each setting as the names that lead to it, and its value."""
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*sections, key))
        else:
            yield (*sections, key), value


def _order(setting: tuple[tuple[str, ...], Any]) -> int:
    key = ".".join(setting[0])
    if key.startswith("scheduler."):
        return 3
    return 0 if field_of(key) else 1 if key == NVME_PATH else 2


def _check_place(names: tuple[str, ...]) -> None:
    """Raises UserError for a key with a dot, and for one inside a key that has a value."""
    if any("." in name for name in names):
        raise UserError("a key with a dot is no section with a setting; write sections as objects")
    for count in range(1, len(names)):
        outer = ".".join(names[:count])
        if field_of(outer) or outer in answers("refused") or outer in SINGLE:
            raise UserError("expected a single value, found an object")


def _section(key: str, table: str) -> str:
    """The longest key of a table that is this one or holds it, or an empty string."""
    found = (name for name in answers(table) if key == name or key.startswith(name + "."))
    return max(found, key=len, default="")


def _check_refused(key: str, value: Any) -> None:
    """Raises UserError for a value that the table refuses."""
    row = answers("refused").get(key)
    if row is None:
        return
    named = dtype_of(value)
    if "accepted" in row:
        refused = json.dumps(named) not in map(json.dumps, row["accepted"])  # true is not 1
    else:
        refused = named in row["refused"] if "refused" in row else bool(value)
    if refused:
        raise UserError(row["text"])


def _in_our_terms(key: str, value: Any) -> Any:
    """DeepSpeed's value in the units of our flag. Raises UserError."""
    try:
        return CONVERSIONS.get(key, lambda value: value)(value)
    except AttributeError:
        raise UserError("expected text") from None
    except TypeError:
        raise UserError("expected a number") from None
    except OverflowError:
        raise UserError("too large") from None
