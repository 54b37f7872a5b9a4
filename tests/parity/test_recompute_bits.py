"""Runs that compute activations again have the bits of runs that keep them, in the same layout: of
losses, evaluations, gradients and weights. Every choice in every layout:

    bash scripts/test.sh -m campaign tests/parity/test_recompute_bits.py
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
from distributed.pool import RankError
from megatron.tools._plan.recompute import choose_layers
from parity.layouts import BASE, SCHEDULES, Row
from parity.test_pipeline_bits import bits, same
from parity.worker import Outcome, run_case

from megatron.config.arguments import parse_arguments
from megatron.config.errors import UserError
from megatron.config.recompute import layer_words
from megatron.config.validate import resolve
from megatron.parallel import zero_plan
from megatron.parallel.blocks import Block
from megatron.parallel.layer_runner import Inputs, LayerRunner
from megatron.parallel.pipeline import Pipeline
from megatron.parallel.schedule import Kind

SELECTIVE = "--recompute-granularity selective --recompute-modules"
FULL = "--recompute-granularity full"
CHOICES = {
    "norms, activation": f"{SELECTIVE} layernorm mlp_act",
    "core attention": "--recompute-activations",
    "qkv": f"{SELECTIVE} qkv",
    "MLP, norms": f"{SELECTIVE} mlp layernorm",
    "all": f"{SELECTIVE} layernorm qkv core_attn mlp",
    "full": FULL,
    "groups": f"{FULL} --recompute-method uniform --recompute-num-layers 2",
    "uneven groups": f"{FULL} --recompute-method uniform --recompute-num-layers 3",
    "block": f"{FULL} --recompute-method block --recompute-num-layers 1",
    "shares": f"{FULL} --recompute-num-layers 2 --distribute-saved-activations",
    "by layers": "--recompute-layers full layernorm+mlp core_attn none",
    "latents": f"{SELECTIVE} mla_up_proj core_attn layernorm",
}
PRECISIONS = {
    "fp32": "",
    "bf16": "--bf16",
    "fp16": "--fp16 --initial-loss-scale 1024",
    "fp8": "--bf16 --fp8-format e4m3 --fp8-min-width 16",
}
VOCAB = 50  # tokens of BASE
STEPS = (
    "--train-iters 3 --lr-warmup-iters 1 --num-layers 4 --global-batch-size 4 --micro-batch-size 1"
)

CI = (  # layout, feature, precision, choices; small worlds first
    ("dp1", "dropout", "fp16", "uneven groups, qkv"),
    ("tp2", "dropout", "bf16", "all, shares"),
    ("tp2 sp", "gqa2-qknorm", "fp32", "all, groups"),
    ("cp2", "dropout", "bf16", "all, groups"),
    ("cp2 a2a", "gqa2-qknorm", "fp32", "all"),
    ("cp2 p2p", "dropout", "bf16", "all, groups"),
    ("dp2 zero1", "llama", "bf16", "MLP, norms"),
    ("dp2 zero1", "llama", "fp8", "all, full"),
    ("dp2 zero2", "dropout", "fp32", "all"),
    ("dp2 zero3", "dropout", "bf16", "all, uneven groups, block"),
    ("pp2 gpipe", "dropout", "fp32", "groups"),
    ("pp2 1f1b", "documents", "bf16", "block, core attention"),
    ("pp2 interleaved v2", "dropout", "fp32", "groups, norms, activation"),
    ("pp2 zero-bubble", "dropout", "bf16", "all, groups"),
    ("pp2 zero-bubble-v", "gqa2-qknorm", "fp32", "all"),
    ("pp2 1f1b tp2", "dropout", "bf16", "shares, by layers"),
    ("pp2 zero-bubble dp2 zero3", "dropout", "bf16", "all, groups"),
    ("tp2 sp", "mla", "fp32", "latents, qkv"),
    ("pp2 zero-bubble", "mla-dropout", "bf16", "latents, all"),
)
LAYOUTS = (
    *("cp2", "cp2 a2a", "pp2 zero-bubble cp2"),
    *("dp1", "tp2", "tp2 sp", "tp2 sp serial"),
    *(f"dp2 zero{stage}" for stage in (1, 2, 3)),
    *(f"pp2 {schedule}" for schedule in SCHEDULES),
    *(f"pp2 {schedule} dp2 zero{stage}" for schedule in SCHEDULES[1:] for stage in (2, 3)),
    "pp2 1f1b tp2",
    "pp2 zero-bubble tp2 sp",
    "tp2 sp dp2 zero3",
)


def choices_of(names: str) -> list[str]:
    """The names of CHOICES in a text with commas between them, which a name may hold too."""
    found = [name for name in CHOICES if name in names]
    return [name for name in found if not any(name != other and name in other for other in found)]


def rows() -> list:
    """(layout, feature, precision, choice) of CI, and of the campaign."""
    ci = [
        (layout, feature, precision, choice)
        for layout, feature, precision, names in CI
        for choice in choices_of(names)
    ]
    found = [pytest.param(*row, id=" ".join(row)) for row in ci]
    for layout in LAYOUTS:
        for feature, precision in (("dropout", "bf16"), ("gqa2-qknorm", "fp32")):
            for choice in CHOICES:
                row = layout, feature, precision, choice
                shares = choice == "shares" and ("tp2" not in layout or "sp" in layout)
                more_layers = "interleaved" in layout or "zero-bubble-v" in layout
                if (
                    row not in ci
                    and not shares
                    and not ((choice == "by layers" and more_layers) or choice == "latents")
                ):
                    found.append(pytest.param(*row, id=" ".join(row), marks=pytest.mark.campaign))
    return found


def flags_of(layout: str, feature: str, precision: str) -> tuple[str, ...]:
    words = () if layout == "dp1" else Row(layout, "gpt").words.flags
    layers = "--num-layers 8" if "interleaved" in layout or "zero-bubble-v" in layout else ""
    own = f"{Row(layout, feature).of.flags} {STEPS} {PRECISIONS[precision]} {layers}".split()
    return (*BASE, *own, *words)


@pytest.fixture(scope="module")
def kept() -> dict[tuple[str, ...], tuple]:
    """The bits of runs without recomputation, by their flags."""
    return {}


def ranks_of(layout: str) -> int:
    return 1 if layout == "dp1" else Row(layout, "gpt").world


@pytest.mark.parametrize("layout, feature, precision, choice", rows())
@pytest.mark.default(
    "tp2 sp gqa2-qknorm fp32 all",
    "cp2 a2a gqa2-qknorm fp32 all",
    "pp2 gpipe dropout fp32 groups",
    "pp2 zero-bubble-v gqa2-qknorm fp32 all",
    "pp2 zero-bubble dp2 zero3 dropout bf16 all",
)
def test_the_same_bits(gloo_world, kept, layout, feature, precision, choice):
    world, flags = gloo_world(ranks_of(layout)), flags_of(layout, feature, precision)
    if flags not in kept:
        kept[flags] = parts(world.run(run_case, flags))
    found = parts(world.run(run_case, (*flags, *CHOICES[choice].split())))
    assert all(same(one, other) for one, other in zip(found, kept[flags], strict=True))


def test_what_auto_chooses_has_the_same_bits(gloo_world, kept):
    flags = flags_of("pp2 1f1b", "dropout", "bf16")
    if flags not in kept:
        kept[flags] = parts(gloo_world(2).run(run_case, flags))
    auto = "--recompute auto --memory-budget 0.00057".split()
    config = resolve(parse_arguments([*flags, *auto]).config, 2, VOCAB).config
    chosen, _ = choose_layers(config, VOCAB, 2, "cpu")
    assert set(layer_words(chosen.training.recompute_layers)) > {"none"}
    found = parts(gloo_world(2).run(run_case, (*flags, *auto)))
    assert all(same(one, other) for one, other in zip(found, kept[flags], strict=True))
    with pytest.raises(RankError, match="even with the recomputation that needs the least"):
        gloo_world(2).run(refused_for, (*flags, *auto, "--memory-budget", "0.0001"))


def refused_for(flags: tuple[str, ...]) -> None:
    """The run ends with an error of the user's."""
    try:
        run_case(flags)
    except UserError as error:
        raise AssertionError(str(error)) from None


def parts(outcomes: list[Outcome]) -> tuple:
    """Losses, evaluations and final weights; and the gradients of step 1."""
    gradients = {
        (piece.name, piece.offset): piece.values
        for outcome in outcomes
        for piece in outcome.gradients
    }
    return bits(outcomes), ([], [], gradients)


# ---- what the executor may get wrong


@contextlib.contextmanager
def wrong_micro_batch() -> Iterator[None]:
    """A layer is rebuilt from the input that it had in the first micro-batch of the step."""
    inputs, begin, kept_inputs = {}, Pipeline.run, LayerRunner._inputs
    forward = LayerRunner.forward
    running = []

    def remembering(self, layer, *args, **kwargs):
        running.append(layer)
        try:
            return forward(self, layer, *args, **kwargs)
        finally:
            running.pop()

    def of_the_first(self, x, micro):
        return inputs.setdefault(running[-1], kept_inputs(self, x, micro))._replace(micro=micro)

    def forgetting(self, *args, **kwargs):
        inputs.clear()
        return begin(self, *args, **kwargs)

    with (
        mock.patch.object(Pipeline, "run", forgetting),
        mock.patch.object(LayerRunner, "forward", remembering),
        mock.patch.object(LayerRunner, "_inputs", of_the_first),
    ):
        yield


@contextlib.contextmanager
def share_of_another_rank() -> Iterator[None]:
    """Each rank keeps the part of the input that its neighbour should keep."""

    def next_share(self: LayerRunner, x, micro) -> Inputs:
        shares = x.flatten().chunk(self.sharing.size)
        return Inputs(shares[self.sharing.rank - 1].clone(), micro, x.shape)

    with mock.patch.object(LayerRunner, "_inputs", next_share):
        yield


@contextlib.contextmanager
def group_from_the_wrong_end() -> Iterator[None]:
    """The second layer of a group reads the group's input."""
    rebuild = LayerRunner.rebuild

    def mistaken(self: LayerRunner, layer, saved, following):
        graph, after = rebuild(self, layer, saved, following)
        return graph, after._replace(x=self._input_of(saved))

    with mock.patch.object(LayerRunner, "rebuild", mistaken):
        yield


MUTANTS: dict[str, tuple[Callable, str, str]] = {
    "wrong micro-batch": (wrong_micro_batch, "pp2 1f1b", "full"),
    "share of another rank": (share_of_another_rank, "tp2", "shares"),
    "group from the wrong end": (group_from_the_wrong_end, "pp2 1f1b", "groups"),
}


def mutated(name: str, flags: tuple[str, ...]) -> Outcome:
    with MUTANTS[name][0]():
        return run_case(flags)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(gloo_world, kept, name):
    _, layout, choice = MUTANTS[name]
    flags = flags_of(layout, "dropout", "bf16")
    if flags not in kept:
        kept[flags] = parts(gloo_world(2).run(run_case, flags))
    found = parts(gloo_world(2).run(mutated, name, (*flags, *CHOICES[choice].split())))
    assert not all(same(one, other) for one, other in zip(found, kept[flags], strict=True))


# ---- gathers of ZeRO 3


def most_gathers(flags: tuple[str, ...], forgetful: bool = False) -> int:
    """How often a layer's weights are made whole in a step at most, for each micro-batch."""
    counts: Counter[str] = Counter()
    allocate, is_needed = Block.allocate, zero_plan._Walk._is_needed

    def counted(block: Block) -> None:
        # the plan has its own blocks
        counts[block.name] += type(block) is Block and block.name.startswith("layers.")
        allocate(block)

    def forgetting(walk: zero_plan._Walk, buffers, kind: Kind) -> bool:
        return is_needed(walk, buffers, Kind.BACKWARD)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(Block, "allocate", counted))
        if forgetful:
            stack.enter_context(mock.patch.object(zero_plan._Walk, "_is_needed", forgetting))
        run_case(flags)
    (most,) = {max(counts.values())}
    return most


@pytest.mark.parametrize("choice", ["full", "uneven groups", "all"])
def test_a_rebuilt_layer_is_gathered_once_for_rebuilding_and_backward(gloo_world, choice):
    """Twice a step and micro-batch, as without recomputation; a control that frees a layer between
    the two gathers it a third time.
    """
    steps, micro_batches = 2, 2
    flags = (
        *flags_of("dp2 zero3", "llama", "fp32"),
        *f"--num-layers 9 --train-iters {steps} --eval-iters 0".split(),
        *CHOICES[choice].split(),
    )
    expected = 2 * steps * micro_batches
    assert gloo_world(2).run(most_gathers, flags) == [expected] * 2
    if choice == "uneven groups":
        assert min(gloo_world(2).run(most_gathers, flags, True)) > expected


def test_every_choice_is_in_ci():
    named = {choice for *_, names in CI for choice in choices_of(names)}
    assert named == set(CHOICES)
