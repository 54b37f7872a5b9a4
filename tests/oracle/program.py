"""One run of the real program, seen as a user sees it: its metrics.jsonl, its console lines, its
checkpoint.

The only module here that imports the product. A run on one rank takes place in this very process,
through `pretrain_gpt.main`, so a test may replace functions of the product before it and have the
comparison judge what becomes of the run.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from own_run import replaced
from programs import without_plan
from torch import Tensor

from megatron.checkpoint.reader import open_checkpoint
from pretrain_gpt import main

FIELDS = {
    "consumed samples": "consumed_samples",
    "learning rate": "learning-rate",
    "decoupled learning rate": "decoupled-learning-rate",
    "global batch size": "batch-size",
    "lm loss": "lm loss",
    "loss scale": "loss-scale",
    "grad norm": "grad-norm",
    "number of skipped iterations": "skipped",
    "number of nan iterations": "nan",
}
Rows = dict[int, dict[str, float]]


@dataclass(frozen=True)
class Seen:
    """What a run left behind."""

    rows: Rows  # metrics.jsonl, the last row of each iteration
    console: Rows  # the training lines' numbers as printed
    evaluations: dict[tuple[int, str], float]  # those of its evaluations: iteration and metric
    weights: dict[str, Tensor]


def run_program(argv: list[str], folder: Path, layout: list[str], world: Callable | None) -> Seen:
    """Run `pretrain_gpt.py argv`; its metrics go into `folder`. `world`: runs a function on every
    rank (None: here).
    """
    metrics = folder / "metrics.jsonl"
    argv = [*argv, *layout, "--metrics-file", str(metrics)]
    text = run_here(argv) if world is None else world(run_here, argv)[0]
    save = argv[len(argv) - argv[::-1].index("--save")]
    with open_checkpoint(Path(save)) as checkpoint:
        weights = {
            name: checkpoint.read_tensor(name)
            for name in checkpoint.names
            if not name.startswith("optimizer.")
        }
    return Seen(read_rows(metrics), read_console(text), read_evaluations(text), weights)


def run_here(argv: list[str]) -> str:
    """The run on this rank, with one thread; what it printed. Raises AssertionError with its
    messages when it fails.
    """
    threads, err = torch.get_num_threads(), io.StringIO()
    torch.set_num_threads(1)
    try:
        with replaced() as printed, contextlib.redirect_stderr(err), without_plan():
            code = main(argv)
    finally:
        torch.set_num_threads(threads)
    assert code == 0, f"exit code {code}: {err.getvalue() or printed.getvalue()[-2000:]}"
    return printed.getvalue()


def read_rows(path: Path) -> Rows:
    """The last row of each iteration; NaN is written as text."""
    rows = (json.loads(line) for line in path.read_text().splitlines())
    return {
        row["iteration"]: {name: float(value) for name, value in row.items() if name != "iteration"}
        for row in rows
    }


def read_console(text: str) -> Rows:
    """The numbers of every ` [time] iteration N/ M | ... |` line."""
    rows: Rows = {}
    for line in text.splitlines():
        if found := re.match(r" \[[^]]*\] iteration +(\d+)/", line):
            pairs = (
                part.split(":")
                for part in line[found.end() :].split("|")[1:]
                if part.count(":") == 1
            )
            rows[int(found[1])] = {
                FIELDS[name.strip()]: float(value)
                for name, value in pairs
                if name.strip() in FIELDS
            }
    return rows


EVALUATION = (
    r" (validation|test) loss at iteration (\d+)(?: on (\S+))? \|"
    r" lm loss value: (\S+) \| lm loss PPL: (\S+) \|"
)


def read_evaluations(text: str) -> dict[tuple[int, str], float]:
    """Losses and perplexities of the lines ` validation loss at iteration N on SOURCE | ...`."""
    found = {}
    for split, iteration, source, loss, perplexity in re.findall(EVALUATION, text):
        of = f" {source}" if source else ""
        found[int(iteration), f"lm loss {split}{of}"] = float(loss)
        found[int(iteration), f"lm loss {split} ppl{of}"] = float(perplexity)
    return found
