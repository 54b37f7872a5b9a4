"""Tables of optimizers and schedules: every choice of a flag is complete, or refused by name."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.config import groups
from megatron.config.groups import OPTIMIZERS, OptimizerKind
from megatron.config.options import FIELDS
from megatron.optimizer import lr_schedule, update
from megatron.optimizer.update import RULES, Implementation


@pytest.mark.parametrize(
    "field, table",
    [
        ("optimizer", RULES),
        ("adam_implementation", {"auto": None, **RULES["adam"]}),
        ("lr_decay_style", lr_schedule.DECAYS),
        ("lr_wsd_decay_style", lr_schedule.FINAL),
        ("weight_decay_incr_style", lr_schedule.CHANGES),
    ],
)
def test_the_choices_of_a_flag_are_the_entries_of_its_table(field, table):
    (option,) = (option for option in FIELDS.values() if option.field == field)
    assert set(option.choices) == set(table)


def test_the_fields_that_an_optimizer_names_exist():
    fields = {field.name for field in dataclasses.fields(groups.OptimizerConfig)}
    for kind in OPTIMIZERS.values():
        named = {*kind.states.values(), kind.implementation} - {None}
        assert named <= fields


def complete(config, weight, grad, exp_avg, at):
    """An update rule that takes its state."""


def without_state(config, weight, grad, at):
    """An update rule that forgets its state."""


LION = OptimizerKind({"exp_avg": "exp_avg_dtype"}, None)


@pytest.mark.parametrize(
    "kind, implementations",
    [(LION, None), (None, {"torch": Implementation(complete)}), (LION, {})],
)
def test_an_incomplete_optimizer_is_refused(monkeypatch, kind, implementations):
    if kind is not None:
        monkeypatch.setitem(OPTIMIZERS, "lion", kind)
    if implementations is not None:
        monkeypatch.setitem(RULES, "lion", implementations)
    with pytest.raises(KeyError, match="--optimizer lion: needs an entry in config/groups.py and"):
        update.check_tables()
    # the same entry, complete
    monkeypatch.setitem(OPTIMIZERS, "lion", LION)
    monkeypatch.setitem(RULES, "lion", {"torch": Implementation(complete)})
    update.check_tables()


def test_an_implementation_cannot_leave_out_a_state(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "lion", LION)
    monkeypatch.setitem(RULES, "lion", {"torch": Implementation(without_state)})
    with pytest.raises(TypeError, match="--optimizer lion: torch must take .* grad, exp_avg, at"):
        update.check_tables()


@pytest.mark.parametrize("is_missing", [True, False])
def test_a_shape_without_a_choice_or_a_function_is_refused(is_missing, monkeypatch):
    name = "linear" if is_missing else "step"
    if is_missing:
        monkeypatch.delitem(lr_schedule.DECAYS, name)
    else:
        monkeypatch.setitem(lr_schedule.DECAYS, name, lambda *args: 0.0)
    with pytest.raises(KeyError, match=f"--lr-decay-style {name}: needs an entry in config/groups"):
        lr_schedule.check_tables()
