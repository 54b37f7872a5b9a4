"""The fused step against torch.optim's loop in float64, and what it must leave alone."""

import pytest
import torch
from checks import CANARY, error
from megatron.kernels.adamw import adamw_, adamw_reference
from megatron.kernels.configurations import Row
from torch.optim.adamw import adamw

from megatron.config.groups import Config, ModelConfig, OptimizerConfig
from megatron.model.gpt import GPTModel
from megatron.optimizer.lr_schedule import LearningRates
from megatron.optimizer.optimizer import Optimizer
from megatron.optimizer.update import UpdateRule
from megatron.parallel.blocks import build_blocks

SETTINGS = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
FP32, BF16 = torch.float32, torch.bfloat16
MARGIN = 64


def scalar(value, device):
    return torch.tensor(float(value), device=device)


def padded(x, dtype):
    """A copy of x between canaries, and the whole buffer."""
    whole = torch.full((x.numel() + 2 * MARGIN,), CANARY, device=x.device, dtype=dtype)
    whole[MARGIN:-MARGIN] = x
    return whole[MARGIN:-MARGIN], whole


def draw(size, device, grad=FP32, moments=FP32):
    generator = torch.Generator().manual_seed(size)
    scale = 10.0 ** torch.randint(-6, 2, (size,), generator=generator)  # gradients of all sizes
    p, g, m, v = (
        torch.randn(size, generator=generator).to(device) * s
        for s in (1, scale.to(device), 0.1, 0.1)
    )
    return p, g.to(grad), m.to(moments), v.square().to(moments)


def exact(p, g, m, v, step, coefficient, settings):
    """torch.optim's own loop in float64."""
    p, g, m, v = (x.double().clone() for x in (p, g, m, v))
    adamw(
        [p],
        [g * coefficient.double()],
        [m],
        [v],
        [],
        [step.double().clone()],
        foreach=False,
        amsgrad=False,
        maximize=False,
        **settings,
    )
    return p, m, v


@pytest.mark.parametrize("size", [1, 63, 1024, 3 * 1024 + 5])
@pytest.mark.parametrize(
    "grad, moments, out",
    [(FP32, FP32, BF16), (BF16, FP32, BF16), (FP32, BF16, torch.float16), (FP32, FP32, None)],
)
@pytest.mark.parametrize("step", [0, 1, 1000])
def test_one_step(device, size, grad, moments, out, step):
    made = draw(size, device, grad, moments)
    step, coefficient, found_inf = scalar(step, device), scalar(0.37, device), scalar(0, device)
    expected = exact(*made, step, coefficient, SETTINGS)
    buffers = [padded(x, x.dtype) for x in made] + (
        [padded(torch.zeros(size, device=device), out)] if out else []
    )
    p, g, m, v, *rounded = (inner for inner, _ in buffers)
    adamw_(p, g, m, v, *(rounded or [None]), step, coefficient, found_inf, **SETTINGS)
    ulp = torch.finfo(FP32).eps
    # m and v: three roundings; the step (some lr times at most 10): ten of them, and the weight
    # itself is rounded twice.
    for got, want, bound in (
        (m, expected[1], 0),
        (v, expected[2], 0),
        (p, expected[0], 10 * ulp * (expected[0] - made[0].double()).abs()),
    ):
        bound = bound + 2 * ulp * (
            want.abs()
            if got is not m
            else want.abs() + 2 * (made[2].double().abs() + made[1].double().abs())
        )
        if got.dtype == BF16:
            bound = bound + 2**-8 * want.abs()
        assert ((got.double() - want).abs() <= bound).all()
    assert torch.equal(g, made[1]) and (not rounded or torch.equal(rounded[0], p.to(out)))
    for inner, whole in buffers:
        edge = torch.cat([whole[:MARGIN], whole[-MARGIN:]])
        assert (edge == torch.full((), CANARY, dtype=whole.dtype)).all() and len(inner) == size


def test_many_steps_and_more_blocks_than_programs(device, monkeypatch):
    """Two programs take five blocks in turn; thirty steps in fp32 stay at fp32's rounding."""
    import megatron.kernels.adamw as module

    monkeypatch.setattr(
        module,
        "find",
        lambda *_: Row("adamw", 90, {}, {"block": 256, "num_warps": 4, "programs": 2}),
    )
    settings = {**SETTINGS, "beta2": 0.999}
    p, g, m, v = draw(1100, device)
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    wide, moments = p.double(), [m.double(), v.double()]
    for step in range(30):
        g = g.roll(1)
        adamw_(
            p,
            g,
            m,
            v,
            None,
            scalar(step, device),
            scalar(0.5, device),
            scalar(0, device),
            **settings,
        )
        wide, *moments = exact(
            wide, g, *moments, scalar(step, device), scalar(0.5, device), settings
        )
    assert error(p, wide) < 30 * torch.finfo(FP32).eps
    assert error(m, moments[0]) < 4e-6 and error(v, moments[1]) < 4e-6


def test_the_definition_is_torch_optims(device):
    made = [x.double() for x in draw(50, device)]
    step, coefficient = scalar(3, device), scalar(0.37, device)
    got = adamw_reference(*made, step, coefficient, scalar(0, device), **SETTINGS)
    torch.testing.assert_close(
        got, exact(*made, step, coefficient, SETTINGS), rtol=1e-13, atol=1e-15
    )
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            adamw_reference(*made, step, coefficient, scalar(1, device), **SETTINGS),
            (made[0], *made[2:]),
        )
    )


def test_found_inf_leaves_everything(device):
    p, g, m, v = draw(100, device)
    g[3], out = torch.inf, torch.ones(100, dtype=BF16, device=device)
    kept = [x.clone() for x in (p, m, v, out)]
    adamw_(p, g, m, v, out, scalar(0, device), scalar(1, device), scalar(1, device), **SETTINGS)
    assert all(torch.equal(a, b) for a, b in zip((p, m, v, out), kept, strict=True))
    adamw_(p, g, m, v, out, scalar(0, device), scalar(1, device), scalar(0, device), **SETTINGS)
    assert p[3].isnan() and p[:3].isfinite().all() and p[4:].isfinite().all()


def test_no_momentum_at_all(device):
    """beta 0: the first moment is the gradient, at any step."""
    p, g, m, v = draw(64, device)
    settings = {**SETTINGS, "beta1": 0.0, "beta2": 0.0}
    expected = exact(p, g, m, v, scalar(5, device), scalar(1, device), settings)
    adamw_(p, g, m, v, None, scalar(5, device), scalar(1, device), scalar(0, device), **settings)
    assert torch.equal(m, g) and error(p, expected[0]) < 1e-6


def test_the_optimizers_rule_takes_it(device):
    """The same as torch's fused kernel makes of bf16 moments and rounded weights, which the rule
    computes in pieces.
    """
    config = OptimizerConfig(lr=1e-3, adam_implementation="triton", exp_avg_dtype="bf16")
    assert UpdateRule(config, "triton").chosen.skips_on_device
    results = {}
    for implementation in ("triton", "torch-fused"):
        p, g, _, v = draw(640, device)
        states, out = (
            {"exp_avg": torch.zeros(640, dtype=BF16, device=device), "exp_avg_sq": v},
            torch.zeros(640, dtype=BF16, device=device),
        )
        UpdateRule(config, implementation).apply(
            p,
            g,
            states,
            scalar(4, device),
            lr=1e-3,
            weight_decay=0.1,
            coefficient=scalar(0.5, device),
            found_inf=scalar(0, device),
            out=out,
        )
        results[implementation] = p, states["exp_avg"], v, out
    for ours, torchs in zip(results["triton"], results["torch-fused"], strict=True):
        torch.testing.assert_close(
            ours, torchs, rtol=2**-7 if ours.dtype == BF16 else 5e-7, atol=1e-9
        )


def test_a_whole_optimizer(device):
    """Three steps of a bf16 model with clipping, then one that is skipped: what torch's fused AdamW
    makes, norms to float64's rounding.
    """
    ends = {}
    for implementation in ("triton", "torch-fused"):
        config = Config(
            model=ModelConfig(
                num_layers=1,
                hidden_size=16,
                ffn_hidden_size=24,
                num_attention_heads=2,
                kv_channels=8,
                num_query_groups=2,
                max_position_embeddings=8,
            ),
            optimizer=OptimizerConfig(
                adam_implementation=implementation,
                clip_grad=1.0,
                grad_norm_backend="triton" if implementation == "triton" else "torch",
            ),
        )
        model = GPTModel(config.model, vocab_size=20, padded_vocab=20, dtype=BF16, seed=1)
        optimizer, norms = Optimizer(build_blocks(model, device), config), []
        optimizer.initialise()
        for step in range(4):
            for block in optimizer.blocks:
                block.open()
                block.grad.copy_(
                    torch.randn(block.size, generator=torch.Generator().manual_seed(step))
                )
            if step == 3:
                optimizer.blocks[1].grad[5] = torch.nan
            outcome = optimizer.step(
                rates=LearningRates(1e-2, 1e-2),
                weight_decay=0.1,
                grad_sq_sum=optimizer.grad_sq_sum(),
                grad_scale=0.5,
            )
            assert outcome.skipped == (step == 3)
            norms.append(outcome.grad_norm)
        assert (
            optimizer.steps == 3
            and norms[3].isnan()
            and all(
                torch.equal(block.weight, block.master.bfloat16()) for block in optimizer.blocks
            )
        )
        ends[implementation] = norms[:3], torch.cat([block.master for block in optimizer.blocks])
    for ours, torchs in zip(*(norms for norms, _ in ends.values()), strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-13, atol=0)
    torch.testing.assert_close(ends["triton"][1], ends["torch-fused"][1], rtol=1e-6, atol=1e-7)


def test_op_is_what_it_says(device):
    p, g, m, v = draw(40, device)
    for out in (torch.zeros(40, dtype=BF16, device=device), None):
        torch.library.opcheck(
            adamw_.overload,
            (
                p,
                g,
                m,
                v,
                out,
                scalar(0, device),
                scalar(1, device),
                scalar(0, device),
                1e-3,
                0.9,
                0.95,
                1e-8,
                0.1,
            ),
        )
