"""The memory plan as text."""

from __future__ import annotations

from megatron.config.derive import data_parallel_size
from megatron.config.groups import Config
from megatron.plan.advice import Machine, gib, order_of_peaks, transfers
from megatron.plan.memory import estimate, rank_memories, with_recompute
from megatron.plan.state import shard_size
from megatron.plan.verdict import judge, memory_verdict

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


def memory_table(
    config: Config, vocab_size: int, world_size: int, device: str = "cuda"
) -> list[str]:
    """A row for each pipeline rank, in GiB: what it holds after the passes of a step, the most of
    what comes and goes in a step, the worst moment.
    """
    kept, again = (
        rank_memories(with_recompute(config, granularity), vocab_size, world_size, device)
        for granularity in (None, "full")
    )
    rows = [("rank", *COLUMNS, "worst moment")]
    for number, (rank, other) in enumerate(zip(kept, again, strict=True)):
        chosen = other if config.training.recompute_granularity else rank
        static, most = chosen.static, chosen.peak.most
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


def memory_report(
    config: Config,
    vocab_size: int,
    world_size: int,
    *,
    memory: float,
    machine: Machine,
    device: str = "cuda",
) -> list[str]:
    """All that tools/plan.py memory prints; `memory` is a device's GiB."""
    distributed, training, replicas = (
        config.distributed,
        config.training,
        data_parallel_size(config, world_size),
    )
    chosen = rank_memories(config, vocab_size, world_size, device)
    largest = max(chosen, key=lambda rank: rank.total)
    recompute = training.recompute_granularity == "full"
    shard = distributed.zero_shard_size or replicas
    lines = [
        memory_verdict(config, vocab_size, world_size, memory, device).line,
        f"ZeRO stage {distributed.zero_stage}"
        + (
            f", a block shared by {shard} of {replicas} data-parallel ranks"
            if distributed.zero_stage
            else f", {replicas} data-parallel rank(s)"
        ),
        "GiB by pipeline rank: parameters, gradients, optimizer after the passes of a step; of the "
        "others the most at any moment; the peak of all together",
        *memory_table(config, vocab_size, world_size, device),
        "(recomputed): with full recompute; bytes/param and worst moment: "
        f"with{'' if recompute else 'out'} it, as the flags say",
        f"resident {max(rank.resident / rank.parameters for rank in chosen):.4g} bytes a "
        f"parameter, peak {gib(largest.total)} GiB, "
        f"{largest.total / largest.parameters:.4g} bytes a parameter",
    ]
    if largest.static["host"]:
        lines.append(f"in the host's memory {gib(largest.static['host'])} GiB for each rank")
    if largest.static["disk"]:
        lines.append(f"in files on the node's disk {gib(largest.static['disk'])} GiB for each rank")
    lines += zero_lines(config, vocab_size, world_size, memory, device)
    sent = [transfer.line() for transfer in transfers(config, world_size, machine)]
    return [*lines, *([f"with {machine}:"] if sent else []), *sent]


def zero_lines(
    config: Config, vocab_size: int, world_size: int, memory: float, device: str
) -> list[str]:
    """Which stage of ZeRO fits into so many GiB, and whether each needs less than the last."""
    if data_parallel_size(config, world_size) == 1:
        # else it is 0
        where = (
            ", and weights are in host memory between their uses"
            if config.distributed.zero_stage == 3
            else ""
        )
        return [f"one data-parallel rank: ZeRO has nothing to share out{where}"]
    if config.distributed.zero_shard_size == 1:
        return []
    order = order_of_peaks(config, vocab_size, world_size, device)
    fits = [
        stage for stage, total in enumerate(order.totals) if judge(total / 2**30, memory) == "fits"
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


def banner_lines(
    config: Config, vocab_size: int, world_size: int, device: str, machine: Machine | None
) -> list[str]:
    """What a run's banner says: the plan of the largest rank, the block that keeps a stage of ZeRO
    from needing less than the one before, and with a `machine` (none on a CPU) what does not hide.
    """
    sizes = estimate(config, vocab_size, world_size, device)
    which = " (the largest)" if config.distributed.pipeline_model_parallel_size > 1 else ""
    lines = [
        f"estimate per rank{which} (GiB): "
        f"{', '.join(f'{name} {gib(size)}' for name, size in sizes.items())}"
    ]
    if shard_size(config, world_size) > 1:
        lines += order_of_peaks(config, vocab_size, world_size, device).broken
    if machine is not None:
        lines += [
            f"warning: with {machine} the {transfer.line()}"
            for transfer in transfers(config, world_size, machine)
            if not transfer.hides
        ]
    return lines
