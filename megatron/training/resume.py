"""The JSON state of a checkpoint, and what a run that loads one must share with it.

Called from training/prepare.py, training/checkpointing.py and training/banner.py.
"""

from __future__ import annotations

import dataclasses
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megatron.checkpoint.index import newest_first, read_manifest
from megatron.checkpoint.manifest import CheckpointError, iteration_folder, list_iterations
from megatron.checkpoint.reader import Checkpoint
from megatron.checkpoint.run_state import RUN, WEIGHTS, config_of, from_saved, require
from megatron.config.derive import POSITIONS, derive
from megatron.config.errors import ArgumentErrors, UserError
from megatron.config.groups import CheckpointConfig, Config, GivenConfig
from megatron.config.input_files import InputError
from megatron.config.metadata import ChangeRule
from megatron.config.needs import is_rotary
from megatron.config.options import FIELDS
from megatron.distributed.groups import describe_layout
from megatron.model.build import model_shapes, trained_names
from megatron.model.kernels import choose_kernels
from megatron.optimizer.lr_schedule import ParamSchedule

if TYPE_CHECKING:
    from megatron.training.run import Run

# what a change of a field means: declared by it
_CHANGES = {field: option.change for field, option in FIELDS.items()}


def run_state(run: Run) -> dict[str, Any]:
    """The JSON state of a checkpoint."""
    return {
        **asdict(run.progress),
        "optimizer_steps": run.optimizer.steps.item(),
        "scaler": run.scaler.state(),
        "schedule": run.schedule.state(),
        "ledger": run.data.history,
        "config": run.config.to_dict(),
        "vocab_size": run.tokenizer.vocab_size,
        "tokenizer": run.tokenizer.fingerprint,
        "tensors": _tensors(run),
        "versions": {"torch": torch.__version__},
        "layout": describe_layout(run.groups.layout),
        "device": run.device_names,
        "kernels": {
            operator: choice.implementation
            for operator, choice in choose_kernels(run.config, run.device)[1].items()
        },
    }


def _tensors(run: Run) -> dict[str, list[int]]:
    """Name and shape of every logical tensor that the shards of all ranks together must hold,
    computed from the flags, not from what ranks hold.
    """
    # The list against which a checkpoint is complete: a rank that wrote too little is found.
    shapes = model_shapes(run.config.model, run.tokenizer.vocab_size)
    trained = trained_names(run.config.model, run.tokenizer.vocab_size)
    states = (
        run.optimizer.state_names
        if run.config.checkpoint.save_optim and run.config.optimizer.freeze is None
        else ()
    )
    named = {
        **shapes,
        **{
            f"optimizer.{state}.{name}": shape
            for state in states
            for name, shape in shapes.items()
            if name in trained
        },
    }
    return {name: list(shape) for name, shape in named.items()}


def device_name(device: torch.device) -> str:
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )


def continuity(checkpoint: Checkpoint, run: Run) -> str:
    """For the log: whether the run continues bit for bit as one that was never interrupted, and if
    not, what makes them differ.
    """
    if takes_weights_alone(run.config):
        return ""
    # 1. What decides rounding: layout, device, versions, kernels and flags.
    state, on_cpu = checkpoint.state, run.device.type == "cpu"
    known = "kernels" in state  # not in a checkpoint from before they were written down
    theirs, ours = (_decides_rounding(each, kernels=known) for each in (state, run_state(run)))
    # 2. ZeRO stages that add in the same order give the same bits on a CPU, where sums are ours.
    if on_cpu and _same_sums(state["config"], run.config.to_dict(), run.global_micro_batch_size):
        ours["--zero-stage"] = theirs["--zero-stage"]
    different = [
        f"{name} {theirs.get(name)} -> {value}"
        for name, value in ours.items()
        if theirs.get(name) != value
    ]
    # 3. What was accepted.
    if not (run.config.model.deterministic_mode or on_cpu):
        different.append("--no-deterministic-mode")
    changes = [
        *changed_fields(state, run.config, run.tokenizer.vocab_size, run.tokenizer.fingerprint),
        *changed_data(state, run.config, run.data.history),
    ]
    different += sorted({change.accept for change in changes})
    if run.schedule != saved_schedule(state["schedule"]):
        different.append("learning-rate schedule")
    if not different:
        return "; resumes bit for bit"
    return f"; resumes from the same state, not bit for bit: {', '.join(different)}"


def takes_weights_alone(config: Config) -> bool:
    """Whether a run reads no optimizer state of the checkpoint that it loads."""
    return (
        config.checkpoint.finetune
        or not config.checkpoint.load_optim
        or config.evaluation.skip_train
    )


def _decides_rounding(state: dict[str, Any], *, kernels: bool = False) -> dict[str, Any]:
    """What decides it, by name; of kernels what was taken, where that is known, and else what the
    flags specify.
    """
    # Each field declares whether it decides bits: the list needs no upkeep here.
    config = config_of(state).to_dict()
    deciding = (
        field
        for field, change in _CHANGES.items()
        if change.bits and not (kernels and change.kernel)
    )
    flags = {_flag(field): config[FIELDS[field].group][field] for field in deciding}
    taken = (
        {f"{operator} by": implementation for operator, implementation in state["kernels"].items()}
        if kernels
        else {}
    )
    return {
        "layout": state.get("layout"),
        "device": state.get("device"),
        "torch": state["versions"]["torch"],
        **taken,
        **flags,
    }


def _same_sums(theirs: dict[str, Any], ours: dict[str, Any], chunk: int) -> bool:
    """Whether the ZeRO stages of two configurations add up gradients and their norm in the same
    order, `chunk` samples being one micro-batch of all ranks: stages 0 and 1 add over micro-batches
    first, 2 and 3 over ranks first; a norm for clipping is that of the whole at 0, of shards
    above.
    """
    # Without accumulation or clipping there is only one order.
    stages = [config["distributed"].get("zero_stage", 0) for config in (theirs, ours)]
    accumulates = any(config["training"]["global_batch_size"] > chunk for config in (theirs, ours))
    clips = any(config["optimizer"]["clip_grad"] > 0 for config in (theirs, ours))
    return not (accumulates and (stages[0] < 2) != (stages[1] < 2)) and not (
        clips and (stages[0] == 0) != (stages[1] == 0)
    )


def check_complete(checkpoint: Checkpoint, *, weights_alone: bool) -> None:
    """Raises CheckpointError unless the state holds all that a run resumes from, and is of the
    folder's iteration.
    """
    state = checkpoint.state
    try:
        require(state, WEIGHTS if weights_alone else RUN)
        if not weights_alone and state["iteration"] != checkpoint.iteration:
            raise InputError(f"its state is of iteration {state['iteration']}")
        if not weights_alone:
            saved_schedule(state["schedule"])
    except InputError as error:
        raise CheckpointError(f"{checkpoint.path}: cannot be loaded: {error}") from error


class Change(NamedTuple):
    """A field in which a run differs from the checkpoint that it loads; `accept`: the value of
    --accept-changed that lets it go on.
    """

    text: str
    accept: str | None


class Difference(NamedTuple):
    """A field that two configurations do not have in common."""

    name: str
    change: ChangeRule  # declared by the field
    text: str


def _differences(theirs: Config, ours: Config) -> list[Difference]:
    """Every field in which a configuration differs from a checkpoint's."""
    pairs = {
        name: [getattr(getattr(each, FIELDS[name].group), name) for each in (theirs, ours)]
        for name in _CHANGES
    }
    return [
        Difference(name, _CHANGES[name], f"{_flag(name)}: checkpoint {old}, command line {new}")
        for name, (old, new) in pairs.items()
        if old != new
    ]


def changed_fields(
    state: dict[str, Any], config: Config, vocab_size: int, tokenizer_fingerprint: str
) -> list[Change]:
    """What a run may not change unseen: the model and, unless it takes the weights alone, the
    tokenizer and what --accept-changed names.
    """
    theirs = config_of(state)
    differences = _differences(theirs, config)
    # 1. The model: no flag accepts another one. Of learned positions their table is a part of it;
    # with rotary positions some fields hold no weights, so that a change of them is another run of
    # the same model.
    rotary = is_rotary(theirs.model) and is_rotary(config.model)
    found = [
        Change(each.text, None)
        for each in differences
        if FIELDS[each.name].group == "model"
        and (each.change.refused or (each.change.weightless and not rotary))
    ]
    if vocab_size != state["vocab_size"]:
        rows = state["vocab_size"]
        fix = f"; give --vocab-size {rows}" if rows > vocab_size else ""
        found.append(Change(f"vocabulary: checkpoint {rows}, tokenizer {vocab_size}{fix}", None))
    if config.checkpoint.finetune or state.get("tokenizer") is None:
        # another tokenizer of the same size is the user's choice when weights alone are taken
        return found
    # 2. The tokenizer, then fields that change what later steps see.
    if tokenizer_fingerprint != state["tokenizer"]:
        found.append(Change("tokenizer: its files are not those of the checkpoint", "tokenizer"))
    for name, change, text in differences:
        if (
            change.accept
            and (rotary or not change.weightless)
            and not (change.accept == "batch" and config.evaluation.skip_train)
        ):
            found.append(Change(f"{text}; {change.what} would change", change.accept))
    return found


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def logged_changes(state: dict[str, Any], config: Config) -> list[str]:
    """For the banner: the changes that need no permission but alter the steps to come, one a line.
    Where only weights are taken, these are settings of the model that hold no weights.
    """
    if config.evaluation.skip_train:
        return []
    # Each field declares what a change of it means; --finetune starts a new run, so most changes
    # are its purpose.
    finetune = config.checkpoint.finetune
    return [
        text
        for _, change, text in _differences(config_of(state), config)
        if (change.weightless if finetune else change.logged)
    ]


def changed_data(state: dict[str, Any], config: Config, ledger: dict[str, Any]) -> list[Change]:
    """How the training data that a run is given now differs from those it was reading when the
    checkpoint was written.
    """
    if (
        config.checkpoint.finetune
        or config.evaluation.skip_train
        or not state.get("consumed_samples")
    ):
        return []
    last = [
        [source for segment in each["segments"][-1:] for source in segment["sources"]]
        for each in (state["ledger"], ledger)
    ]
    # ids are of content and order
    # Files may move and be renamed: sources are compared by what they hold. Older ledgers have ids
    # alone.
    key = "content" if all("content" in source for sources in last for source in sources) else "id"
    old, new = ({source[key]: source for source in sources} for sources in last)
    texts = [
        (
            f"data: {source['name']}: not what the checkpoint's run was reading (content, or its "
            "range by --split)"
        )
        for key, source in new.items()
        if key not in old
    ]
    texts += [
        f"data: {source['name']}: read by the checkpoint's run, not given now"
        for key, source in old.items()
        if key not in new
    ]
    texts += [
        (
            f"data: {source['name']}: share of the blend: checkpoint {old[key]['share']}, "
            f"command line {source['share']} (of 65536)"
        )
        for key, source in new.items()
        if key in old and old[key]["share"] != source["share"]
    ]
    return [Change(text, "data") for text in texts]


def accept_changes(checkpoint: Checkpoint, changes: list[Change], config: Config) -> list[str]:
    """Lines for the banner on what was accepted. Raises CheckpointError listing every change that
    was not, with the flag that would accept it.
    """
    # All refused changes are listed at once, each with the flag that accepts it.
    accepted = config.checkpoint.accept_changed or ()
    refused = [change for change in changes if change.accept not in accepted]
    faults = [
        f"{change.text} [--accept-changed {change.accept}]" if change.accept else change.text
        for change in refused
    ]
    if faults:
        # What to do about them: only the ways that lead out of this list.
        ways = []
        if any(change.accept for change in changes):
            ways.append(
                "the flag in brackets takes a field from the command line, and --finetune "
                "loads only the weights"
            )
        if not all(change.accept for change in changes):
            ways.append("--use-checkpoint-args takes the model from the checkpoint")
        lines = [f"{checkpoint.path} does not fit this run:", *faults, f"({'; '.join(ways)})"]
        raise CheckpointError("\n  ".join(lines))
    return [f"accepted by --accept-changed {change.accept}: {change.text}" for change in changes]


def take_checkpoint_args(flags: GivenConfig) -> GivenConfig:
    """--use-checkpoint-args: the configuration with the checkpoint's model, tokenizer and sequence
    length in the place of all defaults.

    Read from the manifest alone, before anything else is known. Raises ArgumentErrors where the
    command line has something else.
    """
    options = flags.checkpoint
    if not options.use_checkpoint_args:
        return flags
    if options.load is None:
        raise ArgumentErrors(
            ["--use-checkpoint-args: there is no checkpoint to take them from; give --load"]
        )
    try:
        theirs = config_of(_manifest_of(options)["state"])
    except InputError as error:
        raise ArgumentErrors([f"--use-checkpoint-args: {error}"]) from error
    # Checkpoints hold the type of positions that follows from the flags.
    config, _ = derive(flags, 1, None, POSITIONS[:1])
    # A field at its default is taken from the checkpoint; one that was given must agree with it.
    faults, default = [], Config()
    for name in (field for field, change in _CHANGES.items() if change.taken):
        group = FIELDS[name].group
        here, there, plain = (
            getattr(getattr(each, group), name) for each in (config, theirs, default)
        )
        if there is None:
            continue  # an imported model has no run's settings: the command line's are taken
        if here == plain:
            taken = {name: _loaded(group, name, there)}
            config = dataclasses.replace(
                config, **{group: dataclasses.replace(getattr(config, group), **taken)}
            )
        elif here != there and not _CHANGES[name].file and not _may_change(name, options):
            faults.append(
                f"{_flag(name)} {here}: the checkpoint has {there} "
                "(--use-checkpoint-args); drop one of the two flags"
            )
    if faults:
        raise ArgumentErrors(faults)
    return GivenConfig(config)


def _may_change(name: str, options: CheckpointConfig) -> bool:
    """Whether the command line may differ from the checkpoint in a field."""
    rule = _CHANGES[name]
    given = options.accept_changed or ()
    return rule.logged or rule.accept is not None and (options.finetune or rule.accept in given)


def _loaded(group: str, name: str, value: Any) -> Any:
    """A field's value from a checkpoint, as from a configuration file. Raises ArgumentErrors for
    one that the field does not take.
    """
    try:
        return FIELDS[name].load(list(value) if isinstance(value, tuple) else value)
    except UserError as error:
        raise ArgumentErrors(
            [f"--use-checkpoint-args: the checkpoint has {group}.{name} = {value!r}: {error}"]
        ) from error


def _manifest_of(options: CheckpointConfig) -> dict[str, Any]:
    """The manifest of the checkpoint that will be loaded, if nothing else of it is damaged."""
    # The iterations that could be meant, newest first.
    root, step = Path(options.load), options.ckpt_step
    known = (
        newest_first(root)[0]
        if step is None
        else [iteration for iteration in list_iterations(root) if iteration <= step]
    )
    if not known or known[0] != (step if step is not None else known[0]):
        raise ArgumentErrors(
            [
                (
                    "--use-checkpoint-args: no "
                    f"checkpoint{'' if step is None else f' of iteration {step}'} in --load {root}"
                )
            ]
        )
    # A damaged one is passed over only where the user allows an older checkpoint.
    for iteration in known:
        try:
            return read_manifest(root / iteration_folder(iteration))[0]
        except CheckpointError as error:
            if not options.allow_older_checkpoint or iteration == known[-1]:
                raise ArgumentErrors([f"--use-checkpoint-args: {error}"]) from error
    raise AssertionError


def schedule_changes(ours: ParamSchedule, theirs: dict[str, Any]) -> list[str]:
    """What differs between the schedule of the command line and a checkpoint's, a line each."""
    saved = asdict(saved_schedule(theirs))
    return [
        f"{name}: checkpoint {saved[name]}, command line {value}"
        for name, value in asdict(ours).items()
        if saved[name] != value
    ]


def saved_schedule(saved: dict[str, Any]) -> ParamSchedule:
    """The schedule in a checkpoint's state. Raises InputError for unknown or missing fields.

    The ends of --decoupled-lr are there both or not at all.
    """
    # Fields that a later version added take their defaults.
    schedule = from_saved(ParamSchedule, saved, "state.schedule")
    if (schedule.decoupled_max_lr is None) != (schedule.decoupled_min_lr is None):
        raise InputError(
            "state.schedule is not what a run writes there: it has one of decoupled_max_lr and "
            "decoupled_min_lr"
        )
    return schedule


def resumed_schedule(ours: ParamSchedule, theirs: dict[str, Any], config: Config) -> ParamSchedule:
    """The schedule to go on with: the command line's when equal or overridden, the checkpoint's
    when asked for. --skip-train uses neither.

    Raises CheckpointError when they differ and neither flag chooses.
    """
    if config.evaluation.skip_train:
        return ours
    if config.optimizer.use_checkpoint_opt_param_scheduler:
        return saved_schedule(theirs)
    # Which of the two is meant cannot be known: the user chooses, or nothing is trained.
    different = [f"  {line}" for line in schedule_changes(ours, theirs)]
    if different and not config.optimizer.override_opt_param_scheduler:
        raise CheckpointError(
            (
                "the learning-rate or weight-decay schedule differs from the checkpoint's "
                "(lengths in samples):\n"
            )
            + "\n".join(different)
            + (
                "\nchoose with --override-opt-param-scheduler (command line) or "
                "--use-checkpoint-opt-param-scheduler (checkpoint)"
            )
        )
    return ours
