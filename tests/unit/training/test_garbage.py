"""When the garbage collector runs."""

from __future__ import annotations

import gc

import pytest

from megatron.config.groups import TrainingConfig
from megatron.distributed.peers import PEERS
from megatron.training.loop import collected_evaluation, manual_collection
from pretrain_gpt import main

FLAGS = """--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --train-iters 5
--micro-batch-size 1 --global-batch-size 1 --mock-data --tokenizer-type NullTokenizer
--vocab-size 49 --lr 1e-2 --eval-iters 0""".split()


@pytest.mark.parametrize(
    "flags, iterations",
    [
        ("--manual-gc-interval 2", {2, 4}),
        ("--manual-gc-interval 0", set()),
        ("--no-manual-gc", set()),
    ],
)
def test_collections_follow_from_the_iteration(flags, iterations, monkeypatch):
    """So all ranks collect together."""
    found = set()
    monkeypatch.setattr(PEERS, "iteration", 0)
    monkeypatch.setattr(gc, "collect", lambda generation=2: found.add(PEERS.iteration) or 0)
    assert main([*FLAGS, *flags.split()]) == 0
    assert found - {0} == iterations


@pytest.mark.parametrize(
    "flags, generations",
    [({}, [2, 0]), ({"manual_gc_eval": False}, []), ({"manual_gc": False}, [])],
)
def test_collections_around_an_evaluation(flags, generations, monkeypatch):
    found = []
    monkeypatch.setattr(gc, "collect", lambda generation=2: found.append(generation))
    with collected_evaluation(TrainingConfig(**flags)):
        pass
    assert found == generations


def test_the_automatic_collector_is_off_for_the_run_alone():
    assert gc.isenabled()
    with manual_collection(TrainingConfig()):
        assert not gc.isenabled()
    assert gc.isenabled()
    with manual_collection(TrainingConfig(manual_gc=False)):
        assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), manual_collection(TrainingConfig()):
        1 / 0  # noqa: B018
    assert gc.isenabled()


@pytest.mark.parametrize("already", [False, True])
def test_what_exists_before_the_first_step_is_frozen_during_the_run(already, monkeypatch):
    """A collection between steps takes milliseconds; who froze objects before keeps them so."""
    counts = [5 if already else 0]
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counts[-1])
    monkeypatch.setattr(gc, "freeze", lambda: counts.append(9))
    monkeypatch.setattr(gc, "unfreeze", lambda: counts.append(0))
    with manual_collection(TrainingConfig()):
        assert counts[-1] == (5 if already else 9)
    assert counts[-1] == (5 if already else 0)
