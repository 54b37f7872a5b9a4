"""Where assignments go: the plans of dispatch against what they mean, assignment by assignment."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from unit.by_hand import filled

from megatron.config.groups import ModelConfig
from megatron.config.recompute import INSIDE
from megatron.model.experts.dispatch import Dispatcher
from megatron.model.experts.router import first_choices
from megatron.model.gpt import GPTModel
from megatron.model.model_parallel import NO_TP
from megatron.model.recompute import NO_RECOMPUTE, LayerRecompute


@st.composite
def choices(draw) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """(the experts of tokens [T, k], which choices are taken, how many experts there are)."""
    count, tokens = draw(st.integers(2, 6)), draw(st.integers(1, 9))
    k = draw(st.integers(1, count))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    experts = torch.rand(tokens, count, generator=generator).topk(k).indices
    keep = torch.rand(tokens, k, generator=generator) < 0.6 if draw(st.booleans()) else None
    return experts, keep, count


@given(choices(), st.sampled_from(["torch", "grouped-mm", "triton"]))
def test_rows_lie_in_the_order_of_experts_and_come_back(case, backend):
    experts, keep, count = case
    tokens, k = experts.shape
    x = torch.randn(tokens, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(tokens, k, dtype=torch.float64, requires_grad=True)
    dispatch = Dispatcher(NO_TP, count, backend)
    plan = dispatch.plan(experts, keep)
    rows, of_rows = dispatch.rows(x, weights, plan)
    taken = torch.ones_like(experts, dtype=torch.bool) if keep is None else keep
    assignments = [
        (token, choice)
        for expert in range(count)
        for token in range(tokens)
        for choice in range(k)
        if experts[token, choice] == expert and taken[token, choice]
    ]
    numbers = [
        sum(int(experts[assignment]) == expert for assignment in assignments)
        for expert in range(count)
    ]
    assert plan.counts.experts == count
    # on the host, on the device, or where the products need them
    waits = backend != "triton" or keep is not None
    assert plan.counts.numbers == (tuple(numbers) if waits else None)
    ends = None if plan.counts.ends is None else plan.counts.ends.tolist()
    assert ends == (None if backend == "torch" else list(itertools.accumulate(numbers)))
    assert torch.equal(rows, torch.stack([x[t] for t, _ in assignments]) if assignments else x[:0])
    assert of_rows.tolist() == [weights[assignment].item() for assignment in assignments]
    # an expert multiplies by its number + 1
    factor = torch.repeat_interleave(
        torch.arange(1.0, count + 1, dtype=torch.float64), torch.tensor(numbers)
    )
    y = dispatch.combine(rows * (of_rows * factor).unsqueeze(1), plan)
    expected = x * (weights * (experts + 1) * taken).sum(1, keepdim=True)
    torch.testing.assert_close(y, expected, rtol=1e-13, atol=1e-13)
    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, (x, weights), dy)
    wanted = torch.autograd.grad(expected, (x, weights), dy)
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0.1, 0.5, 0.9])), max_size=12),
    st.integers(0, 5),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_an_expert_takes_the_best_choices_or_the_first(choices, capacity, by_weight, random):
    order = list(range(len(choices)))
    random.shuffle(order)
    experts = torch.tensor([expert for expert, _ in choices], dtype=torch.int64)
    weights = torch.tensor([weight for _, weight in choices])
    keep = first_choices(
        experts, torch.tensor(order, dtype=torch.int64), weights if by_weight else None, capacity, 3
    )
    for expert in range(3):
        own = [i for i, (other, _) in enumerate(choices) if other == expert]
        own.sort(key=lambda i: (-choices[i][1] if by_weight else 0, order[i]))
        assert {i for i in own if keep[i]} == set(own[:capacity])


def filed_shapes(choice: LayerRecompute, **more) -> dict[str, set[tuple[int, ...]]]:
    """The shapes of what a layer saves, by the name under which it may go to the host."""
    config = ModelConfig(
        num_layers=1,
        hidden_size=16,
        ffn_hidden_size=24,
        num_attention_heads=4,
        num_query_groups=4,
        kv_channels=4,
        max_position_embeddings=8,
        add_bias_linear=False,
        **more,
    )
    model = GPTModel(config, vocab_size=30, padded_vocab=32, dtype=torch.float64, seed=5)
    filled(model)
    ids = torch.zeros(2, 8, dtype=torch.int64)
    places = torch.arange(8).expand(2, 8)
    micro = model.micro_batch(ids, ids, torch.ones(2, 8), places, torch.arange(2), training=True)
    layer, x = model.layers["0"], torch.randn(8, 2, 16, dtype=torch.float64, requires_grad=True)
    layer.choose_recompute(choice)
    with layer.parking() as parked:
        out = layer(x, micro)
    kept = [place for ref in parked if (place := ref()) is not None]
    assert (out if isinstance(out, torch.Tensor) else out.output).requires_grad
    return {name: {tuple(p.tensor.shape) for p in kept if p.module == name} for name in INSIDE}


SHARED = {
    "num_experts": 4,
    "moe_ffn_hidden_size": 8,
    "moe_shared_expert_intermediate_size": 12,
    "moe_shared_expert_gate": True,
}


def test_what_a_gate_saves_is_not_filed_under_fc2():
    """Of a gated shared expert fc2's input alone goes by that name to the host."""
    shapes = filed_shapes(NO_RECOMPUTE, **SHARED)
    assert shapes["mlp_fc2"] == shapes["mlp_act"] == {(8, 2, 12)}
    assert shapes["mlp_fc1"] == {(8, 2, 16)}


@pytest.mark.parametrize("more", [{}, SHARED], ids=["dense", "shared"])
def test_the_input_of_a_recomputed_mlp_goes_to_the_host(more):
    shapes = filed_shapes(LayerRecompute(frozenset({"mlp"})), **more)
    assert shapes["mlp_fc1"] == {(8, 2, 16)} and not shapes["mlp_fc2"] and not shapes["mlp_act"]
