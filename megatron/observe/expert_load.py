"""Metrics of the load of experts in a step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

SUFFIX = ".expert-tokens"  # of the names of counts: layers.3.expert-tokens
Counts = Mapping[str, list[float]]  # by layer the tokens of each expert and the dropped choices


def load_metrics(counts: Counts, by_layer: bool) -> dict[str, float]:
    """Metrics of a step: the greatest and the smallest load in any layer, as a multiple of the
    mean, and the share of dropped choices. `by_layer`: also for each layer.
    """
    rows = {name.removesuffix(SUFFIX): row for name, row in counts.items() if name.endswith(SUFFIX)}
    layers = [layer for layer, (*tokens, _) in rows.items() if any(tokens)]
    if not layers:
        return {}
    table = np.array([rows[layer] for layer in layers])
    tokens, dropped = table[:, :-1], table[:, -1]
    loads = tokens / tokens.mean(1, keepdims=True)
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
