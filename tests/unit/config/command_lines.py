"""Random command lines.

    python tests/unit/config/command_lines.py [--count 20000] [--seed 0] [--write]

Each is a run's flags or some of them, with flags of ours and of other codebases in random order,
values that are usual, extreme or nonsense, typos and stray words, as a dry run of a random number
of ranks. The program must end each within ten seconds of processor time with 0, or with 2 and a
message: no traceback. --write records the counts in docs/results/command_lines.json. A test runs a
few (test_command_lines.py).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

import pretrain_gpt  # noqa: E402
from megatron.config import compatibility  # noqa: E402
from megatron.config.options import Option, options  # noqa: E402

SECONDS = 10
BASE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 2 --lr 1e-3 --train-iters 10 --mock-data --vocab-size 100"
).split()
NUMBERS = tuple(
    "0 1 2 3 4 7 8 16 64 1000 -1 1e9 1000000000 1e308 -1e308 1e-320 0.5 0.0 1e18 "
    "9223372036854775808 1_000 nan inf 0x10 1e400 08 ".split(" ")
)
WORDS = (
    *"x . .. /dev/null /dev/null/x absent file folder é \u202e -- - -5 ' E*99999999t Et|tL".split(),
    *"layers.0- embedding,head 1,2,3 1/0 {} [ ~ $X %d".split(),
    *("", "a b", "\t", "\x01", "a" * 300, "a/" * 2100),
)


def value(option: Option, draw: random.Random) -> str:
    """One word after a flag, usual or not."""
    if option.choices and draw.random() < 0.8:
        return str(draw.choice(option.choices))
    if option.kind in (int, float) and draw.random() < 0.9:
        return draw.choice(NUMBERS[:12]) if draw.random() < 0.6 else draw.choice(NUMBERS)
    return draw.choice(WORDS)


def command_line(draw: random.Random) -> list[str]:
    """The words of one run."""
    words = list(BASE) if draw.random() < 0.85 else []
    foreign = list(compatibility.rows())
    parts: list[list[str]] = []
    for _ in range(draw.choice((0, 1, 1, 2, 2, 3, 5, 9))):
        chance = draw.random()
        if chance < 0.72:
            option = draw.choice(options())
            name = draw.choice((*option.names, *option.off))
            count = draw.choice((1, 2, 3)) if option.many else 0 if option.kind is bool else 1
            if draw.random() < 0.05:
                count = draw.choice((0, 1, 2))
            given = [value(option, draw) for _ in range(count)]
            parts.append(
                [f"{name}={given[0]}"]
                if len(given) == 1 and draw.random() < 0.2
                else [name, *given]
            )
        elif chance < 0.88:
            parts.append(
                [
                    draw.choice(foreign),
                    *draw.choices((*NUMBERS, *WORDS), k=draw.choice((0, 0, 1, 1, 2))),
                ]
            )
        elif chance < 0.94:
            name, place = draw.choice(options()).names[0], draw.randrange(2, 5)
            parts.append([name[:place] + name[place + 1 :]])
        else:
            parts.append([draw.choice(WORDS)])
    for part in parts:
        place = draw.choice((0, len(words)))
        words[place:place] = part
    return [
        *words,
        "--dry-run",
        *draw.choice(
            ([], ["--world-size", draw.choice(("1", "2", "8", "12", "64", "1024", "100000"))])
        ),
    ]


class TookTooLong(BaseException):
    """The alarm of a command line that does not end."""


def _alarm(*_: object) -> None:
    raise TookTooLong


def outcome(argv: list[str]) -> tuple[str, str]:
    """What came of a command line, and the traceback where there is one: 0, 2, traceback, hang, or
    no message.
    """
    out, err = io.StringIO(), io.StringIO()
    signal.signal(signal.SIGPROF, _alarm)
    # processor time: what else the machine does is not this command line's fault
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = pretrain_gpt.main(argv)
    except TookTooLong:
        return "hang", traceback.format_exc()
    except SystemExit as error:
        code = error.code
    except BaseException:
        return "traceback", traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    shown = (
        err.getvalue().strip()
        or "verdict        does not fit" in out.getvalue()
        or argv.count("--print-config")
    )
    return (
        (str(code), "") if code == 0 or (code == 2 and shown) else (f"{code} without a message", "")
    )


@contextlib.contextmanager
def folder_of_files():
    """A working folder with a file and a folder in it."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("file").write_bytes(b"x")
        Path("folder").mkdir()
        try:
            yield
        finally:
            os.chdir(before)


def campaign(count: int, seed: int) -> tuple[Counter, list[tuple[list[str], str]]]:
    """How often each outcome came, and the command lines that should not have ended so."""
    counts, wrong = Counter(), []
    with folder_of_files():
        for number in range(count):
            argv = command_line(random.Random(f"{seed}:{number}"))
            found, text = outcome(argv)
            counts[found] += 1
            if found not in ("0", "2"):
                wrong.append((argv, f"{found}\n{text}"))
    return counts, wrong


def main(argv: list[str]) -> int:
    """Run the campaign; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true")
    given, begun = parser.parse_args(argv), time.monotonic()
    counts, wrong = campaign(given.count, given.seed)
    for words, text in wrong[:40]:
        print(json.dumps(words), text, sep="\n", flush=True)
    result = {
        "command lines": given.count,
        "seed": given.seed,
        "trained nothing, exit code 0": counts["0"],
        "refused with a message, exit code 2": counts["2"],
        "tracebacks": counts["traceback"],
        "hangs": counts["hang"],
        "others": sum(counts.values())
        - sum(counts[name] for name in ("0", "2", "traceback", "hang")),
    }
    print(result, f"{time.monotonic() - begun:.0f} s")
    if given.write:
        (ROOT / "docs/results/command_lines.json").write_text(json.dumps(result, indent=1) + "\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
