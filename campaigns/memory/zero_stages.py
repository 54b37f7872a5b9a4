"""Live bytes of every ZeRO stage.

    python campaigns/memory/zero_stages.py --out docs/results/zero_memory.json [--only WORD ...]

Stages 0 to 3 on 2, 4 and 8 data-parallel ranks, 1 and 2 pipeline ranks, 1 and 4 micro-batches, of
models of 1M and 60M parameters, and GPT-2 125M on two ranks: real runs on CPU processes of this
machine, up to 16 of them, with 12 GiB between them. Half an hour on two idle cores. Exit code 1
when a row holds more than it should, or when a peak does not fall from stage to stage where it
must.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from datetime import date
from itertools import product
from operator import itemgetter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from unit.zero.rows import RECOMPUTE, SMALL, Row, faults, fullest  # noqa: E402

from megatron.distributed.collectives import ROUND_BYTES  # noqa: E402

SIZES = {
    "1M": SMALL,
    "60M": {"layers": 10, "hidden": 640, "heads": 10, "seq": 32, "vocab": 16384},
    "GPT-2 125M": {
        "layers": 12,
        "hidden": 768,
        "heads": 12,
        "seq": 64,
        "positions": 1024,
        "vocab": 50304,
    },
}


def table() -> list[tuple[str, Row]]:
    """(name of the model, row)."""

    def row(name: str, *shape, **more) -> tuple[str, Row]:
        return name, Row(*shape, **more, size=tuple(SIZES[name].items()))

    rows = [
        row(name, stage, dp, pp, micro)
        for name, dp, pp, micro, stage in product(
            ("1M", "60M"), (2, 4, 8), (1, 2), (1, 4), range(4)
        )
    ]
    rows += [
        row("60M", stage, 2, 1, 4, precision)
        for precision, stage in product(("fp32", "fp16", "narrow"), range(4))
    ]
    rows += [
        row("60M", 2, 2, 1, 4, model="llama"),
        row("60M", 3, 2, 1, 4, model="llama"),
        row("60M", 3, 4, 1, 4, shard=2),
    ]
    return rows + [
        row(name, stage, 2, 1, 4, flags=RECOMPUTE) for name, stage in product(SIZES, range(4))
    ]


def measured(row: Row, ranked: list) -> dict:
    """What is kept of a row: by pipeline rank, bytes a parameter, of the rank that held most."""
    found = {}
    for pipe in range(row.pp):
        spans = [spans for at, spans in ranked if at == pipe]
        elements = sum(row.blocks(pipe).values())
        most_bytes, peak = max(map(fullest, spans), key=itemgetter(0))
        between = max(
            span.now["total"] - span.now["before"] for each in spans for span in each["between"]
        )
        most = {
            kind: max(span.peak[kind] for each in spans for span in each["step"])
            for kind in ("slots", "scratch", "activations", "parameters")
        }
        found[f"pipeline rank {pipe}"] = {
            "parameters": elements,
            "resident by the formula": sum(row.resident(pipe).values()) / elements,
            "resident": between / elements,
            "peak": most_bytes / elements,
            "at the peak": dict(peak.at_peak),
            "where": peak.where,
            "most bytes": most,
            "bounds": {"slots": row.slots(pipe), "scratch": row.scratch(pipe, ROUND_BYTES)},
        }
    return found


def order_of_peaks(results: dict[str, dict]) -> list[str]:
    """Rows whose peak is not below that of the stage before, where zero.md's conditions hold; full
    recomputation and several micro-batches.
    """
    off = []
    for name, row in table():
        pair = [
            results.get(f"{name} {replace(row, stage=stage)}")
            for stage in (row.stage - 1, row.stage)
        ]
        if row.flags != RECOMPUTE or row.stage == 0 or None in pair:
            continue
        peaks = [each["pipeline rank 0"]["peak"] for each in pair]
        gathers_less = row.largest_two(0) < sum(row.blocks(0).values())
        due = {1: True, 2: row.falls(0), 3: gathers_less}
        if due[row.stage] and peaks[1] >= peaks[0]:
            off.append(
                f"{name} {row}: peak {peaks[1]:.3f} bytes a parameter, {peaks[0]:.3f} at the "
                "stage before"
            )
    return off


def main() -> int:
    import torch
    from distributed.pool import World
    from unit.zero.measure import measure

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", help="write the results to this JSON file")
    parser.add_argument(
        "--only", nargs="*", default=[], help="only rows with all these words in their names"
    )
    arguments = parser.parse_args()
    rows = [
        (name, row)
        for name, row in table()
        if all(word in f"{name} {row}" for word in arguments.only)
    ]
    results: dict[str, dict] = {}
    off, begun, world = [], time.monotonic(), World(1)
    for name, row in sorted(rows, key=lambda each: each[1].world):
        if world.size != row.world:
            world.close()
            world = World(row.world)
        started = time.monotonic()
        ranked = world.run(measure, row.command, timeout=1800)
        found = [fault for pipe, spans in ranked for fault in faults(row, pipe, spans, ROUND_BYTES)]
        results[f"{name} {row}"] = measured(row, ranked)
        off += found
        first = results[f"{name} {row}"]["pipeline rank 0"]
        print(
            f"{name} {row}: resident {first['resident']:.3f}, peak {first['peak']:.3f} bytes "
            "a parameter; "
            f"{'; '.join(found[:3]) or 'as it should be'} ({time.monotonic() - started:.1f} s)",
            flush=True,
        )
    world.close()
    off += order_of_peaks(results)
    minutes = round((time.monotonic() - begun) / 60, 1)
    print(f"{len(rows)} rows in {minutes} minutes, {len(off)} faults", *off, sep="\n")
    if arguments.out:
        report = {
            "date": f"{date.today()}",
            "torch": torch.__version__,
            "minutes": minutes,
            "sizes": SIZES,
            "off": off,
            "rows": results,
        }
        Path(arguments.out).write_text(json.dumps(report, indent=1) + "\n")
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
