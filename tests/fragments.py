"""Finds a fragment of Python code in a file by its tokens, so that line breaks, indentation,
comments and trailing commas do not matter.
"""

from __future__ import annotations

import re
from typing import NamedTuple

TOKEN = re.compile(
    r"""
    (?P<comment>\#[^\n]*)
    | (?P<string>[rRbBfFuU]{0,2}
        (?:\"\"\".*?\"\"\"|'''.*?'''|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
    )
    | (?P<word>\w+)
    | (?P<mark>[^\w\s])
    """,
    re.VERBOSE | re.DOTALL,
)


class Token(NamedTuple):
    text: str
    start: int
    end: int


def tokens_of(code: str) -> list[Token]:
    """The tokens of a piece of code, which need not be whole: without comments, and without the
    comma that a formatter puts before a closing bracket.
    """
    found: list[Token] = []
    for match in TOKEN.finditer(code):
        text = match.group()
        if match.lastgroup == "comment":
            continue
        if text in (")", "]", "}") and found and found[-1].text == ",":
            found.pop()
        if match.lastgroup == "string" and '"' not in text:
            text = text.replace("'", '"')
        found.append(Token(text, match.start(), match.end()))
    return found


def places(code: str, fragment: str) -> list[tuple[int, int]]:
    """(start, end) of every occurrence of the fragment's tokens in the code."""
    there, wanted = tokens_of(code), [token.text for token in tokens_of(fragment)]
    texts = [token.text for token in there]
    return [
        (there[i].start, there[i + len(wanted) - 1].end)
        for i in range(len(texts) - len(wanted) + 1)
        if texts[i : i + len(wanted)] == wanted
    ]


def replaced(code: str, old: str, new: str) -> str:
    """The code with the one occurrence of `old` replaced by `new`.

    AssertionError where there is no occurrence or more than one.
    """
    found = places(code, old)
    assert len(found) == 1, f"this code is there {len(found)} times, expected once:\n{old}"
    ((start, end),) = found
    return code[:start] + new.strip() + code[end:]
