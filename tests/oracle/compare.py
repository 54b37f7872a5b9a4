"""The program against the oracle: what differs in a case.

    differences(case)               # [] when the program is right
    differences(case, gloo_world)   # a case of several ranks

The oracle's result is kept for each case, as nothing that is done to the program changes it; a
further call costs the program's run alone. A case of one rank runs the program in this process
(program.py), so a mutant is a patched function around a call of `differences`.

What must be equal, and how far:
- counts, batch sizes, loss scales and skipped steps: exactly;
- numbers of a float64 run: to 1e-10 of their size, tensors of theirs by norm. Unit roundoff is
  1.1e-16. A number passes about 1e3 roundings in a row, some of them amplified by Adam, which
  divides a gradient by its own size: where that is as small as its epsilon of 1e-8, an error of
  1e-17 becomes 1e-9 of a step of 1e-2. 1e-10 leaves that room and is a millionth of what the
  smallest defect of meaning changes;
- numbers of a narrow run: see `narrow_bound`;
- the console: as many digits as it prints. A key's bias adds the same to all scores of a query,
  which softmax ignores: where nothing comes between, its true gradient is 0 and Adam steps along
  rounding noise. It is left out there (`noise_in`).
"""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from oracle.cases import Case
from oracle.program import Seen, run_program
from oracle.settings import read
from oracle.trainer import Outcome, State, Trainer

EXACT = 1e-10
COUNTS = {
    "consumed_samples",
    "consumed-tokens",
    "batch-size",
    "loss-scale",
    "skipped-train-samples",
    "num-zeros",
    "skipped",
    "nan",
}
RATES = {"learning-rate", "decoupled-learning-rate"}
LAST_DIGIT = 5.1e-7  # half a unit of the last of seven digits
UNEXPECTED = ("lm loss", "decoupled")  # metrics that may not be there unless asked for
PRINTED = {  # relative and absolute
    "lm loss": (LAST_DIGIT, 0.0),
    "learning-rate": (LAST_DIGIT, 0.0),
    "decoupled-learning-rate": (LAST_DIGIT, 0.0),
    "grad-norm": (0.0, 5.1e-4),
}
ROUNDOFF = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}


class Difference(NamedTuple):
    """What is not as expected. `is_exact`: no tolerance applies to it, as to a count, a rate or a
    row; else `size` is relative.
    """

    text: str
    is_exact: bool = True
    size: float = 0.0


def narrow_bound(precision: str, layers: int) -> float:
    """Relative difference that two narrow computations of a gradient may have. A pass through L
    layers rounds about 12 L + 4 times (norm 2, projection, rotary, scores, probabilities, context,
    output, residual, up, activation, down and residual; embedding 2, norm, logits), and as often on
    the way back, each time by at most u and independently: u sqrt(2 n) of the exact value. Two of
    them differ by sqrt(2) of that at most; 2 is taken.
    """
    return 2 * ROUNDOFF[precision] * math.sqrt(2 * (12 * layers + 4))


@functools.cache
def expected(case: Case) -> list[Outcome]:
    """The oracle's outcome of each run of a case."""
    threads, outcomes = torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        state: State | None = None
        for argv in case.runs("unused"):
            outcomes.append(Trainer(argv, state if "--load" in argv else None).run())
            state = outcomes[-1].state
    finally:
        torch.set_num_threads(threads)
    return outcomes


def differences(case: Case, gloo_world: Callable | None = None) -> list[Difference]:
    """Run the program and the oracle; every difference. `gloo_world` is the fixture,
    needed for several ranks.
    """
    found = []
    with tempfile.TemporaryDirectory(prefix="oracle_run_") as folder:
        runs = zip(case.runs(f"{folder}/save"), case.layouts(), expected(case), strict=True)
        for number, (argv, layout, outcome) in enumerate(runs):
            own = Path(folder, f"run{number}")
            own.mkdir()
            world = gloo_world(case.ranks).run if case.ranks > 1 else None
            try:
                seen = run_program(argv, own, layout, world)
            except Exception as error:
                return [*found, Difference(f"run {number}: {type(error).__name__}: {error}")]
            for differ in (rows_differ, console_differs, weights_differ):
                for each in differ(case, argv, outcome, seen):
                    found.append(each._replace(text=f"run {number}: {each.text}"))
    return found


def weight_bound(case: Case, argv: list[str]) -> float:
    """Of a float64 run: EXACT, of a tensor's norm. Of a narrow one: the share of what training
    moved in all that may be off.

    SGD moves as far as the sum of gradients, so the share is that of gradients, e. Adam moves each
    element by about the learning rate, whatever its gradient's size: where that is below e of the
    usual, a share of about e of all elements, it may go the other way, at a cost of 4 of the
    squared step; together with the others about 4 e, whose root is 2 sqrt(e).
    """
    c = read(argv)
    if case.narrow is None:
        return EXACT
    e = narrow_bound(case.narrow, c.num_layers)
    return 2 * math.sqrt(e) if c.optimizer == "adam" else e


def number_bound(case: Case, argv: list[str], outcome: Outcome) -> float:
    """Of losses and norms: e again. Weights that Adam sent another way lie d = 2 sqrt(e) x the way
    off, in directions that know nothing of later gradients g: a loss is off by |g| d /
    sqrt(elements), and |g| is no larger than the loss.
    """
    c = read(argv)
    if case.narrow is None:
        return EXACT
    e = narrow_bound(case.narrow, c.num_layers)
    moved, elements = moved_by(outcome)
    return e + 2 * math.sqrt(e) * moved / math.sqrt(elements) if c.optimizer == "adam" else e


def moved_by(outcome: Outcome) -> tuple[float, int]:
    """How far training moved the weights (root of the sum of squares), and their number."""
    state = outcome.state
    ways = [w.detach() - state.first_weights[name] for name, w in state.weights.items()]
    squares = sum(float(way.square().sum()) for way in ways)
    return math.sqrt(squares), sum(way.numel() for way in ways)


def rows_differ(case: Case, argv: list[str], outcome: Outcome, seen: Seen) -> list[Difference]:
    """metrics.jsonl."""
    bound, found = number_bound(case, argv, outcome), []
    if outcome.rows.keys() != seen.rows.keys():
        expected_rows = f"expected {sorted(outcome.rows)}"
        found.append(Difference(f"rows of iterations {sorted(seen.rows)}, {expected_rows}"))
    for iteration, row in outcome.rows.items():
        got = seen.rows.get(iteration, {})
        extra = [name for name in got if name.startswith(UNEXPECTED) and name not in row]
        for name in extra:
            found.append(Difference(f"iteration {iteration}: {name} {got[name]} is not expected"))
        for name, value in row.items():
            if name in ("params-norm", "num-zeros") and noise_in(argv):
                continue
            # what is added to all keys in channels that do not rotate has an exact gradient of 0
            if name == "num-zeros" and read(argv).rotary_percent < 1:
                continue
            if not close(got.get(name), value, tolerance(name, value, bound)):
                found.append(number_off(f"iteration {iteration}: ", name, got.get(name), value))
    return found


def tolerance(name: str, value: float, bound: float) -> float:
    """The relative difference that a metric may have, `bound` that of losses and norms."""
    if name in COUNTS:
        return 0.0
    if name in RATES:
        return EXACT
    if "ppl" in name:  # of exp(x) the relative error is the absolute one of x
        return bound * max(1.0, math.log(value))
    return bound


def console_differs(case: Case, argv: list[str], outcome: Outcome, seen: Seen) -> list[Difference]:
    """The lines of training and of evaluations, to the digits that they print."""
    bound, found = number_bound(case, argv, outcome), []
    if outcome.counts.keys() != seen.console.keys():
        lines = f"{sorted(seen.console)}, expected {sorted(outcome.counts)}"
        found.append(Difference(f"console lines of iterations {lines}"))
    expected_lines = {
        (iteration, name): value
        for iteration, row in outcome.rows.items()
        for name, value in row.items()
        if name.startswith(("lm loss validation", "lm loss test"))
    }
    for iteration, name in seen.evaluations.keys() ^ expected_lines.keys():
        text = f"iteration {iteration}: {name} is on the console alone, or missing there"
        found.append(Difference(text))
    for (iteration, name), value in seen.evaluations.items():
        wanted = expected_lines.get((iteration, name), value)
        if not close(value, wanted, tolerance(name, wanted, bound) + LAST_DIGIT):
            found.append(number_off(f"iteration {iteration}: the console's ", name, value, wanted))
    for iteration, counts in outcome.counts.items():
        row = {**outcome.rows[iteration], **counts}
        for name, value in seen.console.get(iteration, {}).items():
            relative, absolute = PRINTED.get(name, (0.0, 0.0))
            if not close(value, row[name], relative + tolerance(name, row[name], bound), absolute):
                where = f"iteration {iteration}: the console's "
                found.append(number_off(where, name, value, row[name]))
    return found


def number_off(where: str, name: str, got: float | None, value: float) -> Difference:
    """A number that is not close to the expected one."""
    text = f"{where}{name} {got!r}, expected {value!r}"
    if got is None or not (math.isfinite(got) and math.isfinite(value)):
        return Difference(text)
    size = abs(got - value) / max(abs(got), abs(value))
    return Difference(text, name in COUNTS | RATES, size)


def close(got: float | None, value: float, relative: float, absolute: float = 0.0) -> bool:
    if got is None:
        return False
    if not math.isfinite(value):  # whether infinities of a sum cancel depends on its order
        return not math.isfinite(got)
    return abs(got - value) <= relative * abs(value) + absolute


def noise_in(argv: list[str]) -> tuple[str, ...]:
    """Endings of weights whose exact gradient is 0."""
    c = read(argv)
    if not (c.bias or c.add_qkv_bias) or c.rotates or c.attn_logit_softcapping:
        return ()
    if c.qk_layernorm:  # what the norm adds to all keys
        return ("attention.k_norm.bias",) if c.normalization == "LayerNorm" else ()
    return ("attention.k.bias",)


def weights_differ(case: Case, argv: list[str], outcome: Outcome, seen: Seen) -> list[Difference]:
    """The checkpoint's weights."""
    weights = outcome.state.weights
    if seen.weights.keys() != weights.keys():
        names = sorted(seen.weights.keys() ^ weights.keys())
        return [Difference(f"weights differ in name: {names}")]
    near, (moved, _) = weight_bound(case, argv), moved_by(outcome)
    roundings = ROUNDOFF["fp32"] * outcome.state.iteration  # of masters, one a step
    found = []
    for name, w in weights.items():
        if name.endswith(noise_in(argv)):
            continue
        got, norm = seen.weights[name].double(), float(w.detach().norm())
        if got.shape != w.shape:
            shapes = f"{tuple(got.shape)}, expected {tuple(w.shape)}"
            found.append(Difference(f"{name} has shape {shapes}"))
            continue
        error = float((got - w.detach()).norm())
        if not error <= (near * moved + roundings * norm if case.narrow else near * norm):
            text = f"weights of {name}: off by {error:.2g}, their norm is {norm:.2g}"
            size = error / norm if norm > 0 else math.inf
            found.append(Difference(text, not math.isfinite(size), size))
    return found
