"""Each mutant of mutants.py is caught by the row named for it, so that the table is known to
notice such faults.
"""

from dataclasses import replace

import pytest
from fragments import replaced
from mutation import Edit, Mutant, check_mutants, code_of
from parity.mutants import MUTANTS, caught_by


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
@pytest.mark.default("no sum of a column-parallel layer's input gradients")
def test_the_mutant_is_caught(gloo_world, mutant):
    assert caught_by(mutant, gloo_world)


def test_every_mutant_can_be_put_in():
    check_mutants(MUTANTS)


def test_healthy_code_is_not_caught(gloo_world):
    """Negative control: the same machinery with a change that changes nothing."""
    same = (("y.add_(bias)", "y.add_(bias)"),)
    edit = Edit("megatron/model/linear.py", "_RowLinear.forward", same)
    assert caught_by(Mutant("none", "gpt tp2", (edit,)), gloo_world) is None


def test_a_mutant_is_put_in_for_the_block_alone():
    (edit,) = MUTANTS[0].edits
    before = edit.live().__code__
    with Mutant("", "", (edit,)).put_in():
        assert edit.live().__code__ is not before
        assert edit.live().__code__.co_qualname == edit.function
    assert edit.live().__code__ is before


def test_a_stale_mutant_is_loud():
    old = (("text of years ago", ""),)
    edit = Edit("megatron/model/linear.py", "_RowLinear.forward", old)
    with pytest.raises(AssertionError, match="this code is there 0 times"):
        edit.code()
    with pytest.raises(AssertionError, match="has no function gone"):
        replace(edit, function="gone").code()


def test_functions_are_found_by_their_qualified_name():
    module = compile("class A:\n    def f(self):\n        def g(): pass\n", "", "exec")
    assert [code.co_name for code in code_of(module, "A.f")] == ["f"]


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
