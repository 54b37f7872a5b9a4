"""torch.distributed.pipelining, unchanged, around the stages of our model: the same products on
both sides, so that only the runtimes differ.

A stage is one autograd graph, as torch runs it; the head is part of the loss function. Weight
gradients of a split backward pass wait in our layers' deferred_grads for torch's `dw_builder`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from megatron.model.linear import Linear, WeightGrad, add_weight_grads

# Ours -> torch's. Torch's ZB-H1 is its interleaved zero-bubble schedule with one stage a rank.
SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zero-bubble-v": ScheduleZBVZeroBubble,
}
SPLIT = ("zero-bubble", "zero-bubble-v")


class StageModule(nn.Module):
    """A stage of ours without the head: tokens [b, s + 1] where it begins with the embedding, else
    [s, b, h] -> [s, b, h].
    """

    def __init__(self, job: Any, chunk: int):
        super().__init__()
        self.job, names = [job], [name for name, _ in job.model.layers_by_stage[chunk]]
        self.first = names[0] == "embedding"
        self.units = nn.ModuleList(
            unit for name, unit in job.model.layers_by_stage[chunk] if name != "head"
        )
        self.zeros = torch.zeros(job.shape["batch"], job.shape["seq"] + 1, dtype=torch.long)

    def forward(self, x: Tensor) -> Tensor:
        # layers read positions alone
        micro = self.job[0].micro_batch(x if self.first else self.zeros)
        x = None if self.first else x
        for unit in self.units:
            x = unit(x, micro)
        return x


class TorchPipeline:
    """The schedule of torch that ours is measured against, on the stages of `job` (a
    pipeline_rank.Job).
    """

    def __init__(self, job: Any, micro_batches: int):
        self.job, self.rank, placement = job, job.groups.pp.rank, job.placement
        own = [stage for stage, rank in enumerate(placement) if rank == self.rank]
        self.last, self.first = placement[-1] == self.rank, placement[0] == self.rank
        # weights, and where their deferred gradients go
        self.deferring: list[tuple[nn.Parameter, list[WeightGrad]]] = []
        stages = [
            PipelineStage(
                StageModule(job, chunk),
                stage,
                len(placement),
                torch.device("cpu"),
                group=job.groups.pp.group,
                dw_builder=self._deferring(chunk) if job.name in SPLIT else None,
            )
            for chunk, stage in enumerate(own)
        ]
        kind = SCHEDULES[job.name]
        self.schedule = kind(
            stages[0] if kind in (ScheduleGPipe, Schedule1F1B) else stages,
            micro_batches,
            loss_fn=self._loss,
            scale_grads=False,
        )

    def _loss(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.job.model.head(x, self.job.micro_batch(ids))[0]

    def _deferring(self, chunk: int) -> Callable[[], Callable[[], None]]:
        """What torch calls after an input gradient: hands over what the stage's linear layers have
        left.
        """
        left: list[WeightGrad] = []
        for name, unit in self.job.model.layers_by_stage[chunk]:
            for layer in unit.modules() if name.startswith("layers") else ():
                if isinstance(layer, Linear):
                    self.deferring.append((layer.weight, left))

        def build() -> Callable[[], None]:
            mine = left.copy()
            left.clear()
            assert mine, "the backward pass was not split"
            return lambda: add_weight_grads(mine)

        return build

    def step(self, ids: Tensor) -> float:
        """Forward and backward passes of ids [m b, s + 1]; the loss sum, on the rank that has the
        head.
        """
        # Only during torch's step: our own split passes set and delete the same attribute.
        for weight, left in self.deferring:
            weight.deferred_grads = left
        losses: list[Tensor] = []
        arguments = (ids,) if self.first else ()
        self.schedule.step(
            *arguments,
            target=ids if self.last else None,
            losses=losses if self.last else None,
            return_outputs=False,
        )
        for weight, _ in self.deferring:
            del weight.deferred_grads
        return sum(loss.item() for loss in losses)
