"""Launch scripts of Megatron-LM, Megatron-DeepSpeed, forks and other projects, of the data file
launch_scripts.toml: their flags and values, and what of them does not exist here.
"""

from __future__ import annotations

import json
import shlex
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILES = (
    "gpt2-vocab.json",
    "gpt2-merges.txt",
    "tokenizer.model",
    "corpus_text_document.bin",
    "corpus_text_document.idx",
)
CONTENTS = {
    "data.txt": "0.5 corpus_text_document web\n0.5 corpus_text_document books\n",
    # a vocabulary of 1,003 tokens, without those that were added later
    "ckpt/tokenizer.json": json.dumps({"model": {"vocab": {str(k): k for k in range(1003)}}}),
}


@dataclass(frozen=True)
class Script:
    """One script: where it is, its flags, its DeepSpeed file (deepspeed.json) and the job that it
    starts. `refused` are the beginnings of the faults of the flags as they are; with the flags of
    `drop` taken out, and `add` added, the script runs, without the services `not_done`.
    """

    path: str
    flags: str
    ranks: int
    deepspeed: dict[str, Any] | None = None
    refused: tuple[str, ...] = ()
    drop: str = ""
    add: str = ""
    reason: str = ""
    not_done: tuple[str, ...] = ()
    vocabulary: int = 50257
    # sections of the DeepSpeed file as they must be; None: taken out
    edit: dict[str, Any] = field(default_factory=dict)

    def make(self, folder: Path, *, edited: bool) -> list[str]:
        """Its command line, and its files in a folder."""
        for name in FILES:
            (folder / name).write_bytes(b"")
        for name, text in CONTENTS.items():
            (folder / name).write_text(text)
        if self.deepspeed is not None:
            content = {**self.deepspeed, **self.edit} if edited else self.deepspeed
            content = {key: value for key, value in content.items() if value is not None}
            (folder / "deepspeed.json").write_text(json.dumps(content))
        words = shlex.split(self.flags)
        return [*without(words, self.drop.split()), *self.add.split()] if edited else words


def without(words: list[str], flags: list[str]) -> list[str]:
    """The words of a line less some flags and the words after them."""
    kept, dropping = [], False
    for word in words:
        if word.startswith("--"):
            dropping = word.partition("=")[0] in flags
        kept += [] if dropping else [word]
    return kept


def scripts() -> tuple[Script, ...]:
    """Those of the data file."""
    text = Path(__file__).with_suffix(".toml").read_text("utf-8")
    found = tomllib.loads(text)["script"]
    for row in found:
        row |= {key: json.loads(row[key]) for key in ("deepspeed", "edit") if key in row}
    return tuple(Script(**row) for row in found)
