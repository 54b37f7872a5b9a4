r"""One page about a run, or about several runs side by side.

    python tools/report.py RUN [RUN ...] [--output PAGE.html] \
        [--expected-validation-loss X [--tolerance T]]

RUN is a run folder (--save) or a metrics.jsonl file. The page holds curves (loss, learning rate,
gradient norm, throughput, time of an iteration, memory and whatever else was logged), the final
values, goodput, where the steps of a profile went, events, and what the configurations differ in.
The folder of a study (tools/study.py) adds its chart with error bars and its table, or makes a
separate page. A page is one file without links to others. In a browser the curves can be drawn over
iterations, samples, tokens or time, smoothed, with a logarithmic axis, and enlarged by dragging;
without JavaScript they are shown over iterations.

With an expected loss the command also prints expected and got, and with --tolerance its exit code
is 1 when they are further apart. Exit code 2: nothing to report.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if not __package__:  # run as a file of a checkout
    import _checkout  # noqa: F401

from megatron.tools._report.page import judge, page  # noqa: E402
from megatron.tools._report.runs import load_runs  # noqa: E402
from megatron.tools._study.section import is_study, study_section  # noqa: E402

from megatron.config.errors import UserError  # noqa: E402
from megatron.config.streams import escape_unencodable  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    escape_unencodable()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "run", metavar="RUN", nargs="+", help="run folder, metrics.jsonl, or folder of a study"
    )
    parser.add_argument(
        "--output",
        metavar="PAGE",
        help="where the page goes (default: report.html next to the metrics of one run, or in the "
        "folder of one study; of several in the current folder)",
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
    studies = [Path(given) for given in arguments.run if is_study(Path(given))]
    if expected is not None and (len(arguments.run) > 1 or studies):
        parser.error("--expected-validation-loss is of one run: give one RUN")
    try:
        runs = load_runs([given for given in arguments.run if Path(given) not in studies])
        sections = [study_section(folder) for folder in studies]
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    judged = None if expected is None else judge(runs[0].rows, expected, arguments.tolerance)
    text = page(runs, judged, sections)
    folders = [*(run.metrics.parent for run in runs), *studies]
    folder_of_run = folders[0] if len(folders) == 1 else Path()
    output = Path(arguments.output) if arguments.output else folder_of_run / "report.html"
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        fault = f"{error.filename}: {error.strerror}"
        print(f"error: {fault}; give another --output", file=sys.stderr)
        return 2
    print(f"report: {output}")
    if judged is not None:
        print(judged.text)
    return 0 if judged is None or judged.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
