"""--recompute auto: every candidate's bytes are those of the plan, and the choice is that of brute
force.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from megatron.tools._plan import recompute
from megatron.tools._plan.advice import Machine
from megatron.tools._plan.memory import MemoryPlan, PlannedSteps, rank_memories
from megatron.tools._plan.recompute import (
    candidates,
    choose_for_rank,
    choose_layers,
    needed_bytes,
    seconds_again,
    words_of,
    words_of_layer,
    worthwhile,
)
from megatron.tools._plan.table import banner_lines, memory_report
from step_models import LLAMA, resolved

from megatron.config.errors import ArgumentErrors, UserError
from megatron.config.groups import Config
from megatron.config.recompute import layer_words

VOCAB = 1024
COMMON = f"""--mock-data --tokenizer-type NullTokenizer --vocab-size {VOCAB - 1} --lr 1e-3
--train-iters 2 --hidden-size 256 --num-attention-heads 4 --seq-length 512 --micro-batch-size 2
--bf16 --attention-dropout 0 --hidden-dropout 0"""
PP2 = "--pipeline-model-parallel-size 2 --global-batch-size 8"
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 256 --moe-shared-expert-intermediate-size 128"
CASES = {  # ranks, layers, flags
    "one rank": (1, 3, LLAMA),
    "pp2": (2, 6, f"{LLAMA} {PP2}"),
    "pp2, zero-bubble": (2, 4, f"{LLAMA} {PP2} --pipeline-schedule zero-bubble"),
    "pp2, two stages a rank": (2, 4, f"{LLAMA} {PP2} --num-virtual-stages-per-pipeline-rank 2"),
    "zero 3": (4, 3, f"{LLAMA} --zero-stage 3"),
    "tp2 sp": (2, 3, f"{LLAMA} --tensor-model-parallel-size 2 --sequence-parallel"),
    "experts": (2, 3, f"{LLAMA} {EXPERTS} --expert-model-parallel-size 2"),
    "experts, pp2": (4, 4, f"{LLAMA} {PP2} {EXPERTS} --moe-layer-freq [0,1,1,1]"),
}


def configure(name: str, *more: str) -> Config:
    world, layers, flags = CASES[name]
    return resolved(" ".join([COMMON, f"--num-layers {layers}", flags, *more]), world, VOCAB)


def steps_of(name: str) -> PlannedSteps:
    return PlannedSteps(configure(name), VOCAB, CASES[name][0], "cuda")


def total(name: str, rank: int, words: dict[int, str]) -> int:
    """The plan of a rank whose layers recompute this, the others nothing."""
    world, layers, _ = CASES[name]
    every = words_of([words.get(layer, "none") for layer in range(layers)])
    return rank_memories(configure(name, "--recompute-layers", *every), VOCAB, world)[rank].total


def layers_of(steps: PlannedSteps, rank: int) -> list[int]:
    return [layer for stage in steps.stages_of(rank) for layer in stage.layers]


def named(steps: PlannedSteps, layers: list[int], options: list[str], row) -> dict[int, str]:
    """A candidate in the words of --recompute-layers."""
    return {
        layer: words_of_layer(steps.shape, layer, options[index])
        for layer, index in zip(layers, row, strict=True)
    }


@pytest.mark.parametrize("name", ["pp2, zero-bubble", "zero 3", "tp2 sp", "experts, pp2"])
def test_the_bytes_of_all_candidates_are_those_of_the_plan(name):
    steps = steps_of(name)
    options = worthwhile(steps.shape)
    assert options[-1] == "none" and options[0] == "full" and len(options) > 4
    for rank in range(steps.schedule.ranks):
        layers = layers_of(steps, rank)
        chosen = candidates([len(stage.layers) for stage in steps.stages_of(rank)], len(options))
        needed = needed_bytes(steps, rank, options, chosen)
        for row in range(0, len(chosen), max(1, len(chosen) // 6)):
            words = named(steps, layers, options, chosen[row])
            assert needed[row] == total(name, rank, words), words


@pytest.mark.parametrize("name", ["pp2, two stages a rank", "experts"])
@pytest.mark.default("pp2, two stages a rank")
def test_no_cheaper_choice_fits(name):
    """Against every choice of every layer, in any order, each planned by itself."""
    steps = steps_of(name)
    rank = 0
    options, layers = worthwhile(steps.shape), layers_of(steps, rank)
    rows = np.array(list(itertools.product(range(len(options)), repeat=len(layers))))
    needed = needed_bytes(steps, rank, options, rows)
    for row in (0, len(rows) // 2, len(rows) - 1):  # rows are the plan's
        words = named(steps, layers, options, rows[row])
        assert needed[row] == total(name, rank, words)
    of_layers = (
        np.array([seconds_again(steps.shape, what, layer) for what in options])[rows[:, column]]
        for column, layer in enumerate(layers)
    )
    seconds = np.sum(list(of_layers), axis=0)
    for share in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0):
        budget = math.ceil(needed.min() + share * (needed.max() - needed.min()))
        found = choose_for_rank(steps, rank, budget)
        assert found.needed <= budget
        assert found.needed == total(name, rank, found.layers)
        assert found.seconds == pytest.approx(seconds[needed <= budget].min(), rel=1e-9), share


def test_words_of_experts():
    """Modules of experts in their layers alone."""
    shape = steps_of("experts, pp2").shape
    assert words_of_layer(shape, 0, "layernorm+mlp+qkv") == "layernorm+mlp+qkv"
    assert words_of_layer(shape, 1, "layernorm+mlp+qkv") == "layernorm+moe+qkv"
    assert [words_of_layer(shape, 1, what) for what in ("full", "mlp_act")] == ["full", "moe_act"]
    # the way to the experts is gone again, the activation is not
    seconds = [seconds_again(shape, what, 1) for what in ("mlp_act", "mlp", "full")]
    assert 0 < seconds[0] < seconds[1] < seconds[2]


def test_candidates():
    assert candidates([2], 2).tolist() == [[0, 0], [0, 1], [1, 1]]
    assert candidates([1, 1], 2).tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert candidates([], 4).shape == candidates([0], 4).shape == (1, 0)
    for sizes in ([126], [16, 16], [2] * 8, [1] * 12):
        many = candidates(sizes, 8)
        assert 1 < len(many) <= recompute.MOST_CANDIDATES and many.shape[1] == sum(sizes)
        first = many[:, : sizes[0]]
        assert (np.diff(first, axis=1) >= 0).all() and len(np.unique(many, axis=0)) == len(many)


def test_the_choice_and_its_reasons():
    world, layers, _ = CASES["pp2"]
    plain = max(rank.total for rank in rank_memories(configure("pp2"), VOCAB, world)) / 2**30
    config = configure("pp2", "--recompute", "auto", "--memory-budget", f"{0.8 * plain:.6f}")
    chosen, lines = choose_layers(config, VOCAB, world, "cuda")
    words = layer_words(chosen.training.recompute_layers)
    assert len(words) == layers and words[0] != "none" and len(lines) == 2
    assert all(rank.total <= 0.8 * plain * 2**30 for rank in rank_memories(chosen, VOCAB, world))
    assert "recompute of pipeline rank 0: " in lines[0] and " without; adds " in lines[0]
    assert "of all that add less the least is " in lines[0]
    assert choose_layers(config, VOCAB, world, "cuda") == (chosen, lines)  # again the same
    # the first stage holds more micro-batches, and pays more
    assert sum(word != "none" for word in words[:3]) >= sum(word != "none" for word in words[3:])
    assert choose_layers(configure("pp2"), VOCAB, world, "cuda") == (configure("pp2"), [])


SELECTIVE = "--recompute-granularity selective --recompute-modules mlp layernorm"


@pytest.mark.parametrize(
    "flags, counted",
    [
        ("", ""),
        (SELECTIVE, "selective (mlp, layernorm)"),
        ("--recompute-layers full*2 none*4", "by layers (full*2 none*4)"),
    ],
)
def test_the_plan_says_which_recompute_it_counts(flags, counted):
    plan = MemoryPlan(configure("pp2", *flags.split()), VOCAB, 2)
    line, report = banner_lines(plan, None)[0], memory_report(plan, memory=80.0, machine=Machine())
    assert (f"(GiB), recompute {counted}: " if counted else "(GiB): ") in line
    (line,) = [each for each in report if each.startswith("(recomputed)")]
    assert (f"recompute {counted}" in line) if counted else line.endswith("as the flags set it")


def test_nothing_fits():
    config = configure("pp2", "--recompute", "auto", "--memory-budget", "0.001")
    with pytest.raises(UserError, match="--memory-budget 0.001: pipeline rank 0 needs .* even"):
        choose_layers(config, VOCAB, 2, "cuda")


REFUSED = """
--recompute auto => --recompute auto: set --memory-budget
--memory-budget 3 => --memory-budget 3: has no effect without --recompute auto
--recompute auto --memory-budget 3 --recompute-granularity full => auto: is not supported with
--recompute full => --recompute full: auto chooses; give --recompute-granularity full
--recompute-layers all*3 => --recompute-layers: 'all*3': 'all' is none of none, full
--recompute-layers layernorm+moe*3 => moe and moe_act need --num-experts
--recompute auto --memory-budget 3 --cuda-graphs => --cuda-graphs: is not supported with --recompute
""".strip().splitlines()


@pytest.mark.parametrize("row", REFUSED)
def test_what_is_refused(row):
    flags, fault = row.split(" => ")
    with pytest.raises(ArgumentErrors) as caught:
        configure("one rank", *flags.split())
    assert any(fault in line for line in caught.value.faults), caught.value.faults
