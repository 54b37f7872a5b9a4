"""Rules of the layout: tensor- and pipeline-parallel sizes, how layers are shared out over stages,
schedules.
"""

from __future__ import annotations

import math

from megatron.config.derive import RunView, attention_ranks
from megatron.config.errors import UserError
from megatron.config.metadata import flag_name
from megatron.config.rules import Faults, divisor, multiple, nearest
from megatron.config.schedules import SCHEDULES
from megatron.config.stages import AUTO, counted_layers, parse_layout

# ---------------------------------------------------------------- sizes

TP = "tensor_model_parallel_size"
CP = "context_parallel_size"
PP = "pipeline_model_parallel_size"


def _shares(size: int, groups: int) -> bool:
    """Whether `size` ranks hold equal numbers of key/value heads, or equal numbers of ranks hold
    each head.
    """
    return groups % size == 0 or size % groups == 0


def tensor_parallel(run: RunView) -> Faults:
    """Sizes that divide the ranks, and the heads."""
    if min(run.tp, run.cp, run.pp, run.world) <= 0:
        return
    if not run.dp:
        several = [TP, *(field for field in (CP, PP) if getattr(run, field) > 1)]
        yield (
            f"{' x '.join(map(run.show, several))}: does not divide the {run.world} rank(s) of "
            f"this job; start {nearest(run.world, run.tp * run.cp * run.pp)} (in a dry run, with "
            "--world-size), or give smaller sizes"
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
    shown = run.show("num_attention_heads")
    if heads % run.tp == 0:
        shown = f"{run.show('num_query_groups')} or be a multiple of it"
    yield run.fault(TP, f"must divide {shown}; the nearest that fits is {near}")


def context_parallel(run: RunView) -> Faults:
    """Lengths and heads that context-parallel ranks can share."""
    if run.cp <= 1:
        return
    sizes = run.hierarchical_context_parallel_sizes or ()
    are_two_levels = len(sizes) == 2 and min(sizes) > 0 and math.prod(sizes) == run.cp
    if run.cp_comm_type == "a2a+p2p" and not are_two_levels:
        yield (
            "--cp-comm-type a2a+p2p: --hierarchical-context-parallel-sizes must be two sizes, of "
            f"the ranks that exchange heads and of the ring, with the product {run.show(CP)}; "
            "or give --cp-comm-type a2a or p2p"
        )
        return
    ranks, ring = attention_ranks(run.config.distributed)
    # each part of a sequence has a chunk from its front and one from its back
    unit, reason = math.lcm(2 * (run.cp // ranks), run.cp), run.show(CP)
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
            f"{run.show('cp_comm_type')}: {ranks} ranks do not share out {heads} query and "
            f"{groups} key/value heads of a tensor-parallel rank; give a number of ranks that "
            "divides both, or --cp-comm-type allgather or p2p"
        )


def zero(run: RunView) -> Faults:
    """Groups of hybrid sharding must be of equal size, and gradients stay in place for graphs."""
    if run.has("zero_shard_size") and run.zero_stage > 0 and run.dp:
        ranks = "data-parallel rank(s)" if run.cp == 1 else "data- x context-parallel ranks"
        yield from divisor(run, "zero_shard_size", run.replicas, f"the {run.replicas} {ranks}", 2)
    if run.cuda_graphs and run.zero_stage >= 2 and run.replicas > 1:
        stage = run.show("zero_stage")
        text = f"is not supported with {stage}, whose gradient buffers move"
        yield run.fault("cuda_graphs", f"{text}; set --zero-stage 0 or 1")


# ---------------------------------------------------------------- splits

_LAYOUT = "pipeline_model_parallel_layout"
_PER_VIRTUAL = "num_layers_per_virtual_pipeline_stage"
_VIRTUAL = "num_virtual_stages_per_pipeline_rank"
_UNEVEN = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
_COUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


def given(run: RunView, *fields: str) -> list[str]:
    """Those of some fields that have a value."""
    return [field for field in fields if getattr(run, field) not in (None, False)]


def pipeline_split(run: RunView) -> Faults:
    """Layers over stages; nothing here acts with one pipeline rank."""
    if run.pp < 2 or not run.has("num_layers"):
        return
    ways = [given(run, _LAYOUT), given(run, *_UNEVEN), given(run, *_COUNTED, _PER_VIRTUAL)]
    one, *others = [way for way in ways if way] or [[]]
    if others:
        fields = [field for way in others for field in way]
        yield (
            f"{run.show(one[0])}: contradicts {' and '.join(map(run.show, fields))}; keep one way "
            f"to share out the layers ({flag_name(_VIRTUAL)} goes with each)"
        )
    elif any(getattr(run, field) <= 0 for field in given(run, _PER_VIRTUAL, _VIRTUAL, *_UNEVEN)):
        return  # faults of their bounds
    elif given(run, _LAYOUT):
        yield from _drawn(run)
    else:
        yield from _uneven(run) if given(run, *_UNEVEN) else _even(run)


def _stages(run: RunView) -> tuple[str, int]:
    """`--pipeline-model-parallel-size 4 x --num-virtual-stages-per-pipeline-rank 2 = 8`, and 8."""
    virtual = run.num_virtual_stages_per_pipeline_rank or 1
    stages = run.pp * virtual
    shown = run.show(PP)
    return f"{shown} x {run.show(_VIRTUAL)} = {stages}" if virtual > 1 else shown, stages


def _instead(run: RunView) -> str:
    """What shares out any number of layers."""
    fits = _stages(run)[1] <= run.num_layers + 2
    return f"{flag_name(_LAYOUT)} auto alone" if fits else "fewer pipeline ranks"


def _drawn(run: RunView) -> Faults:
    shown, stages = _stages(run)
    if run.pipeline_model_parallel_layout == AUTO:
        units = run.num_layers + 2
        if stages > units:
            yield (
                f"{shown}: more stages than the {units} units of --num-layers {run.num_layers} "
                f"(embedding, layers, head); give at most {units} stages"
            )
        return
    try:
        counts = parse_layout(run.pipeline_model_parallel_layout)
    except UserError as problem:
        yield run.fault(_LAYOUT, str(problem))
        return
    if sum(counts) != run.num_layers:
        yield run.fault(_LAYOUT, f"has {sum(counts)} layers (t), not {run.show('num_layers')}")
    if len(counts) % run.pp:
        yield run.fault(_LAYOUT, f"has {len(counts)} stages, not a multiple of {run.show(PP)}")
    elif len(counts) != stages:
        text = f"has {len(counts)} stages, which contradicts {run.show(_VIRTUAL)}; drop that"
        yield run.fault(_LAYOUT, text)


def _even(run: RunView) -> Faults:
    layers = counted_layers(run.config)
    divisor, unit = _stages(run)
    if given(run, _PER_VIRTUAL):
        unit = run.pp * run.num_layers_per_virtual_pipeline_stage
        divisor = f"{run.show(PP)} x {run.show(_PER_VIRTUAL)} = {unit}"
    counted = " and ".join(map(flag_name, given(run, *_COUNTED)))
    with_them = f" ({layers} with those of {counted})" if counted else ""
    if layers % unit:
        near = nearest(layers, unit) - (layers - run.num_layers)
        yield (
            f"--num-layers {run.num_layers}{with_them}: must be a multiple of {divisor}; the "
            f"nearest is {near}, or give {_instead(run)}"
        )
    elif given(run, _PER_VIRTUAL) and layers // unit != run.num_virtual_stages_per_pipeline_rank:
        yield run.fault(_PER_VIRTUAL, f"contradicts {run.show(_VIRTUAL)}; drop one")


def _uneven(run: RunView) -> Faults:
    """Numbers for the first or last rank: what they leave must fit the others, and each rank's
    layers its virtual stages.
    """
    numbers = [getattr(run, field) for field in given(run, *_UNEVEN)]
    virtual = run.num_virtual_stages_per_pipeline_rank
    others = run.pp - len(numbers)
    rest = run.num_layers - sum(numbers)
    shared_out = rest > 0 and rest % (others * virtual) == 0 if others else rest == 0
    if shared_out and all(number % virtual == 0 for number in numbers):
        return
    shown = " and ".join(map(run.show, given(run, *_UNEVEN)))
    divided = f", each number divisible by {run.show(_VIRTUAL)}" if virtual > 1 else ""
    yield (
        f"{shown}: leave {rest} of --num-layers {run.num_layers} to {others} other pipeline rank(s)"
        f", which must share them evenly{divided}; change the numbers, or give {_instead(run)}"
    )


# ---------------------------------------------------------------- schedules


def pipeline_schedule(run: RunView) -> Faults:
    """Virtual stages that a schedule takes."""
    virtual = run.num_virtual_stages_per_pipeline_rank
    if run.pp < 2 or run.pipeline_schedule is None or virtual is None or virtual <= 0:
        return
    takes = SCHEDULES[run.pipeline_schedule].virtual
    sources = [each for each in given(run, _LAYOUT, _PER_VIRTUAL) if getattr(run, each) != AUTO]
    source = run.show(sources[0] if sources else _VIRTUAL)
    text = ""
    if takes is None and virtual == 1:
        text = (
            "needs several stages on each pipeline rank; give "
            "--num-virtual-stages-per-pipeline-rank 2, or --pipeline-schedule 1f1b"
        )
    elif takes is not None and takes != virtual:
        other = "interleaved" if takes == 1 else "another"
        text = (
            f"takes {takes} stage(s) on each pipeline rank, and {source} makes {virtual}; change "
            f"that, or give --pipeline-schedule {other}"
        )
    if text:
        yield run.fault("pipeline_schedule", text)


def bubble(run: RunView) -> Faults:
    """A remark on fewer micro-batches than pipeline ranks."""
    count = run.micro_batches
    if run.pp > 1 and count is not None and count < run.pp:
        idle = (run.pp - 1) / (count + run.pp - 1)
        yield run.fault(
            "global_batch_size",
            f"{count} micro-batch(es) for {run.pp} pipeline ranks leave (P-1)/(m+P-1) = {idle:.0%} "
            "of a step idle under 1f1b; a larger one leaves less",
        )


LAYOUT_RULES = (tensor_parallel, context_parallel, zero, pipeline_split, pipeline_schedule)
