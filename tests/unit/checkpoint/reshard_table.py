"""A table of pairs of layouts: what one saves the other loads, and continues from. Rows of it are
tests; all of it by one command:

    python tests/unit/checkpoint/reshard_table.py --out docs/results/reshard.json

For each row: every tensor that each rank holds after loading (weights, masters, moments) and the
rest of the state, bit by bit against what was saved; then the next 3 losses and all tensors after
them, against those of the run that was not interrupted: bit for bit on the same layout, in fp64
within 1e-10 on another, in fp16 (where only state and scale must be exact) within its rounding
times the root of a few hundred operations.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

# the repository, tests, this folder
sys.path[:0] = [str(Path(__file__).resolve().parents[up]) for up in (3, 2, 0)]

from megatron.tools._preprocess.writer import IndexedDatasetWriter  # noqa: E402
from reshard_cases import (
    ALL_LAYOUTS,
    differing,
    distance,
    flags,
    load_and_compare,
    saved,
    saving,
    start,
)  # noqa: E402

from megatron.observe.tracking import read_metrics  # noqa: E402

FP64, FP16 = 1e-10, 2.0**-11 * 16


class Row(NamedTuple):
    """A run of `feature` on layout `source` is loaded on `target`."""

    feature: str
    source: str
    target: str


def _rows(feature: str, pairs: str) -> list[Row]:
    return [Row(feature, *pair.split(">")) for pair in pairs.split()]


TABLE = [
    *_rows(
        "mqa-fp64",
        (
            "one>tp2 tp2>tp2sp tp2sp>dp2 dp2>tp4sp tp4sp>tp2dp2 tp2dp2>one one>pp2 pp2>tp2 "
            "dp2>pp4 pp4>pp2dp2 pp2v2>one pp2zbv>tp2sppp2"
        ),
    ),
    *_rows("mqa-fp64", "one>cp2 cp2>tp2sp cp2dp2>one dp2zero2>cp2dp2zero2 cp2dp2zero2>cp2"),
    *_rows("mqa-fp64", "dp2zero2>pp2dp2zero2 dp2>dp2zero3 pp2zbv>dp4zero3shard2"),
    *_rows(
        "untied-fp64",
        "pp2>tp2 tp2sp>pp2zbv pp2v2>one tp2sppp2>pp4 dp4zero3shard2>tp2 pp2dp2zero2>dp2zero1",
    ),
    *_rows(
        "mqa-fp64",
        (
            "tp4sp>tp4sp pp4>pp4 pp2v2>pp2v2 pp2zbv>pp2zbv dp2zero3>dp2zero3 "
            "dp4zero3shard2>dp4zero3shard2"
        ),
    ),
    *_rows("untied-fp64", "tp2sppp2>tp2sppp2 pp2dp2zero2>pp2dp2zero2"),
    *_rows(
        "gqa-fp16",
        (
            "tp2>dp2zero2 tp4sp>pp2 pp2zbv>dp2zero1 dp4zero3shard2>pp2v2 one>tp2dp2 "
            "dp2zero3>dp2zero3 tp2sppp2>tp2sppp2"
        ),
    ),
    *_rows(
        "ramp-fp64",
        "pp2v2>dp2zero2 dp2zero1>tp2sp dp2zero3>pp2zbv tp2dp2>pp4 dp4zero3shard2>dp4zero3shard2",
    ),
    *_rows("ledger-fp64", "dp2>tp2sp tp4sp>dp2zero3 pp4>one pp2dp2>dp2zero1 dp2zero2>dp2zero2"),
]

EXPERT_TABLE = _rows(
    "moe-fp64",
    (
        "dp4ep4>dp4ep4 dp4ep2zero3>dp4ep2zero3 dp4ep4>one dp4ep4>dp2ep2 dp4ep4>tp2spep2 "
        "dp4ep4>pp2dp2ep2zero2 one>dp4ep2zero3 dp4ep2zero3>dp4ep4 dp4ep2zero3>tp2spdp2ep2 "
        "one>dp4ep2zero1"
    ),
)


def write_data(folder: Path) -> list[str]:
    """Prefixes of three sources of some thousand random tokens."""
    prefixes = []
    for number in range(3):
        rng, prefix = np.random.default_rng(number), str(folder / f"source{number}")
        writer = IndexedDatasetWriter(prefix, np.dtype("u2"))
        for _ in range(40):
            tokens = rng.integers(0, 49, rng.integers(20, 120)).astype("u2")
            writer.add(tokens, np.array([len(tokens)]), np.array([1]))
        writer.finish(
            {
                "max_id": 48,
                "eod_count": 0,
                "tokenizer": {"name": "none", "fingerprint": "0", "eod": 49},
            }
        )
        prefixes.append(prefix)
    return prefixes


class Runs:
    """Source runs of 6 iterations, saved at 3 and 6; each is trained once. `on(layout, function,
    *args)` gives the results by rank.
    """

    def __init__(self, folder: Path, on: Callable) -> None:
        self.folder, self.on, self.prefixes, self.done = folder, on, write_data(folder), set()

    def data(self, feature: str, later: bool = True) -> list[str]:
        """Flags of the training data; the blend of a ledger's run is another one `later`."""
        if not feature.startswith("ledger"):
            return []
        blend = (
            ("1", self.prefixes[1], "3", self.prefixes[2])
            if later
            else ("2", self.prefixes[0], "1", self.prefixes[1])
        )
        return ["--train-data-path", *blend]

    def __call__(self, feature: str, layout: str) -> Path:
        root = self.folder / f"{feature}-{layout}"
        if root not in self.done:
            if self.data(feature):
                first = flags(
                    feature,
                    layout,
                    *saving(root),
                    *self.data(feature, later=False),
                    "--exit-interval",
                    2,
                )
                self._train(layout, first)
                self._train(
                    layout,
                    flags(
                        feature,
                        layout,
                        *saving(root),
                        *self.data(feature),
                        "--load",
                        root,
                        "--accept-changed",
                        "data",
                    ),
                )
            else:
                self._train(layout, flags(feature, layout, *saving(root)))
            self.done.add(root)
        return root

    def _train(self, layout: str, arguments: tuple[str, ...]) -> None:
        texts = self.on(layout, start, arguments)
        assert all(text.endswith("exit code 0") for text in texts), texts[0]

    def measure(self, row: Row, folder: Path, mutant: str | None = None) -> dict[str, Any]:
        """The faults of one row; `folder` is for the run that resumes."""
        root = self(row.feature, row.source)
        arguments = flags(
            row.feature, row.target, *self.data(row.feature), "--load", root, "--ckpt-step", 3
        )
        loaded = self.on(row.target, load_and_compare, arguments, saved(root), mutant)
        text = self.on(row.target, start, (*arguments, *saving(folder)), mutant)[0]
        whole, resumed = (
            [line["lm loss"] for line in read_metrics(where / "metrics.jsonl")][-3:]
            for where in (root, folder)
        )
        found = {
            **row._asdict(),
            "ranks": [ALL_LAYOUTS[layout][0] for layout in row[1:]],
            "not loaded bit for bit": sum(loaded, []),
            "losses": max(abs(a - b) / abs(a) for a, b in zip(whole, resumed, strict=True)),
            "said bit for bit": "resumes bit for bit" in text,
        }
        if row.source == row.target:
            found["tensors that differ 3 iterations later"] = differing(
                saved(root, 6), saved(folder, 6)
            )
        else:
            found["weights 3 iterations later"] = distance(saved(root, 6), saved(folder, 6))
        return found


def faults(found: dict[str, Any]) -> list[str]:
    """In what a measured row is not as promised."""
    shown = [f"rank holds {text}" for text in found["not loaded bit for bit"]]
    same = found["source"] == found["target"]
    if found["said bit for bit"] != same:
        shown.append("the log is wrong about bits")
    bound = 0.0 if same else FP16 if "fp16" in found["feature"] else FP64
    if not found["losses"] <= bound:
        shown.append(f"losses differ by {found['losses']:.3g}")
    if same and found["tensors that differ 3 iterations later"]:
        shown.append("tensors differ 3 iterations later")
    if not same and bound == FP64 and not found["weights 3 iterations later"] < FP64:
        shown.append(f"weights differ by {found['weights 3 iterations later']:.3g}")
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file for the results (JSON)")
    options = parser.parse_args()
    from distributed.pool import Worlds

    torch.set_num_threads(1)
    worlds, begun, rows = Worlds(), time.time(), []

    def on(layout: str, function: Callable, *args: Any) -> list:
        ranks = ALL_LAYOUTS[layout][0]
        return worlds(ranks).run(function, *args) if ranks > 1 else [function(*args)]

    with tempfile.TemporaryDirectory() as name:
        runs = Runs(Path(name), on)
        table = (*TABLE, *EXPERT_TABLE)
        for number, row in enumerate(table):
            rows.append(runs.measure(row, Path(name, f"again-{number}")))
            rows[-1]["faults"] = faults(rows[-1])
            print(
                (
                    f"{number + 1}/{len(table)} {row.feature}: {row.source} -> {row.target}: "
                    f"{rows[-1]['faults'] or 'as promised'}"
                ),
                flush=True,
            )
    worlds.close()
    result = {
        "torch": torch.__version__,
        "device": "cpu",
        "seconds": round(time.time() - begun),
        "rows": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return int(any(row["faults"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
