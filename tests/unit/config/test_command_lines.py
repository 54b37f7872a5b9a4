"""A few of the random command lines of command_lines.py, whose whole result is
docs/results/command_lines.json.
"""

from __future__ import annotations

import command_lines
import pytest


@pytest.mark.full
def test_random_command_lines_end_with_a_message():
    counts, wrong = command_lines.campaign(40, seed=7)
    assert not wrong, wrong[0]
    assert counts["0"] > 5 and counts["2"] > 15  # of both kinds


def test_a_traceback_and_a_hang_are_noticed(monkeypatch):
    def broken(argv):
        raise KeyError("of ours")

    def endless(argv):
        while True:
            pass

    monkeypatch.setattr(command_lines.pretrain_gpt, "main", broken)
    assert command_lines.outcome([])[0] == "traceback"
    monkeypatch.setattr(command_lines, "SECONDS", 1)
    monkeypatch.setattr(command_lines.pretrain_gpt, "main", endless)
    assert command_lines.outcome([])[0] == "hang"
    monkeypatch.setattr(command_lines.pretrain_gpt, "main", lambda argv: 2)
    assert command_lines.outcome([])[0] == "2 without a message"
