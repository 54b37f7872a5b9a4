"""One table: operator x (device, precision, settings) -> implementation, and why.

An implementation is taken by `auto` when it can do what is asked and nothing before it in the table
can. Triton's and apex's have to be measured to be faster than what comes behind them (MEASURED);
without a measurement Triton's are taken on the architectures of CHECKED_ON, for the operators of
CHECKED, where the check at start (self_check.py) has found nothing wrong. A word other than `auto`
is taken or refused.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.kernels import apex, fa4, lang

from megatron.config.errors import UserError

OPERATORS: dict[str, tuple[str, ...]] = {
    "attention": ("gluon", "triton", "fa4", "sdpa", "plain"),
    "norm": ("triton", "apex", "torch"),
    "rotary": ("triton", "torch"),
    "activation": ("triton", "torch"),
    "dropout": ("triton", "torch"),
    "cross-entropy": ("triton", "torch"),
    "weight-grad": ("apex", "torch"),
    "grouped-gemm": ("triton", "grouped-mm", "torch"),
    "grad-norm": ("triton", "apex", "torch"),
    "adam": ("triton", "apex", "torch-fused"),
}
# Attention kernels not yet shown to be faster on a GPU: modules imported only on request, with the
# interface documented in candidates/gluon.py. One that is not 5% faster is deleted.
CANDIDATES = {"gluon": "megatron.kernels.candidates.gluon"}
# What runs only when it is asked for, and what to know before you ask.
FLAWS = {
    ("attention", "gluon"): "compiled, and checked on a CPU; never run on a GPU",
    ("attention", "fa4"): "never run; torch calls its part of it a prototype",
    ("grad-norm", "apex"): "apex adds up in fp32, the others in float64; where its sum overflows "
    "torch's is taken; never run",
}
# Operators whose Triton kernels `auto` takes unmeasured: what torch computes in several passes over
# memory, they compute in one.
CHECKED = ("norm", "rotary", "activation", "dropout", "cross-entropy", "grad-norm", "adam")
CHECKED_ON = (80, 90)
NOT_MEASURED = "its speed has not been measured on this kind of device"
UNMEASURED = f"triton is held against its definition at start; {NOT_MEASURED}"
# Operator -> what the check at start found wrong with our kernels of it; the same on all ranks.
FAULTY: dict[str, str] = {}


class Measurement(NamedTuple):
    """Whether an implementation was faster than torch's, and what the banner prints of it."""

    wins: bool
    text: str


def read_measured(file: Path) -> dict[tuple[str, str, int], Measurement]:
    """(operator, implementation, architecture) -> what kernels/tools/adopt.py has written."""
    found = {}
    for row in json.loads(file.read_text())["rows"]:
        key = row["operator"], row["implementation"], row["architecture"]
        text = f"measured {row['ratio']:.2f} times {row['rival']} on {row['gpu']}"
        found[key] = Measurement(row["wins"], text)
    return found


MEASURED: Mapping[tuple[str, str, int], Measurement] = read_measured(
    Path(__file__).with_name("measured.json")
)


@dataclass(frozen=True)
class Choice:
    """What computes an operator; `because` is why something that would be tried before it was
    passed over, or what is known of what is taken.
    """

    implementation: str
    because: str = ""


def load_candidate(name: str) -> Any:
    """The module of a candidate."""
    return importlib.import_module(CANDIDATES[name])


def flag_of(operator: str) -> str:
    """The flag that forces an implementation."""
    return f"--{operator}-{'implementation' if operator == 'adam' else 'backend'}"


def choose(
    operator: str,
    wanted: str,
    device: torch.device,
    dtype: torch.dtype,
    unable: Mapping[str, str] | None = None,
    *,
    unmeasured: bool | None = None,
    outcomes: Collection[bool] = (True, False),
) -> Choice:
    """The implementation of an operator. `unable` maps implementations to what they cannot do of
    what is asked; `unmeasured`: whether `auto` takes Triton's without a measurement (None: as
    in CHECKED); `outcomes`: which of a measurement apply to this run, won (True) and lost.

    Raises UserError when `wanted` is not `auto` and cannot be had.
    """
    # `auto` never selects an entry of FLAWS; skip them so that candidates are not imported.
    considered = [
        name for name in OPERATORS[operator] if (operator, name) not in FLAWS or name == wanted
    ]
    reasons = {name: _unsupported_reason(operator, name, device, dtype) for name in considered}
    reasons = {name: reason or (unable or {}).get(name) for name, reason in reasons.items()}
    if wanted == "auto":
        trusted = operator in CHECKED if unmeasured is None else unmeasured
        return _automatic(operator, reasons, device, trusted, outcomes)
    if reasons[wanted]:
        can = " or ".join(name for name in considered if not reasons[name])
        raise UserError(
            f"{flag_of(operator)} {wanted}: {reasons[wanted]}; drop the flag, or take {can}"
        )
    return Choice(wanted, FLAWS.get((operator, wanted), ""))


def _automatic(
    operator: str,
    reasons: Mapping[str, str | None],
    device: torch.device,
    trusted: bool,
    outcomes: Collection[bool],
) -> Choice:
    """The first that can do it (no reason why not) and, Triton's and apex's, has won; Triton's is
    taken without a measurement too where it is `trusted`, on the architectures of CHECKED_ON.
    """
    is_gpu, arch = device.type == "cuda", lang.capability(device)
    passed_over: list[str] = []  # why each of them was
    for name, reason in reasons.items():
        because = passed_over[0] if passed_over else ""
        found = MEASURED.get((operator, name, arch))
        if found is not None and found.wins not in outcomes:
            found = None
        if reason:
            passed_over += [f"{name}: {reason}"] if is_gpu else []
        elif name not in ("triton", "apex"):
            return Choice(name, because)
        elif found is not None and found.wins:
            return Choice(name, found.text)
        elif found is not None:
            passed_over.append(f"{name}: {found.text}")
        elif name == "triton" and trusted and is_gpu and arch in CHECKED_ON:
            return Choice(name, UNMEASURED)
        else:
            passed_over.append(f"{name} is available if its flag asks for it; {NOT_MEASURED}")
    raise AssertionError(f"nothing computes {operator}")


def _unsupported_reason(
    operator: str, name: str, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Why an implementation cannot run on such tensors here; None when it can."""
    if name == "apex":
        return apex.missing(operator) or (None if device.type == "cuda" else "it needs a GPU")
    if name == "fa4":
        return fa4.unsupported_reason(device, dtype)
    if name == "triton":
        return lang.unsupported_reason(device, dtype) or FAULTY.get(operator)
    if name in CANDIDATES:
        return load_candidate(name).unsupported_reason(device, dtype) or FAULTY.get(operator)
    return None
