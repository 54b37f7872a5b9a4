"""Each mutant of mutants.py is caught by the rows named for it, so that the table is known to
notice such faults.
"""

import ast

import pytest
from fragments import replaced
from parity.mutants import MUTANTS, ROOT, Mutant, broken_copy, caught_by, mutated
from selection import one_in

EVERY = 6  # one mutant in six is put in by `full`, some of each kind; the others are a campaign


@pytest.mark.full
@pytest.mark.parametrize(
    "mutant", one_in(EVERY, [(mutant,) for mutant in MUTANTS], [mutant.name for mutant in MUTANTS])
)
def test_the_mutant_is_caught(mutant):
    assert caught_by(mutant)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_can_be_put_in(mutant):
    healthy, broken = (ROOT / mutant.file).read_text(), mutated(mutant)
    assert ast.dump(ast.parse(broken)) != ast.dump(ast.parse(healthy))


def test_a_mutant_is_caught_by_default():
    """One; the rows that catch the others are all among the default rows of the table."""
    assert caught_by(next(mutant for mutant in MUTANTS if "input gradients" in mutant.name))


def test_healthy_code_is_not_caught():
    """Negative control: the same machinery with a change that changes nothing."""
    assert (
        caught_by(
            Mutant(
                "none",
                "megatron/layers/linear.py",
                "import torch.nn.functional as F",
                "import torch.nn.functional as F  # nothing",
                ("fp64-gpt-tp2",),
            )
        )
        is None
    )


def test_a_stale_mutant_is_loud(tmp_path):
    with pytest.raises(AssertionError, match="this code is there 0 times"):
        broken_copy(
            Mutant("old", "megatron/layers/linear.py", "text of years ago", "", ()), tmp_path
        )


def test_a_mutant_is_found_whatever_the_format():
    """Line breaks, comments, quotes and a formatter's last comma do not matter; names and values
    do.
    """
    code = "def f(x):\n    return g(  # the only call\n        x,\n        'a, b',\n    ) + 1\n"
    assert replaced(code, 'g(x, "a, b")', "h(x)") == "def f(x):\n    return h(x) + 1\n"
    for absent in ("g(x)", "g(y, 'a, b')", "g(x, 'a,b')", "turn g"):
        with pytest.raises(AssertionError, match="0 times"):
            replaced(code, absent, "")
    with pytest.raises(AssertionError, match="2 times"):
        replaced("a = 1\nb = 1\n", "= 1", "= 2")
