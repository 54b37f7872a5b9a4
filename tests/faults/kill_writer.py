"""Kill -9 of processes that save checkpoints in a loop, at random times; then find and read what is
there.

    python tests/faults/kill_writer.py --kills 200 --seed 1

takes a few minutes. With `--ranks 2` one of two ranks is killed, chosen at random; with
`--mode async` a rank, its writer process, or both; with `--mode local` both tiers are written, and
now and then a node is lost as well; with `--ranks 3 --mode local --writer xor` the nodes are an XOR
group. `--writer in-place` is a bad writer, with which the campaign must fail.

All ranks hold the same tensors and share out their rows, as data-parallel ranks do. Oracle, after
every kill: the newest checkpoint found is at least the newest whose save any rank knew to be
complete, every checkpoint listed is whole, every value of every tensor and of the state is that of
its iteration, and the ranks that were not killed have ended by themselves, with the collective's
error. The next processes go on from there in the same folder. A writer process that is killed alone
fails at most one save, with one error on all ranks; the next one succeeds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import re
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.context import ForkProcess
from pathlib import Path

import torch
import torch.distributed as dist
from saving_jobs import JOBS, Job, differs, node_folder  # finds the package, too

from megatron.checkpoint import manifest
from megatron.checkpoint.manifest import CheckpointError
from megatron.checkpoint.ranks import Ranks
from megatron.checkpoint.reader import Checkpoint, open_checkpoint
from megatron.distributed.groups import Axis

TIMEOUT = 10.0  # of a collective, seconds
PATIENCE = 60.0  # in which the other ranks must have noticed that one is dead
BEREFT = 3  # their exit code


def check(path: Path, acknowledged: int) -> str | None:
    """What is wrong with the checkpoint at `path`, if anything."""
    with Checkpoint(path) as checkpoint:
        if checkpoint.iteration < acknowledged:
            return f"iteration {acknowledged} was saved, but {path.name} is the newest"
        return differs(checkpoint)


def verdict(root: Path, acknowledged: int) -> tuple[int, str | None]:
    """(iteration recovered, what is wrong)."""
    try:
        found = open_checkpoint(root)
        if found is None:
            lost = f"nothing is loadable; iteration {acknowledged} was saved"
            return 0, lost if acknowledged else None
        for iteration in manifest.list_iterations(root):
            with Checkpoint(root / manifest.iteration_folder(iteration)) as checkpoint:
                checkpoint.verify()
        return found.iteration, check(found.path, acknowledged)
    except CheckpointError as error:
        return 0, str(error)


# ---- a job, and what is killed of it -------------------------------------------------------------

FORK = multiprocessing.get_context("fork")


def run_rank(job: Job, root: Path, first: int, rank: int, size: int, pipe: int) -> None:
    """One rank of a job: reports that it begins, then what the job reports."""
    ranks = Ranks(Axis("world", rank, tuple(range(size))))
    if size > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store, patience = f"file://{root}.rendezvous", timedelta(seconds=TIMEOUT)
        dist.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=size, timeout=patience
        )
        ranks.gather_or_raise(lambda: None)  # connections are made at their first use
    os.write(pipe, b"begin\n")
    try:
        job(root, first, ranks, lambda line: os.write(pipe, f"{line}\n".encode()))
    except RuntimeError:  # of a collective, when another rank is dead
        if size == 1:
            raise
        os._exit(BEREFT)


def start_rank(job: Job, root: Path, first: int, rank: int, size: int, pipe: int) -> ForkProcess:
    """One rank in a separate process, which reports to `pipe`."""
    process = FORK.Process(target=run_rank, args=(job, root, first, rank, size, pipe))
    process.start()
    return process


def children(process: int) -> list[int]:
    """Of a process that may have ended."""
    with suppress(OSError):
        listed = Path(f"/proc/{process}/task/{process}/children").read_text()
        return [int(child) for child in listed.split()]
    return []


class Reports:
    """What the ranks of a job report, line by line."""

    def __init__(self, pipe: int) -> None:
        self.pipe, self.text = pipe, b""

    def line(self, patience: float = PATIENCE) -> str | None:
        """The next one; None when none comes in time or ever."""
        end = time.monotonic() + patience
        while b"\n" not in self.text:
            if not select.select([self.pipe], [], [], max(0.0, end - time.monotonic()))[0]:
                return None
            part = os.read(self.pipe, 1 << 16)
            if not part:
                return None
            self.text += part
        line, _, self.text = self.text.partition(b"\n")
        return line.decode()


class Outcome:
    """What a job reported: what it resumed from, the newest iteration that any rank knew to be
    complete, and what each save that failed reported; and what is wrong with it.
    """

    def __init__(self) -> None:
        self.found: int | None = None
        self.acknowledged = 0
        self.failed: dict[str, set[str]] = {}
        self.faults: list[str] = []

    def take(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "failed":
            self.failed.setdefault(re.search(r"iteration (\d+)", line)[1], set()).add(line)
        elif word == "found":
            self.found = int(rest)
        elif word == "wrong":
            self.faults.append(rest)
        elif word != "begin":
            self.acknowledged = max(self.acknowledged, int(line))

    def judge(self, codes: list[int | None], *, may_fail: bool) -> None:
        """`codes`: of the ranks that were not killed, None for one that waited for longer than it
        may. `may_fail`: a save, for the death of a writer process.
        """
        for code in codes:
            if code is None:
                self.faults.append("a rank waited for the dead one")
            elif code != BEREFT:
                self.faults.append(f"a rank ended with code {code}")
        killed = "the process that writes checkpoints was killed"
        lines = [each for each in self.failed.values() if len(each) > 1]
        if lines:
            self.faults.append(f"ranks reported different errors of a save: {lines}")
        lines = [line for each in self.failed.values() for line in each]
        if len(self.failed) > may_fail or any(killed not in line for line in lines):
            self.faults.append(f"saves failed: {self.failed}")


def kill_once(
    job: Job,
    root: Path,
    first: int,
    delay: float,
    size: int = 1,
    victim: int = 0,
    what: str = "rank",
    warm: bool = False,
) -> Outcome:
    """Start a job of `size` ranks and kill its rank `victim`, its "writer" process or "both",
    `delay` seconds after it began, or, `warm`, after its first save. A job that has only lost a
    writer process must complete another save, and is killed then.
    """
    Path(f"{root}.rendezvous").unlink(missing_ok=True)
    read_end, write_end = os.pipe()
    processes = [start_rank(job, root, first, rank, size, write_end) for rank in range(size)]
    os.close(write_end)
    dead, shown, outcome = processes[victim], Reports(read_end), Outcome()
    try:
        assert [shown.line() for _ in processes] == ["begin"] * size
        while warm and not outcome.acknowledged and (line := shown.line()):
            outcome.take(line)
        time.sleep(delay)
        writers = children(dead.pid) if what != "rank" else []
        for writer in writers:
            with suppress(ProcessLookupError):
                os.kill(writer, signal.SIGKILL)
        if what == "writer" and writers:
            await_another_save(shown, outcome)
        dead.kill()
        for process in processes:
            process.join(PATIENCE)
        # before those that still wait are killed
        codes = [process.exitcode for process in processes if process is not dead]
        while line := shown.line(0):
            outcome.take(line)
    finally:
        os.close(read_end)
        for process in processes:
            process.kill()
            process.join()
    assert dead.exitcode == -signal.SIGKILL, "the victim ended by itself: see its traceback above"
    outcome.judge(codes, may_fail=bool(writers))
    return outcome


def await_another_save(shown: Reports, outcome: Outcome) -> None:
    """A save that begins after this moment is complete in time."""
    while line := shown.line(0):  # what was on its way
        outcome.take(line)
    goal = outcome.acknowledged + 2  # the one under way may have been complete
    while outcome.acknowledged < goal:
        if (line := shown.line()) is None:
            outcome.faults.append("no save was completed after a writer process was killed")
            return
        outcome.take(line)


def campaign(
    kills: int,
    seed: int,
    job: Job,
    root: Path,
    report: Callable[[str], None],
    ranks: int = 1,
    mode: str = "sync",
) -> list[str]:
    """Kills in one folder, one after the other; returns what went wrong, one line a kill. In the
    local tier nodes are lost too: of two or more one, when none is missing.
    """
    begin, rng = time.monotonic(), random.Random(seed)
    faults: list[str] = []
    # how many saves a second holds
    per_second = kill_once(job, root, 1, 1.0, ranks, warm=mode != "sync").acknowledged
    saved, recovered = 0, per_second
    for number in range(1, kills + 1):
        # 1. A run that loses its writer process while it starts does not start.
        what = "rank" if mode == "sync" else rng.choice(["rank", "writer", "both"])
        warm = what != "rank" or (mode != "sync" and rng.random() < 0.7)
        delay, victim = rng.uniform(0, 4 / max(1, per_second)), rng.randrange(ranks)
        outcome = kill_once(job, root, recovered + 1, delay, ranks, victim, what, warm)
        acknowledged = max(recovered, outcome.acknowledged)
        saved += acknowledged - recovered

        # 2. What is there. In the local tier the job itself has looked, if it came as far.
        is_local = mode == "local"
        iteration, fault = verdict(root, 0 if is_local else acknowledged)
        wrong = [*outcome.faults, *filter(None, [fault])]
        if not is_local:
            recovered = iteration
        elif outcome.found is not None and outcome.found < recovered:
            wrong.append(f"iteration {recovered} was saved, the next job found {outcome.found}")
        if is_local:
            recovered = max(acknowledged, outcome.found or 0)
            if outcome.found is not None and ranks > 1 and rng.random() < 0.4:
                shutil.rmtree(node_folder(root, rng.randrange(ranks)))
        if wrong:
            faults.append(f"kill {number}: {'; '.join(wrong)}")
            recovered = 0
            for folder in (root, *(node_folder(root, node) for node in range(ranks))):
                shutil.rmtree(folder, ignore_errors=True)
            root.mkdir()
        for old in manifest.list_iterations(root)[2:]:  # keep the folder small
            shutil.rmtree(root / manifest.iteration_folder(old))
        report(f"kill {number}/{kills}: recovered iteration {recovered}, {len(faults)} bad")
    of = f" of one of {ranks} ranks" if ranks > 1 else ""
    report(
        f"{mode}: {kills} kills{of}, {saved} saves returned, {len(faults)} bad recoveries, "
        f"{time.monotonic() - begin:.1f} s"
    )
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1, help="that save; one of them is killed")
    parser.add_argument("--mode", choices=JOBS, default="sync")
    parser.add_argument("--writer", default="real", help="of the mode")
    parser.add_argument("--folder", help="where to save, in a new folder")
    options = parser.parse_args()
    jobs = JOBS[options.mode]
    if options.writer not in jobs:
        parser.error(f"--writer of --mode {options.mode}: one of {', '.join(jobs)}")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        settings = options.kills, options.seed, jobs[options.writer], Path(folder) / "run"
        faults = campaign(*settings, print, options.ranks, options.mode)
    print("\n".join(faults))
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
