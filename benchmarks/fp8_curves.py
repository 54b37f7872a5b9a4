"""A model of 11 million parameters trained in bf16 and with products of 8-bit floats, over the same
tokens: how far do the losses lie apart?

    bash scripts/quickstart.sh                       # once: the token file
    python benchmarks/fp8_curves.py --out docs/results/fp8_curves.json

On a CPU, where the products are computed by their definition: what eight bits do to a loss, not to
the time. Every run has the same initial weights, samples and schedule, so that losses part by
rounding alone, which training multiplies from step to step. How much that comes to without 8-bit
floats is shown by two more runs in bf16 whose micro-batches are larger and smaller: other roundings
of the same sums. All wide linear layers of all transformer layers take part; the head does not. The
losses of every step are kept. Runs that the file holds are kept.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if not __package__:  # run as a file: this folder's `kernels` and `data` must hide no package
    sys.path[0] = str(ROOT)

from megatron.benchmarks import convergence, training

BASE = "bf16"
FP8 = "--fp8-min-width 256 --fp8-recipe"
# name: micro-batch, flags
FORMATS = {
    BASE: (4, ""),
    "bf16, micro-batch 8": (8, ""),
    "bf16, micro-batch 2": (2, ""),
    "fp8 hybrid, tensorwise": (4, f"--fp8-format hybrid {FP8} tensorwise"),
    "fp8 hybrid, rowwise": (4, f"--fp8-format hybrid {FP8} rowwise"),
    "fp8 e4m3, blockwise": (4, f"--fp8-format e4m3 {FP8} blockwise"),
}
SAMPLES = 8
LAST = 50  # steps whose mean training loss is compared
WORK = replace(
    convergence.WORK,
    layers=6,
    hidden=384,
    heads=6,
    ffn=1024,
    precision="bf16",
    steps=300,
    lr=2e-3,
    min_lr=2e-4,
    lr_warmup=30,
    warmup=1,  # a line of the metrics for every step
)


def run(name: str, data: Path, tokenizer: Path) -> dict:
    """The losses of one format's run. Raises RuntimeError when it fails."""
    micro_batch, more = FORMATS[name]
    work = replace(WORK, micro_batch=micro_batch, accumulation=SAMPLES // micro_batch)
    flags = convergence.our_flags(work, "Llama", data, tokenizer)
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *flags, "--bf16", *more.split()]
    return {"format": name, **convergence.our_curve(command, work)}


def last_mean(run: dict) -> float:
    """Mean training loss of the last steps."""
    return statistics.mean(run["losses"][-LAST:])


def main() -> None:
    parser = convergence.curves_parser(str(__doc__))
    args = parser.parse_args()
    document = {
        "started": datetime.now().isoformat(timespec="seconds"),
        "machine": training.machine(),
        "steps": WORK.steps,
        "runs": [],
    }
    if args.out.exists():
        document = json.loads(args.out.read_text())
    for name in FORMATS:
        if any(run["format"] == name for run in document["runs"]):
            continue
        found = run(name, args.data.resolve(), args.tokenizer_model.resolve())
        document["runs"].append(found)
        args.out.write_text(json.dumps(document) + "\n")
        print(f"{name}: validation loss {found['validation_loss']:.4f}", flush=True)


if __name__ == "__main__":
    main()
