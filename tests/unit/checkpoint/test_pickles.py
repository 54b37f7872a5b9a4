"""Pickles of other programs that would hang or crash a reader, or that pickle itself refuses."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
from megatron.tools._convert.pickles import ARGUMENT_CLASSES, read_pickle
from test_checkpoint_damage import RUN_STATE

from megatron.checkpoint.manifest import CheckpointError
from megatron.training.resume import check_complete


@pytest.mark.parametrize(
    "raw, fault",
    [
        (
            b"\x80\x04)\x940"
            + b"".join(b"h%ch%c\x86\x940" % (k, k) for k in range(60))
            + b"}h\x3cK\x01s.",
            "a tuple is the key of a dictionary",
        ),
        (b"\x80\x04}" + b")" + b"\x85" * 20_000 + b"K\x01s.", "a tuple is the key of a dictionary"),
        (b"\x80\x02K\x01\x86.", "a tuple of 2 values is made of 1"),
        (b"\x80\x02K\x01K\x02(K\x03\x86t.", "a tuple of 2 values is made of 1"),
        (b"\x80\x02K\x01t.", "pop from empty list"),
        (b"\x80\x07N.", "pickle protocol 7 is not known"),
        (b"\x80\x02cos\nsystem\n.", "it names os.system"),
    ],
)
def test_pickles_that_are_refused(tmp_path, raw, fault):
    with pytest.raises(CheckpointError, match=f"a.pt: the pickle in it is refused: {fault}"):
        read_pickle(raw, ARGUMENT_CLASSES, tmp_path / "a.pt")


SCHEDULE = {
    "max_lr": 1.0,
    "min_lr": 0.0,
    "init_lr": 0.0,
    "warmup": 0,
    "decay": 9,
    "style": "linear",
    "wsd_style": "linear",
    "wsd_decay": 0,
    "start_weight_decay": 0.0,
    "end_weight_decay": 0.0,
    "weight_decay_style": "constant",
    "weight_decay_length": 9,
}


@pytest.mark.parametrize(
    "change, fault",
    [
        (lambda state: state.pop("scaler"), "its state lacks scaler"),
        (lambda state: state.pop("optimizer_steps"), "its state lacks optimizer_steps"),
        (lambda state: state.update(iteration=3), "its state is of iteration 3"),
        (
            lambda state: state["schedule"].pop("decay"),
            "state.schedule is not what a run writes there",
        ),
        (
            lambda state: state["schedule"].update(decoupled_max_lr=1.0),
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
