"""Campaigns of odd input.

    python campaigns/odd_input/odd_input.py all [--seed N] [--out FILE]

The program is run on random command lines, and every reader of a file that a user gives on many
damaged and odd files. A case ends in one error of the user's kind, or in the result that an
independent oracle gives; a bare traceback, a hang, the acceptance of what must be refused and
another result are wrong. `--count` and one campaign's name run a part. Exit code 1 when a case is
wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def campaigns() -> dict:
    """Name -> (the campaign, its number of cases)."""
    from campaigns.odd_input import checkpoint_files, command_lines, data_files, settings_files

    return {
        "command lines": (command_lines.command_lines, 20_000),
        "configurations": (settings_files.configurations, 700),
        "deepspeed": (settings_files.deepspeed, 500),
        "jsonl": (data_files.jsonl, 250),
        "tokenizers": (data_files.tokenizer_files, 100),
        "index": (data_files.index_damages, 260),
        "checkpoints": (checkpoint_files.checkpoint_damages, 500),
        "pickles": (checkpoint_files.pickles, 3000),
    }


def main() -> int:
    known = campaigns()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("campaign", choices=[*known, "all"])
    parser.add_argument("--count", type=int, help="cases (default: the campaign's own number)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the outcomes to this JSON file")
    arguments = parser.parse_args()
    results, wrong = {}, 0
    for name in known if arguments.campaign == "all" else [arguments.campaign]:
        run, cases = known[name]
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            verdicts = run(arguments.count or cases, arguments.seed, Path(folder))
        for line in verdicts.wrong:
            print(f"{name}: WRONG: {line}")
        outcomes = dict(sorted(verdicts.outcomes.items()))
        print(
            (
                f"{name}: {sum(outcomes.values())} cases, {len(verdicts.wrong)} wrong, "
                f"{time.monotonic() - begun:.1f} s: {outcomes}"
            ),
            flush=True,
        )
        results[name] = {
            "cases": sum(outcomes.values()),
            "wrong": len(verdicts.wrong),
            "outcomes": outcomes,
        }
        wrong += len(verdicts.wrong)
    if arguments.out:
        arguments.out.write_text(
            json.dumps({"seed": arguments.seed, "wrong": wrong, "campaigns": results}, indent=1)
            + "\n"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
