"""The plan against bytes that really live while a run trains: `python tests/unit/plan/measured.py`
writes docs/results/plan_memory.json, with `--long` docs/results/long_steps.json, or with names of
cases their rows in it.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
import tomllib
from pathlib import Path
from unittest import mock

import torch

TESTS = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]
# the kernels' operators take CPU tensors; Triton reads it when it is first imported
os.environ["TRITON_INTERPRET"] = "1"

from distributed.pool import Worlds  # noqa: E402
from megatron.tools._plan import activations  # noqa: E402
from megatron.tools._plan.memory import rank_memories  # noqa: E402
from unit.zero.measure import measure  # noqa: E402

from megatron.config.arguments import parse_arguments  # noqa: E402
from megatron.config.validate import resolve  # noqa: E402
from megatron.model.loss import HEAD_CHUNK_BYTES  # noqa: E402

VOCAB = 1023
# bytes of logits that are made at once where the flags ask for it: a fraction of all
HEAD_CHUNK = 1 << 18
COMMON = f"""--mock-data --tokenizer-type NullTokenizer --vocab-size {VOCAB}
--make-vocab-size-divisible-by 64 --lr 1e-3 --train-iters 2
--log-interval 1 --eval-iters 0 --hidden-dropout 0 --attention-dropout 0"""
TABLE = tomllib.loads(Path(__file__).with_name("memory_cases.toml").read_text())


def flags_of(words: str) -> str:
    """With the flags that words in capitals name."""
    while found := TABLE["flags"].keys() & words.split():
        words = " ".join(TABLE["flags"][word] if word in found else word for word in words.split())
    return words


# of each file of results: name of a case: ranks, micro-batches, flags
TABLES: dict[str, dict[str, tuple[int, int, str]]] = {
    results: {
        name: (ranks, micro_batches, flags_of(words))
        for name, (ranks, micro_batches, words) in TABLE[table].items()
    }
    for results, table in (("plan_memory", "cases"), ("long_steps", "long_cases"))
}
CASES = TABLES["plan_memory"] | TABLES["long_steps"]


def command(name: str) -> tuple[str, ...]:
    """The command line of a case."""
    ranks, micro_batches, flags = CASES[name]
    config = parse_arguments([*COMMON.split(), *flags.split()]).config
    distributed = config.distributed
    shared = (
        distributed.tensor_model_parallel_size
        * distributed.context_parallel_size
        * distributed.pipeline_model_parallel_size
    )
    return (
        *COMMON.split(),
        *flags.split(),
        "--global-batch-size",
        str(micro_batches * (ranks // shared) * config.training.micro_batch_size),
    )


def compare(name: str, worlds: Worlds) -> list[dict]:
    """`compare_flags` of a case."""
    rows = compare_flags(command(name), CASES[name][0], worlds)
    return [{"case": name, **row} for row in rows]


def compare_flags(flags: tuple[str, ...], ranks: int, worlds: Worlds) -> list[dict]:
    """Of each pipeline rank: the bytes at the worst moment of a run's second step, as measured and
    as planned.
    """
    config = resolve(parse_arguments(list(flags)).config, ranks, VOCAB + 1).config
    activations.forget_passes()  # with the head's usual chunks
    with mock.patch.dict(HEAD_CHUNK_BYTES, cpu=HEAD_CHUNK):
        planned = rank_memories(config, VOCAB + 1, ranks, "cpu")
    activations.forget_passes()
    rows = {}
    for pipeline_rank, spans in worlds(ranks).run(measure, flags, None, None, HEAD_CHUNK):
        span = spans["step"][-1]
        found = {
            kind: size
            for kind, size in sorted(span.at_peak.items())
            if kind not in ("total", "before") and size
        }
        row = {
            "pipeline_rank": pipeline_rank,
            "measured": sum(found.values()),
            "measured_kinds": found,
            "where": span.where,
        }
        rows[pipeline_rank] = max(
            row, rows.get(pipeline_rank, row), key=lambda row: row["measured"]
        )
    for pipeline_rank, row in rows.items():
        rank = planned[pipeline_rank]
        total = rank.total + rank.static["host"]  # here the device's memory is the host's
        row |= {
            "planned": total,
            "planned_kinds": {
                kind: size for kind, size in {**rank.static, **rank.peak.bytes}.items() if size
            },
            "when": rank.peak.when,
            "ratio": round(total / row["measured"], 4),
        }
    return [rows[rank] for rank in sorted(rows)]


def main(words: list[str]) -> None:
    """Measure the named cases, or all, and write them down."""
    results = "long_steps" if "--long" in words else "plan_memory"
    names = [word for word in words if word != "--long"]
    path, order = TESTS.parent / "docs/results" / f"{results}.json", list(TABLES[results])
    if unknown := [name for name in names if name not in order]:
        other = "without" if "--long" in words else "with"
        sys.exit(f"no case of {results}: {', '.join(unknown)}; name the others {other} --long")
    report = {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "rows": [],
    }
    if names:  # dated as the others
        report = json.loads(path.read_text())
    worlds, rows = Worlds(), [row for row in report["rows"] if row["case"] not in names]
    for name in names or order:
        for row in compare(name, worlds):
            rows.append(row)
            print(f"{row['ratio']:.4f}  {name}, pipeline rank {row['pipeline_rank']}", flush=True)
            if names or abs(row["ratio"] - 1) > 0.03:
                print(
                    f"        measured {row['measured']:,} {row['measured_kinds']} {row['where']}\n"
                    f"        planned {row['planned']:,} {row['planned_kinds']} {row['when']}",
                    flush=True,
                )
    worlds.close()
    rows.sort(key=lambda row: order.index(row["case"]))
    path.write_text(json.dumps(report | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
