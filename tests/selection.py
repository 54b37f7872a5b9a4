"""Which part of a long table every run of the tests shows, and which files it begins with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def one_in(every: int, cases: Sequence[tuple], names: Sequence[str] | None = None) -> list[Any]:
    """The cases as parameters of a test: one in `every` for each run, the others for `-m
    campaign`.
    """
    return [
        pytest.param(
            *case,
            id=None if names is None else names[index],
            marks=[pytest.mark.campaign] if index % every else [],
        )
        for index, case in enumerate(cases)
    ]


# Files that take minutes, longest first: the processes of a whole run share files, and a long one
# at the end would keep one of them waiting.
LONG_FILES = tuple(
    f"tests/{name}.py"
    for name in (
        "parity/test_layouts",
        "slurm/test_slurm",
        "readme/test_readme",
        "unit/checkpoint/test_reshard",
        "kernels/test_manifest",
        "parity/test_check_parity",
        "unit/zero/test_live_bytes",
        "unit/distributed/test_processes",
        "unit/optimizer/test_zero",
        "unit/zero/test_streams",
        "parity/test_mutants",
        "oracle/test_oracle",
        "faults/test_pipeline_faults",
        "faults/test_silent_rank",
        "faults/test_training_kill",
    )
)
