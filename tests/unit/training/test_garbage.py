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


@pytest.mark.parametrize("interval, expected", [(100, [100, 200, 300]), (0, [])])
def test_iterations(interval, expected, collections):
    """They follow from the iteration alone, so that all ranks collect together."""
    found = []
    for iteration in range(1, 301):
        before = len(collections)
        collect_after(iteration, interval)
        found += [iteration] * (len(collections) - before)
    assert found == expected


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
