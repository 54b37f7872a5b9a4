"""The planner held against published runs: each row predicted from its flags alone, and how far off
the predictions are by group.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.tools._plan.hardware import OF_MEMORY, Hardware, gpu_type, load_hardware
from megatron.tools._plan.program_memory import peak_of
from megatron.tools._plan.rows import (
    Row,
    fits_of,
    hardware_name,
    measured_step,
    network,
    number,
    program_of,
    row_flags,
)
from megatron.tools._plan.step import StepModel
from megatron.tools._plan.verdict import judge

from megatron.config.arguments import parse_arguments
from megatron.config.errors import UserError
from megatron.config.groups import Config
from megatron.config.validate import resolve

WORDS = {"fits": "yes", "tight": "tight", "does not fit": "no"}
RAN = ("--mock-data", "--train-iters", "10", "--lr", "1e-4", "--dry-run")
UNKNOWN = ("", "not stated")
# What a row leaves open is taken as the fastest of these that fits, as who ran it would.
OPEN = {"micro_batch": ("1", "2", "4", "8"), "vp": ("1", "2", "4"), "recompute": ("none", "full")}


# Rows that the shipped constants were fitted to, that were kept out of that fit, and others.
FITTED, KEPT, UNSEEN = "fitted to", "kept out", "other sources"


@dataclass
class Prediction:
    """Of one row. `refused`: why there is none; `part`: one of the three above, where asked."""

    row: Row
    step_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    mfu: float | None = None
    peak_gib: float | None = None
    fits: str | None = None
    refused: str | None = None
    kind: str = ""
    part: str = ""
    padded_tflop: float | None = (
        None  # of the model on a rank in a step, with its padded vocabulary
    )

    def written(self) -> dict[str, Any]:
        """For a file of JSON."""
        if self.refused is not None:
            return {"refused": self.refused}
        names = ("tokens_per_s_per_gpu", "step_s", "mfu", "peak_gib", "fits", "kind")
        return {name: getattr(self, name) for name in names}

    @property
    def measured(self) -> float | None:
        """Seconds that a step took; of TFLOP/s where a row has these alone."""
        seconds = measured_step(self.row)
        rate = (self.row.get("tflops_per_gpu") or "").strip()
        if seconds is None and rate and self.padded_tflop is not None:
            return self.padded_tflop / number(self.row, "tflops_per_gpu")
        return seconds

    @property
    def error(self) -> float | None:
        """Of the predicted tokens a second: 0.1 where 10% more are predicted than were measured."""
        if self.measured is None or self.step_s is None:
            return None
        return self.measured / self.step_s - 1


def row_config(row: Row) -> tuple[Config, int, int]:
    """(resolved configuration, vocabulary, ranks). Raises UserError."""
    flags, world = row_flags(row)
    vocabulary = int(number(row, "vocab"))
    config = parse_arguments([*flags, *RAN]).config
    config = dataclasses.replace(
        config, data=dataclasses.replace(config.data, tokenizer_type="NullTokenizer")
    )
    return resolve(config, world, vocabulary).config, vocabulary, world


def row_model(row: Row) -> StepModel:
    """The steps of a row."""
    config, vocabulary, world = row_config(row)
    return StepModel(config, vocabulary, world, program_of(row))


def runs_on(row: Row, device: Hardware) -> bool:
    """Whether a row ran on devices of this type."""
    return gpu_type(load_hardware(hardware_name(row))) == gpu_type(device)


def row_hardware(row: Row, given: Hardware | None = None) -> Hardware:
    """The device of a row, with the network that its note names; `given`: in the place of the
    shipped constants of its type.
    """
    hardware = load_hardware(hardware_name(row))
    if given is not None and runs_on(row, given):
        own = {name: getattr(hardware, name) for name in OF_MEMORY}
        hardware = dataclasses.replace(given, **own)
    bandwidth = network(row)
    if bandwidth is None:
        return hardware
    return dataclasses.replace(hardware, network_gbps=bandwidth)


def filled(row: Row) -> list[Row]:
    """The row with each choice of what it leaves open."""
    open_ones = [
        column
        for column in OPEN
        if row.get(column, "1" if column == "vp" else "").strip() in UNKNOWN
        and not (column == "vp" and row["pp"] == "1")
    ]
    choices = itertools.product(*(OPEN[column] for column in open_ones))
    return [row | dict(zip(open_ones, choice, strict=True)) for choice in choices]


def predict_row(row: Row, given: Hardware | None = None) -> Prediction:
    """What the planner specifies of a row."""
    best: Prediction | None = None
    refused = "no choice of what the row leaves open can run"
    for each in filled(row):
        try:
            found = _predict(each, given)
        except UserError as error:
            refused = str(error)
            continue
        if best is None or (found.fits == "no", found.step_s) < (best.fits == "no", best.step_s):
            best = found
    if best is None:
        return Prediction(row, refused=refused)
    best.row = row
    return best


def _predict(row: Row, given: Hardware | None) -> Prediction:
    model = row_model(row)
    hardware = row_hardware(row, given)
    time = model.time(hardware)
    peak = peak_of(program_of(row), model.config, model.vocab_size, model.world_size) / 2**30
    return Prediction(
        row,
        step_s=time.seconds,
        tokens_per_s_per_gpu=time.tokens_per_second,
        mfu=time.mfu(hardware.peak_tflops),
        peak_gib=peak,
        fits=WORDS[judge(peak, hardware.memory_gib)],
        kind=model.kind,
        padded_tflop=model.padded_flops / model.world_size / 1e12,
    )


@dataclass(frozen=True)
class Score:
    """How well a group of rows was predicted; errors are shares of what was measured."""

    name: str
    rows: int
    median: float
    p90: float
    mean: float
    constant: float  # mean error of the best single FLOP/s for the group
    rank: float | None  # the mean of Spearman's correlations within one model, GPUs and batch
    regret: float | None  # the worst of the layouts ranked first

    @property
    def skill(self) -> float | None:
        """Mean error, of that of the best constant."""
        return self.mean / self.constant if self.constant > 0 else None

    def line(self) -> str:
        """A row of the table."""
        skill = "-" if self.skill is None or self.rows < 3 else f"{self.skill:.2f}"
        rank = "-" if self.rank is None else f"{self.rank:.2f}"
        regret = "-" if self.regret is None else f"{self.regret:.1%}"
        return (
            f"{self.rows:5d} {self.median:7.1%} {self.p90:7.1%} {self.mean:7.1%} "
            f"{self.constant:8.1%} {skill:>6} {rank:>6} {regret:>7}  {self.name}"
        )


HEADER = " rows  median     p90    mean constant  skill   rank  regret  group"


def percentile(values: Sequence[float], share: float) -> float:
    """Between the two nearest in rank."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _flops_rate(prediction: Prediction) -> float:
    """Measured FLOP/s of a GPU, up to a factor of the model: tokens a second x FLOPs a token."""
    assert prediction.mfu and prediction.tokens_per_s_per_gpu and prediction.measured
    assert prediction.step_s
    return prediction.mfu * prediction.step_s / prediction.measured


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Correlation of ranks; ties share the mean of theirs."""
    ranks = [_ranks(values) for values in (first, second)]
    middle = (len(first) - 1) / 2
    product = sum((a - middle) * (b - middle) for a, b in zip(*ranks, strict=True))
    spread = [sum((a - middle) ** 2 for a in each) for each in ranks]
    return product / (spread[0] * spread[1]) ** 0.5 if min(spread) > 0 else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def score(name: str, predictions: Sequence[Prediction]) -> Score | None:
    """Of the rows that were measured and predicted."""
    known = [each for each in predictions if each.error is not None]
    if not known:
        return None
    errors = [abs(each.error or 0.0) for each in known]
    rates = [_flops_rate(each) for each in known]
    constant = min(statistics.fmean(abs(guess / rate - 1) for rate in rates) for guess in rates)
    ranks, regrets = [], []
    for group in alike(known):
        measured = [each.measured for each in group]
        predicted = [each.step_s for each in group]
        ranks.append(spearman(measured, predicted))
        chosen = measured[predicted.index(min(predicted))]
        regrets.append(chosen / min(measured) - 1)
    return Score(
        name,
        len(known),
        percentile(errors, 0.5),
        percentile(errors, 0.9),
        statistics.fmean(errors),
        constant,
        statistics.fmean(ranks) if ranks else None,
        max(regrets) if regrets else None,
    )


def alike(predictions: Sequence[Prediction]) -> list[list[Prediction]]:
    """Rows that differ in their layout alone: of one source, model, GPU, precision, number of GPUs,
    batch and sequence; of at least four.
    """
    columns = ("source", "model", "gpu", "precision", "gpus", "global_batch", "seq")
    groups = defaultdict(list)
    for each in predictions:
        groups[tuple(each.row.get(column) or "" for column in columns)].append(each)
    return [group for group in groups.values() if len(group) >= 4]


def group_name(row: Row) -> str:
    """Source, GPU and precision: rows that one constant could stand for."""
    return f"{row['source']} | {row.get('gpu') or 'H100'} | {row.get('precision') or ''}"


def scores(predictions: Sequence[Prediction]) -> list[Score]:
    """By group, and of all."""
    groups = defaultdict(list)
    for each in predictions:
        groups[group_name(each.row)].append(each)
    found = [score(name, group) for name, group in groups.items()]
    found.append(score("all", predictions))
    return [each for each in found if each is not None]


def part_scores(predictions: Sequence[Prediction]) -> list[Score]:
    """Of rows that were fitted to, and of those that were not."""
    found = (
        score(part, [each for each in predictions if each.part == part])
        for part in (FITTED, KEPT, UNSEEN)
    )
    return [each for each in found if each is not None]


def memory_counts(predictions: Sequence[Prediction]) -> dict[str, dict[str, int]]:
    """By what became of layouts (fitted, ran out of memory): what the plan predicts of how many."""
    found = {}
    for result, text in ((True, "fitted"), (False, "ran out of memory")):
        words = [each.fits or "refused" for each in predictions if fits_of(each.row) is result]
        if words:
            found[text] = {word: words.count(word) for word in sorted(set(words))}
    return found


def validation_record(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """All of it for a file: rows in order, errors by group and by part, and what fits."""
    rows = []
    for each in predictions:
        row = each.written()
        if each.error is not None:
            name = f"{each.row['source'].split()[0]}: {row_name(each.row)}"
            row |= {"row": name, "measured_s": each.measured, "error": each.error}
        rows.append(row | ({"part": each.part} if each.part else {}))
    return {
        "rows": rows,
        "groups": [dataclasses.asdict(each) for each in scores(predictions)],
        "parts": [dataclasses.asdict(each) for each in part_scores(predictions)],
        "memory": memory_counts(predictions),
    }


def memory_lines(predictions: Sequence[Prediction]) -> list[str]:
    """What became of layouts that fitted or ran out of memory."""
    lines = []
    for text, counted in memory_counts(predictions).items():
        words = [word for word, count in counted.items() for _ in range(count)]
        if words:
            counts = ", ".join(f"{count} {word}" for word, count in counted.items())
            accepted = sum(word in ("yes", "tight") for word in words) / len(words)
            lines.append(f"{len(words)} layouts that {text}: {counts}; accepted {accepted:.0%}")
    return lines


def row_name(row: Row) -> str:
    """Model and layout."""
    layout = " ".join(
        f"{name}{row[name]}"
        for name in ("tp", "cp", "pp", "vp", "dp", "ep")
        if (row.get(name) or "1") not in ("1", "")
    )
    return f"{row['model']} s{row['seq']} {row['gpus']} GPUs {layout}"


def row_line(prediction: Prediction) -> str:
    """One row as text."""
    row = prediction.row
    what = row_name(row)
    if prediction.refused is not None:
        return f"{what}: refused: {prediction.refused}"
    text = (
        f"{what}: {prediction.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, {prediction.step_s:.3g} s, "
        f"MFU {prediction.mfu:.1%}, {prediction.peak_gib:.1f} GiB, fits {prediction.fits}"
    )
    if prediction.error is not None:
        text += f"; measured {prediction.measured:.3g} s, {prediction.error:+.1%}"
    result = fits_of(row)
    return text if result is None else f"{text}; {row['result']}"


def validation_report(predictions: Sequence[Prediction]) -> list[str]:
    """All that `tools/plan.py validate` prints."""
    lines = [row_line(each) for each in predictions]
    found = scores(predictions)
    if found:
        lines += ["", "errors of predicted tokens/s by group of rows", HEADER]
        lines += [each.line() for each in found]
        lines += [each.line() for each in part_scores(predictions)]
    return [*lines, *memory_lines(predictions)]
