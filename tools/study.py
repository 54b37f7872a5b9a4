"""A study of speed: a grid of runs, measured in turns, as one table and one picture.

    python tools/study.py STUDY.yaml     run what is missing, then write table and picture
    python tools/study.py FOLDER         write table and picture again, from the raw rows alone

The YAML file gives flags of pretrain_gpt.py by their names without dashes: `base` for all rows,
`grid` with a list of values a flag (every combination is a row), `exclude`, and `rows` one by one;
next to them `repeats`, `iterations`, `warmup`, `launcher: local` or `sbatch`. docs/studies.md
explains it, and studies/ holds two. FOLDER/raw.jsonl has a line for every run; it is appended to
and never changed, so that a runner may be killed and started again. Exit code: 0 done, 1 a row did
other work than the rest, 2 a mistake in the study.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if not __package__:  # run as a file of a checkout
    import _checkout  # noqa: F401

from megatron.tools._study import chart, raw  # noqa: E402
from megatron.tools._study.description import StudyPlan, read_study  # noqa: E402
from megatron.tools._study.runner import run_study, turns  # noqa: E402
from megatron.tools._study.table import csv_text, markdown, summary  # noqa: E402

from megatron.config.errors import UserError  # noqa: E402
from megatron.config.streams import escape_unencodable  # noqa: E402


def log(line: str) -> None:
    """Progress, at once."""
    print(line, flush=True)


def write(folder: Path) -> bool:
    """table.md, table.csv and chart.svg of a folder; whether all rows of one model did the same."""
    found = summary(raw.read(folder))
    text = markdown(found)
    (folder / "table.md").write_text(text)
    (folder / "table.csv").write_text(csv_text(found))
    (folder / "chart.svg").write_text(chart.draw(found))
    print(text)
    print(f"written: table.md, table.csv and chart.svg in {folder}")
    return not any(work and work.faults for work in found.works.values())


def listing(plan: StudyPlan) -> str:
    """The rows of a study, for --dry-run."""
    lines = [
        f"{row.name}: {'refused: ' + row.refusal if row.refusal else f'{row.world_size} rank(s)'}"
        for row in plan.rows
    ]
    runs = len(turns(plan))
    return "\n".join(
        [*lines, f"{len(plan.rows)} rows, {runs} runs of {plan.iterations} iterations"]
    )


def main(argv: list[str] | None = None) -> int:
    escape_unencodable()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", type=Path, metavar="STUDY.yaml|FOLDER")
    parser.add_argument(
        "--folder", type=Path, help="where raw rows and results lie (default runs/<name>)"
    )
    parser.add_argument("--dry-run", action="store_true", help="list the rows and run nothing")
    parser.add_argument(
        "--retry-failed", action="store_true", help="run rows again that have failed"
    )
    arguments = parser.parse_args(argv)
    try:
        if arguments.study.is_dir():
            if not (arguments.study / raw.RAW).exists():
                raise UserError(f"{arguments.study}: no {raw.RAW} in this folder")
            return 0 if write(arguments.study) else 1
        plan = read_study(arguments.study)
        if arguments.dry_run:
            print(listing(plan))
            return 0
        folder = arguments.folder or Path("runs", plan.name)
        run_study(plan, folder, log, retry_failed=arguments.retry_failed)
        return 0 if write(folder) else 1
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command continues", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
