"""Write the figures of docs/results/*.json into README.md and the pages of docs/.

    python tools/document_results.py            # rewrite every marked figure and table
    python tools/document_results.py --check    # change nothing; exit code 1 if one is out of date

A document marks a figure as `<!-- =NAME -->63<!-- / -->`; a table is marked in the same way, with
the marks on lines of their own. NAME is one of FIGURES below, which computes the text from the
files.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

if not __package__:  # run as a file of a checkout
    import _checkout  # noqa: F401

from megatron.tools._figures import FIGURES, ROOT, figure, ratio, result, table, verdict
from megatron.tools._figures_zero import memory_runs
from megatron.tools._plan.verdict import RESERVE

from megatron.config.streams import escape_unencodable  # noqa: E402

PAGES = ROOT  # where README.md and docs/ are
MARKED = re.compile(r"(<!-- =(\S+) -->)(.*?)(<!-- / -->)", re.S)
SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "interleaved, 2 stages",
    "zero-bubble": "ZB-H1",
    "zero-bubble-v": "ZB-V",
}


# ---- stragglers ----------------------------------------------------------------------------------


def straggler_rows() -> list[list[str]]:
    """One row a part of the campaign."""
    found = result("stragglers")
    rows = []
    for part, what in (("stopped", "stopped for 30% of the time"), ("data", "data 50 ms late")):
        tries = found[part]["tries"]
        whole = [each["named_after_whole_intervals"] for each in tries]
        named = sum(number is not None for number in whole)
        others = sum(each["other_names"] for each in tries)
        most = max((number for number in whole if number is not None), default="-")
        rows.append([what, f"{named} of {len(tries)}", f"{most}", f"{others}"])
    (clean,) = found["clean"]["tries"]
    quiet = f"nothing, {clean['minutes']:.0f} minutes, {clean['log_intervals']} log intervals"
    return [*rows, [quiet, "-", "-", f"{clean['false_names']}"]]


FIGURES["stragglers"] = lambda: table(
    "what is wrong with a rank | named | after whole log intervals, at most | other names",
    straggler_rows(),
)


# ---- proofs: parity, mutants, the plan, live bytes, checkpoints ----------------------------------

for kind, name in (("layout", "mutants"), ("meaning", "meaning")):
    for column, ending in (("mutant", ""), ("full", ".found"), ("default", ".default")):
        FIGURES[name + ending] = lambda kind=kind, column=column: (
            f"{sum(bool(row[column]) for row in result('mutants') if row['kind'] == kind)}"
        )
FIGURES["random.cases"] = lambda: f"{result('random_rows')['cases']}"
FIGURES["random.resumed"] = lambda: f"{result('random_rows')['resumed in another layout']}"
FIGURES["random_memory.dense"] = lambda: f"{result('random_memory')['dense']['cases']}"
FIGURES["random_memory.within"] = lambda: f"{result('random_memory')['dense']['within 3%']}"
FIGURES["random_memory.experts"] = lambda: f"{result('random_memory')['experts']['cases']}"
FIGURES["random_memory.close"] = lambda: f"{result('random_memory')['experts']['within 3%']}"
for bound in ("lowest", "highest"):
    FIGURES[f"random_memory.{bound}"] = lambda bound=bound: (
        f"{100 * (result('random_memory')['experts'][bound] - 1):+.0f}"
    )
FIGURES["random.narrow"] = lambda: f"{result('random_rows')['in bf16']}"
FIGURES["random.off"] = lambda: f"{len(result('random_rows')['off'])}"
FIGURES["plan.ranks"] = lambda: f"{len(plan_rows())}"
FIGURES["plan.configurations"] = lambda: f"{len({row['case'] for row in plan_rows()})}"
FIGURES["plan.close"] = lambda: f"{sum(abs(row['ratio'] - 1) <= 0.003 for row in plan_rows())}"
FIGURES["plan.worst"] = lambda: f"{100 * max(abs(row['ratio'] - 1) for row in plan_rows()):.1f}"
FIGURES["live.rows"] = lambda: f"{len(result('zero_memory')['rows'])}"
FIGURES["live.minutes"] = lambda: f"{result('zero_memory')['minutes']}"


def plan_rows() -> list[Any]:
    """Of the plan: a row for each pipeline rank of each configuration."""
    return result("plan_memory")["rows"]


@figure("long_context.table")
def long_context_table() -> str:
    """GiB that the planner gives a rank of Llama 3 8B; bold: it fits a device of 80."""
    flags = {"tiled_mlp": "`--tiled-mlp`", "fused_head": "`--fused-linear-cross-entropy`"}
    host = {"inputs_on_host": "and layer inputs on the host"}
    variants = {"neither": "MLP and head whole", **flags, "both": "both", **host}

    def cell(found: Any) -> str:
        gib = found["sizes"]["total"] / 2**30
        return f"**{gib:.1f}**" if gib <= 80 - RESERVE else f"{gib:.1f}"

    rows = [
        (row["gpus"], row["kept"], f"{row['length']:,}", *(cell(row[each]) for each in variants))
        for row in result("long_context")["rows"]
    ]
    return table(f"GPUs | ZeRO | tokens | {' | '.join(variants.values())}", rows)


@figure("context_parallel.table")
def context_parallel_table() -> str:
    """Attention of context-parallel ranks, forward and backward, against torch's ring."""
    rows = [
        (
            row["ranks"],
            row["shape"],
            f"`{row['type']}`",
            row["ours_ms"],
            f"{row['peer']}: {row['peer_ms']}",
            ratio(row),
            verdict(row),
        )
        for row in result("context_parallel")["rows"]
    ]
    return table("ranks | shape | type | ms | torch's ring, ms | ratio (95%) | ", rows)


@figure("long_steps.table")
def long_steps_table() -> str:
    """Of real steps: MiB that lived at the worst moment, and that were planned."""
    lines = [
        (row["case"], f"{row['measured'] / 2**20:.1f}", f"{row['planned'] / 2**20:.1f}")
        for row in result("long_steps")["rows"]
    ]
    return table("step | measured MiB | planned MiB", lines)


@figure("live.peaks")
def live_peaks() -> str:
    """Peaks of a step of GPT-2 125M at stages 0 to 3, bytes a parameter."""
    rows = {name: row["pipeline rank 0"] for name, row in result("zero_memory")["rows"].items()}
    peaks = [
        next(
            row["peak"]
            for name, row in rows.items()
            if name.startswith(f"GPT-2 125M stage{stage}-")
        )
        for stage in range(4)
    ]
    return " > ".join(f"{peak:.2f}" for peak in peaks)


FIGURES["odd.wrong"] = lambda: f"{result('odd_input')['wrong']}"
for campaign in (
    "configurations",
    "deepspeed",
    "jsonl",
    "tokenizers",
    "index",
    "checkpoints",
    "pickles",
):
    FIGURES[f"odd.{campaign}"] = lambda name=campaign: (
        f"{result('odd_input')['campaigns'][name]['cases']:,}"
    )

# ---- training against other programs -------------------------------------------------------------


def steps(name: str, default: str = "") -> list[tuple[object, ...]]:
    """Speeds, milliseconds of a step and ratio of each comparison. `default` begins a setting that
    is shown without it.
    """
    return [
        (
            row["setting"].removeprefix(default),
            row["peer"],
            f"{row['ours']:.0f}",
            f"{row['theirs']:.0f}",
            f"{1e3 * row['step_tokens'] / row['ours']:.0f}",
            f"{1e3 * row['step_tokens'] / row['theirs']:.0f}",
            ratio(row, 3),
            row["goal"],
            verdict(row),
        )
        for row in result(name)["rows"]
    ]


STEPS = "layout | peer | ours, tokens/s | peer | our step, ms | peer's | ratio (95%) | goal | "
EXPERTS = f"setting | {STEPS.removeprefix('layout | ')}"
FIGURES["training.experts"] = lambda: table(EXPERTS, steps("training_experts"))


@figure("training.experts.apart")
def training_experts_apart() -> str:
    """The largest relative difference of losses in fp32."""
    rows = [row for row in result("training_experts")["rows"] if row["setting"].startswith("fp32")]
    apart = max(abs(row["their_loss"] / row["our_loss"] - 1) for row in rows)
    return f"{apart:.0e}"


FIGURES["training.one-process"] = lambda: table(EXPERTS, steps("training_cpu"))
FIGURES["training.two-processes"] = lambda: table(
    EXPERTS, [*steps("training_cpu_dp2"), *steps("training_cpu_tp2")]
)
FIGURES["training.pipeline"] = lambda: table(STEPS, steps("training_cpu_pipeline", "fp32, "))


@figure("convergence")
def convergence() -> str:
    from megatron.benchmarks.convergence import SEEDS

    rows = []
    for row in result("convergence")["rows"]:
        apart, judged = "", ""
        if "difference" in row:
            apart = f"{row['difference']:+.4f} ({row['low']:+.4f} to {row['high']:+.4f})"
            judged = ("**no**", "yes")[row["equal"]]
            if min(row["seeds"], row["our_seeds"]) < SEEDS:
                judged = f"open until {SEEDS} seeds"
            if not row["held"]:
                judged = "not held to it"
        rows.append(
            (
                row["who"],
                row["seeds"],
                f"{row['loss']:.4f}",
                f"{row['spread']:.4f}",
                apart,
                judged,
                f"{row['tokens_per_cpu_second']:.0f}",
                f"{row['tokens_per_second']:.0f}",
            )
        )
    return table(
        "trainer | seeds | loss, mean | standard deviation | less ours (95%) | equal | "
        "tokens per CPU second | tokens/s elapsed",
        rows,
    )


@figure("convergence.same-start")
def convergence_same_start() -> str:
    """The largest distance of a peer's loss from ours after the steps from our start."""
    return f"{max(result('convergence')['same_start'].values()):.0e}"


@figure("curves.most")
def curves_most() -> str:
    """The largest distance of any layout's loss from one process at any step."""
    from megatron.benchmarks.layout_curves import differences

    return f"{max(map(max, differences(result('layout_curves')['runs']).values())):.2f}"


@figure("curves")
def curves() -> str:
    from megatron.benchmarks.layout_curves import BASE, differences

    runs = result("layout_curves")["runs"]
    apart = differences(runs)
    rows = []
    for run in runs:
        found = apart.get(run["layout"], [])
        shown = [f"{max(part):.1e}" for part in (found[:10], found[:60], found) if part]
        shown += [f"{statistics.mean(found[-100:]):.1e}"] if found else [""] * 4
        rows.append(
            (
                run["layout"],
                *shown,
                f"{run['validation_loss']:.4f}",
                f"{statistics.mean(run['losses'][-100:]):.4f}",
            )
        )
    return table(
        f"layout | from {BASE}: most, steps 1 to 10 | 1 to 60 | whole run | mean, last 100 steps | "
        "validation loss | mean training loss, last 100 steps",
        rows,
    )


@figure("fp8.curves")
def fp8_curves() -> str:
    from megatron.benchmarks.fp8_curves import BASE, LAST, last_mean

    runs = result("fp8_curves")["runs"]
    base = next(run for run in runs if run["format"] == BASE)
    rows = [
        (
            run["format"],
            f"{run['validation_loss']:.3f}",
            f"{run['validation_loss'] - base['validation_loss']:+.3f}",
            f"{last_mean(run):.3f}",
            f"{last_mean(run) - last_mean(base):+.3f}",
        )
        for run in runs
    ]
    return table(
        f"products | validation loss | less {BASE} | training loss, last {LAST} steps | "
        f"less {BASE}",
        rows,
    )


@figure("experts.curves")
def expert_curves() -> str:
    """The dense model and the mixtures, a row each; loads are means over seeds."""
    from megatron.benchmarks.expert_curves import KINDS, LAST, end_loads, final_losses, less

    document = result("expert_curves")
    rows = []
    for kind in KINDS:
        runs = [run for run in document["runs"] if run["kind"] == kind]
        ends = [found for run in runs if (found := end_loads(run))]
        loads = [f"{statistics.mean(each):.2f}" for each in zip(*ends)] or [""] * 2
        sizes, apart = document["sizes"][kind], less(runs, kind, dense_losses())
        rows.append(
            (
                f"8 experts, {kind}" if ends else kind,
                f"{sizes['parameters'] / 1e6:.2f}M",
                f"{sizes['active_parameters'] / 1e6:.2f}M",
                f"{sizes['flops_per_token'] / 1e6:.2f}",
                ", ".join(f"{loss:.3f}" for loss in final_losses(runs, kind).values()),
                ", ".join(f"{each:+.3f}" for each in apart) if ends else "",
                *loads,
                f"{statistics.mean(run['cpu_seconds'] for run in runs) / 60:.1f}",
            )
        )
    return table(
        "model, and what balances it | parameters | active | MFLOPs a token | validation loss | "
        f"less dense, same seed | busiest expert, last {LAST} steps | idlest | CPU minutes",
        rows,
    )


def dense_losses() -> dict[int, float]:
    """Of each seed the validation loss of the dense model of expert_curves.json, which is ours of
    convergence.json.
    """
    runs = result("convergence")["runs"]
    return {
        run["seed"]: run["validation_loss"] for run in runs if run["who"] == "ours, Llama shape"
    }


FIGURES["experts.dense-seeds"] = lambda: (
    f"{statistics.stdev(dense_losses().values()):.3f} ({len(dense_losses())} seeds)"
)
FIGURES["experts.unigram"] = lambda: f"{result('expert_curves')['unigram_loss']:.2f}"


# ---- pipelines -----------------------------------------------------------------------------------


def pipeline(section: str) -> Any:
    """Rows of a section of pipeline.json."""
    return result("pipeline")["sections"][section]["rows"]


@figure("pipeline.memory")
def pipeline_memory() -> str:
    rows = []
    for count in sorted({row["micro_batches"] for row in pipeline("memory")}):
        held = {
            name: max(
                row["held"]
                for row in pipeline("memory")
                if (row["schedule"], row["micro_batches"]) == (name, count)
            )
            for name in SCHEDULES
        }
        shown = [f"{held[name] / 1024:.0f}" for name in SCHEDULES]
        rows.append((count, *shown, f"{held['gpipe'] / held['1f1b']:.2f}"))
    return table(f"m | {' | '.join(SCHEDULES.values())} | GPipe : 1F1B", rows)


@figure("pipeline.bound")
def pipeline_bound() -> str:
    return f"{max(row['held'] / row['bound'] for row in pipeline('memory')):.4f}"


@figure("pipeline.time")
def pipeline_time() -> str:
    rows = []
    for costs in ("equal", "of real stages"):
        here = [
            row
            for name in SCHEDULES
            for row in pipeline("sleeps")
            if (row["costs"], row["schedule"]) == (costs, name)
        ]
        rows.append((f"{costs}: simulated, ms", *(f"{1e3 * row['simulated']:.0f}" for row in here)))
        rows.append(
            ("achieved / simulated", *(f"{row['achieved'] / row['simulated']:.3f}" for row in here))
        )
    return table(f"costs | {' | '.join(SCHEDULES.values())}", rows)


def idle(kind: str) -> str:
    """Idle time of ZB-H1 by that of 1F1B at equal costs."""
    found = {row["schedule"]: row[kind] for row in pipeline("sleeps") if row["costs"] == "equal"}
    return f"{found['zero-bubble'] / found['1f1b']:.3f}"


FIGURES["pipeline.idle.simulated"] = lambda: idle("idle_simulated")
FIGURES["pipeline.idle.measured"] = lambda: idle("idle")


def overhead(ranks: int, kind: str) -> str:
    """Microseconds an action, from the least to the most of the schedules."""
    found = sorted(
        round(row[kind], 1 if ranks == 1 else None)
        for row in pipeline("overhead")
        if row["ranks"] == ranks
    )
    return f"{found[0]}" if found[0] == found[-1] else f"{found[0]} to {found[-1]}"


FIGURES["pipeline.overhead.1"] = lambda: overhead(1, "microseconds")
FIGURES["pipeline.overhead.4"] = lambda: overhead(4, "microseconds")
FIGURES["pipeline.overhead.best"] = lambda: overhead(4, "best")


@figure("pipeline.torch")
def pipeline_torch() -> str:
    theirs = {
        "zero-bubble": "ZB-H1 against `ScheduleInterleavedZeroBubble`",
        "zero-bubble-v": "ZB-V against `ScheduleZBVZeroBubble`",
    }
    rows = [
        (
            theirs.get(row["schedule"], SCHEDULES[row["schedule"]]),
            f"{1e3 * row['ours_seconds']:.0f}",
            f"{1e3 * row['torch_seconds']:.0f}",
            ratio(row["verdict"], 3),
            row["verdict"]["pairs"],
            row["verdict"]["goal"],
            "outdated" if "outdated" in row else verdict(row["verdict"]),
        )
        for row in pipeline("torch")
    ]
    return table("schedule | our step, ms | torch's, ms | ratio (95%) | pairs | goal | ", rows)


# ---- data and checkpoints ------------------------------------------------------------------------


@figure("data")
def data() -> str:
    peers = {"hfds": "`datasets.map`", "mcore": "megatron-core"}
    rows = [
        (
            row["case"],
            peers[row["peer"]],
            f"{row['ours_s']:.3g}",
            f"{row['peer_s']:.3g}",
            ratio(row),
            row["goal"],
            verdict(row),
        )
        for row in result("data")["summary"]
    ]
    return table("case | peer | ours, s | peer, s | ratio (95%) | goal | ", rows)


@figure("data.first-run")
def data_first_run() -> str:
    row = next(
        row
        for row in result("data_first_run")["summary"]
        if (row["case"], row["peer"]) == ("preprocess, SentencePiece", "hfds")
    )
    return ratio(row)


@cache
def checkpoint_tables() -> Callable[[Any], str]:
    """The function with which benchmarks/checkpoint.py writes its tables."""
    from megatron.benchmarks.checkpoint import tables

    return tables


FIGURES["checkpoint.disk"] = lambda: f"\n{checkpoint_tables()(result('checkpoint_disk'))}\n"


# ---- README --------------------------------------------------------------------------------------


def chosen(name: str, rows: str = "rows", **wanted: object) -> Any:
    """The one row of a result with these values."""
    [row] = [
        row for row in result(name)[rows] if all(row[key] == value for key, value in wanted.items())
    ]
    return row


@figure("readme.figures")
def readme_figures() -> str:
    """The ten rows that a user asks about; docs/performance.md has all of them."""
    one, pipes = "training_cpu", "training_cpu_pipeline"
    times = {
        (row["setting"], row["ours"], row["peer"]): row["seconds"]
        for row in result("zero_peers")["time"]["rows"]
    }
    peak = [
        memory_runs(2, 4)[system]["peak"] / result("zero_peers")["parameters"]
        for system in ("ours-3", "fsdp2")
    ]
    found = [
        (
            "training, 1 process, fp32",
            "Hugging Face Trainer",
            chosen(one, setting="fp32", peer="Hugging Face Trainer"),
        ),
        ("training, 1 process, bf16", "litgpt", chosen(one, setting="bf16", peer="litgpt")),
        (
            "data parallel",
            "torch DDP",
            chosen("training_cpu_dp2", setting="fp32, dp2", peer="torch DDP"),
        ),
        (
            "tensor parallel",
            "megatron-core",
            chosen("training_cpu_tp2", setting="fp32, tp2", peer="megatron-core"),
        ),
        ("pipeline", "megatron-core", chosen(pipes, peer="megatron-core")),
        ("ZeRO-3", "DeepSpeed, its defaults", times["N=2, m=1", "ours-3", "deepspeed-3-default"]),
        ("ZeRO-3", "FSDP2", times["N=2, m=1", "ours-3", "fsdp2"]),
        (
            "checkpoint, 2 processes",
            "torch DCP",
            chosen("checkpoint", setting="tmpfs, 2 processes", what="DCP's time by ours"),
        ),
        (
            "preprocessing text",
            "megatron-core",
            chosen("data", "summary", case="preprocess, SentencePiece", peer="mcore"),
        ),
    ]
    rows = [(what, peer, ratio(row), row["goal"], verdict(row)) for what, peer, row in found]
    rows.append(
        (
            "ZeRO-3, peak bytes a parameter",
            "FSDP2",
            f"{peak[0]:.2f} against {peak[1]:.2f}",
            "less",
            "reached" if peak[0] <= peak[1] else "**lost**",
        )
    )
    return table("what | against | ratio (95%) | goal | ", rows)


# ---- documents -----------------------------------------------------------------------------------


def documents() -> list[Path]:
    """README.md and the pages of docs/, without the tables that lie in docs/results/."""
    pages = (PAGES / "docs").rglob("*.md")
    return [PAGES / "README.md", *sorted(page for page in pages if "results" not in page.parts)]


def current(text: str) -> str:
    """A page with every mark filled in anew. Raises KeyError for a name that FIGURES lacks."""
    return MARKED.sub(lambda found: found[1] + FIGURES[found[2]]() + found[4], text)


def main(argv: list[str] | None = None) -> int:
    """Write or check; the exit code."""
    escape_unencodable()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 when a figure is out of date"
    )
    check = parser.parse_args(argv).check
    outdated = [
        (page, text)
        for page in documents()
        if (text := current(page.read_text())) != page.read_text()
    ]
    for page, text in outdated:
        if check:
            print(
                f"{page.relative_to(PAGES)} is out of date: run python tools/document_results.py",
                file=sys.stderr,
            )
        else:
            page.write_text(text)
    return 1 if check and outdated else 0


if __name__ == "__main__":
    sys.exit(main())
