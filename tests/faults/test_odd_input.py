"""A part of every campaign of odd input."""

from __future__ import annotations

import pytest

from campaigns.odd_input.odd_input import campaigns


@pytest.mark.parametrize(
    "name, count",
    [
        ("command lines", 12),
        ("configurations", 60),
        ("deepspeed", 100),
        ("jsonl", 40),
        ("tokenizers", 12),
        ("index", 60),
        ("checkpoints", 300),
        ("pickles", 150),
    ],
)
def test_a_part_of_each_campaign(tmp_path, name, count):
    verdicts = campaigns()[name][0](count, 7, tmp_path)
    assert verdicts.wrong == [] and sum(verdicts.outcomes.values()) == count
    assert verdicts.outcomes["refused"] > 0
