"""Random command lines: a run's flags or some of them, with flags of ours and of other codebases in
random order, values that are usual, extreme or nonsense, typos and stray words, as a dry run of a
random number of ranks. Each must end with 0, or with 2 and a message.
"""

from __future__ import annotations

import contextlib
import io
import random
from pathlib import Path

import pretrain_gpt
from campaigns.odd_input.cases import Verdicts, Wrong
from megatron.config import compatibility
from megatron.config.errors import UserError
from megatron.config.options import FIELDS, Option

BASE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 2 --lr 1e-3 --train-iters 10 --mock-data --vocab-size 100"
).split()
NUMBERS = tuple(
    "0 1 2 3 4 7 8 16 64 1000 -1 1e9 1000000000 1e308 -1e308 1e-320 0.5 0.0 1e18 "
    "9223372036854775808 1_000 nan inf 0x10 1e400 08 ".split(" ")
)
WORDS = (
    *"x . .. /dev/null /dev/null/x absent file folder é \u202e -- - -5 '".split(),
    *"E*99999999t Et|tL layers.0- embedding,head 1,2,3 1/0 {} [ ~ $X %d".split(),
    *("", "a b", "\t", "\x01", "a" * 300, "a/" * 2100),
)


def value(option: Option, draw: random.Random) -> str:
    """One word after a flag, usual or not."""
    if option.choices and draw.random() < 0.8:
        return str(draw.choice(option.choices))
    if option.kind in (int, float) and draw.random() < 0.9:
        return draw.choice(NUMBERS[:12]) if draw.random() < 0.6 else draw.choice(NUMBERS)
    return draw.choice(WORDS)


def part(draw: random.Random) -> list[str]:
    """A flag with words, a typo or a stray word."""
    chance, option = draw.random(), draw.choice(list(FIELDS.values()))
    if chance < 0.72:
        count = draw.choice((1, 2, 3)) if option.many else int(option.kind is not bool)
        if draw.random() < 0.05:
            count = draw.choice((0, 1, 2))
        name, given = draw.choice((*option.names, *option.off)), [value(option, draw)] * count
        return [f"{name}={given[0]}"] if count == 1 and draw.random() < 0.2 else [name, *given]
    if chance < 0.88:
        words = draw.choices((*NUMBERS, *WORDS), k=draw.choice((0, 0, 1, 1, 2)))
        return [draw.choice(list(compatibility.rows())), *words]
    if chance < 0.94:
        place = draw.randrange(2, 5)
        return [option.names[0][:place] + option.names[0][place + 1 :]]
    return [draw.choice(WORDS)]


def command_line(draw: random.Random) -> list[str]:
    """The words of one run."""
    words = list(BASE) if draw.random() < 0.85 else []
    for _ in range(draw.choice((0, 1, 1, 2, 2, 3, 5, 9))):
        place = draw.choice((0, len(words)))
        words[place:place] = part(draw)
    size = ["--world-size", draw.choice(("1", "2", "8", "12", "64", "1024", "100000"))]
    return [*words, "--dry-run", *draw.choice(([], size))]


def run(argv: list[str]) -> str:
    """Carry out one. Raises UserError with the message of a refusal."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = pretrain_gpt.main(argv)
        except SystemExit as stopped:
            code = stopped.code
    shown = err.getvalue().strip()
    if "verdict        does not fit" in out.getvalue() or "--print-config" in argv:
        shown = shown or "the run does not fit"
    if code == 2 and shown:
        raise UserError(shown[:500])
    if code:
        raise Wrong(f"exit code {code} without a message")
    return "accepted"


def command_lines(count: int, seed: int, folder: Path) -> Verdicts:
    """Random command lines in a folder with a file and a folder."""
    verdicts = Verdicts()
    (folder / "file").write_bytes(b"x")
    (folder / "folder").mkdir()
    with contextlib.chdir(folder):
        for number in range(count):
            argv = command_line(random.Random(f"{seed}:{number}"))
            verdicts.case(f"{number} {argv}", lambda argv=argv: run(argv))
    return verdicts
