"""What the processes of the kill campaigns do: save one iteration after the other, in several ways
and in a bad one, and log what is complete.
"""

from __future__ import annotations

import logging
import math
import random
import re
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.checkpoint import manifest, writer  # noqa: E402
from megatron.checkpoint.local.checkpoints import LocalCheckpoint, LocalCheckpoints  # noqa: E402
from megatron.checkpoint.local.nodes import adopt_run_id  # noqa: E402
from megatron.checkpoint.manager import CheckpointManager, staging_bytes  # noqa: E402
from megatron.checkpoint.ranks import SINGLE_RANK, Ranks  # noqa: E402
from megatron.checkpoint.reader import Checkpoint  # noqa: E402
from megatron.checkpoint.writer import own_part  # noqa: E402
from megatron.model.spec import Box, Holder  # noqa: E402

SHAPES = {
    "embedding.word.weight": (307, 512),
    "layers.0.mlp.up.weight": (512, 512),
    "layers.0.mlp.up.bias": (512,),
}
Report = Callable[[str], None]
Job = Callable[[Path, int, Ranks, Report], None]


def contents(iteration: int, ranks: Ranks = SINGLE_RANK) -> tuple[list, dict]:
    """What this rank writes of tensors whose every value is the iteration's, and the state."""
    pairs = []
    for number, (name, shape) in enumerate(SHAPES.items()):
        places = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
        values = 1e-3 * places + (1000 * iteration + number)
        pairs.append((Box(name, shape, (0,) * len(shape), shape), values))
    own = own_part(pairs, lambda box: Holder(ranks.world.rank, ranks.world.size))
    return own, {"iteration": iteration, "consumed_samples": 8 * iteration}


def differs(checkpoint: Checkpoint) -> str | None:
    """What of an open checkpoint is not what `contents` put into it, if anything."""
    pairs, state = contents(checkpoint.iteration)
    if checkpoint.state != state:
        return f"iteration {checkpoint.iteration}: the state is {checkpoint.state}"
    wrong = [
        box.name for box, want in pairs if not torch.equal(checkpoint.read_tensor(box.name), want)
    ]
    return f"iteration {checkpoint.iteration}: wrong values in {wrong}" if wrong else None


def in_place(
    root: Path, iteration: int, pairs: list, state: dict, ranks: Ranks = SINGLE_RANK
) -> None:
    """A mutant: writes where readers look."""
    target = root / manifest.iteration_folder(iteration)
    if ranks.first:
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
    ranks.gather_or_raise(lambda: None)
    records = ranks.gather_or_raise(
        lambda: writer.write_shard(target, ranks.world.rank, ranks.world.size, iteration, pairs)
    )
    content = manifest.manifest_of(iteration, "", records, state, "")
    if ranks.first:
        (target / manifest.MANIFEST).write_bytes(manifest.encode_manifest(content))
    ranks.gather_or_raise(lambda: None)


# ---- jobs: loops that save one iteration after the other and `report` each that is complete ------


def at_once(save: Callable, root: Path, first: int, ranks: Ranks, report_line: Report) -> None:
    """Synchronous saves."""
    for iteration in range(first, first + 1000):
        save(root, iteration, *contents(iteration, ranks), ranks=ranks)
        report_line(str(iteration))


def in_background(root: Path, first: int, ranks: Ranks, report_line: Report) -> None:
    """Asynchronous saves: the tensors change as soon as a save has begun, and some steps are taken
    before the next one.
    """
    Heard(report_line)
    rng = random.Random(first)  # the same on all ranks
    memory = staging_bytes(contents(first, ranks)[0], None)
    saved = partial(report_saved, report_line)
    saver = CheckpointManager(root, ranks, memory, report=saved)
    for iteration in range(first, first + 1000):
        save_and_train(saver, saver, iteration, rng.randrange(20))


def report_saved(report_line: Report, iteration: int, **_: float) -> None:
    report_line(str(iteration))


def save_and_train(
    saver: CheckpointManager, tier: CheckpointManager | LocalCheckpoints, iteration: int, steps: int
) -> None:
    """Save in a tier; the tensors change at once, and some steps are taken."""
    pairs, state = contents(iteration, saver.ranks)
    tier.save(iteration, pairs, state)
    for _, tensor in pairs:
        tensor.fill_(-1.0)
    for _ in range(steps):
        step(saver)


class Heard(logging.Handler):
    """Reports the saves that are logged."""

    def __init__(self, report_line: Report) -> None:
        super().__init__()
        self.report_line = report_line
        logger = logging.getLogger("megatron")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if "NOT saved" in line:
            self.report_line(f"failed {line}")
        elif match := re.match(r" saved local checkpoint of iteration (\d+)", line):
            self.report_line(match[1])


def step(saver: CheckpointManager) -> None:
    """What training does of a save in each step."""
    time.sleep(0.001)
    sums = torch.tensor(saver.ready())
    if saver.ranks.world.size > 1:
        dist.all_reduce(sums)
    saver.advance(sums.tolist())


def in_tiers(
    root: Path, first: int, ranks: Ranks, report_line: Report, redundancy: str = "partner"
) -> None:
    """Go on from the newest checkpoint of both tiers, reported as `found N`, or `wrong`; save in
    the local tier, and each fourth time in both, in the background. Each rank is a separate node;
    with two or more each keeps another one's shards too, or an XOR block of all others'.
    """
    Heard(report_line)
    root.mkdir(exist_ok=True)
    kind = redundancy if ranks.world.size > 1 else "none"
    local_checkpoints = LocalCheckpoints(node_folder(root, ranks.world.rank), ranks, kind)
    checkpoint = local_checkpoints.newest(str(root), str(root), False)
    found = 0
    if checkpoint is not None:
        if isinstance(checkpoint, LocalCheckpoint):
            checkpoint.fetch([box for box, _ in contents(1)[0]])
        found, fault = checkpoint.iteration, differs(checkpoint)
        ranks.gather_or_raise(lambda: None)
        checkpoint.close()
        if fault is not None:
            report_line(f"wrong {fault}")
    report_line(f"found {found}")
    local_checkpoints.adopt(adopt_run_id(str(root), str(root), ranks))
    saver = CheckpointManager(
        root,
        ranks,
        1,
        local_checkpoints=local_checkpoints,
        report=partial(report_saved, report_line),
    )
    rng = random.Random(found)
    for iteration in range(found + 1, found + 1000):
        tier = saver if iteration % 4 == 0 else local_checkpoints
        save_and_train(saver, tier, iteration, rng.randrange(20))


def node_folder(root: Path, node: int) -> Path:
    """Of the local tier."""
    return Path(f"{root}.node{node}")


SAVES: dict[str, Callable] = {"real": writer.save_checkpoint, "in-place": in_place}
JOBS: dict[str, dict[str, Job]] = {  # mode, writer
    "sync": {name: partial(at_once, save) for name, save in SAVES.items()},
    "async": {"real": in_background},
    "local": {"real": in_tiers, "xor": partial(in_tiers, redundancy="xor")},
}
