"""The measurement of the optimizer's step: its sides do equal work, only quiet rounds count for
elapsed time, goals are least ratios.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks/peers"))

from adam_step import SIDES, Segments
from megatron.benchmarks import adam as tool


# its environment is missing
@pytest.mark.parametrize(
    "side", [side for side in SIDES if side not in (tool.OURS, tool.DEEPSPEED)]
)
def test_every_side_does_the_same_work(side):
    ours, theirs = Segments(2, 1000), Segments(2, 1000)
    before = torch.cat(ours.masters)
    mine, other = SIDES[tool.OURS](ours), SIDES[side](theirs)
    with torch.no_grad():
        for _ in range(3):
            mine()
            other()
    moved, difference = (
        torch.cat(ours.masters) - before,
        torch.cat(ours.masters) - torch.cat(theirs.masters),
    )
    # bf16 moments: three roundings of 2^-8 in a step's numerator, half as much in its denominator
    assert (
        difference.norm() <= moved.norm() * (2.0**-6 if side == tool.NARROW else 1e-4)
        and moved.norm() > 0
    )
    assert all(
        torch.equal(master.bfloat16(), weight)
        for held in (ours, theirs)
        for master, weight in zip(held.masters, held.weights)
    )


@pytest.mark.full
def test_a_side_answers_its_turns(tmp_path):
    side = tool.Side("torch fused", 1, 1, 64, tmp_path)
    try:
        assert side.turn("time 2")["seconds"] > 0
        end = side.turn("end")
        # two first steps of Adam: lr each, of 64 weights
        assert end["rounded"] and end["moved"] == pytest.approx(2e-4 * 8, rel=0.05)
        with pytest.raises(RuntimeError, match="torch fused ended with 0"):
            side.turn("time 1")
    finally:
        side.end()


def run(index, side, seconds, others=0.0, threads=1):
    return {
        "threads": threads,
        "round": index,
        "side": side,
        "seconds": seconds,
        "cpu": 2 * seconds,
        "others_cores": others,
    }


def test_quiet_rounds_count_and_every_round_of_cpu_time():
    runs = [
        run(
            i,
            who,
            seconds,
            others=1.0 if (i, who) in ((1, tool.OURS), (2, tool.DEEPSPEED)) else 0.0,
        )
        for i in range(9)
        for who, seconds in (
            (tool.OURS, 0.1),
            (tool.DEEPSPEED, 0.12 if i < 7 else 0.09),
            ("torch loop", 0.49),
        )
    ]
    rows = {(row["side"], row["clock"]): row for row in tool.summary(runs, 0.2)}
    deepspeed = rows[tool.DEEPSPEED, "seconds"]
    # 0.9 is in it
    assert (deepspeed["pairs"], deepspeed["median"], deepspeed["goal"], deepspeed["passed"]) == (
        7,
        pytest.approx(1.2),
        1.0,
        False,
    )
    assert rows[tool.DEEPSPEED, "cpu"]["pairs"] == 9 and rows[tool.DEEPSPEED, "cpu"][
        "side_seconds"
    ] == pytest.approx(0.24)
    loop = rows["torch loop", "seconds"]
    assert loop["pairs"] == 8 and loop["goal"] == 5.0 and not loop["passed"]
    ends = {"1": {side: {"moved": 2.0} for side in (tool.OURS, tool.DEEPSPEED, "torch loop")}}
    lines = tool.table(list(rows.values()), ends).splitlines()[2:]
    assert (
        len(lines) == 4
        and all("lost" in line for line in lines if "loop" in line)
        and all(line.endswith("| 1.000000 |") for line in lines)
    )
