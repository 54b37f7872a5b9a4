"""What a run that loads a checkpoint logs about its bits, where kernels differ."""

from __future__ import annotations

from megatron.config.groups import Config
from megatron.training.resume import rounding_changes


def test_kernels_count_by_what_was_taken():
    """A measurement adopted between two runs changes what `auto` takes, and a flag that names what
    was taken anyway changes nothing.
    """
    named = Config().with_fields("model", attention_backend="sdpa").to_dict()
    state = {"config": Config().to_dict(), "versions": {"torch": "2"}}
    taken = {**state, "kernels": {"attention": "sdpa", "norm": "torch"}}
    adopted = {**taken, "kernels": {"attention": "triton", "norm": "torch"}}
    assert rounding_changes(taken, {**taken, "config": named}) == {}
    assert rounding_changes(taken, adopted) == {"attention by": "sdpa -> triton"}
    # an older checkpoint has only the flags
    assert rounding_changes(state, {**adopted, "config": named}) == {
        "--attention-backend": "auto -> sdpa"
    }
