"""The gates: what must hold between a run in some layout and the same run in one process. Each
returns its faults as text.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from megatron.tools._study.equal_work import FP64_GATE, UNIT_ROUNDOFF, narrow_bound
from mutation import Mutant
from parity.layouts import Row, wire_bound
from parity.worker import Outcome, Step, reference, run_case
from torch import Tensor

# Of a gradient that is 0 in exact arithmetic a run has the noise of its 1e5 roundings, which are
# independent, relative to the gradients that it is compared with. AdamW divides it by little more
# than its epsilon, so each step moves such a weight by up to lr / epsilon times that.
ZERO_GRADIENT_NOISE = 2.0**-53 * math.sqrt(1e5)
LR, ADAM_EPS = 1e-2, 1e-8  # of layouts.BASE
ROUNDED_FACTOR = 4.0  # times the one-process error
FP32_FLOOR = 1e-7  # times the global norm


def gather(outcomes: list[Outcome], part: str, faults: list[str]) -> dict[str, Tensor]:
    """Logical tensors (`part`: gradients or weights) out of all ranks' boxes. Faults: two ranks
    hold the same box with other bits, or its owners do not tile the tensor.
    """
    whole: dict[str, Tensor] = {}
    owned: dict[str, Tensor] = {}
    seen: dict[tuple, tuple[int, Tensor]] = {}
    for rank, outcome in enumerate(outcomes):
        for piece in getattr(outcome, part):
            name, values = piece.name, piece.values
            if name not in whole:
                whole[name] = torch.full(piece.shape, math.nan, dtype=values.dtype)
                owned[name] = torch.zeros(piece.shape, dtype=torch.int32)
            box = tuple(slice(at, at + size) for at, size in zip(piece.offset, values.shape))
            whole[name][box] = values
            owned[name][box] += piece.owner
            first, held = seen.setdefault((name, piece.offset, values.shape), (rank, values))
            if not torch.equal(held, values):
                faults.append(f"{name} at {piece.offset}: ranks {first} and {rank} hold other bits")
    for name, count in owned.items():
        if not (count == 1).all():
            times = sorted(set(count.flatten().tolist()))
            faults.append(f"{name}: boxes are owned {times} times")
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


def patterns_differ(expected: list[Step], found: list[Step]) -> list[str]:
    """Compare which steps were skipped, at which loss scale and batch size."""
    a, b = (
        [(step.skipped, step.loss_scale, step.batch_size) for step in steps]
        for steps in (expected, found)
    )
    return [f"skipped steps: {b}, in one process {a}"] if a != b else []


def bits_off(
    found: list[Outcome],
    expected: list[Outcome],
    *,
    norms: float | None = None,
    evaluations: int = 0,
) -> list[str]:
    """Where two runs have other bits: losses, the last `evaluations` (0: all), gradients of step 1,
    final weights. `norms`: relative error that gradient norms may have; None: any.
    """
    faults: list[str] = []
    for part in ("gradients", "weights"):
        ours, theirs = (gather(ranks, part, faults) for ranks in (found, expected))
        shared = ours.keys() & theirs.keys()
        off = {name for name in shared if not torch.equal(ours[name], theirs[name])}
        faults += [f"{part} of {name}" for name in sorted(off | ours.keys() ^ theirs.keys())]
    one, other = found[0], expected[0]
    for number, (a, b) in enumerate(zip(one.steps, other.steps, strict=True), 1):
        if repr(replace(a, grad_norm=0.0)) != repr(replace(b, grad_norm=0.0)):
            faults.append(f"step {number}: {a} and {b}")
        pair = a.grad_norm, b.grad_norm
        same = norms is None or math.isclose(*pair, rel_tol=norms) or repr(pair[0]) == repr(pair[1])
        if not same:
            faults.append(f"step {number}: gradient norms {pair}")
    if repr(one.evaluations[-evaluations:]) != repr(other.evaluations[-evaluations:]):
        faults.append("evaluations")
    return faults


# ---- float64


def fp64(
    one: Outcome, outcomes: list[Outcome], *, zero: tuple[str, str] | None = None, before: int = 0
) -> list[str]:
    """Losses, norms, evaluations, gradients of step 1 and final parameters to 1e-10.

    `zero`: ending of tensors that are 0 in exact arithmetic, and of the tensors against whose norm
    they are held instead. `before`: steps after which the ranks have resumed the run, and of which
    they know nothing.
    """
    faults, first = ranks_agree(outcomes), outcomes[0]
    steps, metrics = one.steps[before:], one.metrics[before:]
    if not before:
        faults += tensors_off(one, outcomes, "gradients", zero)
    for field in ("loss", "grad_norm"):
        for number, (a, b) in enumerate(zip(steps, first.steps, strict=True), before + 1):
            if off := numbers_off({field: getattr(a, field)}, {field: getattr(b, field)}):
                faults.append(f"step {number}: {off}")
                break
    faults += patterns_differ(steps, first.steps)
    for a, b in zip(one.evaluations, first.evaluations, strict=True):
        faults += filter(None, [numbers_off({"evaluation": a}, {"evaluation": b})])
    for a, b in zip(metrics, first.metrics, strict=True):
        if off := numbers_off(a, b):
            faults.append(f"metrics {off}")
            break
    return faults + tensors_off(one, outcomes, "weights", zero)


def numbers_off(expected: dict[str, float], found: dict[str, float]) -> str:
    """Those that are not the same to the fp64 gate."""
    off = [
        name
        for name in sorted(expected.keys() | found.keys())
        if not math.isclose(
            expected.get(name, math.nan), found.get(name, math.nan), rel_tol=FP64_GATE
        )
    ]
    return ", ".join(
        f"{name} {found.get(name)!r}, in one process {expected.get(name)!r}" for name in off
    )


def tensors_off(
    one: Outcome, outcomes: list[Outcome], part: str, zero: tuple[str, str] | None
) -> list[str]:
    """Logical tensors whose relative error is above the fp64 gate."""
    faults: list[str] = []
    whole, expected = (gather(ranks, part, faults) for ranks in (outcomes, [one]))
    if whole.keys() != expected.keys():
        differing = sorted(whole.keys() ^ expected.keys())
        return [*faults, f"{part}: logical tensors differ: {differing}"]
    gradients = gather([one], "gradients", faults) if zero and part == "weights" else {}
    for name, b in expected.items():
        counterpart = name.replace(*zero) if zero and name.endswith(zero[0]) else name
        scale, gate = expected[counterpart].norm(), FP64_GATE
        if counterpart != name and counterpart in gradients:  # a frozen layer has none
            steps = len(one.steps) * LR / ADAM_EPS
            noise = ZERO_GRADIENT_NOISE * (gradients[counterpart].norm() / scale).item()
            gate = max(gate, steps * noise)
        off = (whole[name] - b).norm()
        error = off / scale if off > 0 else off  # an expert without a token has no gradient
        if not error <= gate:
            faults.append(f"{part} of {name}: relative error {error:.2g}, bound {gate:.2g}")
    return faults


# ---- rounded runs


def narrow(
    exact: Outcome,
    one: Outcome,
    outcomes: list[Outcome],
    *,
    floor: float,
    number_floor: float = 0.0,
    bound: float = math.inf,
    wire: float = 0.0,
    before: int = 0,
    factor: float = ROUNDED_FACTOR,
) -> list[str]:
    """Same pattern of skipped steps. Losses and gradient norms over the steps, evaluations,
    gradients of step 1 and final weights: ||layout - fp64|| <= 4 max(||one process - fp64||,
    floor x global norm), and the one process itself within `bound` of fp64, relative to the global
    norm.

    A layout rounds as often as one process does, at other places: another draw of the same error.
    Of two such draws over 7 or more steps, or over a tensor, one has 4 times the other's norm in
    less than one case in a thousand. `floor` is that of tensors and of the two evaluations,
    `number_floor` that of losses and norms over the steps. SGD alone: Adam amplifies rounding noise
    to full steps.

    `wire`: relative error that a narrow reduction may add to gradients, losses and norms; 0 for
    none. Then parameters are not compared: where the gradients of successive steps cancel, their
    sum may be off by any multiple of its own norm.

    `before`: as of `fp64`. `factor`: instead of 4.
    """
    faults = ranks_agree(outcomes)
    if differing := patterns_differ(one.steps[before:], outcomes[0].steps):
        return faults + differing

    def check(
        what: str, r: Tensor, own: Tensor, found: Tensor, scale: Tensor, least: float
    ) -> bool:
        """Whether the layout's error is beyond that of one process."""
        error, own = (found.double() - r).norm(), (own.double() - r).norm()
        most = factor * max(own, least * scale)
        allowed = most + wire * r.norm()
        for where, value, limit in (("", error, allowed), (" in one process", own, bound * scale)):
            if not value <= limit:
                text = f"error {value:.3g} against fp64, bound {limit:.3g}, one process {own:.3g}"
                faults.append(f"{what}{where}: {text}")
        return bool(error > most)

    taken = torch.tensor([not step.skipped for step in outcomes[0].steps])
    for field in ("loss", "grad_norm"):
        r, a, b = (
            torch.tensor([getattr(step, field) for step in steps], dtype=torch.float64)[taken]
            for steps in (exact.steps[before:], one.steps[before:], outcomes[0].steps)
        )
        check(field, r, a, b, r.norm(), number_floor)
    r, a, b = (
        torch.tensor(each.evaluations, dtype=torch.float64) for each in (exact, one, outcomes[0])
    )
    check("evaluations", r, a, b, r.norm(), floor)
    for part in ("gradients", "weights"):
        if part == "gradients" and (before or one.steps[0].skipped):
            continue
        reference, a, b = (gather(each, part, faults) for each in ([exact], [one], outcomes))
        if wire and part == "weights":
            break
        total = torch.stack([tensor.double().norm() for tensor in reference.values()]).norm()
        beyond = [
            check(f"{part} of {name}", r, a[name], b[name], total, floor)
            for name, r in reference.items()
        ]
        if wire and bound == math.inf and not any(beyond):  # nothing else is narrow
            faults.append(f"{part}: no tensor shows the rounding of a narrow reduction")
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
        wire = wire_bound(row.parts) if row.precision == "wire" else 0.0
        return narrow(exact, one, outcomes, floor=FP32_FLOOR, number_floor=FP32_FLOOR, wire=wire)
    rounding = "bf16" if row.precision == "grads" else row.precision
    bound, floor = narrow_bound(rounding, row.layers), 0.1 * UNIT_ROUNDOFF[rounding]
    return narrow(exact, one, outcomes, floor=floor, bound=bound)
