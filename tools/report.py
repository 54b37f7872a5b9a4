"""One page about a run, or many runs beside each other: `python tools/report.py RUN [RUN ...]
[--output PAGE.html] [--expected-validation-loss X [--tolerance T]]`.

RUN is a run folder (--save) or a metrics.jsonl file. The page holds curves (loss, learning rate,
gradient norm, throughput, time of an iteration, memory and whatever else was logged), the final
values, events, and what the configurations differ in. It is one file without links to others. In a
browser the curves can be drawn over iterations, samples, tokens or time, smoothed, with a
logarithmic axis, and enlarged by dragging; without JavaScript they are shown over iterations.

With an expected loss the command also prints expected and got, and with --tolerance its exit code
is 1 when they are further apart. Exit code 2: nothing to report.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if not __package__:  # run as a file of a checkout
    import _checkout  # noqa: F401

from megatron.config.errors import UserError  # noqa: E402
from megatron.observe.report.page import page, verdict  # noqa: E402
from megatron.observe.report.runs import load_runs  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", nargs="+", help="run folder or metrics.jsonl")
    parser.add_argument(
        "--output",
        metavar="PAGE",
        help="where the page goes (default: report.html beside the metrics of one run; of several "
        "runs in the current folder)",
    )
    parser.add_argument(
        "--expected-validation-loss",
        type=float,
        metavar="X",
        help="print expected and got, of one run",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="T",
        help="exit with 1 when got is further than this from expected (nats per token)",
    )
    arguments = parser.parse_args(argv)
    expected = arguments.expected_validation_loss
    if arguments.tolerance is not None and expected is None:
        parser.error("--tolerance needs --expected-validation-loss")
    if expected is not None and len(arguments.run) > 1:
        parser.error("--expected-validation-loss is of one run: give one RUN")
    try:
        runs = load_runs(arguments.run)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    judged = None if expected is None else verdict(runs[0].rows, expected, arguments.tolerance)
    beside = runs[0].metrics.with_name("report.html") if len(runs) == 1 else Path("report.html")
    output = Path(arguments.output) if arguments.output else beside
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page(runs, judged, arguments.tolerance is not None), encoding="utf-8")
    print(f"report: {output}")
    if judged is not None:
        print(judged[1])
    return 0 if judged is None or judged[0] else 1


if __name__ == "__main__":
    sys.exit(main())
