"""What share of a run's wall time moved its weights, and where the rest went, over all restarts.

    python tools/goodput.py RUN [--json]

RUN is a folder that was --save of a run; its events.jsonl and metrics.jsonl are read. Exit code: 0
when productive time and the eight causes add up to the wall time within 1%, 1 when they do not
(events are missing), 2 unreadable.
"""

from __future__ import annotations

import argparse
import json
import sys

if not __package__:  # run as a file of a checkout
    import _checkout  # noqa: F401

from megatron.tools._report.goodput_account import MEANINGS, Goodput, goodput  # noqa: E402

from megatron.config.errors import UserError  # noqa: E402
from megatron.config.streams import escape_unencodable  # noqa: E402


def text(found: Goodput) -> str:
    """The table."""
    wall = found.wall or 1.0
    lines = [
        f"  {cause:<12}{seconds:>12.1f} s {seconds / wall:>7.1%}  {MEANINGS[cause]}"
        for cause, seconds in found.rows()
    ]
    return "\n".join([found.headline(), *lines, *filter(None, [found.fault()])])


def main(argv: list[str] | None = None) -> int:
    """Print the table or a JSON object."""
    escape_unencodable()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", help="a folder that was --save of a run")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    try:
        found = goodput(options.run)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:
        row = {"wall": found.wall, "starts": found.starts, "seconds": dict(found.rows())}
        print(json.dumps({**row, "adds_up": found.adds_up}))
    else:
        print(text(found))
    return 0 if found.adds_up else 1


if __name__ == "__main__":
    sys.exit(main())
