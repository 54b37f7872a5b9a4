"""How layers are shared out over pipeline stages, counted: what the flags specify, with nothing
known of costs.

The embedding is always in the first stage and the head in the last, so a split is the number of
layers of each stage.
"""

from __future__ import annotations

import re

from megatron.config.errors import UserError, about, nearest
from megatron.config.groups import Config
from megatron.config.schedules import SCHEDULES

AUTO = "auto"
# Numbers of the first and the last rank, and what an even split counts as a layer.
UNEVEN = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
COUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
VIRTUAL = "num_virtual_stages_per_pipeline_rank"
PER_VIRTUAL = "num_layers_per_virtual_pipeline_stage"
LAYOUT = "pipeline_model_parallel_layout"
_MOST_UNITS = 100_000  # in a layout string


def parse_layout(text: str) -> tuple[int, ...]:
    """Layers of each stage of a string like Et*3|(tt|)*4tL: E embedding, t layer, L head and loss,
    | between stages, x*n and (...)*n repetitions, commas for the eye. Raises UserError with what is
    wrong and the fix.
    """
    text = text.replace(",", "")
    for pattern in (r"\(([^()]*)\)\*(\d+)", r"([^()*])\*(\d+)"):
        text = re.sub(pattern, _repeat, text)
    units = text.replace("|", "")
    if "m" in units:
        raise UserError("m, a layer that predicts further tokens, is not supported; take it out")
    if unknown := re.sub("[EtL]", "", units):
        raise UserError(
            f"{unknown[0]!r} is none of E (embedding), t (layer), L (head and loss), | (next "
            "stage), x*n and (...)*n"
        )
    if not re.fullmatch("Et*L", units):
        raise UserError("must begin with its one E and end with its one L")
    stages = text.split("|")
    if "" in stages:
        raise UserError(f"stage {stages.index('')} (from 0) is empty; every stage needs a unit")
    return tuple(stage.count("t") for stage in stages)


def _repeat(match: re.Match[str]) -> str:
    body, count = match.groups()
    if len(count) > 6 or len(body) * int(count) > _MOST_UNITS:
        raise UserError(f"{match[0]} repeats more than {_MOST_UNITS} units")
    return body * int(count)


def frozen_units(config: Config) -> frozenset[str]:
    """The units of --freeze; a tied head goes with the embedding. Raises UserError."""
    layers = config.model.num_layers
    tied = not config.model.untie_embeddings_and_output_weights
    found: set[str] = set()
    if config.optimizer.freeze is None:
        return frozenset()
    for word in config.optimizer.freeze.split(","):
        match = re.fullmatch(r"layers\.(\d+)(?:-(\d+))?", word)
        if match:
            first, last = int(match[1]), int(match[2] or match[1])
            if not first <= last < layers:
                raise UserError(f"{word}: layers go from 0 to {layers - 1}")
            found.update(f"layers.{layer}" for layer in range(first, last + 1))
        elif word in ("embedding", "head"):
            found.add(word)
        else:
            raise UserError(
                f"{word!r} is none of embedding, head, layers.N and layers.N-M, with commas between"
            )
    if tied and "head" in found and "embedding" not in found:
        raise UserError(
            "head has the embedding's matrix: freeze embedding, which freezes both, or give "
            "--untie-embeddings-and-output-weights"
        )
    if tied and "embedding" in found:
        found.add("head")
    if len(found) == layers + 2:
        raise UserError("nothing would be trained; to evaluate only, give --skip-train")
    return frozenset(found)


def counted_layers(config: Config) -> int:
    """Layers that an even split shares out, with the embedding and the loss where they count."""
    return config.model.num_layers + sum(getattr(config.distributed, field) for field in COUNTED)


def virtual_stages(config: Config) -> int | None:
    """Stages of each of several pipeline ranks, by whichever flag; None where flags contradict."""
    distributed = config.distributed
    ranks = distributed.pipeline_model_parallel_size
    layout = distributed.pipeline_model_parallel_layout
    layers = distributed.num_layers_per_virtual_pipeline_stage
    if distributed.num_virtual_stages_per_pipeline_rank is not None:
        return distributed.num_virtual_stages_per_pipeline_rank
    if layout not in (None, AUTO):
        try:
            return _quotient(len(parse_layout(layout)), ranks)
        except ValueError:
            return None
    if layers is not None:
        is_valid = config.model.num_layers and layers > 0
        return _quotient(counted_layers(config), ranks * layers) if is_valid else None
    if distributed.pipeline_schedule is None:
        return 1
    return SCHEDULES[distributed.pipeline_schedule].virtual or 1


def _quotient(value: int, divisor: int) -> int | None:
    return value // divisor if value % divisor == 0 and value > 0 else None


def placement_of(config: Config) -> tuple[int, ...]:
    """Stage -> pipeline rank."""
    distributed = config.distributed
    return SCHEDULES[distributed.pipeline_schedule].place(
        distributed.pipeline_model_parallel_size,
        distributed.num_virtual_stages_per_pipeline_rank,
    )


def stage_count(config: Config) -> int:
    distributed = config.distributed
    virtual = distributed.num_virtual_stages_per_pipeline_rank or 1
    return distributed.pipeline_model_parallel_size * virtual


def layers_of_stages(config: Config) -> tuple[int, ...]:
    """Layers of each stage, along the forward pass; not for `auto`, which depends on costs. Raises
    UserError where the flags do not fit each other; `@field` in it is a flag with its value.
    """
    distributed = config.distributed
    if distributed.pipeline_model_parallel_size == 1:
        return (config.model.num_layers,)
    if distributed.pipeline_model_parallel_layout is not None:
        return _drawn(config)
    return _shared(config)


def _drawn(config: Config) -> tuple[int, ...]:
    distributed = config.distributed
    with about("@pipeline_model_parallel_layout"):
        counts = parse_layout(distributed.pipeline_model_parallel_layout)
        if sum(counts) != config.model.num_layers or len(counts) != stage_count(config):
            wanted = "a multiple of @pipeline_model_parallel_size"
            if distributed.num_virtual_stages_per_pipeline_rank is not None:
                wanted = f"@pipeline_model_parallel_size x @{VIRTUAL}"
            raise UserError(
                f"has {sum(counts)} layers (t) in {len(counts)} stages; it must have "
                f"@num_layers in {wanted} stages"
            )
    return counts


def _shared(config: Config) -> tuple[int, ...]:
    """The ranks without a given number share the remaining layers evenly, and each rank's virtual
    stages share its layers evenly.
    """
    distributed = config.distributed
    ranks = distributed.pipeline_model_parallel_size
    virtual = stage_count(config) // ranks
    first, last = (getattr(distributed, field) for field in UNEVEN)
    others = ranks - (first is not None) - (last is not None)
    rest = counted_layers(config) - (first or 0) - (last or 0)
    share, left = divmod(rest, others) if others else (0, rest)
    sizes = {first or share, last or share} | ({share} if ranks > 2 else set())
    per_virtual = distributed.num_layers_per_virtual_pipeline_stage
    unit = per_virtual or virtual
    if left or min(sizes) <= 0 or any(size % unit for size in sizes):
        raise UserError(_unshared(config, others, rest, unit))
    if per_virtual and rest != ranks * virtual * per_virtual:
        raise UserError(f"@{PER_VIRTUAL}: contradicts @{VIRTUAL}; drop one")
    counts = [first or share, *[share] * (ranks - 2), last or share]
    stages = [counts[rank] // virtual for rank in placement_of(config)]
    stages[0] -= distributed.account_for_embedding_in_pipeline_split
    stages[-1] -= distributed.account_for_loss_in_pipeline_split
    return tuple(stages)


def _unshared(config: Config, others: int, rest: int, unit: int) -> str:
    """Why `others` ranks cannot share the rest of the layers, with the fix."""
    distributed = config.distributed
    ranks = distributed.pipeline_model_parallel_size
    given = [f"@{field}" for field in (*UNEVEN, *COUNTED) if getattr(distributed, field)]
    shown = " with ".join(["@num_layers", *given])
    factor = PER_VIRTUAL if distributed.num_layers_per_virtual_pipeline_stage else VIRTUAL
    near = nearest(rest, ranks * unit) - rest + config.model.num_layers
    fix = f"the nearest is {near}" if others == ranks else "change the numbers"
    auto_fits = stage_count(config) <= config.model.num_layers + 2
    instead = "--pipeline-model-parallel-layout auto alone" if auto_fits else "fewer stages"
    return (
        f"{shown}: {others} pipeline rank(s) must share {rest} layers evenly, and each rank's must "
        f"be a multiple of @{factor}; {fix}, or give {instead}"
    )
