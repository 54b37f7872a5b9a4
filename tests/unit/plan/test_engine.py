"""The plan runs the engine itself: what is wrong with the engine is wrong with the plan."""

from __future__ import annotations

import pytest
import torch
from megatron.tools._plan.engine import META, CountedGroup, Ledger
from megatron.tools._plan.memory import rank_memories
from megatron.tools._plan.silent import SilentGroup
from step_models import resolved

from megatron.config.groups import Config
from megatron.distributed.collectives import all_gather, all_reduce, reduce_scatter
from megatron.distributed.groups import Axis
from megatron.parallel import zero_plan
from megatron.parallel.blocks import Block

VOCAB = 1024
FLAGS = f"""--mock-data --tokenizer-type NullTokenizer --vocab-size {VOCAB - 1} --lr 1e-3
--train-iters 1 --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32
--micro-batch-size 1 --global-batch-size 8 --hidden-dropout 0 --attention-dropout 0"""


def configure(*more: str) -> Config:
    return resolved(" ".join([FLAGS, *more]), 2, VOCAB)


def peak(config: Config) -> int:
    [rank] = rank_memories(config, VOCAB, 2, "cpu")
    return sum(rank.peak.bytes.values())


def test_a_gradient_that_somebody_keeps_is_found(monkeypatch: pytest.MonkeyPatch):
    close, kept = Block.close, []

    def keeping(block: Block) -> torch.Tensor:
        kept.append(close(block))
        return kept[-1]

    monkeypatch.setattr(Block, "close", keeping)
    with pytest.raises(AssertionError, match="slots"):
        rank_memories(configure("--zero-stage", "2"), VOCAB, 2, "cpu")


def test_weights_that_are_released_late_show(monkeypatch: pytest.MonkeyPatch):
    config = configure("--zero-stage", "3")
    before = peak(config)
    # as --zero3-keep-gathered
    monkeypatch.setattr(
        zero_plan._Walk, "_is_needed", lambda walk, buffers, kind: walk.remaining[buffers] > 0
    )
    assert peak(config) > before


@pytest.mark.parametrize("gloo", [True, False], ids=["gloo", "nccl"])
def test_silent_collectives_have_results_of_the_right_shape(gloo: bool):
    axis = Axis("silent", 1, (0, 1, 2, 3), SilentGroup(gloo))
    x = torch.empty(8, 3, device=META)
    assert all_gather(x, axis).shape == (32, 3) and reduce_scatter(x, axis).shape == (2, 3)
    assert all_reduce(x, axis) is x
    ledger = Ledger()
    counted = Axis("counted", 1, (0, 1, 2, 3), CountedGroup(gloo, ledger))
    reduced = reduce_scatter(x, counted)
    assert ledger.now["gradients"] == reduced.nbytes and ledger.now["scratch"] == 0
    # on Gloo: what three others send
    assert ledger.most["scratch"] == (2 * 3 * 4 * 3 if gloo else 0)
