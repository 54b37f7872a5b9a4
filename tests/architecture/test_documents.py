"""Documents and code keep to the field's words."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EVERYWHERE = (
    "beside|so many|whoever|nobody|for the asking|goes on|stands|at hand|by then|meanwhile|as ever"
    "|mends?|mended|told|says?|speaks?|lets? go|what is left|comes? to light|in words|absent there"
    "|weighed|its like"
)


def expression(words: str) -> re.Pattern[str]:
    """Any of the words, which may be broken over two lines."""
    return re.compile(rf"\b({words})\b".replace(" ", r"\s+"), re.I)


NEVER = expression(
    f"{EVERYWHERE}|besides|of (?:its|their|his|her|our|your) own|go on|tells?|the one"
)
NEVER_IN_CODE = expression(rf"{EVERYWHERE}|of its own(?! \w)|(?<!\.)tells?")
AS_NAMES = {"told", "beside", "nobody", "meanwhile", "whoever"}  # others are methods of Python's
GENERATED = {"docs/flags.md"}  # by tools/document_flags.py, from help texts
MOST_WORDS = 30_000  # of README and docs/, without generated tables
TABLES = re.compile(r"<!-- =\S+ -->\n.*?<!-- / -->|<!-- (\w+): begin -->.*?<!-- \1: end -->", re.S)


def test_the_documents_stay_short():
    """A new page takes the place of an old one."""
    docs = [page for page in pages() if "docs" in page.relative_to(ROOT).parts]
    texts = [TABLES.sub("", page.read_text()) for page in (*docs, ROOT / "README.md")]
    words = sum(len(re.sub("<!--.*?-->", "", text).split()) for text in texts)
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
    """(line, expression) of a document."""
    return [
        (text.count("\n", 0, found.start()) + 1, " ".join(found[0].split()).lower())
        for found in NEVER.finditer(text)
    ]


def written(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of what an author chose: comments, strings and names."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_text = token.type in (tokenize.COMMENT, tokenize.STRING)
        if is_text or (token.type == tokenize.NAME and token.string in AS_NAMES):
            yield token.start[0], token.string


def hits_in_code(source: str) -> list[tuple[int, str]]:
    """(line, expression) of Python code."""
    if not NEVER_IN_CODE.search(source):  # most files
        return []
    return [
        (line, found[0]) for line, text in written(source) for found in NEVER_IN_CODE.finditer(text)
    ]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_uses_the_fields_words(page: Path):
    found = hits(page.read_text())
    assert not found, f"{page}: write these in other words: {found}"


def test_code_uses_the_fields_words():
    here = Path(__file__)  # which lists them
    folders = "megatron kernels tools benchmarks campaigns scripts tests".split()
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py") if file != here]
    found = {
        f"{file.relative_to(ROOT)}:{line}": word
        for file in (*files, ROOT / "pretrain_gpt.py")
        for line, word in hits_in_code(file.read_text())
    }
    assert len(files) > 300 and not found, f"write these in other words: {found}"


@pytest.mark.parametrize(
    "find, text, expected",
    [
        (hits, "a bias beside the weight", [(1, "beside")]),
        (hits, "first\nthe banner Says so", [(2, "says")]),
        (hits, "a grid\nof its\nown", [(2, "of its own")]),
        (hits, "the standstill, the onerous, a stand, its liking", []),
        (hits_in_code, "x = 1  # the bias beside it\n", [(1, "beside")]),
        (hits_in_code, 'def f():\n    """It says so."""\n', [(2, "says")]),
        (hits_in_code, "told = file.tell()\n", [(1, "told")]),
        (hits_in_code, "for word in words:\n    pass  # a row of its own architecture\n", []),
    ],
)
def test_an_expression_is_found(find, text: str, expected: list[tuple[int, str]]):
    assert find(text) == expected
