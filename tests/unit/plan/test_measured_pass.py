"""Passes with numbers of samples that no run had, from runs with fewer and with more."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from megatron.tools._plan.activations import HEAD, Shape, layer_stage
from megatron.tools._plan.layer_run import LayerRun
from megatron.tools._plan.measured_pass import Between, MeasuredPass
from step_models import EXPERTS, VOCABULARY, resolved

from megatron.model.recompute import NO_RECOMPUTE, WHOLE, LayerRecompute, choice_of
from megatron.model.stages import Stage

LATENT = (
    "--multi-latent-attention --qk-layernorm --kv-lora-rank 512 --qk-head-dim 128 "
    "--qk-pos-emb-head-dim 64 --v-head-dim 128 --moe-shared-expert-intermediate-size 1024 "
)


EP, SAMPLES = "--expert-model-parallel-size", "--micro-batch-size"


def passes(flags: str, index: int, choice: LayerRecompute) -> list[MeasuredPass]:
    """Those of a layer, or of the head where `index` is -1."""
    shape = Shape(resolved(EXPERTS + flags), VOCABULARY)
    stage: Stage = HEAD if index < 0 else layer_stage(shape, index)
    return LayerRun(*shape.unit(stage)[:4]).passes(choice)


def size(each: MeasuredPass) -> tuple:
    return each.left, each.peak, each.at_exchanges, each.logits, each.work


@pytest.mark.parametrize(
    "setting, flags, index, choice",
    [
        (SAMPLES, f"{EP} 8 " + LATENT, 1, NO_RECOMPUTE),
        (SAMPLES, "", 1, choice_of("layernorm+moe")),
        (SAMPLES, "--vocab-size 2000 ", -1, NO_RECOMPUTE),
        (EP, "", 1, WHOLE),
    ],
)
def test_passes_between_two_runs_are_those_of_a_run(setting, flags, index, choice):
    low, middle, high = (passes(f"{flags} {setting} {n}", index, choice) for n in (2, 4, 8))
    found = [*map(Between(2, 8, 4).passed, low, high)]
    assert [size(each) for each in found if each] == [size(each) for each in middle]


def test_sizes_that_neither_grow_nor_fall_are_not_known():
    low, high = (passes(f"{SAMPLES} {n}", 0, NO_RECOMPUTE)[0] for n in (1, 4))
    passed = Between(1, 4, 2).passed
    assert passed(low, high) is not None
    limited = high.changes.copy()
    limited[np.flatnonzero(limited > 0)[0]] -= 1  # as a kernel's workspace that has a most
    assert passed(low, dataclasses.replace(high, changes=limited)) is None
    assert passed(low, dataclasses.replace(high, calls=high.calls[1:])) is None
    assert passed(low, dataclasses.replace(high, products=high.products[1:])) is None
