"""A run of pretrain_gpt.py of several ranks on this host, of which one meets a fault: for
test_pipeline_faults.py.

    python faulty_stage.py FOLDER RANKS FAULT VICTIM WHERE flags of pretrain_gpt.py...

The ranks are forked off this process when it has imported everything. VICTIM is the rank whose
FAULT (kill, stop or raise) comes in its second training step before the computation WHERE (`F 1 2`:
kind, stage, micro-batch), when the others have long done all they can without it. WHERE may name a
second computation, after a comma: a rank that comes to it pauses there until the fault is a while
past. `exchange 5` instead is in the midst of a pair of passes: in front of the fifth exchange of
rows with experts that passes in pairs start. When all others have ended, FOLDER/ends.json holds a
list by rank: exit code (negative: a signal), seconds from the fault to the end, what it wrote to
stderr.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


# Torch imports it when something runs: that takes seconds, and would come after the fork.
import torch.fx.experimental.symbolic_shapes  # noqa: F401

import pretrain_gpt
from megatron.distributed.turns import Turns
from megatron.layers import dispatch
from megatron.parallel import pipeline
from megatron.training import pretrain  # noqa: F401  # likewise

FOLDER, RANKS, FAULT, VICTIM = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
WHERE, _, PAUSE = sys.argv[5].partition(", ")
# seconds: all messages on their way arrive, all connections of a dead process are closed
A_WHILE = 1.0
PR_SET_PDEATHSIG = 1  # from Linux's sys/prctl.h


def meet_fault() -> None:
    """What happens to the victim."""
    time.sleep(0 if PAUSE else A_WHILE)
    (FOLDER / "fault").write_text(repr(time.monotonic()))
    if FAULT == "raise":
        raise ZeroDivisionError("something of the user's own went wrong")
    os.kill(os.getpid(), signal.SIGKILL if FAULT == "kill" else signal.SIGSTOP)


def rank_process(rank: int, port: int) -> None:
    """One rank; does not return."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(os.open(FOLDER / f"stderr{rank}", os.O_CREAT | os.O_WRONLY), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.environ.update(
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
        }
    )
    met: list[str] = []

    def take(step, action):
        if step.pipeline.device.type == "meta":  # the plan, which the first rank makes
            return real_take(step, action)
        met.append(f"{action.kind.value} {action.stage} {action.micro}")
        if rank != VICTIM and met[-1] == PAUSE and met.count(PAUSE) == 2:
            while not (FOLDER / "fault").exists():
                time.sleep(0.01)
            time.sleep(A_WHILE)
        if rank == VICTIM and met[-1] == WHERE and met.count(WHERE) == 2:
            meet_fault()
        return real_take(step, action)

    def exchange(*given):
        if Turns.current is not None:
            met.append("exchange")
            if rank == VICTIM and WHERE == f"exchange {met.count('exchange')}":
                meet_fault()
        return real_exchange(*given)

    real_take, pipeline._Step.take = pipeline._Step.take, take
    real_exchange, dispatch.start_all_to_all_rows = dispatch.start_all_to_all_rows, exchange
    try:
        code = pretrain_gpt.main(sys.argv[6:])
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)  # closes all connections, as the end of a program does


def main() -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    pids = {}
    for rank in range(RANKS):
        pids[pid := os.fork()] = rank
        if pid == 0:
            rank_process(rank, port)
    ends: list = [None] * RANKS
    while any(end is None for rank, end in enumerate(ends) if FAULT != "stop" or rank != VICTIM):
        pid, status = os.wait()
        rank, fault = pids[pid], FOLDER / "fault"
        after = time.monotonic() - float(fault.read_text()) if fault.exists() else None
        ends[rank] = (
            os.waitstatus_to_exitcode(status),
            after,
            (FOLDER / f"stderr{rank}").read_text(),
        )
    for pid, rank in pids.items():
        if ends[rank] is None:
            os.kill(pid, signal.SIGKILL)
    (FOLDER / "ends.json").write_text(json.dumps(ends))


if __name__ == "__main__":
    main()
