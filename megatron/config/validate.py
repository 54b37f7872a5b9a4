"""Every rule between flags.

`resolve` fills in derived values (`derive.py`), then collects the faults of all rules: bounds of
one field and flags without effect (both declared by the field, `groups.py`), the tables of rules
between two fields (`rules.py`), and functions, which compute something: those here, of the model in
`validate_model.py`, of the layout in `validate_layout.py`. A rule whose inputs are missing reports
nothing: the missing flag is a fault already.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron.config.batch_schedule import batch_steps
from megatron.config.data_paths import parse_blend, parse_split
from megatron.config.derive import RunView, derived
from megatron.config.errors import ArgumentErrors, UserError, about, nearest
from megatron.config.foreign_checkpoint import foreign_checkpoint
from megatron.config.groups import DECAYING, FINAL_DECAY, Config
from megatron.config.layers import MOST_LAYERS
from megatron.config.metadata import flag_name
from megatron.config.rules import Faults, Rule, multiple, ranges, remarks, tables
from megatron.config.schedules import planned_micro_batches
from megatron.config.stages import frozen_units
from megatron.config.validate_layout import LAYOUT_RULES, bubble
from megatron.config.validate_model import MODEL_RULES


@dataclass(frozen=True)
class Resolved:
    """A complete configuration, with notes on derived values and remarks."""

    config: Config
    notes: list[str]


MOST_MICRO_BATCHES = 100_000  # of one step on one rank, each an entry of the schedule
MOST_INCREMENTS = 100_000  # of a ramp-up
MOST_PASSES = 500_000  # of layers and micro-batches in a step of a pipeline


def _bounds(run: RunView) -> Faults:
    """Sizes beyond which the plan and the schedule would take minutes to compute."""
    layers, count = run.num_layers or 0, run.micro_batches or 0
    passes = increments = 0
    if run.pp > 1 and count <= MOST_MICRO_BATCHES:
        passes = layers * planned_micro_batches(run.pipeline_schedule, run.pp, count)
    if run.has("global_batch_size") and len(run.rampup_batch_size or ()) == 3:
        start, step, _ = run.rampup_batch_size
        increments = (run.global_batch_size - start) // step if step > 0 else 0
    fewer = "raise --micro-batch-size, or use more data-parallel ranks"
    for number, most, text, fix in (
        (layers, MOST_LAYERS, "@num_layers: {} layers", "give fewer"),
        (count, MOST_MICRO_BATCHES, "@global_batch_size: {} micro-batches of a rank", fewer),
        (passes, MOST_PASSES, "@global_batch_size: {} passes of layers in a step", fewer),
        (increments, MOST_INCREMENTS, "@rampup_batch_size: {} increments", "raise the increment"),
    ):
        if number > most:
            yield f"{text.format(f'{number:,}')}, at most {most:,} are planned for; {fix}"


def _freeze(run: RunView) -> Faults:
    if not run.has("num_layers"):
        return
    with about("@freeze"):
        frozen = frozen_units(run.config)
    if run.decoupled_lr is not None and not run.skip_train and frozen >= {"embedding", "head"}:
        text = "is the learning rate of the embedding and the head, which"
        yield f"@decoupled_lr: {text} @freeze freezes; drop one"


# ---------------------------------------------------------------- data and tokenizer


DATA_PATHS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")


def _split(run: RunView) -> Faults:
    if run.split is not None:
        parse_split(run.split)
    return ()


def _dataset_files(run: RunView, field: str) -> Faults:
    flag = flag_name(field)
    for _, prefix in parse_blend(getattr(run, field) or (), flag):
        names = f"{prefix}.idx", f"{prefix}.bin"
        missing = [name for name in names if not os.path.isfile(name)]
        if missing:
            yield (
                f"{flag} {prefix}: no such file: {' and '.join(missing)}; give the prefix of "
                "files from tools/preprocess_data.py"
            )


def absent_tokenizer(flag: str, path: str) -> str:
    absent = "no such file or folder; tokenizers are read from local files"
    if flag != "--tokenizer-model" or path.endswith((".json", ".model", ".tiktoken", ".txt")):
        return absent
    return (
        f"{absent}: for one of the Hugging Face Hub run `hf download {path} tokenizer.json "
        "tokenizer_config.json --local-dir DIR`, and give --tokenizer-model DIR with "
        "--tokenizer-type HuggingFaceTokenizer"
    )


def _tokenizer(run: RunView) -> Faults:
    kind = run.tokenizer_type
    has_files = kind not in (None, "NullTokenizer")
    if has_files:
        is_bpe = kind == "GPT2BPETokenizer"
        for field in ("vocab_file", "merge_file") if is_bpe else ("tokenizer_model",):
            path = getattr(run, field)
            if path is not None and not os.path.exists(path):
                yield f"@{field}: {absent_tokenizer(flag_name(field), path)}"
    # without files --vocab-size is that of the tokenizer
    for field in ("padded_vocab_size", "vocab_size") if has_files else ("padded_vocab_size",):
        rows = getattr(run, field)
        if None not in (run.vocabulary, rows) and rows < run.vocabulary:
            yield f"@{field}: the tokenizer has {run.vocabulary} tokens; give that or more"


# ---------------------------------------------------------------- batches and lengths


def _unit(run: RunView) -> tuple[int, str]:
    """Samples of a micro-batch on all data-parallel ranks, and how they come about."""
    unit = (run.micro_batch_size or 1) * (run.dp or 1)
    text = f"--micro-batch-size {run.micro_batch_size} x {run.dp} data-parallel rank(s) = {unit}"
    return unit, text


def _batch(run: RunView) -> Faults:
    if run.micro_batches is None:
        return
    unit, unit_text = _unit(run)
    yield from multiple(run, "global_batch_size", unit, unit_text)
    ramp_up = run.rampup_batch_size
    if ramp_up is None:
        return
    if len(ramp_up) != 3 or min(ramp_up) <= 0:
        yield "@rampup_batch_size: must be three numbers above 0: start increment samples"
        return
    start, increment, _ = ramp_up
    growth = run.global_batch_size - start
    if start % unit or increment % unit:
        yield f"@rampup_batch_size: start and increment must be multiples of {unit_text}"
    if growth <= 0 or growth % increment:
        text = "@global_batch_size must be the start plus a number of increments"
        yield f"@rampup_batch_size: {text}"


def _batch_schedule(run: RunView) -> Faults:
    if run.step_batch_size_schedule is None or not run.has("seq_length"):
        return
    with about("@step_batch_size_schedule"):
        steps = batch_steps(run.config.training, run.seq_length)
    unit, unit_text = _unit(run)
    for size in dict.fromkeys(size for _, size in steps if size % unit):
        near = nearest(size, unit)
        fault = f"{size} must be a multiple of {unit_text}; the nearest is {near}"
        yield f"@step_batch_size_schedule: {fault}"
    last = steps[-1][1]
    if run.global_batch_size != last:
        text = "contradicts the last step of @step_batch_size_schedule"
        yield f"@global_batch_size: {text}; remove it or give {last}"


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
    if is_read and lengths[0] >= lengths[1] > 0:
        yield f"@{warmup}: must be smaller than @{decay}"
    if run.holds(FINAL_DECAY) and not lengths[2]:
        yield f"@lr_decay_style: give {flag_name(final)}, the length of its final decay"
    elif run.holds(FINAL_DECAY) and lengths[0] + lengths[2] > lengths[1] > 0:
        yield f"@{final}: does not fit into @{decay} after the warm-up"


# ---------------------------------------------------------------- files and logging

FOLDERS = (
    "save",
    "tensorboard_dir",
    "wandb_save_dir",
    "profile_dir",
    "local_checkpoint_dir",
    "optimizer_nvme_offload",
)


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


def _load(run: RunView) -> Faults:
    if run.load is None:
        return
    if foreign := foreign_checkpoint(run.load):
        yield f"@load: {foreign}"
    is_own = run.save is not None and os.path.abspath(run.load) == os.path.abspath(run.save)
    if not os.path.isdir(run.load) and (not is_own or run.exit_on_missing_checkpoint):
        text = "for a first start give the same folder as --save, or drop --load"
        yield f"@load: no such folder; {text}"


def _files(run: RunView) -> Faults:
    for field in run.given(*FOLDERS):
        if fault := _cannot_be_made(Path(getattr(run, field))):
            yield f"@{field}: {fault}"
    if run.metrics_file is not None:
        if fault := _cannot_be_made(Path(run.metrics_file).absolute().parent):
            yield f"@metrics_file: its folder {fault}"
    if run.pipeline_timeline is not None:
        folder = Path(run.pipeline_timeline).absolute().parent
        if not folder.is_dir():
            yield f"@pipeline_timeline: no such folder: {folder}; make it first"
    outside = [rank for rank in run.profile_ranks if rank < 0 or 0 < run.world <= rank]
    if run.profile and outside:
        yield f"@profile_ranks: there is no rank {outside[0]}; ranks count from 0"


# Rules of numbers and tables, which unusable sizes do not break.
SAFE_RULES: tuple[Rule, ...] = (ranges, tables, _bounds)
RULES: tuple[Rule, ...] = (
    *SAFE_RULES,
    *LAYOUT_RULES,
    *MODEL_RULES,
    _freeze,
    _split,
    *(partial(_dataset_files, field=field) for field in DATA_PATHS),
    _tokenizer,
    _batch,
    _batch_schedule,
    _lengths,
    _load,
    _files,
)


# ---------------------------------------------------------------- remarks on valid settings


def _remarks(run: RunView) -> Faults:
    yield from remarks(run)
    yield from bubble(run)
    for moment, beta in (("exp_avg_dtype", "adam_beta1"), ("exp_avg_sq_dtype", "adam_beta2")):
        # half the spacing of bf16 just above a power of two
        if getattr(run, moment) == "bf16" and 1 - getattr(run, beta) < 2**-8:
            text = "a step changes the moment by less than bf16 can hold, so it hardly decays"
            fix = f"give {flag_name(beta)} 0.99 or less, or keep it in fp32"
            yield f"@{moment}: with @{beta} {text}; {fix}"
    if run.has("window_size", "seq_length") and run.window_size >= run.seq_length:
        yield "@window_size covers @seq_length: full causal attention"


def _faults(run: RunView) -> list[str]:
    faults: list[str] = []
    # other rules divide by these sizes and look at each layer
    is_sound = min(run.tp, run.cp, run.pp) > 0 and (run.num_layers or 0) <= MOST_LAYERS
    for rule in RULES if is_sound else SAFE_RULES:
        try:
            faults += rule(run)
        except UserError as problem:
            faults.append(str(problem))
    return list(dict.fromkeys(map(run.spell_out, faults)))


def cross_field_faults(config: Config, world_size: int, vocab_size: int | None) -> list[str]:
    """Every fault of a configuration with its derived values; where sizes are unusable, only those
    of numbers and tables.
    """
    return _faults(derived(config, world_size, vocab_size))


def checked(config: Config, world_size: int, vocab_size: int | None) -> RunView:
    """The run of a configuration with derived values. Raises one `ArgumentErrors` with its faults,
    see `cross_field_faults`.
    """
    run = derived(config, world_size, vocab_size)
    if faults := _faults(run):
        raise ArgumentErrors(faults)
    return run


def resolve(config: Config, world_size: int, vocab_size: int | None) -> Resolved:
    """The configuration with derived values filled in, for a job of `world_size` ranks.

    `vocab_size` is the tokenizer's real vocabulary, None while it is unknown. Raises one
    `ArgumentErrors` with the faults, see `cross_field_faults`.
    """
    run = checked(config, world_size, vocab_size)
    return Resolved(run.config, [*run.notes, *map(run.spell_out, _remarks(run))])
