"""When the garbage collector runs."""

from __future__ import annotations

import gc

import pytest

from megatron.config.groups import Config, TrainingConfig
from megatron.distributed.peers import PEERS
from megatron.training.loop import manual_collection
from megatron.training.timing import Timing
from pretrain_gpt import main

FLAGS = """--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --train-iters 5
--micro-batch-size 1 --global-batch-size 1 --mock-data --tokenizer-type NullTokenizer
--vocab-size 49 --lr 1e-2 --eval-iters 1""".split()


@pytest.mark.parametrize(
    "flags, expected",
    [
        ("--manual-gc-interval 2", [(2, 2), (4, 2), (5, 2), (5, 0)]),
        ("--manual-gc-interval 0 --no-manual-gc-eval", []),
        ("--no-manual-gc", []),
    ],
)
def test_collections_follow_from_the_iteration(flags, expected, monkeypatch):
    """(iteration, generation): so all ranks collect together, and around the last evaluation."""
    found = []
    monkeypatch.setattr(PEERS, "iteration", 0)
    monkeypatch.setattr(
        gc, "collect", lambda generation=2: found.append((PEERS.iteration, generation)) or 0
    )
    monkeypatch.setattr(Timing, "begin", lambda _timing: found.append("first lap"))
    assert main([*FLAGS, *flags.split()]) == 0
    # the first lap of a rank's compute time has no collection
    assert found[found.index("first lap") + 1 :] == expected


@pytest.fixture
def unfrozen():
    """Without the objects that tests/conftest.py froze, which are frozen again afterwards."""
    gc.unfreeze()
    yield
    gc.freeze()


def test_the_automatic_collector_is_off_for_the_run_alone(unfrozen):
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), manual_collection(Config()):
        assert not gc.isenabled() and gc.get_freeze_count() > 0
        1 / 0  # noqa: B018
    assert gc.isenabled() and gc.get_freeze_count() == 0
    with manual_collection(Config(training=TrainingConfig(manual_gc=False))):
        assert gc.isenabled() and gc.get_freeze_count() == 0


def test_what_the_caller_has_frozen_stays_frozen(unfrozen):
    gc.freeze()
    before = gc.get_freeze_count()
    # what is frozen can still be freed, by another thread too
    with manual_collection(Config()):
        assert 0 < gc.get_freeze_count() <= before
    assert 0 < gc.get_freeze_count() <= before
