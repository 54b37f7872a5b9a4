"""The text of the training line, the evaluation lines and the banner. Dashboards parse the lines:
their fields are fixed.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial

from megatron.observe.metrics import perplexity

BANNER_WIDTH = 120  # columns
_TITLE_WIDTH = 14


def _number(value: float, spec: str) -> str:
    """`value` in the format `spec`; NaN is spelt NaN (`E` would print NAN)."""
    return "NaN" if math.isnan(value) else format(value, spec)


def _optional(metrics: Mapping[str, float], name: str, label: str, spec: str) -> list[str]:
    """The field of a metric that may be missing."""
    return [f"{label}: {_number(metrics[name], spec)}"] if name in metrics else []


def duration(seconds: float) -> str:
    """`hh:mm:ss`, from one day on `2d 03:04:05`; NaN for an unknown time."""
    if not math.isfinite(seconds):
        return "NaN"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    return (f"{days}d " if days else "") + f"{h:02d}:{m:02d}:{s:02d}"


def training_line(
    iteration: int,
    train_iters: int,
    metrics: Mapping[str, float],
    *,
    skipped: int,
    nan: int,
    eta_seconds: float,
    now: datetime | None = None,
    more: Sequence[str] = (),
) -> str:
    """The console line of a log step.

    `metrics` is the row that goes to the trackers (names and units in metrics.py):
    consumed_samples, iteration-time, throughput, learning-rate, batch-size, lm loss, loss-scale,
    grad-norm and tokens-per-second-per-gpu are needed; decoupled-learning-rate, num-zeros,
    params-norm, mfu, predicted-iteration-time and mem-max-allocated-bytes may be missing. `skipped`
    and `nan` count iterations of the log interval. `more`: fields that follow the others.
    """
    time = (now or datetime.now()).strftime("%Y-%m-%d %H:%M:%S.%f")
    mfu = _number(metrics["mfu"] * 100, ".1f") + "%" if "mfu" in metrics else "n/a"
    fields = [
        f"iteration {iteration:8d}/{train_iters:8d}",
        f"consumed samples: {metrics['consumed_samples']:12d}",
        f"elapsed time per iteration (ms): {_number(metrics['iteration-time'] * 1000, '.1f')}",
        f"throughput per GPU (TFLOP/s/GPU): {_number(metrics['throughput'], '.1f')}",
        f"learning rate: {_number(metrics['learning-rate'], '.6E')}",
        *_optional(metrics, "decoupled-learning-rate", "decoupled learning rate", ".6E"),
        f"global batch size: {metrics['batch-size']:5d}",
        f"lm loss: {_number(metrics['lm loss'], '.6E')}",
        f"loss scale: {_number(metrics['loss-scale'], '.1f')}",
        f"grad norm: {_number(metrics['grad-norm'], '.3f')}",
        *_optional(metrics, "num-zeros", "num zeros", ".1f"),
        *_optional(metrics, "params-norm", "params norm", ".3f"),
        f"number of skipped iterations: {skipped:3d}",
        f"number of nan iterations: {nan:3d}",
        f"tokens per second per GPU: {_number(metrics['tokens-per-second-per-gpu'], '.1f')}",
        f"MFU: {mfu}",
    ]
    fields += _optional(metrics, "predicted-iteration-time", "predicted time (s)", ".4f")
    if "mem-max-allocated-bytes" in metrics:
        fields.append(f"memory (GiB): {metrics['mem-max-allocated-bytes'] / 2**30:.2f}")
    fields += [f"ETA: {duration(eta_seconds)}", *more]
    return f" [{time}] " + " | ".join(fields) + " |"


def evaluation_lines(
    iteration: int, loss: float, *, split: str = "validation", source: str | None = None
) -> str:
    """Three lines: the evaluation of `split` (validation or test; of one of its sources when
    `source` names it) between dashes.
    """
    of = "" if source is None else f" on {source}"
    line = (
        f" {split} loss at iteration {iteration}{of} | lm loss value: {_number(loss, '.6E')} "
        f"| lm loss PPL: {_number(perplexity(loss), '.6E')} | "
    )
    dashes = "-" * (len(line) + 1)
    return f"{dashes}\n{line}\n{dashes}"


NOT_DONE = "asked for, not done"
# A path is not broken: it stays whole for copying, even when it is longer than the banner is wide.
_wrapped = partial(textwrap.wrap, break_long_words=False, break_on_hyphens=False)


def banner(sections: Mapping[str, list[str]]) -> str:
    """The sections with their titles to the left, wrapped at BANNER_WIDTH columns; empty ones are
    omitted. NOT_DONE, requested features that do not exist, comes first, between lines of
    exclamation marks.
    """
    lines = ["=" * BANNER_WIDTH]
    if sections.get(NOT_DONE):
        lines = ["!" * BANNER_WIDTH, f" {NOT_DONE}"]
        for entry in sections[NOT_DONE]:
            lines += _wrapped(
                entry, BANNER_WIDTH - 2, initial_indent="   ", subsequent_indent="     "
            )
        lines += ["!" * BANNER_WIDTH]
    for title, entries in sections.items():
        if title == NOT_DONE:
            continue
        label = title
        for entry in entries:
            for part in _wrapped(entry, BANNER_WIDTH - _TITLE_WIDTH - 4, subsequent_indent="  "):
                lines.append(f" {label:<{_TITLE_WIDTH}} {part}")
                label = ""
    return "\n".join([*lines, "=" * BANNER_WIDTH])
