"""What the planner predicts of Llama 3 8B over long sequences, on one GPU and on eight:
`python benchmarks/long_context.py` writes docs/results/long_context.json. No GPU is needed.

Every layer is recomputed. Pieces of the MLP are as long as the hidden size. Eight GPUs share the
sequence by --context-parallel-size 8 and exchange heads. `host`: bytes of a rank in its host's
memory.
"""

from __future__ import annotations

import datetime
import itertools
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if not __package__:  # run as a file: this folder's `kernels` and `data` must hide no package
    sys.path[0] = str(ROOT)

from megatron.tools._plan.memory import MemoryPlan  # noqa: E402

from megatron.config.arguments import parse_arguments  # noqa: E402
from megatron.config.validate import resolve  # noqa: E402

RESULT = ROOT / "docs" / "results" / "long_context.json"
VOCAB, HIDDEN = 128_256, 4096
MODEL = f"""--num-layers 32 --hidden-size {HIDDEN} --ffn-hidden-size 14336
--num-attention-heads 32 --group-query-attention --num-query-groups 8 --swiglu
--normalization RMSNorm --position-embedding-type rope --disable-bias-linear
--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --bf16
--micro-batch-size 1 --global-batch-size 1 --mock-data --vocab-size {VOCAB - 1} --train-iters 1
--lr 1e-4 --recompute-granularity full"""
LENGTHS = [1 << power for power in (15, 17, 19, 20)]
LAYOUTS = {  # GPUs, and what holds weights and optimizer state
    (1, "stage 0, optimizer on the host"): "--optimizer-cpu-offload",
    (1, "stage 3, weights and optimizer on the host"): "--zero-stage 3 --param-cpu-offload",
    (8, "stage 0, optimizer on the host"): "--zero-stage 0 --optimizer-cpu-offload",
    (8, "stage 3"): "--zero-stage 3",
}
VARIANTS = {  # whether the MLP is in pieces, further flags
    "neither": (False, ""),
    "tiled_mlp": (True, ""),
    "fused_head": (False, "--fused-linear-cross-entropy"),
    "both": (True, "--fused-linear-cross-entropy"),
    "inputs_on_host": (True, "--fused-linear-cross-entropy --activation-offload"),
}


def flags_of(ranks: int, length: int, layout: str, variant: tuple[bool, str]) -> list[str]:
    """The command line of a run."""
    words = f"{MODEL} --seq-length {length} {layout} {variant[1]}"
    if ranks > 1:
        words += f" --context-parallel-size {ranks} --cp-comm-type a2a"
    if variant[0]:
        words += f" --tiled-mlp {-(-length // ranks // HIDDEN)}"
    return words.split()


def planned(ranks: int, words: list[str]) -> dict[str, Any]:
    """Bytes at the worst moment of a step, by kind and in all; and when that is."""
    config = resolve(parse_arguments(words).config, ranks, VOCAB).config
    rank = MemoryPlan(config, VOCAB, ranks).fullest
    return {"sizes": rank.sizes(), "when": rank.peak.when, "flags": " ".join(words)}


def main() -> None:
    """Plan all, write them down and print the GiB."""
    rows = []
    for ((ranks, kept), layout), length in itertools.product(LAYOUTS.items(), LENGTHS):
        found = {
            name: planned(ranks, flags_of(ranks, length, layout, variant))
            for name, variant in VARIANTS.items()
        }
        rows.append({"gpus": ranks, "kept": kept, "length": length, **found})
        gib = [round(each["sizes"]["total"] / 2**30, 1) for each in found.values()]
        print(ranks, kept, f"{length:,}", *gib, flush=True)
    report = {"date": datetime.date.today().isoformat(), "rows": rows}
    RESULT.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
