"""Selective recomputation: GEMM counts and the lifetime of recomputed tensors."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from test_split_units import CONFIGS, B, H, S, build, micro_batch
from torch.utils._python_dispatch import TorchDispatchMode
from unit.by_hand import FULL_RECOMPUTE, NO_RECOMPUTE, recomputing
from unit.recomputed_flops import flops_again
from unit.storages import Storages, no_collector

from megatron.config.groups import TrainingConfig
from megatron.model.recompute import WHOLE, LayerRecompute, stage_offload, stage_recompute
from megatron.model.recompute_context import RecomputeContext
from megatron.parallel.layer_runner import LayerRunner
from megatron.parallel.schedule import Kind

MODULES = ("layernorm", "qkv", "core_attn", "mlp_act", "mlp")
ALL = ("layernorm", "qkv", "core_attn", "mlp")
# each alone, each that reads what another gives, all
CHOICES = [*((each,) for each in MODULES), ("layernorm", "mlp"), ("qkv", "core_attn"), ALL]


# ---- matrix products

KINDS = {  # of operators; F.linear is one of the first three
    **dict.fromkeys(("mm", "addmm", "addmm_"), "linear"),
    **dict.fromkeys(("bmm", "_scaled_dot_product_flash_attention_for_cpu"), "attention"),
}


class Products(TorchDispatchMode):
    """Counts matrix products by kind, and the FLOPs of those of linear layers."""

    def __init__(self):
        super().__init__()
        self.calls, self.flops = Counter(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kind = KINDS.get(func.overloadpacket.__name__)
        self.calls[kind] += 1
        if kind == "linear":
            one, other = [x for x in args if isinstance(x, torch.Tensor)][-2:]
            self.flops += 2 * one.shape[0] * one.shape[1] * other.shape[1]
        return func(*args, **(kwargs or {}))


def products(name, training, split_backward=False):
    """Of one layer and one micro-batch, both passes: (linear, attention, FLOPs of linear)."""
    model = build(CONFIGS[name])
    model.choose_recompute(training)
    layer, passes = model.layers["0"], LayerRunner()
    x = torch.randn(S, B, H, dtype=torch.float64)
    micro = micro_batch(model)
    with Products() as found:
        y, saved = passes.forward(layer, x, micro)
        if split_backward:
            _, left = passes.backward(Kind.BACKWARD_INPUT, layer, torch.ones_like(y), saved)
            passes.backward(Kind.BACKWARD_WEIGHT, layer, None, left)
        else:
            passes.backward(Kind.BACKWARD, layer, torch.ones_like(y), saved)
    return found.calls["linear"], found.calls["attention"], found.flops


def expected_products(name, training):
    """4 linear layers, forward and two gradients each, and attention; what is computed again in
    addition to that.
    """
    config = CONFIGS[name]
    (choice,) = stage_recompute(training, range(1))
    plain = config.attention_dropout > 0
    core = 2 if plain else 1  # products of the core, or one call; and its gradients
    linear = 12 + (4 if choice.whole else len({"qkv", "mlp"} & choice.modules))
    again = choice.whole or "core_attn" in choice.modules
    attention = core * (1 + again) + (4 if plain else 0)
    # FLOPs of matrices alone: a sequence of no tokens has no attention
    per_token = 3 * flops_again(config, 0, WHOLE) + flops_again(config, 0, choice)
    return linear, attention, S * B * per_token


@pytest.mark.parametrize("split_backward", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("name", CONFIGS)
def test_products_are_those_of_the_formula(name, split_backward):
    for training in (NO_RECOMPUTE, FULL_RECOMPUTE, *(recomputing(*each) for each in CHOICES)):
        assert products(name, training, split_backward) == expected_products(name, training)


def test_no_reader_comes_twice():
    recompute_context = RecomputeContext()
    exp = recompute_context._recomputed(torch.exp)
    x = torch.randn(3, requires_grad=True)
    with recompute_context._packing():
        y = exp(x).sin()
    y.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="read more often than it was saved"):
        y.sum().backward()


# ---- what lives


class Peak(Storages):
    """The most bytes of what was made that are alive at once."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.most = max(self.most, sum(self.alive().values()))
        return out


@no_collector()
def test_what_is_rebuilt_goes_with_its_last_reader():
    """In the backward pass no more lives at once than without recomputation."""

    def most(training):
        model = build(CONFIGS["gqa-swiglu"])
        model.choose_recompute(training)
        micro = micro_batch(model)
        with Peak() as peak:
            x = torch.randn(S, B, H, dtype=torch.float64)
            y, saved = LayerRunner().forward(model.layers["1"], x, micro)
            dy = torch.ones_like(y)
            del x, y
            entry, peak.most = [saved], 0
            del saved
            LayerRunner().backward(Kind.BACKWARD, model.layers["1"], dy, entry.pop())
        return peak.most

    plain = most(NO_RECOMPUTE)
    assert most(recomputing(*ALL)) < plain
    assert most(recomputing("layernorm", "mlp_act")) < plain


# ---- which layers


def test_the_choice_of_each_layer():
    def pairs(layers, **full):
        return [
            (each.first, each.last) for each in stage_recompute(recomputing(**full), range(layers))
        ]

    assert stage_recompute(NO_RECOMPUTE, range(3)) == [LayerRecompute()] * 3
    assert stage_recompute(FULL_RECOMPUTE, range(3)) == [WHOLE] * 3
    assert stage_recompute(recomputing("mlp"), range(2)) == [LayerRecompute(frozenset({"mlp"}))] * 2
    assert pairs(5, recompute_num_layers=2) == [
        (True, False),
        (False, True),
        (True, False),
        (False, True),
        (True, True),
    ]
    block = recomputing(recompute_method="block", recompute_num_layers=2)
    assert stage_recompute(block, range(4, 7)) == [WHOLE, WHOLE, LayerRecompute()]
    assert stage_recompute(block, range(1)) == [WHOLE]
    assert stage_recompute(block, range(0)) == []


@pytest.mark.parametrize("modules", ["qkv+core_attn", "mla_up_proj+core_attn"])
def test_layers_without_inputs_to_offload_are_no_part_of_the_fraction(modules):
    training = TrainingConfig(
        recompute_layers=(f"{modules}*4", "none*4"),
        activation_offload=True,
        offload_modules=("core_attn",),
        activation_offload_fraction=0.5,
    )
    going = stage_offload(training, CONFIGS["gqa-swiglu"], range(8))
    assert [index for index, inputs in enumerate(going) if inputs] == [4, 5]
