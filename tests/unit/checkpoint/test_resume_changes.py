"""A run that resumes from a checkpoint and differs from it: each field named, with the flag that
accepts it; or taken from the checkpoint.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.tools._report.metrics_file import read_metrics
from reshard_cases import differing, flags, saved, saving, start

from megatron.checkpoint import run_state
from megatron.checkpoint.manifest import CheckpointError
from megatron.checkpoint.reader import open_checkpoint
from megatron.checkpoint.run_state import config_of, from_saved
from megatron.checkpoint.writer import save_checkpoint
from megatron.config.arguments import dump_config, parse_arguments
from megatron.config.errors import ArgumentErrors
from megatron.config.groups import Config, ModelConfig
from megatron.config.input_files import InputError
from megatron.config.options import FIELDS
from megatron.model.spec import Box
from megatron.optimizer import lr_schedule
from megatron.optimizer.lr_schedule import ParamSchedule
from megatron.training import resume as resume_module
from megatron.training.resume import (
    changed_data,
    changed_fields,
    check_complete,
    logged_changes,
    take_checkpoint_args,
)

ROOT = Path(__file__).resolve().parents[3]

DATA = (
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 6 --mock-data --lr "
    "1e-2 --log-interval 1 --eval-iters 0"
).split()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A run of 6 iterations, saved at 3 and 6."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("run")
    assert start(flags("gqa-untied", "one", *saving(folder))).endswith("exit code 0")
    return folder


def resume(root, *more: object) -> str:
    """The output of a run that resumes with more flags, which may be several in one text."""
    words = [word for each in more for word in str(each).split()]
    return start(flags("gqa-untied", "one", "--load", root, "--ckpt-step", 3, *words))


def test_every_change_is_listed_with_the_flag_that_accepts_it(root):
    shown = resume(
        root,
        "--seed 9 --global-batch-size 8 --rampup-batch-size 4 4 24 --seq-length 8",
        "--max-position-embeddings 16 --train-iters 4",
    )
    assert "iter_0000003 does not fit this run:" in shown
    for line in (
        "--seed: checkpoint 1234, command line 9; the data order would change",
        "--seq-length: checkpoint 16, command line 8; the data order would change",
        "--global-batch-size: checkpoint 4, command line 8; the steps' batches would change",
        "--rampup-batch-size: checkpoint None, command line (4, 4, 24); the steps' batches would",
    ):
        assert f"  {line}" in shown
    for accept in ("seed", "data", "batch"):
        assert f" would change [--accept-changed {accept}]\n" in shown
    # the fix names only what leads out of this list
    by_flag = "(the flag in brackets takes a field"
    by_model = "--use-checkpoint-args takes the model"
    assert by_flag in shown and by_model not in shown
    shown = resume(root, "--seed", 9, "--global-batch-size", 8, "--accept-changed", "seed")
    assert "--global-batch-size: " in shown and "--seed: " not in shown
    # no flag makes another model of these weights
    shown = resume(root, "--hidden-size", 64, "--seed", 9, "--accept-changed", "seed")
    assert "--hidden-size: checkpoint 32, command line 64\n" in shown
    assert "accept-changed" not in shown.partition("--hidden-size")[2]
    assert by_flag not in shown and f"({by_model} from" in shown
    shown = resume(root, "--hidden-size", 64, "--seed", 9)
    assert by_flag in shown and f"; {by_model} from" in shown
    assert "the objective would change [--accept-changed data]" in resume(root, "--eod-mask-loss")
    shown = resume(root, "--tokenizer-type", "NullTokenizer", "--vocab-size", 50)
    assert "vocabulary: checkpoint 50, tokenizer 51" in shown


def test_what_is_accepted_continues_and_is_logged(root):
    change = "--seed 9 --seq-length 8 --max-position-embeddings 16 --exit-interval 4"
    shown = resume(root, change, "--accept-changed seed data")
    for accept, flag in (("seed", "--seed"), ("data", "--seq-length")):
        assert f"accepted by --accept-changed {accept}: {flag}: checkpoint " in shown
    (line,) = (line for line in shown.splitlines() if "not bit for bit: " in line)
    assert "seed" in line and "data" in line and shown.endswith("exit code 0")


def test_another_schedule_is_not_bit_for_bit(root):
    for flag, text in (
        ("--override-opt-param-scheduler", "not bit for bit: learning-rate schedule"),
        ("--use-checkpoint-opt-param-scheduler", "resumes bit for bit"),
    ):
        assert text in resume(root, "--exit-interval 4 --lr 2e-2", flag)


def test_a_flag_that_is_given_at_its_default_is_given(tmp_path):
    """A checkpoint's argument takes the place of defaults that were not written alone."""
    trained = Config().with_fields("model", hidden_dropout=0.0, rotary_base=5e5)
    state = {"config": trained.to_dict(), "vocab_size": 101, "iteration": 1}
    save_checkpoint(tmp_path, 1, [(Box("x", (1,), (0,), (1,)), torch.zeros(1))], state)
    load = [*DATA, "--load", str(tmp_path), "--use-checkpoint-args"]
    assert take_checkpoint_args(parse_arguments(load).config).model == trained.model
    taken = take_checkpoint_args(parse_arguments([*load, "--hidden-dropout", "0.1"]).config).model
    assert (taken.hidden_dropout, taken.rotary_base) == (0.1, 5e5)
    with pytest.raises(ArgumentErrors, match="--rotary-base 10000.*: the checkpoint has 500000"):
        take_checkpoint_args(parse_arguments([*load, "--rotary-base", "10000"]).config)
    # what a printed configuration holds at its default was not given
    (tmp_path / "all.json").write_text(dump_config(Config()))
    printed = parse_arguments([*load, "--config", str(tmp_path / "all.json")]).config
    assert take_checkpoint_args(printed).model == trained.model


def ledger(*sources: tuple[str, str, int]) -> dict:
    entries = [
        {"id": f"{content}-{name}", "content": content, "name": name, "share": share}
        for content, name, share in sources
    ]
    return {"segments": [{"first_sample": 0, "sources": entries}]}


def test_changed_data_is_told_by_content_not_by_name_or_order():
    state = {
        "consumed_samples": 12,
        "ledger": ledger(("aa", "old/a", 40000), ("bb", "old/b", 25536)),
    }

    def shown(now: dict, **changes: object) -> list[str]:
        return [change.text for change in changed_data({**state, **changes}, Config(), now)]

    assert shown(ledger(("bb", "new/b", 25536), ("aa", "new/a", 40000))) == []
    assert shown(ledger(("aa", "a", 65536))) == [
        "data: a: share of the blend: checkpoint 40000, command line 65536 (of 65536)",
        "data: old/b: read by the checkpoint's run, not given now",
    ]
    assert shown(ledger(("aa", "a", 40000), ("cc", "c", 25536)))[0] == (
        "data: c: not what the checkpoint's run was reading (content, or its range by --split)"
    )
    assert len(shown({"segments": []})) == 2  # computed tokens now
    assert shown({"segments": []}, consumed_samples=0) == []
    older = copy.deepcopy(state["ledger"])
    for source in older["segments"][0]["sources"]:
        del source["content"]
    # then by content and order together
    assert shown(ledger(("aa", "old/a", 40000), ("bb", "old/b", 25536)), ledger=older) == []
    assert len(shown(ledger(("aa", "old/a", 40000), ("dd", "old/b", 25536)), ledger=older)) == 2


def test_the_checkpoint_s_arguments(root, tmp_path):
    """Model, tokenizer and sequence length come from the checkpoint, and the run is the one that
    was interrupted.
    """
    where = ("--load", str(root), "--ckpt-step", "3", "--use-checkpoint-args")
    shown = start((*DATA, *where, *saving(tmp_path)))
    assert "resumes bit for bit" in shown and differing(saved(root, 6), saved(tmp_path, 6)) == []
    shown = start((*DATA, *where, "--hidden-size", "64", "--seq-length", "16", "--num-layers", "3"))
    assert "--hidden-size 64: the checkpoint has 32" in shown
    assert "--num-layers 3: the checkpoint has 2" in shown and "--seq-length" not in shown
    assert "num-layers" in start((*DATA, *where[:-1]))  # the control
    assert "no checkpoint of iteration 5 (--ckpt-step); there: 6, 3" in start(
        (*DATA, *where[:2], "--ckpt-step", "5", where[-1])
    )
    assert "give --load" in start((*DATA, "--use-checkpoint-args"))
    shown = start((*DATA, *where, "--hidden-dropout", "0.3", *saving(tmp_path / "other")))
    assert "--hidden-dropout" in shown and shown.endswith("exit code 0")
    # an evaluation has no schedule and no order of training to compare
    evaluation = "--micro-batch-size 1 --mock-data --eval-iters 1 --skip-train --seed 9".split()
    assert start((*evaluation, *where)).endswith("exit code 0")


# ---- which changes are refused, logged, or neither: every field of the configuration


KERNELS = {name for name, option in FIELDS.items() if option.change.kernel} - {
    "adam_implementation",
    "grad_norm_backend",
}
# fields that are neither refused nor logged, by group: they change rounding alone, or no number
OTHERWISE = {
    "model": {
        *KERNELS,
        "deterministic_mode",
        *"fused_linear_cross_entropy init_method_std tiled_mlp moe_router_dtype".split(),
    },
    "precision": {"initial_loss_scale"},  # the checkpoint has the scale
    # compared by content
    "data": {
        *"""data_path split train_data_path valid_data_path test_data_path mock_data check_data
        tokenizer_type tokenizer_model vocab_file merge_file vocab_size""".split()
    },
    "training": {
        *"""micro_batch_size train_iters train_samples manual_gc manual_gc_interval manual_gc_eval
        exit_interval exit_duration_in_mins cuda_graphs recompute_granularity recompute_method
        recompute memory_budget recompute_layers recompute_modules recompute_num_layers
        distribute_saved_activations activation_offload offload_modules
        activation_offload_fraction min_offloaded_tensor_size""".split()
    },
    "evaluation": {"eval_interval", "skip_train"},
}
# and what begins like these
OPTIMIZER = {"lr", "min_lr", "weight_decay", "adam_implementation", "grad_norm_backend"}
SCHEDULES = ("lr_", "decoupled_", "weight_decay_", "start_weight", "end_weight")


def another(value: object) -> object:
    """A value that differs from this one."""
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else "another"


def state_of(config: Config) -> dict:
    return {"config": config.to_dict(), "vocab_size": 50, "tokenizer": "t", "versions": {}}


def what_is_done(group: str, name: str) -> str:
    """`refused`, `refused: <value of --accept-changed>`, `logged` or `nothing` when this field
    alone differs from the checkpoint.
    """
    config = Config().with_fields("model", position_embedding_type="rope")
    value = getattr(getattr(config, group), name)
    changed = config.with_fields(group, **{name: another(value)})
    flag = f"--{name.replace('_', '-')}: checkpoint "
    refused = [
        change
        for change in changed_fields(state_of(config), changed, 50, "t")
        if change.text.startswith(flag)
    ]
    lines = [line for line in logged_changes(state_of(config), changed) if line.startswith(flag)]
    assert len(refused) + len(lines) <= 1
    if refused:
        return f"refused: {refused[0].accept}" if refused[0].accept else "refused"
    return "logged" if lines else "nothing"


def documented() -> dict[str, str]:
    """The same by flag, from the two tables of docs/checkpoint.md."""
    found: dict[str, str] = {}
    for line in (ROOT / "docs/checkpoint.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if (
            len(cells) == 2
            and cells[0].startswith("`--")
            and cells[1].startswith("`--accept-changed ")
        ):
            found |= dict.fromkeys(
                re.findall(r"`(--[a-z0-9-]+)`", cells[0]),
                f"refused: {cells[1].split()[1].strip('`')}",
            )
        elif len(cells) == 2 and cells[0] in OTHERWISE | {"optimizer": (), "distributed": ()}:
            found |= dict.fromkeys(re.findall(r"`(--[a-z0-9-]+)`", cells[1]), "logged")
    return found


def test_every_field_is_refused_said_or_known_to_change_no_step():
    expected, found = documented(), {}
    for group in "model precision data training optimizer evaluation distributed".split():
        for field in fields(getattr(Config(), group)):
            done, name = what_is_done(group, field.name), f"--{field.name.replace('_', '-')}"
            if done not in ("nothing", "refused"):
                found[name] = done
            known = (
                field.name in OTHERWISE.get(group, ())
                or group == "distributed"
                or group == "optimizer"
                and (
                    field.name in OPTIMIZER
                    or field.name.startswith(SCHEDULES)
                    or "offload" in field.name
                    or "param_scheduler" in field.name
                )
            )
            assert (done == "nothing") == (known and name not in found), (
                f"{name}: {done}; write in megatron/training/resume.py what a change of it means"
            )
            is_model = group == "model" and done != "logged" and not known
            assert (done == "refused") == (is_model and name not in found), name
    assert found == expected


LONGER = ("--seq-length", 32, "--max-position-embeddings", 32)
SECOND_STAGES = {
    "base": ("--rotary-base", 500000),
    "yarn": (
        *LONGER,
        *("--position-embedding-type", "yarn", "--rope-scaling-factor", 2),
        *("--yarn-original-max-position-embeddings", 16),
    ),
}


@pytest.mark.parametrize("stage", SECOND_STAGES)
def test_a_second_stage_changes_positions(root, stage):
    """Rotary positions hold no weights: taken with --finetune or behind a flag, and listed."""
    change = SECOND_STAGES[stage]
    found = resume(root, *change)
    assert "[--accept-changed positions]" in found and "exit code" not in found
    flag, value = ("--rotary-base", "500000.0") if stage == "base" else LONGER[2:]
    line = f"{flag}: checkpoint {'10000.0' if stage == 'base' else 16}, command line {value}"
    more = ("--use-checkpoint-args",) if stage == "base" else ()
    found = resume(root, *change, "--finetune", "--exit-interval", 1, *more)
    assert line in found and found.endswith("exit code 0")
    found = resume(root, *change, "--accept-changed positions data --exit-interval 4")
    assert f"accepted by --accept-changed positions: {line}" in found
    assert found.endswith("exit code 0")


def test_other_changes_are_listed_one_a_line_before_the_first_step(root):
    shown = resume(
        root,
        "--clip-grad 0.5 --adam-beta2 0.95 --z-loss-coeff 1e-3 --lr 2e-2 --eod-mask-loss",
        "--override-opt-param-scheduler --accept-changed data",
    )
    before, _, _ = shown.partition("iteration        4/")
    lines = [line.removeprefix(" changed").strip() for line in before.splitlines()]
    for line in (
        "--z-loss-coeff: checkpoint 0.0, command line 0.001",
        "--clip-grad: checkpoint 1.0, command line 0.5",
        "--adam-beta2: checkpoint 0.999, command line 0.95",
        "schedule: max_lr: checkpoint 0.01, command line 0.02; the command line's is taken",
    ):
        assert line in lines, before
    accepted = "accepted by --accept-changed data: --eod-mask-loss: checkpoint False, command line"
    assert f"{accepted} True" in shown and shown.endswith("exit code 0")


# ---- fields that an earlier or a later version saved ---------------------------------------------


WRITTEN = {
    "max_lr": 1e-3,
    "min_lr": 1e-4,
    "init_lr": 0.0,
    "warmup": 8,
    "decay": 80,
    "style": "cosine",
    "wsd_style": "exponential",
    "wsd_decay": 0,
    "start_weight_decay": 0.1,
    "end_weight_decay": 0.1,
    "weight_decay_style": "constant",
    "weight_decay_length": 80,
}
ADDED = [("new_rate", float, 0.5), ("new_style", "str", "plain"), ("new_switch", "bool", True)]


def test_unknown_and_missing_fields_are_refused_by_name():
    with pytest.raises(InputError, match="state.x .* does not know new_rate, new_style"):
        from_saved(ParamSchedule, {**WRITTEN, "new_rate": 0.5, "new_style": "plain"}, "state.x")
    saved = {name: value for name, value in WRITTEN.items() if name not in ("decay", "style")}
    with pytest.raises(InputError, match="it lacks decay, style"):
        from_saved(ParamSchedule, saved, "state.schedule")


def test_a_later_schedule_resumes_an_older_checkpoint_and_saves_its_own(monkeypatch):
    later = dataclasses.make_dataclass("Later", ADDED, bases=(ParamSchedule,), frozen=True)
    for module in (resume_module, lr_schedule):  # run_state imports it when it is called
        monkeypatch.setattr(module, "ParamSchedule", later)
    schedule = resume_module.saved_schedule(WRITTEN)
    assert schedule.new_rate == 0.5
    state = {"schedule": WRITTEN}
    config = Config().with_fields("optimizer", override_opt_param_scheduler=True)
    assert resume_module.resumed_schedule(schedule, state, config) == (schedule, [])
    other = dataclasses.replace(schedule, new_rate=0.25)
    _, (line,) = resume_module.resumed_schedule(other, state, config)
    assert line.startswith("schedule: new_rate: checkpoint 0.5, command line 0.25;")
    assert resume_module.saved_schedule(other.state()) == other


def test_a_constant_rate_by_samples_that_wrote_no_decay_resumes():
    constant = {**WRITTEN, "style": "constant"}
    assert resume_module.saved_schedule(constant).state() == constant
    older = {name: value for name, value in constant.items() if name != "decay"}
    assert resume_module.saved_schedule(older).state() == constant


def test_a_setting_of_the_model_that_is_not_known_is_refused():
    state = {"config": Config().to_dict()}
    state["config"]["model"] |= {"embedding_scale": 8.0, "parallel_residual": False}
    state["config"]["logging"] |= {"log_of_a_later_version": True}
    with pytest.raises(InputError, match="state.config.model has embedding_scale 8.0, which"):
        config_of(state)
    del state["config"]["model"]["embedding_scale"]
    assert config_of(state).model == ModelConfig()


@pytest.mark.parametrize(
    "change, fault",
    [
        (lambda state: state.pop("scaler"), "its state lacks scaler"),
        (lambda state: state.update(iteration=3), "its state is of iteration 3"),
        (
            lambda state: state["schedule"].pop("decay"),
            "state.schedule is not what a run writes there",
        ),
        (
            lambda state: state["schedule"].update(style="odd"),
            "state.schedule.style is 'odd', which this version lacks",
        ),
    ],
)
def test_a_state_that_lacks_what_a_run_goes_on_with(tmp_path, change, fault):
    state = dict.fromkeys(run_state.RUN) | {
        "config": Config().to_dict(),
        "iteration": 2,
        "schedule": dict(WRITTEN),
        "ledger": {"segments": []},
    }
    checkpoint = SimpleNamespace(state=state, iteration=2, path=tmp_path)
    check_complete(checkpoint, weights_alone=False)
    change(state)
    with pytest.raises(CheckpointError, match=f"cannot be loaded: {fault}"):
        check_complete(checkpoint, weights_alone=False)


# ---- checkpoints of earlier versions -------------------------------------------------------------


FORMATS = Path(__file__).parent / "formats"
RUN = """--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8
--micro-batch-size 1 --global-batch-size 2 --mock-data --tokenizer-type NullTokenizer
--vocab-size 15 --lr 1e-3 --train-iters 3 --lr-decay-iters 10 --eval-iters 0 --log-interval 1
--hidden-dropout 0 --attention-dropout 0 --log-throughput""".split()
# What the commit before did not write: tensors, kernels and the open part of a log line; the
# rates of --decoupled-lr (written by runs that give it).
FLAGS = {"8dfc5ed": (), "c7b2e9f": (), "2497f94": ("--decoupled-lr", "5e-4")}


@pytest.mark.parametrize("commit", FLAGS)
def test_a_checkpoint_of_an_earlier_version_loads(tmp_path, commit):
    folder = FORMATS / commit
    with open_checkpoint(folder) as checkpoint:
        checkpoint.verify()
        assert ("tensors" in checkpoint.state) == (commit != "8dfc5ed")
        assert ("decoupled_max_lr" in checkpoint.state["schedule"]) == (commit == "2497f94")
    shown = start((*RUN, *FLAGS[commit], "--load", str(folder), "--save", str(tmp_path)))
    assert "at iteration 2; resumes " in shown and shown.endswith("exit code 0"), shown

    # Its third step is the one that the earlier version took: without dropout, whose masks have
    # become others since.
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    wanted = json.loads((folder / "third_step.json").read_text())
    assert row["iteration"] == 3
    for name in ("lm loss", "grad-norm"):
        assert math.isclose(row[name], wanted[name], rel_tol=1e-5), name
