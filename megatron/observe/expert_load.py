"""The load of experts: metrics of a step, and a warning about experts without tokens."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from megatron.config.errors import some

logger = logging.getLogger(__name__)
SUFFIX = ".expert-tokens"  # of the names of counts: layers.3.expert-tokens


def _layers(counts: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """The counts of layers with experts to which tokens came, by layer."""
    return {
        name.removesuffix(SUFFIX): numbers
        for name, numbers in counts.items()
        if name.endswith(SUFFIX) and any(numbers[:-1])
    }


def load_metrics(counts: Mapping[str, list[float]], by_layer: bool) -> dict[str, float]:
    """Metrics of `counts`, by layer the [experts + 1] tokens of each expert in a step and the
    dropped choices: the greatest and the smallest load in any layer, as a multiple of the mean, and
    the share of dropped choices. `by_layer`: also for each layer.
    """
    layers = _layers(counts)
    if not layers:
        return {}
    rows = {}
    for layer, (*tokens, dropped) in layers.items():
        mean = sum(tokens) / len(tokens)
        rows[layer] = max(tokens) / mean, min(tokens) / mean, dropped / sum(tokens)
    most, least, _ = zip(*rows.values())
    missed = sum(numbers[-1] for numbers in layers.values())
    chosen = sum(sum(numbers[:-1]) for numbers in layers.values())
    found = {
        "expert-load-max": max(most),
        "expert-load-min": min(least),
        "expert-dropped": missed / chosen,
    }
    if by_layer:
        names = [*found]
        for layer, row in rows.items():
            found |= {f"{name}/{layer}": value for name, value in zip(names, row)}
    return found


class StarvingExperts:
    """Warns about experts without a token in a whole batch: one line for all layers, and only when
    it has a new expert.
    """

    def __init__(self) -> None:
        self.known: set[tuple[str, str]] = set()

    def look(self, counts: Mapping[str, list[float]], iteration: int) -> None:
        """Check the counts (see `load_metrics`) of a step."""
        layers = {layer: tokens for layer, (*tokens, _) in _layers(counts).items()}
        starved = {
            layer: [str(expert) for expert, number in enumerate(tokens) if not number]
            for layer, tokens in layers.items()
            if not all(tokens)
        }
        found = {(layer, expert) for layer, experts in starved.items() for expert in experts}
        if found <= self.known:
            return
        self.known |= found
        experts = sum(map(len, layers.values()))
        worst = max(starved, key=lambda layer: len(starved[layer]))
        logger.warning(
            f"iteration {iteration}: no token went to {len(found)} of the {experts} experts of all "
            f"layers; they are in {len(starved)} of {len(layers)} layers with experts "
            f"({some([*starved], 8)}), most in {worst}: "
            f"{len(starved[worst])} of {len(layers[worst])} ({some(starved[worst], 8)}); "
            f"{_busiest(layers)}; balance them with --moe-aux-loss-coeff 0.01 or "
            "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
        )


def _busiest(layers: Mapping[str, list[float]]) -> str:
    """The expert with most tokens, as a multiple of its layer's mean."""
    loads = {layer: max(tokens) * len(tokens) / sum(tokens) for layer, tokens in layers.items()}
    worst = max(loads, key=lambda layer: loads[layer])
    expert = layers[worst].index(max(layers[worst]))
    return f"the busiest is {expert} of {worst}, with {loads[worst]:.1f} times the mean"
