"""Update rules of whole matrices, and multipliers of single tensors, are right in every layout."""

from __future__ import annotations

import contextlib
import dataclasses
from unittest import mock

import pytest
import torch
from parity.compare import fp64
from parity.layouts import BASE, KEY_BIAS, NO_DROPOUT, Row
from parity.worker import Outcome, Piece, one_thread, run_case
from torch import Tensor

from megatron.model.gpt import GPTModel
from megatron.model.mlp import MLP
from megatron.model.spec import Multipliers, ParameterSpec
from megatron.optimizer.matrices import MatrixOptimizer
from megatron.training import pretrain

STEPS, LR = 3, 1e-2
OWN = f"""--fp64 --train-iters {STEPS} --lr-warmup-iters 0 --lr-decay-style constant
--micro-batch-size 1 --weight-decay 0.1 --clip-grad 0"""
FLAGS = (*BASE, *NO_DROPOUT.split(), *OWN.split())
GROUPED = "--group-query-attention --num-query-groups 2 --swiglu --disable-bias-linear"


class Balanced:
    """A step of Sinkhorn's balancing: each row over its norm, then each column over its.

    Every element of the direction depends on all rows and all columns, so a part that is missing,
    or there twice, changes all of it.
    """

    momentum = 0.9

    def direction(self, momentum: Tensor) -> Tensor:
        rows = momentum / momentum.norm(dim=1, keepdim=True)
        return rows / rows.norm(dim=0, keepdim=True)


@contextlib.contextmanager
def balanced():
    """Runs whose matrices are updated by Balanced."""

    class WithRule(MatrixOptimizer):
        def __init__(self, *args):
            super().__init__(*args, matrix_rule=Balanced())

    with mock.patch.object(pretrain, "Optimizer", WithRule):
        yield


def changed(spec: ParameterSpec, multipliers: Multipliers) -> ParameterSpec:
    tensors = (dataclasses.replace(tensor, multipliers=multipliers) for tensor in spec.tensors)
    return dataclasses.replace(spec, tensors=tuple(tensors))


@contextlib.contextmanager
def multiplied():
    """Runs in which fc1 learns at half the rate with twice the decay, and norms have another
    epsilon.
    """

    init = GPTModel.__init__

    def built(self: GPTModel, *args, **kwargs) -> None:
        init(self, *args, **kwargs)
        for name, parameter in self.named_parameters():
            if name.endswith("mlp.fc1.weight"):
                parameter.spec = changed(parameter.spec, Multipliers(lr=0.5, weight_decay=2.0))
            elif "norm" in name:
                parameter.spec = changed(parameter.spec, Multipliers(eps=1e6))

    with mock.patch.object(GPTModel, "__init__", built):
        yield


@contextlib.contextmanager
def balanced_apart():
    """Runs whose matrices are updated by Balanced, fc1's at the rate of --decoupled-lr and with
    twice the decay.
    """
    init = MLP.__init__

    def built(self: MLP, *args, **kwargs) -> None:
        init(self, *args, **kwargs)
        apart = Multipliers(decoupled_lr=True, weight_decay=2.0)
        self.fc1.weight.spec = changed(self.fc1.weight.spec, apart)

    with balanced(), mock.patch.object(MLP, "__init__", built):
        yield


CHANGES = {"matrices": balanced, "multipliers": multiplied}
DEFINED = {**CHANGES, "matrices at two rates": balanced_apart}


def run(change: str, flags: tuple[str, ...]) -> Outcome:
    with CHANGES[change]():
        return run_case(flags)


@pytest.fixture(scope="module")
def alone():
    """alone(change, flags): the run in one process, made once."""
    made: dict[tuple, Outcome] = {}

    def outcome(change: str, flags: tuple[str, ...]) -> Outcome:
        if (change, flags) not in made:
            made[change, flags] = run(change, flags)
        return made[change, flags]

    with one_thread():
        yield outcome


LAYOUTS = """dp2, dp2 zero1, dp4 zero2, dp2 zero3, dp4 zero3 shard2, tp2, tp4 sp, tp2 sp dp2 zero3,
pp2 1f1b dp2 zero2, pp2 zero-bubble tp2 sp""".replace("\n", " ").split(", ")


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.default("tp2 sp dp2 zero3-matrices")
def test_every_layout_updates_as_one_process(gloo_world, alone, layout, change):
    """tp4 has more ranks than key/value heads: two ranks hold the same part of a matrix."""
    words, layers = Row(layout, "gpt").words, 4 if "pp2" in layout else 2
    flags = (*FLAGS, *GROUPED.split(), "--num-layers", str(layers))
    outcomes = gloo_world(words.ranks).run(run, change, (*flags, *words.flags))
    assert fp64(alone(change, flags), outcomes, zero=KEY_BIAS) == []


def test_in_bf16_the_weights_are_the_rounded_masters(gloo_world):
    """run_case compares them at the end."""
    words = Row("dp2 zero1", "gpt").words
    flags = [flag for flag in FLAGS if flag != "--fp64"]
    gloo_world(2).run(run, "matrices", (*flags, "--bf16", *words.flags))


# ---- against the definitions, one step of one process ------------------------------------------


def steps_of(change: str | None, steps: int, *more: str) -> dict[str, Tensor]:
    """Weights after `steps` steps."""
    flags = (*FLAGS, "--train-iters", str(steps), *more)
    with DEFINED[change]() if change else contextlib.nullcontext():
        return by_name(run_case(flags).weights)


def by_name(pieces: list[Piece]) -> dict[str, Tensor]:
    assert all(piece.values.shape == piece.shape for piece in pieces)
    return {piece.name: piece.values for piece in pieces}


def initial(flags: tuple[str, ...] = FLAGS) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(weights before the first step, its gradients). Adam's first step is lr g / (|g| + eps), and
    weight decay is decoupled, so weights before it follow from those after it.
    """
    outcome = run_case((*flags, "--train-iters", "1"))
    gradients, after = by_name(outcome.gradients), by_name(outcome.weights)
    before = {}
    for name, weight in after.items():
        gradient = gradients[name]
        change = LR * gradient / (gradient.abs() + 1e-8)
        decay = 0.1 if weight.dim() > 1 else 0.0
        before[name] = (weight + change) / (1 - LR * decay)
    return before, gradients


def test_a_step_with_multipliers_is_its_definition(one_thread):
    before, gradients = initial()
    after = steps_of("multipliers", 1)
    plain = steps_of(None, 1)
    for name, weight in after.items():
        gradient, lr, decay, eps = gradients[name], LR, 0.1, 1e-8
        if ".mlp.up.weight" in name or ".mlp.fc1.weight" in name:
            lr, decay = 0.5 * LR, 0.2
        elif "norm" in name:
            decay, eps = 0.0, 1e-2
        else:
            assert torch.equal(weight, plain[name]), name
            continue
        expected = before[name] * (1 - lr * decay) - lr * gradient / (gradient.abs() + eps)
        assert (weight - expected).norm() <= 1e-10 * expected.norm(), name
        assert not torch.equal(weight, plain[name])


def test_a_matrix_takes_the_rate_and_the_decay_that_it_declares(one_thread):
    before, gradients = initial()
    after = steps_of("matrices at two rates", 1, "--decoupled-lr", "3e-2")
    for name, weight in after.items():
        if weight.dim() == 2 and "embedding" not in name:
            lr, decay = (3e-2, 0.2) if ".mlp.up.weight" in name else (LR, 0.1)
            direction = Balanced().direction(gradients[name]) + decay * before[name]
            expected = before[name] - lr * direction
            assert (weight - expected).norm() <= 1e-10 * expected.norm(), name


def test_state_on_the_host_is_refused():
    with pytest.raises(ValueError, match="on the device alone; do without --optimizer-cpu-offload"):
        MatrixOptimizer([mock.Mock(on_host=True)], matrix_rule=Balanced())
