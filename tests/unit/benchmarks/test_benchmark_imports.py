"""What benchmarks and campaigns import of this program and its tests exists: most run by hand, some
next to programs that are not installed here.
"""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = [path for name in ("benchmarks", "campaigns") for path in (ROOT / name).rglob("*.py")]
OURS = ("megatron.", "unit.", "parity.", "distributed.")


@pytest.mark.parametrize("path", sorted(PROGRAMS), ids=lambda path: path.stem)
def test_what_a_program_imports_of_ours_exists(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        module = node.module or ""
        if module.startswith(OURS) and not module.startswith("megatron.core"):
            ours = importlib.import_module(module)
            for alias in node.names:
                is_there = hasattr(ours, alias.name)
                assert is_there or importlib.util.find_spec(f"{module}.{alias.name}"), alias.name
