"""Rules by which users of such programs tune their runs, with the numbers of this one: what the
banner and --dry-run advise.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron.tools._plan.advice import gib
from megatron.tools._plan.memory import MemoryPlan
from megatron.tools._plan.step import StepModel
from megatron.tools._plan.step_table import Estimate
from megatron.tools._plan.verdict import judge

from megatron.config.derive import data_parallel_size, expert_ranks, replica_count
from megatron.config.errors import UserError
from megatron.config.groups import Config
from megatron.config.metadata import flag_name
from megatron.config.validate import resolve

ENOUGH = 0.85  # of a pipeline's time that its ranks compute
# Widths that are no multiple of it make products slow: on an H100 an ffn width of 10,922 reached
# 273 TFLOP/s and 10,944 reached 398 (Stas Bekman's ml-engineering).
MULTIPLE = 64


def tuning_lines(plan: MemoryPlan, found: Estimate | None) -> list[str]:
    """A line for each rule that the run departs from."""
    return [
        *_pipeline(plan),
        *_widths(plan.config),
        *([] if found is None else _balance(plan, found)),
        *([] if found is None else _memory_left(plan, found)),
        *([] if found is None else _nodes(plan, found)),
        *_balanced(plan.config),
        *([] if found is None else _experts(plan, found)),
        *_sharding(plan),
    ]


def _pipeline(plan: MemoryPlan) -> Iterator[str]:
    """Efficiency m / (m + P - 1) of m micro-batches on P ranks; with v stages a rank v m."""
    config = plan.config
    ranks = config.distributed.pipeline_model_parallel_size
    if ranks == 1 or config.distributed.pipeline_schedule.startswith("zero-bubble"):
        return
    dp = data_parallel_size(config, plan.world_size)
    each = config.training.micro_batch_size * dp
    count = config.training.global_batch_size // each
    virtual = config.distributed.num_virtual_stages_per_pipeline_rank or 1
    share = virtual * count / (virtual * count + ranks - 1)
    if share < ENOUGH:
        wanted = -(-8 * ranks // virtual)
        yield (
            f"{count} micro-batches on {ranks} pipeline ranks keep them busy for {share:.0%} of "
            f"the time; {wanted}, --global-batch-size {wanted * each}, for about 90%; virtual "
            "stages and --pipeline-schedule zero-bubble help without a larger batch"
        )


def _balance(plan: MemoryPlan, found: Estimate) -> Iterator[str]:
    """Stages of unequal cost, which the slowest rank makes all others wait for."""
    distributed = plan.config.distributed
    if (
        distributed.pipeline_model_parallel_size == 1
        or distributed.pipeline_model_parallel_layout is not None
    ):
        return
    even = plan.config.with_fields("distributed", pipeline_model_parallel_layout="auto")
    try:
        config = resolve(even, plan.world_size, plan.vocab_size).config
    except UserError:
        return
    time = _step(plan, config).time(found.hardware)
    gain = 1 - time.seconds / found.time.seconds
    if gain > 0.02:
        yield (
            "--pipeline-model-parallel-layout auto, which makes stages of equal cost, makes a step "
            f"{gain:.0%} faster"
        )


def _step(plan: MemoryPlan, config: Config) -> StepModel:
    """The steps of another configuration of the same run."""
    return StepModel(config, plan.vocab_size, plan.world_size, device=plan.device)


def _widths(config: Config) -> Iterator[str]:
    """Products whose width on a rank is odd."""
    tp = config.distributed.tensor_model_parallel_size
    for flag, width in (
        ("--hidden-size", config.model.hidden_size),
        ("--ffn-hidden-size", config.model.ffn_hidden_size // tp),
    ):
        if width >= 1024 and width % MULTIPLE:
            better = -(-width // MULTIPLE) * MULTIPLE
            yield (
                f"{flag}: {width} on each tensor-parallel rank is no multiple of {MULTIPLE}, which "
                f"makes products up to a third slower; {better} is one"
            )


def _memory_left(plan: MemoryPlan, found: Estimate) -> Iterator[str]:
    """Recomputation that is not needed, and a larger micro-batch where there is room."""
    config, memory = plan.config, found.hardware.memory_gib
    training = config.training
    if training.recompute_granularity == "full":
        without = plan.with_recompute(None)
        if judge(without.fullest.total / 2**30, memory) == "fits":
            seconds = _step(plan, without.config)
            gain = 1 - seconds.time(found.hardware).seconds / found.time.seconds
            yield (
                f"without --recompute-granularity full a step needs "
                f"{gib(without.fullest.total)} of {memory:g} GiB and is {gain:.0%} faster"
            )
    larger = _larger_micro_batch(plan)
    if larger is None:
        return
    time = _step(plan, larger.config).time(found.hardware)
    gain = 1 - time.seconds / found.time.seconds
    if gain > 0.01 and judge(larger.fullest.total / 2**30, memory) == "fits":
        yield (
            f"--micro-batch-size {larger.config.training.micro_batch_size} needs "
            f"{gib(larger.fullest.total)} of {memory:g} GiB and makes a step {gain:.0%} faster"
        )


def _larger_micro_batch(plan: MemoryPlan) -> MemoryPlan | None:
    """The same run with micro-batches of twice the size, if the batch has two."""
    config = plan.config
    size = 2 * config.training.micro_batch_size
    dp = data_parallel_size(config, plan.world_size)
    if config.training.global_batch_size % (size * dp):
        return None
    try:
        asked = config.with_fields("training", micro_batch_size=size)
        resolved = resolve(asked, plan.world_size, plan.vocab_size).config
    except UserError:
        return None
    return MemoryPlan(resolved, plan.vocab_size, plan.world_size, plan.device)


def _nodes(plan: MemoryPlan, found: Estimate) -> Iterator[str]:
    """Tensor parallelism over the network."""
    tp, node = plan.config.distributed.tensor_model_parallel_size, found.hardware.node_size
    if tp > node:
        share = found.time.spent.get("tensor parallel", 0.0) / found.time.seconds
        yield (
            f"--tensor-model-parallel-size {tp} spans nodes of {node} GPUs, and its collectives "
            f"take {share:.0%} of a step; --tensor-model-parallel-size {node} with more pipeline "
            "ranks keeps them within a node"
        )


def _balanced(config: Config) -> Iterator[str]:
    """Routers that nothing keeps from choosing the same experts for all tokens."""
    model = config.model
    losses = any(coeff > 0 for coeff in model.moe_aux_loss_coeff)
    steered = model.moe_router_enable_expert_bias or model.moe_router_force_load_balancing
    if model.num_experts is not None and not losses and not steered:
        yield (
            "nothing balances the experts' tokens: routers come to prefer a few, whose ranks the "
            "others wait for; --moe-aux-loss-coeff 1e-2 is usual for --moe-router-load-balancing-"
            "type aux_loss, or --moe-router-enable-expert-bias with sigmoid scores"
        )


def _experts(plan: MemoryPlan, found: Estimate) -> Iterator[str]:
    """Experts over several nodes, and tokens on their way to them."""
    config, node = plan.config, found.hardware.node_size
    etp, ep = expert_ranks(config)
    if ep == 1:
        return
    share = found.time.spent.get("expert parallel", 0.0) / found.time.seconds
    if ep * etp > node:
        yield (
            f"--expert-model-parallel-size {ep} spans nodes of {node} GPUs, and tokens on their "
            f"way take {share:.0%} of a step"
            + _with_flag(plan, found, "expert_model_parallel_size", node // etp)
        )
    gain = _with_flag(plan, found, "overlap_moe_expert_parallel_comm", True)
    if gain:
        yield f"nothing is computed while tokens travel, {share:.0%} of a step{gain}"


def _with_flag(plan: MemoryPlan, found: Estimate, name: str, value: int | bool) -> str:
    """What another value of a layout's flag brings, where it is faster: time, and memory."""
    try:
        asked = plan.config.with_fields("distributed", **{name: value})
        config = resolve(asked, plan.world_size, plan.vocab_size).config
    except UserError:
        return ""
    time = _step(plan, config).time(found.hardware)
    gain = 1 - time.seconds / found.time.seconds
    if gain < 0.01:
        return ""
    needed = MemoryPlan(config, plan.vocab_size, plan.world_size, plan.device).fullest.total
    flag = flag_name(name) if value is True else f"{flag_name(name)} {value}"
    return (
        f"; {flag} makes it {gain:.0%} faster and needs {gib(needed)} instead of "
        f"{gib(plan.fullest.total)} GiB"
    )


def _sharding(plan: MemoryPlan) -> Iterator[str]:
    """Optimizer state that every replica holds whole."""
    if plan.config.distributed.zero_stage == 0 and replica_count(plan.config, plan.world_size) > 1:
        whole, shared = plan.fullest.total, plan.with_stage(1).fullest.total
        if shared < whole:
            yield (
                f"--zero-stage 1 saves {gib(whole - shared)} of {gib(whole)} GiB and sends as many "
                "bytes"
            )
