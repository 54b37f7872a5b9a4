"""A copy of the checkout in a new folder, as a newcomer has it after cloning: without environment,
caches and outputs.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEFT_BEHIND = shutil.ignore_patterns(
    ".git",
    ".venv*",
    "quickstart",
    "build",
    "*.egg-info",
    "__pycache__",
    ".pytest_cache",
    ".hypothesis",
)


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of the copy."""
    return shutil.copytree(
        ROOT, tmp_path_factory.mktemp("newcomer") / "checkout", ignore=LEFT_BEHIND
    )


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """This process's environment with its interpreter first on PATH, so that the scripts need not
    install anything again.
    """
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
