"""The benchmark of tokens that travel during computation: what is run, and how rows are judged."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron.benchmarks import expert_overlap as tool
from megatron.benchmarks.training import command_of

from megatron.config.arguments import parse_arguments
from megatron.config.validate import cross_field_faults


@pytest.mark.parametrize("flags", [[], [tool.FLAG]])
def test_both_runs_are_allowed(flags):
    command = command_of("ours", tool.WORK, Path(), Path())
    words = [
        *command[1 + next(i for i, word in enumerate(command) if "pretrain" in word) :],
        *flags,
    ]
    config = parse_arguments(words).config
    assert config.distributed.overlap_moe_expert_parallel_comm == bool(flags)
    assert config.training.global_batch_size == 16 and config.training.micro_batch_size == 2
    assert not cross_field_faults(config, 2, tool.WORK.vocab)


def runs(rate: str, times: list[tuple[float, float]], busy: tuple[int, ...] = ()) -> list[dict]:
    """Of each round the times without and with the flag; in busy ones others used a core."""
    return [
        {
            "rate": rate,
            "round": index,
            "overlaps": overlaps,
            "step_ms": milliseconds,
            "others_cores": 1.0 if index in busy else 0.0,
        }
        for index, both in enumerate(times)
        for overlaps, milliseconds in zip((False, True), both)
    ]


def test_rows():
    rows = tool.summary(
        [
            *runs("1mbit", [(100.0, 50.0)] * 7),
            *runs("unlimited", [(10.0, 30.0), (10.0, 11.0)], (0,)),
        ],
        0.2,
    )
    slow, fast = rows
    assert (slow["median"], slow["pairs"], slow["passed"]) == (0.5, 7, True)
    assert (fast["median"], fast["pairs"], fast["passed"]) == (1.1, 1, False)
    text = tool.table(rows).splitlines()
    assert text[2] == "| 1mbit | 100 | 50 | 0.50 (0.50-0.50) | 7 |"
