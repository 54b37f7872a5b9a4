"""Kernels of a trace of --profile by time per step.

    python scripts/gpu/kernel_table.py TRACE STEPS

Prints a JSON object: milliseconds of a step, the share of it in which the device was busy, the
number of kernels, the largest gaps between kernels, and time and number of each kernel. Compresses
the trace.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LISTED, GAPS = 45, 5


def table(events: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """The kernels of `steps` steps by time. Raises ValueError when there are none."""
    kernels = sorted(
        (event for event in events if event.get("cat") in ON_DEVICE), key=lambda each: each["ts"]
    )
    if not kernels:
        raise ValueError("no kernels in this trace")
    time: Counter[str] = Counter()
    count: Counter[str] = Counter()
    busy, end, gaps = 0.0, kernels[0]["ts"], []
    for event in kernels:
        name, begins, ends = event["name"][:90], event["ts"], event["ts"] + event["dur"]
        time[name] += event["dur"]
        count[name] += 1
        if begins > end:
            gaps.append((begins - end, name))
        busy += max(0.0, ends - max(begins, end))
        end = max(end, ends)
    span = end - kernels[0]["ts"]
    return {
        "steps": steps,
        "ms_per_step": round(span / 1e3 / steps, 3),
        "busy_share": round(busy / span, 4),
        "kernels_per_step": len(kernels) / steps,
        "largest_gaps_us": [[round(us, 1), f"before {name}"] for us, name in sorted(gaps)[-GAPS:]],
        "by_time": [
            {"ms": round(us / 1e3 / steps, 4), "calls": count[name] / steps, "kernel": name}
            for name, us in time.most_common(LISTED)
        ],
    }


def main(words: list[str]) -> int:
    path, steps = Path(words[0]), int(words[1])
    if not path.exists():
        print(f"{path}: no trace: the profiled run did not reach its end", file=sys.stderr)
        return 1
    text = path.read_text()
    with gzip.open(f"{path}.gz", "wt") as file:
        file.write(text)
    path.unlink()
    try:
        found = table(json.loads(text)["traceEvents"], steps)
    except ValueError as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(found))
    print(f"# {found['ms_per_step']} ms a step, device busy {found['busy_share']:.1%}")
    for row in found["by_time"][:30]:
        print(f"# {row['ms']:9.3f} ms {row['calls']:7.1f} x  {row['kernel']}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
