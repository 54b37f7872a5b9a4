"""Ordinary torch.nn modules in a layer train as ours do, wherever they run; what cannot is refused
by name.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from megatron.tools._report.metrics_file import read_metrics
from parity.compare import fp64
from parity.layouts import BASE, KEY_BIAS, NO_DROPOUT, Row
from parity.worker import Outcome, one_thread, run_case
from torch import Tensor, nn
from unit.by_hand import (
    FULL_RECOMPUTE,
    NO_RECOMPUTE,
    backward,
    backward_input,
    backward_weight,
    filled,
    forward,
    loss_gradient,
    recomputing,
)
from unit.model.made import norm

from megatron.checkpoint.reader import open_checkpoint
from megatron.config.groups import ModelConfig
from megatron.distributed.groups import Layout
from megatron.distributed.setup import make_groups
from megatron.model.gpt import GPTModel
from megatron.model.layer import TransformerLayer
from megatron.model.model_parallel import ONE_RANK, ModelParallel, TensorParallel
from megatron.model.spec import declare_grad_sum, vector
from megatron.parallel.layer_runner import LayerRunner
from pretrain_gpt import main

H, HEADS, D, S, B, VOCAB = 16, 4, 4, 8, 2, 30
CONFIG = ModelConfig(
    num_layers=2,
    hidden_size=H,
    ffn_hidden_size=24,
    num_attention_heads=HEADS,
    kv_channels=D,
    num_query_groups=HEADS,
    max_position_embeddings=S,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
SHORT = "--train-iters 3 --lr-warmup-iters 1 --micro-batch-size 1"
FLAGS = (*BASE, *NO_DROPOUT.split(), *SHORT.split())
PARTS = "norm.weight norm.bias down.weight down.bias up.weight"
NAMES = [f"adapter.{part}" for part in PARTS.split()]


class Adapter(nn.Module):
    """x [s, b, h] -> [s, b, h], of nothing but torch's own modules."""

    def __init__(self, hidden: int):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.down = nn.Linear(hidden, 8)
        self.up = nn.Linear(8, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(F.gelu(self.down(self.norm(x))))


class Undeclared(TransformerLayer):
    """A layer with an adapter at its end, which does not declare how its gradients are summed."""

    def __init__(self, config: ModelConfig, *rest: Any):
        super().__init__(config, *rest)
        self.adapter = Adapter(config.hidden_size)

    def forward(self, x: Tensor, micro) -> Tensor:
        y = super().forward(x, micro)
        return y + self.adapter(y)


class Adapted(Undeclared):
    """A layer with an adapter at its end."""

    def __init__(
        self, config: ModelConfig, seed: int, index: int, parallel: ModelParallel = ONE_RANK
    ):
        super().__init__(config, seed, index, parallel)
        declare_grad_sum(self.adapter, parallel.tp.sequence)


class Penalised(TransformerLayer):
    """A layer whose output an ordinary operation multiplies by a function of one of our weights."""

    def forward(self, x: Tensor, micro) -> Tensor:
        y = super().forward(x, micro)
        return y * self.mlp.fc1.weight.square().mean()


def build(layer: type[TransformerLayer] = Adapted, parallel: ModelParallel = ONE_RANK) -> GPTModel:
    sizes = {"vocab_size": VOCAB, "padded_vocab": VOCAB}
    with mock.patch.object(GPTModel, "layer_class", layer):
        model = GPTModel(CONFIG, **sizes, dtype=torch.float64, seed=5, parallel=parallel)
    filled(model)
    return model


def micro_batch(model: GPTModel, number: int):
    ids = torch.randint(0, VOCAB, (B, S + 1), generator=torch.Generator().manual_seed(number))
    places = torch.ones(B, S), torch.arange(S).expand(B, S), torch.arange(B)
    return model.micro_batch(ids[:, :-1], ids[:, 1:], *places, training=True)


# ---- against finite differences ------------------------------------------------------------------


def whole(model: GPTModel, passes: LayerRunner, numbers: range) -> None:
    for number in numbers:
        sums, saved = forward(model, micro_batch(model, number), passes)
        backward(model, saved, loss_gradient(sums, 1.0), passes)


def split(model: GPTModel, passes: LayerRunner, numbers: range) -> None:
    """All first halves of the backward passes, then all second ones."""
    left = []
    for number in numbers:
        sums, saved = forward(model, micro_batch(model, number), passes)
        left.append(backward_input(model, saved, loss_gradient(sums, 1.0), passes)[1])
    for each in left:
        backward_weight(each, passes)


@pytest.mark.parametrize("run_passes", [whole, split])
@pytest.mark.parametrize(
    "recompute",
    [NO_RECOMPUTE, FULL_RECOMPUTE, recomputing("layernorm", "qkv", "core_attn", "mlp")],
    ids=["plain", "recompute", "selective"],
)
@pytest.mark.parametrize("layer", [Adapted, Penalised])
def test_gradients_are_those_of_finite_differences(layer, recompute, run_passes):
    """Of all parameters together, along a random direction. Where an ordinary operation reads a
    weight of ours too, what reaches it by both ways is added up.
    """
    model, generator = build(layer), torch.Generator().manual_seed(2)
    model.choose_recompute(recompute)
    run_passes(model, LayerRunner(), range(2))
    parameters = list(model.parameters())
    start = [parameter.detach().clone() for parameter in parameters]
    along = [
        torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
        for parameter in parameters
    ]
    expected = 0.0
    for parameter, direction in zip(parameters, along):
        assert parameter.grad is None and parameter.main_grad.norm() > 0
        expected += (parameter.main_grad * direction).sum().item()

    def slope(h: float) -> float:
        values = []
        for step in (h, -h):
            with torch.no_grad():
                for parameter, begin, direction in zip(parameters, start, along):
                    parameter.copy_(begin + step * direction)
                losses = [forward(model, micro_batch(model, number))[0][0] for number in range(2)]
                values.append(sum(losses).item())
        return (values[0] - values[1]) / (2 * h)

    numeric = (4 * slope(1e-5) - slope(2e-5)) / 3  # Richardson: the h^2 error cancels
    assert numeric == pytest.approx(expected, rel=1e-7, abs=1e-7)


# ---- whole runs on every layout ------------------------------------------------------------------


def run(flags: tuple[str, ...]) -> Outcome:
    with mock.patch.object(GPTModel, "layer_class", Adapted):
        return run_case(flags)


@pytest.fixture(scope="module")
def alone() -> dict[int, Outcome]:
    """The one-process run of 2 and of 4 layers; its first gradient is what plain autograd gives."""
    outcomes = {}
    for layers in (2, 4):
        with one_thread():
            outcomes[layers] = run((*FLAGS, "--fp64", "--num-layers", str(layers)))
        names = {piece.name for piece in outcomes[layers].gradients}
        assert names >= {f"layers.{layers - 1}.{name}" for name in NAMES}
    return outcomes


FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
RUNS = [
    ("dp2 zero2", FULL),
    ("dp2 zero3 kept", FULL),
    ("dp4 zero3 shard2", ""),
    ("tp2 sp", FULL),
    ("tp2 sp dp2 zero3", ""),
    ("pp2 1f1b", FULL),
    ("pp2 interleaved v2 dp2 zero2", ""),
    ("pp2 zero-bubble dp2 zero2", FULL),
    ("pp2 zero-bubble tp2 sp dp2 zero3", ""),
    ("pp2 zero-bubble-v dp2 zero3", FULL),
    ("dp2 zero3", "--optimizer-cpu-offload --param-cpu-offload --optimizer-offload-fraction 1"),
]


@pytest.mark.parametrize(("layout", "flags"), RUNS, ids=str)
@pytest.mark.default(
    f"dp2 zero3 kept-{FULL}", "tp2 sp dp2 zero3-", f"pp2 zero-bubble dp2 zero2-{FULL}"
)
def test_every_layout_trains_them_as_one_process(gloo_world, alone, layout, flags):
    words, layers = Row(layout, "gpt").words, 4 if "pp2" in layout else 2
    flags = (*FLAGS, "--fp64", "--num-layers", str(layers), *words.flags, *flags.split())
    outcomes = gloo_world(words.ranks).run(run, flags)
    assert fp64(alone[layers], outcomes, zero=KEY_BIAS) == []


# ---- what is refused -----------------------------------------------------------------------------


class _Lost(torch.autograd.Function):
    """x times a weight, which gets nothing."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x * weight

    @staticmethod
    def backward(ctx, dy: Tensor):
        return dy * ctx.saved_tensors[0], None


def test_a_parameter_that_gets_nothing_is_named():
    class Losing(TransformerLayer):
        def __init__(self, *args):
            super().__init__(*args)
            self.scale = nn.LayerNorm(H)

        def forward(self, x: Tensor, micro) -> Tensor:
            return _Lost.apply(super().forward(x, micro), self.scale.weight)

    message = r"^layers\.1\.scale\.weight: used in the forward pass, but the backward pass gave no"
    for run_passes in (whole, split):
        with pytest.raises(RuntimeError, match=message):
            # the bias is not used: it may well have none
            run_passes(build(Losing), LayerRunner(), range(1))


def with_module(**modules: nn.Module) -> type[TransformerLayer]:
    class Layer(TransformerLayer):
        def __init__(self, *args):
            super().__init__(*args)
            for name, module in modules.items():
                self.add_module(name, module)

    return Layer


FROZEN = nn.Linear(H, H, bias=False).requires_grad_(False)
REFUSED = {
    r"layers\.0\.same\.weight: 2 layers share it": with_module(same=nn.Linear(H, H)),
    r"layers\.0\.still\.weight: requires_grad is False": with_module(still=FROZEN),
    r"layers\.0\.conv\.weight \[16, 16, 3\]: its initial values are not declared": with_module(
        conv=nn.Conv1d(H, H, 3)
    ),
    r"layers\.0\.norm\.running_mean: a buffer": with_module(norm=nn.BatchNorm1d(H)),
    r"layers\.0\.drop: Dropout\(p=0\.1": with_module(drop=nn.Dropout(0.1)),
    r"layers\.0\.other\.weight: its name in checkpoints is that of": with_module(
        other=norm("LayerNorm", H, name="layers.0.mlp_norm")
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_train_is_refused_by_name(message):
    with pytest.raises(ValueError, match=message):
        build(REFUSED[message])


def error_of(layer: type[TransformerLayer]) -> str:
    """The message about a model of such layers on two tensor-parallel ranks."""
    tp = TensorParallel(make_groups(Layout(tp=2), kv_heads=HEADS).tp)
    try:
        build(layer, ModelParallel(tp))
    except ValueError as error:
        return str(error)
    return ""


def test_under_tensor_parallelism_the_sum_must_be_declared(gloo_world):
    why = "all tensor-parallel ranks hold it, and it is not declared how its gradient is summed"
    for error in gloo_world(2).run(error_of, Undeclared):
        for layer in (0, 1):
            assert all(f"layers.{layer}.{name}: {why}" in error for name in NAMES)
        assert "input_norm" not in error
    assert gloo_world(2).run(error_of, Adapted) == ["", ""]


def test_a_sum_over_ranks_that_are_not_named_is_refused():
    with pytest.raises(AssertionError, match="up.bias: grad_sum has no effect without copies"):
        vector("up.bias", 4, grad_sum=True)


def test_a_run_with_them_goes_on_bit_for_bit(tmp_path):
    """Their weights and moments lie in the checkpoint."""
    flags = [*FLAGS, "--train-iters", "4", "--save", "RUN", "--load", "RUN"]

    def rows(folder: str, *more: str) -> dict:
        path = str(tmp_path / folder)
        assert main([path if flag == "RUN" else flag for flag in (*flags, *more)]) == 0
        return {
            row["iteration"]: (row["lm loss"], row["grad-norm"], row["params-norm"])
            for row in read_metrics(path)
        }

    with mock.patch.object(GPTModel, "layer_class", Adapted):
        expected = rows("whole")
        rows("parts", "--exit-interval", "2")
        assert rows("parts") == expected
        with open_checkpoint(tmp_path / "parts", None) as checkpoint:
            assert {f"optimizer.exp_avg.layers.1.{name}" for name in NAMES} <= set(checkpoint.names)
