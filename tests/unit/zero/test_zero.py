"""ZeRO's numbers: real runs at every stage against the same run at stage 0. Bit for bit where sums
are taken in the same order, else to a bound.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from megatron.tools._study.equal_work import UNIT_ROUNDOFF
from parity.compare import FP64_GATE, gather
from parity.layouts import BASE, KEY_BIAS, LLAMA, NO_DROPOUT, Row
from parity.worker import PATCHES, Outcome, Piece, pieces, run_case

from megatron.config.arguments import parse_arguments
from megatron.config.validate import resolve
from megatron.model.gpt import GPTModel
from megatron.optimizer.optimizer import Optimizer
from megatron.optimizer.update import UpdateRule
from megatron.parallel.blocks import Plan, plan_blocks
from megatron.training import pretrain

STEPS = 4
STAGES = "zero1", "zero2", "zero3"
SMALL = (*BASE, "--train-iters", str(STEPS))


@pytest.fixture
def train(gloo_world):
    """train(layout, flags, patches): every rank's outcome of STEPS steps."""

    def run(layout: str, flags: str = "", patches: tuple[str, ...] = ()) -> list[Outcome]:
        words = Row(layout, "gpt").words
        return gloo_world(words.ranks).run(
            run_case, (*SMALL, *words.flags, *flags.split()), patches
        )

    return run


def whole(outcomes: list[Outcome], part: str = "weights") -> dict[str, torch.Tensor]:
    """Logical tensors out of all ranks' slices, of which each element must have one owner."""
    faults: list[str] = []
    tensors = gather(outcomes, lambda outcome: getattr(outcome, part), faults)
    assert not faults
    return tensors


def assert_same_bits(outcomes: list[Outcome], plain: list[Outcome], *, norms: bool = True) -> None:
    """Losses, last evaluations, skipped steps, gradients of step 1, final weights. The squares of
    slices are summed in another order than those of a whole: `norms` False asks of gradient norms
    only that they agree to 1e-14.
    """
    for a, b in zip(outcomes[0].steps, plain[0].steps, strict=True):
        assert repr((a.loss, a.skipped, a.loss_scale)) == repr((b.loss, b.skipped, b.loss_scale))
        assert (
            repr(a.grad_norm) == repr(b.grad_norm)
            or not norms
            and math.isclose(a.grad_norm, b.grad_norm, rel_tol=1e-14)
        )
    # of the validation and the test set
    assert repr(outcomes[0].evaluations[-2:]) == repr(plain[0].evaluations[-2:])
    for part in ("gradients", "weights"):
        found, expected = whole(outcomes, part), whole(plain, part)
        assert found.keys() == expected.keys()
        for name, x in expected.items():
            assert torch.equal(found[name], x), f"{part} of {name}"


# ---- the same bits as stage 0: one micro-batch, so that both add up ranks and nothing else -------


MODELS = {
    "tied": "",
    "untied": f"{LLAMA} --untie-embeddings-and-output-weights --add-qkv-bias",
    (
        "a vocabulary larger than the rest"
    ): "--vocab-size 2999 --num-layers 1 --hidden-size 16 --num-attention-heads 2",
    "slices of padding alone": "--hidden-size 8 --num-attention-heads 2 --num-layers 1",
    "norms over two slices": "--hidden-size 160 --num-attention-heads 2 "
    "--kv-channels 2 --num-layers 1 "
    "--ffn-hidden-size 8 "
    "--position-embedding-type rope",
}
BITS = [  # data-parallel ranks, model, flags, patches
    (2, "tied", "--clip-grad 0", ()),
    (4, "tied", "--clip-grad 0", ()),
    (2, "tied", "--clip-grad 1e3", ()),
    (4, "untied", "--clip-grad 1e3", ()),
    (2, "untied", "--clip-grad 0 --bf16", ()),
    (
        2,
        "tied",
        "--clip-grad 0 --fp16 --initial-loss-scale 1024 --loss-scale-window 3",
        ("overflow",),
    ),
    (4, "a vocabulary larger than the rest", "--clip-grad 0", ()),
    (8, "slices of padding alone", "--clip-grad 0", ()),
    (4, "norms over two slices", "--clip-grad 0", ()),
    (4, "tied", "--clip-grad 0", ("uneven",)),
]


@pytest.mark.parametrize(("ranks", "model", "flags", "patches"), BITS, ids=str)
def test_the_same_bits_at_every_stage(train, ranks, model, flags, patches):
    flags = f"--micro-batch-size {8 // ranks} {MODELS[model]} {flags}"
    plain = train(f"dp{ranks}", flags, patches)
    if "overflow" in patches:
        assert {step.skipped for step in plain[0].steps} == {True, False}
    for stage in STAGES:
        assert_same_bits(train(f"dp{ranks} {stage}", flags, patches), plain, norms=False)


FP16 = "--fp16 --initial-loss-scale 1e12 --loss-scale-window 2"


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        ("dp1", f"{MODELS['slices of padding alone']} {FP16}"),
        ("dp1", f"--zero-stage 3 --param-cpu-offload {FP16}"),
        ("dp2 zero1", f"--bf16 {MODELS['slices of padding alone']}"),
        ("dp2 zero2", f"--optimizer-cpu-offload {FP16}"),
        ("dp4 zero3 shard2", "--bf16 --exp-avg-dtype bf16"),
        ("pp2 zero-bubble-v dp2 zero3", "--num-layers 4"),
        ("tp2 sp dp2 zero2", f"{LLAMA} --bf16"),
    ],
    ids=str,
)
@pytest.mark.default(
    "dp4 zero3 shard2---bf16 --exp-avg-dtype bf16", "pp2 zero-bubble-v dp2 zero3---num-layers 4"
)
def test_no_memory_is_read_before_it_is_written(train, layout, flags):
    flags = f"{flags} --micro-batch-size 2"
    plain, filled = (train(layout, flags, patches) for patches in ((), ("unwritten",)))
    assert_same_bits(filled, plain, norms=True)


def test_the_models_are_what_they_are_said_to_be():
    def blocks(name: str, ranks: int, vocabulary: int = 50) -> list[Plan]:
        flags = (*SMALL, *MODELS[name].split(), "--micro-batch-size", "1")
        config = resolve(parse_arguments(list(flags)).config, ranks, vocabulary).config
        model = GPTModel(
            config.model,
            vocab_size=vocabulary,
            padded_vocab=vocabulary,
            dtype=torch.float32,
            seed=1,
        )
        return [plan for plan, _ in plan_blocks(model, lambda group: ranks)]

    embedding, *rest = blocks("a vocabulary larger than the rest", 4, 3000)
    assert embedding.size > sum(plan.size for plan in rest)
    assert any(
        plan.size - plan.size // 8 >= plan.entries[-1].stop
        for plan in blocks("slices of padding alone", 8)
    )
    (layer,) = blocks("norms over two slices", 4)[1:]
    cuts = [layer.size // 4 * rank for rank in (1, 2, 3)]
    assert any(
        "norm" in entry.name and entry.start < cut < entry.stop
        for entry in layer.entries
        for cut in cuts
    )


# ---- clipping ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class First:
    """What one rank's first step reads."""

    accumulated: list[Piece]
    coefficient: torch.Tensor  # in the precision of the masters


def first_step(flags: tuple[str, ...]) -> First:
    accumulated, coefficients = [], []
    step, apply = Optimizer.step, UpdateRule.apply

    def stepped(self: Optimizer, **settings):
        boxes = [each for block in self.blocks for each in block.boxes(block.grad_shard)]
        accumulated.append(pieces(SimpleNamespace(optimizer=self), boxes))
        return step(self, **settings)

    def applied(self: UpdateRule, *args, coefficient: torch.Tensor, **settings):
        coefficients.append(coefficient)
        return apply(self, *args, coefficient=coefficient, **settings)

    with (
        mock.patch.object(Optimizer, "step", stepped),
        mock.patch.object(UpdateRule, "apply", applied),
    ):
        run_case(flags)
    return First(accumulated[0], coefficients[0])


@pytest.mark.parametrize("ranks", [2, 4])
def test_clipped_gradients_are_the_same_bits_and_their_coefficient_within_4_ulp(gloo_world, ranks):
    flags = (
        *SMALL,
        *(
            f"--clip-grad 0.1 --train-iters 2 --lr-warmup-iters 0 --micro-batch-size {8 // ranks}"
        ).split(),
    )
    firsts = {
        stage: gloo_world(ranks).run(first_step, (*flags, "--zero-stage", str(stage)))
        for stage in range(4)
    }
    accumulated = {stage: whole(each, "accumulated") for stage, each in firsts.items()}
    coefficient = firsts[0][0].coefficient
    assert 0 < coefficient < 0.9  # of 1: it clips
    for stage in (1, 2, 3):
        assert all(torch.equal(accumulated[stage][name], x) for name, x in accumulated[0].items())
        assert len({first.coefficient.item() for first in firsts[stage]}) == 1
        assert (
            abs(firsts[stage][0].coefficient - coefficient)
            <= 4 * torch.finfo(torch.float32).eps * coefficient
        )


# ---- sums in another order -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("dp4", "norms over two slices"),
        ("pp2 1f1b dp2", "untied"),
        ("pp2 zero-bubble-v dp2", "tied"),
        ("tp2 sp dp4", "norms over two slices"),
    ],
)
@pytest.mark.default("dp4-norms over two slices")
def test_in_fp64_accumulated_gradients_lead_to_the_same_weights(train, layout, model):
    """AdamW, clipping, two micro-batches or more; every tensor to 1e-10 of its norm, a key bias
    (gradient 0) to that of the value bias.
    """
    flags = (
        f"--fp64 --micro-batch-size 1 {NO_DROPOUT} "
        f"{'--num-layers 4' if 'pp2' in layout else ''} {MODELS[model]}"
    )
    expected = whole(train(layout, flags))
    for stage in STAGES:
        for name, x in whole(train(f"{layout} {stage}", flags)).items():
            scale = expected[name.replace(*KEY_BIAS)]
            assert (x - expected[name]).norm() <= FP64_GATE * scale.norm(), (stage, name)


LR, MOMENTUM = 0.05, 0.9
SGD = f"--optimizer sgd --lr {LR} --sgd-momentum {MOMENTUM} --weight-decay 0 --clip-grad 0"


def order_of_sums(parts: int) -> float:
    """Relative difference of a gradient whose `parts` are added in fp32 in two orders. A sum of n
    parts rounds n - 1 times, at most by u of what it has come to; the parts are about orthogonal,
    so their norms add up to sqrt(n) that of the sum: n^1.5 u in either.
    """
    return 2 * parts**1.5 * 2.0**-24


def weights_apart(precision: str, layers: int, parts: int, norms: list[float]) -> float:
    """How far (2-norm, any tensor) weights may be apart after steps with these gradient norms, if
    runs differ by `order_of_sums` alone.

    After the first step weights differ, so activations and their gradients are rounded at other
    places: 12 L + 4 times on either way, by u of the model's precision (parity/layouts.py). A
    relative error e of step s moves the weights of step T by lr e |g| (1 + m + ... + m^(T-s)) with
    momentum m. What a difference of weights does to later gradients is taken to double that at
    most.
    """
    u = UNIT_ROUNDOFF.get(precision, 2.0**-24)
    relative = order_of_sums(parts) + 2 * u * math.sqrt(2 * (12 * layers + 4))
    reach = [sum(MOMENTUM**k for k in range(len(norms) - s)) for s in range(len(norms))]
    return 2 * LR * relative * sum(norm * r for norm, r in zip(norms, reach, strict=True))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("layout", "stages"),
    [
        ("dp2", STAGES),
        ("pp2 zero-bubble-v dp2", ("zero2", "zero3")),
        ("dp4", ("zero1 shard2", "zero2 shard2", "zero3 shard2")),
    ],
)
@pytest.mark.default("dp2-stages0-bf16")
def test_in_fp32_and_bf16_weights_stay_within_the_bound(train, layout, stages, precision):
    """Accumulation (stage 2 adds over ranks first, stage 1 over micro-batches), pipelines, hybrid
    sharding (sums inside shard groups first).
    """
    layers = 4 if "pp2" in layout else 2
    flags = (
        f"{SGD} --micro-batch-size 1 --num-layers {layers} "
        f"{'--bf16' if precision == 'bf16' else ''}"
    )
    plain = train(layout, flags)
    gradients, weights = whole(plain, "gradients"), whole(plain)
    total = torch.stack([x.norm() for x in gradients.values()]).norm()
    limit = weights_apart(precision, layers, 8, [step.grad_norm for step in plain[0].steps])
    for stage in stages:
        found = train(f"{layout} {stage}", flags)
        for name, x in whole(found, "gradients").items():
            assert (x - gradients[name]).norm() <= order_of_sums(8) * total, (stage, name)
        for name, x in whole(found).items():
            assert (x - weights[name]).norm() <= limit, (stage, name)
    faster = whole(train(layout, f"{flags} --lr {4 * LR}"))  # the control
    assert max((x - weights[name]).norm() for name, x in faster.items()) > limit


# ---- what changes no bit -------------------------------------------------------------------------


SAME = {
    "evaluation between steps": "--eval-interval 2",
    "no overlap": "--no-overlap-grad-reduce --no-overlap-param-gather",
    "recomputation": (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    ),
}


@pytest.mark.parametrize(
    "layout",
    [
        "dp2 zero1",
        "dp2 zero2",
        "dp2 zero3",
        "dp2 zero3 kept",
        "pp2 zero-bubble dp2 zero2",
        "pp2 zero-bubble-v dp2 zero3",
    ],
)
@pytest.mark.default("dp2 zero3 kept", "pp2 zero-bubble dp2 zero2")
def test_no_bit_changes_with(train, layout):
    """AdamW, clipping, several micro-batches, dropout; each of SAME alone, and of stage 3 that
    weights are kept.
    """
    flags = f"--micro-batch-size 2 {'--num-layers 4' if 'pp2' in layout else ''}"
    plain = train(layout, flags)
    for more in SAME.values():
        other = train(layout, f"{flags} {more}")
        assert len(other[0].evaluations) == len(plain[0].evaluations) + (
            "--eval-interval" in more
        ) * (STEPS // 2 - 1)
        assert_same_bits(other, plain)
    if "zero3" in layout and "kept" not in layout:
        assert_same_bits(train(f"{layout} kept", flags), plain)


# ---- a NaN is traced to its micro-batch ----------------------------------------------------------


def blamed(flags: tuple[str, ...]) -> str:
    """What a run logs that stops at the samples of PATCHES["overflow"]."""
    said = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(said))
        # the world lives on
        stack.enter_context(mock.patch.object(pretrain, "disconnect", lambda: None))
        stack.enter_context(PATCHES["overflow"]())
        parsed = parse_arguments(list(flags))
        assert pretrain.pretrain(parsed.config, parsed.notes) == 1
    return said.getvalue()


def names_sample_13(text: str) -> bool:
    """Of the second step's samples 8..15, two ranks with one a micro-batch: the third micro-batch's
    of rank 1.
    """
    return re.findall(r"micro-batch .*", text) == [
        "micro-batch 2 of data-parallel rank 1: gradient, samples 13..13"
    ]


@pytest.mark.parametrize(
    "layout",
    [
        "dp2",
        *(f"dp2 {stage}" for stage in STAGES),
        "dp2 serial zero2",
        "pp2 zero-bubble dp2 zero2",
        "pp2 zero-bubble dp2 zero3",
        "pp2 zero-bubble-v dp2 zero3 kept",
    ],
)
def test_a_non_finite_gradient_is_traced_to_its_micro_batch_and_rank(gloo_world, layout):
    words = Row(layout, "gpt").words
    flags = (
        *SMALL,
        *words.flags,
        "--micro-batch-size",
        "1",
        *(("--num-layers", "4") if words.pp > 1 else ()),
    )
    said = gloo_world(words.ranks).run(blamed, flags)
    assert names_sample_13(said[0]), said[0]
    assert not any(said[1:])
