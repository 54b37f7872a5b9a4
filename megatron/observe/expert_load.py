"""The load of experts: metrics of a step, and a warning about experts without tokens."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np

from megatron.config.errors import some

logger = logging.getLogger(__name__)
SUFFIX = ".expert-tokens"  # of the names of counts: layers.3.expert-tokens
Counts = Mapping[str, list[float]]  # by layer the tokens of each expert and the dropped choices


def _table(counts: Counts) -> tuple[list[str], np.ndarray, np.ndarray]:
    """The layers with experts to which tokens came, [layers, experts] tokens and [layers] dropped
    choices.
    """
    rows = {name.removesuffix(SUFFIX): row for name, row in counts.items() if name.endswith(SUFFIX)}
    layers = [layer for layer, (*tokens, _) in rows.items() if any(tokens)]
    table = np.array([rows[layer] for layer in layers] or np.empty((0, 1)))
    return layers, table[:, :-1], table[:, -1]


def _loads(tokens: np.ndarray) -> np.ndarray:
    """The tokens of each expert as a multiple of its layer's mean."""
    return tokens / tokens.mean(1, keepdims=True)


def load_metrics(counts: Counts, by_layer: bool) -> dict[str, float]:
    """Metrics of a step: the greatest and the smallest load in any layer, as a multiple of the
    mean, and the share of dropped choices. `by_layer`: also for each layer.
    """
    layers, tokens, dropped = _table(counts)
    if not layers:
        return {}
    loads = _loads(tokens)
    found = {
        "expert-load-max": float(loads.max()),
        "expert-load-min": float(loads.min()),
        "expert-dropped": float(dropped.sum() / tokens.sum()),
    }
    if by_layer:
        columns = loads.max(1), loads.min(1), dropped / tokens.sum(1)
        for name, column in zip([*found], columns):
            found |= {f"{name}/{layer}": float(value) for layer, value in zip(layers, column)}
    return found


class StarvingExperts:
    """Warns about experts without a token in a whole batch: one line for all layers, and only when
    it has a new expert.
    """

    def __init__(self) -> None:
        self.known: set[tuple[str, int]] = set()

    def look(self, counts: Counts, iteration: int) -> None:
        """Check the counts of a step."""
        layers, tokens, _ = _table(counts)
        empty = tokens == 0
        found = {(layers[at], int(expert)) for at, expert in zip(*empty.nonzero())}
        if found <= self.known:
            return
        self.known |= found
        starved = [layer for layer, row in zip(layers, empty) if row.any()]
        worst = int(empty.sum(1).argmax())
        without = list(map(str, empty[worst].nonzero()[0]))
        loads = _loads(tokens)
        busiest, expert = np.unravel_index(loads.argmax(), loads.shape)
        logger.warning(
            f"iteration {iteration}: no token went to {len(found)} of the {tokens.size} experts of "
            f"all layers; they are in {len(starved)} of {len(layers)} layers with experts "
            f"({some(starved, 8)}), most in {layers[worst]}: "
            f"{len(without)} of {tokens.shape[1]} ({some(without, 8)}); the busiest is {expert} of "
            f"{layers[busiest]}, with {loads.max():.1f} times the mean; balance them with "
            "--moe-aux-loss-coeff 0.01 or --moe-router-score-function sigmoid "
            "--moe-router-enable-expert-bias"
        )
