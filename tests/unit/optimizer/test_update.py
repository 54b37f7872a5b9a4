"""The update rule on flat segments: the same bits as one call on whole buffers, narrow gradients
and moments, rounded weights, scratch.
"""

import itertools
import math

import pytest
import torch
from torch.optim.adamw import adamw

from megatron.config.groups import OptimizerConfig
from megatron.optimizer import update
from megatron.optimizer.update import PIECE, StepScalars, UpdateRule
from megatron.parallel.blocks import ALIGNMENT

BF16, FP32 = torch.bfloat16, torch.float32
DTYPES = list(itertools.product((FP32, BF16), repeat=3))  # of gradient, exp_avg, exp_avg_sq
LR, DECAY, COEFFICIENT = 1e-2, 0.1, 0.7
NAMES = {FP32: "fp32", BF16: "bf16"}


def rule_of(exp_avg=FP32, exp_avg_sq=FP32, implementation="torch-fused", **settings):
    dtypes = {"exp_avg_dtype": NAMES[exp_avg], "exp_avg_sq_dtype": NAMES[exp_avg_sq]}
    return UpdateRule(OptimizerConfig(**dtypes, **settings), implementation)


def uniform(size, low, high, seed, dtype=FP32):
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(size).uniform_(low, high, generator=generator).to(dtype)


def start(size, exp_avg=FP32, exp_avg_sq=FP32):
    """Master weights and moments in the middle of a training."""
    return uniform(size, -1, 1, 1), {
        "exp_avg": uniform(size, -1, 1, 2, exp_avg),
        "exp_avg_sq": uniform(size, 0.01, 1, 3, exp_avg_sq),
    }


def gradient(size, step, dtype=FP32):
    return uniform(size, -1, 1, 10 + step, dtype)


def apply(rule, master, grad, states, step, out=None, found_inf=0.0, coefficient=COEFFICIENT):
    scale = torch.tensor(coefficient, dtype=master.dtype)
    at = StepScalars(
        lr=LR,
        weight_decay=DECAY,
        eps=rule.config.adam_eps,
        steps_before=torch.tensor(float(step)),
        step=torch.tensor(step + 1.0),
        coefficient=scale,
        divisor=1 / scale,
        found_inf=torch.tensor(found_inf),
    )
    rule.apply(master, grad, states, at, out)


@pytest.mark.parametrize(
    "size, piece", [(1000, 192), (64, 64), (5, 64), (0, 64), (PIECE + 12345, PIECE)]
)
def test_fp32_bits_are_those_of_one_call_on_the_whole_buffer(size, piece, monkeypatch):
    monkeypatch.setattr(update, "PIECE", piece)
    rule, (master, states) = rule_of(), start(size)
    ours = master, *states.values()
    theirs, exp_avg, exp_avg_sq = plain = [each.clone() for each in ours]
    out = torch.empty(size, dtype=BF16)
    for step in range(3):
        apply(rule, master, gradient(size, step), states, step, out)
        adamw(
            [theirs],
            [gradient(size, step)],
            [exp_avg],
            [exp_avg_sq],
            [],
            [torch.tensor(float(step))],
            fused=True,
            amsgrad=False,
            beta1=rule.config.adam_beta1,
            beta2=rule.config.adam_beta2,
            lr=LR,
            weight_decay=DECAY,
            eps=rule.config.adam_eps,
            maximize=False,
            grad_scale=1 / torch.tensor(COEFFICIENT),
            found_inf=torch.tensor(0.0),
        )
        assert all(map(torch.equal, ours, plain))
        assert torch.equal(out, theirs.to(BF16))


@pytest.mark.parametrize("grad, exp_avg, exp_avg_sq", DTYPES)
def test_bits_do_not_depend_on_cuts_at_the_alignment(grad, exp_avg, exp_avg_sq, monkeypatch):
    """Shards of 64, 576 and 393 elements, in pieces of 128, have the bits of one buffer in one
    piece.
    """
    rule, size = rule_of(exp_avg, exp_avg_sq), 1033

    def run(piece, cuts):
        monkeypatch.setattr(update, "PIECE", piece)
        master, states = start(size, exp_avg, exp_avg_sq)
        out = torch.empty(size, dtype=torch.float16)
        for step in range(3):
            gradients = gradient(size, step, grad)
            for part in (slice(a, b) for a, b in itertools.pairwise(cuts)):
                own = {name: state[part] for name, state in states.items()}
                apply(rule, master[part], gradients[part], own, step, out[part])
        return master, out, *states.values()

    assert all(map(torch.equal, run(PIECE, [0, size]), run(2 * ALIGNMENT, [0, 64, 640, size])))


@pytest.mark.parametrize("grad, exp_avg, exp_avg_sq", DTYPES)
def test_a_step_equals_the_formula_in_float64(grad, exp_avg, exp_avg_sq):
    """Loshchilov and Hutter 2019, algorithm 2, from the values as stored. u = 2^-24 is the error of
    one fp32 operation, h = 2^-8 of a rounding to bf16. The scaled gradient takes 2 operations (3 u
    with its coefficient), a moment 4 more on each of its terms, the weight's decay 3, its update 10
    and those of the moments: all of them on magnitudes, so that cancellation is counted.
    """
    u, size = 2.0**-24, 640
    half = {FP32: 0.0, BF16: 2.0**-8}
    rule = rule_of(exp_avg, exp_avg_sq)
    beta1, beta2, eps = rule.config.adam_beta1, rule.config.adam_beta2, rule.config.adam_eps
    master, states = start(size, exp_avg, exp_avg_sq)
    for step in range(5):
        g = gradient(size, step, grad)
        scaled, w = g.double() * COEFFICIENT, master.double()
        m, v = (state.double() for state in states.values())
        magnitude = beta1 * m.abs() + (1 - beta1) * scaled.abs()
        m, v = beta1 * m + (1 - beta1) * scaled, beta2 * v + (1 - beta2) * scaled**2
        denominator = (v / (1 - beta2 ** (step + 1))).sqrt() + eps
        expected = w * (1 - LR * DECAY) - LR * m / (1 - beta1 ** (step + 1)) / denominator
        apply(rule, master, g, states, step)
        bound = half[exp_avg] * m.abs() + (1 + half[exp_avg]) * 7 * u * magnitude
        assert (states["exp_avg"] - m).abs().le(bound).all()
        assert (states["exp_avg_sq"] - v).abs().le((half[exp_avg_sq] + 11 * u) * v).all()
        bound = u * (4 * w.abs() + 24 * LR * magnitude / (1 - beta1 ** (step + 1)) / denominator)
        assert (master - expected).abs().le(bound).all()
        # the bound would see a wrong coefficient, decay or beta
        assert (master - w).abs().median() > 1000 * bound.median()


@pytest.mark.parametrize("exp_avg, exp_avg_sq", [(FP32, FP32), (BF16, BF16)])
@pytest.mark.parametrize("poison", [math.inf, math.nan])
def test_found_inf_changes_nothing_and_still_writes_the_rounded_weights(
    poison, exp_avg, exp_avg_sq
):
    rule, size = rule_of(exp_avg, exp_avg_sq), 200
    assert rule.implementation.skips_on_device
    assert not rule_of(implementation="apex").implementation.skips_on_device
    master, states = start(size, exp_avg, exp_avg_sq)
    before, out = [x.clone() for x in (master, *states.values())], torch.zeros(size, dtype=BF16)
    grad = gradient(size, 0)
    grad[70] = poison
    apply(rule, master, grad, states, 0, out, found_inf=1.0, coefficient=math.nan)
    assert all(map(torch.equal, before, (master, *states.values())))
    assert torch.equal(out, master.to(BF16))


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_sgd_takes_narrow_gradients_and_writes_rounded_weights(dtype, monkeypatch):
    monkeypatch.setattr(update, "PIECE", 128)
    size, rule = 1000, rule_of(optimizer="sgd", sgd_momentum=0.8)
    master, momentum = uniform(size, -1, 1, 1), uniform(size, -1, 1, 2)
    out = torch.empty(size, dtype=BF16)
    assert rule.state_names == ("momentum_buffer",)
    assert rule.state_dtype("momentum_buffer", FP32) == FP32
    for step in range(3):
        grad = gradient(size, step, dtype)
        change = 0.8 * momentum.double() + COEFFICIENT * grad.double() + DECAY * master.double()
        expected = master.double() - LR * change
        apply(rule, master, grad, {"momentum_buffer": momentum}, step, out)
        # weights below 2, changes below 5 times 0.01
        torch.testing.assert_close(master.double(), expected, rtol=0, atol=4 * 2.0**-24)
        assert torch.equal(out, master.to(BF16))
