"""When the garbage collector runs."""

from __future__ import annotations

import gc

import pytest

from megatron.config.groups import TrainingConfig
from megatron.training.loop import collect_after, collected_evaluation, manual_collection


@pytest.mark.parametrize(
    "flags, iterations, evaluation",
    [
        ({}, [100, 200, 300], [2, 0]),
        ({"manual_gc_interval": 150}, [150, 300], [2, 0]),
        ({"manual_gc_interval": 0, "manual_gc_eval": False}, [], []),
        ({"manual_gc": False}, [], []),
    ],
)
def test_collections(flags, iterations, evaluation, monkeypatch):
    """They follow from the iteration alone, so that all ranks collect together."""
    config, generations, found = TrainingConfig(**flags), [], []
    monkeypatch.setattr(gc, "collect", lambda generation=2: generations.append(generation))
    for iteration in range(1, 301):
        collect_after(iteration, config)
        found += [iteration] * len(generations)
        generations.clear()
    with collected_evaluation(config):
        pass
    assert (found, generations) == (iterations, evaluation)


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
