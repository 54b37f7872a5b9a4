"""Every rule between flags.

`resolve` fills in derived values (`derive.py`), then collects the faults of all rules: bounds of
one field and flags without effect (both declared by the field, `groups.py`), the tables of rules
between two fields (`rules.py`), and functions, which compute something: those here, of the model in
`validate_model.py`, of the layout in `validate_layout.py`. A rule whose inputs are missing reports
nothing: the missing flag is a fault already.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron.config.batch_schedule import batch_steps
from megatron.config.data_paths import parse_blend, parse_split
from megatron.config.derive import GATED_WIDTH, RunView, derive
from megatron.config.errors import ArgumentErrors, UserError
from megatron.config.foreign_checkpoint import foreign_checkpoint
from megatron.config.groups import Config
from megatron.config.layers import MOST_LAYERS
from megatron.config.metadata import flag_name
from megatron.config.rules import (
    NEEDED,
    Faults,
    counts,
    multiple,
    nearest,
    ranges,
    two_fields,
    without_effect,
)
from megatron.config.schedules import planned_micro_batches
from megatron.config.stages import frozen_units
from megatron.config.validate_layout import LAYOUT_RULES, bubble, given
from megatron.config.validate_model import MODEL_RULES


@dataclass(frozen=True)
class Resolved:
    """A complete configuration and one note for each value that was filled in or deserves a
    word.
    """

    config: Config
    notes: list[str]


MOST_MICRO_BATCHES = 100_000  # of one step on one rank, each an entry of the schedule
MOST_INCREMENTS = 100_000  # of a ramp-up
MOST_PASSES = 500_000  # of layers and micro-batches in a step of a pipeline


def _bounds(run: RunView) -> Faults:
    """Sizes beyond which the plan and the schedule would take minutes to compute."""
    count, layers = run.micro_batches or 0, run.num_layers if run.has("num_layers") else 0
    passes = increments = 0
    if run.pp > 1 and count <= MOST_MICRO_BATCHES:
        passes = layers * planned_micro_batches(run.pipeline_schedule, run.pp, count)
    if run.has("global_batch_size") and len(run.rampup_batch_size or ()) == 3:
        start, step, _ = run.rampup_batch_size
        increments = (run.global_batch_size - start) // step if step > 0 else 0
    batch, raised = "global_batch_size", "raise --micro-batch-size, or use more data-parallel ranks"
    for field, number, most, what, fix in (
        ("num_layers", layers, MOST_LAYERS, "layers", "give fewer"),
        (batch, count, MOST_MICRO_BATCHES, "micro-batches in each step of a rank", raised),
        (batch, passes, MOST_PASSES, "passes of layers and micro-batches in a step", raised),
        ("rampup_batch_size", increments, MOST_INCREMENTS, "increments", "raise the increment"),
    ):
        if number > most:
            text = f"{number:,} {what}, at most {most:,} are planned for; {fix}"
            yield run.fault(field, text)


REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size")


def _required(run: RunView) -> Faults:
    for field in REQUIRED if run.skip_train else (*REQUIRED, "lr"):
        if getattr(run, field) is None:
            yield f"{flag_name(field)} is required"
    if run.ffn_hidden_size is None and run.has("hidden_size"):
        yield f"--ffn-hidden-size is required: {GATED_WIDTH} is 0 for {run.show('hidden_size')}"


def _freeze(run: RunView) -> Faults:
    if not run.has("num_layers"):
        return
    try:
        frozen = frozen_units(run.config)
    except UserError as error:
        yield run.fault("freeze", str(error))
        return
    if run.decoupled_lr is not None and not run.skip_train and frozen >= {"embedding", "head"}:
        yield run.fault(
            "decoupled_lr",
            "is the learning rate of the embedding and the head, which "
            f"{run.show('freeze')} freezes; drop one",
        )


# ---------------------------------------------------------------- data and tokenizer


def _sources(run: RunView) -> Faults:
    by_split = given(run, "train_data_path", "valid_data_path", "test_data_path")
    kinds = list(map(flag_name, [*given(run, "data_path", "mock_data"), *by_split[:1]]))
    if not kinds:
        yield "--data-path PREFIX is required (or --train-data-path, or --mock-data)"
    if len(kinds) > 1:
        yield f"{kinds[0]}: contradicts {' and '.join(kinds[1:])}; keep one kind of data"
    if by_split and run.train_data_path is None and not run.skip_train:
        yield f"{flag_name(by_split[0])}: --train-data-path is missing"
    try:
        if run.split is not None:
            parse_split(run.split)
    except UserError as error:
        yield str(error)
    for field in given(run, "data_path", *by_split):
        try:
            blend = parse_blend(getattr(run, field), flag_name(field))
        except UserError as error:
            yield str(error)
            continue
        for _, prefix in blend:
            missing = [prefix + end for end in (".idx", ".bin") if not os.path.isfile(prefix + end)]
            if missing:
                yield (
                    f"{flag_name(field)} {prefix}: no such file: {' and '.join(missing)}; give the "
                    "prefix of files from tools/preprocess_data.py"
                )


def absent_tokenizer(flag: str, path: str) -> str:
    """What to do about a file that does not exist, or may be a name on the Hugging Face Hub."""
    absent = "no such file or folder; tokenizers are read from local files"
    if flag != "--tokenizer-model" or path.endswith((".json", ".model", ".tiktoken", ".txt")):
        return absent
    return (
        f"{absent}: for one of the Hugging Face Hub run `hf download {path} tokenizer.json "
        "tokenizer_config.json --local-dir DIR`, and give --tokenizer-model DIR with "
        "--tokenizer-type HuggingFaceTokenizer"
    )


def _tokenizer(run: RunView) -> Faults:
    kind, known = run.tokenizer_type, run.vocabulary
    if kind is None:
        mock = "; with --mock-data, --vocab-size N is enough" if run.mock_data else ""
        yield f"--tokenizer-type is required{mock}"
    for rule, field, _ in NEEDED:
        path = getattr(run, field)
        is_file = rule.startswith("tokenizer_type") and field != "vocab_size"
        if is_file and counts(run, rule) and path is not None and not os.path.exists(path):
            yield run.fault(field, absent_tokenizer(flag_name(field), path))
    for field in ("padded_vocab_size", "vocab_size"):
        is_rule = kind in (None, "NullTokenizer") and field == "vocab_size"  # that of the tokenizer
        rows = getattr(run, field)
        if not is_rule and None not in (known, rows) and rows < known:
            yield run.fault(field, f"the tokenizer has {known} tokens; give that or more")


# ---------------------------------------------------------------- batches and lengths


def _batch(run: RunView) -> Faults:
    if run.micro_batches is None:
        return
    unit = run.micro_batch_size * run.dp
    text = f"--micro-batch-size {run.micro_batch_size} x {run.dp} data-parallel rank(s) = {unit}"
    yield from multiple(run, "global_batch_size", unit, text)
    ramp = run.rampup_batch_size
    if ramp is None:
        return
    if len(ramp) != 3 or min(ramp) <= 0:
        text = "must be three numbers above 0: start increment samples"
        yield run.fault("rampup_batch_size", text)
        return
    start, increment, _ = ramp
    if start % unit or increment % unit:
        yield run.fault("rampup_batch_size", f"start and increment must be multiples of {text}")
    if start >= run.global_batch_size or (run.global_batch_size - start) % increment:
        text = f"{run.show('global_batch_size')} must be the start plus a number of increments"
        yield run.fault("rampup_batch_size", text)


def _batch_schedule(run: RunView) -> Faults:
    field = "step_batch_size_schedule"
    if run.step_batch_size_schedule is None or not run.has("seq_length"):
        return
    try:
        steps = batch_steps(run.config.training, run.seq_length)
    except UserError as problem:
        yield run.fault(field, str(problem))
        return
    unit = (run.micro_batch_size or 1) * (run.dp or 1)
    for size in dict.fromkeys(size for _, size in steps if size % unit):
        yield run.fault(
            field,
            f"{size} must be a multiple of --micro-batch-size {run.micro_batch_size} x {run.dp} "
            f"data-parallel rank(s) = {unit}; the nearest is {nearest(size, unit)}",
        )
    if run.global_batch_size != steps[-1][1]:
        text = f"contradicts the last step of {run.show(field)}; remove it or give {steps[-1][1]}"
        yield run.fault("global_batch_size", text)


def _lengths(run: RunView) -> Faults:
    iters, samples, kind = run.train_iters, run.train_samples, run.decay_kind
    if iters is None and samples is None and not run.skip_train:
        yield "--train-iters or --train-samples is required"
    if iters == 0 and not run.skip_train:
        yield "--train-iters 0: nothing would be trained; to evaluate only, set --skip-train"
    unit, wrong = ("iters", "samples") if samples is None else ("samples", "iters")
    # at a constant rate the length of the decay counts for a warm-up that is a share of it
    is_read = kind.decays or run.lr_warmup_fraction is not None
    names = [f"lr_{part}_{unit}" for part in ("warmup", "decay", "wsd_decay")]
    for name in names if is_read else names[:1]:
        other = name.replace(unit, wrong)
        if (iters or samples) and (iters is None) != (samples is None) and getattr(run, other):
            yield run.fault(other, f"the run is measured in --train-{unit}; use {flag_name(name)}")
    warmup, decay, final = (getattr(run, name) for name in names)
    if decay and warmup >= decay and is_read:
        yield run.fault(names[0], f"must be smaller than {run.show(names[1])}")
    if kind.has_final_decay and not final:
        text = f"give {flag_name(names[2])}, the length of its final decay"
        yield run.fault("lr_decay_style", text)
    elif kind.has_final_decay and decay and final + (warmup or 0) > decay:
        yield run.fault(names[2], f"does not fit into {run.show(names[1])} after the warm-up")


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
    """Why a folder cannot be made and written into, with the fix, as far as its parents show; an
    empty string when nothing is known.
    """
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


def _files(run: RunView) -> Faults:
    if run.load is not None:
        same = run.save is not None and Path(run.load).absolute() == Path(run.save).absolute()
        if foreign := foreign_checkpoint(run.load):
            yield run.fault("load", foreign)
        if not os.path.isdir(run.load) and (not same or run.exit_on_missing_checkpoint):
            text = "for a first start give the same folder as --save, or drop --load"
            yield run.fault("load", f"no such folder; {text}")
    if run.pipeline_timeline is not None:
        folder = Path(run.pipeline_timeline).absolute().parent
        if not folder.is_dir():
            yield run.fault("pipeline_timeline", f"no such folder: {folder}; make it first")
    for field in given(run, *FOLDERS):
        if fault := _cannot_be_made(Path(getattr(run, field))):
            yield run.fault(field, fault)
    if run.metrics_file is not None:
        if fault := _cannot_be_made(Path(run.metrics_file).absolute().parent):
            yield run.fault("metrics_file", f"its folder {fault}")
    if run.save_retain_interval is not None and run.save is not None and not run.save_interval:
        yield run.fault("save_retain_interval", "set --save-interval, of which it is a multiple")
    outside = [rank for rank in run.profile_ranks if rank < 0 or 0 < run.world <= rank]
    if run.profile and outside:
        yield run.fault("profile_ranks", f"there is no rank {outside[0]}; ranks count from 0")


RULES: tuple[Callable[[RunView], Faults], ...] = (
    _required,
    ranges,
    two_fields,
    _bounds,
    *LAYOUT_RULES,
    *MODEL_RULES,
    _freeze,
    _sources,
    _tokenizer,
    _batch,
    _batch_schedule,
    _lengths,
    _files,
)


# ---------------------------------------------------------------- remarks on valid settings


def _remarks(run: RunView) -> Faults:
    for flag, text in without_effect(run, "idle_without"):
        yield f"{flag}: has no effect without {text}"
    if run.activation == "gelu":
        yield (
            "--activation gelu is the exact (erf) form; Megatron-LM's default, which it "
            "fuses with the bias, is the tanh form: --activation gelu-tanh"
        )
    yield from bubble(run)
    for moment, beta in (("exp_avg_dtype", "adam_beta1"), ("exp_avg_sq_dtype", "adam_beta2")):
        # half the spacing of bf16 just above a power of two
        if getattr(run, moment) == "bf16" and 1 - getattr(run, beta) < 2**-8:
            text = "a step changes the moment by less than bf16 can hold, so it hardly decays"
            fix = f"give {flag_name(beta)} 0.99 or less, or keep it in fp32"
            yield run.fault(moment, f"with {run.show(beta)} {text}; {fix}")
    if run.has("window_size", "seq_length") and run.window_size >= run.seq_length:
        yield f"{run.show('window_size')} covers {run.show('seq_length')}: full causal attention"
    if run.split is not None and run.mock_data:
        yield run.fault("split", "mock data has no documents to divide")
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
