"""Blends: exact quotas, even spread, and a history that lets every source go on where it was."""

from __future__ import annotations

import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.blend import PATTERN, Blend, extend_history, pattern, quotas
from megatron.data.indexed_dataset import DataError


@settings(max_examples=100, deadline=None)
@given(
    weights=st.lists(st.floats(0.01, 1e6), min_size=1, max_size=40).filter(
        lambda w: min(w) / sum(w) > 1e-4
    )
)
def test_quotas_are_the_largest_remainder_rounding(weights):
    shares = quotas(weights, [str(d) for d in range(len(weights))])
    total = sum(map(Fraction, weights))
    exact = [Fraction(weight) / total * PATTERN for weight in weights]
    assert sum(shares) == PATTERN
    assert all(abs(share - value) < 1 for share, value in zip(shares, exact))
    remainder = [value - int(value) for value in exact]
    raised = [share > value for share, value in zip(shares, exact)]
    ups, downs = (
        [r for r, up in zip(remainder, raised) if up],
        [r for r, up in zip(remainder, raised) if not up],
    )
    assert not ups or not downs or min(ups) >= max(downs) - Fraction(1, 10**6)


def test_a_weight_that_would_never_be_read_is_refused():
    assert quotas([1, 1 / PATTERN], ["a", "b"]) == [PATTERN - 1, 1]
    with pytest.raises(DataError, match="tiny: a weight below"):
        quotas([1.0, 1e-7], ["big", "tiny"])


@settings(max_examples=60, deadline=None)
@given(shares=st.lists(st.integers(1, 400), min_size=1, max_size=12))
def test_every_prefix_holds_each_source_within_one_of_its_share(shares):
    total, chosen = sum(shares), pattern(shares)
    assert np.bincount(chosen, minlength=len(shares)).tolist() == shares
    for d, share in enumerate(shares):
        held = np.cumsum(chosen == d)
        due = np.arange(1, total + 1) * share
        assert np.abs(held * total - due).max() < total  # strictly within 1 of the share


@settings(max_examples=40, deadline=None)
@given(
    shares=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    first=st.integers(0, 500),
    count=st.integers(1, 900),
)
def test_each_source_is_read_in_order_without_gaps(shares, first, count):
    start = list(range(10, 10 * len(shares) + 10, 10))
    blend = Blend(shares, first, start)
    source, index = blend.locate(np.arange(first, first + count))
    ends = [begin + int((source == d).sum()) for d, begin in enumerate(start)]
    for d, (begin, end) in enumerate(zip(start, ends)):
        assert index[source == d].tolist() == list(range(begin, end))
    assert blend.indices_at(first + count) == ends


def source(name: str, share: int) -> dict:
    return {"id": "id-" + name, "name": name, "share": share}


def test_history_goes_on_where_each_source_was():
    plan = [
        (0, [source("a", 40000), source("b", 25536)]),
        (1000, [source("a", 40000), source("b", 25536)]),  # a plain resume
        (1500, [source("a", 10000), source("b", 55536)]),  # weights
        (1700, [source("b", PATTERN)]),  # a leaves
        (1700, [source("b", PATTERN)]),
        (2000, [source("c", 30000), source("a", 35536)]),  # b leaves, a returns, c enters
        (2300, [source("b", PATTERN)]),
    ]
    history, read = None, {"a": [], "b": [], "c": []}
    for number, (begin, sources) in enumerate(plan):
        end = plan[number + 1][0] if number + 1 < len(plan) else 2600
        history, blend, notes = extend_history(json.loads(json.dumps(history)), begin, sources)
        chosen, index = blend.locate(np.arange(begin, end))
        for d, k in zip(chosen.tolist(), index.tolist()):
            read[sources[d]["name"]].append(k)
        assert bool(notes) == (number in (2, 3, 5, 6))
    assert sum(map(len, read.values())) == 2600
    for indices in read.values():
        assert indices == list(range(len(indices)))
    firsts = [segment["first_sample"] for segment in history["segments"]]
    assert firsts == [0, 1500, 1700, 2000, 2300]
    notes = extend_history(history, 2600, [source("d", 1), source("a", PATTERN - 1)])[2]
    assert "d is new (content" in notes[0]
    assert f"a continues at its sample {len(read['a'])}" in notes[1]


def test_samples_of_an_earlier_segment_are_refused():
    history, _, _ = extend_history(None, 0, [source("a", PATTERN)])
    _, blend, _ = extend_history(history, 100, [source("b", PATTERN)])
    blend.locate(np.arange(100, 110))
    fault = "sample 99 was read before the blend changed at sample 100"
    with pytest.raises(ValueError, match=fault):
        blend.locate(np.arange(99, 110))


def test_real_data_after_mock_data_begins_at_its_first_sample():
    history, blend, _ = extend_history({"segments": []}, 70, [source("a", PATTERN)])
    assert blend.locate(np.array([70, 71]))[1].tolist() == [0, 1]
    assert history["segments"][0]["first_sample"] == 70
