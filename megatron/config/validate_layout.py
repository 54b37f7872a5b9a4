"""Rules of the layout: tensor- and pipeline-parallel sizes, how layers are shared out over stages,
schedules.
"""

from __future__ import annotations

import math

from megatron.config.derive import RunView, attention_ranks
from megatron.config.errors import UserError
from megatron.config.metadata import flag_name
from megatron.config.rules import Faults, nearest, nearest_divisor
from megatron.config.schedules import SCHEDULES
from megatron.config.stages import AUTO, counted_layers, parse_layout

# ---------------------------------------------------------------- sizes


def _shares(size: int, groups: int) -> bool:
    """Whether `size` ranks hold equal numbers of key/value heads, or equal numbers of ranks hold
    each head.
    """
    return groups % size == 0 or size % groups == 0


def _fitting_tp(run: RunView) -> int:
    """The tensor-parallel size nearest to the one given that divides the ranks (of one pipeline
    rank, unless that size is wrong) and the heads.
    """
    ranks = (
        run.world // run.pp
        if run.world % run.pp == 0 and (run.dp or run.world % run.tp)
        else run.world
    )
    heads = run.num_attention_heads if run.has("num_attention_heads") else ranks
    groups = run.num_query_groups if run.has("num_query_groups") else heads
    sizes = (run.tp, *range(1, min(ranks, heads, 1024) + 1))  # no matrix is shared over more
    fitting = (
        size for size in sizes if ranks % size == heads % size == 0 and _shares(size, groups)
    )
    return min(fitting, key=lambda size: abs(size - run.tp))


def _undivided(run: RunView, tp: int) -> str:
    """The fault of sizes that do not divide the ranks; `tp` is a size that can."""
    pp = nearest_divisor(run.world // tp, run.pp)
    sizes = {
        "tensor_model_parallel_size": (run.tp, tp),
        "context_parallel_size": (run.cp, nearest_divisor(run.world // (tp * pp), run.cp)),
        "pipeline_model_parallel_size": (run.pp, pp),
    }
    first, *others = sizes
    shown = " x ".join(map(run.show, [first, *(name for name in others if sizes[name][0] > 1)]))
    instead = (
        [str(tp)]
        if run.pp == run.cp == 1
        else [f"{flag_name(field)} {fits}" for field, (size, fits) in sizes.items() if fits != size]
    )
    return (
        f"{shown}: does not divide the {run.world} rank(s) of this job; start "
        f"{nearest(run.world, run.tp * run.cp * run.pp)} "
        f"(in a dry run, with --world-size), or give {' and '.join(instead)}"
    )


def tensor_parallel(run: RunView) -> Faults:
    """Sizes and ranks. Where the size itself is wrong, widths and lengths are held against the size
    that is proposed.
    """
    if min(run.tp, run.cp, run.pp, run.world) <= 0:
        return
    shown = run.show("tensor_model_parallel_size")
    size = _fitting_tp(run)
    heads = run.num_attention_heads
    groups = run.num_query_groups
    if not run.dp:
        yield _undivided(run, size)
    if run.has("num_attention_heads") and heads % run.tp:
        yield f"{shown}: must divide --num-attention-heads {heads}; the nearest that fits is {size}"
    if run.has("num_query_groups") and groups != heads and not _shares(run.tp, groups):
        yield (
            f"{shown}: must divide --num-query-groups {groups} or be a multiple of it; the "
            f"nearest that fits is {size}"
        )
    divisor = f"not divisible by --tensor-model-parallel-size {size}"
    if run.has("ffn_hidden_size") and run.ffn_hidden_size % size:
        yield (
            f"{run.show('ffn_hidden_size')}: {divisor}; the nearest is "
            f"{nearest(run.ffn_hidden_size, size)}"
        )
    if run.sequence_parallel and run.has("seq_length") and run.seq_length % size:
        yield (
            f"{run.show('seq_length')}: {divisor}, as --sequence-parallel needs; the nearest "
            f"is {nearest(run.seq_length, size)}, or drop --sequence-parallel"
        )


def _replicas(run: RunView) -> str:
    return "data-parallel rank(s)" if run.cp == 1 else "data- x context-parallel ranks"


def context_parallel(run: RunView) -> Faults:
    """Lengths and heads that context-parallel ranks can share."""
    if run.cp <= 1:
        return
    shown = run.show("context_parallel_size")
    if fault := _two_levels(run, shown):
        yield fault
        return
    heads, ring = attention_ranks(run.config.distributed)
    yield from _shared_positions(run, shown, run.cp // heads, ring)
    if heads > 1 and run.has("num_attention_heads", "num_query_groups"):
        yield from _exchanged_heads(run, heads)


def _shared_positions(run: RunView, shown: str, parts: int, ring: int) -> Faults:
    """`parts` of a sequence each have a chunk from its front and one from its back."""
    unit, reason = math.lcm(2 * parts, run.cp), f"{shown} cuts it into"
    if run.sequence_parallel:
        unit = math.lcm(unit, run.cp * run.tp)
    if ring > 1 and run.attention_dropout:
        unit = math.lcm(unit, 8 * ring)
        reason = f"--attention-dropout in a ring of {ring} ranks, four keys at a time, cuts it into"
    if run.has("seq_length") and run.seq_length % unit:
        yield (
            f"{run.show('seq_length')}: {reason} {unit} equal parts; the nearest that "
            f"fits is {nearest(run.seq_length, unit)}"
        )


def _two_levels(run: RunView, shown: str) -> str | None:
    """What is wrong with the sizes of --cp-comm-type a2a+p2p."""
    if run.cp_comm_type != "a2a+p2p":
        return None
    sizes = run.hierarchical_context_parallel_sizes
    if sizes is not None and len(sizes) == 2 and min(sizes) > 0 and math.prod(sizes) == run.cp:
        return None
    inner = next((size for size in range(2, run.cp) if run.cp % size == 0), None)
    fix = (
        "give --cp-comm-type a2a or p2p"
        if inner is None
        else f"for example --hierarchical-context-parallel-sizes {inner} {run.cp // inner}"
    )
    what = "it needs" if sizes is None else f"{run.show('hierarchical_context_parallel_sizes')}:"
    return (
        f"--cp-comm-type a2a+p2p: {what} two sizes, of the ranks that exchange heads and of the "
        f"ring, whose product is {shown}; {fix}"
    )


def _exchanged_heads(run: RunView, ranks: int) -> Faults:
    heads, groups = run.num_attention_heads // run.tp, max(1, run.num_query_groups // run.tp)
    if heads % ranks or (groups % ranks and ranks % groups):
        flag = (
            "--context-parallel-size"
            if run.cp_comm_type == "a2a"
            else "first of --hierarchical-context-parallel-sizes"
        )
        yield (
            f"--cp-comm-type {run.cp_comm_type}: {ranks} ranks do not share out {heads} query and "
            f"{groups} key/value heads of a tensor-parallel rank; give --cp-comm-type allgather or "
            f"p2p, or a {flag} that divides {heads} and divides or is a multiple of {groups}"
        )


def zero(run: RunView) -> Faults:
    """Hybrid sharding: the data-parallel ranks must fall into groups of equal size."""
    size = run.zero_shard_size
    if run.has("zero_shard_size") and run.zero_stage > 0 and run.dp and run.replicas % size:
        fitting = nearest_divisor(run.replicas, size, least=2)
        yield (
            f"{run.show('zero_shard_size')}: must divide the {run.replicas} {_replicas(run)}; "
            f"the nearest that fits is {fitting}"
        )


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
    contradictions = list(_contradictions(run))
    yield from contradictions
    if contradictions or any(
        getattr(run, field) <= 0 for field in given(run, _PER_VIRTUAL, _VIRTUAL, *_UNEVEN)
    ):
        return
    if given(run, _LAYOUT):
        yield from _auto(run) if run.pipeline_model_parallel_layout == AUTO else _drawn(run)
    elif given(run, *_UNEVEN):
        yield from _uneven(run)
    else:
        yield from _even(run)


def _contradictions(run: RunView) -> Faults:
    ways = (
        (given(run, _LAYOUT), given(run, *_UNEVEN, *_COUNTED, _PER_VIRTUAL)),
        (given(run, *_UNEVEN), given(run, *_COUNTED, _PER_VIRTUAL)),
    )
    for one, others in ways:
        if one and others:
            virtual = (
                f" ({flag_name(_VIRTUAL)} goes with it)"
                if _PER_VIRTUAL in others and run.pipeline_model_parallel_layout in (None, AUTO)
                else ""
            )
            yield (
                f"{run.show(one[0])}: contradicts {' and '.join(map(run.show, others))}; "
                f"keep one way to share out the layers{virtual}"
            )
            return


def _stages(run: RunView) -> tuple[str, int]:
    """`--pipeline-model-parallel-size 4 x --num-virtual-stages-per-pipeline-rank 2 = 8`, and 8."""
    shown = run.show("pipeline_model_parallel_size")
    virtual = run.num_virtual_stages_per_pipeline_rank or 1
    return (
        f"{shown} x {run.show(_VIRTUAL)} = {run.pp * virtual}" if virtual > 1 else shown
    ), run.pp * virtual


def _instead(run: RunView, *fields: str) -> str:
    """What shares out any number of layers, in the place of those of some fields that are given."""
    others = given(run, *fields)
    auto = (
        "--pipeline-model-parallel-layout auto"
        if _stages(run)[1] <= run.num_layers + 2
        else "fewer pipeline ranks"
    )
    return auto + (f" instead of {' and '.join(map(flag_name, others))}" if others else "")


def _auto(run: RunView) -> Faults:
    shown, stages = _stages(run)
    units = run.num_layers + 2
    if stages > units:
        yield (
            f"{shown}: more stages than the {units} units of --num-layers {run.num_layers} "
            f"(embedding, layers, head); give at most {units} stages"
        )


def _drawn(run: RunView) -> Faults:
    shown = run.show(_LAYOUT)
    try:
        counts = parse_layout(run.pipeline_model_parallel_layout)
    except UserError as problem:
        yield f"{shown}: {problem}"
        return
    if sum(counts) != run.num_layers:
        yield (
            f"{shown}: has {sum(counts)} layers (t), and --num-layers is {run.num_layers}; "
            "make them equal"
        )
    virtual = run.num_virtual_stages_per_pipeline_rank
    if len(counts) % run.pp:
        yield (
            f"{shown}: has {len(counts)} stages, not a multiple of "
            f"--pipeline-model-parallel-size {run.pp}; make it {nearest(len(counts), run.pp)}"
        )
    elif len(counts) != run.pp * virtual:
        yield (
            f"{shown}: has {len(counts)} stages, {len(counts) // run.pp} on each pipeline "
            f"rank, which contradicts {run.show(_VIRTUAL)}; drop that"
        )


def _even(run: RunView) -> Faults:
    layers = counted_layers(run.config)
    counted = layers - run.num_layers
    with_them = (
        f" ({layers} with those of {' and '.join(map(flag_name, given(run, *_COUNTED)))})"
        if counted
        else ""
    )
    if given(run, _PER_VIRTUAL):
        unit = run.pp * run.num_layers_per_virtual_pipeline_stage
        divisor = f"{run.show('pipeline_model_parallel_size')} x {run.show(_PER_VIRTUAL)} = {unit}"
    else:
        divisor, unit = _stages(run)
    if layers % unit == 0:
        virtual = run.num_virtual_stages_per_pipeline_rank
        if given(run, _PER_VIRTUAL) and layers // unit != virtual:
            yield (
                f"{run.show(_PER_VIRTUAL)}: makes {layers // unit} stages on each pipeline "
                f"rank, which contradicts {run.show(_VIRTUAL)}; drop one"
            )
        return
    below = layers // unit * unit - counted
    numbers = [number for number in (below, below + unit) if number > 0]
    nearby = f"nearest {'are' if len(numbers) > 1 else 'is'} {' and '.join(map(str, numbers))}"
    yield (
        f"--num-layers {run.num_layers}{with_them}: not divisible by {divisor}; the "
        f"{nearby}, or give {_instead(run, *_COUNTED, _PER_VIRTUAL)}"
    )


def _nearest_first(run: RunView, numbers: dict[str, int]) -> int | None:
    """The layers to give by the first of the flags, nearest to what it gives now, so that the
    others can stay as they are; None when no number is right.
    """
    first, *further = numbers.values()
    virtual = run.num_virtual_stages_per_pipeline_rank
    others = run.pp - len(numbers)
    unit = max(1, others) * virtual
    total = run.num_layers - sum(further)  # for the first of the flags and the ranks without one
    least = unit if others else 0
    if total <= least or any(number % virtual for number in (*further, total)):
        return None
    if others == 0:
        return total
    most = (total - 1) // unit * unit
    return total - min(max(nearest(total - first, unit), least), most)


def _uneven(run: RunView) -> Faults:
    """Numbers for the first or last rank: what they leave must fit the others, and each rank's
    layers its virtual stages.
    """
    numbers = {field: getattr(run, field) for field in given(run, *_UNEVEN)}
    virtual = run.num_virtual_stages_per_pipeline_rank
    others = run.pp - len(numbers)
    total = sum(numbers.values())
    rest = run.num_layers - total
    shared_out = rest > 0 and rest % (others * virtual) == 0 if others else rest == 0
    if shared_out and all(number % virtual == 0 for number in numbers.values()):
        return
    shown = " and ".join(map(run.show, numbers))
    taken = _nearest_first(run, numbers)
    first = "" if taken is None else f"{flag_name(next(iter(numbers)))} {taken}, or "
    instead = f"give {first}{_instead(run, *_UNEVEN)}"
    if others == 0:
        divided = f", each to be divided by {run.show(_VIRTUAL)}" if virtual > 1 else ""
        yield f"{shown}: make {total} layers of --num-layers {run.num_layers}{divided}; {instead}"
        return
    wanted = f" x {virtual} virtual stages" if virtual > 1 else ""
    alone = (
        f", and each rank's number must be divisible by {run.show(_VIRTUAL)}" if virtual > 1 else ""
    )
    yield (
        f"{shown}: leave {rest} of --num-layers {run.num_layers} to {others} other pipeline "
        f"rank(s){wanted}, which must share them evenly{alone}; {instead}"
    )


# ---------------------------------------------------------------- schedules


def pipeline_schedule(run: RunView) -> Faults:
    """Virtual stages that a schedule takes."""
    name = run.pipeline_schedule
    virtual = run.num_virtual_stages_per_pipeline_rank
    if run.pp < 2 or name is None or virtual is None or virtual <= 0:
        return
    shown = run.show("pipeline_schedule")
    source = next(
        (
            field
            for field in (_LAYOUT, _PER_VIRTUAL, _VIRTUAL)
            if given(run, field) and getattr(run, field) != AUTO
        ),
        _VIRTUAL,
    )
    takes = SCHEDULES[name].virtual
    if takes is None and virtual == 1:
        yield (
            f"{shown}: needs several stages on each pipeline rank; give "
            "--num-virtual-stages-per-pipeline-rank 2, or --pipeline-schedule 1f1b"
        )
    elif takes not in (None, 1, virtual):
        yield (
            f"{shown}: takes {takes} stages on each pipeline rank, and {run.show(source)} "
            f"makes {virtual}; change that, or give another schedule"
        )
    elif takes == 1 and virtual > 1:
        yield (
            f"{shown}: takes one stage on each pipeline rank, and {run.show(source)} makes "
            f"{virtual}; drop that, or give --pipeline-schedule interleaved"
        )


def bubble(run: RunView) -> Faults:
    """A remark on fewer micro-batches than pipeline ranks."""
    if run.pp < 2 or not run.dp or not run.has("micro_batch_size", "global_batch_size"):
        return
    unit = run.micro_batch_size * run.dp
    micro_batches = run.global_batch_size // unit
    if micro_batches < run.pp:
        idle = (run.pp - 1) / (micro_batches + run.pp - 1)
        yield (
            f"{run.show('global_batch_size')}: {micro_batches} micro-batch(es) for {run.pp} "
            f"pipeline ranks leave (P-1)/(m+P-1) = {idle:.0%} "
            f"of a step idle under 1f1b; with --global-batch-size {unit * run.pp} it is less "
            "than half"
        )
