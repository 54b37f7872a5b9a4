"""The JSON state of a checkpoint, and what a run that loads one must share with it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megatron.checkpoint.index import read_manifest
from megatron.checkpoint.manifest import CheckpointError, iteration_folder
from megatron.checkpoint.reader import Checkpoint, loadable
from megatron.checkpoint.run_state import RUN, WEIGHTS, config_of, from_saved, require
from megatron.config.derive import POSITIONS, derive
from megatron.config.errors import ArgumentErrors, UserError
from megatron.config.groups import CheckpointConfig, Config, GivenConfig
from megatron.config.input_files import InputError
from megatron.config.metadata import ChangeRule, flag_name
from megatron.config.options import FIELDS
from megatron.distributed.groups import describe_layout
from megatron.model.build import logical_tensors
from megatron.model.kernels import choose_kernels
from megatron.optimizer.lr_schedule import ParamSchedule

if TYPE_CHECKING:
    from megatron.training.run import Run


def run_state(run: Run) -> dict[str, Any]:
    """The JSON state of a checkpoint."""
    _, kernels = choose_kernels(run.config, run.device)
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
        # dropout: version 1 drew the masks of hidden states from whole words
        "versions": {"torch": torch.__version__, "dropout": "2"},
        "layout": describe_layout(run.groups.layout),
        "device": run.device_names,
        "kernels": {operator: choice.implementation for operator, choice in kernels.items()},
    }


def _tensors(run: Run) -> dict[str, list[int]]:
    """Name and shape of every logical tensor that the shards of all ranks together must hold,
    computed from the flags, not from what ranks hold.
    """
    # The list against which a checkpoint is complete: a rank that wrote too little is found.
    tensors = logical_tensors(run.config.model, run.tokenizer.vocab_size)
    named = {name: list(tensor.shape) for name, tensor in tensors.items()}
    if run.config.checkpoint.save_optim and run.config.optimizer.freeze is None:
        trained = [tensor for tensor in tensors.values() if tensor.group != "state"]
        for state in run.optimizer.state_names:
            for tensor in trained:
                named[f"optimizer.{state}.{tensor.name}"] = list(tensor.shape)
    return named


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def takes_weights_alone(config: Config) -> bool:
    """Whether a run reads no optimizer state of the checkpoint that it loads."""
    return (
        config.checkpoint.finetune
        or not config.checkpoint.load_optim
        or config.evaluation.skip_train
    )


def check_complete(checkpoint: Checkpoint, *, weights_alone: bool) -> None:
    """Raises CheckpointError unless the state holds all that a run resumes from, and is of the
    folder's iteration.
    """
    state = checkpoint.state
    try:
        require(state, WEIGHTS if weights_alone else RUN)
        if not weights_alone:
            saved_schedule(state["schedule"])
            if state["iteration"] != checkpoint.iteration:
                raise InputError(f"its state is of iteration {state['iteration']}")
    except InputError as error:
        raise CheckpointError(f"{checkpoint.path}: cannot be loaded: {error}") from error


# ---- what differs from the run that wrote the checkpoint


class Difference(NamedTuple):
    """A field, by name, that two configurations do not have in common."""

    name: str
    theirs: Any
    ours: Any

    @property
    def flag(self) -> str:
        return flag_name(self.name)

    @property
    def rule(self) -> ChangeRule:
        """What a change of it means."""
        return FIELDS[self.name].change

    @property
    def text(self) -> str:
        return f"{self.flag}: checkpoint {self.theirs}, command line {self.ours}"


def _differences(theirs: Config, ours: Config) -> list[Difference]:
    """Every field in which a configuration differs from a checkpoint's."""
    found = []
    for name, option in FIELDS.items():
        groups = (getattr(config, option.group) for config in (theirs, ours))
        old, new = (getattr(group, option.field) for group in groups)
        if old != new:
            found.append(Difference(name, old, new))
    return found


class Change(NamedTuple):
    """Something in which a run differs from the checkpoint that it loads; `accept`: the value of
    --accept-changed that allows it.
    """

    text: str
    accept: str | None


def changed_fields(
    state: dict[str, Any], config: Config, vocab_size: int, tokenizer_fingerprint: str
) -> list[Change]:
    """What a run may not change unseen: the model and, unless it takes the weights alone, the
    tokenizer and what --accept-changed names.
    """
    theirs, found = config_of(state), []
    # 1. The tokenizer. Another one of the same size is the user's choice when weights alone are
    # taken.
    rows = state["vocab_size"]
    if vocab_size != rows:
        fix = f"; give --vocab-size {rows}" if rows > vocab_size else ""
        found.append(Change(f"vocabulary: checkpoint {rows}, tokenizer {vocab_size}{fix}", None))
    takes_run = not config.checkpoint.finetune and state.get("tokenizer") is not None
    if takes_run and tokenizer_fingerprint != state["tokenizer"]:
        found.append(Change("tokenizer: its files are not those of the checkpoint", "tokenizer"))
    rotary = theirs.model.is_rotary and config.model.is_rotary
    for each in _differences(theirs, config):
        rule = each.rule
        # 2. The model: no flag accepts another one. Of learned positions their table is a part of
        # it; with rotary positions some fields hold no weights, so that a change of them is another
        # run of the same model.
        if rule.refused or (rule.weightless and not rotary):
            found.append(Change(each.text, None))
        # 3. What later steps see. An evaluation has no batches of training and none of their order.
        elif rule.accept in ("batch", "seed") and config.evaluation.skip_train:
            continue
        elif rule.accept and takes_run:
            found.append(Change(f"{each.text}; {rule.what} would change", rule.accept))
    return found


def changed_data(state: dict[str, Any], config: Config, ledger: dict[str, Any]) -> list[Change]:
    """How the training data that a run is given now differs from those it was reading when the
    checkpoint was written.
    """
    new_run = config.checkpoint.finetune or config.evaluation.skip_train
    if new_run or not state.get("consumed_samples"):
        return []
    saved, given = _last_sources(state["ledger"]), _last_sources(ledger)
    # Files may move and be renamed: sources are compared by what they hold. Older ledgers have only
    # ids, which are of content and order.
    key = "content" if all("content" in source for source in saved + given) else "id"
    old, new = ({source[key]: source for source in sources} for sources in (saved, given))
    found = []
    for identity, ours in new.items():
        name, share = ours["name"], ours["share"]
        theirs = old.get(identity)
        if theirs is None:
            found.append(
                f"{name}: not what the checkpoint's run was reading (content, or its range by "
                "--split)"
            )
        elif share != theirs["share"]:
            found.append(
                f"{name}: share of the blend: checkpoint {theirs['share']}, command line {share} "
                "(of 65536)"
            )
    gone = [source["name"] for identity, source in old.items() if identity not in new]
    found += [f"{name}: read by the checkpoint's run, not given now" for name in gone]
    return [Change(f"data: {text}", "data") for text in found]


def _last_sources(ledger: dict[str, Any]) -> list[dict[str, Any]]:
    """What a run reads now, by its data history."""
    segments = ledger["segments"]
    return segments[-1]["sources"] if segments else []


def accept_changes(checkpoint: Checkpoint, changes: list[Change], config: Config) -> list[str]:
    """Lines for the banner on what was accepted. Raises CheckpointError listing every change that
    was not, with the flag that would accept it.
    """
    accepted = config.checkpoint.accept_changed or ()
    refused = [change for change in changes if change.accept not in accepted]
    if refused:
        faults = [
            f"{change.text} [--accept-changed {change.accept}]" if change.accept else change.text
            for change in refused
        ]
        # What to do about them: only the ways that lead out of this list.
        ways = []
        if any(change.accept for change in refused):
            ways.append(
                "the flag in brackets takes a field from the command line, and --finetune "
                "loads only the weights"
            )
        if not all(change.accept for change in refused):
            ways.append("--use-checkpoint-args takes the model from the checkpoint")
        lines = [f"{checkpoint.path} does not fit this run:", *faults, f"({'; '.join(ways)})"]
        raise CheckpointError("\n  ".join(lines))
    return [f"accepted by --accept-changed {change.accept}: {change.text}" for change in changes]


def logged_changes(state: dict[str, Any], config: Config) -> list[str]:
    """For the banner: the changes that need no permission but alter the steps to come, one a line.
    Where only weights are taken, these are settings of the model that hold no weights.
    """
    if config.evaluation.skip_train:
        return []
    # --finetune starts a new run, so most changes are its purpose.
    finetune = config.checkpoint.finetune
    return [
        each.text
        for each in _differences(config_of(state), config)
        if (each.rule.weightless if finetune else each.rule.logged)
    ]


# ---- --use-checkpoint-args


def take_checkpoint_args(flags: GivenConfig) -> GivenConfig:
    """--use-checkpoint-args: the configuration with the checkpoint's model, tokenizer and sequence
    length in the place of all defaults.

    Read from the manifest alone, before anything else is known. Raises ArgumentErrors where the
    command line has something else.
    """
    options = flags.checkpoint
    if not options.use_checkpoint_args:
        return flags
    try:
        theirs = config_of(_manifest_of(options)["state"])
    except (InputError, CheckpointError) as error:
        raise ArgumentErrors([f"--use-checkpoint-args: {error}"]) from error
    # Checkpoints hold the type of positions that follows from the flags.
    config = derive(flags, 1, None, POSITIONS[:1]).config
    # A field that was not given is taken from the checkpoint; one that was must agree with it.
    faults = []
    for each in _differences(theirs, config):
        option, there = FIELDS[each.name], each.theirs
        # an imported model has no run's settings: the command line's are taken
        if not option.change.taken or there is None:
            continue
        if each.ours == option.default and each.name not in flags.given:
            try:
                value = option.load(list(there) if isinstance(there, tuple) else there)
            except UserError as error:
                of = f"{option.group}.{each.name} = {there!r}"
                raise ArgumentErrors(
                    [f"--use-checkpoint-args: the checkpoint has {of}: {error}"]
                ) from error
            config = config.with_fields(option.group, **{each.name: value})
        elif not option.change.file and not _may_change(option.change, options):
            faults.append(
                f"{each.flag} {each.ours}: the checkpoint has {there} "
                "(--use-checkpoint-args); drop one of the two flags"
            )
    if faults:
        raise ArgumentErrors(faults)
    return GivenConfig(config)


def _may_change(rule: ChangeRule, options: CheckpointConfig) -> bool:
    """Whether the command line may differ from the checkpoint in a field."""
    accepted = options.accept_changed or ()
    return rule.logged or rule.accept is not None and (options.finetune or rule.accept in accepted)


def _manifest_of(options: CheckpointConfig) -> dict[str, Any]:
    """The manifest of the checkpoint that will be loaded, if nothing else of it is damaged. Raises
    CheckpointError.
    """
    if options.load is None:
        raise CheckpointError("there is no checkpoint to take them from; give --load")
    root = Path(options.load)
    known, _ = loadable(root, options.ckpt_step)
    if not known:
        raise CheckpointError(f"no checkpoint in --load {root}")
    # A damaged one is passed over only where the user allows an older checkpoint.
    if not options.allow_older_checkpoint:
        known = known[:1]
    for iteration in known:
        try:
            return read_manifest(root / iteration_folder(iteration))
        except CheckpointError as error:
            fault = error
    raise fault


# ---- the schedule of learning rates and weight decay


def saved_schedule(saved: dict[str, Any]) -> ParamSchedule:
    """The schedule in a checkpoint's state. Raises InputError for unknown or missing fields.

    The ends of --decoupled-lr are there both or not at all.
    """
    if saved.get("style") == "constant":  # an earlier version wrote no decay of --train-samples
        saved = {"decay": saved.get("weight_decay_length"), **saved}
    # Fields that a later version added take their defaults.
    schedule = from_saved(ParamSchedule, saved, "state.schedule")
    if (schedule.decoupled_max_lr is None) != (schedule.decoupled_min_lr is None):
        raise InputError(
            "state.schedule is not what a run writes there: it has one of decoupled_max_lr and "
            "decoupled_min_lr"
        )
    if schedule.style not in FIELDS["lr_decay_style"].choices:
        raise InputError(f"state.schedule.style is {schedule.style!r}, which this version lacks")
    return schedule


def resumed_schedule(
    ours: ParamSchedule, state: dict[str, Any], config: Config
) -> tuple[ParamSchedule, list[str]]:
    """The schedule of the resumed run, the command line's when equal or overridden, the
    checkpoint's when asked for; and what differs, a line each. A new run has its own.

    Raises CheckpointError when they differ and neither flag chooses.
    """
    if config.checkpoint.finetune or config.evaluation.skip_train:
        return ours, []
    theirs, options = saved_schedule(state["schedule"]), config.optimizer
    saved = asdict(theirs)
    different = [
        f"{name}: checkpoint {saved[name]}, command line {value}"
        for name, value in asdict(ours).items()
        if saved[name] != value
    ]
    taken, whose = ours, "command line"
    if options.use_checkpoint_opt_param_scheduler:
        taken, whose = theirs, "checkpoint"
    # Which of the two is meant cannot be known: the user chooses, or nothing is trained.
    elif different and not options.override_opt_param_scheduler:
        listed = "".join(f"  {line}\n" for line in different)
        raise CheckpointError(
            "the learning-rate or weight-decay schedule differs from the checkpoint's "
            f"(lengths in samples):\n{listed}choose with "
            "--override-opt-param-scheduler (command line) or "
            "--use-checkpoint-opt-param-scheduler (checkpoint)"
        )
    return taken, [f"schedule: {line}; the {whose}'s is taken" for line in different]


# ---- whether a run resumes bit for bit


def continuity(checkpoint: Checkpoint, run: Run) -> str:
    """For the log: whether the run continues bit for bit as one that was never interrupted, and if
    not, what makes them differ.
    """
    if takes_weights_alone(run.config):
        return ""
    theirs = checkpoint.state
    rounding = rounding_changes(theirs, run_state(run))
    different = [f"{name} {change}" for name, change in rounding.items()]
    if not (run.config.model.deterministic_mode or run.device.type == "cpu"):
        different.append("--no-deterministic-mode")
    different += sorted(run.accepted)
    if run.schedule != saved_schedule(theirs["schedule"]):
        different.append("learning-rate schedule")
    if not different:
        return "; resumes bit for bit"
    return f"; resumes from the same state, not bit for bit: {', '.join(different)}"


def rounding_changes(theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, str]:
    """What decides rounding and differs between two states, by name: layout, device, versions,
    kernels and flags.
    """
    pairs = {name: (theirs.get(name), ours.get(name)) for name in ("layout", "device")}
    pairs["torch"] = theirs["versions"]["torch"], ours["versions"]["torch"]
    if config_of(ours).model.hidden_dropout > 0:
        old, new = (each["versions"].get("dropout", "1") for each in (theirs, ours))
        pairs["dropout masks"] = old, new
    # Kernels count by what was taken. Older checkpoints have only the flags that chose them.
    known = "kernels" in theirs
    if known:
        for operator, taken in ours["kernels"].items():
            pairs[f"{operator} by"] = theirs["kernels"].get(operator), taken
    for each in _differences(config_of(theirs), config_of(ours)):
        if each.rule.bits and not (known and each.rule.kernel):
            pairs[each.flag] = each.theirs, each.ours
    return {name: f"{old} -> {new}" for name, (old, new) in pairs.items() if old != new}
