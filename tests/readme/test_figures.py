"""Figures in the documents come from docs/results/*.json."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import document_results as tool  # noqa: E402
from megatron.benchmarks.checkpoint import section as checkpoint_section  # noqa: E402

INTERVAL = re.compile(r"\d\.\d+ \(\d+\.\d+-\d+\.\d+\)")
COUNTED = re.compile(
    r"\b\d[\d,]* (?:mutants of the code|places, one at a time|rows (?:equal|of)|pairs of "
    r"layouts|pipeline ranks|configurations)"
)
GENERATED = re.compile(r"<!-- (\w+): begin -->.*?<!-- \1: end -->", re.S)


def test_every_marked_figure_is_current(capsys):
    assert tool.main(["--check"]) == 0, capsys.readouterr().err


def test_a_changed_result_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("*.svg"))
    shutil.copy(ROOT / "README.md", tmp_path)
    file = tmp_path / "docs/results/plan_memory.json"
    changed = json.loads(file.read_text())
    changed["rows"].pop()
    file.write_text(json.dumps(changed))
    monkeypatch.setattr(sys.modules["megatron.tools._figures"], "RESULTS", file.parent)
    monkeypatch.setattr(tool, "PAGES", tmp_path)
    tool.result.cache_clear()
    try:
        assert tool.main(["--check"]) == 1
        assert "docs/testing.md is out of date" in capsys.readouterr().err
        assert tool.main([]) == 0 and tool.main(["--check"]) == 0
    finally:
        tool.result.cache_clear()


def test_every_figure_is_used_and_every_result_that_a_page_names_has_one():
    text = "".join(page.read_text() for page in tool.documents())
    assert {name for _, name, _, _ in tool.MARKED.findall(text)} == tool.FIGURES.keys()
    named = set(re.findall(r"results/(\w+)\.json", text))
    generated = {"checkpoint"}  # held below
    files = ROOT / "tools/document_results.py", *(ROOT / "tools").glob("_figures*.py")
    source = "".join(file.read_text() for file in files)
    unused = {
        name
        for name in named - generated
        if f'"{name}"' not in source and f"'{name}'" not in source
    }
    assert not unused, f"no figure comes from docs/results/: {sorted(unused)}"


@pytest.mark.parametrize("page", tool.documents(), ids=lambda page: page.name)
def test_no_counted_figure_or_ratio_is_written_by_hand(page: Path):
    text = page.read_text()
    for line in text.splitlines():  # a comment that begins a line ends the paragraph there
        assert not line.lstrip().startswith("<!-- =") or re.fullmatch(r"<!-- =\S+ -->", line), (
            f"move the mark from the line's start: {line}"
        )
    by_hand = GENERATED.sub("", tool.MARKED.sub("", text))
    if page.name == "testing.md":  # tests/oracle holds these to its own table
        by_hand = re.sub(r"\d+ configurations", "", by_hand)
    found = INTERVAL.findall(by_hand) + COUNTED.findall(by_hand)
    assert not found, f"{page.name}: mark these (tools/document_results.py): {found}"


def test_the_sections_that_benchmarks_write_are_those_of_their_results():
    text = (ROOT / "docs/performance.md").read_text()
    found = {
        name: part.split("\n", 1)[1].rsplit("\n", 1)[0]
        for part in (match[0] for match in GENERATED.finditer(text))
        for name in [re.search(r"<!-- (\w+): begin", part)[1]]
    }
    assert found["checkpoint"] == checkpoint_section(tool.result("checkpoint"))
