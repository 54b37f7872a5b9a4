"""The measurement of the optimizer's step: its sides do equal work."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks/peers"))

from adam_step import SIDES, Segments
from megatron.benchmarks import adam as tool


# DeepSpeed's environment is missing
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
    moved = torch.cat(ours.masters) - before
    difference = torch.cat(ours.masters) - torch.cat(theirs.masters)
    # bf16 moments: three roundings of 2^-8 in a step's numerator, half as much in its denominator
    bound = 2.0**-6 if side == tool.NARROW else 1e-4
    assert 0 < moved.norm() and difference.norm() <= moved.norm() * bound
    for held in (ours, theirs):
        for master, weight in zip(held.masters, held.weights):
            assert torch.equal(master.bfloat16(), weight)
