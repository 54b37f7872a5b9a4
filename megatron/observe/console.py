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
# label, metric, its factor and format
_FIELDS = (
    ("consumed samples", "consumed_samples", 1, "12d"),
    ("elapsed time per iteration (ms)", "iteration-time", 1000, ".1f"),
    ("throughput per GPU (TFLOP/s/GPU)", "throughput", 1, ".1f"),
    ("learning rate", "learning-rate", 1, ".6E"),
    ("decoupled learning rate", "decoupled-learning-rate", 1, ".6E"),
    ("global batch size", "batch-size", 1, "5d"),
    ("lm loss", "lm loss", 1, ".6E"),
    ("loss scale", "loss-scale", 1, ".1f"),
    ("grad norm", "grad-norm", 1, ".3f"),
    ("num zeros", "num-zeros", 1, ".1f"),
    ("params norm", "params-norm", 1, ".3f"),
    ("number of skipped iterations", "skipped", 1, "3d"),
    ("number of nan iterations", "nan", 1, "3d"),
    ("tokens per second per GPU", "tokens-per-second-per-gpu", 1, ".1f"),
    ("MFU", "mfu", 1, ".1%"),
    ("predicted time (s)", "predicted-iteration-time", 1, ".4f"),
    ("memory (GiB)", "mem-max-allocated-bytes", 2**-30, ".2f"),
)


def _number(value: float, spec: str) -> str:
    """`value` in the format `spec`; NaN is spelt NaN (`E` would print NAN)."""
    return "NaN" if math.isnan(value) else format(value, spec)


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

    `metrics` is the row that goes to the trackers (names and units in metrics.py); one that is
    missing has no field, except MFU, which is n/a. `skipped` and `nan` count iterations of the log
    interval. `more`: fields that follow the others.
    """
    time = (now or datetime.now()).strftime("%Y-%m-%d %H:%M:%S.%f")
    values = {**metrics, "skipped": skipped, "nan": nan}
    fields = [f"iteration {iteration:8d}/{train_iters:8d}"]
    for label, name, factor, spec in _FIELDS:
        if name in values:
            fields.append(f"{label}: {_number(values[name] * factor, spec)}")
        elif name == "mfu":
            fields.append("MFU: n/a")
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
    sections = dict(sections)
    missing = sections.pop(NOT_DONE, [])
    edge = ("!" if missing else "=") * BANNER_WIDTH
    lines = [edge]
    if missing:
        lines.append(f" {NOT_DONE}")
        for entry in missing:
            lines += _wrapped(
                entry, BANNER_WIDTH - 2, initial_indent="   ", subsequent_indent="     "
            )
        lines.append(edge)
    for title, entries in sections.items():
        label = title
        for entry in entries:
            for part in _wrapped(entry, BANNER_WIDTH - _TITLE_WIDTH - 4, subsequent_indent="  "):
                lines.append(f" {label:<{_TITLE_WIDTH}} {part}")
                label = ""
    return "\n".join([*lines, "=" * BANNER_WIDTH])
