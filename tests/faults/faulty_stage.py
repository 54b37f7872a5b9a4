"""A run of pretrain_gpt.py of several ranks on this host, of which one meets a fault."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
from distributed.pool import warm_context
from programs import rank_environment

import pretrain_gpt
from megatron.distributed.interleaver import Interleaver
from megatron.model.experts import dispatch
from megatron.parallel import pipeline
from megatron.training import pretrain  # noqa: F401  # before the ranks are forked

# seconds: all messages on their way arrive, all connections of a dead process are closed
A_WHILE = 1.0
PR_SET_PDEATHSIG = 1  # from Linux's sys/prctl.h


@dataclass(frozen=True)
class Fault:
    """`kind` (kill, stop or raise) of rank `victim` in its second training step before the
    computation `where` (`F 1 2`: kind, stage, micro-batch), long after the others have done all
    they can without it.

    `where` may name a second computation, after a comma: a rank that comes to it pauses there until
    the fault is a while past. `exchange 5` instead is in the midst of a pair of passes: in front of
    the fifth exchange of rows with experts that passes in pairs start.
    """

    kind: str
    victim: int
    where: str


@dataclass
class Ended:
    """How one rank ended."""

    code: int  # negative for a signal
    after: float | None  # seconds since the fault
    errors: str  # its stderr

    @property
    def last_error(self) -> str:
        """The last error in its output."""
        return [line for line in self.errors.splitlines() if "Error: " in line][-1]


def run_with_fault(folder: Path, ranks: int, fault: Fault, flags: list[str]) -> list[Ended | None]:
    """The ends of all ranks; None for one that was stopped."""
    process = warm_context().Process(target=_host, args=(folder, ranks, fault, flags))
    process.start()
    process.join(300)
    process.kill()
    process.join()
    assert process.exitcode == 0, f"the host of the ranks ended with {process.exitcode}"
    return [end and Ended(*end) for end in json.loads((folder / "ends.json").read_text())]


def _meet(folder: Path, fault: Fault, pauses: bool) -> None:
    """What happens to the victim."""
    time.sleep(0 if pauses else A_WHILE)
    (folder / "fault").write_text(repr(time.monotonic()))
    if fault.kind == "raise":
        raise ZeroDivisionError("something of the user's own went wrong")
    os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)


def _rank(folder: Path, rank: int, ranks: int, fault: Fault, port: int, flags: list[str]) -> None:
    """The process of one rank; does not return."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(os.open(folder / f"stderr{rank}", os.O_CREAT | os.O_WRONLY), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    environment = rank_environment(rank, ranks, port)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    _put_in(folder, fault, rank == fault.victim)
    try:
        code = pretrain_gpt.main(flags)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)  # closes all connections, as the end of a program does


def _put_in(folder: Path, fault: Fault, is_victim: bool) -> None:
    """Make the victim meet its fault, and the others pause for it, from now on."""
    where, _, pause = fault.where.partition(", ")
    met: list[str] = []

    def take(step, action):
        if step.messages.device.type == "meta":  # the plan, which the first rank makes
            return real_take(step, action)
        met.append(f"{action.kind.value} {action.stage} {action.micro}")
        if not is_victim and met[-1] == pause and met.count(pause) == 2:
            while not (folder / "fault").exists():
                time.sleep(0.01)
            time.sleep(A_WHILE)
        if is_victim and met[-1] == where and met.count(where) == 2:
            _meet(folder, fault, bool(pause))
        return real_take(step, action)

    def exchange(*given):
        if Interleaver.current is not None:
            met.append("exchange")
            if is_victim and where == f"exchange {met.count('exchange')}":
                _meet(folder, fault, bool(pause))
        return real_exchange(*given)

    real_take, pipeline.StepState.input_of = pipeline.StepState.input_of, take
    real_exchange, dispatch.start_all_to_all_rows = dispatch.start_all_to_all_rows, exchange


def _host(folder: Path, ranks: int, fault: Fault, flags: list[str]) -> None:
    """Fork the ranks, and write how each ended to `folder`/ends.json."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    pids = {}
    for rank in range(ranks):
        pids[pid := os.fork()] = rank
        if pid == 0:
            _rank(folder, rank, ranks, fault, port, flags)
    ends: list = [None] * ranks
    waited = ranks - (fault.kind == "stop")
    while sum(end is not None for end in ends) < waited:
        pid, status = os.wait()
        rank, path = pids[pid], folder / "fault"
        after = time.monotonic() - float(path.read_text()) if path.exists() else None
        errors = (folder / f"stderr{rank}").read_text()
        ends[rank] = (os.waitstatus_to_exitcode(status), after, errors)
    for pid, rank in pids.items():
        if ends[rank] is None:
            os.kill(pid, signal.SIGKILL)
    (folder / "ends.json").write_text(json.dumps(ends))
