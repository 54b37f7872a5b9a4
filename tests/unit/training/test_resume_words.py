"""What a run that loads a checkpoint logs about its bits, where ZeRO and kernels differ from the
run that wrote it.
"""

from __future__ import annotations

import pytest

from megatron.config.groups import Config
from megatron.training.resume import rounding_changes

VERSIONS = {"torch": "2", "dropout": "2"}


@pytest.mark.parametrize("dropout, masks", [(0.1, {"dropout masks": "1 -> 2"}), (0.0, {})])
def test_masks_of_an_earlier_version_are_others(dropout, masks):
    config = Config().with_fields("model", hidden_dropout=dropout)
    state = {"config": config.to_dict(), "versions": VERSIONS}
    assert rounding_changes({**state, "versions": {"torch": "2"}}, state) == masks
    assert rounding_changes(state, state) == {}


def test_kernels_count_by_what_was_taken():
    """A measurement adopted between two runs changes what `auto` takes, and a flag that names what
    was taken anyway changes nothing.
    """
    named = Config().with_fields("model", attention_backend="sdpa").to_dict()
    state = {"config": Config().to_dict(), "versions": VERSIONS}
    taken = {**state, "kernels": {"attention": "sdpa", "norm": "torch"}}
    adopted = {**taken, "kernels": {"attention": "triton", "norm": "torch"}}
    assert rounding_changes(taken, {**taken, "config": named}) == {}
    assert rounding_changes(taken, adopted) == {"attention by": "sdpa -> triton"}
    # an older checkpoint has only the flags
    assert rounding_changes(state, {**adopted, "config": named}) == {
        "--attention-backend": "auto -> sdpa"
    }
