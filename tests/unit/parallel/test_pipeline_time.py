"""The executor runs each computation when the simulator does."""

from __future__ import annotations

from itertools import repeat
from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.benchmarks import pipeline as tool
from unit.by_hand import KeptWeights

from megatron.distributed.groups import Layout
from megatron.distributed.setup import make_groups
from megatron.model.layer import Layer
from megatron.parallel.pipeline import Pipeline
from megatron.parallel.schedule import Kind, build_schedule

RANKS, MICRO_BATCHES = 4, 8
SHAPE = (1, 1, 1)


class Clocked:
    """Replaces the passes of a model with one layer a stage: a pass advances this rank's
    clock, and its output is the time at which it ended.

    So every message carries to its receiver when it was sent, and times do not depend on how busy
    the machine is. `costs`: seconds by kind, then by stage.
    """

    def __init__(self, costs: dict[str, list[float]]):
        self.costs, self.clock, self.spans = costs, 0.0, []

    def forward(
        self, layer: Clock, x: torch.Tensor | None, micro: None, scalars: dict
    ) -> tuple[torch.Tensor, None]:
        return self.backward(Kind.FORWARD, layer, x, micro)

    def backward(
        self, kind: Kind, layer: Clock, x: torch.Tensor | None, saved: None, aux_scale: float = 0.0
    ) -> tuple[torch.Tensor, None]:
        begin = self.clock if x is None else max(self.clock, x.item())
        self.clock = begin + sum(self.costs[part][layer.stage] for part in PARTS[kind])
        self.spans.append((begin, self.clock))
        return torch.full(SHAPE, self.clock, dtype=torch.float64), None


PARTS = {
    Kind.FORWARD: "F",
    Kind.BACKWARD: "IW",
    Kind.BACKWARD_INPUT: "I",
    Kind.BACKWARD_WEIGHT: "W",
}


class Clock(Layer):
    """All of a stage."""

    splits_backward = True

    def __init__(self, stage: int):
        super().__init__()
        self.stage = stage


def clocked_step(name: str, costs: dict[str, list[float]]) -> list[dict]:
    """One step of a schedule on this rank, as benchmarks/pipeline.py reads it."""
    groups = make_groups(Layout(pp=dist.get_world_size()))
    schedule = build_schedule(name, RANKS, tool.SCHEDULES[name], MICRO_BATCHES)
    own = [stage for stage, rank in enumerate(schedule.placement) if rank == groups.pp.rank]
    model = SimpleNamespace(
        layers_by_stage=[[("clock", Clock(stage))] for stage in own],
        scalars=(),
        dtype=torch.float64,
    )
    passes = Clocked(costs)
    pipeline = Pipeline(
        model, KeptWeights(), passes, schedule.placement, SHAPE, groups, torch.device("cpu")
    )
    pipeline.run(schedule, repeat(None), 1.0)
    spans = zip(schedule.actions[groups.pp.rank], passes.spans, strict=True)
    return [{"spans": [[action.kind.value, *action[1:3], *span] for action, span in spans]}]


UNEVEN = {kind: [1.0 + stage % 3 + (kind == "W") for stage in range(2 * RANKS)] for kind in "FIW"}


def test_steps_take_the_simulated_time_and_zero_bubble_has_a_third_of_the_idle_time(gloo_world):
    """Costs are whole numbers of 1/2: sums are exact, whatever their order."""
    idle = {}
    for name in tool.SCHEDULES:
        for costs in (tool.even_costs(name, 1.0), UNEVEN):
            found = gloo_world(RANKS).run(clocked_step, name, costs)
            row = tool.sleep_row("", name, MICRO_BATCHES, costs, 0.0, found)
            assert (row["achieved"], row["idle"]) == (row["simulated"], row["idle_simulated"]), name
            idle.setdefault(name, row["idle"])
    assert idle["1f1b"] == 3 * (RANKS - 1)
    assert idle["zero-bubble"] == idle["1f1b"] / 3
