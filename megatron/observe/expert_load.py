"""How evenly tokens go to the experts of a mixture: metrics of a step, and a warning for an expert
that has none.

Called from training/loop.py at each log line.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

logger = logging.getLogger(__name__)
SUFFIX = ".expert-tokens"  # of the names of counts: layers.3.expert-tokens


def load_metrics(counts: Mapping[str, list[float]], by_layer: bool) -> dict[str, float]:
    """Of the tokens that each expert of each layer had in a step, [experts + 1] by layer, the last
    one the choices that experts at their capacity did not take: the greatest and the smallest share
    of an expert in any layer, as a multiple of the mean, and the share of choices that were not
    taken. `by_layer`: the same of each layer, too.
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
    """Warns once of each expert that had no token of a whole batch."""

    def __init__(self) -> None:
        self.known: set[tuple[str, int]] = set()

    def look(self, counts: Mapping[str, list[float]], iteration: int) -> None:
        """At the counts of `load_metrics`, of the step of an iteration."""
        for name, (*tokens, _) in counts.items():
            layer = name.removesuffix(SUFFIX)
            empty = [expert for expert, number in enumerate(tokens) if not number]
            new = [expert for expert in empty if (layer, expert) not in self.known]
            if not new or not sum(tokens):
                continue
            self.known.update((layer, expert) for expert in new)
            logger.warning(
                f"iteration {iteration}: no token went to {len(empty)} of the {len(tokens)} "
                f"experts of {layer} ({', '.join(map(str, empty[:8]))}"
                f"{', ...' if len(empty) > 8 else ''}); balance them with --moe-aux-loss-coeff "
                "0.01 or --moe-router-enable-expert-bias"
            )
