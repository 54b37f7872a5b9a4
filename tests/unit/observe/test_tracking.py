"""metrics.jsonl, TensorBoard and a real offline wandb, each read back from disk and compared."""

from __future__ import annotations

import json
import math
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.tools._report.metrics_file import read_metrics
from unit.observe.wandb_files import history, records, run_files, values

from megatron.config.errors import UserError
from megatron.config.groups import CheckpointConfig, Config, DataConfig, LoggingConfig
from megatron.observe.metrics import is_measured, save_metrics
from megatron.observe.tracking import Tracker

HERE = Path(__file__).resolve().parent
FOLDERS = HERE.parents[2], HERE.parents[1], HERE


def make(save: Path | None, **logging: Any) -> Config:
    return Config(
        data=DataConfig(seq_length=16),
        checkpoint=CheckpointConfig(save=None if save is None else str(save)),
        logging=LoggingConfig(**logging),
    )


def loss(iteration: int) -> float:
    return 10 / iteration


def consumed(iteration: int) -> dict[str, int]:
    return {"consumed_samples": 8 * iteration, "consumed-tokens": 128 * iteration}


SAVED = save_metrics(size=1, seconds=2.0, stall=1.0)


def train(config: Config, first: int, last: int, resumed: int = 0) -> Tracker:
    tracker = Tracker(config, {"model": {"num_layers": 2}}, resumed, resumed_samples=8 * resumed)
    for iteration in range(first, last + 1):
        tracker.log(iteration, {**consumed(iteration), "lm loss": loss(iteration)})
        if iteration % 3 == 0:
            validation = {"lm loss validation": 2 * loss(iteration)}
            tracker.log(iteration, consumed(iteration) | validation)
    return tracker


def without_time(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: row[name] for name in row if name != "timestamp"} for row in rows]


def raw(path: Path) -> list[dict[str, Any]]:
    """The rows of a file without their time."""

    def refuse(word: str) -> None:
        pytest.fail(f"{word} is not JSON")

    rows = path.read_text().splitlines()
    return without_time([json.loads(row, parse_constant=refuse) for row in rows])


def untimed(path: Path) -> list[dict[str, float]]:
    return without_time(read_metrics(path))


# ---- metrics.jsonl


def test_rows_and_where_they_go(tmp_path):
    train(make(tmp_path / "run"), 1, 3).close()
    train(make(None, metrics_file=str(tmp_path / "other" / "m.jsonl")), 1, 3).close()
    rows = [{"iteration": i, **consumed(i), "lm loss": loss(i)} for i in (1, 2, 3)]
    last = rows[-1] | {"lm loss validation": 20 / 3}
    for path in (tmp_path / "run/metrics.jsonl", tmp_path / "other/m.jsonl"):
        assert raw(path) == [*rows, last] and untimed(path) == [*rows[:2], last]
    stored = json.loads((tmp_path / "other" / "m.config.json").read_text())
    assert stored == {"model": {"num_layers": 2}} and list(tmp_path.glob("**/*.tmp")) == []


def test_numbers_come_back_bit_for_bit(tmp_path, monkeypatch):
    """Also those of NumPy, which json does not write; the time is when the row was written."""
    monkeypatch.setattr("time.time", lambda: 1.25)
    values = [0.1 + 0.2, math.nan, 2.0**32, -math.inf, 5e-324, np.float32(0.5), np.int64(3)]
    tracker = Tracker(make(tmp_path), {}, 0)
    tracker.log(1, {f"x{k}": value for k, value in enumerate(values)})
    tracker.close()
    assert raw(tmp_path / "metrics.jsonl")[0]["x1"] == "NaN"
    (row,) = read_metrics(tmp_path)
    found = [row[f"x{k}"] for k in range(len(values))]
    assert struct.pack("7d", *found) == struct.pack("7d", *values)
    assert row["timestamp"] == 1.25 and is_measured("timestamp")  # no comparison of runs reads it


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
    found = {row["iteration"]: row["lm loss"] for row in untimed(path)}
    assert found == {i: loss(i) for i in range(1, 7)}


def test_a_restart_is_marked_and_drops_what_was_never_reached_again(tmp_path):
    def marks() -> list[tuple[int, int | None]]:
        return [(row["iteration"], row.get("resumed-from-iteration")) for row in untimed(tmp_path)]

    train(make(tmp_path), 1, 9).close()
    train(make(tmp_path), 5, 7, resumed=4).close()
    assert marks() == [*((i, None) for i in (1, 2, 3, 4)), (5, 4), (6, None), (7, None)]
    train(make(tmp_path), 1, 2).close()  # killed before its first checkpoint, started again
    assert marks() == [(1, 0), (2, None)]
    # "the last row of an iteration" holds all of it
    for last in {row["iteration"]: row for row in raw(tmp_path / "metrics.jsonl")}.values():
        assert "lm loss" in last and ("lm loss validation" in last) == (last["iteration"] % 3 == 0)


def test_unreadable_metrics_are_named(tmp_path):
    for path in (tmp_path, "x" * 5000):
        with pytest.raises(UserError, match="no such file.*--metrics-file"):
            read_metrics(path)
    (tmp_path / "metrics.jsonl").write_text("iteration,loss\n1,2\n")
    with pytest.raises(UserError, match="not a metrics file: none of its lines"):
        read_metrics(tmp_path)


# ---- nothing stops training


def test_a_failing_backend_is_switched_off_once_and_the_others_go_on(tmp_path, log_lines):
    (tmp_path / "file").write_text("")
    config = make(tmp_path, tensorboard_dir=str(tmp_path / "file" / "below"))
    tracker = Tracker(config, {}, 0)
    (first,) = log_lines
    for words in ("TensorBoard is off", "NotADirectoryError", "--tensorboard-dir"):
        assert words in first
    tracker.log(1, {"lm loss": 1.0})
    os.close(tracker._backends["metrics.jsonl"]._file.fd)  # as a lost disk would
    tracker.log(2, {"lm loss": 1.0})
    tracker.log(3, {"lm loss": 1.0})
    tracker.close()
    _, second = log_lines
    assert "metrics.jsonl is off" in second and "OSError" in second
    assert [row["iteration"] for row in untimed(tmp_path)] == [1]


def test_missing_wandb_package_is_one_warning(tmp_path, monkeypatch, log_lines):
    monkeypatch.setitem(sys.modules, "wandb", None)
    Tracker(make(tmp_path, wandb_project="p"), {}, 0).close()
    assert len(log_lines) == 1 and "pip install 'wandb>=" in log_lines[0]


# ---- TensorBoard


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def test_tensorboard_holds_the_same_under_the_same_names(tmp_path):
    config = make(tmp_path / "run", tensorboard_dir=str(tmp_path / "tb"))
    train(config, 1, 9).close()
    train(config, 5, 7, resumed=4).close()
    read, rows = scalars(tmp_path / "tb"), untimed(tmp_path / "run")
    assert set(read) == set().union(*rows) - {"iteration"}
    for name, points in read.items():
        expected = [
            (row["iteration"], pytest.approx(row[name], rel=1e-6)) for row in rows if name in row
        ]
        # what the first attempt wrote beyond the checkpoint does not come twice
        assert points == expected, name


def test_what_comes_late_joins_the_last_row(tmp_path):
    """A save of iteration 2 that ended after iteration 3: no row of 2 without a loss comes last."""
    tracker = train(make(tmp_path), 1, 3)
    tracker.log(2, SAVED)
    tracker.close()
    rows = untimed(tmp_path)
    assert [row["iteration"] for row in rows] == [1, 2, 3] and all("lm loss" in row for row in rows)
    assert ["save-checkpoint-seconds" in row for row in rows] == [False, False, True]
    assert "lm loss validation" in rows[2]


def test_tensorboard_interval_thins_training_rows_only(tmp_path):
    tracker = train(make(None, tensorboard_dir=str(tmp_path), tensorboard_log_interval=4), 1, 9)
    tracker.log(9, SAVED)
    tracker.close()
    read = scalars(tmp_path)
    assert read["save-checkpoint-seconds"] == [(9, 2.0)]
    assert [step for step, _ in read["lm loss"]] == [4, 8]
    assert [step for step, _ in read["lm loss validation"]] == [3, 6, 9]


# ---- wandb


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


def python(code: str, **settings: Any) -> subprocess.CompletedProcess:
    """A separate process that runs code with the helpers of this file."""
    begin = (
        f"import os, sys, time; sys.path[:0] = {[*map(str, FOLDERS)]!r}\n"
        "from pathlib import Path; from test_tracking import make, train\n"
    )
    command = [sys.executable, "-c", begin + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **settings)


def test_wandb_offline_continues_the_same_run_after_a_kill(tmp_path, offline):
    config = f"make(Path({str(tmp_path)!r}), wandb_project='p')"
    killed = python(f"train({config}, 1, 7, 0); time.sleep(1.5); os.kill(os.getpid(), 9)")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    # the last checkpoint was at 4: iterations 5-7 are replayed
    again = python(f"train({config}, 5, 8, 4).close()")
    assert again.returncode == 0, again.stderr
    rows, files = history(tmp_path), run_files(tmp_path)
    stored = [values(run.config.update) for run in records(tmp_path, "run")]
    identity = (tmp_path / "wandb_run_id.txt").read_text().strip()
    assert [path.stem for path in files] == [f"run-{identity}"] * 2
    assert {"num_layers": 2} in [each.get("model") for each in stored]
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
    tracker.log(4, SAVED)
    for iteration in range(5, 8):
        more = {"lm loss": loss(iteration), "grad-norm/layers.0": 1.0}
        tracker.log(iteration, consumed(iteration) | more)
    tracker.log(6, SAVED)
    tracker.log(8, consumed(8) | {"grad-norm/layers.0": 1.0})
    tracker.close()
    axes = list(records(tmp_path, "metric"))
    assert any(metric.glob_name == "*" and metric.step_metric == "iteration" for metric in axes)
    hidden = {metric.name for metric in axes if metric.options.hidden}
    assert hidden == {"iteration", "samples", "tokens"}
    rows = history(tmp_path)
    found = [(row["iteration"], row["samples"], row["tokens"]) for row in rows]
    assert found == [(4, 32, 512), (7, 56, 896), (8, 64, 1024)]
    assert rows[0]["speed/save-checkpoint-seconds"] == 2.0 and rows[2]["grad-norm/layers.0"] == 1.0


@pytest.mark.parametrize("code", [0, 1])
def test_wandb_stores_names_and_whether_a_run_failed(tmp_path, offline, code):
    names = {"wandb_project": "p", "wandb_group": "study", "wandb_exp_name": "row"}
    tracker = train(make(tmp_path, **names), 1, 1)
    tracker.exit_code = code
    tracker.close()
    (run,) = records(tmp_path, "run")
    assert (run.project, run.run_group, run.display_name) == tuple(names.values())
    assert [record.exit_code for record in records(tmp_path, "exit")] == [code]


@pytest.mark.parametrize("key, reason", [(None, "no key"), ("0" * 40, "cannot be reached")])
@pytest.mark.default("None-no key")
def test_without_a_key_or_a_network_wandb_records_offline(tmp_path, key, reason):
    code = (
        "import megatron.observe.tracking as tracking; tracking._WANDB_INIT_SECONDS = 1\n"
        "from megatron.distributed.logs import job_log\n"
        f"with job_log(): train(make(Path({str(tmp_path)!r}), wandb_project='p'), 1, 5).close()"
    )
    environment = {name: os.environ[name] for name in os.environ if not name.startswith("WANDB_")}
    environment |= {"HOME": str(tmp_path / "home"), "WANDB_BASE_URL": "http://127.0.0.1:9"}
    environment |= {"WANDB_SILENT": "true"} | ({} if key is None else {"WANDB_API_KEY": key})
    (tmp_path / "home").mkdir()
    done = python(code, env=environment, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("warning:") == 1
    assert reason in done.stdout and "records offline" in done.stdout
    rows = untimed(tmp_path)
    assert by_iteration(history(tmp_path)) == {row["iteration"]: row for row in rows}
    assert len(rows) == 5
