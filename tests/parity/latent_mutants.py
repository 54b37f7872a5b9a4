"""What latent attention may get wrong: patches of worker.py, each of which must be found by a
comparison with one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from unittest import mock

from megatron.model.attention import latent_attention
from megatron.model.attention.attention import CoreAttention
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
    real = CoreAttention.__init__

    def init(self, config, seed, layer, tp, cp):
        real(self, config, seed, layer, tp, cp)
        if tp.size > 1:
            self.settings["scale"] = config.kv_channels**-0.5

    return mock.patch.object(CoreAttention, "__init__", init)


def values_of_the_next_head() -> Patch:
    """On several ranks each head reads the values of the next one."""
    real = LatentAttention.project

    def project(self, x, **given):
        q, k, v = real(self, x, **given)
        return q, k, v.roll(-1, 2) if self.tp.size > 1 else v

    return mock.patch.object(LatentAttention, "project", project)


PATCHES: dict[str, Callable[[], Patch]] = {
    each.__name__: each
    for each in (
        position_gradients_of_own_heads,
        whole_down_gradients,
        scale_without_yarn,
        values_of_the_next_head,
    )
}
