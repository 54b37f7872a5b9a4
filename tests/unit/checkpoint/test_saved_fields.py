"""A field that is added to a saved dataclass does not make older checkpoints unloadable; an unknown
one is refused by name.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from types import SimpleNamespace

import pytest
from test_checkpoint_damage import RUN_STATE

from megatron.checkpoint.manifest import CheckpointError
from megatron.checkpoint.run_state import check_run_state, config_of, from_saved
from megatron.config.groups import Config, ModelConfig
from megatron.config.input_files import InputError
from megatron.optimizer import lr_schedule
from megatron.optimizer.lr_schedule import ParamSchedule
from megatron.training import resume
from megatron.training.resume import check_complete
from megatron.training.run import Progress

SCHEDULE = {
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
SAVED = {
    ParamSchedule: SCHEDULE,
    Progress: dataclasses.asdict(Progress(iteration=3, consumed_samples=12)),
    **{type(group): dataclasses.asdict(group) for group in vars(Config()).values()},
}
ADDED = [("new_rate", float, 0.5), ("new_style", "str", "plain"), ("new_switch", "bool", True)]


def enlarged(kind: type) -> type:
    """The dataclass of a later version, with one more field of each type."""
    frozen = kind.__dataclass_params__.frozen
    return dataclasses.make_dataclass(f"Later{kind.__name__}", ADDED, bases=(kind,), frozen=frozen)


def test_older_states_take_the_defaults_of_new_fields():
    for kind, saved in SAVED.items():
        later = from_saved(enlarged(kind), saved, "state")
        assert [getattr(later, name) for name, _, _ in ADDED] == [0.5, "plain", True]
        assert {name: getattr(later, name) for name in saved} == saved


def test_unknown_and_missing_fields_are_refused_by_name():
    for kind, saved in SAVED.items():
        with pytest.raises(InputError, match="state.x .* does not know new_rate, new_style"):
            from_saved(kind, {**saved, "new_rate": 0.5, "new_style": "plain"}, "state.x")
    saved = {name: value for name, value in SCHEDULE.items() if name not in ("decay", "style")}
    with pytest.raises(InputError, match="it lacks decay, style"):
        from_saved(ParamSchedule, saved, "state.schedule")


def test_a_later_schedule_resumes_an_older_checkpoint_and_saves_its_own(monkeypatch):
    later = enlarged(ParamSchedule)
    for module in (resume, lr_schedule):  # run_state imports it when it is called
        monkeypatch.setattr(module, "ParamSchedule", later)
    schedule = resume.saved_schedule(SCHEDULE)
    assert schedule.new_rate == 0.5
    assert resume.schedule_changes(schedule, SCHEDULE) == []
    other = dataclasses.replace(schedule, new_rate=0.25)
    (line,) = resume.schedule_changes(other, SCHEDULE)
    assert line == "new_rate: checkpoint 0.5, command line 0.25"
    state = {"config": Config().to_dict(), "schedule": other.state()}
    check_run_state(json.loads(json.dumps(state)))
    assert resume.saved_schedule(other.state()) == other


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
    ],
)
def test_a_state_that_lacks_what_a_run_goes_on_with(tmp_path, change, fault):
    state = {
        **copy.deepcopy(RUN_STATE),
        "schedule": dict(SCHEDULE),
        "scheduled_samples": 4,
        "skipped_samples": 0,
    }
    checkpoint = SimpleNamespace(state=state, iteration=2, path=tmp_path)
    check_complete(checkpoint, weights_alone=False)
    change(state)
    with pytest.raises(CheckpointError, match=f"cannot be loaded: {fault}"):
        check_complete(checkpoint, weights_alone=False)
