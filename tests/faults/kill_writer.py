"""Kill -9 of processes that save checkpoints in a loop, at random times; then find and read what is there.

    python tests/faults/kill_writer.py --kills 200 --seed 1                              # the long campaign, a few minutes
    python tests/faults/kill_writer.py --kills 200 --seed 1 --ranks 2                    # the same of one of two ranks, chosen at random
    python tests/faults/kill_writer.py --kills 200 --seed 1 --ranks 2 --mode async       # of a rank, of its writer process, or of both
    python tests/faults/kill_writer.py --kills 20 --writer in-place                      # a bad writer: the campaign must fail

All ranks hold the same tensors and share out their rows, as data-parallel ranks do. Oracle, after every kill: the newest checkpoint found is at
least the newest whose save any rank knew to be complete, every checkpoint listed is whole, every value of every tensor and of the state is
that of its iteration, and the ranks that were not killed have ended by themselves, with the collective's error. The next processes go on
from there in the same folder. A writer process that is killed alone fails at most one save, with one error on all ranks; the next one succeeds.
Negative controls: `--writer in-place` (no temporary folder) and `overwrite` (one folder for all iterations); with --mode async `early` (says
that it has saved when it has begun to) and `uncopied` (training goes on before the copy is made).
"""

from __future__ import annotations

import argparse
import os
import random
import re
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.checkpoint import manifest, writer  # noqa: E402
from megatron.checkpoint.manifest import CheckpointError  # noqa: E402
from megatron.checkpoint.ranks import ONE, Ranks  # noqa: E402
from megatron.checkpoint.reader import Checkpoint, find_checkpoint  # noqa: E402
from megatron.checkpoint.saver import Saver, Staging, staging_bytes  # noqa: E402
from megatron.checkpoint.share import own_part  # noqa: E402
from megatron.dist.groups import Axis  # noqa: E402
from megatron.model.layout import Box, Holder  # noqa: E402

SHAPES = {"embedding.word.weight": (307, 512), "layers.0.mlp.up.weight": (512, 512), "layers.0.mlp.up.bias": (512,)}


TIMEOUT = 10.0  # of a collective, seconds
PATIENCE = 60.0  # in which the other ranks must have noticed that one is dead
BEREFT = 3  # their exit code


def contents(iteration: int, ranks: Ranks = ONE) -> tuple[list, dict]:
    """What this rank writes of tensors whose every value tells the iteration, and the state."""
    pairs = []
    for number, (name, shape) in enumerate(SHAPES.items()):
        values = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).mul_(1e-3).add_(1000 * iteration + number).view(shape)
        pairs.append((Box(name, shape, (0,) * len(shape), shape), values))
    own = own_part(pairs, lambda box: Holder(ranks.world.rank, ranks.world.size), balanced=True)
    return own, {"iteration": iteration, "consumed_samples": 8 * iteration}


def check(path: Path, acknowledged: int) -> str | None:
    """What is wrong with the checkpoint at `path`, if anything."""
    with Checkpoint(path) as checkpoint:
        if checkpoint.iteration < acknowledged:
            return f"iteration {acknowledged} was saved, but {path.name} is the newest"
        pairs, state = contents(checkpoint.iteration)
        if checkpoint.state != state:
            return f"{path.name}: the state is {checkpoint.state}"
        wrong = [box.name for box, want in pairs if not torch.equal(checkpoint.read_tensor(box.name), want)]
        return f"{path.name}: wrong values in {wrong}" if wrong else None


def verdict(root: Path, acknowledged: int) -> tuple[int, str | None]:
    """(iteration recovered, what is wrong)."""
    try:
        found = find_checkpoint(root, say=lambda line: None)
        if found is None:
            return 0, f"nothing is loadable; iteration {acknowledged} was saved" if acknowledged else None
        for iteration in manifest.list_iterations(root):
            with Checkpoint(root / manifest.iteration_folder(iteration)) as checkpoint:
                checkpoint.verify()
        return int(found.name[5:]), check(found, acknowledged)
    except CheckpointError as error:
        return 0, str(error)


def in_place(root: Path, iteration: int, pairs: list, state: dict, ranks: Ranks = ONE) -> None:
    """A mutant: writes where readers look."""
    target = root / manifest.iteration_folder(iteration)
    if ranks.first:
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
    ranks.agree(lambda: None)
    records = ranks.agree(lambda: writer.write_shard(target, ranks.world.rank, ranks.world.size, iteration, pairs))
    content = {"format": manifest.FORMAT, "version": manifest.VERSION, "iteration": iteration, "attempt": "", "created": ""}
    content |= {"shards": records, "state": state}
    if ranks.first:
        (target / manifest.MANIFEST).write_bytes(manifest.encode_manifest(content))
    ranks.agree(lambda: None)


def overwrite(root: Path, iteration: int, pairs: list, state: dict, ranks: Ranks = ONE) -> None:
    """A mutant: the newest checkpoint takes the place of the one before."""
    for old in manifest.list_iterations(root) if ranks.first else []:
        os.rename(root / manifest.iteration_folder(old), root / manifest.iteration_folder(iteration))
    in_place(root, iteration, pairs, state, ranks)


# ---- jobs: loops that save one iteration after the other and `tell` of each that is complete -------------------------

Tell = Callable[[str], None]
Job = Callable[[Path, int, Ranks, Tell], None]


def at_once(save: Callable, root: Path, first: int, ranks: Ranks, tell: Tell) -> None:
    """Synchronous saves."""
    for iteration in range(first, first + 1000):
        save(root, iteration, *contents(iteration, ranks), ranks=ranks)
        tell(str(iteration))


def in_background(root: Path, first: int, ranks: Ranks, tell: Tell) -> None:
    """Asynchronous saves: the tensors change as soon as a save has begun, and some steps are taken before the next one."""
    rng = random.Random(first)  # the same on all ranks
    memory = staging_bytes(contents(first, ranks)[0], None)
    saver = Saver(root, ranks, memory, report=lambda iteration, saved: tell(str(iteration)), say=partial(hear, tell))
    for iteration in range(first, first + 1000):
        pairs, state = contents(iteration, ranks)
        saver.save(iteration, pairs, state)
        for _, tensor in pairs:
            tensor.fill_(-1.0)
        for _ in range(rng.randrange(20)):
            step(saver)


def hear(tell: Tell, line: str) -> None:
    """What a Saver says, as a Tell."""
    if "NOT saved" in line:
        tell(f"failed {line}")


def step(saver: Saver) -> None:
    """What training does of a save in each step."""
    time.sleep(0.001)
    sums = torch.tensor(saver.ready())
    if saver.ranks.world.size > 1:
        dist.all_reduce(sums)
    saver.advance(sums.tolist())


def early(root: Path, first: int, ranks: Ranks, tell: Tell) -> None:
    """A mutant: a save counts when it has begun."""
    begin = Saver._begin

    def begun(saver: Saver, iteration: int, *rest: object) -> None:
        begin(saver, iteration, *rest)
        tell(str(iteration))

    with mock.patch.object(Saver, "_begin", begun):
        in_background(root, first, ranks, tell)


def uncopied(root: Path, first: int, ranks: Ranks, tell: Tell) -> None:
    """A mutant: the copy is made when training has gone on."""
    fill, hand_over = Staging.fill, Staging.hand_over

    def later(staging: Staging, *what: object) -> None:
        staging.what = what

    def late(staging: Staging) -> None:
        if what := staging.__dict__.pop("what", None):
            fill(staging, what[0], list(what[1]))
        hand_over(staging)

    with mock.patch.object(Staging, "fill", later), mock.patch.object(Staging, "hand_over", late):
        in_background(root, first, ranks, tell)


SAVES: dict[str, Callable] = {"real": writer.save_checkpoint, "in-place": in_place, "overwrite": overwrite}
JOBS: dict[str, dict[str, Job]] = {  # mode, writer
    "sync": {name: partial(at_once, save) for name, save in SAVES.items()},
    "async": {"real": in_background, "early": early, "uncopied": uncopied},
}


# ---- a job, and what is killed of it ---------------------------------------------------------------------------------


def run_rank(job: Job, root: Path, first: int, rank: int, size: int, pipe: int) -> None:
    """One rank of a job: says that it begins, then what the job tells."""
    ranks = Ranks(Axis("world", rank, tuple(range(size))))
    if size > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = f"file://{root}.rendezvous"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT))
        ranks.agree(lambda: None)  # connections are made at their first use
    os.write(pipe, b"begin\n")
    job(root, first, ranks, lambda line: os.write(pipe, f"{line}\n".encode()))


def start_rank(job: Job, root: Path, first: int, rank: int, size: int, pipe: tuple[int, int]) -> int:
    """Fork one rank; its process id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(pipe[0])
            run_rank(job, root, first, rank, size, pipe[1])
            code = 0
        except RuntimeError as error:  # of a collective, when another rank is dead
            code = BEREFT if size > 1 else 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def children(process: int) -> list[int]:
    """Of a process that may have ended."""
    with suppress(OSError):
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return []


class Told:
    """What the ranks of a job say, line by line."""

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


def ended(child: int) -> int | None:
    """The wait status of a process when it ends in time; None, and it is killed, when it does not."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


class Outcome:
    """What a job told: the newest iteration that any rank knew to be complete, and what each save that failed told."""

    def __init__(self, first: int) -> None:
        self.acknowledged, self.failed = first - 1, {}

    def take(self, line: str) -> None:
        if line.startswith("failed "):
            self.failed.setdefault(re.search(r"iteration (\d+)", line)[1], set()).add(line)
        elif line != "begin":
            self.acknowledged = max(self.acknowledged, int(line))

    def faults(self, written_off: bool) -> list[str]:
        """What is wrong with the errors: `written_off`, when one save may fail for the death of a writer process."""
        faults = [f"ranks told different errors of iteration {iteration}: {lines}" for iteration, lines in self.failed.items() if len(lines) > 1]
        if len(self.failed) > written_off or any("the process that writes checkpoints was killed" not in line for line in set().union(*self.failed.values())):
            faults.append(f"saves failed: {self.failed}")
        return faults


def kill_once(job: Job, root: Path, first: int, delay: float, size: int = 1, victim: int = 0, what: str = "rank", warm: bool = False) -> tuple[int, str | None]:
    """Start a job of `size` ranks and kill its rank `victim`, its "writer" process or "both", `delay` seconds after it began, or, `warm`, after its
    first save. A job that has only lost a writer process must complete another save, and is killed then.

    Returns the newest iteration that any rank acknowledged, or first - 1, and what was wrong with the errors and ends of the others.
    """
    Path(f"{root}.rendezvous").unlink(missing_ok=True)
    read_end, write_end = os.pipe()
    processes = [start_rank(job, root, first, rank, size, (read_end, write_end)) for rank in range(size)]
    os.close(write_end)
    told, outcome, faults = Told(read_end), Outcome(first), []
    try:
        assert [told.line() for _ in processes] == ["begin"] * size
        if warm:
            outcome.take(told.line() or "begin")
        time.sleep(delay)
        writers = children(processes[victim]) if what != "rank" else []
        for process in writers + [processes[victim]] * (what != "writer" or not writers):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        alone = what == "writer" and writers
        if alone:
            while line := told.line(0):  # what was on its way
                outcome.take(line)
            goal = outcome.acknowledged + 2  # the one under way may have been complete
            while outcome.acknowledged < goal:
                if (line := told.line()) is None:
                    faults.append("no save was completed after a writer process was killed")
                    break
                outcome.take(line)
            os.kill(processes[victim], signal.SIGKILL)
        statuses = [ended(process) for process in processes]
        while line := told.line(0):
            outcome.take(line)
    finally:
        os.close(read_end)
    if not os.WIFSIGNALED(statuses.pop(victim)):
        raise RuntimeError("the victim ended by itself: see its traceback above")
    faults += ["a rank waited for the dead one" if status is None else f"a rank ended with status {status}"
               for status in statuses if status is None or os.waitstatus_to_exitcode(status) != BEREFT]
    faults += outcome.faults(bool(writers))
    return outcome.acknowledged, "; ".join(faults) or None


def campaign(kills: int, seed: int, job: Job, root: Path, report: Callable[[str], None], ranks: int = 1, mode: str = "sync") -> list[str]:
    """Run it; returns what went wrong, one line a kill."""
    rng, faults, saved, begin = random.Random(seed), [], 0, time.monotonic()
    background = mode == "async"
    recovered, _ = kill_once(job, root, 1, 1.0, ranks, warm=background)  # how many saves a second holds; the next kill's verdict covers its folder
    once = 1.0 / max(1, recovered)
    for number in range(1, kills + 1):
        what = rng.choice(["rank", "writer", "both"]) if background else "rank"
        warm = background and rng.random() < 0.7
        acknowledged, fault = kill_once(job, root, recovered + 1, rng.uniform(0, 4 * once), ranks, rng.randrange(ranks), what, warm)
        faults += [f"kill {number}: {fault}"] if fault else []
        saved += acknowledged - recovered
        recovered, fault = verdict(root, acknowledged)
        if fault:
            faults.append(f"kill {number}: {fault}")
            shutil.rmtree(root)  # go on from a clean folder
            root.mkdir()
            recovered = 0
        for old in manifest.list_iterations(root)[2:]:
            shutil.rmtree(root / manifest.iteration_folder(old))  # keep the campaign's folder small
        left = (time.monotonic() - begin) / number * (kills - number)
        report(f"kill {number}/{kills}: recovered iteration {recovered}, {len(faults)} bad, {left:.0f} s left")
    of = f" of one of {ranks} ranks" if ranks > 1 else ""
    report(f"{mode}: {kills} kills{of}, {saved} saves returned, {len(faults)} bad recoveries, {time.monotonic() - begin:.1f} s")
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1, help="processes that save together; one of them is killed")
    parser.add_argument("--mode", choices=JOBS, default="sync")
    parser.add_argument("--writer", choices=sorted({name for jobs in JOBS.values() for name in jobs}), default="real")
    parser.add_argument("--folder", help="where to save (a new folder is made in it); default: the system's temporary folder")
    arguments = parser.parse_args()
    if arguments.writer not in JOBS[arguments.mode]:
        parser.error(f"--writer {arguments.writer} is none of --mode {arguments.mode}: {', '.join(JOBS[arguments.mode])}")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        faults = campaign(arguments.kills, arguments.seed, JOBS[arguments.mode][arguments.writer], Path(folder) / "run", print, arguments.ranks, arguments.mode)
    for fault in faults:
        print(fault)
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
