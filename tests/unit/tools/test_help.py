"""The commands in docstrings, which `--help` prints: each is on a line by itself, so that it can be
copied.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("benchmarks", "campaigns", "kernels", "megatron", "requirements", "scripts", "tests")
TOOLS = [path.stem for path in sorted((ROOT / "tools").glob("[a-z]*.py"))]
# `python FILE.py`, and what torchrun and srun start
COMMAND = re.compile(r"\b(?:python3?|bash|torchrun|srun)(?: -\S+(?: \d+)?)* [^\s`]+\.(?:py|sh)\b")
AT_START = re.compile(
    r"    (?:[A-Z_]+=\S+ |compute-sanitizer .* )*(?:\S+/)?(?:python|bash|torchrun|srun)\b"
)


def merged_commands(text: str) -> Iterator[str]:
    """Lines with a command that cannot be copied from there: after other words, before another
    command, or going on in a line that is not marked as its continuation.
    """
    lines = text.split("\n")
    for line, following in zip(lines, [*lines[1:], ""]):
        plain = re.sub(r"`[^`]*`", "", line)  # named within a sentence
        found = len(COMMAND.findall(plain))
        if not found:
            continue
        ends = not following.strip() or line.endswith("\\")
        next_command = AT_START.match(following) or following.lstrip().startswith("#")
        if found > 1 or not AT_START.match(plain) or not (ends or next_command):
            yield line


def test_no_docstring_has_merged_commands():
    files = [file for name in (*FOLDERS, "tools") for file in (ROOT / name).rglob("*.py")]
    found = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in [*ROOT.glob("*.py"), *files]
        for line in merged_commands(ast.get_docstring(ast.parse(path.read_text())) or "")
    ]
    assert not found, "\n".join(found)


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
    assert not list(merged_commands(printed))
