"""Kill -9 of a process that saves checkpoints in a loop, at random times; then find and read what is there.

    python tests/faults/kill_writer.py --kills 200 --seed 1              # the long campaign, a few minutes
    python tests/faults/kill_writer.py --kills 200 --seed 1 --ranks 2    # the same of one of two ranks, chosen at random
    python tests/faults/kill_writer.py --kills 20 --writer in-place      # a bad writer: the campaign must fail

Oracle, after every kill: the newest checkpoint found is at least the newest whose save had returned, every checkpoint listed is whole,
every value of every tensor and of the state is that of its iteration, and the ranks that were not killed have ended by themselves, with the
collective's error. The next processes go on from there in the same folder.
`--writer in-place` (no temporary folder) and `overwrite` (one folder for all iterations) are the negative controls.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.checkpoint import manifest, writer  # noqa: E402
from megatron.checkpoint.manifest import CheckpointError  # noqa: E402
from megatron.checkpoint.ranks import ONE, Ranks  # noqa: E402
from megatron.checkpoint.reader import Checkpoint, find_checkpoint  # noqa: E402
from megatron.dist.groups import Axis  # noqa: E402
from megatron.model.layout import Box  # noqa: E402

SHAPES = {"embedding.word.weight": (307, 512), "layers.0.mlp.up.weight": (512, 512), "layers.0.mlp.up.bias": (512,)}


TIMEOUT = 10.0  # of a collective, seconds
PATIENCE = 60.0  # in which the other ranks must have noticed that one is dead
BEREFT = 3  # their exit code


def contents(iteration: int, ranks: Ranks = ONE) -> tuple[list, dict]:
    """Tensors whose every value tells the iteration, cut by rows over the ranks, and the state."""
    pairs, rank, size = [], ranks.world.rank, ranks.world.size
    for number, (name, shape) in enumerate(SHAPES.items()):
        values = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).mul_(1e-3).add_(1000 * iteration + number).view(shape)
        first, last = shape[0] * rank // size, shape[0] * (rank + 1) // size
        part = values[first:last]
        pairs.append((Box(name, shape, (first, *(0 for _ in shape[1:])), tuple(part.shape)), part))
    return pairs, {"iteration": iteration, "consumed_samples": 8 * iteration}


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


WRITERS: dict[str, Callable] = {"real": writer.save_checkpoint, "in-place": in_place, "overwrite": overwrite}


def run_rank(save: Callable, root: Path, first: int, rank: int, size: int, acknowledge: int) -> None:
    """One rank of a job: says that it begins, saves one iteration after the other and acknowledges each save that has returned."""
    ranks = Ranks(Axis("world", rank, tuple(range(size))))
    if size > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = f"file://{root}.rendezvous"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT))
        ranks.agree(lambda: None)  # connections are made at their first use
    os.write(acknowledge, b"begin\n")
    for iteration in range(first, first + 1000):
        save(root, iteration, *contents(iteration, ranks), ranks=ranks)
        os.write(acknowledge, f"{iteration}\n".encode())


def start_rank(save: Callable, root: Path, first: int, rank: int, size: int, pipe: tuple[int, int]) -> int:
    """Fork one rank; its process id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(pipe[0])
            run_rank(save, root, first, rank, size, pipe[1])
        except RuntimeError as error:  # of a collective, when another rank is dead
            code = BEREFT if size > 1 else 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


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


def kill_once(save: Callable, root: Path, first: int, delay: float, size: int = 1, victim: int = 0) -> tuple[int, str | None]:
    """Start a job of `size` ranks and kill its rank `victim` `delay` seconds after it began.

    Returns the newest iteration that any rank acknowledged, or first - 1, and what was wrong with the end of the others.
    """
    Path(f"{root}.rendezvous").unlink(missing_ok=True)
    read_end, write_end = os.pipe()
    children = [start_rank(save, root, first, rank, size, (read_end, write_end)) for rank in range(size)]
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        assert [pipe.readline() for _ in children] == ["begin\n"] * size
        time.sleep(delay)
        os.kill(children[victim], signal.SIGKILL)
        statuses = [ended(child) for child in children]
        acknowledged = [int(line) for line in pipe.read().split()]
    if not os.WIFSIGNALED(statuses.pop(victim)):
        raise RuntimeError("the victim ended by itself: see its traceback above")
    faults = ["a rank waited for the dead one" if status is None else f"a rank ended with status {status}"
              for status in statuses if status is None or os.waitstatus_to_exitcode(status) != BEREFT]
    return max(acknowledged, default=first - 1), "; ".join(faults) or None


def campaign(kills: int, seed: int, save: Callable, root: Path, report: Callable[[str], None], ranks: int = 1) -> list[str]:
    """Run it; returns what went wrong, one line a kill."""
    rng, faults, saved, begin = random.Random(seed), [], 0, time.monotonic()
    recovered, _ = kill_once(save, root, 1, 1.0, ranks)  # how many saves a second holds; the next kill's verdict covers its folder
    once = 1.0 / max(1, recovered)
    for number in range(1, kills + 1):
        acknowledged, fault = kill_once(save, root, recovered + 1, rng.uniform(0, 4 * once), ranks, rng.randrange(ranks))
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
    report(f"{kills} kills{of}, {saved} saves returned, {len(faults)} bad recoveries, {time.monotonic() - begin:.1f} s")
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1, help="processes that save together; one of them is killed")
    parser.add_argument("--writer", choices=sorted(WRITERS), default="real")
    parser.add_argument("--folder", help="where to save (a new folder is made in it); default: the system's temporary folder")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        faults = campaign(arguments.kills, arguments.seed, WRITERS[arguments.writer], Path(folder) / "run", print, arguments.ranks)
    for fault in faults:
        print(fault)
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
