"""The model of a run's flags, as one rank holds it.

Called from training/pretrain.py and plan/memory.py.
"""

from __future__ import annotations

import functools

import torch

from megatron.config.groups import Config, ModelConfig
from megatron.config.stages import placement_of
from megatron.distributed.groups import Groups
from megatron.layers.spec import ParameterSpec
from megatron.layers.tensor_parallel import TensorParallel
from megatron.model.arithmetic import padded_vocab_size
from megatron.model.gpt import GPTModel
from megatron.model.kernels import choose_kernels, compute_dtype
from megatron.model.stages import pipeline_stages


def build_model(config: Config, vocab_size: int, groups: Groups, device: torch.device) -> GPTModel:
    """The stages that a rank holds of the model of a resolved configuration, its parameters on the
    meta device. `device` is where it will run, which decides what kernels its layers take;
    `vocab_size` is the tokenizer's.
    """
    distributed = config.distributed
    tp = TensorParallel(
        groups.tp,
        groups.kv,
        sequence=distributed.sequence_parallel,
        overlap=distributed.tp_comm_overlap,
    )
    padded = padded_vocab_size(vocab_size, config.model, tp.size)
    chosen, _ = choose_kernels(config, device)
    stages = zip(pipeline_stages(config, padded), placement_of(config), strict=True)
    own = tuple(stage for stage, rank in stages if rank == groups.pp.rank)
    model = GPTModel(
        chosen.model,
        vocab_size=vocab_size,
        padded_vocab=padded,
        dtype=compute_dtype(config.precision),
        seed=config.training.seed,
        tp=tp,
        stages=own,
    )
    model.choose_recompute(config.training)
    return model


def hidden_shape(config: Config) -> tuple[int, int, int]:
    """[s, b, h] of what travels between the stages of a resolved configuration."""
    split = (
        config.distributed.tensor_model_parallel_size if config.distributed.sequence_parallel else 1
    )
    return (
        config.data.seq_length // split,
        config.training.micro_batch_size,
        config.model.hidden_size,
    )


@functools.cache
def declared(model: ModelConfig, vocab_size: int) -> dict[str, ParameterSpec]:
    """What a whole model's parameters declare, by name, those of modules that were added to it too.
    Nothing is allocated.
    """
    described = GPTModel(
        model,
        vocab_size=vocab_size,
        padded_vocab=padded_vocab_size(vocab_size, model),
        dtype=torch.float32,
        seed=0,
    )
    return {name: spec for name, _, spec in described.declared()}


@functools.cache
def model_shapes(model: ModelConfig, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """The logical tensors of a model and their shapes."""
    return {
        tensor.name: tensor.shape
        for spec in declared(model, vocab_size).values()
        for tensor in spec.tensors
    }
