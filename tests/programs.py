"""Runs of pretrain_gpt.py and of other scripts in processes forked off a warm server: starting
Python and importing torch, seconds each time, happens once a session.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from distributed.pool import warm_context
from megatron.tools._advisor import PlanningAdvisor

import pretrain_gpt
from megatron.training.advisor import Forecast


def without_plan() -> contextlib.AbstractContextManager:
    """Runs in the block print no plan, which takes longer than a small run; dry runs do."""
    forecast = PlanningAdvisor.forecast

    def of_dry_runs(*args: Any) -> Forecast:
        planned_for = args[5]
        return Forecast() if planned_for is None else forecast(*args)

    return mock.patch.object(PlanningAdvisor, "forecast", of_dry_runs)


def rank_environment(rank: int, ranks: int, port: int, **more: str) -> dict[str, str]:
    """The environment of a rank on this host, without what other launchers set."""
    foreign = "SLURM_", "TORCHELASTIC_"
    inherited = {name: os.environ[name] for name in os.environ if not name.startswith(foreign)}
    return {
        **inherited,
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "CUDA_VISIBLE_DEVICES": "",
        **more,
    }


def _train(flags: list[str], log: str) -> None:
    """The process of a run of pretrain_gpt.py."""
    with _process(log):
        raise SystemExit(pretrain_gpt.main(flags))


def _script(words: list[str], folder: str, log: str) -> None:
    """The process of another script."""
    os.chdir(folder)
    sys.argv[:], sys.path[0] = words, str(Path(words[0]).parent)
    with _process(log):
        runpy.run_path(words[0], run_name="__main__")


@contextlib.contextmanager
def _process(log: str) -> Iterator[None]:
    """This process writes to `log`, with one thread of torch and without plans."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    torch.set_num_threads(1)
    with without_plan():
        yield


def output_of(
    command: str | Sequence[str | Path], folder: Path, environment: Mapping[str, str] | None = None
) -> str:
    """Standard output of a command that must succeed; text is for the shell."""
    words = ["bash", "-c", command] if isinstance(command, str) else command
    done = subprocess.run(
        words, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    ends = f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert done.returncode == 0, f"{command}\nexit code {done.returncode}\n{ends}"
    return done.stdout


def run_script(words: list[str], folder: Path) -> str:
    """The output of `python WORDS` in a folder, which must succeed."""
    log = folder / "script.log"
    process = warm_context().Process(target=_script, args=(words, str(folder), str(log)))
    process.start()
    process.join()
    shown = log.read_text()
    assert process.exitcode == 0, f"{words}\n{shown[-8000:]}"
    return shown


class Program:
    """A running `pretrain_gpt.py FLAGS`. Programs may share a log."""

    def __init__(self, flags: list[str], log: Path) -> None:
        self.log = log
        self.process = warm_context().Process(target=_train, args=(flags, str(log)))
        self.process.start()

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self.log.read_text() if self.log.exists() else ""

    def is_alive(self) -> bool:
        return self.process.is_alive()

    def kill(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.process.pid, number)

    def end(self, seconds: float = 120.0) -> int:
        """Its exit code, negative for a signal. Kills it when it does not end in time."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            raise AssertionError(f"the run had not ended after {seconds:g} s:\n{self.output}")
        return self.process.exitcode
