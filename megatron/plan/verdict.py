"""Whether a run fits into the memory of its devices."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.plan.memory import MemoryPlan
from megatron.plan.state import shard_size

DEVICE_MEMORY = 80.0  # GiB of the device that is planned for where none is known
RESERVE = 6.0  # GiB that the plan does not count: context, kernels, NCCL's buffers, fragmentation


@dataclass(frozen=True)
class Verdict:
    """fits: up to what a device has without the reserve; tight: up to all of it; does not fit:
    more.
    """

    word: str
    line: str

    @property
    def fits(self) -> bool:
        return self.word != "does not fit"


def _gib(size: int) -> str:
    """GiB with three digits or more."""
    return f"{size / 2**30:,.0f}" if size >= 1000 * 2**30 else f"{size / 2**30:.3g}"


def judge(needed: float, memory: float) -> str:
    """The word for so many GiB on a device of `memory` GiB."""
    if needed <= memory - RESERVE:
        return "fits"
    return "tight" if needed <= memory else "does not fit"


def memory_verdict(plan: MemoryPlan, memory: float) -> Verdict:
    """What the worst moment of a step takes on the fullest rank, against `memory` GiB."""
    needed = plan.fullest.total
    word = judge(needed / 2**30, memory)
    line = (
        f"{word}: the plan needs {_gib(needed)} GiB on each device of {memory:g} GiB, of which "
        f"{max(0.0, memory - RESERVE):g} are usable ({RESERVE:g} go to what it does not count)"
    )
    if word != "fits":
        line += "; " + (
            _remedy(plan, memory) or "more ranks, or a smaller --micro-batch-size, need less"
        )
    return Verdict(word, line)


def _remedy(plan: MemoryPlan, memory: float) -> str:
    """The first change of ZeRO's stage and recompute with which the run fits, as flags."""
    chosen = plan.config.distributed.zero_stage
    kept = plan.config.training.recompute_granularity
    sharing = shard_size(plan.config, plan.world_size) > 1 or chosen == 0
    stages = range(chosen, 4 if sharing else chosen + 1)
    for granularity in dict.fromkeys((kept, "full")):
        for stage in stages:
            needed = plan.changed(stage, granularity).fullest.total
            if judge(needed / 2**30, memory) == "fits":
                flags = [
                    *([f"--zero-stage {stage}"] if stage != chosen else []),
                    *([f"--recompute-granularity {granularity}"] if granularity != kept else []),
                ]
                return f"{' '.join(flags)} needs {_gib(needed)} GiB"
    return ""
