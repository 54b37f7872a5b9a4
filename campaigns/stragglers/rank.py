"""One rank of `campaigns/stragglers/stragglers.py`: `pretrain_gpt.py` that keeps what rank 0
judges, and whose batches may be slow.

    rank.py TABLES SLOW-SECONDS FLAGS...
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pretrain_gpt  # noqa: E402
from megatron.data.loader import Source  # noqa: E402
from megatron.observe.stragglers import StragglerWatch  # noqa: E402


def main(tables: str, slow: float, flags: list[str]) -> int:
    """The exit code of the run."""
    add, batch = StragglerWatch.add, Source.batch

    def kept_add(watch, table):
        metrics = add(watch, table)
        with open(tables, "a") as file:
            row = {"time": time.time(), "table": table.tolist(), "metrics": metrics}
            file.write(json.dumps(row) + "\n")
        return metrics

    def slow_batch(source, *args, **kwargs):
        time.sleep(slow)
        return batch(source, *args, **kwargs)

    StragglerWatch.add = kept_add
    if slow:
        Source.batch = slow_batch
    return pretrain_gpt.main(flags)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2]), sys.argv[3:]))
