"""How the units of a model are cut into pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from operator import add

from megatron.config.groups import Config, ModelConfig
from megatron.config.stages import AUTO, layers_of_stages
from megatron.model.arithmetic import unit_flops, unit_parameters


@dataclass(frozen=True)
class Stage:
    """Consecutive units: the embedding, layers, the head."""

    embedding: bool
    layers: range
    head: bool

    @property
    def units(self) -> range:
        """Numbers of its units: the embedding is 0, layer i is i + 1, then the head."""
        return range(self.layers.start + (not self.embedding), self.layers.stop + 1 + self.head)


def whole(model: ModelConfig) -> tuple[Stage, ...]:
    """The model as one stage."""
    return _stages((model.num_layers,))


def pipeline_stages(config: Config, padded_vocab: int) -> tuple[Stage, ...]:
    """The stages along the forward pass: pipeline ranks x virtual stages of each."""
    model, distributed = config.model, config.distributed
    if (
        distributed.pipeline_model_parallel_layout != AUTO
        or distributed.pipeline_model_parallel_size == 1
    ):
        return _stages(layers_of_stages(config))
    count = (
        distributed.pipeline_model_parallel_size * distributed.num_virtual_stages_per_pipeline_rank
    )
    # auto: as even in FLOPs as whole units allow
    flops = unit_flops(model, config.data.seq_length, padded_vocab)
    sizes = balance(flops, unit_parameters(model, padded_vocab, copied=True), count)
    return _stages([size - (k == 0) - (k == count - 1) for k, size in enumerate(sizes)])


def _stages(layers: Sequence[int]) -> tuple[Stage, ...]:
    """The stages with these numbers of layers."""
    # the first layer of each stage, and the end of the last
    ends = list(accumulate(layers, initial=0))
    return tuple(
        Stage(k == 0, range(*ends[k : k + 2]), k == len(layers) - 1) for k in range(len(layers))
    )


@lru_cache  # a plan asks again for each pipeline rank
def balance(flops: tuple[int, ...], parameters: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Numbers of units in `count` consecutive stages, none empty: the largest stage's FLOPs are as
    few as can be, then its parameters, then the sum of the squares of all stages' FLOPs; what
    choice that leaves goes to fuller later stages, as the first ones hold the most
    micro-batches.
    """
    assert 1 <= count <= len(flops)
    split = partial(_best_split, list(zip(flops, parameters, strict=True)), count)
    # An equal share and one unit more is enough for each stage.
    most_flops, most_parameters = sum(flops) // count + max(flops), sum(parameters)
    most_flops, _ = split(most_flops, most_parameters, lambda own: own[0], max)
    most_parameters, _ = split(most_flops, most_parameters, lambda own: own[1], max)
    _, sizes = split(most_flops, most_parameters, lambda own: own[0] ** 2, add)
    return sizes


def _best_split(
    units: Sequence[tuple[int, int]],
    count: int,
    most_flops: int,
    most_parameters: int,
    cost: Callable[[list[int]], int],
    combine: Callable[[int, int], int],
) -> tuple[int, tuple[int, ...]]:
    """The least combined cost of `count` stages within these bounds, and their numbers of units;
    `cost` is of a stage's [FLOPs, parameters].
    """
    # first unit that is placed -> combined cost, sizes
    best: dict[int, tuple[int, tuple[int, ...]]] = {len(units): (0, ())}
    for before in reversed(range(count)):  # stages that need a unit yet
        found: dict[int, tuple[int, tuple[int, ...]]] = {}
        for end, (total, sizes) in best.items():
            own = [0, 0]
            for begin in range(end - 1, before - 1, -1):
                own = [own[0] + units[begin][0], own[1] + units[begin][1]]
                if own[0] > most_flops or own[1] > most_parameters:
                    break
                # A tie goes to the smaller earlier stage: tuples compare by cost, then sizes.
                candidate = combine(total, cost(own)), (end - begin, *sizes)
                found[begin] = min(candidate, found.get(begin, candidate))
        best = found
    return best[0]
