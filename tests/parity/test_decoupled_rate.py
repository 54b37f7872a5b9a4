"""--decoupled-lr in layouts of every kind against one process, and against runs without it: the
word embedding and the head's matrix take a rate of their own wherever their parts lie.
"""

from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from parity.compare import faults_in, fp64, gather
from parity.layouts import BASE, LLAMA, NO_DROPOUT, Row
from parity.worker import Outcome, reference, run_case

from megatron.optimizer import nvme
from megatron.optimizer.lr_schedule import LearningRates

RATES = (
    "--lr-decay-style cosine --decoupled-lr 3e-2 --decoupled-min-lr 2e-3 --min-lr 1e-3 "
    "--lr-warmup-init 1e-3"
)


@dataclass(frozen=True)
class TwoRates(Row):
    """A layout with both rates."""

    def flags(self, *, layout: bool, exact: bool = False) -> tuple[str, ...]:
        return (*super().flags(layout=layout, exact=exact), *RATES.split())


# gpt is tied, with learned positions; llama is untied
ROWS = (
    TwoRates("tp2 dp2 zero2", "gpt"),
    TwoRates("tp2 sp dp2 zero3", "llama"),
    TwoRates("dp2 zero1", "gpt"),
    TwoRates("cp2 zero2", "gpt"),
    TwoRates("pp2 1f1b", "gpt"),
    TwoRates("pp2 1f1b", "llama"),
    TwoRates("pp2 zero-bubble-v dp2 zero2", "gpt"),
)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_layout_is_the_same_run(gloo_world, row):
    assert not faults_in(gloo_world, row)


def test_a_copy_of_a_tied_matrix_that_declares_no_rate_is_noticed(gloo_world):
    row = TwoRates("pp2 1f1b", "gpt")
    assert faults_in(gloo_world, row, "copy_at_the_base_rate")


def test_an_optimizer_that_ignores_what_tensors_declare_is_noticed():
    row = TwoRates("dp2 zero1", "gpt")
    with mock.patch.object(LearningRates, "of", lambda self, multipliers: self.base):
        ignoring = run_case(row.flags(layout=False))
    assert fp64(reference(row.flags(layout=False)), [ignoring])


# ---- equal bits


UNTIED = f"{LLAMA} --untie-embeddings-and-output-weights"
SHORT = (*BASE, "--micro-batch-size", "2", "--lr-decay-style", "cosine", "--min-lr", "1e-3")
# what ranks hold and where, with and without tied matrices
KINDS = {
    "one": (1, NO_DROPOUT),
    "bf16": (1, f"{UNTIED} --bf16"),
    "dp2-zero2": (2, f"{NO_DROPOUT} --zero-stage 2"),
    "tp2-sp": (2, f"{UNTIED} --tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, f"{NO_DROPOUT} --pipeline-model-parallel-size 2"),
}


def without_rate(outcome: Outcome) -> list[str]:
    """All that a run logs but for the second rate."""
    rows = [
        {name: value for name, value in row.items() if name != "decoupled-learning-rate"}
        for row in outcome.metrics
    ]
    return [*map(repr, outcome.steps), *map(repr, rows)]


def same_bits(ones: list[Outcome], others: list[Outcome]) -> bool:
    faults: list[str] = []
    weights, theirs = (
        gather(ranks, lambda outcome: outcome.weights, faults) for ranks in (ones, others)
    )
    return (
        not faults
        and list(map(without_rate, ones)) == list(map(without_rate, others))
        and weights.keys() == theirs.keys()
        and all(torch.equal(weights[name], theirs[name]) for name in weights)
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.default("bf16", "dp2-zero2")
def test_a_second_rate_that_is_the_first_changes_no_bit(gloo_world, kind):
    ranks, more = KINDS[kind]
    world, flags = gloo_world(ranks), (*SHORT, *more.split())
    plain = world.run(run_case, flags)
    assert same_bits(plain, world.run(run_case, (*flags, "--decoupled-lr", "1e-2")))
    assert not same_bits(plain, world.run(run_case, (*flags, "--decoupled-lr", "1.1e-2")))


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("where", ["host", "part", "files"])
def test_state_elsewhere_takes_both_rates(gloo_world, tmp_path, stage, where):
    """The host steps the last blocks first: half of them has the head, not the embedding."""
    flags = (*SHORT, *UNTIED.split(), *RATES.split(), "--zero-stage", str(stage))
    more = {
        "host": ("--optimizer-cpu-offload",),
        "part": ("--optimizer-cpu-offload", "--optimizer-offload-fraction", "0.5"),
        "files": ("--optimizer-nvme-offload", str(tmp_path)),
    }
    # norms of weights are summed part by part
    flags = tuple(flag for flag in flags if flag != "--log-params-norm")
    world = gloo_world(2)
    assert same_bits(world.run(run_case, flags), world.run(in_small_parts, (*flags, *more[where])))


def in_small_parts(flags: tuple[str, ...]) -> Outcome:
    """The run with files of many parts, which begin and end within tensors."""
    with mock.patch.object(nvme, "PART", 1024):
        return run_case(flags)
