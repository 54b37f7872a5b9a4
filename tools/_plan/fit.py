"""A device's constants fitted to steps that somebody measured.

Each constant stays near what is known of it (PRIORS: the standard deviation of its logarithm), and
moves where rows require it. Errors of logarithms count by Huber's loss, so that a few odd rows
decide nothing, and rows of a source with many count less each.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.tools._plan.hardware import OF_MEMORY, Hardware, Pricing, Seconds, load_hardware
from megatron.tools._plan.rows import (
    Row,
    hardware_name,
    is_kept_out,
    measured_step,
    network,
    program_of,
    read_rows,
)
from megatron.tools._plan.step import StepModel
from megatron.tools._plan.validate import percentile, row_config, runs_on
from megatron.tools._report.metrics_file import metrics_path, read_metrics

from megatron.checkpoint.run_state import config_of
from megatron.config.errors import UserError
from megatron.observe.tracking import config_file

PRIORS = {
    "product_efficiency": 0.15,
    "product_half": 0.9,
    "fp8_efficiency": 0.4,
    "fp8_half": 1.0,
    "flash1_efficiency": 0.4,
    "flash2_efficiency": 0.25,
    "flash3_efficiency": 0.3,
    "attention_half": 0.6,
    "memory_efficiency": 0.1,
    "hidden_traffic": 0.8,
    "launch_us": 0.35,
    "link_efficiency": 0.2,
    "network_efficiency": 0.3,
    "congestion": 0.8,
    "network_latency_us": 0.8,
    "collective_us": 0.2,
    "overlap": 0.15,
    "slowdown": 0.8,
    "jitter": 0.8,
    "layer_jitter": 0.8,
    "step_ms": 0.8,
}
# Of a machine's CPU, of which nothing but its short runs is known.
CPU_PRIORS = {
    "product_efficiency": 0.3,
    "product_half": 1.0,
    "flash2_efficiency": 1.0,
    "attention_half": 1.0,
    "memory_efficiency": 1.0,
    "hidden_traffic": 1.0,
    "launch_us": 3.0,
    "link_efficiency": 1.0,
    "collective_us": 1.5,
    "step_ms": 2.0,
}
# shares of what hardware can do
MOST = {
    "product_efficiency": 0.9,
    "fp8_efficiency": 0.85,
    "flash1_efficiency": 0.75,
    "flash2_efficiency": 0.75,
    "flash3_efficiency": 0.75,
    "memory_efficiency": 0.95,
    "link_efficiency": 0.95,
    "network_efficiency": 1.0,
    "overlap": 1.0,
}
HUBER = 0.12  # an error of so much is odd
PENALTY = 6e-4  # of one standard deviation, alongside the mean loss of a row


@dataclass
class Sample:
    """A step that took that many seconds. `source`: whose rows it is one of; `own`: constants that
    are its device's or its network's, whatever is fitted.
    """

    model: StepModel
    seconds: float
    source: str
    own: dict[str, Any] = field(default_factory=dict)

    def error(self, hardware: Hardware) -> float:
        """Logarithm of predicted over measured seconds."""
        if self.own:
            hardware = dataclasses.replace(hardware, **self.own)
        return math.log(self.model.time(hardware).seconds / self.seconds)


class SteadyStep(StepModel):
    """A step whose pipeline is simulated once; then its passes grow with the slowest rank's."""

    simulated: float | None = None

    def passes_seconds(self, stages: Sequence[tuple[Seconds, ...]], pricing: Pricing) -> float:
        if not pricing.pairs:
            return super().passes_seconds(stages, pricing)
        slowest = max(forward + backward for forward, backward, _ in self.by_rank(stages))
        if self.simulated is None:
            self.simulated = super().passes_seconds(stages, pricing) / slowest
        return self.simulated * slowest


def priors_of(hardware: Hardware) -> dict[str, float]:
    """The constants that are fitted for a device of this kind."""
    return CPU_PRIORS if hardware.cores else PRIORS


def loss(samples: Sequence[Sample], hardware: Hardware, prior: Hardware) -> float:
    """What the fit makes small."""
    counts = Counter(sample.source for sample in samples)
    weights = [counts[sample.source] ** -0.35 for sample in samples]
    errors = [abs(sample.error(hardware)) for sample in samples]
    total = sum(
        weight * (error**2 / 2 / HUBER if error < HUBER else error - HUBER / 2)
        for weight, error in zip(weights, errors, strict=True)
    )
    moved = sum(
        (math.log(getattr(hardware, name) / getattr(prior, name)) / sigma) ** 2
        for name, sigma in priors_of(prior).items()
    )
    return total / sum(weights) + PENALTY * moved


def fit(samples: Sequence[Sample], prior: Hardware, rounds: int = 8) -> Hardware:
    """The device with the constants that explain the samples, by descent along one constant after
    another.
    """
    found = prior
    steps = dict.fromkeys(priors_of(prior), 0.25)
    for _ in range(rounds):
        for sample in samples:
            if isinstance(sample.model, SteadyStep):
                sample.model.simulated = None
        best = loss(samples, found, prior)
        for name in steps:
            found, best, moved = _along(samples, found, prior, name, steps[name], best)
            if not moved:
                steps[name] /= 2
    return found


def _along(
    samples: Sequence[Sample],
    found: Hardware,
    prior: Hardware,
    name: str,
    step: float,
    best: float,
) -> tuple[Hardware, float, bool]:
    """Up to three steps of one constant, up or down."""
    moved = False
    for factor in (math.exp(step), math.exp(-step)):
        for _ in range(3):
            value = min(getattr(found, name) * factor, MOST.get(name, math.inf))
            tried = dataclasses.replace(found, **{name: value})
            its_loss = loss(samples, tried, prior)
            if its_loss >= best - 1e-7:
                break
            found, best, moved = tried, its_loss, True
        if moved:
            break
    return found, best, moved


def run_sample(metrics: str | Path, device: str, warm: int = 1) -> Sample:
    """A run on a `device`, cuda or cpu, as a sample: its configuration, and the median of its
    iterations' times but for the first `warm` rows. Raises UserError.
    """
    path = metrics_path(metrics)
    rows = read_metrics(path)
    times = [row["iteration-time"] for row in rows if "iteration-time" in row][warm:]
    try:
        written = json.loads(config_file(path).read_text(encoding="utf-8"))
        config = config_of(written)
        world_size = int(rows[-1]["world-size"])
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(f"{config_file(path)}: not the configuration of a run: {error}") from None
    if not times:
        raise UserError(f"{path}: fewer than {warm + 1} rows with iteration-time")
    vocab_size = written.get("vocab_size") or config.data.vocab_size
    if vocab_size is None:
        raise UserError(f"{config_file(path)}: does not give the tokenizer's number of entries")
    model = SteadyStep(config, int(vocab_size), world_size, device=device)
    return Sample(model, statistics.median(times), str(path))


def row_sample(row: Row) -> Sample | None:
    """A row that was measured."""
    seconds = measured_step(row)
    if seconds is None:
        return None
    device = load_hardware(hardware_name(row))
    own = {name: getattr(device, name) for name in OF_MEMORY}
    if (bandwidth := network(row)) is not None:
        own["network_gbps"] = bandwidth
    config, vocab_size, world_size = row_config(row)
    model = SteadyStep(config, vocab_size, world_size, program_of(row))
    return Sample(model, seconds, row["source"], own)


def row_samples(path: str | Path, device: Hardware) -> list[tuple[Sample, bool]]:
    """The rows of a file that ran on devices of this type, and whether each is kept out."""
    found = []
    for row in read_rows(path):
        if runs_on(row, device):
            sample = row_sample(row)
            if sample is not None:
                found.append((sample, is_kept_out(row)))
    return found


def fit_files(
    paths: Sequence[str], prior: Hardware, *, published: bool = False
) -> tuple[Hardware, dict[str, str]]:
    """(the device, how each constant that moved was found) from CSV files of rows and from runs'
    metrics. `published`: rows that are kept out of the shipped constants only widen the errors.
    Raises UserError.
    """
    samples: list[tuple[Sample, bool]] = []
    for path in paths:
        if str(path).endswith(".csv"):
            samples += row_samples(path, prior)
        else:
            samples.append((run_sample(path, prior.device), False))
    fitted = [sample for sample, is_out in samples if not (published and is_out)]
    if not fitted:
        raise UserError(
            f"fit: no step that {prior.name} took in {', '.join(paths) or 'no file'}; give files "
            "of rows (.csv) or metrics.jsonl of runs, and --hardware"
        )
    found = fit(fitted, prior)
    kind = "published steps, docs/planning.md" if published else "steps that were measured"
    sources = {
        name: f"fitted to {len(fitted)} {kind}; before"
        for name in priors_of(prior)
        if getattr(found, name) != getattr(prior, name)
    }
    errors = band([sample for sample, _ in samples], found)
    return dataclasses.replace(found, errors=errors), sources


def band(samples: Sequence[Sample], hardware: Hardware) -> dict[str, tuple[float, float]]:
    """By kind of layout the 10th and 90th percentile of measured over predicted seconds; of kinds
    with at least five samples.
    """
    ratios: dict[str, list[float]] = {}
    for sample in samples:
        ratio = math.exp(-sample.error(hardware))
        ratios.setdefault(sample.model.kind, []).append(ratio)
    return {
        kind: (percentile(each, 0.1), percentile(each, 0.9))
        for kind, each in ratios.items()
        if len(each) >= 5
    }
