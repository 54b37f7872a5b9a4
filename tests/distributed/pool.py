"""Persistent Gloo worlds for tests: processes that stay alive across tests, so that a case costs
milliseconds and not a start of Python.

    def work(n):                                   # a top-level function of a module that can be
    imported
        x = torch.full((n,), float(dist.get_rank()))
        dist.all_reduce(x)
        return x

    def test_sum(gloo_world):
        assert gloo_world(4).run(work, 3)[0].tolist() == [6, 6, 6]

The processes are forked off a fresh one that has imported PRELOAD. In each torch.distributed is
initialised over Gloo on the loopback interface, and torch has one thread. Process groups that a
function makes are destroyed before the next one runs. After a failure the world is killed; its next
run starts a new one.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import functools
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

TESTS = Path(__file__).resolve().parents[1]
# What takes seconds to import, for each process anew otherwise.
PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.fx.experimental.symbolic_shapes",
    "torch._dynamo",
    "hypothesis",
    "pytest",
    "distributed.pool",
    "parity.worker",
)
GRACE = 3.0  # seconds that the other ranks get to report after the first failure
PR_SET_PDEATHSIG = 1  # from Linux's sys/prctl.h


def warm_context() -> multiprocessing.context.ForkServerContext:
    """Its processes are forked off one that has imported PRELOAD."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    variables = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        # where it finds PRELOAD
        "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}",
    }
    with mock.patch.dict(os.environ, variables):
        forkserver.ensure_running()
    return context


class RankError(AssertionError):
    """A function raised on some rank; the message holds the tracebacks."""


class Hang(AssertionError):
    """A function did not end in time; the message has the stack of each late rank."""


def serve(rank: int, size: int, folder: str, pipe: Connection) -> None:
    """One rank's process: run what comes through the pipe until it closes."""
    gc.freeze()  # runs collect garbage several times: what was imported stays
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent closes the world
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    stack = open(Path(folder, f"stack{rank}"), "w")  # open as long as the process lives
    faulthandler.register(signal.SIGUSR2, stack, all_threads=False)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(minutes=10),
    )
    made, new_group = [], dist.new_group

    @functools.wraps(new_group)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        made.append(new_group(*args, **kwargs))
        return made[-1]

    dist.new_group = recorded
    while True:
        try:
            task = pipe.recv_bytes()
        except EOFError:
            return
        while made:  # all ranks have ended the task before
            group = made.pop()
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)
        try:
            path, module, name, arguments = pickle.loads(task)
            sys.path[:] = path
            function = attrgetter(name)(importlib.import_module(module))
            answer = pickle.dumps((True, function(*pickle.loads(arguments))))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        try:
            pipe.send_bytes(answer)
        except BrokenPipeError:  # the parent waits no more
            return


@contextlib.contextmanager
def one_world_at_a_time() -> Iterator[None]:
    """Among the processes of pytest-xdist: ranks of two worlds on few cores hold each other up far
    more than twice.
    """
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if session is None:
        yield
        return
    with open(turn_file(session), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def turn_file(session: str) -> Path:
    """What the processes of a session of pytest-xdist lock."""
    return Path(tempfile.gettempdir(), f"gloo_worlds_{session}")


class World:
    """`size` processes, started at the first run."""

    def __init__(self, size: int):
        self.size = size
        self.processes: list[multiprocessing.Process] = []
        self.pipes: list[Connection] = []
        self.folder: tempfile.TemporaryDirectory | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 300.0) -> list[Any]:
        """`function(*args)` on every rank; the results by rank. Raises RankError with tracebacks,
        Hang after `timeout` seconds.
        """
        assert "<" not in function.__qualname__, (
            "a lambda or an inner function cannot be found by name in another process"
        )
        name = function.__module__, function.__qualname__
        task = pickle.dumps((sys.path, *name, pickle.dumps(args)))
        try:
            with one_world_at_a_time():
                if not self.processes:
                    self._start()
                for pipe in self.pipes:
                    pipe.send_bytes(task)
                answers = self._collect(timeout)
        except BaseException:
            # time is up, or the user interrupts: what the ranks are doing is unknown
            self.close()
            raise
        return answers

    def _start(self) -> None:
        context = warm_context()
        self.folder = tempfile.TemporaryDirectory(prefix="gloo_world_")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            given = rank, self.size, self.folder.name, theirs
            process = context.Process(target=serve, args=given, daemon=True, name=f"rank{rank}")
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def _collect(self, timeout: float) -> list[Any]:
        end = time.monotonic() + timeout
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        while waiting and (ready := wait(list(waiting), max(0.0, end - time.monotonic()))):
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    good, answer = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    self.processes[rank].join(GRACE)
                    code = self.processes[rank].exitcode
                    good, answer = False, f"the process ended with exit code {code}"
                (results if good else errors)[rank] = answer
                if not good:
                    end = min(end, time.monotonic() + GRACE)
        late = sorted(waiting.values())
        if errors:
            texts = [f"rank {rank} of {self.size}:\n{errors[rank]}" for rank in sorted(errors)]
            if late:
                texts.append(f"ranks {late} had not ended {GRACE:g} s later")
            raise RankError("\n".join(texts))
        if late:
            message = f"ranks {late} of {self.size} had not ended after {timeout:g} s"
            raise Hang("\n".join([message, *map(self._stack, late)]))
        return [results[rank] for rank in range(self.size)]

    def _stack(self, rank: int) -> str:
        """The Python stack of a rank."""
        os.kill(self.processes[rank].pid, signal.SIGUSR2)
        path, end = Path(self.folder.name, f"stack{rank}"), time.monotonic() + 1
        text = before = ""
        while (not text or text != before) and time.monotonic() < end:  # it is written in parts
            time.sleep(0.05)
            before, text = text, path.read_text() if path.exists() else ""
        return f"rank {rank}:\n{text or '(starting)'}"

    def close(self) -> None:
        """Kill the processes; a later run starts new ones."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes = [], []
        if self.folder is not None:
            self.folder.cleanup()
            self.folder = None


class Worlds:
    """The worlds of one test session by size."""

    def __init__(self) -> None:
        self.worlds: dict[int, World] = {}

    def __call__(self, size: int) -> World:
        return self.worlds.setdefault(size, World(size))

    def close(self) -> None:
        for world in self.worlds.values():
            world.close()
        if "PYTEST_XDIST_TESTRUNUID" in os.environ:
            turn_file(os.environ["PYTEST_XDIST_TESTRUNUID"]).unlink(missing_ok=True)
