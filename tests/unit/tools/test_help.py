"""`--help` prints the commands in a tool's docstring."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TOOLS = [path.stem for path in sorted((ROOT / "tools").glob("[a-z]*.py"))]
AT_START = re.compile(
    r"    (?:[A-Z_]+=\S+ |compute-sanitizer .* )*(?:\S+/)?(?:python|bash|torchrun|srun)\b"
)


@pytest.mark.parametrize("name", TOOLS)
def test_help_prints_the_documented_commands(name, monkeypatch, capsys):
    module = importlib.import_module(f"megatron.tools.{name}")
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    try:
        module.main()
    except SystemExit as ended:
        assert not ended.code
    assert sys.stdout.errors == "backslashreplace"  # a path may hold what the log cannot
    printed = capsys.readouterr().out
    commands = [line for line in module.__doc__.split("\n") if AT_START.match(line)]
    assert printed and not set(commands) - set(printed.split("\n"))
