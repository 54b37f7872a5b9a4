"""Runs that must have the bits of another run: of losses, evaluations, gradients and weights.

- recomputation and activations on the host, against the same layout without them;
- a pipeline of an untied model in fp32, under every schedule, against one process: no sum is taken
  in another order;
- pairs of micro-batches that overlap the exchange of experts' tokens, against the run without.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from unittest import mock

import pytest
from megatron.tools._plan.recompute import choose_layers
from mutation import Mutant, check_mutants, read_mutants
from parity.compare import bits_off
from parity.layouts import BASE, FEATURES, LLAMA, SCHEDULES, Row
from parity.worker import Outcome, reference, run_case

from megatron.config.arguments import parse_arguments
from megatron.config.recompute import layer_words
from megatron.config.validate import resolve
from megatron.parallel import zero_plan
from megatron.parallel.blocks import Block
from megatron.parallel.offload import HostCopies
from megatron.parallel.schedule import Kind

SELECTIVE = "--recompute-granularity selective --recompute-modules"
FULL = "--recompute-granularity full"
RECOMPUTE = {
    "norms+activation": f"{SELECTIVE} layernorm mlp_act",
    "core": "--recompute-activations",
    "qkv": f"{SELECTIVE} qkv",
    "mlp": f"{SELECTIVE} mlp layernorm",
    "all": f"{SELECTIVE} layernorm qkv core_attn mlp",
    "full": FULL,
    "groups": f"{FULL} --recompute-method uniform --recompute-num-layers 2",
    "uneven": f"{FULL} --recompute-method uniform --recompute-num-layers 3",
    "block": f"{FULL} --recompute-method block --recompute-num-layers 1",
    "shares": f"{FULL} --recompute-num-layers 2 --distribute-saved-activations",
    "by-layers": "--recompute-layers full layernorm+mlp core_attn none",
    "latents": f"{SELECTIVE} mla_up_proj core_attn layernorm",
}
AWAY = "--activation-offload --min-offloaded-tensor-size 64"
OFFLOAD = {
    "away": AWAY,
    "away-half": f"{AWAY} --activation-offload-fraction 0.5",
    "away-attention": f"{AWAY} --offload-modules qkv_linear core_attn attn_proj",
    "away-mlp": f"{AWAY} --offload-modules attn_norm mlp_norm mlp_fc1 mlp_act mlp_fc2",
    "away-rebuilt": f"{AWAY} {SELECTIVE} layernorm qkv mlp_act",
    "away-inputs": f"{AWAY} {FULL}",
    "away-groups": f"{AWAY} {FULL} --recompute-num-layers 2",
    "away-shares": f"{AWAY} {FULL} --distribute-saved-activations",
    "away-by-layers": f"{AWAY} --recompute-layers full layernorm+mlp core_attn none",
}
CHOICES = RECOMPUTE | OFFLOAD
PRECISIONS = {
    "fp32": "",
    "bf16": "--bf16",
    "fp16": "--fp16 --initial-loss-scale 1024",
    "fp8": "--bf16 --fp8-format e4m3 --fp8-min-width 16",
}
STEPS = (
    "--train-iters 2 --lr-warmup-iters 1 --num-layers 4 --global-batch-size 4 --micro-batch-size 1"
)

ROWS = """
fp16 dropout dp1: uneven qkv away away-groups
bf16 documents dp1: away away-by-layers
bf16 dropout tp2: all shares away away-shares
fp32 gqa2-qknorm tp2 sp: all groups away away-inputs
bf16 dropout cp2: all groups away away-inputs
fp32 gqa2-qknorm cp2 a2a: all away-attention
bf16 dropout cp2 p2p: all groups away-attention
bf16 llama dp2 zero1: mlp norms+activation
fp8 llama dp2 zero1: all full away
fp32 dropout dp2 zero2: all away-mlp
bf16 dropout dp2 zero3: all uneven block away away-groups
fp32 dropout pp2 gpipe: groups away-rebuilt
bf16 documents pp2 1f1b: block core
bf16 llama pp2 1f1b: away away-half
fp32 dropout pp2 interleaved v2: groups norms+activation away away-inputs
bf16 dropout pp2 zero-bubble: all groups away away-rebuilt
fp32 gqa2-qknorm pp2 zero-bubble-v: all away
bf16 dropout pp2 1f1b tp2: shares by-layers
bf16 dropout pp2 zero-bubble dp2 zero3: all groups away away-inputs
fp32 mla tp2 sp: latents qkv away away-attention
bf16 mla-dropout pp2 zero-bubble: latents all
"""


def rows() -> list[tuple[str, str]]:
    """(precision, feature and layout; choice)."""
    lines = (line.split(": ") for line in ROWS.strip().splitlines())
    return [(described, choice) for described, choices in lines for choice in choices.split()]


def read(described: str) -> tuple[int, tuple[str, ...]]:
    """The ranks and the flags of `precision feature layout`."""
    precision, feature, *words = described.split()
    layout = " ".join(words)
    row = None if layout == "dp1" else Row(layout, feature)
    layers = "--num-layers 8" if "interleaved" in layout or "zero-bubble-v" in layout else ""
    own = f"{FEATURES[feature].flags} {STEPS} {PRECISIONS[precision]} {layers}".split()
    return row.world if row else 1, (*BASE, *own, *(row.words.flags if row else ()))


@pytest.fixture(scope="module")
def plain(gloo_world):
    """Outcomes of runs without a choice, by ranks and flags."""
    kept: dict = {}

    def run(ranks: int, flags: tuple[str, ...]) -> list[Outcome]:
        if flags not in kept:
            kept[flags] = gloo_world(ranks).run(run_case, flags)
        return kept[flags]

    return run


def counted(flags: tuple[str, ...]) -> tuple[Outcome, int]:
    """A run's outcome, and how many storages it has sent to the host."""
    sent, send = [], HostCopies.send

    def counting(self, storages):
        sent.extend(storages)
        return send(self, storages)

    with mock.patch.object(HostCopies, "send", counting):
        return run_case(flags), len(sent)


# ---- recomputation and offload


@pytest.mark.parametrize("described, choice", rows(), ids=map(" ".join, rows()))
@pytest.mark.default(
    "fp32 gqa2-qknorm tp2 sp all",
    "fp32 dropout pp2 interleaved v2 away",
    "fp32 gqa2-qknorm pp2 zero-bubble-v all",
    "bf16 dropout pp2 zero-bubble dp2 zero3 all",
)
def test_the_same_bits(gloo_world, plain, described, choice):
    ranks, flags = read(described)
    found = gloo_world(ranks).run(counted, (*flags, *CHOICES[choice].split()))
    outcomes, sent = zip(*found, strict=True)
    assert {bool(count) for count in sent} == {choice in OFFLOAD}
    assert not bits_off(list(outcomes), plain(ranks, flags), norms=0.0)


def test_every_mutant_can_be_put_in():
    check_mutants(MUTANTS)


def test_every_choice_is_in_a_row():
    assert {choice for _, choice in rows()} == CHOICES.keys()


@pytest.mark.full
def test_what_auto_chooses_has_the_same_bits(gloo_world, plain):
    ranks, flags = read("bf16 dropout pp2 1f1b")
    auto = (*flags, *"--recompute auto --memory-budget 0.00057".split())
    config = resolve(parse_arguments([*auto]).config, 2, 50).config
    chosen, _ = choose_layers(config, 50, 2, "cpu")
    assert set(layer_words(chosen.training.recompute_layers)) > {"none"}
    found = gloo_world(ranks).run(run_case, auto)
    assert not bits_off(found, plain(ranks, flags), norms=0.0)


MUTANTS = read_mutants(
    """
= megatron/parallel/layer_runner.py LayerRunner._inputs
a layer rebuilt from the negated input | bf16 dropout pp2 1f1b: full
    return Inputs(x, micro_batch) => return Inputs(None if x is None else -x, micro_batch)
a rank keeps its neighbor's share of the input | bf16 dropout tp2: shares
    [self.sharing.rank].clone() => [self.sharing.rank - 1].clone()
= megatron/parallel/layer_runner.py LayerRunner.rebuild
the second layer of a group reads the group's input | bf16 dropout pp2 1f1b: groups
    following._replace(x=y) => following._replace(x=self._input_of(saved))
= megatron/parallel/offload.py HostCopies.send
a host buffer free as soon as it has been filled | bf16 llama pp2 1f1b: away
    return Departed(storages, =>
        [self.pool.give(storage.size, storage.buffer) for storage in storages]
        return Departed(storages,
= megatron/parallel/offload.py HostCopies.fetch
memory that is read before it has been copied back | bf16 llama pp2 1f1b: away
    storage.tensor.copy_(memory.view(storage.dtype), non_blocking=True) =>
        storage.tensor.zero_()
"""
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
@pytest.mark.default("a rank keeps its neighbor's share of the input")
def test_the_mutant_is_found(gloo_world, plain, mutant: Mutant):
    described, choice = mutant.where.split(": ")
    ranks, flags = read(described)
    chosen = (*flags, *CHOICES[choice].split())
    found = gloo_world(ranks).run(run_case, chosen, (), "cpu", mutant)
    assert bits_off(found, plain(ranks, flags))


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
    return max(counts.values())


@pytest.mark.parametrize("choice", ["full", "uneven"])
def test_a_rebuilt_layer_is_gathered_once_for_rebuilding_and_backward(gloo_world, choice):
    """Twice a step and micro-batch, as without recomputation; a control that frees a layer between
    the two gathers it a third time.
    """
    ranks, flags = read("fp32 llama dp2 zero3")
    flags = (*flags, *"--num-layers 9 --eval-iters 0".split(), *CHOICES[choice].split())
    expected = 2 * 2 * 2  # of 2 steps of 2 micro-batches
    assert gloo_world(ranks).run(most_gathers, flags) == [expected] * 2
    if choice == "uneven":
        assert min(gloo_world(ranks).run(most_gathers, flags, True)) > expected


# ---- schedules


ADAM = "--clip-grad 0"
SGD = "--clip-grad 0 --optimizer sgd --lr 0.1"
# untied, clipping off: the one thing that adds over stages is the norm
COMMON = "--untie-embeddings-and-output-weights --num-layers 4 --train-iters 3 --micro-batch-size 1"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "flags", [f"{ADAM} --hidden-dropout 0.1", f"{SGD} {LLAMA}"], ids=["adam-dropout", "sgd-llama"]
)
@pytest.mark.default("adam-dropout-interleaved v2", "adam-dropout-zero-bubble-v")
def test_a_pipeline_has_the_bits_of_one_process(gloo_world, flags, schedule):
    flags = (*BASE, *COMMON.split(), *flags.split())
    outcomes = gloo_world(2).run(run_case, (*flags, *Row(f"pp2 {schedule}", "gpt").words.flags))
    assert not bits_off(outcomes, [reference(flags)])


def test_another_order_of_the_sums_gives_other_bits():
    """The control: two samples in a micro-batch instead of one."""
    flags = (*BASE, *COMMON.split(), *SGD.split(), *LLAMA.split())
    assert bits_off([reference(flags)], [reference((*flags, "--micro-batch-size", "2"))])


# ---- pairs of micro-batches


PAIRED = "--overlap-moe-expert-parallel-comm"


@pytest.mark.parametrize(
    "row",
    [
        Row("dp2 ep2 paired", "moe-odd"),
        Row("dp4 ep2 paired zero3", "moe-bias", "bf16"),
        Row("pp2 1f1b dp2 ep2 paired zero2", "moe-act", "fp32"),
        Row("pp2 interleaved v2 dp2 ep2 paired", "moe-bias", "fp32"),
    ],
    ids=str,
)
def test_pairs_have_the_bits_of_the_run_without(gloo_world, row):
    world, flags = gloo_world(row.world), row.flags(layout=True)
    without = tuple(flag for flag in flags if flag != PAIRED)
    assert len(without) < len(flags)
    paired, plain = (world.run(run_case, each, row.patches) for each in (flags, without))
    assert not bits_off(paired, plain, norms=0.0)
