"""Parameters that no pass uses, tensors without an element, and ranks whose slice is empty, at
every ZeRO stage.
"""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
from parity.compare import gather
from parity.layouts import BASE, NO_DROPOUT
from parity.worker import Outcome, run_case
from unit.model.made import linear, norm, table

from megatron.model.layer import TransformerLayer
from megatron.parallel.blocks import Block

LR, DECAY, STEPS = 1e-2, 0.1, 4
FLAGS = (
    *BASE,
    *NO_DROPOUT.split(),
    *f"""--fp64 --train-iters {STEPS} --lr {LR} --lr-warmup-iters 0 --lr-decay-style constant
    --weight-decay {DECAY} --micro-batch-size 2""".split(),
)
STAGES = ["0", "1", "2", "3"]
HIDDEN = 32


def spare_modules(layer: TransformerLayer, name: str) -> None:
    """A matrix and a vector that nothing reads."""
    layer.spare = table(24, HIDDEN, name=f"{name}.spare.weight")
    layer.spare_norm = norm("RMSNorm", 40, name=f"{name}.spare_norm")


def empty_modules(layer: TransformerLayer, name: str) -> None:
    """A matrix and a vector without an element, the matrix first of its block."""
    layer.nothing = table(0, HIDDEN, name=f"{name}.nothing.weight")
    layer.empty_norm = norm("RMSNorm", 0, name=f"{name}.empty_norm")


def spare_linear(layer: TransformerLayer, name: str) -> None:
    """A linear layer that nothing calls."""
    layer.spare = linear(HIDDEN, HIDDEN, False, name=f"{name}.spare")


def run_with(flags: tuple[str, ...], add: str) -> tuple[Outcome, list[tuple[int, int]]]:
    """A run whose layers have what `add` gives them, and of each block (elements that are real, the
    slice's elements that are real).
    """
    seen: dict[str, tuple[int, int]] = {}
    real_init, real_block = TransformerLayer.__init__, Block.__init__

    def init(self, config, seed, index, *args):
        real_init(self, config, seed, index, *args)
        globals()[add](self, f"layers.{index}")

    def block(self, *args, **kwargs):
        real_block(self, *args, **kwargs)
        end = max(entry.stop for entry in self.entries)
        seen[self.name] = end, max(0, min(end, self.own[1]) - self.own[0])

    with contextlib.ExitStack() as stack:
        if add:
            stack.enter_context(mock.patch.object(TransformerLayer, "__init__", init))
        stack.enter_context(mock.patch.object(Block, "__init__", block))
        return run_case(flags), list(seen.values())


def whole(outcomes: list[Outcome], part: str) -> dict[str, torch.Tensor]:
    faults: list[str] = []
    found = gather(outcomes, lambda outcome: getattr(outcome, part), faults)
    assert not faults
    return found


@pytest.fixture(scope="module")
def plain(gloo_world):
    """The run without spare parameters, at stage 0."""
    return [outcome for outcome, _ in gloo_world(2).run(run_with, FLAGS, "")]


def assert_the_same_run(
    outcomes: list[Outcome], plain: list[Outcome], *, but: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    """Losses, gradient norms, and all tensors of the plain run to 1e-12; the tensors beyond them,
    whose names hold one of `but`.
    """
    for a, b in zip(outcomes[0].steps, plain[0].steps, strict=True):
        assert (a.loss, a.grad_norm) == pytest.approx((b.loss, b.grad_norm), rel=1e-12)
    found, expected = whole(outcomes, "weights"), whole(plain, "weights")
    for name, x in expected.items():
        if not name.endswith("attention.k.bias"):  # its gradient is rounding noise
            assert (found[name] - x).norm() <= 1e-10 * x.norm(), name
    more = {name: x for name, x in found.items() if name not in expected}
    assert all(any(word in name for word in but) for name in more)
    return more


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("add", ["spare_modules", "spare_linear"])
def test_what_no_pass_uses_has_no_gradient_and_only_decays(gloo_world, plain, add, stage):
    """Both layers' spare matrices lose lr x decay of themselves in each step, vectors nothing; the
    rest of the run is as without them.

    Nothing clears the gradient of a linear layer's weight for its first product: without one it is
    zero all the same.
    """
    first = gloo_world(2).run(
        run_with, (*FLAGS, "--zero-stage", stage, "--train-iters", "1", "--lr", "1e-300"), add
    )
    outcomes = [
        outcome for outcome, _ in gloo_world(2).run(run_with, (*FLAGS, "--zero-stage", stage), add)
    ]
    more = assert_the_same_run(outcomes, plain, but=("spare",))
    assert len(more) == {"spare_modules": 4, "spare_linear": 2}[add]
    begun = whole([outcome for outcome, _ in first], "weights")
    for name, x in more.items():
        expected = begun[name] * (1 - LR * DECAY) ** STEPS if x.dim() > 1 else torch.ones_like(x)
        torch.testing.assert_close(x, expected, rtol=1e-13, atol=0)
    gradients = whole(outcomes, "gradients")
    assert not any(gradients[name].any() for name in more)


@pytest.mark.parametrize("stage", STAGES)
def test_tensors_without_an_element_change_nothing(gloo_world, plain, stage):
    outcomes = [
        outcome
        for outcome, _ in gloo_world(2).run(
            run_with, (*FLAGS, "--zero-stage", stage), "empty_modules"
        )
    ]
    assert all(
        x.numel() == 0
        for x in assert_the_same_run(outcomes, plain, but=("nothing", "empty")).values()
    )


@pytest.mark.parametrize("stage", STAGES[1:])
def test_ranks_with_an_empty_slice(gloo_world, stage):
    """Eight ranks, layers so small that the last slices are padding alone."""
    small = (*FLAGS, "--hidden-size", "8", "--num-attention-heads", "2", "--micro-batch-size", "1")
    expected = [outcome for outcome, _ in gloo_world(8).run(run_with, small, "")]
    found = gloo_world(8).run(run_with, (*small, "--zero-stage", stage), "")
    assert any(end and not mine for _, sizes in found for end, mine in sizes), "no slice is empty"
    assert not assert_the_same_run([outcome for outcome, _ in found], expected, but=())
