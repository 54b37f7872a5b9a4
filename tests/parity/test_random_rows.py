"""Random flags in random layouts against one process: some cases on every run, thousands by
random_rows.py.
"""

from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest
from parity.random_rows import Case, Draw, faults


def in_some_layout(flag: str) -> Case:
    """The first case whose layout has a flag."""
    return next(
        case
        for seed in range(1000)
        if flag in (case := Draw(seed).case()).layout and case.ranks > 1
    )


@pytest.mark.parametrize("seed", range(6))
def test_a_random_layout_is_the_same_run(gloo_world, seed):
    case = Draw(seed).case()
    assert not faults(case, gloo_world), case.line


def test_another_run_is_noticed(gloo_world):
    """Negative control: in the layout other dropout, weights and samples."""
    case = Draw(0).case()
    assert faults(replace(case, layout=(*case.layout, "--seed", "7")), gloo_world)


def test_what_a_layout_gets_wrong_is_noticed(gloo_world):
    """Negative control: a mutant of the ring."""
    case = in_some_layout("p2p")
    assert faults(replace(case, patches=(*case.patches, "lost_hop_of_gradients")), gloo_world)


def test_a_case_is_a_function_of_its_seed():
    assert Draw(3).case() == Draw(3).case() != Draw(4).case()


def test_every_pair_of_layout_flags_is_drawn():
    """Within a thousand cases, but for pairs that the program refuses."""
    pairs: Counter[tuple[str, str]] = Counter()
    seen: Counter[str] = Counter()
    for seed in range(1000):
        layout = sorted(word for word in Draw(seed).case().layout if word.startswith("--"))
        pairs.update(combinations(layout, 2))
        seen.update(layout)
    assert min(seen.values()) >= 10, seen.most_common()[-5:]
    absent = [pair for pair in combinations(sorted(seen), 2) if pair not in pairs]
    assert len(absent) <= 0.1 * len(pairs), absent
