"""metrics.jsonl, TensorBoard and a real offline wandb, each read back from disk and compared."""

from __future__ import annotations

import json
import math
import os
import signal
import struct
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megatron.config.errors import UserError
from megatron.config.groups import CheckpointConfig, Config, DataConfig, LoggingConfig
from megatron.observe.metrics import is_measured, save_metrics
from megatron.observe.tracking import Tracker, persistent_run_id, read_metrics

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))

from wandb_workspace import wandb_records  # noqa: E402

SECRET = "0123456789abcdef0123456789abcdef01234567"


def make(save: Path | None, **logging: Any) -> Config:
    return Config(
        data=DataConfig(seq_length=16),
        checkpoint=CheckpointConfig(save=None if save is None else str(save)),
        logging=LoggingConfig(**logging),
    )


def loss(iteration: int) -> float:
    return 10 / iteration


def train(config: Config, first: int, last: int, resumed: int = 0) -> Tracker:
    tracker = Tracker(config, {"model": {"num_layers": 2}}, resumed, resumed_samples=8 * resumed)
    for iteration in range(first, last + 1):
        consumed = {"consumed_samples": 8 * iteration, "consumed-tokens": 128 * iteration}
        tracker.log(iteration, {**consumed, "lm loss": loss(iteration)})
        if iteration % 3 == 0:
            tracker.log(iteration, {**consumed, "lm loss validation": 2 * loss(iteration)})
    return tracker


def raw(path: Path) -> list[dict[str, Any]]:
    """The rows of a file without their time."""
    rows = [
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
        for line in path.read_text().splitlines()
    ]
    return [{name: value for name, value in row.items() if name != "timestamp"} for row in rows]


def untimed(path: Path) -> list[dict[str, float]]:
    return [
        {name: value for name, value in row.items() if name != "timestamp"}
        for row in read_metrics(path)
    ]


# ---- metrics.jsonl


def test_rows_and_where_they_go(tmp_path):
    train(make(tmp_path / "run"), 1, 3).close()
    train(make(None, metrics_file=str(tmp_path / "other" / "m.jsonl")), 1, 3).close()
    third = {
        "iteration": 3,
        "consumed_samples": 24,
        "consumed-tokens": 384,
        "lm loss": 10 / 3,
    }
    expected = [
        {"iteration": 1, "consumed_samples": 8, "consumed-tokens": 128, "lm loss": 10.0},
        {"iteration": 2, "consumed_samples": 16, "consumed-tokens": 256, "lm loss": 5.0},
        third,
        {**third, "lm loss validation": 20 / 3},
    ]
    assert (
        raw(tmp_path / "run" / "metrics.jsonl") == raw(tmp_path / "other" / "m.jsonl") == expected
    )
    assert (
        untimed(tmp_path / "run")
        == untimed(tmp_path / "other" / "m.jsonl")
        == [*expected[:2], expected[3]]
    )
    assert json.loads((tmp_path / "other" / "m.config.json").read_text()) == {
        "model": {"num_layers": 2}
    }
    assert list(tmp_path.glob("**/*.tmp")) == []


def test_each_row_says_when_it_was_written(tmp_path, monkeypatch):
    clock = iter([1.25, 2.5])
    monkeypatch.setattr("time.time", lambda: next(clock))
    train(make(tmp_path), 1, 2).close()
    assert [row["timestamp"] for row in read_metrics(tmp_path)] == [1.25, 2.5]
    assert is_measured("timestamp")  # no comparison of runs reads it


def test_numbers_come_back_bit_for_bit(tmp_path):
    values = {
        "lm loss": 0.1 + 0.2,
        "grad-norm": math.nan,
        "loss-scale": 2.0**32,
        "params-norm": -math.inf,
        "num-zeros": 5e-324,
    }
    tracker = Tracker(make(tmp_path), {}, 0)
    tracker.log(1, values)
    tracker.close()
    assert raw(tmp_path / "metrics.jsonl")[0]["grad-norm"] == "NaN"
    (row,) = untimed(tmp_path)
    assert all(
        struct.pack("d", row[name]) == struct.pack("d", value) for name, value in values.items()
    )


@pytest.mark.parametrize(
    "torn",
    ['{"iteration": 6, "lm lo', "{", '{"iteration": 6, "consumed_samples": 48, "lm loss": 99.0}'],
)
def test_a_torn_last_line_breaks_neither_appending_nor_reading(tmp_path, torn):
    train(make(tmp_path), 1, 5).close()
    path = tmp_path / "metrics.jsonl"
    before = path.read_text()
    path.write_text(before + torn)
    assert [row["iteration"] for row in untimed(path)][:5] == [1, 2, 3, 4, 5]
    train(make(tmp_path), 4, 6, resumed=3).close()
    assert path.read_text().startswith(before + torn + "\n")  # appended, never rewritten
    assert [(row["iteration"], row["lm loss"]) for row in untimed(path)] == [
        (i, loss(i)) for i in range(1, 7)
    ]


def test_a_restart_is_marked_and_drops_what_was_never_reached_again(tmp_path):
    train(make(tmp_path), 1, 9).close()
    train(make(tmp_path), 5, 7, resumed=4).close()
    rows = untimed(tmp_path)
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert [row["iteration"] for row in rows if "resumed-from-iteration" in row] == [5] and rows[4][
        "resumed-from-iteration"
    ] == 4
    train(make(tmp_path), 1, 2).close()  # killed before its first checkpoint, started again
    assert [(row["iteration"], row.get("resumed-from-iteration")) for row in untimed(tmp_path)] == [
        (1, 0),
        (2, None),
    ]
    # "the last row of an iteration" holds all of it
    for last in {row["iteration"]: row for row in raw(tmp_path / "metrics.jsonl")}.values():
        assert "lm loss" in last and ("lm loss validation" in last) == (last["iteration"] % 3 == 0)


def test_unreadable_metrics_are_named(tmp_path):
    with pytest.raises(ValueError, match="metrics.jsonl: no such file.*--metrics-file"):
        untimed(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("iteration,loss\n1,2\n")
    with pytest.raises(ValueError, match="not a metrics file: none of its lines"):
        untimed(tmp_path)


# ---- nothing stops training


@pytest.mark.parametrize("kind", ["long", "pipe"])
def test_metrics_that_are_no_file_are_one_error(tmp_path, kind):
    if kind == "pipe":
        os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(UserError, match="no such file"):
        read_metrics(tmp_path if kind == "pipe" else "x" * 5000)


def test_a_failing_backend_is_switched_off_once_and_the_others_go_on(tmp_path, log_lines):
    (tmp_path / "file").write_text("")
    config = make(tmp_path, tensorboard_dir=str(tmp_path / "file" / "below"))
    tracker = Tracker(config, {}, 0)
    assert (
        len(log_lines) == 1
        and "TensorBoard is off" in log_lines[0]
        and "NotADirectoryError" in log_lines[0]
        and "--tensorboard-dir" in log_lines[0]
    )
    tracker.log(1, {"lm loss": 1.0})
    os.close(tracker._backends["metrics.jsonl"]._file.fd)  # as a lost disk would
    tracker.log(2, {"lm loss": 1.0})
    tracker.log(3, {"lm loss": 1.0})
    tracker.close()
    assert len(log_lines) == 2
    assert "metrics.jsonl is off" in log_lines[1] and "OSError" in log_lines[1]
    assert [row["iteration"] for row in untimed(tmp_path)] == [1]


def test_missing_wandb_package_is_one_warning(tmp_path, monkeypatch, log_lines):
    monkeypatch.setitem(sys.modules, "wandb", None)
    Tracker(make(tmp_path, wandb_project="p"), {}, 0).close()
    assert len(log_lines) == 1 and "pip install 'wandb>=" in log_lines[0]


# ---- TensorBoard


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def test_tensorboard_holds_the_same_under_the_same_names(tmp_path):
    config = make(tmp_path / "run", tensorboard_dir=str(tmp_path / "tb"))
    train(config, 1, 9).close()
    train(config, 5, 7, resumed=4).close()
    read = scalars(tmp_path / "tb")
    rows = untimed(tmp_path / "run")
    by_samples = {"lm loss vs samples", "lm loss validation vs samples"}
    assert set(read) == (set().union(*rows) - {"iteration"}) | by_samples
    for tag, points in read.items():
        name, step = (
            tag.removesuffix(" vs samples"),
            "consumed_samples" if tag in by_samples else "iteration",
        )
        expected = [(row[step], pytest.approx(row[name], rel=1e-6)) for row in rows if name in row]
        # what the first attempt wrote beyond the checkpoint does not come twice
        assert points == expected, tag


def test_what_comes_late_joins_the_last_row(tmp_path):
    """A save of iteration 2 that ended after iteration 3: no row of 2 without a loss comes last."""
    tracker = train(make(tmp_path), 1, 3)
    tracker.log(2, save_metrics(size=1, seconds=2.0, stall=1.0))
    tracker.close()
    rows = untimed(tmp_path)
    assert [row["iteration"] for row in rows] == [1, 2, 3] and all("lm loss" in row for row in rows)
    assert ["save-checkpoint-seconds" in row for row in rows] == [
        False,
        False,
        True,
    ] and "lm loss validation" in rows[2]


def test_tensorboard_interval_thins_training_rows_only(tmp_path):
    tracker = train(make(None, tensorboard_dir=str(tmp_path), tensorboard_log_interval=4), 1, 9)
    tracker.log(9, save_metrics(size=1, seconds=2.0, stall=1.0))
    tracker.close()
    read = scalars(tmp_path)
    assert read["save-checkpoint-seconds"] == [(9, 2.0)]
    assert [step for step, _ in read["lm loss"]] == [4, 8] and [
        step for step, _ in read["lm loss validation"]
    ] == [3, 6, 9]


# ---- wandb


def wandb_read(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any], set[str]]:
    """All history rows of the offline runs below `folder` in order of their start, the stored
    configuration, the run ids.
    """
    rows, config, ids = [], {}, set()
    for path in sorted(
        folder.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime_ns
    ):
        ids.add(path.stem.removeprefix("run-"))
        for record in wandb_records(path):
            if record.WhichOneof("record_type") == "history":
                rows.append(
                    {
                        (item.key or "/".join(item.nested_key)): json.loads(item.value_json)
                        for item in record.history.item
                    }
                )
            elif record.WhichOneof("record_type") == "run":
                config.update(
                    {
                        item.key: json.loads(item.value_json)
                        for item in record.run.config.update
                        if item.key != "_wandb"
                    }
                )
    return rows, config, ids


IN_SECTIONS = {
    "iteration": "iteration",
    "samples": "consumed_samples",
    "tokens": "consumed-tokens",
    "train/lm loss": "lm loss",
    "validation/lm loss validation": "lm loss validation",
    "health/resumed-from-iteration": "resumed-from-iteration",
}


def by_iteration(rows: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Rows under the names of metrics.jsonl."""
    merged: dict[int, dict[str, Any]] = {}
    for row in rows:
        if "iteration" in row:
            own = {IN_SECTIONS[name]: row[name] for name in row if not name.startswith("_")}
            merged.setdefault(row["iteration"], {}).update(own)
    return merged


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_API_KEY", SECRET)


def in_a_process(
    save: Path, first: int, last: int, resumed: int, kill: bool
) -> subprocess.CompletedProcess:
    """Log iterations first..last from a separate process, which then kills itself with SIGKILL or
    ends.
    """
    code = (
        f"import os, sys, time; sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]\n"
        "from pathlib import Path; from test_tracking import make, train\n"
        f"tracker = train(make(Path({str(save)!r}), wandb_project='p'), {first}, {last}, "
        f"{resumed})\n"
        + ("time.sleep(1.5); os.kill(os.getpid(), 9)" if kill else "tracker.close()")
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)


def test_wandb_offline_goes_on_with_the_same_run_after_a_kill(tmp_path, offline):
    killed = in_a_process(tmp_path, 1, 7, 0, kill=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    # the last checkpoint was at 4: iterations 5-7 are replayed
    again = in_a_process(tmp_path, 5, 8, 4, kill=False)
    assert again.returncode == 0, again.stderr
    rows, config, ids = wandb_read(tmp_path)
    assert ids == {(tmp_path / "wandb_run_id.txt").read_text().strip()}
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 2
    assert config == {"model": {"num_layers": 2}}
    assert by_iteration(rows) == {row["iteration"]: row for row in untimed(tmp_path)}
    # logged twice (training, validation), replayed twice
    assert [row["iteration"] for row in rows if "iteration" in row].count(6) == 4
    assert [row for row in rows if "health/resumed-from-iteration" in row][0]["iteration"] == 5


def test_every_row_of_wandb_has_three_axes(tmp_path, offline):
    """Late rows and rows that --tensorboard-log-interval leaves alone have those of their
    iteration; a start that logs nothing else first has the checkpoint's.
    """
    config = make(None, wandb_project="p", wandb_save_dir=str(tmp_path), tensorboard_log_interval=4)
    tracker = Tracker(config, {}, 4, resumed_samples=32)
    tracker.log(4, save_metrics(size=1, seconds=2.0, stall=1.0))
    for iteration in range(5, 8):
        consumed = {"consumed_samples": 8 * iteration, "consumed-tokens": 128 * iteration}
        tracker.log(iteration, {**consumed, "lm loss": loss(iteration), "grad-norm/layers.0": 1.0})
    tracker.log(6, save_metrics(size=1, seconds=2.0, stall=1.0))
    tracker.log(8, {"consumed_samples": 64, "consumed-tokens": 1024, "grad-norm/layers.0": 1.0})
    tracker.close()
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    axes = [
        record.metric
        for record in wandb_records(path)
        if record.WhichOneof("record_type") == "metric"
    ]
    assert any(metric.glob_name == "*" and metric.step_metric == "iteration" for metric in axes)
    assert {metric.name for metric in axes if metric.options.hidden} == {
        "iteration",
        "samples",
        "tokens",
    }
    rows, _, _ = wandb_read(tmp_path)
    assert [(row["iteration"], row["samples"], row["tokens"]) for row in rows] == [
        (4, 32, 512),
        (7, 56, 896),
        (8, 64, 1024),
    ]
    assert rows[0]["speed/save-checkpoint-seconds"] == 2.0 and rows[2]["grad-norm/layers.0"] == 1.0


def test_pictures_are_the_first_and_the_last(tmp_path, offline):
    drawn = []

    def draw() -> str:
        drawn.append(f"<svg><!-- {len(drawn)} --></svg>")
        return drawn[-1]

    config = make(None, wandb_project="p", wandb_save_dir=str(tmp_path))
    tracker = Tracker(config, {}, 0)
    for iteration in range(1, 5):
        tracker.log(iteration, {"consumed_samples": iteration, "lm loss": 1.0})
        tracker.show("pipeline-timeline", draw, last=iteration == 4)
    tracker.close()
    rows = [row for row in wandb_read(tmp_path)[0] if "speed/pipeline-timeline/_type" in row]
    assert [(row["iteration"], row["samples"]) for row in rows] == [(1, 1), (4, 4)]
    (folder,) = tmp_path.glob("wandb/offline-run-*/files")
    kept = [(folder / row["speed/pipeline-timeline/path"]).read_text() for row in rows]
    assert kept == drawn and len(kept) == 2
    tracker = Tracker(make(None, metrics_file=str(tmp_path / "m.jsonl")), {}, 0)
    tracker.show("pipeline-timeline", draw, last=True)  # without wandb nothing is drawn
    tracker.close()
    assert len(drawn) == 2


def test_no_secret_is_stored_anywhere(tmp_path, offline):
    stored = {
        "config": {
            "paths": [f"s3://{SECRET}@bucket"],
            "wandb_api_key": "another",
            "API-KEY": "another",
            "tokens": 3,
            "token": None,
        }
    }
    tracker = Tracker(make(tmp_path, wandb_project="p"), stored, 0)
    tracker.log(1, {"lm loss": 1.0})
    tracker.close()
    files = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()]
    assert any(path.suffix == ".wandb" for path in files)
    assert [
        path
        for path in files
        if SECRET.encode() in path.read_bytes() or b"another" in path.read_bytes()
    ] == []
    assert json.loads((tmp_path / "metrics.config.json").read_text()) == {
        "config": {
            "paths": ["s3://***@bucket"],
            "wandb_api_key": "***",
            "API-KEY": "***",
            "tokens": 3,
            "token": None,
        }
    }


@pytest.mark.parametrize("key, reason", [(None, "no key"), (SECRET, "cannot be reached")])
@pytest.mark.default("None-no key")
def test_without_a_key_or_a_network_wandb_records_offline(tmp_path, key, reason):
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]\n"
        "import megatron.observe.tracking as tracking; tracking._WANDB_INIT_SECONDS = 1\n"
        "from pathlib import Path; from test_tracking import make, train\n"
        "from megatron.distributed.logs import job_log\n"
        f"with job_log(): train(make(Path({str(tmp_path)!r}), wandb_project='p'), 1, 5).close()"
    )
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("WANDB_")
    }
    environment |= {
        "HOME": str(tmp_path / "home"),
        "WANDB_BASE_URL": "http://127.0.0.1:9",
        "WANDB_SILENT": "true",
    }
    if key is not None:
        environment["WANDB_API_KEY"] = key
    (tmp_path / "home").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.count("warning:") == 1
        and reason in done.stdout
        and "records offline" in done.stdout
    )
    rows, _, _ = wandb_read(tmp_path)
    assert (
        by_iteration(rows) == {row["iteration"]: row for row in untimed(tmp_path)}
        and len(untimed(tmp_path)) == 5
    )


def test_the_run_id_is_made_once(tmp_path):
    path = tmp_path / "save" / "wandb_run_id.txt"
    first = persistent_run_id(path)
    assert len(first) == 8 and persistent_run_id(path) == first
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    # here: the processes of other tests import this file without the folder of tests
    from distributed.pool import warm_context

    # Several starts at the same time agree.
    with ProcessPoolExecutor(4, mp_context=warm_context()) as starts:
        assert len(set(starts.map(persistent_run_id, [tmp_path / "race" / "id"] * 4))) == 1
