"""Figures of ZeRO: bytes alive, bytes sent, times of other programs.

Called from document_results.py, whose figures enter FIGURES.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

from megatron.tools._figures import FIGURES, figure, ratio, result, table, verdict

SYSTEMS = {
    "ours-0": ("0", "**ours**"),
    "deepspeed-0": ("0", "DeepSpeed (bf16 accumulation)"),
    "ddp-0": ("0", "DDP"),
    "deepspeed-0-default": ("0", "DeepSpeed as it comes"),
    "deepspeed-1-default": ("1", "DeepSpeed as it comes"),
    "deepspeed-2-default": ("2", "DeepSpeed as it comes"),
    "deepspeed-3-default": ("3", "DeepSpeed as it comes"),
    "ours-1": ("1", "**ours**"),
    "deepspeed-1": ("1", "DeepSpeed"),
    "ddp-1": ("1", "DDP + ZeroRedundancyOptimizer"),
    "ours-2": ("2", "**ours**"),
    "deepspeed-2": ("2", "DeepSpeed"),
    "ours-3": ("3", "**ours**"),
    "deepspeed-3": ("3", "DeepSpeed"),
    "fsdp2": ("3", "FSDP2"),
    "ours-3-keep": ("3, kept gathered", "**ours**"),
    "fsdp2-keep": ("3, kept gathered", "FSDP2, not resharded"),
}


def memory_runs(ranks: int, micro_batches: int) -> dict[str, Any]:
    """The run of each system."""
    runs = result("zero_peers")["memory"]["settings"][f"N={ranks}, m={micro_batches}"]["runs"]
    return {run["system"]: run for run in runs}


def zero_memory_table(ranks: int) -> str:
    """Bytes per parameter, with 1 and 4 micro-batches."""
    count, one, four = (
        result("zero_peers")["parameters"],
        memory_runs(ranks, 1),
        memory_runs(ranks, 4),
    )
    rows = [
        (
            *SYSTEMS[system],
            *(
                f"{run[what] / count:.2f}"
                for run, what in (
                    (one[system], "resident"),
                    (one[system], "peak"),
                    (four[system], "peak"),
                    (one[system], "wire"),
                    (four[system], "wire"),
                )
            ),
        )
        for system in SYSTEMS
        if system in one
    ]
    return table(
        "stage | system | between steps | peak, 1 micro-batch | peak, 4 | sent, 1 | sent, 4", rows
    )


FIGURES["zero.memory.2"] = lambda: zero_memory_table(2)
FIGURES["zero.memory.4"] = lambda: zero_memory_table(4)


def zero_lost(part: str) -> tuple[int, int]:
    """(comparisons lost, all) of a part of zero_peers.json."""
    rows = result("zero_peers")[part]["rows"]
    passed = [row["passed"] if part == "memory" else row["seconds"]["passed"] for row in rows]
    return passed.count(False), len(passed)


FIGURES["zero.memory.lost"] = lambda: "{} of {}".format(*zero_lost("memory"))
FIGURES["zero.time.lost"] = lambda: "{} of {}".format(*zero_lost("time"))


@figure("zero.memory.lost.rows")
def zero_memory_lost() -> str:
    count = result("zero_peers")["parameters"]
    rows = [
        (
            row["setting"],
            row["row"],
            row["measure"],
            f"{row['ours'] / count:.3f}",
            f"{row['best'] / count:.3f}",
            row["peer"],
        )
        for row in result("zero_peers")["memory"]["rows"]
        if not row["passed"]
    ]
    return table("processes, micro-batches | stage | moment | ours | best peer | which", rows)


@figure("zero.time")
def zero_time() -> str:
    names = {
        system: f"{'our ' * system.startswith('ours')}stage {stage}"
        for system, (stage, _) in SYSTEMS.items()
    }
    rows = []
    for row in result("zero_peers")["time"]["rows"]:
        seconds, (stage, peer) = row["seconds"], SYSTEMS[row["peer"]]
        peer = (
            names[row["peer"]]
            if row["peer"].startswith("ours")
            else f"{peer.partition(' (')[0]}, stage {stage}"
        )
        rows.append(
            (
                row["setting"][-1],
                names[row["ours"]].removeprefix("our "),
                peer,
                f"{1e3 * seconds['ours']:.0f}",
                f"{1e3 * seconds['peer']:.0f}",
                ratio(seconds, 3),
                row["goal"],
                verdict(seconds),
            )
        )
    return table("micro-batches | ours | peer | ours, ms | peer, ms | ratio (95%) | goal | ", rows)


@figure("adam")
def adam() -> str:
    names = {
        "DeepSpeedCPUAdam": "DeepSpeedCPUAdam 0.19.8",
        "torch fused": "torch's fused kernel, separate passes",
        "torch foreach": "torch's foreach",
        "torch loop": "torch's default loop",
    }
    rows = [
        (
            names[row["side"]],
            row["threads"],
            f"{1e3 * row['ours_seconds']:.1f}",
            f"{1e3 * row['side_seconds']:.1f}",
            ratio(row),
            row["goal"],
            verdict(row),
        )
        for name in names
        for row in result("adam")["rows"]
        if row["side"] == name and row["clock"] == "seconds"
    ]
    return table("against | threads | ours, ms | theirs, ms | ratio (95%) | goal | ", rows)


@figure("adam.bf16-moments")
def adam_bf16_moments() -> str:
    rows = result("adam")["rows"]
    return f"{next(row['median'] for row in rows if row['side'] == 'ours, bf16 moments'):.1f}"


@figure("nvme")
def nvme() -> str:
    found, seconds = result("nvme"), result("nvme")["median_seconds"]
    row = (
        f"{found['parameters'] / 1e6:.0f}M",
        f"{found['bytes'] / 1e9:.2f} GB",
        f"{seconds['ours']:.2f}",
        f"{seconds['raw']:.2f}",
        ratio(found, 3),
        found["goal"],
        found["pairs"],
        verdict(found),
    )
    return table(
        "parameters | bytes moved | our step, s | raw, s | ours by raw (95%) | goal | pairs | ",
        [row],
    )


HOST_TIMES = {
    "layer_and_micro_batch": "a layer and micro-batch, us",
    "micro_batch": "a micro-batch, us",
    "layer": "a layer, us",
    "step": "a step, us",
}


def host_programs(file: str) -> str:
    """Medians of each program; the parts are those of the largest size's step."""
    programs = result(file)["programs"]
    rows = [
        (
            name,
            *(f"{1e6 * found[key]:.0f}" for key in HOST_TIMES),
            f"{1e3 * found['whole']:.1f}",
            " + ".join(f"{1e3 * seconds:.1f}" for seconds in found["parts"].values()),
        )
        for name, found in programs.items()
    ]
    parts = next(iter(programs.values()))["parts"]
    header = f"program | {' | '.join(HOST_TIMES.values())} | whole step, ms | {' + '.join(parts)}"
    return table(header, rows)


def host_ratios(file: str) -> str:
    rows = [
        (row["peer"], row["what"], ratio(row), row["pairs"], row["goal"], verdict(row))
        for row in result(file)["rows"]
    ]
    return table("against | of | its time by ours (95%) | rounds | goal | ", rows)


FIGURES["host.programs"] = partial(host_programs, "host_time")
FIGURES["host.ratios"] = partial(host_ratios, "host_time")
FIGURES["host.earlier.programs"] = partial(host_programs, "host_time_earlier")
FIGURES["host.earlier.ratios"] = partial(host_ratios, "host_time_earlier")
FIGURES["host.losses"] = lambda: f"{result('host_time')['losses_differ_by']:.0e}"


@figure("launches")
def launches() -> str:
    rows = []
    for name, case in result("launches")["cases"].items():
        counts = case["launches"]
        passes = [counts[part]["layer and micro-batch"] for part in ("forward", "backward")]
        sums = [
            sum(part[per] for part in counts.values())
            for per in ("micro-batch", "layer and step", "step")
        ]
        rows.append((name, *passes, *sums))
    return table(
        "model | forward, a layer and micro-batch | backward | a micro-batch, outside layers | "
        "a layer and step | a step",
        rows,
    )


@figure("compiled")
def compiled() -> str:
    """The cases that campaigns/speed/speed.py has written."""
    rows = [
        (
            name,
            case["ranks"],
            *(f"{1e3 * statistics.median(case['seconds'][side]):.1f}" for side in ("base", "this")),
            ratio(case["verdict"]),
            f"{case['goal']:.2f}",
            verdict(case["verdict"]),
        )
        for name, case in result("compile")["cases"].items()
    ]
    return table("case | processes | eager, ms | compiled, ms | ratio (95%) | goal | ", rows)
