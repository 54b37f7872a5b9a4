"""One table: operator x (device, precision, settings) -> implementation, and why.

An implementation is taken by `auto` when it can do what is asked and nothing before it in the table can, Triton's only where it has been measured
to be the fastest (MEASURED). A word other than `auto` is taken or refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatron.kernels import apex, lang

OPERATORS: dict[str, tuple[str, ...]] = {
    "attention": ("triton", "sdpa", "plain"),
    "norm": ("triton", "apex", "torch"),
    "rotary": ("triton", "torch"),
    "activation": ("triton", "torch"),
    "dropout": ("triton", "torch"),
    "cross-entropy": ("triton", "torch"),
    "weight-grad": ("apex", "torch"),
    "init": ("triton", "torch"),
    "grad-norm": ("triton", "apex", "torch"),
    "adam": ("triton", "apex", "torch-fused", "torch"),
}
# (operator, architecture) of which docs/performance.md has a measurement that the Triton kernel wins. None has run on a GPU yet.
MEASURED: frozenset[tuple[str, int]] = frozenset()
# What is for the asking alone, and what whoever takes it should know.
FLAWS = {("grad-norm", "apex"): "apex adds up in fp32, the others in float64; where its sum overflows torch's is taken; never run"}


@dataclass(frozen=True)
class Choice:
    """What computes an operator; `because` is set where something that would be tried before it was passed over, or what is taken has a flaw."""

    implementation: str
    because: str = ""


def flag_of(operator: str) -> str:
    """The flag that forces an implementation."""
    return f"--{operator}-{'implementation' if operator == 'adam' else 'backend'}"


def choose(operator: str, wanted: str, device: torch.device, dtype: torch.dtype, unable: Mapping[str, str] | None = None) -> Choice:
    """The implementation of an operator. `unable` maps implementations to what they cannot do of what is asked.

    Raises ValueError when `wanted` is not `auto` and cannot be had.
    """
    faults = {name: fault for name in OPERATORS[operator] if (fault := _fault(operator, name, device, dtype) or (unable or {}).get(name))}
    if wanted != "auto":
        if wanted in faults:
            can = [name for name in OPERATORS[operator] if name not in faults]
            raise ValueError(f"{flag_of(operator)} {wanted}: {faults[wanted]}; drop the flag, or take {' or '.join(can)}")
        return Choice(wanted, FLAWS.get((operator, wanted), ""))
    passed = ""
    for name in OPERATORS[operator]:
        if (operator, name) in FLAWS:
            continue
        if name in faults:
            passed = passed or (f"{name}: {faults[name]}" if device.type == "cuda" else "")
        elif name in ("triton", "apex") and (operator, lang.capability(device)) not in MEASURED:
            passed = passed or f"{name} is there for the asking; its speed has not been measured on such a device"
        else:
            return Choice(name, passed)
    raise AssertionError(f"nothing computes {operator}")


def _fault(operator: str, name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    if name == "triton":
        return lang.unfit(device, dtype)
    if name == "apex":
        return apex.missing(operator) or (None if device.type == "cuda" else "it needs a GPU")
    return None
