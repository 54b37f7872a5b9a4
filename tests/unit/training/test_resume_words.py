"""What a run that loads a checkpoint logs about its bits, where ZeRO and precisions differ from the
run that wrote it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.config.groups import Config
from megatron.training.resume import _decides_rounding, _same_sums


def configure(stage: int, micro_batches: int, clip: float) -> dict:
    config = Config()
    return replace(
        config,
        distributed=replace(config.distributed, zero_stage=stage),
        optimizer=replace(config.optimizer, clip_grad=clip),
        training=replace(config.training, global_batch_size=8 * micro_batches),
    ).to_dict()


@pytest.mark.parametrize(
    "stages, micro_batches, clip, same",
    [
        ((0, 3), 1, 0.0, True),
        ((1, 2), 1, 1.0, True),
        ((2, 3), 4, 1.0, True),
        ((0, 1), 4, 0.0, True),
        ((0, 1), 1, 1.0, False),
        ((1, 2), 2, 0.0, False),
    ],
)
def test_stages_that_add_in_the_same_order(stages, micro_batches, clip, same):
    theirs, ours = (configure(stage, micro_batches, clip) for stage in stages)
    assert _same_sums(theirs, ours, chunk=8) == _same_sums(ours, theirs, chunk=8) == same
    del theirs["distributed"]["zero_stage"]  # of a checkpoint from before there were stages
    assert _same_sums(theirs, configure(0, micro_batches, clip), chunk=8)


def test_kernels_count_by_what_was_taken():
    """A measurement adopted between two runs changes what `auto` takes, and a flag that names what
    was taken anyway changes nothing.
    """
    state = {
        "config": Config().to_dict(),
        "versions": {"torch": "2"},
        "kernels": {"attention": "sdpa", "norm": "torch"},
    }
    named = {
        **state,
        "config": replace(
            Config(), model=replace(Config().model, attention_backend="sdpa")
        ).to_dict(),
    }
    adopted = {**state, "kernels": {"attention": "triton", "norm": "torch"}}
    whole = _decides_rounding(state, kernels=True)
    assert (
        whole["attention by"] == "sdpa"
        and not {"--attention-backend", "--adam-implementation", "--grad-norm-backend"}
        & whole.keys()
    )
    assert (
        _decides_rounding(named, kernels=True) == whole != _decides_rounding(adopted, kernels=True)
    )
    # an older checkpoint
    assert _decides_rounding(named)[
        "--attention-backend"
    ] == "sdpa" and "attention by" not in _decides_rounding(named)
