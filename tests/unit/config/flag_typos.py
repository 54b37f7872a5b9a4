"""Every one-letter typo of every known flag.

    python tests/unit/config/flag_typos.py [--write]

Each insertion, deletion, replacement and swap of neighbours in the letters of every flag of ours
and of every recorded upstream flag is read as a command line (those of upstream flags without the
rules between settings, for time). It must be refused, and the flag that it came from must be among
the suggestions, unless the typo is itself a known flag. --write records the counts in
docs/results/flag_typos.json. A test takes a sample (test_flag_names.py).
"""

from __future__ import annotations

import json
import string
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from megatron.config import compatibility  # noqa: E402
from megatron.config.arguments import _Reading, parse_arguments, split_words  # noqa: E402
from megatron.config.errors import ArgumentErrors  # noqa: E402
from megatron.config.help import COMMANDS  # noqa: E402
from megatron.config.options import (
    key,  # noqa: E402
    options_by_flag,  # noqa: E402
)

LETTERS = string.ascii_lowercase + string.digits + "-"
HELP = {"-h", "--help"}


def our_flags() -> list[str]:
    """Every spelling that sets a field, and the commands."""
    return [*options_by_flag(), *COMMANDS]


def known_flags() -> set[str]:
    """Every exact name that is answered, as it is looked up."""
    return {*map(key, our_flags()), *compatibility.rows(), *HELP}


def typos(flag: str) -> Iterator[str]:
    """Every word that is one edit away from a flag, the flag itself left out; some come twice."""
    name = flag.removeprefix("--")
    for i in range(len(name) + 1):
        head, tail = name[:i], name[i:]
        for letter in LETTERS:
            yield f"--{head}{letter}{tail}"
            if tail and letter != tail[0]:
                yield f"--{head}{letter}{tail[1:]}"
        if tail:
            yield f"--{head}{tail[1:]}"
        if len(tail) > 1 and tail[0] != tail[1]:
            yield f"--{head}{tail[1]}{tail[0]}{tail[2:]}"
    yield flag[1:]
    yield "-" + flag


def verdict(flag: str, typo: str, read: Callable[[str], list[str]]) -> str:
    """refused, or what is wrong: accepted, or without the right suggestion; `read` gives the faults
    of a command line.
    """
    faults = read(typo)
    if not faults:
        return "accepted"
    about = [fault for fault in faults if fault.startswith(typo)]
    meant = about[0].partition("did you mean ")[2].rstrip("?").split(" or ") if about else []
    return "refused" if key(flag) in map(key, meant) else "without the right suggestion"


def whole(typo: str) -> list[str]:
    """The faults of a command line."""
    try:
        parse_arguments([typo])
    except ArgumentErrors as error:
        return error.faults
    return []


def flags_alone(typo: str) -> list[str]:
    """The faults of reading its flags."""
    ((flag, words),), faults = split_words([typo])
    reading = _Reading(faults=faults)
    reading.read(flag, words)
    return reading.faults


def main(argv: list[str]) -> int:
    """Try them all; the exit code."""
    known, begun = known_flags(), time.monotonic()
    upstream = sorted(
        {key(name) for name in compatibility.recorded_names()} - {key(name) for name in our_flags()}
    )
    result = {}
    for title, flags, read in (("ours", our_flags(), whole), ("upstream", upstream, flags_alone)):
        counts = dict.fromkeys(("refused", "accepted", "without the right suggestion"), 0)
        for flag in flags:
            for typo in set(typos(flag)):
                if key(typo) in known:
                    continue
                counts[found := verdict(flag, typo, read)] += 1
                if found != "refused":
                    print(f"{typo} (of {flag}): {found}", flush=True)
        result[title] = {"flags": len(flags), "typos": sum(counts.values()), **counts}
        print(title, result[title], f"{time.monotonic() - begun:.0f} s", flush=True)
    if "--write" in argv:
        page = ROOT / "docs/results/flag_typos.json"
        page.write_text(json.dumps(result, indent=1) + "\n")
    return int(
        any(row["accepted"] or row["without the right suggestion"] for row in result.values())
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
