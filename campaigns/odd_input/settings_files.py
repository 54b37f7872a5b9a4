"""Campaigns on files of settings: our configuration in JSON and YAML, and DeepSpeed's."""

from __future__ import annotations

import copy
import json
import math
import os
import random
from pathlib import Path
from typing import Any

import yaml

from campaigns.odd_input.cases import ODD, Verdicts, Wrong, damage, places, put
from megatron.config.arguments import parse_arguments
from megatron.config.deepspeed import compare_with_deepspeed
from megatron.config.errors import ArgumentErrors
from megatron.config.groups import Config
from megatron.config.options import FIELDS, NO_PATHS, Option
from megatron.config.reading import Reading
from megatron.config.validate import cross_field_faults

FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 2 --global-batch-size 16 --lr 1e-3 "
    "--train-iters 10 --mock-data --vocab-size 100"
).split()
DEEPSPEED = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": False},
    "zero_allow_untested_optimizer": True,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 0.001, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
    },
    "zero_optimization": {
        "stage": 0,
        "overlap_comm": True,
        "offload_optimizer": {"device": "none"},
        "cpu_offload": False,
    },
    "pipeline": {"stages": 1},
    "communication_data_type": "fp32",
    "data_types": {"grad_accum_dtype": "fp32"},
}
COMPARED = [  # of DeepSpeed's, against a flag: no other value of another meaning may pass
    ("train_batch_size",),
    ("train_micro_batch_size_per_gpu",),
    ("gradient_accumulation_steps",),
    ("gradient_clipping",),
    ("bf16", "enabled"),
    ("optimizer", "params", "lr"),
    ("optimizer", "params", "eps"),
    ("optimizer", "params", "weight_decay"),
    ("optimizer", "type"),
    ("zero_optimization", "stage"),
    ("zero_optimization", "cpu_offload"),
    ("pipeline", "stages"),
    ("communication_data_type",),
    ("zero_optimization", "offload_optimizer", "device"),
    ("data_types", "grad_accum_dtype"),
]


def not_a_file(path: Path, rng: random.Random) -> str:
    """Put something else in the place of a file."""
    path.unlink(missing_ok=True)
    kind = rng.choice(["pipe", "folder", "device", "nothing", "loop"])
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind in ("device", "loop"):
        path.symlink_to("/dev/zero" if kind == "device" else path)
    return kind


def clear(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def text_of(content: Any, as_yaml: bool) -> bytes:
    if as_yaml:
        return yaml.safe_dump(content, sort_keys=False).encode(errors="surrogatepass")
    return json.dumps(content, indent=2).encode()


def may_be(option: Option, value: Any) -> bool:
    """Whether a value has a type and form that the field may take, from its annotation alone."""
    if value is None:
        return option.optional
    if option.many:
        each = value if isinstance(value, list) else [value]
        return bool(each) and all(
            type(one) in (str, int, float) and _one(option, one) for one in each
        )
    return _one(option, value)


def _one(option: Option, value: Any) -> bool:
    if option.kind is bool:
        return type(value) is bool
    if option.kind is str:
        held = type(value) is str or option.many and type(value) in (int, float)
        return (
            held
            and "\ud800" not in str(value)
            and (option.field in NO_PATHS or "\0" not in str(value) and len(str(value)) < 4000)
        )
    if type(value) is str and value in ("", "x", "true", "1:30", "../../etc"):
        return False
    number = (
        type(value) in (int, float)
        and math.isfinite(value if type(value) is float else 0)
        or type(value) is str
    )
    return number and (option.kind is float or type(value) is str or value == int(value))


def settings_of(text: str) -> dict[str, dict[str, Any]]:
    """An independent reading: every scalar as text."""
    return yaml.load(text, yaml.BaseLoader)


def same_meaning(option: Option, given: Any, taken: Any) -> bool:
    """Whether a field's value is that of BaseLoader's texts."""
    if isinstance(taken, (tuple, list)):
        each = given if isinstance(given, list) else [given]
        return len(each) == len(taken) and all(
            same_meaning(option, one, other) for one, other in zip(each, taken)
        )
    if taken is None:
        return given in ("", "null", "~", "Null", "NULL")
    if isinstance(taken, bool):
        return (given.lower() in ("true", "yes", "on")) is taken
    return float(given) == float(taken) if isinstance(taken, (int, float)) else given == taken


def configurations(count: int, seed: int, folder: Path) -> Verdicts:
    """Configuration files: one odd value each, damaged text, keys twice, deep nesting, no files."""
    rng, verdicts, by_place = (
        random.Random(seed),
        Verdicts(),
        {(each.group, each.field): each for each in FIELDS.values()},
    )
    base = parse_arguments(FLAGS).config.to_dict()
    path = folder / "config.yaml"

    def read(text: bytes | None) -> str:
        config = parse_arguments(["--config", str(path)]).config
        faults = cross_field_faults(config, 8, None)
        if faults:
            raise ArgumentErrors(faults)
        if text is not None:
            content, taken = settings_of(text.decode()), config.to_dict()
            for (group, field), option in by_place.items():
                if field in (content.get(group) or {}) and not same_meaning(
                    option, content[group][field], taken[group][field]
                ):
                    raise Wrong(
                        f"{group}.{field}: {content[group][field]!r} was read as "
                        f"{taken[group][field]!r}"
                    )
        return "accepted"

    for number in range(count):
        clear(path)
        content, as_yaml, kind = (
            copy.deepcopy(base),
            rng.random() < 0.5,
            rng.choice(["value"] * 6 + ["bytes"] * 4 + ["twice", "deep", "no file"]),
        )
        label, refuse, raw = f"{number} {'yaml' if as_yaml else 'json'} {kind}", False, b""
        if kind == "value":
            place = rng.choice(list(by_place))
            usual = {bool: [True, False], int: [1, 2, 8], float: [0.1, 1], str: ["a", "b/c"]}[
                by_place[place].kind
            ]
            odd = rng.choice(rng.choice([ODD, by_place[place].choices or usual]))
            put(content, place, odd)
            is_text = as_yaml and isinstance(odd, float) and not math.isfinite(odd)  # .nan, .inf
            refuse = not may_be(by_place[place], str(odd) if is_text else odd)
            label = f"{label} {place} {repr(odd)[:40]}"
            raw = text_of(content, as_yaml)
        elif kind == "bytes":
            what, raw = damage(rng, text_of(content, as_yaml))
            label = f"{label} {what}"
        elif kind == "twice":
            place = rng.choice(list(by_place))
            extra = json.dumps({place[0]: base[place[0]]})[1:-1]
            raw = (
                f"{{{extra}, {extra}}}".encode()
                if not as_yaml
                else text_of(content, True) + f"{place[0]}: {{{place[1]}: null}}\n".encode()
            )
            refuse = True
        elif kind == "deep":
            size, opened = rng.choice([70, 1000, 20_000]), rng.choice(["[", '{"model": ', "- "])
            raw, refuse = (opened * size).encode(), True
        if kind == "no file":
            label, refuse = f"{label} {not_a_file(path, rng)}", True
        else:
            path.write_bytes(raw)
        verdicts.case(
            label,
            lambda raw=raw, kind=kind: read(raw if kind == "bytes" else None),
            must_refuse=refuse,
        )
    clear(path)
    return verdicts


def deepspeed(count: int, seed: int, folder: Path) -> Verdicts:
    """DeepSpeed's files against fixed flags: one odd value each, dotted keys, damaged text, keys
    twice, deep nesting, no files.
    """
    rng, verdicts, path = random.Random(seed), Verdicts(), folder / "ds.json"
    config: Config = parse_arguments(FLAGS).config
    # every field counts as given by a flag, so that a file may contradict none
    chosen = {option.field for option in FIELDS.values()}

    def read() -> str:
        reading = Reading(config, chosen)
        compare_with_deepspeed(str(path), reading)
        if reading.faults:
            raise ArgumentErrors(reading.faults)
        content = json.loads(path.read_text())
        for place in COMPARED:
            given, right = content, DEEPSPEED
            for key in place:
                given, right = given.get(key, {}) if isinstance(given, dict) else {}, right[key]
            same_kind = isinstance(given, bool) == isinstance(right, bool)
            if place[0] == "bf16" and isinstance(content.get("bf16"), dict) and given == {}:
                continue
            if (
                given not in ({}, "auto", None)
                and not (given == right and same_kind)
                and not _same(place, given)
            ):
                raise Wrong(f"{'.'.join(place)} = {given!r} passed for {right!r}")
        return "accepted"

    for number in range(count):
        clear(path)
        content, kind = (
            copy.deepcopy(DEEPSPEED),
            rng.choice(
                ["value"] * 6 + ["bytes"] * 4 + ["dotted", "twice", "deep", "power", "no file"]
            ),
        )
        label, refuse = f"{number} {kind}", kind not in ("value", "bytes")
        raw = json.dumps(content).encode()
        if kind == "value":
            place, odd = rng.choice(list(places(content))), rng.choice(ODD)
            put(content, place, odd)
            label, raw = f"{label} {place} {repr(odd)[:40]}", json.dumps(content).encode()
        elif kind == "bytes":
            what, raw = damage(rng, raw)
            label = f"{label} {what}"
        elif kind == "dotted":
            place = rng.choice(
                [
                    place
                    for place in places(content)
                    if len(place) > 1 and isinstance(place[-1], str)
                ]
            )
            raw = json.dumps({**content, ".".join(place): 1}).encode()
        elif kind == "twice":
            key = rng.choice(list(content))
            raw = raw[:-1] + f", {json.dumps({key: content[key]})[1:-1]}}}".encode()
        elif kind == "deep":
            raw = (rng.choice(["[", '{"a": ']) * rng.choice([70, 1000, 20_000])).encode()
        elif kind == "power":
            power = rng.choice([99999, -99999, 1e308, True, "12", [1]])
            raw = json.dumps(
                {**content, "fp16": {"enabled": True, "initial_scale_power": power}}
            ).encode()
        if kind == "no file":
            label = f"{label} {not_a_file(path, rng)}"
        else:
            path.write_bytes(raw)
        verdicts.case(label, read, must_refuse=refuse)
    clear(path)
    return verdicts


def _same(place: tuple[str, ...], given: Any) -> bool:
    """Other words for the same."""
    words = {
        "type": ("adam", "adamw", "fusedadam"),
        "communication_data_type": ("fp32",),
        "grad_accum_dtype": ("fp32",),
        "device": ("none",),
    }
    if place == ("gradient_accumulation_steps",):
        return type(given) is int and given in (1, 2, 4, 8)  # with as many ranks as make the batch
    if place == ("communication_data_type",):
        return given is False or isinstance(given, str) and given.lower() == "fp32"
    return isinstance(given, str) and given.lower() in words.get(place[-1], ())
