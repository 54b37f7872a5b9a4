"""The plan of what autograd keeps on tensor-parallel ranks; and the models with which other tests of
memory are made.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from megatron.tools._plan.activations import Shape, unit_bytes
from unit.by_hand import forward
from unit.storages import Storages

from megatron.config.groups import (
    Config,
    DataConfig,
    DistributedConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    TrainingConfig,
)
from megatron.config.validate import resolve
from megatron.distributed.groups import Layout, build_groups
from megatron.model.arithmetic import padded_vocab_size
from megatron.model.gpt import GPTModel
from megatron.model.kernels import choose_kernels, compute_dtype
from megatron.model.layer import MicroBatch
from megatron.model.spec import NO_TP, TensorParallel
from megatron.model.stages import whole
from megatron.parallel.blocks import build_blocks

SEQ, BATCH, VOCAB = 64, 2, 301
DRY = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
GROUPED = {"group_query_attention": True, "num_query_groups": 2}
ROPE = {"position_embedding_type": "rope"}
LATENT = {
    **DRY,
    **ROPE,
    "activation": "swiglu",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 12,
}
KERNELS = {
    f"{operator}_backend": "triton"
    for operator in ("attention", "norm", "rotary", "activation", "dropout", "cross_entropy")
}


def configure(
    precision: PrecisionConfig = PrecisionConfig(),
    training: dict | None = None,
    distributed: dict | None = None,
    tp: int = 1,
    sp: bool = False,
    world: int | None = None,
    **model,
) -> Config:
    training = TrainingConfig(micro_batch_size=BATCH, train_iters=1, **(training or {}))
    data = DataConfig(mock_data=True, vocab_size=VOCAB - 1, seq_length=SEQ)
    config = Config(
        model=ModelConfig(
            **{"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, **model}
        ),
        precision=precision,
        training=training,
        data=data,
        optimizer=OptimizerConfig(lr=1.0),
        distributed=DistributedConfig(
            tensor_model_parallel_size=tp,
            sequence_parallel=sp,
            world_size=world or tp,
            **(distributed or {}),
        ),
    )
    return with_cpu_kernels(resolve(config, world or tp, VOCAB).config)


def with_cpu_kernels(config: Config) -> Config:
    """The same with the kernels that a CPU takes named: what is measured here is planned for a GPU,
    whose `auto` takes others.
    """
    config, choices = choose_kernels(config, torch.device("cpu"))
    model = dataclasses.replace(config.model, attention_backend=choices["attention"].implementation)
    return dataclasses.replace(config, model=model)


def planned(config: Config) -> int:
    """Bytes that one micro-batch keeps of the whole model on a CPU."""
    units = unit_bytes(Shape(config, VOCAB, "cpu"), whole(config.model)[0])
    return sum(unit.saved + unit.logits for unit in units)


def whole_model(config: Config) -> tuple[GPTModel, MicroBatch]:
    """A whole model that has its storage, shared by the ranks of this job, and a micro-batch."""
    size, tp = config.distributed.tensor_model_parallel_size, NO_TP
    if size > 1:
        groups = build_groups(
            Layout(tp=size), dist.get_rank(), dist.new_group, config.model.num_query_groups
        )
        tp = TensorParallel(groups.tp, groups.kv, config.distributed.sequence_parallel)
    model = GPTModel(
        config.model,
        vocab_size=VOCAB,
        padded_vocab=padded_vocab_size(VOCAB, config.model, size),
        dtype=compute_dtype(config.precision),
        seed=1,
        tp=tp,
    )
    model.choose_recompute(config.training)
    for block in build_blocks(model, torch.device("cpu")):
        block.open()
    tokens, ids = torch.zeros(BATCH, SEQ, dtype=torch.int64), torch.arange(BATCH)
    positions = torch.arange(SEQ).expand(BATCH, SEQ)
    mask = torch.ones(BATCH, SEQ)
    return model, model.micro_batch(tokens, tokens, mask, positions, ids, training=True)


def kept_bytes(config: Config) -> int:
    """Bytes of the storages alive between forward and backward, without parameters and the
    micro-batch itself.
    """
    model, micro = whole_model(config)
    with Storages() as storages:
        y, saved = forward(model, micro)
        del y
        return sum(storages.alive().values())


@pytest.mark.parametrize(
    "model, sp",
    [({}, False), ({**DRY, **ROPE, **GROUPED, "normalization": "RMSNorm"}, True), (LATENT, True)],
    ids=["gpt, tp2", "llama, tp2 sp", "latent attention, tp2 sp"],
)
def test_activations_of_tensor_parallel_ranks(gloo_world, model, sp):
    config = configure(tp=2, sp=sp, **model)
    assert gloo_world(2).run(kept_bytes, config) == [planned(config)] * 2
