"""ZeRO's numbers: real runs at every stage have the bits of the same run at stage 0 where sums are
taken in the same order. The rows of parity hold the others.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from own_run import exit_code, replaced
from parity.compare import bits_off
from parity.layouts import BASE, LLAMA, Row
from parity.worker import Outcome, overflow, run_case

from megatron.model.layer import HeadLayer

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


def differences(outcomes: list[Outcome], plain: list[Outcome], norms: float = 0.0) -> list[str]:
    """As `bits_off`; the last evaluations are those of the validation and of the test set."""
    return bits_off(outcomes, plain, norms=norms, evaluations=2)


# ---- the same bits as stage 0: one micro-batch, so that both add up ranks and nothing else -------


MODELS = {
    "tied": "",
    "untied": f"{LLAMA} --untie-embeddings-and-output-weights --add-qkv-bias",
    "a large vocabulary": "--vocab-size 2999 --num-layers 1 --hidden-size 16 "
    "--num-attention-heads 2",
    "slices of padding alone": "--hidden-size 8 --num-attention-heads 2 --num-layers 1",
    "norms over two slices": "--hidden-size 160 --num-attention-heads 2 --kv-channels 2 "
    "--num-layers 1 --ffn-hidden-size 8 --position-embedding-type rope",
}
OVERFLOWS = "--clip-grad 0 --fp16 --initial-loss-scale 1024 --loss-scale-window 3"
BITS = [  # data-parallel ranks, model, flags, patches
    (2, "tied", "--clip-grad 0", ()),
    (2, "tied", "--clip-grad 1e3", ()),
    (4, "untied", "--clip-grad 1e3", ()),
    (2, "untied", "--clip-grad 0 --bf16", ()),
    (2, "tied", OVERFLOWS, ("overflow",)),
    (4, "a large vocabulary", "--clip-grad 0", ()),
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
        # the squares of slices are summed in another order than those of a whole
        assert not differences(train(f"dp{ranks} {stage}", flags, patches), plain, 1e-14)


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
    assert not differences(filled, plain)


# ---- what changes no bit -------------------------------------------------------------------------


SAME = {
    "evaluation between steps": "--eval-interval 2",
    "no overlap": "--no-overlap-grad-reduce --no-overlap-param-gather",
    "recomputation": (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    ),
}


LAYOUTS = [f"dp2 {stage}" for stage in (*STAGES, "zero3 kept")]
LAYOUTS += ["pp2 zero-bubble dp2 zero2", "pp2 zero-bubble-v dp2 zero3"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.default("pp2 zero-bubble dp2 zero2")
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
        assert not differences(other, plain)
    if "zero3" in layout and "kept" not in layout:
        assert not differences(train(f"{layout} kept", flags), plain)


def test_sums_sent_in_the_dtype_of_the_gradients_reach_all_ranks(train):
    """Stage 0; bf16 gradients are sent in bf16 with or without --grad-reduce-in-bf16."""
    flags = "--bf16 --main-grads-dtype bf16 --micro-batch-size 4"
    plain = train("dp2", flags)
    assert not differences(train("dp2", f"{flags} --grad-reduce-in-bf16"), plain)


# ---- a NaN is traced to its micro-batch ----------------------------------------------------------


@contextlib.contextmanager
def nan_loss() -> Iterator[None]:
    """What the head gets of sample 13 is NaN."""
    original = HeadLayer.forward

    def forward(self, x, micro):
        if micro.training:
            x = x + torch.where(micro.dropout.sample_ids == 13, math.nan, 0.0)[None, :, None]
        return original(self, x, micro)

    with mock.patch.object(HeadLayer, "forward", forward):
        yield


def blamed(flags: tuple[str, ...], patch: Callable[[], Any]) -> list[str]:
    """What a run logs of micro-batches that stops at NaN or Inf."""
    output = io.StringIO()
    with replaced(), contextlib.redirect_stderr(output), patch():
        assert exit_code(flags) == 1
    return re.findall(r"micro-batch .*", output.getvalue())


TRACED = ["dp2", *(f"dp2 {stage}" for stage in STAGES), "dp2 serial zero2"]
TRACED += ["pp2 zero-bubble dp2 zero2", "pp2 zero-bubble dp2 zero3"]
TRACED += ["pp2 zero-bubble-v dp2 zero3 kept"]


@pytest.mark.parametrize("layout", TRACED)
def test_a_non_finite_gradient_is_traced_to_its_micro_batch_and_rank(gloo_world, layout):
    """Of the second step's samples 8..15, two ranks with one a micro-batch: the third micro-batch's
    of rank 1.
    """
    words = Row(layout, "gpt").words
    layers = "--num-layers 4" if words.pp > 1 else ""
    flags = (*SMALL, *words.flags, *f"--micro-batch-size 1 {layers}".split())
    first, *others = gloo_world(words.ranks).run(blamed, flags, overflow)
    assert first == ["micro-batch 2 of data-parallel rank 1: gradient, samples 13..13"]
    assert not any(others)


@pytest.mark.parametrize(
    "layout, patch, line",
    [
        ("dp2 ep2", nan_loss, "micro-batch 2 of data-parallel rank 1: loss, samples 13..13"),
        ("dp2 ep2", overflow, "micro-batch 2: gradient of experts, samples 12..13"),
        ("tp2 sp etp1 ep2", overflow, "micro-batch 5: gradient, samples 13..13"),
    ],
)
def test_experts_of_a_healthy_rank_are_not_blamed(gloo_world, layout, patch, line):
    """Though their gradients have tokens of other ranks' samples."""
    row = Row(layout, "moe")
    flags = (*SMALL, *row.of.flags.split(), *row.words.flags, "--micro-batch-size", "1")
    assert gloo_world(2).run(blamed, flags, patch)[0] == [line]
