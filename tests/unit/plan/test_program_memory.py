"""Memory of another program's runs, held against torch's own operators."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from megatron.tools._plan import program_memory
from megatron.tools._plan.activations import Shape
from megatron.tools._plan.program import Program
from step_models import resolved
from unit.zero.tracker import LiveBytes

from megatron.config.groups import Config

FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 192 --seq-length 32 "
    "--micro-batch-size 2 --global-batch-size 16 --bf16 --swiglu --normalization RMSNorm "
    "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights "
    "--attention-dropout 0 --hidden-dropout 0 --attention-backend sdpa "
    "--vocab-size 50000 --mock-data --train-iters 10 --lr 1e-4 --tokenizer-type NullTokenizer "
)
WORLD, VOCABULARY = 8, 50000
TOKENS = 64  # of a micro-batch
TP2 = "--tensor-model-parallel-size 2 "


def config_of(flags: str) -> Config:
    return resolved(FLAGS + flags, WORLD, VOCABULARY)


def test_a_logit_takes_what_torchs_loss_of_whole_logits_takes():
    """Bytes that live while torch computes and differentiates the loss and an accuracy, without the
    logits of the micro-batch before.
    """
    tokens, vocabulary = 64, 4096
    labels = torch.randint(vocabulary, (tokens,))
    before = torch.zeros(tokens, vocabulary, dtype=torch.bfloat16)
    with LiveBytes() as live:
        logits = torch.randn(tokens, vocabulary, dtype=torch.bfloat16).requires_grad_()
        start = live.mark().now["total"]
        wide = logits.float()
        loss = F.cross_entropy(wide, labels, reduction="none").mean()
        (wide.argmax(-1) == labels).float().mean()
        del wide
        loss.backward()
        peak = live.mark().peak["total"]
    counted = program_memory.KEPT_LOGIT + program_memory.LOGIT_GRADIENTS
    kept = before.nbytes + logits.nbytes + peak - start
    assert kept == pytest.approx(counted * logits.numel(), rel=0.01)


def saved_bytes(compute) -> int:
    """Of the distinct storages that autograd saves while it runs."""
    found = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    kept = []  # so that no address is used twice
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept.append(compute())
    return sum(found.values())


def test_a_layer_keeps_what_torchs_operators_save():
    shape = Shape(config_of(""), VOCABULARY)
    hidden, ffn = shape.model.hidden_size, shape.model.ffn_hidden_size
    x = torch.randn(TOKENS, hidden, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(hidden, dtype=torch.bfloat16, requires_grad=True)

    def norm() -> torch.Tensor:
        out = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return out.float().type_as(x) * weight

    more = saved_bytes(norm) - x.nbytes - weight.nbytes
    kept = program_memory._kept_of_layer(Program(normed=True), shape)
    assert kept == pytest.approx(2 * more, rel=0.05)  # two norms; and some numbers a token

    gate, up = torch.randn(2, TOKENS, ffn, dtype=torch.bfloat16).requires_grad_().unbind()
    down = torch.randn(hidden, ffn, dtype=torch.bfloat16, requires_grad=True)
    saved = saved_bytes(lambda: F.linear(F.silu(gate) * up, down)) - down.nbytes
    kept = program_memory._kept_of_layer(Program(activated_gate=True), shape)
    assert saved == 3 * TOKENS * ffn * 2 + kept

    shape = Shape(config_of(TP2 + "--sequence-parallel"), VOCABULARY)
    kept = program_memory._kept_of_layer(Program(gathered_inputs=True), shape)
    assert kept == 2 * (TOKENS - TOKENS // 2) * hidden * 2
