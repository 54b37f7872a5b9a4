"""Whether all rows of one model did the same work: their losses agree at every step, but for
rounding.

Called from study/table.py; tests/parity/compare.py holds every layout to the same bound.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

# Unit roundoffs. A run of L layers rounds each activation about 12 L + 4 times on its way (a layer:
# norm 2, fused projection, rotary, scores, probabilities, context, output and residual, up,
# activation, down and residual; embedding 2, final norm, logits), and as often on the way back.
# Roundings are independent and each at most u of what it touches, so the relative error of a
# gradient is about u sqrt(2n) with n = 12 L + 4; that of the loss, which averages over tokens, is
# below u sqrt(n). Twice that is the bound: where a layout rounds at other places (partial sums
# before they are added over ranks), it adds no more roundings than there were.
UNIT_ROUNDOFF = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}
NARROW_FACTOR = 4.0  # of two draws of the same rounding one is hardly ever further off by more
ROWS_THAT_SHOW_ROUNDING = 4  # in addition to the reference
FP64_GATE = 1e-10  # relative; 2^-53 times the 1e5 roundings of a run, and room


def narrow_bound(precision: str, layers: int) -> float:
    """Relative error of a narrow run's gradients of step 1 and of its losses against fp64."""
    return 2 * UNIT_ROUNDOFF[precision] * math.sqrt(2 * (12 * layers + 4))


def loss_bound(precision: str, layers: int) -> float | None:
    """Relative difference that rounding explains between the losses of two layouts: both sides
    round, each below half of the bound. None where no bound is known (8-bit products).
    """
    if precision == "fp64":
        return FP64_GATE
    return narrow_bound(precision, layers) if precision in UNIT_ROUNDOFF else None


class Agreement(NamedTuple):
    """Of the runs of one model: the bound, the largest relative difference from the reference row
    within it, and by row name what is wrong with a row that did other work.
    """

    reference: str
    bound: float
    largest: float
    faults: dict[str, str]


def agreement(runs: Sequence[dict[str, Any]]) -> Agreement | None:
    """Compare the finished runs of one model. The reference is the run that agrees with most
    others, of several the one nearest to the others. None where no bound is known (8-bit products)
    or nothing ran.
    """
    bounds = [loss_bound(run["precision"], run["layers"]) for run in runs]
    if not bounds or None in bounds:
        return None
    losses = [[float(value) for value in run["losses"]] for run in runs]
    best, apart = _reference(losses, max(bounds))
    name = runs[best]["name"]
    distances: dict[str, float] = {}
    for run, (difference, _) in zip(runs, apart, strict=True):
        if run["name"] != name:
            distances[run["name"]] = max(difference, distances.get(run["name"], 0.0))
    bound = _sharper(max(bounds), runs[best]["precision"], list(distances.values()))
    faults = {
        run[
            "name"
        ]: f"loss {values[step]:.7g} at iteration {step + 1}, {losses[best][step]:.7g} in "
        f"row {name}: relative difference {difference:.2g}, bound {bound:.2g}"
        for run, (difference, step), values in zip(runs, apart, losses, strict=True)
        if difference > bound
    }
    return Agreement(name, bound, max(at for at, _ in apart if at <= bound), faults)


def _reference(losses: list[list[float]], bound: float) -> tuple[int, list[tuple[float, int]]]:
    """Index of the reference, and how far each run is apart from it and where."""
    apart = [[_apart(a, b) for b in losses] for a in losses]

    def place(index: int) -> tuple[int, float]:
        distances = [distance for distance, _ in apart[index]]
        return -sum(distance <= bound for distance in distances), statistics.median(distances)

    best = min(range(len(losses)), key=place)
    return best, apart[best]


def _sharper(bound: float, precision: str, distances: list[float]) -> float:
    """The bound, or of narrow formats a lower one where rows enough show how far rounding takes
    them: 4 times their median distance from the reference, and no less than 4 times 0.1 u, as
    tests/parity/compare.py holds a layout's error to 4 times that of one process.
    """
    if precision not in ("bf16", "fp16") or len(distances) < ROWS_THAT_SHOW_ROUNDING:
        return bound
    typical = max(statistics.median(distances), 0.1 * UNIT_ROUNDOFF[precision])
    return min(bound, NARROW_FACTOR * typical)


def _apart(a: list[float], b: list[float]) -> tuple[float, int]:
    """The largest relative difference of two runs' losses and its index; infinity where one has
    more steps, or is no number.
    """
    if len(a) != len(b):
        return math.inf, min(len(a), len(b)) - 1
    found = (0.0, 0)
    for step, (x, y) in enumerate(zip(a, b, strict=True)):
        difference = abs(x - y) / max(abs(x), abs(y)) if x != y else 0.0
        if not difference <= found[0]:
            found = (difference if math.isfinite(difference) else math.inf, step)
    return found
