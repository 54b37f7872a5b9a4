"""Runs the scripts of this folder for their tests, each in a new process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pretended.libraries import missing_compiler

HERE = Path(__file__).resolve().parent
MARKS = [
    pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler())),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to run on"),
]


def found_by(script: str, folder: Path, *words: str) -> Any:
    """What a script writes to its --out, without Triton's interpreter."""
    out = folder / "found.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, HERE / script, "--out", out, *words],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())
