"""Update rules of whole matrices are right in every layout."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from unittest import mock

import pytest
from parity.compare import fp64
from parity.layouts import BASE, FEATURES, KEY_BIAS, NO_DROPOUT, Row
from parity.worker import Outcome, Piece, one_thread, run_case
from torch import Tensor

from megatron.model.mlp import MLP
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


@contextlib.contextmanager
def balanced_apart():
    """Runs whose matrices are updated by Balanced, fc1's at the rate of --decoupled-lr."""
    init = MLP.__init__

    def built(self: MLP, *args, **kwargs) -> None:
        init(self, *args, **kwargs)
        spec = self.fc1.weight.spec
        apart = (dataclasses.replace(tensor, decoupled_lr=True) for tensor in spec.tensors)
        self.fc1.weight.spec = dataclasses.replace(spec, tensors=tuple(apart))

    with balanced(), mock.patch.object(MLP, "__init__", built):
        yield


def run(flags: tuple[str, ...]) -> Outcome:
    with balanced_apart():
        return run_case(flags)


@pytest.fixture(scope="module")
def alone():
    """alone(flags): the run in one process, made once."""
    with one_thread():
        yield functools.cache(run)


LAYOUTS = """dp2, dp2 zero1, dp4 zero2, dp2 zero3, dp4 zero3 shard2, tp2, tp4 sp, tp2 sp dp2 zero3,
pp2 1f1b dp2 zero2, pp2 zero-bubble tp2 sp""".replace("\n", " ").split(", ")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.default("tp2 sp dp2 zero3")
def test_every_layout_updates_as_one_process(gloo_world, alone, layout):
    """Matrices of one block have two rates. tp4 has more ranks than key/value heads: two ranks hold
    the same part of a matrix.
    """
    words, layers = Row(layout, "gpt").words, 4 if "pp2" in layout else 2
    flags = (*FLAGS, *GROUPED.split(), "--decoupled-lr", "3e-2", "--num-layers", str(layers))
    outcomes = gloo_world(words.ranks).run(run, (*flags, *words.flags))
    assert fp64(alone(flags), outcomes, zero=KEY_BIAS) == []


@pytest.mark.parametrize(
    "case, layout",
    [("mla", "tp2 sp"), ("moe", "tp2 sp"), ("moe", "tp2 sp dp2 ep2 zero1"), ("sgd", "dp2 zero2")],
)
def test_models_and_momenta_of_other_kinds(gloo_world, alone, case, layout):
    """Down-projections and routers are whole on every tensor-parallel rank; experts are shared by
    other ranks than the rest; the momentum of SGD is a state of another name.
    """
    words = Row(layout, "gpt").words
    flags = (*FLAGS, *FEATURES[case].flags.split())
    outcomes = gloo_world(words.ranks).run(run, (*flags, *words.flags))
    assert fp64(alone(flags), outcomes, zero=KEY_BIAS) == []


def test_in_bf16_the_weights_are_the_rounded_masters(gloo_world):
    """run_case compares them at the end."""
    words = Row("dp2 zero1", "gpt").words
    flags = [flag for flag in FLAGS if flag != "--fp64"]
    gloo_world(2).run(run, (*flags, "--bf16", *words.flags))


# ---- against the definitions, one step of one process ------------------------------------------


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


def test_a_matrix_takes_the_rate_that_it_declares(one_thread):
    before, gradients = initial()
    with balanced_apart():
        after = by_name(run_case((*FLAGS, "--train-iters", "1", "--decoupled-lr", "3e-2")).weights)
    for name, weight in after.items():
        if weight.dim() == 2 and "embedding" not in name:
            lr = 3e-2 if ".mlp.up.weight" in name else LR
            direction = Balanced().direction(gradients[name]) + 0.1 * before[name]
            expected = before[name] - lr * direction
            assert (weight - expected).norm() <= 1e-10 * expected.norm(), name


def test_state_on_the_host_is_refused():
    with pytest.raises(ValueError, match="on the device alone; do without --optimizer-cpu-offload"):
        MatrixOptimizer([mock.Mock(on_host=True)], matrix_rule=Balanced())
