"""Every rule between flags.

`resolve` fills in derived values (`derive.py`), then collects the faults of all rules: bounds of
one field and flags without effect (both declared by the field, `groups.py`), the tables of rules
between two fields (`rules.py`), and the functions here, which compute something. `@field` in a text
is the flag with its value. A rule whose inputs are missing reports nothing: the missing flag is a
fault already.
"""

from __future__ import annotations

import glob
import math
import os
import re
from collections.abc import Callable
from pathlib import Path

from megatron.config.batch_schedule import batch_steps
from megatron.config.data_paths import parse_blend, parse_split
from megatron.config.derive import RunView, attention_ranks, derive, expert_ranks
from megatron.config.errors import ArgumentErrors, UserError, about, collected, nearest
from megatron.config.fp8 import BLOCK, MULTIPLE, layer_in_fp8, linear_shapes, wide_linears
from megatron.config.groups import DECAYING, FINAL_DECAY, Config
from megatron.config.layers import MOST_LAYERS, rotary_layers, windowed_layers
from megatron.config.metadata import flag_name
from megatron.config.model import ROTARY, ModelConfig
from megatron.config.recompute import layer_words
from megatron.config.rules import NUMBERS, Faults, Rule, multiple, ranges, remarks, tables
from megatron.config.schedules import SCHEDULES
from megatron.config.stages import (
    AUTO,
    COUNTED,
    LAYOUT,
    PER_VIRTUAL,
    UNEVEN,
    VIRTUAL,
    frozen_units,
    layers_of_stages,
    stage_count,
)

RULES: list[tuple[str, Rule]] = []


def rule(conditions: str) -> Callable[[Rule], Rule]:
    """Register a rule that is checked where conditions hold (see `RunView.holds`)."""

    def added(function: Rule) -> Rule:
        RULES.append((conditions, function))
        return function

    return added


# ---------------------------------------------------------------- the layout


def _shares(size: int, groups: int) -> bool:
    """Whether ranks hold equal numbers of key/value heads, or heads equal numbers of ranks."""
    return groups % size == 0 or size % groups == 0


@rule("world>0")
def _tensor_parallel(run: RunView) -> Faults:
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
    if heads % run.tp or not _shares(run.tp, groups):
        ranks = run.world // run.pp if run.world % run.pp == 0 else run.world
        sizes = range(1, min(ranks, heads, 1024) + 1)  # no matrix is shared over more
        fitting = [n for n in sizes if ranks % n == heads % n == 0 and _shares(n, groups)]
        near = min(fitting, key=lambda size: abs(size - run.tp))
        what = "@num_query_groups or be a multiple of it"
        if heads % run.tp:
            what = "@num_attention_heads"
        yield f"@tensor_model_parallel_size: must divide {what}; the nearest that fits is {near}"


@rule("context_parallel_size>1")
def _context_parallel(run: RunView) -> Faults:
    """Lengths and heads that context-parallel ranks can share."""
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


@rule("pp>1 num_layers>0")
def _pipeline_split(run: RunView) -> Faults:
    ways = [run.given(LAYOUT), run.given(*UNEVEN), run.given(*COUNTED, PER_VIRTUAL)]
    given = list(filter(None, ways))
    if len(given) > 1:
        shown = " and ".join(f"@{field}" for way in given[1:] for field in way)
        yield (
            f"@{given[0][0]}: contradicts {shown}; keep one way to share out the layers "
            "(--num-virtual-stages-per-pipeline-rank goes with each)"
        )
    elif any(getattr(run, field) <= 0 for field in run.given(PER_VIRTUAL, VIRTUAL, *UNEVEN)):
        return  # faults of their bounds
    elif run.pipeline_model_parallel_layout != AUTO:
        layers_of_stages(run.config)
    elif stage_count(run.config) > run.num_layers + 2:
        yield (
            "@pipeline_model_parallel_size x @num_virtual_stages_per_pipeline_rank: more stages "
            "than units of @num_layers (embedding, layers, head); give at most "
            f"{run.num_layers + 2} stages"
        )


@rule("pp>1 pipeline_schedule!=None num_virtual_stages_per_pipeline_rank>0")
def _pipeline_schedule(run: RunView) -> Faults:
    virtual = run.num_virtual_stages_per_pipeline_rank
    takes = SCHEDULES[run.pipeline_schedule].virtual
    if virtual == takes or (takes is None and virtual > 1):
        return
    given = [field for field in (LAYOUT, PER_VIRTUAL) if getattr(run, field) not in (None, AUTO)]
    number = "2 or more" if takes is None else takes
    yield (
        f"@pipeline_schedule: takes {number} stage(s) on each pipeline rank, and "
        f"@{(*given, VIRTUAL)[0]} makes {virtual}; change that, or give --pipeline-schedule "
        f"{'1f1b' if virtual == 1 else 'interleaved'}"
    )


# ---------------------------------------------------------------- the model


@rule(f"{ROTARY} multi_latent_attention=False kv_channels>0 rotary_percent>0")
def _rotary_channels(run: RunView) -> Faults:
    channels = int(run.kv_channels * run.rotary_percent)
    if channels == 0 or channels % 2:
        text = f"{channels} of {run.kv_channels} channels would rotate"
        yield f"@rotary_percent: {text}; it must be an even number above 0"


@rule("multi_latent_attention")
def _latent_attention(run: RunView) -> Faults:
    rotating, keys = run.qk_pos_emb_head_dim, run.qk_head_dim + run.qk_pos_emb_head_dim
    if rotating % 2:
        yield f"@qk_pos_emb_head_dim: channels rotate in pairs; give {rotating + 1}"
    if run.v_head_dim > keys:
        yield f"@v_head_dim: must be at most {keys}, the channels of a key"


# Flags that choose which layers are of a kind, each with what reads it.
PATTERNS: dict[str, Callable[[ModelConfig], object]] = {
    "window_attn_skip_freq": windowed_layers,
    "no_rope_freq": rotary_layers,
    "moe_layer_freq": ModelConfig.expert_layers,
}


@rule("num_layers>0")
def _patterns(run: RunView) -> Faults:
    faults: list[str] = []
    for field, read in PATTERNS.items():
        with collected(faults, flag_name(field)):
            read(run.config.model)
    return faults


@rule("freeze!=None num_layers>0")
def _freeze(run: RunView) -> Faults:
    with about("@freeze"):
        frozen = frozen_units(run.config)
    if run.decoupled_lr is not None and not run.skip_train and frozen >= {"embedding", "head"}:
        text = "is the learning rate of the embedding and the head, which"
        yield f"@decoupled_lr: {text} @freeze freezes; drop one"


@rule("num_experts>0")
def _experts(run: RunView) -> Faults:
    stage, (etp, ep) = run.tp * run.cp * run.dp, expert_ranks(run.config)
    if min(ep, etp, stage) > 0 and stage % (ep * etp):
        shown = "@expert_model_parallel_size"
        shown += " x @expert_tensor_parallel_size" * (etp > 1)
        yield (
            f"{shown}: must divide the {stage} rank(s) of a pipeline stage (tensor- x context- x "
            "data-parallel); give fewer, or --expert-tensor-parallel-size 1"
        )
    groups, chosen, topk = run.moe_router_num_groups, run.moe_router_group_topk, run.moe_router_topk
    if run.has("moe_router_num_groups", "moe_router_group_topk") and chosen <= groups:
        size, rest = divmod(run.num_experts, groups)
        if rest == 0 and topk % chosen == 0 and topk > chosen * size:
            yield (
                f"@moe_router_group_topk: {chosen} groups of {size} experts hold fewer than "
                f"@moe_router_topk; give {-(-topk // size)} or more"
            )
    kinds, coefficients = run.moe_router_load_balancing_type, run.moe_aux_loss_coeff
    if len(set(kinds)) < len(kinds):
        yield "@moe_router_load_balancing_type: names one twice; keep each once"
    if len(kinds) != len(coefficients):
        yield "@moe_aux_loss_coeff: must be one number for each of @moe_router_load_balancing_type"
    if min(coefficients) < 0:
        yield "@moe_aux_loss_coeff: must be 0 or more"
    for kind, coefficient in zip(kinds, coefficients):
        if kind == "none" and coefficient > 0:
            yield (
                "@moe_aux_loss_coeff: @moe_router_load_balancing_type has no loss for none; give "
                "aux_loss, or drop the coefficient"
            )


@rule("")
def _recompute(run: RunView) -> Faults:
    sizes = run.has("micro_batch_size", "seq_length", "hidden_size")
    if run.distribute_saved_activations and run.tp > 1 and sizes:
        elements = run.micro_batch_size * run.seq_length * run.hidden_size // run.cp
        if elements % run.tp:
            yield (
                f"--distribute-saved-activations: the {elements} elements of a layer's input are "
                "not a multiple of @tensor_model_parallel_size; drop it"
            )
    if run.recompute_layers is not None:
        with about("--recompute-layers"):
            count = len(layer_words(run.recompute_layers))
        if run.has("num_layers") and count != run.num_layers:
            yield f"@recompute_layers: covers {count} layers, not @num_layers"


@rule(
    "fp8_format hidden_size>0 ffn_hidden_size>0 kv_channels>0 num_attention_heads>0 "
    "num_query_groups>0 num_layers>0"
)
def _fp8(run: RunView) -> Faults:
    model, precision = run.config.model, run.config.precision
    wide = wide_linears(model, precision)
    unit = BLOCK if run.fp8_recipe == "blockwise" else MULTIPLE
    if not wide:
        widest = max(min(each.outputs, each.inputs) for each in linear_shapes(model))
        yield (
            f"@fp8_format: no linear layer has {run.fp8_min_width} inputs and outputs, the widest "
            f"has {widest} of the fewer; narrow ones lose more time than they gain: drop it, or "
            "lower --fp8-min-width"
        )
    if not any(layer_in_fp8(precision, each, run.num_layers) for each in range(run.num_layers)):
        yield (
            "@fp8_format: --first-last-layers-bf16 leaves none of @num_layers; lower "
            "--num-layers-at-start-in-bf16 and --num-layers-at-end-in-bf16"
        )
    for each in wide:
        # the parts on a rank are shorter than in one process, and no block holds rows of two
        units = unit * (each.parts if unit == BLOCK else 1), unit
        sizes = each.on_rank(run.tp)
        for size, divisor, what in zip(sizes, units, ("outputs", "inputs"), strict=True):
            if size % divisor:
                yield (
                    f"@fp8_format: {each.name} has {size} {what} on each tensor-parallel rank, and "
                    f"@fp8_recipe needs a multiple of {divisor}; change "
                    "--tensor-model-parallel-size or the width"
                )
    if run.num_query_groups < run.tp and any(each.name == "attention.qkv" for each in wide):
        yield (
            "@fp8_format: with @num_query_groups below @tensor_model_parallel_size several ranks "
            "hold parts of a key's gradient, which would be rounded before they are added up; use "
            f"at most --tensor-model-parallel-size {run.num_query_groups}"
        )


@rule("fp8_format fp8_wgrad=True fp8_recipe!=rowwise seq_length>0 micro_batch_size>0")
def _fp8_tokens(run: RunView) -> Faults:
    """Weight gradients sum over tokens, those of a piece of --tiled-mlp with sequence parallelism
    gathered from the ranks.
    """
    unit = BLOCK if run.fp8_recipe == "blockwise" else MULTIPLE
    pieces = max(1, run.tiled_mlp)
    tokens = run.seq_length // run.cp // pieces * run.micro_batch_size
    where = "a piece of @tiled_mlp" if pieces > 1 else "a micro-batch"
    is_gathered = pieces > 1 and run.sequence_parallel and run.fp8_recipe == "blockwise"
    if is_gathered and tokens % unit == 0:
        tokens //= run.tp
        where += " from each rank of --sequence-parallel"
    if tokens % unit:
        yield (
            f"@fp8_format: {where} of {tokens} tokens is no multiple of {unit}, which "
            "@fp8_recipe needs for weight gradients; change --seq-length, --micro-batch-size or "
            "--tiled-mlp, or set --no-fp8-wgrad"
        )


# ---------------------------------------------------------------- data and tokenizer


ABSENT_TOKENIZER = "no such file or folder; tokenizers are read from local files"
DATA_PATHS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")


@rule("split!=None")
def _split(run: RunView) -> Faults:
    parse_split(run.split)
    return ()


@rule("")
def _dataset_files(run: RunView) -> Faults:
    for field in run.given(*DATA_PATHS):
        flag = flag_name(field)
        for _, prefix in parse_blend(getattr(run, field), flag):
            names = f"{prefix}.idx", f"{prefix}.bin"
            missing = [name for name in names if not os.path.isfile(name)]
            if missing:
                yield (
                    f"{flag} {prefix}: no such file: {' and '.join(missing)}; give the prefix of "
                    "files from tools/preprocess_data.py"
                )


@rule("tokenizer_type!=None,NullTokenizer")
def _tokenizer(run: RunView) -> Faults:
    is_bpe = run.tokenizer_type == "GPT2BPETokenizer"
    for field in run.given("vocab_file", "merge_file") if is_bpe else run.given("tokenizer_model"):
        if not os.path.exists(getattr(run, field)):
            yield f"@{field}: {ABSENT_TOKENIZER}"


# ---------------------------------------------------------------- batches and lengths

MOST_INCREMENTS = 100_000  # of a ramp-up, each a step of batch_steps


def _unit(run: RunView) -> str:
    return NUMBERS["batch_unit"].format(run.batch_unit, run=run)


@rule("rampup_batch_size!=None micro_batches!=None")
def _ramp_up(run: RunView) -> Faults:
    ramp_up, unit = run.rampup_batch_size, run.batch_unit
    if len(ramp_up) != 3 or min(ramp_up) <= 0:
        yield "@rampup_batch_size: must be three numbers above 0: start increment samples"
        return
    start, increment, _ = ramp_up
    if start % unit or increment % unit:
        yield f"@rampup_batch_size: start and increment must be multiples of {_unit(run)}"
    growth = run.global_batch_size - start
    if growth not in range(increment, MOST_INCREMENTS * increment + 1, increment):
        text = f"@global_batch_size must be the start plus 1 to {MOST_INCREMENTS:,} increments"
        yield f"@rampup_batch_size: {text}"


@rule("step_batch_size_schedule!=None seq_length>0")
def _batch_schedule(run: RunView) -> Faults:
    with about("@step_batch_size_schedule"):
        steps = batch_steps(run.config.training, run.seq_length)
    for size in dict.fromkeys(size for _, size in steps if size % run.batch_unit):
        near = nearest(size, run.batch_unit)
        fault = f"{size} must be a multiple of {_unit(run)}; the nearest is {near}"
        yield f"@step_batch_size_schedule: {fault}"
    last = steps[-1][1]
    if run.global_batch_size != last:
        text = "contradicts the last step of @step_batch_size_schedule"
        yield f"@global_batch_size: {text}; remove it or give {last}"


@rule("")
def _lengths(run: RunView) -> Faults:
    """Warm-up and decay must be in the unit of the run, and fit into each other."""
    unit, wrong = ("iters", "samples") if run.train_samples is None else ("samples", "iters")
    warmup, decay, final = f"lr_warmup_{unit}", f"lr_decay_{unit}", f"lr_wsd_decay_{unit}"
    # at a constant rate the length of the decay counts for a warm-up that is a share of it
    is_read = run.holds(DECAYING) or run.lr_warmup_fraction is not None
    if getattr(run, f"train_{unit}") and getattr(run, f"train_{wrong}") is None:
        for name in (warmup, decay, final) if is_read else (warmup,):
            other = name.replace(unit, wrong)
            if getattr(run, other):
                yield f"@{other}: the run is measured in --train-{unit}; use {flag_name(name)}"
    lengths = [getattr(run, name) or 0 for name in (warmup, decay, final)]
    share = (run.lr_warmup_fraction or 0) * lengths[1]
    if is_read and lengths[0] >= lengths[1] > 0:
        yield f"@{warmup}: must be smaller than @{decay}"
    if run.holds(FINAL_DECAY) and not lengths[2]:
        yield f"@lr_decay_style: give {flag_name(final)}, the length of its final decay"
    elif run.holds(FINAL_DECAY) and lengths[0] + share + lengths[2] > lengths[1] > 0:
        yield f"@{final}: does not fit into @{decay} after the warm-up"


# ---------------------------------------------------------------- files and logging

# What checkpoints of Hugging Face, Megatron-LM, torch.distributed and DeepSpeed hold.
FOREIGN = re.compile(
    r"(model|pytorch_model|consolidated)[\w.-]*\.(safetensors|bin)|"
    r"((iter_\d+|release)/)?(common\.pt|mp_rank_.*|\.metadata)|.*\.distcp|"
    r"global_step\d+|.*zero_pp_rank_.*"
)
FOLDERS = (
    "save tensorboard_dir wandb_save_dir profile_dir local_checkpoint_dir optimizer_nvme_offload"
).split()


def _cannot_be_made(folder: Path) -> str:
    """Why a folder cannot be made and written into, with the fix, or an empty string."""
    folder = folder.absolute()
    there = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    if not os.path.exists(there):
        return f"{there} is a link to {os.readlink(there)}, which does not exist; make that"
    if not there.is_dir():
        is_it = there == folder
        return "is a file, not a folder" if is_it else f"cannot be made: {there} is not a folder"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"cannot be written: no permission in {there}; give another folder"
    return ""


def _is_foreign(folder: str) -> bool:
    """Whether a folder holds a checkpoint of another program, and none of ours."""
    names: list[str] = []
    for pattern in ("*", "iter_*/*", "release/*"):
        names += glob.glob(pattern, root_dir=folder, include_hidden=True)
    is_ours = any(name.endswith("/MANIFEST.json") for name in names)
    return not is_ours and any(map(FOREIGN.fullmatch, names))


@rule("load!=None")
def _load(run: RunView) -> Faults:
    if _is_foreign(run.load):
        yield (
            "@load: holds a checkpoint of another program; import it with "
            "`python tools/convert_checkpoint.py` (see --help), then give --config RUN/model.json "
            "--load RUN --finetune"
        )
    is_own = run.save is not None and os.path.realpath(run.load) == os.path.realpath(run.save)
    if not os.path.isdir(run.load) and (not is_own or run.exit_on_missing_checkpoint):
        fix = "give the same folder as --save, or drop --load"
        if is_own:
            fix = "drop --exit-on-missing-checkpoint"
        yield f"@load: no such folder; for a first start {fix}"


@rule("")
def _files(run: RunView) -> Faults:
    for field in run.given(*FOLDERS):
        if fault := _cannot_be_made(Path(getattr(run, field))):
            yield f"@{field}: {fault}"
    for field in run.given("metrics_file", "pipeline_timeline"):
        file = Path(getattr(run, field)).absolute()
        if fault := _cannot_be_made(file.parent):
            yield f"@{field}: its folder {fault}"
        elif file.is_dir():
            yield f"@{field}: is a folder; give a file in it"
    outside = [rank for rank in run.profile_ranks if rank < 0 or 0 < run.world <= rank]
    if run.profile and outside:
        yield f"@profile_ranks: there is no rank {outside[0]}; ranks count from 0"


# ---------------------------------------------------------------- all rules


def _faults(run: RunView) -> list[str]:
    faults = [*ranges(run), *tables(run)]
    # the rules divide by these sizes and look at each layer
    is_sound = min(run.tp, run.cp, run.pp) > 0 and (run.num_layers or 0) <= MOST_LAYERS
    for conditions, function in RULES if is_sound else ():
        try:
            faults += function(run) if run.holds_all(conditions) else ()
        except UserError as problem:
            faults.append(str(problem))
    return list(dict.fromkeys(map(run.spell_out, faults)))


def cross_field_faults(config: Config, world_size: int, vocab_size: int | None) -> list[str]:
    """Every fault of a configuration with its derived values; where sizes are unusable, only those
    of numbers and tables.
    """
    return _faults(derive(config, world_size, vocab_size))


def resolve(config: Config, world_size: int, vocab_size: int | None) -> RunView:
    """A run with derived values filled in, for a job of `world_size` ranks; its notes are those on
    derived values, and remarks.

    `vocab_size` is the tokenizer's real vocabulary, None while it is unknown. Raises one
    `ArgumentErrors` with the faults, see `cross_field_faults`.
    """
    run = derive(config, world_size, vocab_size)
    if faults := _faults(run):
        raise ArgumentErrors(faults)
    run.notes += map(run.spell_out, remarks(run))
    return run
