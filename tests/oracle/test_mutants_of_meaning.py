"""Mutants of meaning are found: some of each kind by default, all by `full`."""

from __future__ import annotations

import pytest
from mutation import Edit, Mutant, check_mutants
from oracle.cases import CASES
from oracle.compare import expected, weights_differ
from oracle.find_mutants import FAR, find
from oracle.mutants import MUTANTS
from oracle.program import Seen

DEFAULT = (  # a small change of each part: model, attention, data, loss, optimizer, resume
    "an RMSNorm that takes the mean off",
    "a window of one key more",
    "one dropout mask for all layers",
    "residual outputs scaled by the root of L, not of 2 L",
    "samples at multiples of the sequence length",
    "epsilon inside the root",
    "a learning rate one step late",
    "hysteresis ignored",
    "moments dropped at a resume",
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
@pytest.mark.default(*DEFAULT)
def test_the_mutant_is_found(mutant):
    """A mutant that does not run, because a signature changed, is an error, not a find."""
    assert find(mutant), f"{mutant.name} survives {mutant.where}"


def test_every_mutant_can_be_put_in():
    check_mutants(MUTANTS)


def of_perplexity(new: str) -> Mutant:
    """A mutant of the function that computes perplexity, in the case llama."""
    edit = Edit("megatron/observe/metrics.py", "perplexity", (("return math.exp(", new),))
    return Mutant("own", "llama", (edit,))


def test_the_product_itself_is_no_mutant():
    """The same machinery with a change that changes nothing."""
    assert find(of_perplexity("return math.exp(")) is None


def test_a_mutant_that_does_not_run_is_not_found():
    with pytest.raises(AssertionError, match="own: does not run: .*gone"):
        find(of_perplexity("return gone("))


def test_a_small_change_of_weights_is_far_above_the_tolerance_from_far_on():
    (case,) = (case for case in CASES if case.name == "llama")
    (argv,), (outcome,) = case.runs("unused"), expected(case)
    for share, is_far in ((1e-8, False), (1e-6, True)):
        changed = {name: w.detach() * (1 + share) for name, w in outcome.state.weights.items()}
        found = weights_differ(case, argv, outcome, Seen({}, {}, {}, changed))
        assert len(found) == len(changed)
        for each in found:
            assert not each.is_exact and each.size == pytest.approx(share, rel=0.1)
            assert (each.size > FAR) == is_far
