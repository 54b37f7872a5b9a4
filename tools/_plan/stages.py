"""What each stage of a pipeline holds and computes, as text: what the banner prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron.tools._plan.memory import MemoryPlan, schedule_of, stage_parameters
from megatron.tools._plan.operations import Operations
from megatron.tools._plan.schedule_check import in_memory
from megatron.tools._plan.simulate import Costs, simulate
from megatron.tools._plan.work import UnitWork

from megatron.config.groups import Config
from megatron.model.arithmetic import padded_vocab_size, unit_flops
from megatron.model.recompute import stage_recompute
from megatron.model.stages import Stage, pipeline_stages
from megatron.parallel.schedule import Kind, Schedule


def stage_lines(plan: MemoryPlan) -> list[str]:
    """A line about the schedule, one about each stage (parameters are those of one of its ranks),
    one about memory; none without a pipeline.
    """
    config = plan.config
    if config.distributed.pipeline_model_parallel_size == 1:
        return []
    padded = padded_vocab_size(
        plan.vocab_size, config.model, config.distributed.tensor_model_parallel_size
    )
    stages = pipeline_stages(config, padded)
    schedule = schedule_of(config, plan.world_size)
    stored = stage_parameters(config, stages, schedule.placement, padded)
    flops = unit_flops(config.model, config.data.seq_length, padded)
    peaks = in_flight(schedule)
    bubble = simulate(schedule, stage_costs(config, stages, plan.vocab_size, plan.device)).bubble
    lines = [
        f"{schedule.name}: {schedule.ranks} pipeline ranks x "
        f"{schedule.stages // schedule.ranks} stage(s), {schedule.micro_batches} "
        f"micro-batches; {bubble:.1%} idle, by FLOPs alone"
    ]
    for k, stage in enumerate(stages):
        share = sum(flops[i] for i in stage.units) / sum(flops)
        lines.append(
            f"stage {k} on rank {schedule.placement[k]}: {units_of(stage)}; "
            f"{stored[k]:,} parameters; {share:.1%} of the FLOPs; {peaks[k]} in flight"
        )
    totals = [f"{rank.total / 2**30:.3g}" for rank in plan.ranks]
    return [*lines, f"GiB by pipeline rank: {', '.join(totals)}"]


def stage_costs(
    config: Config, stages: Sequence[Stage], vocab_size: int, device: str = "cuda"
) -> Costs:
    """FLOPs of each stage's passes of a micro-batch on a rank."""
    operations = Operations(config, vocab_size, device=device)

    def units(stage: Stage) -> Iterator[UnitWork]:
        choices = stage_recompute(config.training, stage.layers)
        yield from map(operations.layer, stage.layers, choices)
        if stage.head:
            yield operations.head()

    passes = [[*units(stage)] for stage in stages]
    return Costs(
        tuple(sum(each.forward.flops for each in stage) for stage in passes),
        tuple(sum(each.backward_input.flops for each in stage) for stage in passes),
        tuple(sum(each.backward_weight.flops for each in stage) for stage in passes),
    )


def units_of(stage: Stage) -> str:
    """`embedding, layers 0-3`."""
    first = stage.layers.start
    last = stage.layers.stop - 1
    layers = (
        [f"layer {first}" if first == last else f"layers {first}-{last}"] if stage.layers else []
    )
    return ", ".join(
        [*(["embedding"] if stage.embedding else []), *layers, *(["head"] if stage.head else [])]
    )


def in_flight(schedule: Schedule) -> list[int]:
    """The most micro-batches of which each stage has run the forward pass and not the whole
    backward pass.
    """
    now = [0] * schedule.stages
    most = [0] * schedule.stages
    for rank in range(schedule.ranks):
        for kind, stage, _ in in_memory(schedule, rank):
            if kind is Kind.FORWARD:
                now[stage] += 1
                most[stage] = max(most[stage], now[stage])
            elif kind is Kind.BACKWARD or kind is Kind.BACKWARD_WEIGHT:  # one of them ends it
                now[stage] -= 1
    return most
