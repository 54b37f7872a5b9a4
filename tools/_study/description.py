"""What a study is: a YAML file, read and checked before anything runs.

Called from tools/study.py. Every row goes through the program's own parser and rules here; one that
they refuse stays in the study, with their words.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron.config.arguments import parse_arguments
from megatron.config.errors import UserError, shortened
from megatron.config.groups import Config
from megatron.config.input_files import (
    SETTINGS_LIMIT,
    InputError,
    decode,
    parse_yaml,
    read_bytes,
)
from megatron.config.options import options_by_flag
from megatron.config.validate import resolve

WORLD, MEMORY, NAME = "world-size", "memory-limit", "name"  # keys of a row that are no flags
LAUNCHERS = ("local", "sbatch")
# flags that a study gives itself: every row logs each iteration, into its own folder
OWN = {
    "train-iters": "the study's `iterations` sets it",
    "log-interval": "a study logs every iteration",
    "eval-iters": "a study times training alone",
    "metrics-file": "every run has one in the study's folder",
    "wandb-group": "it is the study's name",
    "wandb-exp-name": "it is the row's name",
    "wandb-save-dir": "it is the run's folder",
    "save": "runs of a study save nothing",
    "dry-run": "run `study.py STUDY.yaml --dry-run`",
}
SHORT = {
    WORLD: "w",
    "tensor-model-parallel-size": "tp",
    "pipeline-model-parallel-size": "pp",
    "context-parallel-size": "cp",
    "zero-stage": "zero",
    "micro-batch-size": "mbs",
    "global-batch-size": "gbs",
}
# settings outside the groups of layout, logging and checkpoints that define how a step is computed
# and not what it computes, in addition to those whose rule of change is rounding or another kernel
HOW = {
    "cuda_graphs",
    "recompute",
    "recompute_granularity",
    "recompute_modules",
    "recompute_method",
    "recompute_num_layers",
    "recompute_layers",
    "memory_budget",
    "distribute_saved_activations",
    "activation_offload",
    "offload_modules",
    "activation_offload_fraction",
    "min_offloaded_tensor_size",
    "optimizer_nvme_offload",
    "param_cpu_offload",
}


@dataclass(frozen=True)
class StudyRow:
    """One configuration of a study, run `repeats` times.

    `key` is a digest of everything that the file holds of it: what makes a run known again.
    `memory_limit` is the GiB that each process may allocate on the host. `refusal` is why the
    program takes no such run; `config`, `work`, `layers` and `precision` are unknown then: settings
    unlike the defaults, the digest of those that define what is computed, and what the bound on its
    losses depends on.
    """

    name: str
    settings: dict[str, Any]
    flags: tuple[str, ...]
    world_size: int
    memory_limit: float | None
    key: str
    refusal: str | None = None
    config: dict[str, Any] | None = None
    config_digest: str | None = None
    work: str | None = None
    layers: int | None = None
    precision: str | None = None


@dataclass(frozen=True)
class StudyPlan:
    """A study file. `timeout` is in minutes for one run; `sbatch` are flags of that program."""

    name: str
    rows: tuple[StudyRow, ...]
    repeats: int
    iterations: int
    warmup: int
    launcher: str
    timeout: float
    hardware: str | None
    environment: dict[str, str]
    sbatch: tuple[str, ...]
    ranks_per_node: int
    at_once: int

    def header(self) -> dict[str, Any]:
        """What the raw rows need in addition to become a table."""
        fields = {name: value for name, value in asdict(self).items() if name != "rows"}
        rows = [{"key": row.key, "name": row.name, "settings": row.settings} for row in self.rows]
        return json.loads(json.dumps({"kind": "study", **fields, "rows": rows}))


def read_study(path: str | Path) -> StudyPlan:
    """The study of a YAML file. Raises UserError for a file that is none, for keys and values that
    a study does not have, and when the program refuses every row.
    """
    try:
        content = parse_yaml(decode(read_bytes(path, SETTINGS_LIMIT)))
        if not isinstance(content, dict):
            raise InputError("expected a map with name, base and grid or rows")
        return _study(content)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


# ---- the file's own keys -----------------------------------------------------------------------


def _number(content: dict[str, Any], key: str, default: Any, least: float, whole: bool) -> Any:
    value = content.get(key, default)
    kinds = (int,) if whole else (int, float)
    if type(value) not in kinds or not value >= least or not math.isfinite(value):
        kind = "a whole number" if whole else "a number"
        raise UserError(f"{key}: {value!r}: expected {kind} from {least:g} on")
    return value


def _map(value: Any, key: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{key}: expected a map of flags without dashes, as `lr: 1e-3`")
    for name in value:
        if name.startswith("-"):
            raise UserError(f"{key}: {name}: write it without dashes")
        if name in OWN:
            raise UserError(f"{key}: {name}: leave it out; {OWN[name]}")
    return value


def _maps(content: dict[str, Any], key: str) -> list[dict[str, Any]]:
    value = content.get(key, [])
    if not isinstance(value, list):
        raise UserError(f"{key}: expected a list of maps")
    return [_map(each, key) for each in value]


def _words(content: dict[str, Any], key: str) -> tuple[str, ...]:
    value = content.get(key, [])
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise UserError(f"{key}: expected a list of words, as [--partition=gpu]")
    return tuple(value)


MEASURE = "measure"  # as hardware: what tools/plan.py measure finds on this machine
KEYS = (
    "name launcher repeats iterations warmup timeout hardware environment sbatch ranks-per-node "
    "at-once base grid exclude rows"
).split()


def _hardware(asked: Any, launcher: str) -> str | None:
    """What predictions are made of."""
    if not isinstance(asked, str | None):
        raise UserError(f"hardware: {asked!r}: give a name or a file, as tools/plan.py takes it")
    if asked == MEASURE and launcher != "local":
        raise UserError(
            f"hardware: {MEASURE}: measures the machine of `launcher: local`; run tools/plan.py "
            "measure --out FILE on a node, and give that file"
        )
    return asked


def _study(content: dict[str, Any]) -> StudyPlan:
    unknown = [key for key in content if key not in KEYS]
    if unknown:
        raise UserError(f"{unknown[0]}: a study has no such key; it has {', '.join(KEYS)}")
    launcher = content.get("launcher", "local")
    if launcher not in LAUNCHERS:
        raise UserError(f"launcher: {launcher!r}: choose {' or '.join(LAUNCHERS)}")
    iterations = _number(content, "iterations", 20, 2, whole=True)
    warmup = _number(content, "warmup", 5, 0, whole=True)
    if warmup >= iterations:
        raise UserError(f"warmup: {warmup}: must be below iterations, which is {iterations}")
    environment = _map(content.get("environment", {}), "environment")
    rows = tuple(_rows(content, launcher, [iterations, environment]))
    if all(row.refusal for row in rows):
        raise UserError(f"the program refuses every row; row {rows[0].name}: {rows[0].refusal}")
    per_node = _number(content, "ranks-per-node", 8, 1, whole=True)
    if launcher == "sbatch":
        _check_nodes(rows, per_node)
    return StudyPlan(
        name=_study_name(content),
        rows=rows,
        repeats=_number(content, "repeats", 7, 1, whole=True),
        iterations=iterations,
        warmup=warmup,
        launcher=launcher,
        timeout=_number(content, "timeout", 30, 0.05, whole=False),
        hardware=_hardware(content.get("hardware"), launcher),
        environment={key: _word(value) for key, value in environment.items()},
        sbatch=_words(content, "sbatch"),
        ranks_per_node=per_node,
        at_once=_number(content, "at-once", 1, 1, whole=True) if launcher == "sbatch" else 1,
    )


def _check_nodes(rows: tuple[StudyRow, ...], per_node: int) -> None:
    """Raises UserError where the ranks of a row do not fill its nodes: sbatch would start more."""
    for row in rows:
        if row.world_size > per_node and row.world_size % per_node:
            raise UserError(
                f"row {row.name}: world-size {row.world_size}: must be a multiple of "
                f"ranks-per-node, which is {per_node}"
            )


def _study_name(content: dict[str, Any]) -> str:
    """The name, which is a folder's and a wandb group's, too."""
    name = content.get("name")
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]{1,80}", name):
        raise UserError(
            f"name: {shortened(str(name), 80)}: give the study a name of letters, digits, _ - and "
            "dots, as `name: two_cores`"
        )
    return name


# ---- rows --------------------------------------------------------------------------------------


def _rows(content: dict[str, Any], launcher: str, common: list[Any]) -> Iterator[StudyRow]:
    """All rows. `common`: what of the study itself changes a run, the iterations first."""
    base = _map(content.get("base", {}), "base")
    settings = [{**base, **changes} for changes in [*_grid(content), *_maps(content, "rows")]]
    settings = [{k: v for k, v in one.items() if v is not None} for one in settings]
    if not settings:
        raise UserError("grid or rows: give at least one row")
    unnamed = [one for one in settings if NAME not in one]
    varied = [
        key
        for key in dict.fromkeys(itertools.chain(*unnamed))
        if any(one.get(key) != unnamed[0].get(key) for one in unnamed)
    ]
    seen: dict[str, str] = {}
    for one in settings:
        row = _row(one, varied, launcher, common)
        if row.key in seen:
            raise UserError(f"row {row.name}: is the same as row {seen[row.key]}; drop one")
        if row.name in seen.values():
            raise UserError(f"row {row.name}: two rows have this name; give one another `name`")
        seen[row.key] = row.name
        yield row


def _grid(content: dict[str, Any]) -> list[dict[str, Any]]:
    """The product of the grid without what is excluded."""
    grid = _map(content.get("grid", {}), "grid")
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"grid: {key}: expected a list of values, as [1, 2]")
    excluded = _maps(content, "exclude")
    for rule in excluded:
        for key in rule:
            if key not in grid:
                raise UserError(f"exclude: {key}: the grid has no such key")
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    return [one for one in points if grid and not any(_holds(rule, one) for rule in excluded)]


def _holds(rule: dict[str, Any], point: dict[str, Any]) -> bool:
    """Whether a rule of `exclude` holds for a point: all its keys, any value of each."""
    return all(
        point[key] in (value if isinstance(value, list) else [value]) for key, value in rule.items()
    )


def _row(settings: dict[str, Any], varied: list[str], launcher: str, common: list[Any]) -> StudyRow:
    """One row, resolved as the program would resolve it."""
    given = settings.get(NAME)
    name = str(given) if given is not None else _name(settings, varied)
    world = _number(settings, WORLD, 1, 1, whole=True)
    limit = _number(settings, MEMORY, 0, 0, whole=False) or None
    if limit is not None and launcher != "local":
        raise UserError(f"{MEMORY}: acts with `launcher: local`; for jobs give sbatch: [--mem=...]")
    settings = {key: value for key, value in settings.items() if key != NAME}
    flags = [
        word
        for key, value in settings.items()
        if key not in (WORLD, MEMORY)
        for word in _flag(key, value)
    ]
    flags += ["--train-iters", str(common[0]), "--log-interval", "1", "--eval-iters", "0"]
    row = StudyRow(
        name=name,
        settings=settings,
        flags=tuple(flags),
        world_size=world,
        memory_limit=limit,
        key=_digest([settings, launcher, *common]),
    )
    try:
        config = resolve(parse_arguments(flags).config, world, None).config
    except UserError as error:
        return replace(row, refusal=str(error))
    known = _settings(config)
    return replace(
        row,
        config=known,
        config_digest=_digest([config.to_dict(), world]),
        work=_digest({key: value for key, value in known.items() if _is_work(key)}),
        layers=config.model.num_layers,
        precision=_precision(config),
    )


def _name(settings: dict[str, Any], varied: list[str]) -> str:
    """What is not the same in all rows: `w4 tp2 zero1 sequence-parallel attention-backend=sdpa`."""
    parts = []
    for key in sorted((key for key in varied if key in settings), key=_place):
        value = settings[key]
        if isinstance(value, bool):
            parts.append(key if value else f"no {key}")
        elif key in SHORT:
            parts.append(f"{SHORT[key]}{_word(value)}")
        else:
            parts.append(f"{key}={_word(value)}")
    return " ".join(parts) or "base"


def _place(key: str) -> int:
    return list(SHORT).index(key) if key in SHORT else len(SHORT)


def _word(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_word, value))
    return value if isinstance(value, str) else json.dumps(value)


def _flag(key: str, value: Any) -> list[str]:
    """The words of one flag; false is the spelling that switches it off, where there is one."""
    if value is True:
        return [f"--{key}"]
    if value is False:
        found = options_by_flag().get(f"--{key}")
        return [found[0].off[0]] if found and found[0].off else []
    return [f"--{key}", *(map(_word, value) if isinstance(value, list) else [_word(value)])]


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _settings(config: Config) -> dict[str, Any]:
    """`group.field` of every setting that is not the default."""
    defaults = Config().to_dict()
    return {
        f"{group}.{field}": value
        for group, fields in config.to_dict().items()
        for field, value in fields.items()
        if value != defaults[group][field]
    }


def _is_work(key: str) -> bool:
    """Whether a setting defines what a step computes, not how, where or what is logged."""
    group, field = key.split(".")
    if group in ("distributed", "logging", "checkpoint", "evaluation") or field in HOW:
        return False
    change = getattr(Config(), group).__dataclass_fields__[field].metadata.get("change")
    rounding = change is not None and change.bits and not (change.refused or change.logged)
    return not rounding or bool(change.accept)


def _precision(config: Config) -> str:
    """The format whose rounding bounds the difference between two layouts."""
    precision = config.precision
    if precision.fp64:
        return "fp64"
    if precision.fp8_format is not None:
        return "fp8"
    if precision.fp16:
        return "fp16"
    return "bf16" if precision.bf16 or config.distributed.grad_reduce_in_bf16 else "fp32"
