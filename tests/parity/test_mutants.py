"""Each mutant of mutants.py is caught by the rows named for it, so that the table is known to notice such faults."""

import pytest
from parity.mutants import MUTANTS, ROOT, Mutant, broken_copy, caught_by, mutated
from selection import one_in

EVERY = 6  # one mutant in six is put in on every run, some of each kind; the others are a campaign


@pytest.mark.parametrize("mutant", one_in(EVERY, [(mutant,) for mutant in MUTANTS], [mutant.name for mutant in MUTANTS]))
def test_the_mutant_is_caught(mutant):
    assert caught_by(mutant)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_can_be_put_in(mutant):
    assert mutated(mutant) != (ROOT / mutant.file).read_text()


def test_healthy_code_is_not_caught():
    """Negative control: the same machinery with a change that changes nothing."""
    assert caught_by(Mutant("none", "megatron/layers/linear.py", "import torch\n", "import torch\n\n", ("fp64-gpt-tp2",))) is None


def test_a_stale_mutant_is_loud(tmp_path):
    with pytest.raises(AssertionError, match="has this text 0 times"):
        broken_copy(Mutant("old", "megatron/layers/linear.py", "text of years ago", "", ()), tmp_path)
