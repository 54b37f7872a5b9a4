"""Random flags in random layouts against one process: some cases on every run, thousands by
random_rows.py.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
from parity.random_rows import Case, Draw, faults


def first(wanted: Callable[[Case], bool]) -> Case:
    """The first case that has something."""
    return next(case for seed in range(1000) if wanted(case := Draw(seed).case()))


def with_flags(case: Case, *flags: str) -> Case:
    """More flags in the last layout."""
    *before, last = case.layouts
    return replace(case, layouts=(*before, replace(last, flags=(*last.flags, *flags))))


@pytest.mark.parametrize("seed", range(6))
def test_a_random_layout_is_the_same_run(gloo_world, seed):
    case = Draw(seed).case()
    assert not faults(case, gloo_world), case.line


@pytest.mark.full
def test_another_narrow_run_is_noticed(gloo_world):
    """Negative control of runs in bf16: a learning rate a little lower."""
    case = first(lambda case: case.is_narrow and not case.layouts[0].patches)
    assert not faults(case, gloo_world), case.line
    assert faults(with_flags(case, "--lr", "0.07"), gloo_world)


@pytest.mark.full
def test_a_resume_without_the_optimizers_state_is_noticed(gloo_world):
    """Negative control of runs that resume elsewhere."""
    case = first(lambda case: case.is_resumed and "sgd" not in case.flags)
    assert not faults(case, gloo_world), case.line
    assert faults(with_flags(case, "--no-load-optim"), gloo_world)


def test_a_case_is_a_function_of_its_seed():
    assert Draw(3).case() == Draw(3).case() != Draw(4).case()
