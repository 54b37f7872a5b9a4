"""A part of every campaign of odd input, and that the campaigns notice readers that do not
check.
"""

from __future__ import annotations

import pytest

from campaigns.odd_input.checkpoint_files import checkpoint_damages
from campaigns.odd_input.odd_input import campaigns
from campaigns.odd_input.settings_files import configurations, deepspeed
from megatron.checkpoint import manifest
from megatron.config import deepspeed as comparison
from megatron.config import options


@pytest.mark.parametrize(
    "name, count",
    [
        ("command lines", 12),
        ("configurations", 60),
        ("deepspeed", 100),
        ("jsonl", 40),
        ("tokenizers", 12),
        ("index", 60),
        ("checkpoints", 60),
        ("pickles", 150),
    ],
)
def test_a_part_of_each_campaign(tmp_path, name, count):
    verdicts = campaigns()[name][0](count, 7, tmp_path)
    assert verdicts.wrong == [] and sum(verdicts.outcomes.values()) == count
    assert verdicts.outcomes["refused"] > 0


def test_a_comparison_that_refuses_nothing_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "_check_refused", lambda key, value: None)
    assert deepspeed(300, 1, tmp_path).wrong


def test_a_configuration_that_may_hold_any_value_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(options.Option, "load", lambda option, value: value)
    assert configurations(60, 1, tmp_path).wrong


def test_a_state_that_nobody_checks_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "check_run_state", lambda state: None)
    assert checkpoint_damages(60, 1, tmp_path).wrong
