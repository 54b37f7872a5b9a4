"""The check at start: each Triton kernel that `auto` takes, run once on this device in small shapes
and held against its definition.

A result is remembered beside Triton's own compiled kernels, by the text of the kernels, their
configurations, the versions and the device, so that only the first start after a change computes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from megatron.kernels import cases, lang
from megatron.kernels.configurations import TABLE, Row, find

HERE = Path(__file__).parent
# the first words of the rows of an operator, where they are not its name with underscores
ROWS = {"adam": ("adamw",), "init": ("initialise",), "norm": ("norm", "qk_norm")}


def rows_of(
    operator: str, capability: int, dtype: torch.dtype, attention: dict[str, Any] | None = None
) -> list[Row]:
    """What the table of configurations has of an operator for a GPU and a precision; of attention,
    which has a row for each head dimension and kind, those of the key `attention`.
    """
    names = ROWS.get(operator, (operator.replace("-", "_"),))
    rows = [
        find(row, capability, **dict(key))
        for row, key in TABLE
        if row.partition(" ")[0] in names and min(TABLE[row, key]) <= capability
    ]
    return [
        row
        for row in rows
        if not row.refused
        and row.key.get("bytes", dtype.itemsize) == dtype.itemsize
        and (operator != "attention" or _of_attention(row, attention or {}))
    ]


def _of_attention(row: Row, key: dict[str, Any]) -> bool:
    return row.operator in ("attention forward", "attention dq") and dict(row.key) == key


def faults(rows: Iterable[Row], device: torch.device, dtype: torch.dtype) -> str:
    """What is wrong with the first of these configurations that does not give its definition's
    result, or does not run; "" when there is none.
    """
    for row in rows:
        passed = _place(row, device, dtype)
        if passed.exists():
            continue
        try:
            found = cases.wrong(cases.case(row, device, True, dtype))
        except Exception as error:  # whatever a compiler or a launch says
            found = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if found:
            key = ", ".join(f"{name} {value}" for name, value in row.key.items())
            return f"{row.operator}{f' ({key})' if key else ''}: {found}"
        _remember(passed)
    return ""


def _place(row: Row, device: torch.device, dtype: torch.dtype) -> Path:
    """The file whose being there says that a row has passed."""
    facts = (row.operator, sorted(row.key.items()), row.arch, dtype, *_versions(device))
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()
    return Path(lang.triton.knobs.cache.dir) / "megatron-checked" / digest


@cache
def _versions(device: torch.device) -> tuple[str, ...]:
    """All that a result depends on beside the row."""
    text = hashlib.sha256()
    for file in sorted((*HERE.glob("*.py"), HERE / "configurations.json")):
        text.update(file.read_bytes())
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    capability = str(lang.capability(device))
    return (
        name,
        capability,
        torch.__version__,
        str(torch.version.cuda),
        lang.triton.__version__,
        text.hexdigest(),
    )


def _remember(passed: Path) -> None:
    """Ranks of a node may do so at once; where the folder cannot be written, the next start checks
    again.
    """
    try:
        passed.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(passed, os.O_CREAT))
    except OSError:
        pass
