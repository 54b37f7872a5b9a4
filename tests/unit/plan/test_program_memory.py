"""Memory and time of another program's runs, held against torch's own operators."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from megatron.tools._plan import program_memory
from megatron.tools._plan.activations import Shape
from megatron.tools._plan.memory import MemoryPlan
from megatron.tools._plan.operations import Operations
from megatron.tools._plan.program import OURS, Program
from megatron.tools._plan.program_memory import peak_of
from megatron.tools._plan.rows import program_of, row_flags
from megatron.tools._plan.work import Exchange
from unit.zero.tracker import LiveBytes

from megatron.config.arguments import parse_arguments
from megatron.config.groups import Config
from megatron.config.validate import resolve

FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 192 --seq-length 32 "
    "--micro-batch-size 2 --global-batch-size 16 --bf16 --swiglu --normalization RMSNorm "
    "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights "
    "--attention-dropout 0 --hidden-dropout 0 --attention-backend sdpa --no-tp-comm-overlap "
    "--vocab-size 50000 --mock-data --train-iters 10 --lr 1e-4 --tokenizer-type NullTokenizer "
)
WORLD, VOCABULARY = 8, 50000
TOKENS = 64  # of a micro-batch
TP2 = "--tensor-model-parallel-size 2 "
WHOLE = Program(whole_logits=True)


def config_of(flags: str) -> Config:
    return resolve(parse_arguments((FLAGS + flags).split()).config, WORLD, VOCABULARY).config


def test_our_program_needs_what_the_plan_of_memory_says():
    config = config_of("--pipeline-model-parallel-size 2 --zero-stage 1")
    peak = MemoryPlan(config, VOCABULARY, WORLD).fullest.total
    assert peak_of(OURS, config, VOCABULARY, WORLD) == peak


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


@pytest.mark.parametrize("tp", [1, 2])
def test_whole_logits_are_gathered_and_read_on_every_rank(tp):
    config = config_of(TP2 if tp == 2 else "")
    ours, whole = (Operations(config, VOCABULARY, program) for program in (OURS, WHOLE))
    logits = TOKENS * ours.vocab * tp
    exchanges = whole.head().forward.exchanges
    assert (Exchange("all-gather", "tp", 2 * logits) in exchanges) == (tp == 2)
    assert Exchange("all-reduce", "tp", 4 * TOKENS) not in exchanges
    assert sum(whole.head().forward.streams) == (18 + 4 * (tp == 2)) * logits
    assert sum(whole.head().backward_input.streams) == 22 * logits
    assert whole.head().forward.products == ours.head().forward.products


def test_a_row_is_planned_as_the_program_that_ran_it():
    row = {
        "source": "Aleph-Alpha/x", "layers": "40", "hidden": "5120", "heads": "40",
        "kv_heads": "40", "ffn": "13824", "vocab": "128000", "seq": "8192", "tp": "1", "pp": "4",
        "gpus": "64", "global_batch": "512", "kernels": "FlashAttention-2, unfused RMSNorm",
    }  # fmt: skip
    assert program_of(row) == Program(
        whole_logits=True, gathered_inputs=True, activated_gate=True, normed=True
    )
    assert not program_of(row | {"kernels": "fused RMSNorm kernel"}).normed
    assert program_of(row | {"source": "elsewhere"}) == Program(normed=True)
    flags, _ = row_flags(row)
    layout = flags[flags.index("--pipeline-model-parallel-layout") + 1]
    # 13.0 billion parameters of 40 layers, and 0.66 of each matrix
    assert [stage.count("t") for stage in layout.split("|")] == [9, 11, 11, 9]
    assert layout.startswith("E") and layout.endswith("L")
    # by its bound of six layers alone, 14 stages would do
    row |= {"layers": "80", "hidden": "8192", "heads": "64", "kv_heads": "64", "ffn": "22016"}
    flags, _ = row_flags(row | {"pp": "16"})
    stages = flags[flags.index("--pipeline-model-parallel-layout") + 1].split("|")
    assert len(stages) == 16 and all(stages) and sum(each.count("t") for each in stages) == 80
