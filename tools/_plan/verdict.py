"""Whether a run fits into the memory of its devices."""

from __future__ import annotations

from megatron.tools._plan.memory import MemoryPlan
from megatron.tools._plan.state import shard_size

from megatron.config.errors import UserError
from megatron.config.validate import cross_field_faults
from megatron.training.advisor import Verdict

DEVICE_MEMORY = 80.0  # GiB of the device that is planned for where none is known
NODE_RANKS = 8  # of a node, where a run is planned for another machine
RESERVE = 6.0  # GiB that the plan does not count: context, kernels, NCCL's buffers, fragmentation


def _gib(size: int) -> str:
    """GiB with three digits or more."""
    return f"{size / 2**30:,.0f}" if size >= 1000 * 2**30 else f"{size / 2**30:.3g}"


def judge(needed: float, memory: float) -> str:
    """The word for that many GiB on a device of `memory` GiB."""
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


def check_host_memory(plan: MemoryPlan, memory: float | None, ranks: int) -> None:
    """Raises UserError where `ranks` on one node keep more on the host than its `memory` GiB."""
    each = max(rank.static["host"] for rank in plan.ranks)
    if memory is None or each * ranks <= memory * 2**30:
        return
    activations = max(rank.peak.host for rank in plan.ranks)
    what = [
        *(["--activation-offload"] if activations else []),
        *(["--optimizer-cpu-offload"] if plan.config.optimizer.optimizer_cpu_offload else []),
    ]
    raise UserError(
        f"{' and '.join(what)}: each rank keeps {_gib(each)} GiB in the host's memory, the {ranks} "
        f"of a node {_gib(each * ranks)} of the {memory:.4g} GiB that it has; give a smaller "
        + (
            "--activation-offload-fraction or fewer --offload-modules"
            if 2 * activations > each
            else "--optimizer-offload-fraction"
        )
        + ", or more nodes; --host-memory GIB sets what a node has"
    )


def is_refused(plan: MemoryPlan, stage: int, granularity: str | None) -> bool:
    """Whether this ZeRO stage and --recompute-granularity add a configuration error."""
    config = plan.config.with_fields("distributed", zero_stage=stage)
    if granularity != config.training.recompute_granularity:
        # modules go with the granularity that they are modules of
        config = config.with_fields(
            "training", recompute_granularity=granularity, recompute_modules=None
        )
    faults, known = (
        set(cross_field_faults(each, plan.world_size, plan.vocab_size))
        for each in (config, plan.config)
    )
    return not faults <= known


def _remedy(plan: MemoryPlan, memory: float) -> str:
    """The first change of ZeRO's stage and recompute with which the run fits, as flags."""
    chosen = plan.config.distributed.zero_stage
    kept = plan.config.training.recompute_granularity
    sharing = shard_size(plan.config, plan.world_size) > 1 or chosen == 0
    stages = range(chosen, 4 if sharing else chosen + 1)
    for granularity in dict.fromkeys((kept, "full")):
        for stage in stages:
            if is_refused(plan, stage, granularity):
                continue
            needed = plan.changed(stage, granularity).fullest.total
            if judge(needed / 2**30, memory) == "fits":
                flags = [
                    *([f"--zero-stage {stage}"] if stage != chosen else []),
                    *([f"--recompute-granularity {granularity}"] if granularity != kept else []),
                ]
                return f"{' '.join(flags)} needs {_gib(needed)} GiB"
    return ""
