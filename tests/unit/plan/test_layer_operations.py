"""What a layer computes and sends by the log of its passes, against separate arithmetic."""

from __future__ import annotations

from unittest import mock

import pytest
from megatron.tools._plan.activations import Shape, layer_stage
from megatron.tools._plan.layer_run import LayerRun
from megatron.tools._plan.work import Work
from step_models import (
    CHOICES,
    DENSE,
    EXPERTS,
    HEADS,
    HIDDEN,
    SHARED,
    TOKENS,
    VOCABULARY,
    resolved,
    step,
)
from unit.recomputed_flops import flops_again

from megatron.model.arithmetic import unit_flops
from megatron.model.experts import experts
from megatron.model.recompute import NO_RECOMPUTE, WHOLE, choice_of

QUERIES, LATENT, CONTENT, POSITION, VALUE = 768, 512, 128, 64, 96
KEY = CONTENT + POSITION
NARROW = f"--q-lora-rank {QUERIES} "
LATENTS = (
    f"--multi-latent-attention --qk-layernorm --kv-lora-rank {LATENT} --qk-head-dim {CONTENT} "
    f"--qk-pos-emb-head-dim {POSITION} --v-head-dim {VALUE} "
)
# a token's products in front of the attention core, with queries of a separate vector
UP = QUERIES * HEADS * KEY + LATENT * HEADS * (CONTENT + VALUE)
DOWN = HIDDEN * (QUERIES + LATENT + POSITION)
EP = "--expert-model-parallel-size"


OF_LAYERS = {
    "dense": DENSE,
    "experts": f"{EXPERTS} {EP} 8 {SHARED}",
    "latent": DENSE + LATENTS,
    "latent, experts": EXPERTS + LATENTS + NARROW,
}


@pytest.mark.parametrize("flags", OF_LAYERS.values(), ids=OF_LAYERS)
def test_a_layer_computes_what_the_arithmetic_counts(flags):
    """Products, and attention of the causal half, with as many channels of values as of keys. The
    backward pass of fused attention computes its scores again, which the model's FLOPs do not
    count. With balanced experts a rank has as many rows as its tokens have choices.
    """
    run = step(flags)
    filled = HEADS * (KEY - VALUE) * TOKENS if LATENTS in flags else 0
    flops = [each + filled for each in unit_flops(run.config.model, TOKENS, 0)[1:]]
    for index in (0, 1):
        layer, counted = run.operations.layer(index, NO_RECOMPUTE), flops[index] * TOKENS
        assert layer.forward.flops == pytest.approx(counted)
        core = sum(each.flops for each in layer.forward.cores)
        assert layer.backward.flops == pytest.approx(2 * counted + core / 2)
        whole = run.operations.layer(index, WHOLE).backward_input
        assert whole.flops == pytest.approx(layer.backward_input.flops + counted)


def recomputed(flags: str, what: str) -> tuple[Work, Work, int]:
    """The backward pass of a layer that keeps everything and of one that recomputes this, and the
    FLOPs between them by hand.
    """
    model = step(flags)
    kept, again = (
        model.operations.layer(1, choice).backward_input
        for choice in (NO_RECOMPUTE, choice_of(what))
    )
    return kept, again, flops_again(model.config.model, TOKENS, choice_of(what), 1) * TOKENS


@pytest.mark.parametrize("what", ["moe_act", "layernorm+qkv+core_attn", "full"])
def test_what_is_recomputed_of_experts(what):
    kept, again, by_hand = recomputed(f"{EXPERTS} {EP} 4 {SHARED}", what)
    assert again.flops - kept.flops == pytest.approx(by_hand)


@pytest.mark.parametrize("what, products", [("mla_up_proj", UP), ("qkv", UP + DOWN)])
def test_what_is_recomputed_of_latent_attention(what, products):
    kept, again, by_hand = recomputed(DENSE + LATENTS + NARROW, what)
    assert again.flops - kept.flops == pytest.approx(by_hand)
    assert by_hand == 2 * products * TOKENS
    assert sum(again.streams) > sum(kept.streams) and again.launches > kept.launches


def test_experts_with_as_many_rows_are_run_once(monkeypatch):
    """Bytes and operations are those of a run in which each of 32 experts computes: 16 have 170
    rows and 16 have 171.
    """
    config = resolved(f"{EXPERTS} --seq-length 1364 --grouped-gemm-backend torch")
    shape = Shape(config, VOCABULARY, "cpu")
    unit = shape.unit(layer_stage(shape, 1))

    def passes() -> list[tuple]:
        found = LayerRun(*unit[:4]).passes(NO_RECOMPUTE)
        return [(each.left, each.peak, each.at_exchanges, each.work) for each in found]

    few = passes()
    every = mock.Mock(side_effect=experts.row_slices)
    monkeypatch.setattr(LayerRun, "_unequal_experts", lambda self, counts: every(counts))
    assert passes() == few and every.call_count > 3


# ---- what is sent, by the formulas of tests/parity/test_collectives.py


@pytest.mark.parametrize("flags", ["", "--sequence-parallel "])
def test_tensor_parallel_ranks_send_the_same_bytes(flags):
    """A gather and a reduce-scatter move what an all-reduce moves; one gather more is in addition
    to products.
    """
    size = TOKENS * HIDDEN * 2
    flags = f"{DENSE} --tensor-model-parallel-size 4 {flags}"
    layer = step(flags).operations.layer(0, NO_RECOMPUTE)
    factors = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}
    assert sum(factors[each.operation] * each.size for each in layer.forward.exchanges) == 4 * size
    sent = [each for each in layer.backward_input.exchanges if each.axis == "tp"]
    backward = sum(factors[each.operation] * each.size for each in sent)
    assert backward == (4 + 2 * ("--sequence" in flags)) * size


def sent_to_experts(work: Work) -> list[float]:
    """Bytes that a rank sends in each exchange of eight ranks."""
    return [each.size * 7 / 8 for each in work.exchanges if each.axis == "ep"]


def test_bytes_on_the_way_to_experts():
    layer = step(f"{EXPERTS} {EP} 8").operations.layer(1, NO_RECOMPUTE)
    choices = TOKENS * CHOICES * 7 / 8
    rows, weights = choices * HIDDEN * 2, choices * 4
    assert sent_to_experts(layer.backward_input) == pytest.approx([rows, rows, weights])
    numbers = 32 * 8 * 7 / 8  # of rows, first
    assert sent_to_experts(layer.forward) == pytest.approx([numbers, rows, weights, rows])
