"""The memory estimate against the tensors that autograd keeps and the buffers that exist."""

from __future__ import annotations

import dataclasses
import weakref

import pytest
import torch

from megatron.config.groups import Config, DataConfig, ModelConfig, OptimizerConfig, PrecisionConfig, TrainingConfig
from megatron.config.validate import resolve
from megatron.model.arithmetic import parameter_count
from megatron.model.block import PlainBlocks
from megatron.model.gpt import GPTModel
from megatron.optimizer.blocks import build_blocks
from megatron.plan.memory import estimate

SEQ, BATCH, VOCAB, PADDED = 64, 2, 301, 384
FUSED = {"attention_dropout": 0.0}
DRY = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
GROUPED = {"group_query_attention": True, "num_query_groups": 2}
ROPE = {"position_embedding_type": "rope"}


def configure(precision: PrecisionConfig = PrecisionConfig(), training: dict | None = None, **model) -> Config:
    training = TrainingConfig(micro_batch_size=BATCH, train_iters=1, **(training or {}))
    data = DataConfig(mock_data=True, vocab_size=VOCAB - 1, seq_length=SEQ)
    config = Config(model=ModelConfig(**{"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, **model}), precision=precision,
                    training=training, data=data, optimizer=OptimizerConfig(lr=1.0))
    return resolve(config, 1, VOCAB).config


class Kept:
    """A tensor that autograd saved; it dies with the graph node."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor.detach()


def kept_bytes(config: Config, dtype: torch.dtype) -> int:
    """Bytes of the storages alive between forward and backward, without parameters and the micro-batch itself."""
    model = GPTModel(config.model, vocab_size=VOCAB, padded_vocab=PADDED, dtype=dtype, seed=1)
    build_blocks(model, torch.device("cpu"))
    tokens, ids = torch.zeros(BATCH, SEQ, dtype=torch.int64), torch.arange(BATCH)
    micro = model.micro_batch(tokens, tokens, torch.ones(BATCH, SEQ), torch.arange(SEQ).expand(BATCH, SEQ), ids, training=True)
    given = [*model.parameters(), micro.tokens, micro.labels, micro.loss_mask, micro.position_ids, *(micro.rotary or ())]
    alive: weakref.WeakSet[Kept] = weakref.WeakSet()

    def pack(tensor: torch.Tensor) -> Kept:
        kept = Kept(tensor)
        alive.add(kept)
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        _, saved = model.forward(micro, PlainBlocks())
    tensors = [kept.tensor for kept in alive] + [tensor for pair in saved for tensor in pair if tensor is not None]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(size for pointer, size in storages.items() if pointer not in {tensor.untyped_storage().data_ptr() for tensor in given})


@pytest.mark.parametrize("model", [
    {}, FUSED, DRY, {**DRY, **GROUPED}, {**DRY, **ROPE}, {**DRY, **ROPE, **GROUPED, "activation": "swiglu", "normalization": "RMSNorm"},
    {**DRY, "qk_layernorm": True}, {**DRY, **ROPE, **GROUPED, "qk_layernorm": True}, {"attn_logit_softcapping": 5.0, **GROUPED},
    {**DRY, "attention_backend": "plain"}, {**ROPE, "qk_layernorm": True}, {"activation": "squared-relu", **DRY}, {**DRY, "window_size": 8},
    {**DRY, "num_query_groups": 1, "group_query_attention": True}, {**DRY, **GROUPED, "qk_layernorm": True, "attention_backend": "plain"},
])
def test_activations_are_what_autograd_keeps(model):
    config = configure(**model)
    loss = 4 * SEQ * BATCH + 8  # log-sum-exp of the loss and the two sums
    assert kept_bytes(config, torch.float32) - loss == estimate(config, VOCAB, 1)["activations"]


def test_activations_in_bf16_up_to_norm_statistics():
    """A CPU keeps LayerNorm's statistics in bf16, a GPU in fp32: RMSNorm's are fp32 here everywhere."""
    config = configure(PrecisionConfig(bf16=True), normalization="RMSNorm", activation="swiglu")
    assert kept_bytes(config, torch.bfloat16) - 4 * SEQ * BATCH - 8 == estimate(config, VOCAB, 1)["activations"]


@pytest.mark.parametrize("precision, per_parameter", [
    (PrecisionConfig(bf16=True), 18), (PrecisionConfig(), 16), (PrecisionConfig(fp64=True), 32),
])
def test_static_bytes(precision, per_parameter):
    config = configure(precision)
    sizes = estimate(config, VOCAB, 1)
    stored = parameter_count(config.model, PADDED)["total"]
    assert sizes["parameters"] + sizes["gradients"] + sizes["optimizer"] == per_parameter * stored
    assert sizes["total"] == sum(size for name, size in sizes.items() if name != "total")
    sgd = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, optimizer="sgd"))
    wide = 8 if precision.fp64 else 4
    assert sizes["optimizer"] - estimate(sgd, VOCAB, 1)["optimizer"] == wide * stored


def test_full_recompute_keeps_one_layer_and_the_inputs_of_the_others():
    def activations(layers: int, **training) -> int:
        return estimate(configure(training=training, num_layers=layers), VOCAB, 1)["activations"]

    full = {"recompute_granularity": "full"}
    assert activations(9, **full) - activations(8, **full) == SEQ * BATCH * 64 * 4
    assert activations(8, **full) < activations(2)
