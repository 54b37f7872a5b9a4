"""What benchmarks import of this program exists: most run by hand, next to programs that are not
installed here.
"""

import ast
import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.mark.parametrize("path", sorted(BENCHMARKS.rglob("*.py")), ids=lambda path: path.stem)
def test_what_a_benchmark_imports_of_ours_exists(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        module = node.module or ""
        if module.startswith("megatron.") and not module.startswith("megatron.core"):
            ours = importlib.import_module(module)
            for alias in node.names:
                is_there = hasattr(ours, alias.name)
                assert is_there or importlib.util.find_spec(f"{module}.{alias.name}"), alias.name
