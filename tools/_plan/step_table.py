"""How long a step takes, and what a search has found, as text."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.tools._plan.hardware import Hardware
from megatron.tools._plan.memory import MemoryPlan
from megatron.tools._plan.search import Candidate, SearchResult
from megatron.tools._plan.step import StepModel, StepTime
from megatron.tools._plan.verdict import judge, memory_verdict

from megatron.config.groups import Config
from megatron.optimizer.lr_schedule import iterations_for, samples_after

# of measured over predicted seconds where a device's file has no errors of its own
UNKNOWN_BAND = (0.8, 1.25)
SMALL = 0.005  # a share of a step that is not worth a word


@dataclass(frozen=True)
class Estimate:
    """What `step` prints. `low_s` and `high_s`: 8 of 10 steps of this kind of layout lie between
    them.
    """

    hardware: Hardware
    kind: str
    time: StepTime
    band: tuple[float, float]
    is_tried: bool  # the band is of predictions that were held against measurements
    peak_gib: float
    fits: str
    memory_line: str

    @property
    def low_s(self) -> float:
        return self.time.seconds * self.band[0]

    @property
    def high_s(self) -> float:
        return self.time.seconds * self.band[1]

    def written(self) -> dict[str, object]:
        """For --json."""
        return {
            "step_s": self.time.seconds,
            "low_s": self.low_s,
            "high_s": self.high_s,
            "tokens_per_s_per_gpu": self.time.tokens_per_second,
            "mfu": self.time.mfu(self.hardware.peak_tflops),
            "spent_s": self.time.spent,
            "peak_gib": self.peak_gib,
            "fits": self.fits,
            "hardware": self.hardware.name,
        }


def estimate(memory: MemoryPlan, hardware: Hardware) -> Estimate:
    """Time and memory of a resolved run on a device."""
    model = StepModel(memory.config, memory.vocab_size, memory.world_size, device=memory.device)
    peak = memory.fullest.total / 2**30
    return Estimate(
        hardware,
        model.kind,
        model.time(hardware),
        hardware.errors.get(model.kind, UNKNOWN_BAND),
        model.kind in hardware.errors,
        peak,
        judge(peak, hardware.memory_gib),
        memory_verdict(memory, hardware.memory_gib).line,
    )


def shares(time: StepTime) -> list[tuple[str, float]]:
    """Parts of a step, the largest first."""
    found = [(name, value / time.seconds) for name, value in time.spent.items()]
    return sorted(found, key=lambda each: -each[1])


def spent_line(time: StepTime) -> str:
    """Where a step goes."""
    parts = [f"{name} {share:.1%}" for name, share in shares(time) if share >= SMALL]
    return f"where it goes: {', '.join(parts)}"


def bound_line(time: StepTime) -> str:
    """What keeps a step from being products alone."""
    useful = ("matrix products", "attention")
    losses = [(name, share) for name, share in shares(time) if name not in useful]
    name, share = losses[0]
    return f"bound by: matrix products and attention; of the rest {name} most ({share:.1%})"


def budget_line(config: Config, time: StepTime, price: float | None) -> str:
    """Days, hours and cost of all steps."""
    training = config.training
    if training.train_iters is not None:
        iterations = training.train_iters
        samples = samples_after(iterations, config)
    else:
        samples = training.train_samples
        iterations = iterations_for(samples, config)
    steps = samples / training.global_batch_size  # through a ramp-up, in whole batches
    hours = steps * time.seconds / 3600
    every = hours * time.world_size
    cost = "" if price is None else f", {every * price:,.0f} dollars at {price:g} each"
    return (
        f"{iterations:,} iterations, {samples * config.data.seq_length:,} tokens: "
        f"{hours / 24:.3g} days, {every:,.0f} GPU hours{cost}"
    )


def step_lines(memory: MemoryPlan, found: Estimate) -> list[str]:
    """The predicted time of a step, for a banner."""
    time = found.time
    basis = (
        f"8 of 10 measured runs of such layouts took {found.low_s:.3g} to {found.high_s:.3g} s"
        if found.is_tried
        else f"{found.low_s:.3g} to {found.high_s:.3g} s, assumed: predictions for this device "
        "were not held against runs"
    )
    return [
        f"{memory.world_size} x {found.hardware.name}: a step of {time.tokens:,} tokens takes "
        f"{time.seconds:.4g} s by the plan ({basis})",
        f"{time.tokens_per_second:,.0f} tokens/s/GPU, MFU "
        f"{time.mfu(found.hardware.peak_tflops):.1%} of {found.hardware.peak_tflops:g} TFLOP/s",
        spent_line(time),
    ]


def step_report(memory: MemoryPlan, found: Estimate, price: float | None) -> list[str]:
    """All that `tools/plan.py step` prints."""
    return [
        *step_lines(memory, found),
        bound_line(found.time),
        budget_line(memory.config, found.time, price),
        found.memory_line,
    ]


def why_slower(best: StepTime, other: StepTime) -> str:
    """What another layout loses by."""
    names = set(best.spent) | set(other.spent)
    more = {name: other.spent.get(name, 0.0) - best.spent.get(name, 0.0) for name in names}
    worst = sorted(more, key=lambda name: -more[name])[:2]
    parts = [f"{name} +{more[name] / best.seconds:.1%}" for name in worst if more[name] > 0]
    return ", ".join(parts) or "nothing in particular"


def candidate_line(number: int, each: Candidate, best: Candidate) -> str:
    """A row of `search`."""
    text = (
        f"{number}. {each.seconds:.4g} s, {each.time.tokens_per_second:,.0f} tokens/s/GPU, "
        f"{each.peak_gib:.1f} GiB: {each.flags}"
    )
    if each is best:
        return text
    slower = each.seconds / best.seconds - 1
    return f"{text}\n   {slower:.1%} slower: {why_slower(best.time, each.time)}"


def search_report(found: SearchResult, hardware: Hardware, price: float | None = None) -> list[str]:
    """All that `tools/plan.py search` prints; `price`: dollars of a GPU hour."""
    lines = [f"{found.timed:,} layouts timed, {found.planned} planned to the byte"]
    if not found.best:
        return [*lines, "none fits: more ranks, a shorter sequence or a smaller model are needed"]
    best = found.best[0]
    lines += [candidate_line(number, each, best) for number, each in enumerate(found.best, 1)]
    for each in found.larger:
        lines.append(
            f"would be {1 - each.seconds / best.seconds:.1%} faster, and needs "
            f"{each.peak_gib:.1f} GiB or more, of {hardware.memory_gib:g}: {each.flags}"
        )
    return [*lines, f"the first: {budget_line(best.config, best.time, price)}"]


def explain_report(found: Estimate, tried: list[Candidate]) -> list[str]:
    """What a change of one flag would bring."""
    lines = ["one flag changed, the fastest first:"]
    for each in tried:
        gain = each.seconds / found.time.seconds - 1
        why = (
            f": {why_slower(found.time, each.time)}"
            if gain > 0
            else f": {why_slower(each.time, found.time).replace('+', '-')}"
        )
        lines.append(
            f"  {gain:+6.1%} {each.peak_gib:6.1f} GiB ({each.fits}) {each.flags or 'without it'}"
            f"{why if abs(gain) >= SMALL else ''}"
        )
    return lines
