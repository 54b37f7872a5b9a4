"""What a rank holds when the passes of a step are over: weights, gradients and optimizer state of
its blocks, to the byte.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron.config.derive import expert_ranks, replica_count
from megatron.config.groups import OPTIMIZERS, Config, PrecisionConfig
from megatron.distributed.groups import expert_cut
from megatron.optimizer.nvme import SLOTS, in_pages, part_room
from megatron.parallel.blocks import UNTRAINED, Block, on_host_of


class Precisions(NamedTuple):
    """Bytes of an element."""

    compute: int  # weights and activations
    wide: int  # master weights
    gradient: int
    moments: int  # of all that the optimizer keeps alongside the master weight
    wire: int  # of a gradient that is sent


def element_sizes(precision: PrecisionConfig) -> tuple[int, int]:
    """Bytes of an element in the compute precision, and in that of master weights and, unless given
    otherwise, gradients and moments.
    """
    if precision.fp64:
        return 8, 8
    return (2 if precision.bf16 or precision.fp16 else 4), 4


def precisions(config: Config) -> Precisions:
    """What the flags ask for."""
    compute, wide = element_sizes(config.precision)
    chosen = {"fp32": wide, "bf16": 2}
    optimizer = config.optimizer
    moments = sum(
        wide if field is None else chosen[getattr(optimizer, field)]
        for field in OPTIMIZERS[optimizer.optimizer].states.values()
    )
    gradient = chosen[optimizer.main_grads_dtype]
    return Precisions(
        compute, wide, gradient, moments, 2 if config.distributed.grad_reduce_in_bf16 else gradient
    )


def shard_size(config: Config, world_size: int) -> int:
    """Ranks that share a block: 1 at stage 0, all data-parallel ones unless --zero-shard-size
    specifies otherwise.
    """
    if config.distributed.zero_stage == 0:
        return 1
    return config.distributed.zero_shard_size or replica_count(config, world_size)


def expert_shard_size(config: Config, world_size: int) -> int:
    """Likewise of a block of experts, among the ranks that hold the same ones."""
    if config.distributed.zero_stage == 0:
        return 1
    tp = config.distributed.tensor_model_parallel_size
    return expert_cut(
        tp * replica_count(config, world_size),
        math.prod(expert_ranks(config)),
        tp * shard_size(config, world_size),
    )


def static_bytes(config: Config, blocks: Sequence[Block], shard: int) -> dict[str, int]:
    """Bytes, when the passes of a step are over, of a rank's blocks in the order of the forward
    pass: parameters, gradients, optimizer, host, which is what --optimizer-cpu-offload and
    --param-cpu-offload keep in the host's memory, and disk, where --optimizer-nvme-offload keeps
    the optimizer's, with a ring of buffers in the host's memory.

    Per element with Adam, N ranks sharing, in bf16: 18 | 6 + 12/N | 2 + 16/N | 16/N at stages 0 | 1
    | 2 | 3: 2 of weights, 4 of gradients, 4 of master weights, 8 of moments; in fp32 16 | 8 + 8/N |
    4 + 12/N | 16/N, where below stage 3 the weights are the master weights. Of a block that is
    stepped on the host the master weights are always apart, and stage 3 has its rounded weights
    alongside them, on the device; or with --param-cpu-offload on the host, in fp32 the master
    weights themselves. Of a frozen block there are the weights, at stage 3 a slice of them.
    """
    size = precisions(config)
    optimizer = config.optimizer
    found = dict.fromkeys(("parameters", "gradients", "optimizer", "host", "disk"), 0)
    in_files = []
    layouts, trained = [block.layout for block in blocks], [block.trained for block in blocks]
    for block, on_host in zip(blocks, on_host_of(layouts, trained, optimizer), strict=True):
        # experts are sharded over separate ranks
        of_experts = block.layout.group == "expert" and config.distributed.zero_stage > 0
        ranks = block.groups.shard.size if of_experts else shard
        part = block.size // ranks
        for kind, count in _block_bytes(config, block, part, on_host):
            found[kind] += count
        if on_host and optimizer.optimizer_nvme_offload is not None:
            in_files.append(_updated(config, block, part))
    found["host"] += SLOTS * part_room(in_files) * (size.wide + size.moments)
    found["disk"] = sum(map(in_pages, in_files)) * (size.wide + size.moments)
    return found


def _updated(config: Config, block: Block, part: int) -> int:
    """Elements of a block that a rank updates; `part`: those of its slice."""
    return block.size if config.distributed.zero_stage == 0 else part


def _block_bytes(
    config: Config, block: Block, part: int, on_host: bool
) -> Iterator[tuple[str, int]]:
    """(kind, bytes) of a block in memory, without what is in files; `part`: elements of a rank's
    slice.
    """
    stage = config.distributed.zero_stage
    size = precisions(config)
    optimizer = config.optimizer
    offloaded = stage == 3 and optimizer.param_cpu_offload
    kept_weights = "host" if offloaded else "parameters"
    if block.layout.group == UNTRAINED:
        yield "parameters", size.wide * block.size
        return
    if not block.trained:
        yield kept_weights, size.compute * (block.size if stage < 3 else part)
        return
    filed = on_host and optimizer.optimizer_nvme_offload is not None
    if stage < 3:
        yield "parameters", size.compute * block.size
    # else stage 3 gathers its master weights
    elif on_host and not (offloaded and size.compute == size.wide and not filed):
        yield kept_weights, size.compute * part
    yield "gradients", size.gradient * (block.size if stage < 2 else part)
    if not filed:
        separate = size.compute != size.wide or stage == 3 or on_host
        each = size.wide * separate + size.moments
        yield ("host" if on_host else "optimizer"), each * _updated(config, block, part)
