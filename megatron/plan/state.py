"""What a rank holds when the passes of a step are over: weights, gradients and optimizer state of its blocks, to the byte."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron.config.derive import data_parallel_size
from megatron.config.groups import Config, PrecisionConfig
from megatron.config.stages import frozen_units
from megatron.model.arithmetic import elements
from megatron.model.block import distinct_layers, layer_parameters, like_layer, word_matrix
from megatron.model.stages import Stage
from megatron.optimizer.blocks import on_host_of, padded
from megatron.optimizer.nvme import SLOTS, in_pages, part_room


class Sizes(NamedTuple):
    """Elements of a block's flat buffer, and of what a split backward pass does not leave for later (all but linear layers' weights)."""

    name: str
    elements: int
    early: int
    trained: bool = True

    @property
    def is_layer(self) -> bool:
        return self.name.startswith("layer")


class Precisions(NamedTuple):
    """Bytes of an element."""

    compute: int  # weights and activations
    wide: int  # master weights
    gradient: int
    moments: int  # of all that the optimizer keeps beside the master weight
    wire: int  # of a gradient that is sent


def element_sizes(precision: PrecisionConfig) -> tuple[int, int]:
    """Bytes of an element in the compute precision, and in that of master weights and, unless told otherwise, gradients and moments."""
    if precision.fp64:
        return 8, 8
    return (2 if precision.bf16 or precision.fp16 else 4), 4


def precisions(config: Config) -> Precisions:
    """What the flags ask for."""
    compute, wide = element_sizes(config.precision)
    chosen, optimizer = {"fp32": wide, "bf16": 2}, config.optimizer
    moments = chosen[optimizer.exp_avg_dtype] + chosen[optimizer.exp_avg_sq_dtype] if optimizer.optimizer == "adam" else wide
    gradient = chosen[optimizer.main_grads_dtype]
    return Precisions(compute, wide, gradient, moments, 2 if config.distributed.grad_reduce_in_bf16 else gradient)


def shard_size(config: Config, world_size: int) -> int:
    """Ranks that share a block: 1 at stage 0, all data-parallel ones unless --zero-shard-size says otherwise."""
    if config.distributed.zero_stage == 0:
        return 1
    return config.distributed.zero_shard_size or data_parallel_size(config, world_size)


def unit_sizes(config: Config, padded_vocab: int, replicas: int, *, copied: bool) -> list[Sizes | None]:
    """The block of each unit (embedding, layers, head) on a rank that holds it; None: a tied head without a matrix of its own (not `copied`)."""
    tp, model = config.distributed.tensor_model_parallel_size, config.model
    matrix = padded(elements([word_matrix(model, padded_vocab, padded_vocab)], tp), replicas)
    sizes = {}
    for layer in distinct_layers(model):
        parameters = layer_parameters(model, layer).values()
        late = sum(padded(elements([spec], tp)) for spec in parameters if spec.product)
        others = sum(padded(elements([spec], tp)) for spec in parameters if not spec.product)
        size = padded(late + others, replicas)
        sizes[layer] = size, size - late
    layers = [Sizes(f"layer {layer}", *sizes[like_layer(model, layer)]) for layer in range(model.num_layers)]
    head = Sizes("head", matrix, matrix) if copied or model.untie_embeddings_and_output_weights else None
    frozen = frozen_units(config)
    units = Sizes("embedding", matrix, matrix), *layers, head
    return [unit and unit._replace(trained=unit.name.replace("layer ", "layers.") not in frozen) for unit in units]


def rank_blocks(config: Config, world_size: int, stages: Sequence[Stage], placement: Sequence[int], padded_vocab: int, rank: int) -> dict[int, Sizes]:
    """The blocks of a pipeline rank by number of the unit that uses them; a tied head on the embedding's rank has the embedding's."""
    sizes = unit_sizes(config, padded_vocab, data_parallel_size(config, world_size), copied=placement[0] != placement[-1])
    units = [unit for stage, where in zip(stages, placement, strict=True) if where == rank for unit in stage.units]
    return {unit: sizes[unit] or sizes[0] for unit in units}


def static_bytes(config: Config, blocks: Sequence[Sizes], shard: int) -> dict[str, int]:
    """Bytes, when the passes of a step are over, of a rank's (distinct) blocks in the order of the forward pass: parameters, gradients, optimizer,
    host, which is what --optimizer-cpu-offload and --param-cpu-offload keep in the host's memory, and disk, where --optimizer-nvme-offload keeps the
    optimizer's, with a ring of buffers in the host's memory.

    Per element with Adam, N ranks sharing, in bf16: 18 | 6 + 12/N | 2 + 16/N | 16/N at stages 0 | 1 | 2 | 3: 2 of weights, 4 of gradients, 4 of
    master weights, 8 of moments; in fp32 16 | 8 + 8/N | 4 + 12/N | 16/N, where below stage 3 the weights are the master weights. Of a block that is
    stepped on the host the master weights are always apart, and stage 3 has its rounded weights beside them, on the device; or with
    --param-cpu-offload on the host, in fp32 the master weights themselves. Of a frozen block there are the weights, at stage 3 a slice of them.
    """
    stage, size, optimizer = config.distributed.zero_stage, precisions(config), config.optimizer
    fraction = optimizer.optimizer_offload_fraction if optimizer.optimizer_cpu_offload else 0.0
    offloaded = stage == 3 and optimizer.param_cpu_offload
    found, in_files = dict.fromkeys(("parameters", "gradients", "optimizer", "host", "disk"), 0), []
    for block, on_host in zip(blocks, on_host_of([block.elements * block.trained for block in blocks], fraction), strict=True):
        whole, part = block.elements, block.elements // shard
        if not block.trained:
            found["host" if offloaded else "parameters"] += size.compute * (whole if stage < 3 else part)
            continue
        updated, filed = whole if stage == 0 else part, on_host and optimizer.optimizer_nvme_offload is not None
        if stage < 3:
            found["parameters"] += size.compute * whole
        elif on_host and not (offloaded and size.compute == size.wide and not filed):  # else stage 3 gathers its master weights
            found["host" if offloaded else "parameters"] += size.compute * part
        found["gradients"] += size.gradient * (whole if stage < 2 else part)
        if filed:
            in_files.append(updated)
            continue
        found["host" if on_host else "optimizer"] += ((size.compute != size.wide or stage == 3 or on_host) * size.wide + size.moments) * updated
    found["host"] += SLOTS * part_room(in_files) * (size.wide + size.moments)
    found["disk"] = sum(map(in_pages, in_files)) * (size.wide + size.moments)
    return found
