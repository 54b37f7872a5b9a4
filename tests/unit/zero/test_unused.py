"""Parameters that no pass uses, and tensors without an element, at every ZeRO stage."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from parity.compare import gather
from parity.layouts import BASE, NO_DROPOUT
from parity.worker import Outcome, run_case
from unit.model.made import linear, norm, table

from megatron.model.layer import TransformerLayer

LR, DECAY, STEPS = 1e-2, 0.1, 4
FLAGS = (
    *BASE,
    *NO_DROPOUT.split(),
    *f"""--fp64 --train-iters {STEPS} --lr {LR} --lr-warmup-iters 0 --lr-decay-style constant
    --weight-decay {DECAY} --micro-batch-size 2""".split(),
)
HIDDEN = 32


def more_modules(layer: TransformerLayer, name: str) -> None:
    """A matrix, a vector and a linear layer that nothing reads; a matrix and a vector without an
    element, the matrix first of its block.
    """
    layer.nothing = table(0, HIDDEN, name=f"{name}.nothing.weight")
    layer.empty_norm = norm("RMSNorm", 0, name=f"{name}.empty_norm")
    layer.spare = table(24, HIDDEN, name=f"{name}.spare.weight")
    layer.spare_norm = norm("RMSNorm", 40, name=f"{name}.spare_norm")
    layer.spare_linear = linear(HIDDEN, HIDDEN, False, name=f"{name}.spare_linear")


def whole(outcomes: list[Outcome], part: str = "weights") -> dict[str, torch.Tensor]:
    """Logical tensors out of all ranks' slices, of which each element must have one owner."""
    faults: list[str] = []
    tensors = gather(outcomes, part, faults)
    assert not faults
    return tensors


def run_with_more(flags: tuple[str, ...]) -> Outcome:
    """A run whose layers have these modules, too."""
    real_init = TransformerLayer.__init__

    def init(self, config, seed, index, *args):
        real_init(self, config, seed, index, *args)
        more_modules(self, f"layers.{index}")

    with mock.patch.object(TransformerLayer, "__init__", init):
        return run_case(flags)


@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_what_no_pass_uses_has_no_gradient_and_only_decays(gloo_world, stage):
    """Spare matrices of both layers lose lr x decay of themselves in each step, vectors nothing;
    the rest of the run is as without them.

    Nothing clears the gradient of a linear layer's weight for its first product: without one it is
    zero all the same.
    """
    world, flags = gloo_world(2), (*FLAGS, "--zero-stage", stage)
    plain = world.run(run_case, FLAGS)
    first = world.run(run_with_more, (*flags, "--train-iters", "1", "--lr", "1e-300"))
    outcomes = world.run(run_with_more, flags)
    for a, b in zip(outcomes[0].steps, plain[0].steps, strict=True):
        assert (a.loss, a.grad_norm) == pytest.approx((b.loss, b.grad_norm), rel=1e-12)
    found, expected, begun = (whole(each) for each in (outcomes, plain, first))
    for name, x in expected.items():
        if not name.endswith("attention.k.bias"):  # its gradient is rounding noise
            assert (found[name] - x).norm() <= 1e-10 * x.norm(), name

    more = found.keys() - expected.keys()
    assert len(more) == 10 and sum(found[name].numel() == 0 for name in more) == 4
    gradients = whole(outcomes, "gradients")
    for name in more:
        x = found[name]
        decayed = begun[name] * (1 - LR * DECAY) ** STEPS if x.dim() > 1 else torch.ones_like(x)
        torch.testing.assert_close(x, decayed, rtol=1e-13, atol=0)
        assert not gradients[name].any(), name
