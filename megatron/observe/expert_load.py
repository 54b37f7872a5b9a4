"""The load of experts: metrics of a step, and a warning about experts without tokens."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from megatron.config.errors import some

logger = logging.getLogger(__name__)
SUFFIX = ".expert-tokens"  # of the names of counts: layers.3.expert-tokens


def load_metrics(counts: Mapping[str, list[float]], by_layer: bool) -> dict[str, float]:
    """Metrics of `counts`, by layer the [experts + 1] tokens of each expert in a step and the
    dropped choices: the greatest and the smallest load in any layer, as a multiple of the mean, and
    the share of dropped choices. `by_layer`: also for each layer.
    """
    found: dict[str, float] = {}
    dropped = chosen = 0.0
    for name, (*tokens, missed) in counts.items():
        total = sum(tokens)
        if not name.endswith(SUFFIX) or not total:
            continue
        mean, layer = total / len(tokens), name.removesuffix(SUFFIX)
        of_layer = {
            "expert-load-max": max(tokens) / mean,
            "expert-load-min": min(tokens) / mean,
            "expert-dropped": missed / total,
        }
        for metric, take in (("expert-load-max", max), ("expert-load-min", min)):
            found[metric] = take(found.get(metric, of_layer[metric]), of_layer[metric])
        dropped, chosen = dropped + missed, chosen + total
        if by_layer:
            found |= {f"{metric}/{layer}": value for metric, value in of_layer.items()}
    return {**found, "expert-dropped": dropped / chosen} if chosen else {}


class StarvingExperts:
    """Warns about experts without a token in a whole batch: one line for all layers, and only when
    it has a new expert.
    """

    def __init__(self) -> None:
        self.known: set[tuple[str, str]] = set()

    def look(self, counts: Mapping[str, list[float]], iteration: int) -> None:
        """Check the counts (see `load_metrics`) of a step."""
        layers = {
            name.removesuffix(SUFFIX): tokens
            for name, (*tokens, _) in counts.items()
            if name.endswith(SUFFIX) and any(tokens)
        }
        starved = {
            layer: [str(expert) for expert, number in enumerate(tokens) if not number]
            for layer, tokens in layers.items()
            if not all(tokens)
        }
        found = {(layer, expert) for layer, experts in starved.items() for expert in experts}
        if found <= self.known:
            return
        self.known |= found
        worst = max(starved, key=lambda layer: len(starved[layer]))
        logger.warning(
            f"iteration {iteration}: no token went to {len(found)} of the "
            f"{sum(map(len, layers.values()))} experts of all layers; they are in {len(starved)} "
            f"of {len(layers)} layers with experts ({some([*starved], 8)}), most in {worst}: "
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
