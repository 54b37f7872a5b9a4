"""Random flags in random layouts against one process: some cases on every run, thousands by
random_rows.py.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

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
def test_another_run_is_noticed(gloo_world):
    """Negative control: in the layout other dropout, weights and samples."""
    case = first(lambda case: not case.is_resumed)
    assert faults(with_flags(case, "--seed", "7"), gloo_world)


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


@pytest.mark.full
def test_every_pair_of_layout_flags_is_drawn():
    """Within a thousand cases, but for pairs that the program refuses."""
    pairs: Counter[tuple[str, str]] = Counter()
    seen: Counter[str] = Counter()
    for seed in range(1000):
        for layout in Draw(seed).case().layouts:
            flags = sorted(word for word in layout.flags if word.startswith("--"))
            pairs.update(combinations(flags, 2))
            seen.update(flags)
    assert min(seen.values()) >= 10, seen.most_common()[-5:]
    absent = [pair for pair in combinations(sorted(seen), 2) if pair not in pairs]
    assert len(absent) <= 0.1 * len(pairs), absent
