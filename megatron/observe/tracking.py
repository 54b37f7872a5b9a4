"""Writes metrics to metrics.jsonl, TensorBoard and wandb, under the same names, which wandb has in
sections. A tracker that fails never stops training.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from megatron.config.groups import Config
from megatron.observe.json_lines import JsonLines, write_whole
from megatron.observe.metrics import AXES, Metrics, wandb_name

logger = logging.getLogger(__name__)

RESUMED = "resumed-from-iteration"
# begin of names whose rows TensorBoard and wandb get whatever the interval
_RARE = ("lm loss validation", "lm loss test", "save-checkpoint-seconds")
_WANDB_INIT_SECONDS = 30  # then the run continues offline
_WANDB_FINISH_SECONDS = 120  # then `wandb sync` must upload the rest
_WANDB_FLUSH_SECONDS = 1  # lost in a kill; the default is 15


class Tracker:
    """Writes the metrics of a run.

    `config` is resolved. `run_config` (nested, of JSON values) is stored; None on the ranks that
    write nothing. `resumed_iteration` and `resumed_samples`: of the loaded checkpoint, else 0.
    `notes`: lines for the banner with the places of the files. An exception of a backend is logged
    as one warning and switches that backend off.
    """

    def __init__(
        self,
        config: Config,
        run_config: dict[str, Any] | None,
        resumed_iteration: int,
        resumed_samples: int = 0,
    ) -> None:
        self.exit_code = 0  # with another one wandb shows the run as failed
        self._iteration = 0
        self._interval = config.logging.tensorboard_log_interval
        self._reached: Metrics = {
            "consumed_samples": resumed_samples,
            "consumed-tokens": resumed_samples * config.data.seq_length,
        }
        self._backends: dict[str, _Jsonl | _TensorBoard | _Wandb] = {}
        self.notes: list[str] = []
        if run_config is None:
            return
        path = metrics_file(config)
        if path is not None:
            self._open("metrics.jsonl", _Jsonl, path, run_config, resumed_iteration)
        if config.logging.tensorboard_dir is not None:
            self._open("TensorBoard", _TensorBoard, config, resumed_iteration)
        if config.logging.wandb_project is not None:
            self._open("wandb", _Wandb, config, run_config, resumed_iteration)

    def log(self, iteration: int, metrics: Metrics) -> None:
        """Write `metrics` of an iteration, which may have several rows (training, validation).

        TensorBoard and wandb get training rows at multiples of --tensorboard-log-interval, and
        every evaluation and save. A late row, as of a background save, joins the iteration logged
        last: iterations never decrease.
        """
        iteration = self._iteration = max(iteration, self._iteration)
        is_rare = any(name.startswith(_RARE) for name in metrics)
        is_thinned = iteration % self._interval and not is_rare
        self._reached |= {name: metrics[name] for name in AXES if name in metrics}
        for name, backend in list(self._backends.items()):
            if is_thinned and name != "metrics.jsonl":
                continue
            with self._guarded(name):
                backend.write(iteration, self._reached | metrics if name == "wandb" else metrics)

    def summarise(self, figures: Callable[[], Metrics]) -> None:
        """Replace figures of the whole run in wandb's summary."""
        backend = self._backends.get("wandb")
        if isinstance(backend, _Wandb):
            with self._guarded("wandb"):
                backend.run.summary.update(figures())

    def close(self) -> None:
        for name, backend in list(self._backends.items()):
            with self._guarded(name):
                backend.close(self.exit_code)
        self._backends.clear()

    def _open(self, name: str, make: Callable[..., Any], *arguments: Any) -> None:
        with self._guarded(name):
            self._backends[name] = backend = make(*arguments)
            self.notes.append(f"{name}: {backend.where}")

    @contextlib.contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a tracker must not stop the run
            self._backends.pop(name, None)
            logger.warning(
                f"{name} is off for the rest of this run; training continues. "
                f"Cause: {type(error).__name__}: {error}. Fix: {_FIX[name]}."
            )


_FIX = {
    "metrics.jsonl": (
        "make the folder writable and free space on its disk, or choose another with --metrics-file"
    ),
    "TensorBoard": "pip install tensorboard and make --tensorboard-dir writable, or drop that flag",
    "wandb": (
        "pip install 'wandb>=0.31', check its folder and the network, set "
        "WANDB_MODE=offline, or drop --wandb-project"
    ),
}


class _Jsonl:
    """metrics.jsonl, with the configuration of the run in a second file."""

    def __init__(self, path: Path, run_config: dict[str, Any], resumed_iteration: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = JsonLines(path)
        # without a checkpoint, an earlier attempt's rows make this a restart from iteration 0
        restarted = resumed_iteration or not self._file.was_empty
        self._row: Metrics = {RESUMED: resumed_iteration} if restarted else {}
        write_whole(config_file(path), json.dumps(run_config, indent=2, default=str) + "\n")
        self.where = str(path)

    def write(self, iteration: int, metrics: Metrics) -> None:
        # a second row of an iteration repeats the first: the last one is always complete
        before = self._row if self._row.get("iteration", iteration) == iteration else {}
        self._row = {"iteration": iteration, **before, **metrics}
        row = {**self._row, "timestamp": round(time.time(), 3)}
        self._file.append({name: _json_number(value) for name, value in row.items()})

    def close(self, _code: int) -> None:
        self._file.close()


class _TensorBoard:
    """A resumed run replaces the points of the previous attempt beyond its checkpoint."""

    def __init__(self, config: Config, resumed_iteration: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.where = config.logging.tensorboard_dir
        self._writer = SummaryWriter(self.where, purge_step=resumed_iteration + 1)
        self._iteration: int | None = None  # of the last row
        self._mark = {RESUMED: resumed_iteration} if resumed_iteration else {}

    def write(self, iteration: int, metrics: Metrics) -> None:
        for name, value in {**self._mark, **metrics}.items():
            if name in AXES and iteration == self._iteration:
                continue  # an evaluation's row repeats them
            self._writer.add_scalar(name, value, iteration)
        self._mark = {}
        self._iteration = iteration
        self._writer.flush()

    def close(self, _code: int) -> None:
        self._writer.close()


class _Wandb:
    """One wandb run for all restarts of a job. Its x axis is `iteration`: wandb's step can only
    grow, and a restart repeats iterations.
    """

    def __init__(self, config: Config, run_config: dict[str, Any], resumed_iteration: int) -> None:
        import wandb

        save, logging_flags = config.checkpoint.save, config.logging
        identity = secrets.token_hex(4)
        if save is not None:
            identity = persistent_run_id(Path(save) / "wandb_run_id.txt")
        # wandb makes its own folder `wandb` in it
        folder = Path(logging_flags.wandb_save_dir or save or ".")
        folder.mkdir(parents=True, exist_ok=True)
        start = partial(
            wandb.init,
            project=logging_flags.wandb_project,
            entity=logging_flags.wandb_entity,
            name=logging_flags.wandb_exp_name,
            group=logging_flags.wandb_group,
            id=identity,
            resume="allow",
            dir=folder,
            config=run_config,
            settings=wandb.Settings(
                init_timeout=_WANDB_INIT_SECONDS,
                finish_timeout=_WANDB_FINISH_SECONDS,
                x_transaction_log_flush_interval=_WANDB_FLUSH_SECONDS,
            ),
        )
        mode: Any = wandb.setup().settings.mode
        # no prompt: the job would wait
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            logger.warning(
                "wandb has no key and records offline; set WANDB_API_KEY or run "
                "`wandb login` before the next start, `wandb sync` uploads."
            )
            mode = "offline"
        try:
            self.run = start(mode=mode)
        except Exception as error:
            if mode != "online":
                raise
            logger.warning(
                "wandb cannot be reached and records offline "
                f"({type(error).__name__}: {error}); `wandb sync` uploads later."
            )
            wandb.teardown()  # else its service still holds the run id
            self.run = start(mode="offline")
        for axis in ("iteration", *AXES.values()):
            self.run.define_metric(axis, hidden=True)  # no separate chart
        self.run.define_metric("*", step_metric="iteration")
        self._mark = {RESUMED: resumed_iteration} if resumed_iteration else {}
        offline = " (offline)" if self.run.offline else ""
        self.where = f"run {identity}{offline} in {folder / 'wandb'}"

    def write(self, iteration: int, metrics: Metrics) -> None:
        row = {wandb_name(name): value for name, value in {**self._mark, **metrics}.items()}
        self.run.log({"iteration": iteration, **row})
        self._mark = {}

    def close(self, code: int) -> None:
        import wandb

        self.run.finish(exit_code=code)
        wandb.teardown()  # finish alone may return before its service has written the file


def metrics_file(config: Config) -> Path | None:
    """The path of metrics.jsonl: --metrics-file, else in --save, else None."""
    if config.logging.metrics_file is not None:
        return Path(config.logging.metrics_file)
    save = config.checkpoint.save
    return None if save is None else Path(save) / "metrics.jsonl"


def config_file(metrics: Path) -> Path:
    """The configuration file of a metrics file: metrics.jsonl -> metrics.config.json."""
    return metrics.with_suffix(".config.json")


def persistent_run_id(path: Path) -> str:
    """The id in `path`, which all starts of a job share: made by the first one. The lease of --save
    keeps a second start away in the meantime.
    """
    if not path.exists():
        write_whole(path, secrets.token_hex(4) + "\n")
    return path.read_text(encoding="utf-8").strip()


def _json_number(value: float) -> float | str:
    """NaN and infinities, which JSON lacks, as strings that `float()` reads back."""
    value = value if isinstance(value, int) else float(value)  # JSON lacks NumPy's types
    return value if math.isfinite(value) else json.dumps(value)
