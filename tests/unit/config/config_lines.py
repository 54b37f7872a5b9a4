"""Command lines of tests, and rows of tests as text: a line of flags or settings, and below it,
indented, what it gives.
"""

from __future__ import annotations

import pytest

from megatron.config.arguments import parse_arguments
from megatron.config.derive import RunView
from megatron.config.errors import ArgumentErrors
from megatron.config.groups import Config
from megatron.config.validate import cross_field_faults, resolve

LINE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 2 --lr 1e-3 --train-iters 10 --mock-data --vocab-size 100"
)
SHORT = {
    "@experts": "--disable-bias-linear --num-experts 8",
    "@latent": "--multi-latent-attention --position-embedding-type rope",
    "@pp": "--pipeline-model-parallel-size",
    "@virtual": "--num-virtual-stages-per-pipeline-rank",
    "@per_virtual": "--num-layers-per-virtual-pipeline-stage",
    "@layout": "--pipeline-model-parallel-layout",
    "@first": "--decoder-first-pipeline-num-layers",
    "@last": "--decoder-last-pipeline-num-layers",
    "@embedding": "--account-for-embedding-in-pipeline-split",
    "@loss": "--account-for-loss-in-pipeline-split",
}


def long(text: str) -> str:
    """A line with the flags that short names represent."""
    return " ".join(SHORT.get(word, word) for word in text.split())


def configure(flags: str = "") -> Config:
    """The settings of LINE and flags; !--flag takes one out of LINE."""
    words = long(flags).split()
    dropped = [word[1:] for word in words if word.startswith("!")]
    kept = [word for word in words if not word.startswith("!")]
    return parse_arguments([*without(LINE.split(), *dropped), *kept]).config


def faults(flags: str = "", ranks: int = 1) -> list[str]:
    return cross_field_faults(configure(flags), ranks, 101)


def resolved(flags: str = "", ranks: int = 1) -> RunView:
    return resolve(configure(flags), ranks, 101)


def faults_of(argv: list[str]) -> list[str]:
    """The faults that reading a command line ends with."""
    with pytest.raises(ArgumentErrors) as caught:
        parse_arguments(argv)
    return caught.value.faults


def without(words: list[str], *flags: str) -> list[str]:
    """The words of a line less some flags and the words after them."""
    kept, dropping = [], False
    for word in words:
        dropping = word.partition("=")[0] in flags if word.startswith("--") else dropping
        kept += [] if dropping else [word]
    return kept


def rows(text: str, *kinds: str) -> list[tuple[str, dict[str, list[str]]]]:
    """(line, what it gives) of each row, whose indented lines begin with one of `kinds`; others
    are of the kind "". A kind that no line of the row has is missing; # begins a comment.
    """
    found: list[tuple[str, dict[str, list[str]]]] = []
    for line in filter(str.strip, text.splitlines()):
        if line.startswith(" "):
            kind, _, rest = line.strip().partition(" ")
            kind, rest = (kind, rest) if kind in kinds else ("", line.strip())
            found[-1][1].setdefault(kind, []).append(rest)
        elif not line.startswith("#"):
            found.append((line, {}))
    return found


def ranked(text: str) -> list[tuple[int, str, list[str]]]:
    """(ranks, flags, texts) of rows whose line may begin with a number of ranks."""
    found = []
    for line, wanted in rows(text):
        first, _, rest = line.partition(" ")
        ranks, flags = (int(first), rest) if first.isdigit() else (1, line)
        found.append((ranks, flags, [long(each) for each in wanted.get("", [])]))
    return found


def check_fields(config: Config, wanted: list[str]) -> None:
    """Each `field = value` holds in a configuration."""
    groups = config.to_dict().values()
    values = {name: value for group in groups for name, value in group.items()}
    for field, value in (each.split(" = ") for each in wanted):
        assert str(values[field]) == value, (field, values[field])
