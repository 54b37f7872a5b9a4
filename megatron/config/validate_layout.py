"""Rules of the layout that compute something: tensor- and context-parallel sizes, how layers are
shared out over stages, schedules. `@field` in a text is the flag with its value.
"""

from __future__ import annotations

import math

from megatron.config.derive import RunView, attention_ranks
from megatron.config.errors import nearest
from megatron.config.rules import Faults, divisor, multiple
from megatron.config.schedules import SCHEDULES
from megatron.config.stages import AUTO, COUNTED, UNEVEN, layers_of_stages, stage_count


def _shares(size: int, groups: int) -> bool:
    """Whether ranks hold equal numbers of key/value heads, or heads equal numbers of ranks."""
    return groups % size == 0 or size % groups == 0


def tensor_parallel(run: RunView) -> Faults:
    if min(run.tp, run.cp, run.pp, run.world) <= 0:
        return
    if not run.dp:
        near = nearest(run.world, run.tp * run.cp * run.pp)
        yield (
            "@tensor_model_parallel_size x @context_parallel_size x @pipeline_model_parallel_size: "
            f"does not divide the {run.world} rank(s) of this job; start {near} (in a dry run, "
            "with --world-size), or use smaller sizes"
        )
    if not run.has("num_attention_heads", "num_query_groups"):
        return
    heads, groups = run.num_attention_heads, run.num_query_groups
    if heads % run.tp == 0 and _shares(run.tp, groups):
        return
    ranks = run.world // run.pp if run.world % run.pp == 0 else run.world
    sizes = range(1, min(ranks, heads, 1024) + 1)  # no matrix is shared over more
    fitting = [n for n in sizes if ranks % n == heads % n == 0 and _shares(n, groups)]
    near = min(fitting, key=lambda size: abs(size - run.tp))
    what = "@num_attention_heads"
    if heads % run.tp == 0:
        what = "@num_query_groups or be a multiple of it"
    yield f"@tensor_model_parallel_size: must divide {what}; the nearest that fits is {near}"


def context_parallel(run: RunView) -> Faults:
    """Lengths and heads that context-parallel ranks can share."""
    if run.cp <= 1:
        return
    sizes = run.hierarchical_context_parallel_sizes or ()
    are_two_levels = len(sizes) == 2 and min(sizes) > 0 and math.prod(sizes) == run.cp
    if run.cp_comm_type == "a2a+p2p" and not are_two_levels:
        yield (
            "--cp-comm-type a2a+p2p: --hierarchical-context-parallel-sizes must be two sizes, of "
            "the ranks that exchange heads and of the ring, with the product "
            "@context_parallel_size; or give --cp-comm-type a2a or p2p"
        )
        return
    ranks, ring = attention_ranks(run.config.distributed)
    # each part of a sequence has a chunk from its front and one from its back
    unit, reason = math.lcm(2 * (run.cp // ranks), run.cp), "@context_parallel_size"
    if run.sequence_parallel:
        unit = math.lcm(unit, run.cp * run.tp)
    if ring > 1 and run.attention_dropout:
        unit = math.lcm(unit, 8 * ring)
        reason = f"--attention-dropout in a ring of {ring} ranks, four keys at a time"
    if run.has("seq_length"):
        yield from multiple(run, "seq_length", unit, f"{unit} with {reason}")
    if ranks == 1 or not run.has("num_attention_heads", "num_query_groups"):
        return
    heads, groups = run.num_attention_heads // run.tp, max(1, run.num_query_groups // run.tp)
    if heads % ranks or not _shares(ranks, groups):
        yield (
            f"@cp_comm_type: {ranks} ranks do not share out {heads} query and {groups} key/value "
            "heads of a tensor-parallel rank; give a number of ranks that divides both, or "
            "--cp-comm-type allgather or p2p"
        )


def zero_groups(run: RunView) -> Faults:
    if run.has("zero_shard_size") and run.zero_stage > 0 and run.dp:
        ranks = f"the {run.replicas} data- x context-parallel rank(s)"
        yield from divisor(run, "zero_shard_size", run.replicas, ranks, 2)


_LAYOUT = "pipeline_model_parallel_layout"
_PER_VIRTUAL = "num_layers_per_virtual_pipeline_stage"
_VIRTUAL = "num_virtual_stages_per_pipeline_rank"


def pipeline_split(run: RunView) -> Faults:
    """Layers over stages; nothing here acts with one pipeline rank."""
    if run.pp < 2 or not run.has("num_layers"):
        return
    ways = [run.given(_LAYOUT), run.given(*UNEVEN), run.given(*COUNTED, _PER_VIRTUAL)]
    given = list(filter(None, ways))
    if len(given) > 1:
        shown = " and ".join(f"@{field}" for way in given[1:] for field in way)
        yield (
            f"@{given[0][0]}: contradicts {shown}; keep one way to share out the layers "
            "(--num-virtual-stages-per-pipeline-rank goes with each)"
        )
    elif any(getattr(run, field) <= 0 for field in run.given(_PER_VIRTUAL, _VIRTUAL, *UNEVEN)):
        return  # faults of their bounds
    elif run.pipeline_model_parallel_layout != AUTO:
        layers_of_stages(run.config)
    elif stage_count(run.config) > run.num_layers + 2:
        yield (
            "@pipeline_model_parallel_size x @num_virtual_stages_per_pipeline_rank: more stages "
            "than units of @num_layers (embedding, layers, head); give at most "
            f"{run.num_layers + 2} stages"
        )


def pipeline_schedule(run: RunView) -> Faults:
    """Virtual stages that a schedule takes."""
    virtual = run.num_virtual_stages_per_pipeline_rank
    if run.pp < 2 or run.pipeline_schedule is None or virtual is None or virtual <= 0:
        return
    takes = SCHEDULES[run.pipeline_schedule].virtual
    if takes is None and virtual == 1:
        yield (
            "@pipeline_schedule: needs several stages on each pipeline rank; give "
            "--num-virtual-stages-per-pipeline-rank 2, or --pipeline-schedule 1f1b"
        )
    if takes not in (None, virtual):
        fields = (_LAYOUT, _PER_VIRTUAL, _VIRTUAL)
        source = next(field for field in fields if getattr(run, field) not in (None, AUTO))
        other = "interleaved" if takes == 1 else "another"
        yield (
            f"@pipeline_schedule: takes {takes} stage(s) on each pipeline rank, and @{source} "
            f"makes {virtual}; change that, or give --pipeline-schedule {other}"
        )


def bubble(run: RunView) -> Faults:
    count = run.micro_batches
    if run.pp > 1 and count is not None and count < run.pp:
        idle = (run.pp - 1) / (count + run.pp - 1)
        yield (
            f"@global_batch_size: {count} micro-batch(es) for {run.pp} pipeline ranks leave "
            f"(P-1)/(m+P-1) = {idle:.0%} of a step idle under 1f1b; a larger one leaves less"
        )


LAYOUT_RULES = (tensor_parallel, context_parallel, zero_groups, pipeline_split, pipeline_schedule)
