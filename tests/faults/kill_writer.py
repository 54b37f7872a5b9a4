"""Kill -9 of a process that saves checkpoints in a loop, at random times; then find and read what is there.

    python tests/faults/kill_writer.py --kills 200 --seed 1              # the long campaign, a few minutes
    python tests/faults/kill_writer.py --kills 20 --writer in-place      # a bad writer: the campaign must fail

Oracle, after every kill: the newest checkpoint found is at least the newest whose save had returned, every checkpoint listed is whole,
and every value of every tensor and of the state is that of its iteration. The next process goes on from there in the same folder.
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
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.checkpoint import manifest, writer  # noqa: E402
from megatron.checkpoint.manifest import CheckpointError  # noqa: E402
from megatron.checkpoint.reader import Checkpoint, find_checkpoint  # noqa: E402
from megatron.model.layout import Box  # noqa: E402

SHAPES = {"embedding.word.weight": (307, 512), "layers.0.mlp.up.weight": (512, 512), "layers.0.mlp.up.bias": (512,)}


def contents(iteration: int) -> tuple[list, dict]:
    """Tensors whose every value tells the iteration, and the state."""
    pairs = []
    for number, (name, shape) in enumerate(SHAPES.items()):
        values = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).mul_(1e-3).add_(1000 * iteration + number)
        pairs.append((Box(name, shape, (0,) * len(shape), shape), values.view(shape)))
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


def in_place(root: Path, iteration: int, pairs: list, state: dict, folder: str | None = None) -> None:
    """A mutant: writes where readers look."""
    target = root / (folder or manifest.iteration_folder(iteration))
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    record = writer.write_shard(target, 0, 1, iteration, pairs)
    content = {"format": manifest.FORMAT, "version": manifest.VERSION, "iteration": iteration, "attempt": "", "created": ""}
    content |= {"shards": [record], "state": state}
    (target / manifest.MANIFEST).write_bytes(manifest.encode_manifest(content))


def overwrite(root: Path, iteration: int, pairs: list, state: dict) -> None:
    """A mutant: the newest checkpoint takes the place of the one before."""
    for old in manifest.list_iterations(root):
        os.rename(root / manifest.iteration_folder(old), root / manifest.iteration_folder(iteration))
    in_place(root, iteration, pairs, state)


WRITERS: dict[str, Callable] = {"real": writer.save_checkpoint, "in-place": in_place, "overwrite": overwrite}


def run_writer(save: Callable, root: Path, first: int, acknowledge: int) -> None:
    """The victim: says that it begins, saves one iteration after the other and acknowledges each save that has returned."""
    os.write(acknowledge, b"begin\n")
    for iteration in range(first, first + 1000):
        save(root, iteration, *contents(iteration))
        os.write(acknowledge, f"{iteration}\n".encode())


def kill_once(save: Callable, root: Path, first: int, delay: float) -> int:
    """Fork a victim, kill it `delay` seconds after it began; return the newest iteration that it acknowledged, or first - 1."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read_end)
            run_writer(save, root, first, write_end)
        finally:
            os._exit(1)
    os.close(write_end)
    assert os.read(read_end, 6) == b"begin\n"
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with os.fdopen(read_end) as pipe:
        lines = pipe.read().split()
    if not os.WIFSIGNALED(status):
        raise RuntimeError("the victim ended by itself: see its traceback above")
    return int(lines[-1]) if lines else first - 1


def campaign(kills: int, seed: int, save: Callable, root: Path, report: Callable[[str], None]) -> list[str]:
    """Run it; returns what went wrong, one line a kill."""
    rng, faults, recovered, saved = random.Random(seed), [], 1, 0
    begin = time.monotonic()
    save(root, 1, *contents(1))
    once = time.monotonic() - begin
    for number in range(1, kills + 1):
        acknowledged = kill_once(save, root, recovered + 1, rng.uniform(0, 4 * once))
        saved += acknowledged - recovered
        recovered, fault = verdict(root, acknowledged)
        if fault:
            faults.append(f"kill {number}: {fault}")
            shutil.rmtree(root)  # go on from a clean folder
            recovered = 0
        for old in manifest.list_iterations(root)[2:]:
            shutil.rmtree(root / manifest.iteration_folder(old))  # keep the campaign's folder small
        left = (time.monotonic() - begin) / number * (kills - number)
        report(f"kill {number}/{kills}: recovered iteration {recovered}, {len(faults)} bad, {left:.0f} s left")
    report(f"{kills} kills, {saved} saves returned, {len(faults)} bad recoveries, {time.monotonic() - begin:.1f} s")
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--writer", choices=sorted(WRITERS), default="real")
    parser.add_argument("--folder", help="where to save (a new folder is made in it); default: the system's temporary folder")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        faults = campaign(arguments.kills, arguments.seed, WRITERS[arguments.writer], Path(folder) / "run", print)
    for fault in faults:
        print(fault)
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
