"""A process of each rank that writes shards and commits checkpoints while training continues:
without torch, without a lock shared with the trainer.

The trainer puts a shard's file into memory that both see (a memfd), in waves where that is smaller.
Commands and answers are JSON. The process ignores the signals that end a job, for the trainer waits
for it, and it dies with the trainer.
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
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path

from megatron.checkpoint import manifest as m
from megatron.checkpoint.commit import Policy, commit, not_saved, retire
from megatron.checkpoint.files import WriteProgress, split_header, write_shard_file
from megatron.checkpoint.manifest import CheckpointError, shard_file
from megatron.config.input_files import JsonObject

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
PDEATHSIG = 1  # prctl: a signal for when the parent dies
NICE = 10  # training comes first


class Background:
    """The trainer's end. `memory` is what both see. What the process logs is logged here."""

    def __init__(self, size: int):
        self.descriptor = os.memfd_create("checkpoint", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, size)
        self.memory = mmap.mmap(self.descriptor, size)
        self.process: subprocess.Popen | None = None
        self.pipe: Connection | None = None

    def send(self, command: JsonObject) -> None:
        """Raises CheckpointError when the process is gone."""
        try:
            self.pipe.send_bytes(json.dumps(command).encode())
        except OSError as error:
            raise self._gone() from error

    def answer(self, *, wait: bool) -> JsonObject | None:
        """The next answer, or None. Raises CheckpointError when the process is gone."""
        try:
            while wait or self.pipe.poll():
                answer = json.loads(self.pipe.recv_bytes())
                if "log" not in answer:
                    return answer
                logger.log(*answer["log"])
        except (EOFError, OSError) as error:
            raise self._gone() from error
        return None

    def start(self) -> None:
        """Start the process unless it runs; return when it is safe from signals and tied to this
        one.
        """
        if self.process is not None and self.process.poll() is None:
            return
        self.close()
        self.pipe, theirs = multiprocessing.Pipe()
        with theirs:
            descriptors = self.descriptor, theirs.fileno()
            program = (
                f"import sys; sys.path.insert(0, {str(ROOT)!r}); from "
                f"megatron.checkpoint.background import serve; serve{descriptors}"
            )
            self.process = subprocess.Popen(
                [sys.executable, "-c", program], stdin=subprocess.DEVNULL, pass_fds=descriptors
            )
        self.answer(wait=True)

    def close(self) -> None:
        """End the process, whatever it does."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.pipe.close()
        self.process = None

    def _gone(self) -> CheckpointError:
        code = self.process.wait()
        why = f"ended with exit code {code}"
        if code < 0:
            why = f"was killed by signal {-code} ({signal.Signals(-code).name})"
        if code == -signal.SIGKILL:
            why += "; when that was for lack of memory, give --async-save-host-memory"
        return CheckpointError(f"the process that writes checkpoints {why}")


def serve(descriptor: int, pipe: int) -> None:
    """The process: carries out commands until there are no more."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICE)
    trainer = Connection(pipe)
    logging.basicConfig(level=logging.INFO, handlers=[_TrainerLog(trainer)])
    _send(trainer, {"result": "here"})
    with mmap.mmap(descriptor, 0) as memory, memoryview(memory) as view, suppress(EOFError):
        while True:
            command = json.loads(trainer.recv_bytes())
            answer: JsonObject
            try:
                answer = {"result": _carry_out(command, view, trainer)}
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


def _carry_out(command: JsonObject, memory: memoryview, trainer: Connection) -> JsonObject | None:
    """Commit a checkpoint, or write a shard from the trainer's `memory` or as a copy of one in a
    local folder; returns the shard's entry in the manifest. Raises CheckpointError, also for a copy
    that is not what `record`, its entry in a manifest, specifies.
    """
    root, folder, iteration = Path(command["root"]), Path(command["folder"]), command["iteration"]
    if command["do"] == "commit":
        given = (command[key] for key in ("attempt", "shards", "state", "before"))
        commit(root, folder, iteration, *given)
        retire(root, Policy(**command["retention"]), iteration)
        return None

    index, size = command["index"], command["bytes"]
    progress = WriteProgress(iteration, size, command["rate"])
    options = {"verify": command["verify"], "progress": progress}
    if command["do"] == "write":
        waves = _waves(memory, trainer, size)
        first = next(waves)
        header, rest = bytes(first[: command["header"]]), first[command["header"] :]
        return write_shard_file(folder, index, header, chain([rest], waves), **options)

    what = f"the local copy of {shard_file(index)}"
    with open(command["source"], "rb", buffering=0) as file:
        pieces = (memoryview(piece) for piece in iter(lambda: file.read(m.CHUNK), b""))
        written = write_shard_file(folder, index, *split_header(pieces, what), **options)
    if not written.items() <= command["record"].items():
        raise CheckpointError(f"{what} is damaged: its bytes are not those that were written")
    return written


def _waves(memory: memoryview, trainer: Connection, size: int) -> Iterator[memoryview]:
    """The file's bytes as they come; each wave but the last one is answered when it has been
    taken.
    """
    while True:
        count = json.loads(trainer.recv_bytes())["bytes"]
        yield memory[:count]
        size -= count
        if size == 0:
            return
        _send(trainer, {"taken": count})
