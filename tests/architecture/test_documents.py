"""Documents keep to the field's words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEVER = re.compile(
    r"\b(beside|besides|so many|of (?:its|their|his|her|our|your) own|whoever|nobody|for the asking"
    r"|goes on|go on|stands|at hand|by then|meanwhile|as ever|mends?|mended|tells?|told|says?"
    r"|speaks?|lets? go|what is left|comes? to light|in words|absent there|weighed|its like"
    r"|the one)\b".replace(" ", r"\s+"),
    re.I,
)
GENERATED = {"docs/flags.md"}  # by tools/document_flags.py, from help texts
ALLOWED: set[tuple[str, str]] = set()  # (file, expression) of quotations and names


MOST_WORDS = 30_500  # of README and docs/ without generated tables; the aim is 30,000
TABLES = re.compile(r"<!-- =\S+ -->\n.*?<!-- / -->|<!-- (\w+): begin -->.*?<!-- \1: end -->", re.S)


def test_the_documents_stay_short():
    """A new page takes the place of an old one."""
    written = [page for page in pages() if "docs" in page.relative_to(ROOT).parts]
    written.append(ROOT / "README.md")
    plain = [re.sub("<!--.*?-->", "", TABLES.sub("", page.read_text())) for page in written]
    words = sum(len(text.split()) for text in plain)
    assert words <= MOST_WORDS, f"{words} words; the most is {MOST_WORDS}: delete something"


def pages() -> list[Path]:
    """README and the rules for contributors, docs/ without generated pages and results, and the
    pages of examples.
    """
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "AGENTS.md"]
    found += [page for page in (ROOT / "docs").rglob("*.md") if "results" not in page.parts]
    found += (ROOT / "examples").glob("*/README.md")
    return sorted(page for page in found if page.relative_to(ROOT).as_posix() not in GENERATED)


def hits(text: str) -> list[tuple[int, str]]:
    """(line, expression); an expression may be broken over two lines."""
    return [
        (text.count("\n", 0, found.start()) + 1, " ".join(found[0].split()).lower())
        for found in NEVER.finditer(text)
    ]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_uses_the_fields_words(page: Path):
    name = page.relative_to(ROOT).as_posix()
    found = [each for each in hits(page.read_text()) if (name, each[1]) not in ALLOWED]
    assert not found, f"{name}: write these in other words: {found}"


@pytest.mark.parametrize(
    "text, expected",
    [
        ("a bias beside the weight", [(1, "beside")]),
        ("first\nthe banner Says so", [(2, "says")]),
        ("a grid\nof its\nown", [(2, "of its own")]),
        ("the standstill, the onerous, a stand, its liking", []),
    ],
)
def test_an_expression_is_found(text: str, expected: list[tuple[int, str]]):
    assert hits(text) == expected
