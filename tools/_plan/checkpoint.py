"""How long a checkpoint takes and how often to write one, before a run (docs/checkpoint.md, "How
often").
"""

from __future__ import annotations

import math

from megatron.tools._plan.memory import rank_memories
from megatron.tools._plan.state import Precisions, precisions

from megatron.config.groups import Config
from megatron.parallel.blocks import Block


def shard_bytes(config: Config, vocab_size: int, world_size: int) -> list[float]:
    """Bytes that a rank of each pipeline stage writes, balanced: master weights and optimizer state
    of its parameters / ranks that hold the same ones.

    What tensor-parallel ranks hold alike counts on each here: the files are a little smaller. A
    tied embedding is written by the first stage alone.
    """
    size = precisions(config)
    if not config.checkpoint.save_optim:
        size = size._replace(moments=0)
    copied = not config.model.untie_embeddings_and_output_weights  # a head that is the embedding
    return [
        sum(_share(block, size) for block in rank.blocks if not (copied and block.name == "head"))
        for rank in rank_memories(config, vocab_size, world_size)
    ]


def _share(block: Block, size: Precisions) -> float:
    """Bytes of a block that each rank with a copy of it writes; a frozen one has no moments."""
    each = size.wide + size.moments if block.trained else size.compute
    parameters = sum(parameter.numel() for parameter in block.parameters)
    return each * parameters / block.groups.replicas.size


def best_interval(cost: float, between_failures: float, least: float = 0.0) -> float:
    """Seconds from one save to the next that lose the least time: sqrt(2 x cost x mean time between
    failures) (Young 1974; Daly 2006, first order), or `least` where that is more.
    """
    return max(math.sqrt(2 * cost * between_failures), least)


def time_lost(interval: float, cost: float, between_failures: float, delay: float) -> float:
    """The share of time that is lost to saves, which hold training up for `cost` seconds each, and
    to the work that a failure undoes: everything since the moment at which the newest checkpoint
    was taken. One that is written in the background is committed `delay` seconds after that moment,
    while training continues.
    """
    return cost / interval + (interval / 2 + delay) / between_failures


def checkpoint_report(
    config: Config,
    vocab_size: int,
    world_size: int,
    *,
    write: float,
    copy: float,
    between_failures: float,
) -> list[str]:
    """All that tools/plan.py checkpoint prints. `write`: GB/s from a rank to --save; `copy`: GB/s
    into host memory; hours between failures.
    """
    stages = shard_bytes(config, vocab_size, world_size)
    hours = between_failures * 3600
    largest = max(stages)
    ranks = world_size // len(stages)
    seconds = largest / write / 1e9
    stall = largest / copy / 1e9
    lines = [
        f"checkpoint of {sum(stages) * ranks / 1e9:.4g} GB: GB that each rank writes, by pipeline "
        f"stage: {', '.join(f'{size / 1e9:.4g}' for size in stages)}",
        f"at {write:g} GB/s a rank {seconds:.3g} s; with --async-save training waits "
        f"{stall:.3g} s for a copy at {copy:g} GB/s",
        f"with a failure every {between_failures:g} hours the least time is lost with a save",
    ]
    for flag, cost, delay in (("", seconds, 0.0), ("--async-save", stall, seconds)):
        interval = best_interval(cost, hours, least=cost + delay)
        share = time_lost(interval, cost, hours, delay)
        lines.append(
            f"  every {interval:.3g} s{flag and f' with {flag}'}: {share:.2%} of the time goes "
            "into saves and into work that is lost"
        )
    return lines
