"""Experts of one rank on a CPU: torch's grouped product against a loop of products.

    OMP_NUM_THREADS=1 python benchmarks/grouped_gemm.py --out docs/results/grouped_gemm.json

A turn is a forward and a backward pass of the layer's own `Experts` (swiglu, weight gradients into
main_grad) on one thread, over rows of which each has drawn its expert: as in a run, numbers differ
from turn to turn. The two backends take turns with the same numbers; a pair is five turns of each,
its ratio the loop's seconds by those of the grouped product. Above 1 the grouped product is faster:
what `auto` of --grouped-gemm-backend takes on a CPU (SMALL_GEMM of megatron/model/kernels.py)
follows from where that is.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:  # run as a file: this folder's `kernels` and `data` must hide no package
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from megatron.benchmarks import ratio_rule
from megatron.benchmarks.training import machine

from megatron.config.groups import ModelConfig
from megatron.model.experts.experts import LOOP, TORCH_GROUPED, Experts, RowCounts
from megatron.model.model_parallel import NO_TP

ROUNDS = 11
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Shape(NamedTuple):
    """Experts, rows of each, hidden size, and width of an expert."""

    experts: int
    rows: int
    hidden: int
    width: int

    @property
    def flops(self) -> float:
        """Of an expert's first product, by which `auto` goes."""
        return 2.0 * self.rows * self.hidden * 2 * self.width


SHAPES = (
    Shape(8, 256, 256, 128),
    Shape(8, 64, 256, 128),
    Shape(16, 64, 256, 64),
    Shape(64, 64, 256, 64),
    Shape(64, 32, 256, 64),
    Shape(64, 16, 256, 64),
    Shape(128, 32, 512, 64),
    Shape(128, 8, 256, 64),
    Shape(128, 8, 128, 32),
)


class Turns:
    """The two layers of a shape, which compute the same."""

    def __init__(self, shape: Shape, dtype: torch.dtype):
        config = ModelConfig(
            num_layers=1,
            hidden_size=shape.hidden,
            activation="swiglu",
            num_experts=shape.experts,
            moe_ffn_hidden_size=shape.width,
        )
        generator = torch.Generator().manual_seed(0)
        count = shape.experts * shape.rows
        self.rows = torch.randn(count, shape.hidden, generator=generator).to(dtype)
        self.dy = torch.randn(count, shape.hidden, generator=generator).to(dtype)
        self.weights = torch.rand(count, generator=generator)
        self.shape, self.generator = shape, generator
        self.layers = {}
        for backend in (LOOP, TORCH_GROUPED):
            layer = Experts(config, "experts", NO_TP).to_empty(device="cpu")
            layer = layer.to(dtype)
            for number, weight in enumerate((layer.fc1, layer.fc2)):
                draw = torch.Generator().manual_seed(number)
                value = torch.randn(weight.shape, generator=draw) * weight.shape[1] ** -0.5
                weight.data.copy_(value)
                weight.main_grad = torch.zeros(weight.shape)
            self.layers[backend] = layer

    def drawn(self) -> torch.Tensor:
        """How many rows each expert has."""
        experts = torch.randint(self.shape.experts, self.weights.shape, generator=self.generator)
        return experts.bincount(minlength=self.shape.experts)

    def turn(self, backend: str, numbers: torch.Tensor) -> tuple[float, torch.Tensor]:
        """(seconds, the gradient of the rows)."""
        layer = self.layers[backend]
        counts = RowCounts.of(backend, numbers, numbers.tolist())
        rows = self.rows.detach().requires_grad_()
        begin = time.perf_counter()
        layer(rows, self.weights, counts).backward(self.dy)
        seconds = time.perf_counter() - begin
        assert rows.grad is not None
        return seconds, rows.grad


def measured(shape: Shape, name: str, rounds: int) -> dict[str, Any]:
    """A row of the result."""
    turns = Turns(shape, DTYPES[name])
    numbers = turns.drawn()
    (_, loop), (_, grouped) = (turns.turn(each, numbers) for each in (LOOP, TORCH_GROUPED))
    torch.testing.assert_close(grouped, loop, rtol=2e-2 if name == "bf16" else 1e-4, atol=1e-2)
    pairs = []
    for _ in range(rounds):
        drawn = [turns.drawn() for _ in range(5)]
        pairs.append(
            {
                backend: sum(turns.turn(backend, numbers)[0] for numbers in drawn) / 5
                for backend in (LOOP, TORCH_GROUPED)
            }
        )
    judged = ratio_rule.verdict([pair[LOOP] / pair[TORCH_GROUPED] for pair in pairs], 1.0)
    return {
        **shape._asdict(),
        "dtype": name,
        "mflop": shape.flops / 1e6,
        "pairs": pairs,
        "verdict": asdict(judged),
    }


def main(words: list[str] | None = None) -> int:
    """Measure all shapes and write them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    rows = []
    for name in DTYPES:
        for shape in SHAPES:
            row = measured(shape, name, options.rounds)
            rows.append(row)
            found = row["verdict"]
            print(
                f"{name} {shape.experts} experts x {shape.rows} rows, {shape.hidden} -> "
                f"{shape.width}, {row['mflop']:.2f} MFLOP: {found['median']:.2f} "
                f"({found['low']:.2f}-{found['high']:.2f})",
                flush=True,
            )
    written = {"machine": machine(), "date": date.today().isoformat(), "rows": rows}
    options.out.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
