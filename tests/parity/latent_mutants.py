"""What latent attention may get wrong: patches of worker.py, each of which must be found by a
comparison with one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from unittest import mock

from megatron.model.attention import latent_attention
from megatron.model.attention.latent_attention import LatentAttention

Patch = contextlib.AbstractContextManager


def position_gradients_of_own_heads() -> Patch:
    """The gradient of the keys' position channels is that of this rank's heads alone."""
    return mock.patch.object(latent_attention, "all_reduce", lambda x, axis: x)


def whole_down_gradients() -> Patch:
    """Under sequence parallelism the down-projections declare that their gradients are whole."""
    return mock.patch.object(latent_attention, "parts_under", lambda sequence: ())


def scale_without_yarn() -> Patch:
    """Scores on several ranks are scaled by the width of a key alone."""
    real = LatentAttention._attend

    def attend(self, *parts, **given):
        if self.tp.size == 1:
            return real(self, *parts, **given)
        q, *rest = parts
        scale = self.head_dim**-0.5 / self.config.softmax_scale
        return real(self, q * scale, *rest, **given)

    return mock.patch.object(LatentAttention, "_attend", attend)


def values_of_the_next_head() -> Patch:
    """On several ranks each head reads the values of the next one."""
    real = LatentAttention._attend

    def attend(self, *parts, **given):
        q, k, v = parts
        shifted = v.roll(-1, 2) if self.tp.size > 1 else v
        return real(self, q, k, shifted, **given)

    return mock.patch.object(LatentAttention, "_attend", attend)


PATCHES: dict[str, Callable[[], Patch]] = {
    each.__name__: each
    for each in (
        position_gradients_of_own_heads,
        whole_down_gradients,
        scale_without_yarn,
        values_of_the_next_head,
    )
}
