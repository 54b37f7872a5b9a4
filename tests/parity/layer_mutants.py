"""What windows and positions of single layers may get wrong: patches of worker.py, each of which
must be found by a comparison with one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from unittest import mock

import torch.distributed as dist

from megatron.config.layers import LayerRecord
from megatron.model import layer

Patch = contextlib.AbstractContextManager


def _on_the_last_rank(change: Callable[[list[LayerRecord]], list[LayerRecord]]) -> Patch:
    """Other records on the last rank; which layers are the first and the last stays."""
    real = layer.layer_records

    def layer_records(model):
        records = real(model)
        if dist.get_rank() < dist.get_world_size() - 1:
            return records
        changed = change([*records])
        return tuple(
            each._replace(first=own.first, last=own.last)
            for each, own in zip(changed, records, strict=True)
        )

    return mock.patch.object(layer, "layer_records", layer_records)


def windows_by_number_in_stage() -> Patch:
    """Windows are those of the layers one earlier."""

    def change(records):
        before = [records[-1], *records[:-1]]
        return [own._replace(window=b.window) for own, b in zip(records, before, strict=True)]

    return _on_the_last_rank(change)


def every_layer_rotates() -> Patch:
    """--no-rope-freq is ignored."""
    return _on_the_last_rank(lambda records: [each._replace(rotary=True) for each in records])


PATCHES: dict[str, Callable[[], Patch]] = {
    patch.__name__: patch for patch in (windows_by_number_in_stage, every_layer_rotates)
}
