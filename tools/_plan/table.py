"""The memory plan as text."""

from __future__ import annotations

from megatron.tools._plan.advice import (
    HostCopy,
    Machine,
    Transfer,
    gib,
    host_copies,
    order_of_peaks,
    transfers,
)
from megatron.tools._plan.communicators import nccl_buffers
from megatron.tools._plan.memory import MemoryPlan
from megatron.tools._plan.state import shard_size
from megatron.tools._plan.verdict import NODE_RANKS, is_refused, judge, memory_verdict

from megatron.config.derive import replica_count
from megatron.config.groups import TrainingConfig
from megatron.model.recompute import recompute_text

COLUMNS = (
    "parameters",
    "gradients",
    "optimizer",
    "slots",
    "scratch",
    "gathered",
    "activations",
    "(recomputed)",
    "logits",
    "temporaries",
    "peak",
    "(recomputed)",
    "bytes/param",
)


def memory_table(plan: MemoryPlan) -> list[str]:
    """A row for each pipeline rank, in GiB: what it holds after the passes of a step, the most of
    what comes and goes in a step, the worst moment.
    """
    granularity = plan.config.training.recompute_granularity
    kept = plan.with_recompute(granularity if granularity == "selective" else None).ranks
    again = plan.with_recompute("full").ranks
    rows: list[tuple[str, ...]] = [("rank", *COLUMNS, "worst moment")]
    for number, (rank, other) in enumerate(zip(kept, again, strict=True)):
        chosen = other if granularity == "full" else rank
        static = chosen.static
        most = chosen.peak.most
        sizes = [
            *(static[kind] for kind in ("parameters", "gradients", "optimizer")),
            *(most[kind] for kind in ("slots", "scratch", "gathered")),
            rank.peak.most["activations"],
            other.peak.most["activations"],
            most["logits"],
            most["temporaries"],
            rank.total,
            other.total,
        ]
        rows.append(
            (
                str(number),
                *(gib(size) for size in sizes),
                f"{chosen.total / chosen.parameters:.4g}",
                chosen.peak.when,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return [
        "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths)), row[-1]])
        for row in rows
    ]


def memory_report(plan: MemoryPlan, *, memory: float, machine: Machine) -> list[str]:
    """All that tools/plan.py memory prints; `memory` is a device's GiB."""
    distributed = plan.config.distributed
    largest = plan.fullest
    replicas = replica_count(plan.config, plan.world_size)
    shard = distributed.zero_shard_size or replicas
    lines = [
        memory_verdict(plan, memory).line,
        f"ZeRO stage {distributed.zero_stage}"
        + (
            f", a block shared by {shard} of {replicas} data-parallel ranks"
            if distributed.zero_stage
            else f", {replicas} data-parallel rank(s)"
        ),
        "GiB by pipeline rank: parameters, gradients, optimizer after the passes of a step; of the "
        "others the most at any moment; the peak of all together",
        *memory_table(plan),
        _what_columns_say(plan.config.training),
        f"resident {max(rank.resident / rank.parameters for rank in plan.ranks):.4g} bytes a "
        f"parameter, peak {gib(largest.total)} GiB, "
        f"{largest.total / largest.parameters:.4g} bytes a parameter",
    ]
    lines += _elsewhere(plan)
    if plan.device == "cuda" and plan.world_size > 1:
        lines.append(nccl_buffers(plan.config, plan.world_size).line())
    lines += zero_lines(plan, memory)
    sent = [copy.line() for copy in _beside_computation(plan, machine)]
    return [*lines, *([f"with {machine}:"] if sent else []), *sent]


def _elsewhere(plan: MemoryPlan) -> list[str]:
    """What is not in the devices' memory."""
    host, disk = (max(rank.static[kind] for rank in plan.ranks) for kind in ("host", "disk"))
    ranks = min(plan.world_size, NODE_RANKS)
    of_node = f", {gib(ranks * host)} for the {ranks} of a node" if ranks > 1 else ""
    return [
        *([f"in the host's memory {gib(host)} GiB for each rank{of_node}"] if host else []),
        *([f"in files on the node's disk {gib(disk)} GiB for each rank"] if disk else []),
    ]


def _beside_computation(plan: MemoryPlan, machine: Machine) -> list[Transfer | HostCopy]:
    """What is sent between ranks, or to the host."""
    config = plan.config
    return [*transfers(config, plan.world_size, machine), *host_copies(config, machine)]


def _what_columns_say(training: TrainingConfig) -> str:
    """Which recompute the columns of `memory_table` count."""
    chosen = f"recompute {recompute_text(training)}"
    if training.recompute_granularity == "selective" or training.recompute_layers is not None:
        return f"(recomputed): with full recompute; all others: {chosen}, as the flags set it"
    if training.recompute_granularity == "full":
        return f"(recomputed), bytes/param and worst moment: with {chosen}, as the flags set it"
    return (
        "(recomputed): with full recompute; bytes/param and worst moment: without it, as the flags "
        "set it"
    )


def zero_lines(plan: MemoryPlan, memory: float) -> list[str]:
    """Which stage of ZeRO fits into that many GiB, and whether each needs less than the last."""
    distributed = plan.config.distributed
    if replica_count(plan.config, plan.world_size) == 1:
        # else it is 0
        where = (
            ", and weights are in host memory between their uses"
            if distributed.zero_stage == 3
            else ""
        )
        return [f"one data-parallel rank: ZeRO has nothing to share out{where}"]
    if distributed.zero_shard_size == 1:
        return []
    order = order_of_peaks(plan)
    granularity = plan.config.training.recompute_granularity
    fits = [
        stage
        for stage, total in enumerate(order.totals)
        if judge(total / 2**30, memory) == "fits" and not is_refused(plan, stage, granularity)
    ]
    peaks = (", " if order.broken else " > ").join(
        f"{gib(total)} (stage {stage})" for stage, total in enumerate(order.totals)
    )
    verdict = (
        f"fits with stage {fits[0]}"
        if fits
        else "fits with no stage; full recompute, more ranks or a smaller micro-batch need less"
    )
    return [f"peak by ZeRO stage: {peaks} GiB", *order.broken, f"{memory:g} GiB: {verdict}"]


def banner_lines(plan: MemoryPlan, machine: Machine | None) -> list[str]:
    """What a run's banner specifies: the plan of the largest rank, the block that keeps a stage of
    ZeRO from needing less than the one before, and with a `machine` (none on a CPU) what does not
    hide.
    """
    sizes = plan.fullest.sizes()
    which = " (the largest)" if plan.config.distributed.pipeline_model_parallel_size > 1 else ""
    training = plan.config.training
    chosen = recompute_text(training)
    counted = "" if chosen == "none" else f", recompute {chosen}"
    lines = [
        f"estimate per rank{which} (GiB){counted}: "
        f"{', '.join(f'{name} {gib(size)}' for name, size in sizes.items())}"
    ]
    if shard_size(plan.config, plan.world_size) > 1:
        lines += order_of_peaks(plan).broken
    if machine is not None:
        lines += [
            f"warning: with {machine} the {transfer.line()}"
            for transfer in _beside_computation(plan, machine)
            if not transfer.hides
        ]
    return lines
