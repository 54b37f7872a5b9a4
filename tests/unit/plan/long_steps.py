"""Real steps of long sequences at a small width, as far as a CPU's attention goes, against the
plan: `python tests/unit/plan/long_steps.py` writes docs/results/long_steps.json (some minutes).

The model is Llama 3 8B's in small: 64 channels of its 4,096, with its ratio of MLP to hidden size
and of query to key heads. Pieces are as long as the hidden size, which is the rule of
--tiled-mlp's help.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TESTS / "unit/plan")]

import measured  # noqa: E402
from distributed.pool import Worlds  # noqa: E402

HIDDEN = 64
MODEL = (
    f"{measured.flags_of('LLAMA FULL')} --num-layers 2 --hidden-size {HIDDEN} "
    "--ffn-hidden-size 224 "
    "--num-attention-heads 4 --group-query-attention --num-query-groups 1 --micro-batch-size 1"
)
FUSED = "--fused-linear-cross-entropy"
EXCHANGED = "--context-parallel-size 2 --cp-comm-type a2a --zero-stage 3"


def case(length: int, ranks: int, *flags: str) -> tuple[int, int, str]:
    """(ranks, micro-batches, flags) of a run over sequences of this length."""
    shared = EXCHANGED if ranks > 1 else ""
    return ranks, 1, f"{MODEL} --seq-length {length} {shared} {' '.join(flags)}"


def tiled(length: int, ranks: int = 1) -> str:
    """--tiled-mlp with pieces as long as the hidden size."""
    return f"--tiled-mlp {length // ranks // HIDDEN}"


LENGTH = 1 << 15
CASES = {
    "32,768 tokens, MLP and head whole": case(LENGTH, 1),
    "32,768 tokens, both in pieces": case(LENGTH, 1, tiled(LENGTH), FUSED),
    "on 2 ranks, head in pieces": case(LENGTH, 2, FUSED),
    "on 2 ranks, both in pieces": case(LENGTH, 2, tiled(LENGTH, 2), FUSED),
}


def main(names: list[str]) -> None:
    """Measure the named cases, or all and write them down."""
    worlds, rows = Worlds(), []
    measured.CASES.update(CASES)
    for name in names or CASES:
        began = time.monotonic()
        for row in measured.compare(name, worlds):
            row["seconds"] = round(time.monotonic() - began, 1)
            rows.append(row | {"flags": CASES[name][2]})
            print(
                f"{row['ratio']:.4f}  {name}: measured {row['measured']:,} {row['where']}, planned "
                f"{row['planned']:,} {row['when']}, {row['seconds']} s",
                flush=True,
            )
    worlds.close()
    if not names:
        measured.write("long_steps", rows)


if __name__ == "__main__":
    main(sys.argv[1:])
