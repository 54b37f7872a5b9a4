"""Mutants of meaning, some of each kind, are found; find_mutants.py shows it of all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from oracle.cases import CASES
from oracle.compare import EXACT
from oracle.find_mutants import FAR, find, found_by, size_of
from oracle.mutants import Mutant, all_mutants, by_name

RESULTS = Path(__file__).resolve().parents[2] / "docs/results/oracle_mutants.json"
IN_CI = (
    "an RMSNorm that takes the mean off",
    "the exact GELU for its tanh form and the other way round",
    "rotary pairs of neighbours instead of halves",
    "query heads spread over key heads the other way",
    "a window of one key more",
    "the document mask ignored",
    "one dropout mask for all layers",
    "residual outputs scaled by the root of L, not of 2 L",
    "z-loss without its factor of two in the gradient",
    "the loss mask ignored in the gradient",
    "samples at multiples of the sequence length",
    "positions reset one token late",
    "sources begin anew where a blend changes",
    "the normaliser of the whole batch under ramp-up",
    "no bias correction of the second moment",
    "epsilon inside the root",
    "weight decay of vectors",
    "a norm without the vectors",
    "a learning rate one step late",
    "embedding and head at the rate of all else",
    "learned positions at the rate of the word embedding",
    "a warm-up that is one sample longer",
    "a skipped step advances the schedule",
    "gradients unscaled by the first scale",
    "hysteresis ignored",
    "the loss a mean of micro-batches' means",
    "every evaluation reads other samples",
    "the data state dropped at a resume",
    "moments dropped at a resume",
    "finetuning keeps moments",
)


@pytest.mark.parametrize("name", IN_CI)
def test_the_mutant_is_found(name):
    assert find(by_name(name)), f"{name} survives {by_name(name).where}"


def test_the_product_itself_is_no_mutant():
    """The same machinery with a change that changes nothing."""
    none = Mutant(
        "",
        "none",
        "llama",
        ((json, "dumps", lambda original: lambda *args, **kwargs: original(*args, **kwargs)),),
    )
    assert find(none) is None


def test_a_mutant_that_does_not_run_is_not_found():
    def broken(original):
        raise AttributeError("gone")

    (case,) = (case for case in CASES if case.name == "llama")
    with pytest.raises(AttributeError, match="gone"):
        found_by(Mutant("", "stale", "llama", ((json, "dumps", broken),)), case)


@pytest.mark.parametrize(
    "text, exact, size",
    [
        ("run 0: iteration 3: lm loss 4.0, expected 5.0", False, 0.2),
        ("run 1: iteration 3: the console's grad-norm 1.5, expected 1.0", False, 1 / 3),
        ("run 0: iteration 1: loss-scale 2.0, expected 1.0", True, 0.5),
        ("run 0: weights of head.weight: relative error 3e-05", False, 3e-5),
        ("run 0: rows of iterations [1], expected [1, 2]", True, None),
    ],
)
def test_sizes_are_read_from_words(text, exact, size):
    found = size_of(text)
    assert found[0] == exact and found[1] == (size if size is None else pytest.approx(size))


def test_the_kept_results_are_of_these_mutants_and_all_were_found():
    kept = json.loads(RESULTS.read_text())
    results = kept["results"]
    names = [mutant.name for mutant in all_mutants()]
    assert len(set(names)) == len(names)
    assert results.keys() == set(names)
    assert kept["mutants"] == kept["found"] == len(names) and kept["tolerance"] == EXACT
    for name, found in results.items():
        assert found["by"].split("::")[0] == by_name(name).where, name
        assert found["size"] is None or found["size"] > FAR, name


@pytest.mark.parametrize("mutant", all_mutants(), ids=lambda mutant: mutant.name)
def test_every_mutant_can_be_put_in(mutant):
    """What it replaces is there: few mutants run every time."""
    with mutant.patch():
        pass
