"""A process of each rank that writes shards and commits checkpoints while training continues:
without torch, without a lock shared with the trainer.

It copies a shard from a file that the trainer holds open: one of the local tier, or memory (a
memfd), which is filled in waves where it is smaller than the shard. Commands and answers are JSON.
The process ignores the signals that end a job, for the trainer waits for it, and it dies with the
trainer.
"""

from __future__ import annotations

import ctypes
import json
import logging
import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megatron.checkpoint import manifest as m
from megatron.checkpoint.commit import Policy, commit, not_saved, retire
from megatron.checkpoint.files import split_header, write_shard_file
from megatron.checkpoint.manifest import CheckpointError, shard_file
from megatron.config.input_files import JsonObject

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
PDEATHSIG = 1  # prctl: a signal for when the parent dies
NICE = 10  # training comes first
DONE: JsonObject = {"result": None}


class Background:
    """The trainer's end: the process does one thing at a time. What it logs is logged here.

    `memory`: the memfd that it may read.
    """

    def __init__(self) -> None:
        self.memory = os.memfd_create("checkpoint", os.MFD_CLOEXEC)
        self.process: subprocess.Popen | None = None
        self.pipe: Connection | None = None
        # the result or the error of the last command, None while it is being carried out
        self.outcome: JsonObject | Exception | None = DONE
        self.explain: Callable[[Exception], str] = str  # the message when the process dies

    def start(self) -> None:
        """Start the process unless it runs; return when it is safe from signals and tied to this
        one.
        """
        if self.process is not None and self.process.poll() is None:
            return
        self.close()
        self.pipe, theirs = multiprocessing.Pipe()
        with theirs:
            program = (
                f"import sys; sys.path.insert(0, {str(ROOT)!r}); from "
                f"megatron.checkpoint.background import serve; serve({theirs.fileno()})"
            )
            self.process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                pass_fds=(self.memory, theirs.fileno()),
            )
        self.outcome = None
        self.result()

    def close(self) -> None:
        """Kill the process, whatever it is doing."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.pipe.close()
        self.process, self.outcome = None, DONE

    @contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """An error in the block ends the process, which may wait for the rest of a shard."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def call(self, do: str, **arguments: Any) -> None:
        """Have the process carry out one of COMMANDS. An error when starting it is the outcome."""
        self.explain = partial(not_saved, Path(arguments["root"]), arguments["iteration"])
        try:
            self.start()
        except (CheckpointError, OSError) as error:
            self.outcome = error
        else:
            self.send({"do": do, **arguments})

    def send(self, message: JsonObject) -> None:
        """Send the process a message that it answers."""
        if not isinstance(self.outcome, Exception):
            self.outcome = None
            with suppress(OSError):  # the process is gone, which `is_done` sees
                self.pipe.send_bytes(json.dumps(message).encode())

    def is_done(self, *, wait: bool = False) -> bool:
        """Whether the process has done what it was asked for, or is gone."""
        while self.outcome is None and (wait or self.pipe.poll()):
            try:
                answer = json.loads(self.pipe.recv_bytes())
            except (EOFError, OSError):
                answer = {"error": self.explain(self._gone())}
            if "log" in answer:
                logger.log(*answer["log"])
            else:
                fault = answer.get("error")
                self.outcome = answer if fault is None else CheckpointError(fault)
        return self.outcome is not None

    def result(self) -> Any:
        """Wait for the process and return its result (None when nothing was asked for). Raises the
        error that is the outcome.
        """
        self.is_done(wait=True)
        outcome, self.outcome = self.outcome, DONE
        if isinstance(outcome, Exception):
            raise outcome
        return outcome["result"]

    def _gone(self) -> CheckpointError:
        code = self.process.wait()
        why = f"ended with exit code {code}"
        if code < 0:
            why = f"was killed by signal {-code} ({signal.Signals(-code).name})"
        if code == -signal.SIGKILL:
            why += "; when that was for lack of memory, give --async-save-host-memory"
        return CheckpointError(f"the process that writes checkpoints {why}")


# ---- the process ---------------------------------------------------------------------------------


def serve(pipe: int) -> None:
    """Carry out commands until there are no more."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICE)
    trainer = Connection(pipe)
    logging.basicConfig(level=logging.INFO, handlers=[_TrainerLog(trainer)])
    _send(trainer, DONE)
    with suppress(EOFError):
        while True:
            command = json.loads(trainer.recv_bytes())
            answer: JsonObject
            try:
                answer = {"result": COMMANDS[command.pop("do")](trainer, **command)}
            except CheckpointError as error:
                answer = {"error": str(error)}
            except (OSError, MemoryError) as error:
                answer = {"error": not_saved(Path(command["root"]), command["iteration"], error)}
            _send(trainer, answer)


def _send(trainer: Connection, answer: JsonObject) -> None:
    try:
        trainer.send_bytes(json.dumps(answer).encode())
    except OSError:  # the trainer is dead, and the signal on its way
        os._exit(0)


class _TrainerLog(logging.Handler):
    """What this process logs is the trainer's to log."""

    def __init__(self, trainer: Connection) -> None:
        super().__init__()
        self.trainer = trainer

    def emit(self, record: logging.LogRecord) -> None:
        _send(self.trainer, {"log": [record.levelno, record.getMessage()]})


def _commit(
    _: Connection, root: str, iteration: int, folder: str, retention: JsonObject, **content: Any
) -> None:
    commit(Path(root), Path(folder), iteration, **content)
    retire(Path(root), Policy(**retention), iteration)


def _write(
    trainer: Connection,
    root: str,
    iteration: int,
    folder: str,
    index: int,
    source: str,
    size: int,
    verify: bool,
    record: JsonObject | None = None,
) -> JsonObject:
    """Write a shard with the `size` bytes of the file `source`; return its entry in the manifest.
    With `record`, its entry in the manifest of the local tier, `source` is the file there; raises
    CheckpointError when it is damaged.
    """
    what = f"the local copy of {shard_file(index)}"
    header, data = split_header(_waves(trainer, source, size, record is None), what)
    written = write_shard_file(Path(folder), index, header, data, verify=verify)
    if record is not None and not written.items() <= record.items():
        raise CheckpointError(f"{what} is damaged: its bytes are not those that were written")
    return written


def _waves(trainer: Connection, source: str, size: int, is_memory: bool) -> Iterator[memoryview]:
    """Yield the `size` bytes of a shard in the waves that the trainer announces. Each wave begins
    at the start of the file `source`, and each but the last one is answered when it was taken.
    """
    while size:
        wave = json.loads(trainer.recv_bytes())["bytes"]
        size -= wave
        with open(source, "rb", buffering=0) as file:
            if is_memory:
                memory = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
                for start in range(0, wave, m.CHUNK):
                    yield memory[start : min(start + m.CHUNK, wave)]
            else:  # a mapped file that shrinks, or that the disk cannot read, kills the process
                while piece := file.read(m.CHUNK):
                    yield memoryview(piece)
        if size:
            _send(trainer, DONE)


COMMANDS: dict[str, Callable[..., Any]] = {"write": _write, "commit": _commit}
