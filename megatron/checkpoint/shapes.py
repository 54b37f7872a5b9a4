"""Shapes of tensors by name, as the JSON of a checkpoint holds them."""

from __future__ import annotations

from typing import Any

from megatron.config.input_files import InputError, expect

Dims = tuple[int, ...]  # a size or an offset in each dimension
Shapes = dict[str, Dims]  # of tensors by name


def shapes_of(value: Any) -> Shapes:
    """Shapes of tensors by name, as JSON holds them. Raises InputError."""
    expect(value, dict)
    for name, shape in value.items():
        if type(shape) is not list or any(
            type(size) is not int or not 0 <= size < 2**63 for size in shape
        ):
            raise InputError(f"the shape of {name[:60]} is not a list of natural numbers")
    return {name: tuple(shape) for name, shape in value.items()}
