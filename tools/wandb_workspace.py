"""Build a wandb workspace and a report for runs of this program, and hold the metric names in them
against those that a run has logged.

    # names alone; RUN is a run's folder, its metrics.jsonl or the .wandb file of an offline run
    python tools/wandb_workspace.py --check RUN
    # write both to a file, without a network
    python tools/wandb_workspace.py --project NAME --out FILE.json
    # save both, if wandb has a key
    python tools/wandb_workspace.py --project NAME --entity TEAM

Needs pip install 'megatron-gpt-pretrain[workspaces]'. A name that a run should have logged and has
not is `missing`; one that needs a flag or data which the run did not have is listed with them.
Exit code: 0, 1 when a name is missing, or 2 when nothing can be built, read or saved.
"""

from __future__ import annotations

import argparse
import json
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:  # run as a file of a checkout
    import _checkout  # noqa: F401

from megatron.tools._report.metric_names import METRICS  # noqa: E402
from megatron.tools._report.metrics_file import metrics_path, read_metrics  # noqa: E402

from megatron.config.errors import UserError  # noqa: E402
from megatron.config.streams import escape_unencodable  # noqa: E402
from megatron.observe.metrics import AXES, wandb_name  # noqa: E402

X_AXES = ("iteration", *AXES.values())


class Chart(NamedTuple):
    """A panel: metrics by their names in metrics.jsonl, or all names of wandb that match an
    expression.
    """

    title: str
    names: tuple[str, ...] = ()
    matching: str | None = None


def lines(title: str, *names: str) -> Chart:
    """A chart of metrics in one unit."""
    return Chart(title, names or (title,))


CHARTS = {
    "train": (
        lines("lm loss"),
        lines("learning rate", "learning-rate", "decoupled-learning-rate"),
        lines("samples of a batch", "batch-size"),
    ),
    "validation": (
        lines("lm loss validation"),
        lines("lm loss validation ppl"),
        lines("bits per byte", "bits-per-byte"),
        lines("lm loss test"),
    ),
    "speed": (
        lines("tokens/s/GPU", "tokens-per-second-per-gpu"),
        lines("MFU (fraction of the peak)", "mfu"),
        lines("TFLOP/s/GPU", "throughput"),
        lines("s an iteration", "iteration-time", "predicted-iteration-time"),
        lines("s of its parts", "data-time", "forward-backward-time", "optimizer-time"),
        lines("fractions of the time", "data-wait-fraction", "pipeline-bubble-fraction"),
        lines("s of a save", "save-checkpoint-seconds", "save-checkpoint-stall-seconds"),
        lines("ranks", "world-size"),
    ),
    "memory": (
        lines("bytes", "mem-allocated-bytes", "mem-max-allocated-bytes", "mem-reserved-bytes"),
    ),
    "health": (
        lines("norm of the gradient", "grad-norm"),
        lines("norm of the parameters", "params-norm"),
        Chart("norm of the gradient by layer", matching="^grad-norm/"),
        Chart("norm of the parameters by layer", matching="^params-norm/"),
        lines("loss scale", "loss-scale"),
        lines("skipped samples", "skipped-train-samples"),
        lines("zeros of the gradient", "num-zeros"),
        lines("restarts", "resumed-from-iteration"),
    ),
}
HEADINGS = {
    "train": "Training",
    "validation": "Validation",
    "speed": "Speed",
    "memory": "Memory",
    "health": "Health",
}
NEEDS = {  # what a run logs only with this
    "decoupled-learning-rate": "--decoupled-lr",
    "lm loss validation": "validation data and --eval-iters",
    "lm loss validation ppl": "validation data and --eval-iters",
    "bits-per-byte": "validation data whose bytes per token are known",
    "lm loss test": "a test split and the end of the run",
    "mfu": "a device of known peak, or --peak-tflops",
    "predicted-iteration-time": "a device that the planner knows",
    "data-time": "--timing-log-level 1",
    "forward-backward-time": "--timing-log-level 1",
    "optimizer-time": "--timing-log-level 1",
    "pipeline-bubble-fraction": "a pipeline",
    "save-checkpoint-seconds": "--save",
    "save-checkpoint-stall-seconds": "--save",
    "mem-reserved-bytes": "a GPU",
    "params-norm": "--log-params-norm",
    "^grad-norm/": "--log-layer-norms",
    "^params-norm/": "--log-layer-norms",
    "num-zeros": "--log-num-zeros-in-grad",
    "resumed-from-iteration": "a restart",
}


class Described(NamedTuple):
    """Workspace and report as wandb stores them, and as objects that can be saved."""

    workspace: Any
    report: Any
    json: dict[str, Any]


def build(project: str, entity: str, x: str) -> Described:
    """Both, over the axis `x`. Nothing is sent. Raises UserError without wandb-workspaces."""
    try:
        import wandb_workspaces.reports.v2 as reports
        import wandb_workspaces.workspaces as workspaces
    except ImportError:
        raise UserError("needs wandb-workspaces: pip install wandb-workspaces") from None

    def panel(chart: Chart) -> Any:
        if chart.matching:
            return reports.LinePlot(title=chart.title, x=x, metric_regex=chart.matching)
        return reports.LinePlot(title=chart.title, x=x, y=[*map(wandb_name, chart.names)])

    settings = workspaces.SectionPanelSettings(x_axis=x)
    workspace = workspaces.Workspace(
        entity=entity,
        project=project,
        name="Pretraining",
        sections=[
            workspaces.Section(
                name=section, panels=[*map(panel, charts)], is_open=True, panel_settings=settings
            )
            for section, charts in CHARTS.items()
        ],
        settings=workspaces.WorkspaceSettings(x_axis=x, group_by_prefix="first"),
    )
    blocks: list[Any] = []
    for section, charts in CHARTS.items():
        said = [f"- `{name}`: {meaning(name)}" for chart in charts for name in chart.names]
        blocks += [
            reports.H1(HEADINGS[section]),
            reports.MarkdownBlock("\n".join(said)),
            reports.PanelGrid(panels=[*map(panel, charts)]),
        ]
    report = reports.Report(project=project, entity=entity, title="Pretraining", blocks=blocks)
    stored = {
        name: made._to_model().model_dump(mode="json", by_alias=True, exclude_none=True)
        for name, made in (("workspace", workspace), ("report", report))
    }
    return Described(workspace, report, stored)


def meaning(name: str) -> str:
    """What a metric is, with its unit."""
    if name not in METRICS:
        return "seconds of an iteration"  # a timer's
    unit, text = METRICS[name]
    return f"{text} ({unit})" if unit else text


def names_in(stored: Any) -> set[str]:
    """Names of metrics and expressions for them in what wandb stores, including the x axes."""
    if isinstance(stored, list):
        return set().union(*map(names_in, stored))
    if not isinstance(stored, dict):
        return set()
    found = set().union(*map(names_in, stored.values()))
    if "viewType" in stored:
        panel = stored["config"]
        found |= set(panel.get("metrics", ()))
        found |= {panel[key] for key in ("metricRegex", "xAxis") if key in panel}
    return found


def wandb_records(path: Path) -> Iterator[Any]:
    """Records of a .wandb file: 7 bytes of header, then LevelDB's log framing (32 KiB blocks; crc32
    u32, length u16, type u8, data). Raises UserError for another file.
    """
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    if data[:4] != b":W&B":
        raise UserError(f"{path}: not a .wandb file")
    position, record = 7, b""
    while position + 7 <= len(data):
        room = 32768 - position % 32768
        if room < 7:  # a header never spans blocks
            position += room
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        part = data[position + 7 : position + 7 + length]
        position += 7 + length
        record = part if kind in (1, 2) else record + part  # 1 full, 2 first, 3 middle, 4 last
        if kind in (1, 4):
            message = wandb_internal_pb2.Record()
            message.ParseFromString(record)
            yield message


def logged_names(run: Path) -> set[str]:
    """The names that a run has in wandb: of its offline files, else as metrics.jsonl's would be
    called. Raises UserError where there is neither.
    """
    files = sorted(run.glob("wandb/offline-run-*/run-*.wandb")) if run.is_dir() else [run]
    if not files or files[0].suffix != ".wandb":
        rows = read_metrics(metrics_path(run))
        names = set().union(*rows) - {"iteration", "timestamp"}
        return {"iteration", *map(wandb_name, names)}
    return {
        item.key or item.nested_key[0]
        for path in files
        for record in wandb_records(path)
        if record.WhichOneof("record_type") == "history"
        for item in record.history.item
    }


class Comparison(NamedTuple):
    """Names of charts and of a run, as wandb has them."""

    missing: list[str]
    absent: dict[str, str]  # what they need
    in_no_chart: list[str]


def compare(used: set[str], logged: set[str]) -> Comparison:
    """Which of the names used a run has logged; one that is an expression, whether any matches."""
    needs = {name if name[0] == "^" else wandb_name(name): what for name, what in NEEDS.items()}

    def there(name: str) -> bool:
        return name in logged or name[0] == "^" and any(re.match(name, each) for each in logged)

    def shown(name: str) -> bool:
        return name in used or any(re.match(each, name) for each in used if each[0] == "^")

    not_there = sorted(name for name in used if not there(name))
    return Comparison(
        [name for name in not_there if name not in needs],
        {name: needs[name] for name in not_there if name in needs},
        sorted(name for name in logged - {*X_AXES} if not shown(name) and name[0] != "_"),
    )


def has_key() -> bool:
    """Whether wandb has a key, without asking at a terminal."""
    import wandb

    return bool(wandb.login(prompt=False, verify=False))


def save(made: Described) -> None:
    """Save both. Raises UserError with wandb's message."""
    try:
        made.workspace.save()
        made.report.save()
    except Exception as error:  # of the network, of the service, of its packages
        raise UserError(f"wandb did not save: {type(error).__name__}: {error}") from None
    print(f"workspace {made.workspace.url}\nreport {made.report.url}")


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--project", help="wandb's project (--wandb-project of the runs)")
    flags.add_argument("--entity", default="", help="wandb's user or team")
    flags.add_argument("--x-axis", choices=X_AXES, default="iteration")
    flags.add_argument("--out", type=Path, metavar="FILE.json", help="write both down, do not save")
    flags.add_argument("--check", type=Path, metavar="RUN", help="compare names, do not save")
    return flags


def main(argv: list[str] | None = None) -> int:
    escape_unencodable()
    flags = parser().parse_args(argv)
    try:
        if not flags.project and not flags.check and not flags.out:
            raise UserError("give --project NAME to save, --out FILE.json, or --check RUN")
        made = build(flags.project or "project", flags.entity, flags.x_axis)
        if flags.out:
            flags.out.write_text(json.dumps(made.json, indent=1) + "\n")
        if flags.check:
            found = compare(names_in(made.json), logged_names(flags.check))
            for name in found.missing:
                print(f"missing: {name}")
            for name, what in found.absent.items():
                print(f"not in this run: {name} (needs {what})")
            for name in found.in_no_chart:
                print(f"in no chart: {name}")
            return 1 if found.missing else 0
        if not flags.out:
            if not has_key():
                raise UserError("wandb has no key: run `wandb login`, or give --out FILE.json")
            save(made)
    except (OSError, UserError) as error:
        print(f"wandb_workspace.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
