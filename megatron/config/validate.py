"""Every rule between flags.

`resolve` fills in derived values (`derive.py`), then collects the faults of all rules: bounds of
one field and flags without effect (both declared by the field, `groups.py`), the tables of rules
between two fields (`rules.py`), and the functions of RULES, which compute something (those of the
layout in `validate_layout.py`). A rule whose inputs are missing reports nothing: the missing flag
is a fault already.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from megatron.config.batch_schedule import batch_steps
from megatron.config.derive import RunView, derive
from megatron.config.errors import ArgumentErrors, UserError
from megatron.config.foreign_checkpoint import foreign_checkpoint
from megatron.config.fp8 import fp8_faults
from megatron.config.groups import Config
from megatron.config.metadata import flag_name
from megatron.config.needs import is_rotary
from megatron.config.offload import LAYER_INPUT
from megatron.config.recompute import FULL, layer_words
from megatron.config.rules import (
    NEEDED,
    Faults,
    counts,
    nearest,
    nearest_divisor,
    ranges,
    two_fields,
    without_effect,
)
from megatron.config.schedules import planned_micro_batches
from megatron.config.stages import frozen_units
from megatron.config.validate_layout import (
    bubble,
    context_parallel,
    given,
    pipeline_schedule,
    pipeline_split,
    tensor_parallel,
    zero,
)
from megatron.config.validate_model import experts, latent_attention, recomputed_parts


@dataclass(frozen=True)
class Resolved:
    """A complete configuration and one note for each value that was filled in or deserves a
    word.
    """

    config: Config
    notes: list[str]


NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")  # a weight of a blend
MOST_LAYERS = 10_000
MOST_MICRO_BATCHES = 100_000  # of one step on one rank, each an entry of the schedule
MOST_INCREMENTS = 100_000  # of a ramp-up
MOST_PASSES = 500_000  # of layers and micro-batches in a step of a pipeline


def _bounds(run: RunView) -> Faults:
    """Sizes beyond which the plan and the schedule would take minutes to compute."""
    if run.has("num_layers") and run.num_layers > MOST_LAYERS:
        yield (
            f"{run.show('num_layers')}: at most {MOST_LAYERS:,} are planned for; give fewer layers"
        )
    if run.has("micro_batch_size", "global_batch_size") and run.dp:
        count = run.global_batch_size // (run.micro_batch_size * run.dp)
        if count > MOST_MICRO_BATCHES:
            yield (
                f"{run.show('global_batch_size')}: {count:,} micro-batches in each step of a "
                f"rank, at most {MOST_MICRO_BATCHES:,} are "
                f"planned for; raise --micro-batch-size, or give more ranks"
            )
        elif run.has("num_layers") and run.pp > 1:
            planned = planned_micro_batches(run.pipeline_schedule, run.pp, count)
            if run.num_layers * planned > MOST_PASSES:
                yield (
                    f"{run.show('global_batch_size')}: {run.num_layers} layers x {planned:,} "
                    "micro-batches of a step are more than the "
                    f"{MOST_PASSES:,} passes that are planned for; raise --micro-batch-size, "
                    "or give more data-parallel ranks"
                )
    if (
        run.has("global_batch_size")
        and len(run.rampup_batch_size or ()) == 3
        and run.rampup_batch_size[1] > 0
    ):
        count = (run.global_batch_size - run.rampup_batch_size[0]) // run.rampup_batch_size[1]
        if count > MOST_INCREMENTS:
            yield (
                f"{run.show('rampup_batch_size')}: {count:,} increments, at most "
                f"{MOST_INCREMENTS:,} are planned for; raise the increment"
            )


# ---------------------------------------------------------------- rules between fields


def _required(run: RunView) -> Faults:
    for field in (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "seq_length",
        "micro_batch_size",
        "lr",
    ):
        if getattr(run, field) is None and not (field == "lr" and run.skip_train):
            yield f"{flag_name(field)} is required"


def _heads(run: RunView) -> Faults:
    heads, groups = run.num_attention_heads, run.num_query_groups
    if (
        run.kv_channels is None
        and run.has("hidden_size", "num_attention_heads")
        and run.hidden_size % heads
    ):
        yield (
            f"--hidden-size {run.hidden_size}: not divisible by --num-attention-heads "
            f"{heads}; change one, or give --kv-channels"
        )
    if run.has("num_attention_heads", "num_query_groups") and heads % groups:
        yield f"--num-query-groups {groups}: must divide --num-attention-heads {heads}"


def _positions(run: RunView) -> Faults:
    if (
        is_rotary(run)
        and run.has("kv_channels", "rotary_percent")
        and not run.multi_latent_attention
    ):
        channels = int(run.kv_channels * run.rotary_percent)
        if channels == 0 or channels % 2:
            yield (
                f"{run.show('rotary_percent')}: {channels} of {run.kv_channels} channels "
                "would rotate; it must be an even number above 0"
            )


def _captured_gradients(run: RunView) -> Faults:
    if run.cuda_graphs and run.zero_stage >= 2 and run.replicas > 1:
        yield (
            f"--cuda-graphs: is not supported with {run.show('zero_stage')}, whose gradient "
            "buffers move; set --zero-stage 0 or 1"
        )


def _freeze(run: RunView) -> Faults:
    if not run.has("num_layers"):
        return
    try:
        frozen = frozen_units(run.config)
    except UserError as error:
        yield f"{run.show('freeze')}: {error}"
        return
    if run.decoupled_lr is not None and not run.skip_train and frozen >= {"embedding", "head"}:
        yield (
            f"{run.show('decoupled_lr')}: is the learning rate of the embedding and the head, "
            f"which {run.show('freeze')} freezes; drop one"
        )


def _uneven_weights(words: tuple[str, ...]) -> bool:
    """Whether some of these words are weights without a prefix each: numbers that name no file."""
    numbers = [NUMBER.fullmatch(word) is not None for word in words]
    weighted = len(words) % 2 == 0 and all(numbers[::2]) and not any(numbers[1::2])
    files = any(
        is_number and os.path.isfile(word + ".idx") for word, is_number in zip(words, numbers)
    )
    return any(numbers) and not weighted and not files


def _sources(run: RunView) -> Faults:
    by_split = given(run, "train_data_path", "valid_data_path", "test_data_path")
    kinds = list(map(flag_name, [*given(run, "data_path", "mock_data"), *by_split[:1]]))
    if not kinds:
        yield "--data-path PREFIX is required (or --train-data-path, or --mock-data)"
    if len(kinds) > 1:
        yield f"{kinds[0]}: contradicts {' and '.join(kinds[1:])}; keep one kind of data"
    if by_split and run.train_data_path is None and not run.skip_train:
        yield f"{flag_name(by_split[0])}: --train-data-path is missing"
    for field in ("data_path", *by_split):
        if _uneven_weights(getattr(run, field) or ()):
            yield (
                f"{run.show(field)}: give a weight before each prefix, as in 0.3 A 0.7 B, or "
                "before none"
            )
            continue
        for prefix in blend_prefixes(getattr(run, field) or ()):
            missing = [prefix + end for end in (".idx", ".bin") if not os.path.isfile(prefix + end)]
            if missing:
                yield (
                    f"{flag_name(field)} {prefix}: no such file: {' and '.join(missing)}; give the "
                    "prefix of files from tools/preprocess_data.py"
                )


def blend_prefixes(words: tuple[str, ...]) -> tuple[str, ...]:
    """The file prefixes of `prefix prefix ...` or `weight prefix weight prefix ...`."""
    weighted = (
        len(words) > 1
        and len(words) % 2 == 0
        and all(NUMBER.fullmatch(word) for word in words[::2])
    )
    return words[1::2] if weighted else words


def _split(run: RunView) -> Faults:
    if run.split is not None:
        try:
            parse_split(run.split)
        except UserError as error:
            yield str(error)


def parse_split(text: str) -> list[Fraction]:
    """`969,30,1` -> the shares of train, valid and test, exactly. Raises UserError."""
    try:
        parts = [Fraction(part) for part in re.split(r"[,/ ]+", text.strip())]
    except (ValueError, ZeroDivisionError):
        parts = []
    if not 1 <= len(parts) <= 3 or min(parts) < 0 or sum(parts) == 0:
        raise UserError(
            f"--split {text}: expected up to three shares like 969,30,1 with a sum above 0"
        )
    parts += [Fraction(0)] * (3 - len(parts))
    return [part / sum(parts) for part in parts]


def absent_tokenizer(path: str) -> str:
    """What to do about a tokenizer's file that does not exist, which may be meant as a name on the
    Hugging Face Hub.
    """
    hub = re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not os.path.splitext(path)[1] in (
        ".json",
        ".model",
        ".tiktoken",
        ".txt",
    )
    if not hub or os.path.isdir(os.path.dirname(path)):
        return "no such file; tokenizers are read from local files only"
    return (
        "no such file or folder; tokenizers are read from local files only. If it is a "
        "repository on the Hugging Face Hub, run "
        f"`hf download {path} tokenizer.json tokenizer_config.json --local-dir DIR`, and "
        f"give --tokenizer-model DIR with --tokenizer-type HuggingFaceTokenizer"
    )


def _tokenizer(run: RunView) -> Faults:
    kind = run.tokenizer_type
    if kind is None:
        mock = "; with --mock-data, --vocab-size N is enough" if run.mock_data else ""
        yield f"--tokenizer-type is required{mock}"
    for rule, field, _ in NEEDED:
        path = getattr(run, field)
        is_file = rule.startswith("tokenizer_type") and field != "vocab_size"
        if is_file and counts(run, rule) and path is not None and not os.path.exists(path):
            yield f"{run.show(field)}: {absent_tokenizer(path)}"
    rows = run.padded_vocab_size
    if rows is not None and run.vocabulary is not None and rows < run.vocabulary:
        yield (
            f"{run.show('padded_vocab_size')}: the tokenizer has {run.vocabulary} tokens; give "
            "that or more"
        )
    if (
        kind not in (None, "NullTokenizer")
        and None not in (run.vocabulary, run.vocab_size)
        and run.vocab_size < run.vocabulary
    ):
        yield (
            f"{run.show('vocab_size')}: the tokenizer has {run.vocabulary} tokens; remove "
            "--vocab-size or give the right tokenizer"
        )


def _batch(run: RunView) -> Faults:
    if not run.has("micro_batch_size", "global_batch_size") or not run.dp:
        return
    unit = run.micro_batch_size * run.dp
    text = f"--micro-batch-size {run.micro_batch_size} x {run.dp} data-parallel rank(s) = {unit}"
    if run.global_batch_size % unit:
        yield (
            f"{run.show('global_batch_size')}: not divisible by {text}; the nearest is "
            f"{nearest(run.global_batch_size, unit)}"
        )
    if run.rampup_batch_size is None:
        return
    shown = run.show("rampup_batch_size")
    if len(run.rampup_batch_size) != 3:
        yield f"{shown}: expected three numbers: start increment samples"
        return
    start, increment, samples = run.rampup_batch_size
    if min(start, increment, samples) <= 0:
        yield f"{shown}: start, increment and samples must be greater than 0"
        return
    if start % unit or increment % unit:
        yield f"{shown}: start and increment must be divisible by {text}"
    if start >= run.global_batch_size or (run.global_batch_size - start) % increment:
        yield (
            f"{shown}: {run.show('global_batch_size')} must be the start plus a number of "
            "increments"
        )


def _batch_schedule(run: RunView) -> Faults:
    if run.step_batch_size_schedule is None:
        return
    shown = run.show("step_batch_size_schedule")
    if not run.has("seq_length"):
        return
    try:
        steps = batch_steps(run.config.training, run.seq_length)
    except UserError as problem:
        yield f"{shown}: {problem}"
        return
    unit = (run.micro_batch_size or 1) * (run.dp or 1)
    for size in dict.fromkeys(size for _, size in steps if size % unit):
        yield (
            f"{shown}: {size} is not divisible by --micro-batch-size {run.micro_batch_size} x "
            f"{run.dp} data-parallel rank(s) = {unit}; the nearest is {nearest(size, unit)}"
        )
    if run.global_batch_size != steps[-1][1]:
        yield (
            f"{run.show('global_batch_size')}: contradicts the last step of {shown}; remove it or "
            f"give {steps[-1][1]}"
        )


def _decay_is_read(run: RunView) -> bool:
    """Whether the length of the decay means anything: at a constant rate only a warm-up that is a
    share of it does.
    """
    return run.decay_kind.decays or run.lr_warmup_fraction is not None


def _length(run: RunView) -> Faults:
    if run.train_iters is None and run.train_samples is None and not run.skip_train:
        yield "--train-iters or --train-samples is required"
    if run.train_iters == 0 and not run.skip_train:
        yield "--train-iters 0: nothing would be trained; to evaluate only, set --skip-train"
    if run.train_iters is not None and run.train_samples is not None:
        return
    for length, wrong in (("train_iters", "samples"), ("train_samples", "iters")):
        decays = (f"lr_decay_{wrong}", f"lr_wsd_decay_{wrong}") if _decay_is_read(run) else ()
        for field in (f"lr_warmup_{wrong}", *decays):
            if getattr(run, length) and getattr(run, field):
                other = field.replace(wrong, "iters" if wrong == "samples" else "samples")
                yield (
                    f"{run.show(field)}: the run is measured in "
                    f"{flag_name(length)}; use {flag_name(other)}"
                )


def _schedule(run: RunView) -> Faults:
    unit = "iters" if run.train_samples is None else "samples"
    warmup, decay, final = (
        getattr(run, name + unit) for name in ("lr_warmup_", "lr_decay_", "lr_wsd_decay_")
    )
    if decay and warmup >= decay and _decay_is_read(run):
        yield f"--lr-warmup-{unit} {warmup}: must be smaller than --lr-decay-{unit} {decay}"
    has_final_decay = run.decay_kind.has_final_decay
    if has_final_decay and not final:
        yield (
            f"{run.show('lr_decay_style')}: give --lr-wsd-decay-{unit}, the length of its final "
            "decay"
        )
    if has_final_decay and final and decay and final + (warmup or 0) > decay:
        yield (
            f"--lr-wsd-decay-{unit} {final}: does not fit into --lr-decay-{unit} {decay} "
            "after the warm-up"
        )
    yield from _decoupled(run)


def _decoupled(run: RunView) -> Faults:
    if run.decoupled_lr is None or run.skip_train:
        return
    shown = run.show("decoupled_lr")
    if run.lr_warmup_init > run.decoupled_lr:
        yield f"{run.show('lr_warmup_init')}: greater than {shown}"
    if not run.decay_kind.decays:
        return
    if run.decoupled_min_lr is None and run.min_lr > run.decoupled_lr:
        yield f"{run.show('min_lr')}: greater than {shown}; give --decoupled-min-lr"
    elif run.decoupled_min_lr is not None and run.decoupled_min_lr > run.decoupled_lr:
        yield f"{run.show('decoupled_min_lr')}: greater than {shown}"


def _recompute(run: RunView) -> Faults:
    in_full = run.recompute_granularity == "full"
    if in_full and run.recompute_method == "block" and run.recompute_num_layers is None:
        yield (
            "--recompute-method block: give --recompute-num-layers, the number of layers of each "
            "stage that are recomputed"
        )
    if run.has("recompute_num_layers", "num_layers") and run.recompute_num_layers > run.num_layers:
        yield f"{run.show('recompute_num_layers')}: there are {run.num_layers} layers; give fewer"
    yield from _recompute_layers(run)
    yield from _tiled_mlp(run)
    if run.distribute_saved_activations and run.sequence_parallel and run.tp > 1:
        yield (
            "--distribute-saved-activations: with --sequence-parallel each rank keeps its part of "
            "the sequence already; drop one"
        )
    sizes = run.has("micro_batch_size", "seq_length", "hidden_size") and run.tp > 1
    if sizes and run.distribute_saved_activations:
        elements = run.micro_batch_size * run.seq_length * run.hidden_size // run.cp
        if elements % run.tp:
            yield (
                f"--distribute-saved-activations: the {elements} elements of a layer's input are "
                f"not divisible by {run.show('tensor_model_parallel_size')}; drop it"
            )


def _tiled_mlp(run: RunView) -> Faults:
    """Pieces of the sequence must be equal: ranks communicate in each, and 8-bit floats share
    scales in blocks of tokens.
    """
    if run.tiled_mlp <= 1 or not run.has("seq_length"):
        return
    length = run.seq_length // run.cp // (run.tp if run.sequence_parallel else 1)
    if length % run.tiled_mlp:
        fits = nearest_divisor(length, run.tiled_mlp)
        yield (
            f"{run.show('tiled_mlp')}: must divide the {length} positions of the sequence that a "
            f"rank holds; the nearest that fits is {fits}"
        )


def _recompute_layers(run: RunView) -> Faults:
    if run.recompute_layers is None:
        return
    try:
        count = len(layer_words(run.recompute_layers))
    except UserError as problem:
        yield f"--recompute-layers: {problem}"
        return
    if run.has("num_layers") and count != run.num_layers:
        yield (
            f"{run.show('recompute_layers')}: covers {count} layers, and there are {run.num_layers}"
        )


def _activation_offload(run: RunView) -> Faults:
    if not run.activation_offload:
        return
    modules = set(run.offload_modules or ())
    words = set(run.recompute_layers or ())
    full = run.recompute_granularity == "full"
    some_whole = full or any(word.partition("*")[0] == FULL for word in words)
    all_whole = full and run.recompute_method != "block"
    if run.torch_compile and not all_whole:
        yield (
            "--activation-offload: a layer that --torch-compile has compiled fixes what it keeps; "
            "drop one, or take --recompute-granularity full, whose layer inputs can go"
        )
    if "attn_proj" in modules and "core_attn" not in modules:
        yield (
            f"{run.show('offload_modules')}: core attention keeps attn_proj's input too, so it "
            "would stay on the device; add core_attn"
        )
    if LAYER_INPUT in modules and not some_whole and run.recompute is None:
        yield (
            f"{run.show('offload_modules')}: layer_input is of layers that are recomputed whole; "
            "add --recompute-granularity full, or name modules inside a layer"
        )
    if modules and LAYER_INPUT not in modules and all_whole:
        yield (
            f"{run.show('offload_modules')}: with --recompute-granularity full a layer keeps its "
            "input alone; give --offload-modules layer_input"
        )


def _cannot_be_made(folder: Path) -> str:
    """Why a folder cannot be made and written into, with the fix, as far as its parents show; an
    empty string when nothing is known.
    """
    folder = folder.absolute()
    for place in (folder, *folder.parents):
        if place.is_symlink() and not os.path.exists(place):
            return (
                f"{place} is a link to {os.readlink(place)}, which does not exist; make that "
                "folder, or remove the link"
            )
    there = next(parent for parent in (folder, *folder.parents) if os.path.exists(parent))
    if there == folder and not there.is_dir():
        return "is a file, not a folder"
    if not there.is_dir():
        return f"cannot be made: {there} is not a folder; give another"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"cannot be written: no permission in {there}; give another folder"
    return ""


def _checkpoint(run: RunView) -> Faults:
    same = (
        run.load is not None
        and run.save is not None
        and Path(run.load).absolute() == Path(run.save).absolute()
    )
    if run.load is not None and (foreign := foreign_checkpoint(run.load)):
        yield f"{run.show('load')}: {foreign}"
    if (
        run.load is not None
        and not os.path.isdir(run.load)
        and (not same or run.exit_on_missing_checkpoint)
    ):
        yield (
            f"{run.show('load')}: no such folder; for a first start give the same folder as "
            "--save, or drop --load"
        )
    if run.pipeline_timeline is not None and not os.path.isdir(
        Path(run.pipeline_timeline).absolute().parent
    ):
        yield (
            f"{run.show('pipeline_timeline')}: no such folder: "
            f"{Path(run.pipeline_timeline).parent}; make it first"
        )
    for field in (
        "save",
        "tensorboard_dir",
        "wandb_save_dir",
        "profile_dir",
        "local_checkpoint_dir",
        "optimizer_nvme_offload",
    ):
        if getattr(run, field) is not None and (
            fault := _cannot_be_made(Path(getattr(run, field)))
        ):
            yield f"{run.show(field)}: {fault}"
    if run.metrics_file is not None and (
        fault := _cannot_be_made(Path(run.metrics_file).absolute().parent)
    ):
        yield f"{run.show('metrics_file')}: its folder {fault}"
    if (
        run.save_retain_interval is not None
        and run.save is not None
        and (not run.save_interval or run.save_retain_interval % run.save_interval)
    ):
        yield (
            f"{run.show('save_retain_interval')}: must be a multiple of --save-interval; "
            "give that too"
        )


def _profile(run: RunView) -> Faults:
    if not run.profile:
        return
    outside = [rank for rank in run.profile_ranks if rank < 0 or 0 < run.world <= rank]
    if outside:
        yield f"{run.show('profile_ranks')}: there is no rank {outside[0]}; ranks count from 0"


RULES: tuple[Callable[[RunView], Faults], ...] = (
    _required,
    ranges,
    two_fields,
    _bounds,
    _profile,
    tensor_parallel,
    context_parallel,
    zero,
    pipeline_split,
    pipeline_schedule,
    experts,
    latent_attention,
    recomputed_parts,
    _heads,
    _positions,
    _captured_gradients,
    fp8_faults,
    _freeze,
    _sources,
    _split,
    _tokenizer,
    _batch,
    _batch_schedule,
    _length,
    _schedule,
    _recompute,
    _activation_offload,
    _checkpoint,
)


# ---------------------------------------------------------------- words to the user about settings
# that are valid


def _remarks(run: RunView) -> Faults:
    for flag, text in without_effect(run, fault=False):
        yield f"{flag}: has no effect without {text}"
    if run.activation == "gelu":
        yield (
            "--activation gelu is the exact (erf) form; Megatron-LM's default, which it "
            "fuses with the bias, is the tanh form: --activation gelu-tanh"
        )
    yield from bubble(run)
    for moment, beta in (("exp_avg", "adam_beta1"), ("exp_avg_sq", "adam_beta2")):
        # half the spacing of bf16 just above a power of two
        if getattr(run, f"{moment}_dtype") == "bf16" and 1 - getattr(run, beta) < 2**-8:
            yield (
                f"{run.show(f'{moment}_dtype')}: with {run.show(beta)} a step changes the "
                "moment by less than bf16 can hold, so it hardly decays; "
                f"give {flag_name(beta)} {0.99:g} or less, or keep it in fp32"
            )
    if (
        run.window_size is not None
        and run.seq_length is not None
        and run.window_size >= run.seq_length
    ):
        yield (
            f"{run.show('window_size')} covers the whole --seq-length {run.seq_length}: full "
            "causal attention"
        )
    if run.split is not None and run.mock_data:
        yield f"{run.show('split')}: mock data has no documents to divide"
    if run.save is None and not run.skip_train:
        yield "--save is not set: no checkpoints or metrics will be written"


def cross_field_faults(config: Config, world_size: int, vocab_size: int | None) -> list[str]:
    """Every fault of a configuration, after derived values are filled in; an empty list means that
    it can run.
    """
    config, _ = derive(config, world_size, vocab_size)
    return _faults(RunView(config, world_size, vocab_size))


def _faults(run: RunView) -> list[str]:
    """Each once; `run` has its derived values."""
    return list(dict.fromkeys(fault for rule in RULES for fault in rule(run)))


def resolve(config: Config, world_size: int, vocab_size: int | None) -> Resolved:
    """The configuration with derived values filled in, for a job of `world_size` ranks.

    `vocab_size` is the tokenizer's real vocabulary, None while it is unknown. Raises one
    `ArgumentErrors` with all faults.
    """
    config, notes = derive(config, world_size, vocab_size)
    run = RunView(config, world_size, vocab_size)
    faults = _faults(run)
    if faults:
        raise ArgumentErrors(faults)
    return Resolved(config, [*notes, *_remarks(run)])
