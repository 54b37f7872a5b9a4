"""The model of a run's flags, as one rank holds it."""

from __future__ import annotations

import functools

import torch

from megatron.config.fp8 import layer_in_fp8, wide_linears
from megatron.config.groups import Config, ModelConfig
from megatron.config.stages import placement_of
from megatron.distributed.groups import Groups
from megatron.model.arithmetic import padded_vocab_size
from megatron.model.fp8 import mark_fp8
from megatron.model.gpt import GPTModel
from megatron.model.kernels import choose_kernels, compute_dtype
from megatron.model.model_parallel import ModelParallel
from megatron.model.spec import ParameterSpec, TensorSpec
from megatron.model.stages import Stage, pipeline_stages


def build_model(config: Config, vocab_size: int, groups: Groups, device: torch.device) -> GPTModel:
    """The stages that a rank holds of the model of a resolved configuration, its parameters on the
    meta device. `device` is where it will run, which decides what kernels its layers take;
    `vocab_size` is the tokenizer's.
    """
    # The same cut on every rank: stages are placed, and this rank takes its own.
    padded = padded_vocab_size(vocab_size, config.model, groups.tp.size)
    stages = zip(pipeline_stages(config, padded), placement_of(config), strict=True)
    own = tuple(stage for stage, rank in stages if rank == groups.pp.rank)
    model = build_stages(config, vocab_size, groups, device, own)
    # Layers are wrapped for recomputation once, before anything runs.
    model.choose_recompute(config.training)
    return model


def build_stages(
    config: Config, vocab_size: int, groups: Groups, device: torch.device, stages: tuple[Stage, ...]
) -> GPTModel:
    """These stages of the model; no layer is recomputed or offloaded."""
    padded = padded_vocab_size(vocab_size, config.model, groups.tp.size)
    # From here on no backend but attention's is `auto`.
    chosen, _ = choose_kernels(config, device)
    model = GPTModel(
        chosen.model,
        vocab_size=vocab_size,
        padded_vocab=padded,
        dtype=compute_dtype(config.precision),
        seed=config.training.seed,
        parallel=ModelParallel.of(groups, config.distributed),
        stages=stages,
    )
    # The wide linear layers find the mark for 8-bit floats on their weight.
    precision = config.precision
    for index, layer in model.layers.items():
        if layer_in_fp8(precision, int(index), config.model.num_layers):
            for linear in wide_linears(config.model, precision):
                weight = layer.get_parameter(f"{linear.name}.weight")
                mark_fp8(weight, precision, linear.split, groups.tp, groups.cp)
    return model


def hidden_shape(config: Config) -> tuple[int, int, int]:
    """[s, b, h] of what travels between the stages of a resolved configuration."""
    distributed = config.distributed
    # Context- and sequence-parallel ranks each hold an equal part of the sequence.
    split = distributed.context_parallel_size
    if distributed.sequence_parallel:
        split *= distributed.tensor_model_parallel_size
    return (
        config.data.seq_length // split,
        config.training.micro_batch_size,
        config.model.hidden_size,
    )


@functools.cache
def declared(model: ModelConfig, vocab_size: int) -> dict[str, ParameterSpec]:
    """What a whole model's parameters declare, by name. Nothing is allocated."""
    # Parameters are born on the meta device, so the whole model costs no memory.
    described = GPTModel(
        model,
        vocab_size=vocab_size,
        padded_vocab=padded_vocab_size(vocab_size, model),
        dtype=torch.float32,
        seed=0,
    )
    return {name: spec for name, _, spec in described.declared()}


@functools.cache
def logical_tensors(model: ModelConfig, vocab_size: int) -> dict[str, TensorSpec]:
    """The logical tensors of a model by name."""
    return {
        tensor.name: tensor
        for spec in declared(model, vocab_size).values()
        for tensor in spec.tensors
    }
