"""How the units of a model are cut into pipeline stages."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

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
    # First the smallest bound on FLOPs for which `count` stages suffice, then under it that on
    # parameters.
    most_parameters = sum(parameters)
    most_flops = _least(
        flops, lambda most: _needed(flops, parameters, most, most_parameters) <= count
    )
    most_parameters = _least(
        parameters, lambda most: _needed(flops, parameters, most_flops, most) <= count
    )
    # first unit that is placed -> squares, sizes
    best: dict[int, tuple[int, tuple[int, ...]]] = {len(flops): (0, ())}
    for before in reversed(range(count)):  # stages that need a unit yet
        found: dict[int, tuple[int, tuple[int, ...]]] = {}
        for end, (squares, sizes) in best.items():
            own = [0, 0]
            for begin in range(end - 1, before - 1, -1):
                own = [own[0] + flops[begin], own[1] + parameters[begin]]
                if own[0] > most_flops or own[1] > most_parameters:
                    break
                # A tie goes to the smaller earlier stage: tuples compare by squares, then sizes.
                candidate = squares + own[0] ** 2, (end - begin, *sizes)
                found[begin] = min(candidate, found.get(begin, candidate))
        best = found
    return best[0][1]


def _needed(
    flops: Sequence[int], parameters: Sequence[int], most_flops: int, most_parameters: int
) -> int:
    """The fewest stages within both bounds; too many where one unit is beyond them."""
    stages, own = 1, [0, 0]
    for unit in zip(flops, parameters, strict=True):
        if unit[0] > most_flops or unit[1] > most_parameters:
            return len(flops) + 1
        # Greedy: a stage is closed when the next unit would exceed a bound.
        if own[0] + unit[0] > most_flops or own[1] + unit[1] > most_parameters:
            stages, own = stages + 1, [0, 0]
        own = [own[0] + unit[0], own[1] + unit[1]]
    return stages


def _least(costs: Sequence[int], holds: Callable[[int], bool]) -> int:
    """The least sum of consecutive costs from which on a condition holds."""
    ends = list(accumulate(costs, initial=0))
    # A stage's cost is one of these sums, and the condition is monotonic: bisect.
    sums = sorted({stop - start for i, start in enumerate(ends) for stop in ends[i + 1 :]})
    return sums[bisect_left(sums, True, key=holds)]
