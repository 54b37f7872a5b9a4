"""Tables of optimizers and schedules: every choice of a flag has its entry."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.config import groups
from megatron.config.groups import OPTIMIZERS
from megatron.config.options import FIELDS
from megatron.optimizer import lr_schedule
from megatron.optimizer.update import RULES


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
