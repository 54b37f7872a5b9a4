"""Layers that return scalars next to their output: an auxiliary loss is differentiated and a
counter logged, alike in every layout.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from parity.compare import fp64
from parity.layouts import BASE, KEY_BIAS, NO_DROPOUT, Row
from parity.worker import Outcome, one_thread, run_case
from torch import Tensor
from unit.by_hand import (
    FULL_RECOMPUTE,
    NO_RECOMPUTE,
    backward,
    backward_input,
    backward_weight,
    filled,
    forward,
)

from megatron.config.groups import ModelConfig
from megatron.model.gpt import GPTModel
from megatron.model.layer import MicroBatch, ScalarSpec, TransformerLayer, WithScalars
from megatron.parallel.layer_runner import LayerRunner
from megatron.parallel.pipeline import loss_gradient

H, S, B, VOCAB, SCALE = 16, 8, 2, 30, 0.5
CONFIG = ModelConfig(
    num_layers=2,
    hidden_size=H,
    ffn_hidden_size=24,
    num_attention_heads=4,
    kv_channels=4,
    num_query_groups=4,
    max_position_embeddings=S,
)
PENALTY, COUNT = "output-penalty", "large-outputs"


class Penalised(TransformerLayer):
    """A layer whose outputs are penalised, and counted where they are large."""

    @classmethod
    def scalars(cls, config: ModelConfig, index: int, sequence: bool) -> tuple[ScalarSpec, ...]:
        parts = ("tp",) if sequence else ()
        return ScalarSpec(PENALTY, in_objective=True, parts=parts), ScalarSpec(COUNT, parts=parts)

    def forward(self, x: Tensor, micro: MicroBatch) -> WithScalars:
        y = super().forward(x, micro)
        penalty = 0.1 * y.square().mean(-1).sum()
        return WithScalars(y, {PENALTY: penalty, COUNT: (y.abs() > 1).sum()})


def build() -> GPTModel:
    with mock.patch.object(GPTModel, "layer_class", Penalised):
        model = GPTModel(CONFIG, vocab_size=VOCAB, padded_vocab=VOCAB, dtype=torch.float64, seed=5)
    filled(model)
    return model


def objective(
    model: GPTModel, passes: LayerRunner, scalars: dict[str, Tensor] | None = None
) -> tuple[float, Tensor, list]:
    """(scale x objective, the head's sums, what the layers saved) of a micro-batch."""
    ids = torch.randint(0, VOCAB, (B, S + 1), generator=torch.Generator().manual_seed(1))
    micro = model.micro_batch(
        ids[:, :-1],
        ids[:, 1:],
        torch.ones(B, S),
        torch.arange(S).expand(B, S),
        torch.arange(B),
        training=True,
    )
    scalars = {} if scalars is None else scalars
    sums, saved = forward(model, micro, passes, scalars=scalars)
    return SCALE * (sums[0] + scalars[PENALTY]).item(), sums, saved


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_an_auxiliary_loss_is_part_of_what_is_differentiated(split, recompute):
    """Against finite differences of loss and penalty together."""
    model, passes = build(), LayerRunner(objectives={PENALTY})
    model.choose_recompute(FULL_RECOMPUTE if recompute else NO_RECOMPUTE)
    _, sums, saved = objective(model, passes)
    dy = loss_gradient(sums, SCALE)
    if split:
        backward_weight(backward_input(model, saved, dy, passes, aux_scale=SCALE)[1], passes)
    else:
        backward(model, saved, dy, passes, aux_scale=SCALE)
    for name in ("layers.0.mlp.fc1.weight", "layers.1.final_norm.weight", "embedding.word.weight"):
        weight = dict(model.named_parameters())[name]
        draw = torch.Generator().manual_seed(2)
        direction = torch.randn(weight.shape, dtype=torch.float64, generator=draw)
        begun = weight.detach().clone()

        def slope(h: float) -> float:
            values = []
            for step in (h, -h):
                with torch.no_grad():
                    weight.copy_(begun + step * direction)
                    values.append(objective(model, LayerRunner())[0])
            return (values[0] - values[1]) / (2 * h)

        numeric = (4 * slope(1e-5) - slope(2e-5)) / 3  # Richardson: the h^2 error cancels
        with torch.no_grad():
            weight.copy_(begun)
        found = (weight.main_grad * direction).sum().item()
        assert numeric == pytest.approx(found, rel=1e-8, abs=1e-8), name


def test_a_second_forward_pass_counts_nothing_twice():
    found = []
    for recompute in (False, True):
        model, passes = build(), LayerRunner(objectives={PENALTY})
        model.choose_recompute(FULL_RECOMPUTE if recompute else NO_RECOMPUTE)
        scalars = {}
        _, sums, saved = objective(model, passes, scalars)
        backward(model, saved, loss_gradient(sums, SCALE), passes, aux_scale=SCALE)
        found.append({name: value.item() for name, value in scalars.items()})
    assert found[0] == found[1] and found[0][COUNT] > 0


FLAGS = (
    *BASE,
    *NO_DROPOUT.split(),
    *"--fp64 --train-iters 3 --lr-warmup-iters 1 --micro-batch-size 2".split(),
)
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
RUNS = [
    ("dp2 zero1", ""),
    ("dp2 zero3", FULL),
    ("tp2", ""),
    ("tp2 sp", FULL),
    ("pp2 1f1b dp2 zero2", FULL),
    ("pp2 zero-bubble", ""),
    ("pp2 zero-bubble-v dp2 zero3", FULL),
    ("pp2 zero-bubble tp2 sp dp2 zero3", ""),
]


def run(flags: tuple[str, ...]) -> Outcome:
    with mock.patch.object(GPTModel, "layer_class", Penalised):
        return run_case(flags)


@pytest.fixture(scope="module")
def alone() -> dict[int, Outcome]:
    """The one-process runs of 2 and of 4 layers."""
    with one_thread():
        return {layers: run((*FLAGS, "--num-layers", str(layers))) for layers in (2, 4)}


@pytest.mark.parametrize(("layout", "flags"), RUNS, ids=str)
@pytest.mark.default(f"pp2 1f1b dp2 zero2-{FULL}")
def test_every_layout_counts_and_trains_as_one_process(gloo_world, alone, layout, flags):
    words, layers = Row(layout, "gpt").words, 4 if "pp2" in layout else 2
    given = (*FLAGS, "--num-layers", str(layers), *words.flags, *flags.split())
    outcomes = gloo_world(words.ranks).run(run, given)
    assert fp64(alone[layers], outcomes, zero=KEY_BIAS) == []
    for row in outcomes[0].metrics:
        if "lm loss" in row:
            assert row[PENALTY] > 0 and row[COUNT] > 0


def test_the_auxiliary_loss_changes_the_training(alone):
    plain = run_case((*FLAGS, "--num-layers", "2"))
    assert [step.loss for step in plain.steps][1:] != [step.loss for step in alone[2].steps][1:]
    assert plain.steps[0].loss == alone[2].steps[0].loss
