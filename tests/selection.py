"""Which part of a long table every run of the tests shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def one_in(every: int, cases: Sequence[tuple], names: Sequence[str] | None = None) -> list[Any]:
    """The cases as parameters of a test: one in `every` for each run, the others for `-m campaign`."""
    return [
        pytest.param(
            *case,
            id=None if names is None else names[index],
            marks=[pytest.mark.campaign] if index % every else [],
        )
        for index, case in enumerate(cases)
    ]
