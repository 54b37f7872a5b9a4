"""The gates: what must hold between a run in some layout and the same run in one process. Each
returns its faults as text.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from megatron.tools._study.equal_work import FP64_GATE, UNIT_ROUNDOFF, narrow_bound
from mutation import Mutant
from parity.layouts import Row, wire_bound
from parity.worker import Outcome, Piece, Step, reference, run_case
from torch import Tensor

# Of a gradient that is 0 in exact arithmetic a run has the noise of its 1e5 roundings, which are
# independent, relative to the gradients that it is compared with. AdamW divides it by little more
# than its epsilon, so each step moves such a weight by up to lr / epsilon times that.
ZERO_GRADIENT_NOISE = 2.0**-53 * math.sqrt(1e5)
LR, ADAM_EPS = 1e-2, 1e-8  # of layouts.BASE
FP32_FACTOR, FP32_FLOOR = 4.0, 1e-7  # times the one-process error; times the global norm


def gather(
    outcomes: list[Outcome], part: Callable[[Outcome], list[Piece]], faults: list[str]
) -> dict[str, Tensor]:
    """Logical tensors out of all ranks' boxes. Faults: two ranks hold the same box with other bits,
    or its owners do not tile the tensor.
    """
    whole: dict[str, Tensor] = {}
    owned: dict[str, Tensor] = {}
    seen: dict[tuple, tuple[int, Tensor]] = {}
    for rank, outcome in enumerate(outcomes):
        for piece in part(outcome):
            tensor = whole.setdefault(
                piece.name, torch.full(piece.shape, math.nan, dtype=piece.values.dtype)
            )
            count = owned.setdefault(piece.name, torch.zeros(piece.shape, dtype=torch.int32))
            here = tuple(
                slice(start, start + size) for start, size in zip(piece.offset, piece.values.shape)
            )
            tensor[here] = piece.values
            count[here] += piece.owner
            first, values = seen.setdefault(
                (piece.name, piece.offset, piece.values.shape), (rank, piece.values)
            )
            if not torch.equal(values, piece.values):
                faults.append(
                    f"{piece.name} at {piece.offset}: ranks {first} and {rank} hold other bits"
                )
    faults += [
        f"{name}: boxes are owned {sorted(set(count.flatten().tolist()))} times"
        for name, count in owned.items()
        if not (count == 1).all()
    ]
    return whole


def ranks_agree(outcomes: list[Outcome]) -> list[str]:
    """Every rank knows the same steps, bit for bit."""
    return [
        f"rank {rank} reports other {what} than rank 0: {repr(b)} and {repr(a)}"
        for rank, outcome in enumerate(outcomes)
        for what in ("steps", "evaluations")
        for a, b in zip(getattr(outcomes[0], what), getattr(outcome, what), strict=True)
        if repr(a) != repr(b)
    ]


def fp64(
    one: Outcome,
    outcomes: list[Outcome],
    *,
    zero: tuple[str, str] | None = None,
    before: int = 0,
) -> list[str]:
    """Losses, norms, evaluations, gradients of step 1 and final parameters to 1e-10.

    `zero`: ending of tensors that are 0 in exact arithmetic, and of the tensors against whose norm
    they are held instead. `before`: steps after which the ranks have resumed the run, and of which
    they know nothing.
    """
    faults = ranks_agree(outcomes)
    steps, metrics = one.steps[before:], one.metrics[before:]
    if not before:
        faults += tensors_off(one, outcomes, "gradients", zero)
    for field in ("loss", "grad_norm"):
        for number, (a, b) in enumerate(zip(steps, outcomes[0].steps, strict=True), before + 1):
            if not math.isclose(getattr(a, field), getattr(b, field), rel_tol=FP64_GATE):
                faults.append(
                    f"step {number}: {field} {getattr(b, field)!r}, in one process "
                    f"{getattr(a, field)!r}"
                )
                break
    faults += [
        f"skipped steps: {b}, in one process {a}"
        for a, b in [(pattern(steps), pattern(outcomes[0].steps))]
        if a != b
    ]
    for a, b in zip(one.evaluations, outcomes[0].evaluations, strict=True):
        if not math.isclose(a, b, rel_tol=FP64_GATE):
            faults.append(f"evaluation {b!r}, in one process {a!r}")
    for a, b in zip(metrics, outcomes[0].metrics, strict=True):
        off = [
            name
            for name in a.keys() | b.keys()
            if not math.isclose(a.get(name, math.nan), b.get(name, math.nan), rel_tol=FP64_GATE)
        ]
        if off:
            pairs = (
                f"{name} {b.get(name)!r}, in one process {a.get(name)!r}" for name in sorted(off)
            )
            faults.append(f"metrics {', '.join(pairs)}")
            break
    return faults + tensors_off(one, outcomes, "weights", zero)


def tensors_off(
    one: Outcome, outcomes: list[Outcome], part: str, zero: tuple[str, str] | None
) -> list[str]:
    """Logical tensors whose relative error is above the fp64 gate."""
    faults: list[str] = []
    whole, expected = (
        gather(ranks, lambda outcome: getattr(outcome, part), faults) for ranks in (outcomes, [one])
    )
    if whole.keys() != expected.keys():
        return [
            *faults,
            f"{part}: logical tensors differ: {sorted(whole.keys() ^ expected.keys())}",
        ]
    gradients = (
        gather([one], lambda outcome: outcome.gradients, faults)
        if zero and part == "weights"
        else {}
    )
    for name, b in expected.items():
        counterpart = name.replace(*zero) if zero and name.endswith(zero[0]) else name
        scale, gate = expected[counterpart].norm(), FP64_GATE
        if counterpart != name and counterpart in gradients:  # a frozen layer has none
            steps = len(one.steps) * LR / ADAM_EPS
            gate = max(
                gate, steps * ZERO_GRADIENT_NOISE * (gradients[counterpart].norm() / scale).item()
            )
        off = (whole[name] - b).norm()
        error = off / scale if off > 0 else off  # an expert without a token has no gradient
        if not error <= gate:
            faults.append(f"{part} of {name}: relative error {error:.2g}, bound {gate:.2g}")
    return faults


def pattern(steps: list[Step]) -> list[tuple[bool, float, int]]:
    """Which steps were skipped, at which loss scale and batch size."""
    return [(step.skipped, step.loss_scale, step.batch_size) for step in steps]


def _vector(outcome: Outcome, field: str) -> Tensor:
    return torch.tensor([getattr(step, field) for step in outcome.steps], dtype=torch.float64)


def fp32(exact: Outcome, one: Outcome, outcomes: list[Outcome], *, wire: float = 0.0) -> list[str]:
    """||layout - fp64|| <= 4 max(||one process - fp64||, 1e-7 x global norm): gradients of step 1
    per tensor, losses and norms over the steps, and parameters (SGD alone: Adam amplifies rounding
    noise to full steps).

    `wire`: relative error that a narrow reduction may add to gradients, losses and norms; 0 for
    none. Then parameters are not compared: where the gradients of successive steps cancel, their
    sum may be off by any multiple of its own norm.
    """
    faults = ranks_agree(outcomes)
    for field in ("loss", "grad_norm"):
        reference, a, b = (_vector(outcome, field) for outcome in (exact, one, outcomes[0]))
        bound = (
            FP32_FACTOR * max((a - reference).norm(), FP32_FLOOR * reference.norm())
            + wire * reference.norm()
        )
        if not (b - reference).norm() <= bound:
            faults.append(
                f"{field}: error {(b - reference).norm():.3g} against fp64, bound "
                f"{bound:.3g}, one process {(a - reference).norm():.3g}"
            )
    for part in ("gradients", "weights"):
        reference, a, b = (
            gather(ranks, lambda outcome: getattr(outcome, part), faults)
            for ranks in ([exact], [one], outcomes)
        )
        if wire and part == "weights":
            break
        total = torch.stack([tensor.double().norm() for tensor in reference.values()]).norm()
        rounded = False
        for name, r in reference.items():
            error, own = ((x[name].double() - r).norm() for x in (b, a))
            bound = FP32_FACTOR * max(own, FP32_FLOOR * total)
            rounded |= bool(error > bound)
            if not error <= bound + wire * r.norm():
                faults.append(
                    f"{part} of {name}: error {error:.3g} against fp64, bound "
                    f"{bound + wire * r.norm():.3g}, one process {own:.3g}"
                )
        if wire and not rounded:
            faults.append(f"{part}: no tensor shows the rounding of a narrow reduction")
    return faults


def narrow(
    exact: Outcome, one: Outcome, outcomes: list[Outcome], *, bound: float, roundoff: float
) -> list[str]:
    """Same pattern of skipped steps. Losses, gradient norms, gradients of step 1 and final weights:
    ||layout - fp64|| <= 4 max(||one process - fp64||, 0.1 u global norm), and the one process
    itself within `bound` of fp64, relative to the global norm.

    A layout rounds as often as one process does, at other places: another draw of the same error.
    Of two such draws over 7 or more steps, or over a tensor, one has 4 times the other's norm in
    less than one case in a thousand. No floor is needed but for tensors whose error is 0.
    """
    faults = ranks_agree(outcomes)
    expected, found = pattern(one.steps), pattern(outcomes[0].steps)
    if found != expected:
        faults.append(f"skipped steps: {found}, in one process {expected}")
        return faults
    taken = torch.tensor([not step.skipped for step in one.steps])
    for field in ("loss", "grad_norm"):
        reference, a, b = (_vector(outcome, field)[taken] for outcome in (exact, one, outcomes[0]))
        own, error = (a - reference).norm(), (b - reference).norm()
        faults += _too_far(field, error, own, reference.norm(), bound, 0.0)
    for part in ("gradients", "weights"):
        if part == "gradients" and one.steps[0].skipped:
            continue
        ranks = ([exact], [one], outcomes)
        reference, a, b = (
            gather(each, lambda outcome: getattr(outcome, part), faults) for each in ranks
        )
        total = torch.stack([tensor.double().norm() for tensor in reference.values()]).norm()
        for name, r in reference.items():
            error, own = ((x[name].double() - r).norm() for x in (b, a))
            faults += _too_far(f"{part} of {name}", error, own, total, bound, 0.1 * roundoff)
    return faults


def _too_far(
    what: str, error: Tensor, own: Tensor, scale: Tensor, bound: float, floor: float
) -> list[str]:
    """Faults of one comparison: the layout's error by that of one process, and that one by the
    derived bound.
    """
    faults = []
    allowed = FP32_FACTOR * max(own, floor * scale)
    if not error <= allowed:
        faults.append(
            f"{what}: error {error:.3g} against fp64, bound {allowed:.3g}, one process {own:.3g}"
        )
    if not own <= bound * scale:
        faults.append(
            f"{what} in one process: error {own:.3g} against fp64, bound {bound * scale:.3g}"
        )
    return faults


def faults_in(worlds: Callable[[int], Any], row: Row, mutant: Mutant | None = None) -> list[str]:
    """What is wrong with a row of the table that is run now, where the ranks have a mutant.
    `worlds`: the fixture gloo_world.
    """
    flags = row.flags(layout=True)
    return faults_of(row, worlds(row.world).run(run_case, flags, row.patches, "cpu", mutant))


def faults_of(row: Row, outcomes: list[Outcome], device: str = "cpu") -> list[str]:
    """What is wrong with a row of the table, given what its ranks brought back."""
    one = reference(row.flags(layout=False), row.patches, device)
    if row.precision == "fp64":
        return fp64(one, outcomes, zero=row.of.zero)
    exact = reference(row.flags(layout=False, exact=True), row.patches, device)
    if row.precision in ("fp32", "wire"):
        return fp32(
            exact, one, outcomes, wire=wire_bound(row.parts) if row.precision == "wire" else 0.0
        )
    bound = narrow_bound(row.precision, row.layers)
    return narrow(exact, one, outcomes, bound=bound, roundoff=UNIT_ROUNDOFF[row.precision])
