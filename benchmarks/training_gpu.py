"""Training speed on one GPU: pretrain_gpt.py with its default kernels, with torch's operators
alone, with --torch-compile, with --cuda-graphs and with --fp8-format, and a plain PyTorch loop with
and without Liger's kernels.

    python benchmarks/training_gpu.py --out FOLDER          # on a GPU: training_gpu.json and .md
    python benchmarks/training_gpu.py --out FOLDER --tiny   # to try it: small shapes, also on a CPU

Llama-style models in bf16 on random tokens, one process a cell, at most 8 minutes (--minutes; what
is left is listed as not run). `8B layers` has the shape of an 8B model's layers, 6 of its 32, so
that weights and optimizer fit one GPU. Speed is the median of the steps after the first few. MFU
counts every side's tokens by the same FLOPs (megatron/model/arithmetic.py) against the bf16 peak of
the GPU; memory is torch.cuda's peak.

`predicted` was written before anything was measured: the time of the products at the share of the
peak that cuBLAS reaches (0.79), of attention at what torch's FLASH-2 kernel reaches (320 TFLOP/s
forward and backward alike), and of what is bound by memory at 85% of the bandwidth, counted in
bytes a token and layer for one-pass kernels (34 hidden + 10 ffn elements of 2 bytes, forward and
backward), 6 bytes a logit, and 30 a parameter for AdamW. With torch's operators the bytes are
counted three times, with --torch-compile one and a half times: it fuses, but cuts where a norm adds
up along another dimension than the next operator. Products of 8-bit floats, of models wide enough
for them, are counted at what cuBLAS reaches at 4096^3 (1,230 TFLOP/s with scales of tensors, 1,215
of rows; of blocks no figure was found, 1,100 is a guess), beside the bytes that quantising reads
and writes, and those in which gradients of weights are added up.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if not __package__:  # run as a file: this folder's `kernels` and `data` must hide no package
    sys.path[0] = str(ROOT)

import torch

from megatron.config.arguments import parse_arguments
from megatron.config.validate import resolve
from megatron.model.arithmetic import flops_per_iteration, peak_tflops
from megatron.observe.tracking import read_metrics

PEER = ROOT / "benchmarks" / "peers" / "gpu_loop.py"
STEPS, WARMUP = 12, 4
PATIENCE = 150.0  # seconds for a cell
TORCH = """--norm-backend torch --rotary-backend torch --activation-backend torch
    --dropout-backend torch --cross-entropy-backend torch --grad-norm-backend torch
    --attention-backend sdpa --adam-implementation torch-fused"""
# of an H100, from its data sheet and from published products: FLOP/s and bytes/s
PRODUCTS, ATTENTION, MEMORY = 0.79 * 989e12, 320e12, 0.85 * 3.35e12


@dataclass(frozen=True)
class Model:
    """The shape of a model and of a step of one micro-batch."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int  # key/value heads
    vocab: int
    seq: int
    samples: int

    @property
    def tokens(self) -> int:
        return self.seq * self.samples


MODELS = {
    "125M": Model(12, 768, 2048, 12, 12, 50304, 1024, 16),
    "1.3B": Model(24, 2048, 5504, 16, 16, 50304, 2048, 4),
    "8B layers": Model(6, 4096, 14336, 32, 8, 128256, 8192, 1),
}
TINY = {"tiny": Model(2, 128, 256, 4, 4, 256, 32, 4)}
# recipe: FLOP/s of its products; and bytes that quantising takes for an element of x, of the weight
# and of the gradient of the output, in a step
FP8 = {
    "tensorwise": (1230e12, (10, 10, 6)),
    "rowwise": (1215e12, (3, 8, 3)),
    "blockwise": (1100e12, (6, 6, 4)),
}
FP8_SIDES = {f"ours, fp8 {recipe}": recipe for recipe in FP8}
SIDES = (
    "ours",
    "ours, torch's operators",
    "ours, compiled",
    "ours, graphs",
    *FP8_SIDES,
    "plain loop",
    "plain loop, Liger",
)
WIDE = 4096  # inputs and outputs from which on linear layers take 8-bit floats


# times that the bytes of a one-pass kernel are counted
PASSES = {"ours": 1, "ours, graphs": 1, "plain loop, Liger": 1, "ours, compiled": 1.5}


def main() -> int:
    """Measure every cell; the exit code is 1 when one of ours has failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    started, cells = time.monotonic(), []
    for name, model in (TINY if given.tiny else MODELS).items():
        for side in SIDES:
            if side in FP8_SIDES and model.hidden < WIDE and not given.tiny:
                continue
            cell = {"model": name, "side": side, "predicted": predicted(model, side)}
            if time.monotonic() - started > 60 * given.minutes:
                cell |= {"fault": "not run: no time left"}
            else:
                cell |= measure(model, side)
            cells.append(cell)
            write(given.out, cells)
            print(line(cell), flush=True)
    return int(any("fault" in cell and cell["side"].startswith("ours") for cell in cells))


def flags(model: Model) -> list[str]:
    """The model and its step as pretrain_gpt.py's flags."""
    return f"""--num-layers {model.layers} --hidden-size {model.hidden}
        --ffn-hidden-size {model.ffn} --num-attention-heads {model.heads}
        --group-query-attention --num-query-groups {model.groups} --swiglu
        --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
        --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0
        --seq-length {model.seq} --micro-batch-size {model.samples} --mock-data
        --tokenizer-type NullTokenizer --vocab-size {model.vocab - 1} --bf16 --lr 1e-4
        --train-iters {STEPS} --log-interval 1 --eval-iters 0""".split()


def flops(model: Model) -> float:
    """Of a step, without recomputation."""
    config = resolve(parse_arguments(flags(model)).config, 1, model.vocab).config
    return flops_per_iteration(config.model, model.samples, model.seq, model.vocab)


def predicted(model: Model, side: str) -> dict[str, float]:
    """Seconds of a step on an H100, and MFU; docstring of the module."""
    if side in FP8_SIDES:
        return _predicted_fp8(model, FP8_SIDES[side])
    h, f, width = model.hidden, model.ffn, model.hidden // model.heads
    attention = 3.5 * 2 * model.samples * model.heads * model.seq**2 * width * model.layers
    matrices = 6 * model.tokens * matrix_parameters(model)
    layer_bytes = model.tokens * model.layers * 2 * (34 * h + 10 * f)
    passes = PASSES.get(side, 3)
    logits = 6 * model.tokens * model.vocab
    update = 30 * (matrix_parameters(model) + model.vocab * h)
    seconds = (
        matrices / PRODUCTS
        + attention / ATTENTION
        + (passes * (layer_bytes + logits) + update) / MEMORY
    )
    return {"seconds": seconds, "mfu": flops(model) / seconds / 989e12}


def _predicted_fp8(model: Model, recipe: str) -> dict[str, float]:
    """As `predicted`, where linear layers take 8-bit floats."""
    rate, (of_x, of_weight, of_dy) = FP8[recipe]
    h, width = model.hidden, model.hidden // model.heads
    qkv = h + 2 * model.groups * width
    shapes = ((qkv, h), (h, h), (2 * model.ffn, h), (h, model.ffn))  # outputs and inputs
    weights = model.layers * sum(outputs * inputs for outputs, inputs in shapes)
    narrow = (2 if recipe == "rowwise" else 3) * 2 * model.tokens * weights
    wide = 6 * model.tokens * weights - narrow
    quantised = of_weight * weights + model.layers * model.tokens * sum(
        of_dy * outputs + of_x * inputs for outputs, inputs in shapes
    )
    added = 0 if recipe == "rowwise" else 8 * weights
    seconds = predicted(model, "ours")["seconds"]
    seconds += narrow / rate + (wide - 6 * model.tokens * weights) / PRODUCTS
    seconds += (quantised + added) / MEMORY
    return {"seconds": seconds, "mfu": flops(model) / seconds / 989e12}


def matrix_parameters(model: Model) -> int:
    """Elements of the matrices of layers and of the head."""
    h, width = model.hidden, model.hidden // model.heads
    attention = 2 * h * h + 2 * h * model.groups * width
    return model.layers * (attention + 3 * h * model.ffn) + model.vocab * h


def measure(model: Model, side: str) -> dict[str, Any]:
    """What a cell's process has found, or why it has not."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder, "rows.jsonl")
        if side.startswith("ours"):
            more = {
                "ours, torch's operators": TORCH.split(),
                "ours, compiled": ["--torch-compile"],
                "ours, graphs": ["--cuda-graphs"],
            }
            if side in FP8_SIDES:
                least = str(min(WIDE, model.hidden))
                more[side] = ["--fp8-format", "hybrid", "--fp8-min-width", least]
                more[side] += ["--fp8-recipe", FP8_SIDES[side]]
            command = [str(ROOT / "pretrain_gpt.py"), *flags(model), *more.get(side, [])]
            command += ["--metrics-file", str(rows)]
        else:
            shape = [f"--{name}={value}" for name, value in asdict(model).items()]
            command = [str(PEER), *shape, f"--steps={STEPS}", f"--out={rows}"]
            command += ["--liger"] if "Liger" in side else []
        try:
            run = subprocess.run(
                [sys.executable, *command], capture_output=True, text=True, timeout=PATIENCE
            )
        except subprocess.TimeoutExpired:
            return {"fault": f"not done after {PATIENCE:.0f} s"}
        if run.returncode:
            return {"fault": (run.stdout + run.stderr).strip().splitlines()[-1]}
        return read(model, rows)


def read(model: Model, rows: Path) -> dict[str, Any]:
    """Speed and memory of a metrics file, in pretrain_gpt.py's names."""
    steps = [row for row in read_metrics(rows) if "iteration-time" in row]
    seconds = statistics.median(row["iteration-time"] for row in steps[WARMUP:])
    found: dict[str, Any] = {
        "seconds": seconds,
        "tokens_per_second": model.tokens / seconds,
        "losses": [row["lm loss"] for row in steps],
        "bytes": max(row.get("mem-max-allocated-bytes", 0) for row in steps),
    }
    peak = torch.cuda.is_available() and peak_tflops(torch.cuda.get_device_name(), "bfloat16")
    if peak:
        found["mfu"] = flops(model) / seconds / (peak * 1e12)
    return found


def line(cell: dict[str, Any]) -> str:
    """A row of the table."""
    guess = cell["predicted"]
    expected = f"{1e3 * guess['seconds']:.0f} ms, {100 * guess['mfu']:.0f}%"
    if "fault" in cell:
        return f"| {cell['model']} | {cell['side']} | {cell['fault']} | | | {expected} |"
    measured = f"{1e3 * cell['seconds']:.1f} ms, {cell['tokens_per_second']:,.0f}"
    mfu = f"{100 * cell['mfu']:.1f}%" if "mfu" in cell else "-"
    memory = f"{cell['bytes'] / 2**30:.1f} GiB"
    return f"| {cell['model']} | {cell['side']} | {measured} | {mfu} | {memory} | {expected} |"


def write(folder: Path, cells: list[dict[str, Any]]) -> None:
    """training_gpu.json, and the same as a table."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    about = {
        "device": device,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": str(date.today()),
    }
    text = json.dumps({**about, "cells": cells}, indent=1)
    (folder / "training_gpu.json").write_text(text + "\n")
    head = [
        f"{device}, torch {about['torch']}, Python {about['python']}, {about['date']}",
        "",
        "| model | side | step, tokens/s | MFU | memory | predicted step and MFU (H100) |",
        "|---|---|---|---|---|---|",
    ]
    (folder / "training_gpu.md").write_text("\n".join([*head, *map(line, cells)]) + "\n")


if __name__ == "__main__":
    sys.exit(main())
