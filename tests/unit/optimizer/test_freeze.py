"""Frozen units: the gradients of the rest are those of a run that trains all, in every layout; what
is frozen keeps its bits and takes no memory.
"""

from __future__ import annotations

import functools

import pytest
import torch
from megatron.tools._plan.memory import rank_memories
from parity.compare import fp64
from parity.layouts import BASE, KEY_BIAS, LLAMA, Row
from parity.worker import Outcome, one_thread, run_case
from unit.zero.measure import measure

from megatron.checkpoint.reader import open_checkpoint
from megatron.config.arguments import parse_arguments
from megatron.config.stages import frozen_units
from megatron.config.validate import cross_field_faults, resolve

COMMON = """--micro-batch-size 1 --num-layers 4 --train-iters 4 --fp64 --clip-grad 0
--log-num-zeros-in-grad"""
GPT = (*BASE, *COMMON.split())
MORE = """--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2
--qk-layernorm"""
UNTIED = (*GPT, *LLAMA.split(), *MORE.split())
FREEZE = {  # flags, frozen units
    "tied": (GPT, "embedding,layers.0,layers.2-3"),
    "untied": (UNTIED, "head,layers.1-2"),
    "trained ends": (GPT, "layers.0-2"),
}
CASES = [  # layout, which of FREEZE
    ("dp2 zero1 serial", "tied"),
    ("dp2 zero3", "untied"),
    ("tp2 sp", "tied"),
    ("pp2 1f1b", "trained ends"),
    ("pp2 zero-bubble dp2 zero2", "untied"),
    ("pp2 zero-bubble-v dp2 zero3", "tied"),
]


def unit_of(name: str) -> str:
    """The unit that a logical tensor belongs to."""
    if name == "embedding.position.weight":
        return "layers.0"
    if name.startswith("final_norm."):
        return "layers.3"
    return ".".join(name.split(".")[: 2 if name.startswith("layers.") else 1])


@functools.cache
def alone(kind: str) -> Outcome:
    """A run with frozen units in one process."""
    flags, words = FREEZE[kind]
    with one_thread():
        return run_case((*flags, "--freeze", words))


def test_gradients_of_the_rest_are_those_of_a_run_that_trains_all():
    kind = "tied"
    flags, words = FREEZE[kind]
    frozen = frozen_units(parse_arguments([*flags, "--freeze", words]).config)
    with one_thread():
        everything = {piece.name: piece.values for piece in run_case(flags).gradients}
    some = {piece.name: piece.values for piece in alone(kind).gradients}
    assert some.keys() == {name for name in everything if unit_of(name) not in frozen}
    for name, gradient in some.items():
        scale = everything[name.replace(*KEY_BIAS)].norm()  # a key bias's exact gradient is 0
        assert (gradient - everything[name]).norm() <= 1e-10 * scale, name


@pytest.mark.parametrize("layout, kind", CASES, ids=str)
@pytest.mark.default("tp2 sp-tied", "pp2 zero-bubble dp2 zero2-untied")
def test_every_layout_trains_the_same(gloo_world, layout, kind):
    (flags, words), layout_words = FREEZE[kind], Row(layout, "gpt").words
    more = (*layout_words.flags, "--freeze", words)
    outcomes = gloo_world(layout_words.ranks).run(run_case, (*flags, *more))
    assert fp64(alone(kind), outcomes, zero=KEY_BIAS) == []


# ---------------------------------------------------------------- memory, checkpoints, words

WIDE = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32
--micro-batch-size 2 --vocab-size 255 --bf16
--lr-warmup-iters 0""".split()


def test_the_bias_of_a_frozen_router_stays(tmp_path):
    """Which experts a token of a frozen layer goes to does not change."""
    own = """--train-iters 2 --save-interval 1 --num-experts 4 --disable-bias-linear
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 0.01 --freeze layers.1"""
    with one_thread():
        run_case((*BASE, *WIDE, *own.split(), "--save", str(tmp_path)))
    with open_checkpoint(tmp_path, 1) as first, open_checkpoint(tmp_path, 2) as last:
        for layer in range(4):
            name = f"layers.{layer}.mlp.router.expert_bias"
            biases = first.read_tensor(name), last.read_tensor(name)
            assert torch.equal(*biases) == (layer == 1)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.default("3")
def test_live_bytes_are_those_of_the_formula(gloo_world, stage):
    """A frozen parameter takes 2 bytes in bf16, 2/N at stage 3, and nothing else at any time; the
    plan knows it, to the byte and at the peak.
    """
    own = f"--train-iters 2 --eval-iters 0 --zero-stage {stage} --freeze embedding,layers.0-1"
    flags = (*BASE, *WIDE, *own.split())
    config = resolve(parse_arguments(list(flags)).config, 2, 256).config
    (planned,) = rank_memories(config, 256, 2, "cpu")
    trained = [block for block in planned.blocks if block.trained]
    assert {block.name for block in trained} == {"layers.2", "layers.3"}
    rest = sum(block.size for block in trained)
    frozen = sum(block.size for block in planned.blocks) - rest
    assert frozen > rest / 2
    formula = {0: 2 * frozen + 18 * rest, 2: 2 * frozen + 10 * rest, 3: frozen + 8 * rest}[stage]
    assert planned.resident == formula
    for _, spans in gloo_world(2).run(measure, flags):
        last = spans["step"][-1]
        held = sum(last.now[kind] for kind in ("parameters", "gradients", "optimizer"))
        assert held == formula
        most = sum(size for kind, size in last.at_peak.items() if kind not in ("total", "before"))
        assert most == pytest.approx(planned.total, rel=0.03)


def test_frozen_weights_keep_their_bits_and_checkpoints_hold_no_state_of_them(gloo_world, tmp_path):
    """Saved and loaded by any layout; a run that trains all starts from them with --no-load-optim,
    one that freezes less names what is missing.
    """
    plain = (*BASE, *WIDE, "--train-iters", "4")
    flags = (*plain, "--save-interval", "2", "--freeze", "embedding,layers.0-1")
    world, save, again = gloo_world(2), tmp_path / "save", tmp_path / "again"
    resume = "--load", str(save), "--ckpt-step", "2"
    world.run(run_case, (*flags, "--zero-stage", "3", "--save", str(save)))
    with open_checkpoint(save, 2) as middle, open_checkpoint(save, 4) as last:
        for name in last.names:
            part = name.removeprefix("optimizer.exp_avg_sq.").removeprefix("optimizer.exp_avg.")
            frozen = unit_of(part) in ("embedding", "layers.0", "layers.1")
            assert not frozen or part == name, f"{name}: state of what is frozen"
            weights = last.read_tensor(name)
            assert torch.equal(middle.read_tensor(name), weights) == frozen, name
            assert part != name or weights.dtype == (torch.bfloat16 if frozen else torch.float32)
    world.run(run_case, (*flags, "--zero-stage", "2", *resume, "--save", str(again)))
    with open_checkpoint(save, 4) as one, open_checkpoint(again, 4) as other:
        assert one.names and sorted(one.names) == sorted(other.names)
        assert all(torch.equal(one.read_tensor(n), other.read_tensor(n)) for n in one.names)
    missing = "was saved without the optimizer's state"
    assert missing in world.run(fault_of, (*plain, *resume))[0]
    world.run(run_case, (*plain, *resume, "--no-load-optim"))


def fault_of(flags: tuple[str, ...]) -> str:
    with pytest.raises(ValueError) as caught:
        run_case(flags)
    return str(caught.value)


@pytest.mark.parametrize(
    "words, fault",
    [
        ("embedding,layer.1", "'layer.1' is none of embedding, head, layers.N and layers.N-M, "),
        ("layers.2-4", "layers.2-4: layers go from 0 to 3"),
        ("head", "head has the embedding's matrix: freeze embedding, which freezes both, or give "),
        ("embedding,layers.0-3", "nothing would be trained; to evaluate only, give --skip-train"),
    ],
)
def test_what_cannot_be_frozen(words, fault):
    config = parse_arguments([*GPT, "--freeze", words]).config
    faults = cross_field_faults(config, 1, 50)
    assert any(line.startswith("--freeze") and fault in line for line in faults), faults


def test_units_by_name():
    def units(flags, words):
        return frozen_units(parse_arguments([*flags, "--freeze", words]).config)

    assert units(GPT, "embedding,layers.1") == {"embedding", "head", "layers.1"}
    untied = {"embedding", "layers.0", "layers.1", "layers.2"}
    assert units(UNTIED, "embedding,layers.0-2,layers.1") == untied
    assert units(UNTIED, "head") == {"head"}
    assert frozen_units(parse_arguments(list(GPT)).config) == frozenset()
