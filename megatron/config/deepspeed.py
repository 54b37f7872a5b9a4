"""A DeepSpeed configuration file read with our flags: a value that a flag contradicts is refused,
and one that no flag gives is taken, as it wins over our default. compatibility.toml has the keys.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.config import compatibility
from megatron.config.derive import RunView, condition_text, data_parallel_size, spelled
from megatron.config.errors import UserError, about, collected, shortened
from megatron.config.groups import LR_DECAYS
from megatron.config.input_files import SETTINGS_LIMIT, read_json
from megatron.config.metadata import flag_name
from megatron.config.options import FIELDS
from megatron.config.reading import Reading

PRECISIONS = {"bf16", "fp16", "fp64"}  # fields of which a run has one
BETAS = "optimizer.params.betas"
DEVICE = "zero_optimization.offload_optimizer.device"
STEPS = "gradient_accumulation_steps"
WIRE = ("communication_data_type", "fp32_allreduce")

INSTEAD = (
    f"take the section out and give --lr-decay-style {' or '.join(LR_DECAYS)} with "
    "--lr-warmup-iters N"
)


@functools.cache
def answers(section: str) -> dict[str, Any]:
    """Key -> its answer, of a table of compatibility.toml."""
    table = compatibility.data()["deepspeed"][section].items()
    return {key: answer for keys, answer in table for key in keys.split()}


def field_of(key: str) -> str | None:
    """Our field that a key is compared with."""
    flag = answers("same").get(key)
    return flag and flag[2:].replace("-", "_")


def dtype_of(name: Any) -> Any:
    """fp32, bf16 or fp16 for a name of one of them, as torch's; other values as they are."""
    known = isinstance(name, str)
    return answers("dtypes").get(name.lower().removeprefix("torch."), name) if known else name


# DeepSpeed's value in the units of our flag, where they differ; `get` has our other settings.
CONVERSIONS: dict[str, Callable[[Any, Callable], Any]] = {
    "fp16.loss_scale": lambda value, get: None if value == 0 else value,  # 0 is dynamic
    "fp16.initial_scale_power": lambda value, get: 2.0 ** min(value, 1023),
    "zero_optimization.offload_param.device": lambda value, get: value == "cpu",
    "zero_optimization.mics_shard_size": lambda value, get: None if value == -1 else value,  # all
    "data_types.grad_accum_dtype": lambda value, get: dtype_of(value),
    "optimizer.type": lambda value, get: answers("optimizers").get(str(value).lower(), value),
    "scheduler.params.warmup_min_ratio": lambda value, get: value * get("lr"),
    "scheduler.params.cos_min_ratio": lambda value, get: value * get("lr"),
}


@dataclass
class DeepSpeedFile:
    """Key -> value of a file, and the settings that it is compared with and adds to."""

    keys: dict[str, Any]
    reading: Reading

    def answer(self, key: str, value: Any) -> str:
        """The note that answers one key. Raises UserError with the fault."""
        if value == "auto":
            return "follows the flags"
        if not self._is_enabled(key):
            return "its section is not enabled"
        if value is None:
            return "not set"
        if key == "zero_optimization" and value is True:
            raise UserError('write {"stage": 1}')
        _check_refused(key, value)
        if note := self._compare(key, value):
            return note
        if noted := _section(key, "noted"):
            return answers("noted")[noted]
        if value in (False, {}):
            return "off here too"
        raise UserError("not supported; take it out")

    def _is_enabled(self, key: str) -> bool:
        """Whether all sections around a key are. Precisions and most refused ones must be."""
        names = key.removesuffix(".enabled").split(".")[:-1]
        for section in (".".join(names[: count + 1]) for count in range(len(names))):
            switch = f"{section}.enabled"
            enabled = self.keys.get(switch, section not in answers("off_by_default"))
            if enabled == "auto":
                precision = field_of(switch)
                enabled = precision is not None and self.reading.value(precision)
            if enabled is False:
                return False
        return True

    def _compare(self, key: str, value: Any) -> str:
        """The note on a key that a field of ours is about, or an empty string. Raises UserError."""
        if key in WIRE and value is not False:
            return self._wire(key, value)
        if key == BETAS:
            raise UserError("expected a list of two numbers")
        if key == STEPS:
            return self._accumulation(value)
        if key == DEVICE:
            return self._offload(value)
        style = answers("schedules").get(str(self.keys.get("scheduler.type")))
        if key == "scheduler.type":
            if style is None:
                raise UserError(f"not a schedule here; {INSTEAD}")
            return self._settle("lr_decay_style", style)
        field = field_of(key)
        if field is None or (style is None and key.startswith("scheduler.")):
            return ""
        if key.startswith("scheduler.") and type(value) not in (int, float):
            raise UserError("expected a number")
        if field == "optimizer_nvme_offload" and self.keys.get(DEVICE) != "nvme":
            return "has no effect without the device nvme"
        if key.endswith("_ratio") and self.reading.value("lr") is None:
            return "a share of --lr, which is not given"
        note = self._convert(key, field, value)
        if key == "scheduler.params.warmup_min_lr" and style == "linear":  # it ends there, too
            note += "; " + self._convert(key, "min_lr", value)
        return note

    def _convert(self, key: str, field: str, value: Any) -> str:
        """The note on a key whose value, in the units of our field, is compared with it."""
        run = RunView(self.reading.config, 1, None)
        conditions = answers("acts_with").get(field, "").split()
        if missing := [condition_text(each) for each in conditions if not run.holds(each)]:
            return f"has no effect without {' and '.join(missing)}"
        try:
            theirs = CONVERSIONS.get(key, lambda value, get: value)(value, self.reading.value)
            if field.endswith("_iters") and self.reading.value("train_samples") is not None:
                field, theirs = field.replace("_iters", "_samples"), theirs * self._batch()
        except TypeError:
            raise UserError("expected a number") from None
        return self._settle(field, theirs)

    def _settle(self, name: str, theirs: Any) -> str:
        """The note on a value of our field. Raises UserError for one that contradicts a flag."""
        flag, option, ours = flag_name(name), FIELDS[name], self.reading.value(name)
        with about(flag):
            value = None if theirs is None else option.load(theirs)
        is_off = value is None or value is False
        if value == ours:
            return f"equals no {flag}" if is_off else f"equals {flag}"
        if value is not None and option.bound is not None and not option.bound.holds(value):
            raise UserError(f"{flag} must be {option.bound.text}")
        if name in self.reading.set_by:
            fix = "remove the flag" if is_off else f"give {spelled(name, value)}"
            raise UserError(f"contradicts {spelled(name, ours)}; {fix} or change the file")
        rivals = sorted(PRECISIONS & self.reading.set_by.keys())
        if name in PRECISIONS and rivals:
            raise UserError(f"contradicts {' '.join(map(flag_name, rivals))}")
        self.reading.put(name, value)
        return f"taken, as no flag sets it: {spelled(name, value)}"

    def _wire(self, key: str, value: Any) -> str:
        """What gradients are sent in; --main-grads-dtype bf16 sets that too."""
        dtype = "fp32" if value is True and key == "fp32_allreduce" else dtype_of(value)
        if dtype not in ("fp32", "bf16"):
            raise UserError(
                "gradients are sent in fp32, or in bf16 with --grad-reduce-in-bf16; take it out"
            )
        if self.reading.value("main_grads_dtype") == "bf16":
            return self._settle("main_grads_dtype", dtype)
        return self._settle("grad_reduce_in_bf16", dtype == "bf16")

    def _offload(self, device: str) -> str:
        """The note on where the optimizer's state is kept; its nvme_path has been read already."""
        in_files, flag = self.reading.value("optimizer_nvme_offload"), "--optimizer-nvme-offload"
        if device == "nvme":
            if in_files is None:
                raise UserError(f"give {flag} DIR")
            return f"equals {flag}"
        if in_files is not None:
            raise UserError(f"contradicts {flag} {in_files}; drop the flag or change the file")
        return self._settle("optimizer_cpu_offload", device == "cpu")

    def _accumulation(self, steps: Any) -> str:
        """The note on the global batch, whose ranks only a dry run knows; others take what fits."""
        names = "micro_batch_size", "global_batch_size", "world_size"
        micro, batch, world = map(self.reading.value, names)
        if type(steps) is not int or steps < 1 or not micro or (not batch and world is None):
            raise UserError("give --micro-batch-size and --global-batch-size instead")
        unit = micro * steps
        ranks = batch // unit if world is None else data_parallel_size(self.reading.config, world)
        note = self._settle("global_batch_size", unit * max(1, ranks))
        return f"{note}: {micro} x {steps} on {max(1, ranks)} data-parallel rank(s)"

    def _batch(self) -> int:
        """The one batch size of a run in samples. Raises UserError."""
        get = self.reading.value
        batch = get("global_batch_size")
        if batch is None or get("rampup_batch_size") or get("step_batch_size_schedule"):
            raise UserError(
                f"the run is measured in --train-samples; give --train-iters, or {INSTEAD}"
            )
        return batch


def compare_with_deepspeed(path: str, reading: Reading) -> None:
    """Compare the settings with a DeepSpeed file, and add those that no flag gives."""
    where = f"--deepspeed_config {path}"
    faults: list[str] = []
    keys: dict[str, Any] = {}
    with collected(faults, "cannot be read"):
        keys = dict(_keys(read_json(path, dict, SETTINGS_LIMIT), faults))
    keys = answers("schedule_defaults").get(str(keys.get("scheduler.type")), {}) | keys
    chosen = {*keys, *reading.set_by, *filter(None, map(field_of, keys))}
    for key, (section, note) in answers("missing").items():
        if section in {"", *keys} and not {key, field_of(key)} & chosen:
            reading.notes.append(f"DeepSpeed's {key} is not set: {note}")
    file = DeepSpeedFile(keys, reading)
    for key in sorted(keys, key=_order):
        value = keys[key]
        written = f"{key[:80]} = {shortened(json.dumps(value), 80)}"
        section = _section(key, "refused")
        with collected(faults, section if section not in ("", key) else written):
            reading.notes.append(f"DeepSpeed's {written}: {file.answer(key, value)}")
    reading.faults += [f"{where}: {fault}" for fault in faults]


def _keys(content: dict, faults: list[str], section: str = "") -> Iterator[tuple[str, Any]]:
    """Each setting as the path that leads to it, and its value; `faults` takes those of keys."""
    for name, value in content.items():
        key = section + name
        if "." in name:
            faults.append(f"{key[:80]}: a key with a dot is no section; write it as an object")
        elif key == BETAS and isinstance(value, list) and len(value) == 2:
            yield f"{key}[0]", value[0]
            yield f"{key}[1]", value[1]
        elif isinstance(value, dict) and value and not _has_value(key):
            yield from _keys(value, faults, f"{key}.")
        else:
            yield key, value


def _has_value(key: str) -> bool:
    return field_of(key) is not None or key in (BETAS, STEPS, *WIRE) or key in answers("accepted")


def _order(key: str) -> tuple[bool, ...]:
    """Keys that equal our fields first, since others act with them; the schedule last."""
    return key.startswith("scheduler."), field_of(key) is None, key != "fp16.loss_scale"


def _section(key: str, table: str) -> str:
    """The longest key of a table that is this one or holds it, or an empty string."""
    found = (name for name in answers(table) if f"{key}.".startswith(f"{name}."))
    return max(found, key=len, default="")


def _check_refused(key: str, value: Any) -> None:
    refused = _section(key, "refused")
    accepted = answers("accepted").get(refused)
    is_accepted = not value
    if accepted is not None:  # as text, since true is not 1
        is_accepted = json.dumps(dtype_of(value)) in map(json.dumps, accepted)
    if refused and not is_accepted:
        raise UserError(answers("refused")[refused])
