"""When the garbage collector runs."""

from __future__ import annotations

import gc

import pytest

from megatron.config.groups import TrainingConfig
from megatron.training.loop import collect_after, collected_evaluation, manual_collection


@pytest.fixture
def collections(monkeypatch):
    """The generations that were collected."""
    found: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda generation=2: found.append(generation))
    return found


def collected_at(config: TrainingConfig, collections: list[int], last: int = 300) -> list[int]:
    found = []
    for iteration in range(1, last + 1):
        before = len(collections)
        collect_after(iteration, config)
        found += [iteration] * (len(collections) - before)
    return found


@pytest.mark.parametrize(
    "config, expected",
    [
        (TrainingConfig(), [100, 200, 300]),
        (TrainingConfig(manual_gc_interval=150), [150, 300]),
        (TrainingConfig(manual_gc_interval=0), []),
        (TrainingConfig(manual_gc=False), []),
    ],
)
def test_iterations(config, expected, collections):
    """They follow from the iteration alone, so that all ranks collect together."""
    assert collected_at(config, collections) == expected


def test_evaluations(collections):
    for config, expected in (
        (TrainingConfig(), [2, 0]),
        (TrainingConfig(manual_gc_eval=False), []),
        (TrainingConfig(manual_gc=False), []),
    ):
        collections.clear()
        with collected_evaluation(config):
            pass
        assert collections == expected


def test_the_automatic_collector_is_off_for_the_run_alone():
    assert gc.isenabled()
    frozen = gc.get_freeze_count()
    with manual_collection(TrainingConfig()):
        assert not gc.isenabled() and gc.get_freeze_count() == frozen
    assert gc.isenabled()
    with manual_collection(TrainingConfig(manual_gc=False)):
        assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), manual_collection(TrainingConfig()):
        1 / 0  # noqa: B018
    assert gc.isenabled()
