"""Each mutant of mutants.py is caught by the rows named for it, so that the table is known to
notice such faults.
"""

import ast

import pytest
from fragments import replaced
from parity.mutants import MUTANTS, ROOT, Mutant, caught_by, functions_of, mutated

BY_DEFAULT = "no sum of a column-parallel layer's input gradients"


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(each, id=each.name, marks=[] if each.name == BY_DEFAULT else pytest.mark.full)
        for each in MUTANTS
    ],
)
def test_the_mutant_is_caught(mutant):
    assert caught_by(mutant)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_can_be_put_in(mutant):
    """It changes functions, and adds none outside of others."""
    texts = (ROOT / mutant.file).read_text(), mutated(mutant)
    healthy, broken = (
        [
            (code.co_qualname, code.co_freevars)
            for code in functions_of(compile(text, mutant.file, "exec", dont_inherit=True))
        ]
        for text in texts
    )
    assert healthy == broken
    assert len({ast.dump(ast.parse(text)) for text in texts}) == 2


def test_healthy_code_is_not_caught():
    """Negative control: the same machinery with a change that changes nothing."""
    assert (
        caught_by(
            Mutant(
                "none",
                "megatron/model/linear.py",
                "import torch.nn.functional as F",
                "import torch.nn.functional as F  # nothing",
                ("fp64-gpt-tp2",),
            )
        )
        is None
    )


def test_a_stale_mutant_is_loud():
    with pytest.raises(AssertionError, match="this code is there 0 times"):
        mutated(Mutant("old", "megatron/model/linear.py", "text of years ago", "", ()))


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
