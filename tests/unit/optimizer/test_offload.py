"""State on the host or in files, and weights in host memory between their uses: the same bits at
every stage; a checkpoint and a log line see them stepped.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from parity import worker
from parity.compare import bits_off, ranks_agree
from parity.layouts import BASE, RATES
from parity.worker import Outcome, run_case
from unit.meta_rank import build_rank

from megatron.checkpoint.reader import open_checkpoint
from megatron.config.arguments import parse_arguments
from megatron.config.groups import OptimizerConfig
from megatron.config.validate import resolve
from megatron.optimizer import nvme
from megatron.optimizer.optimizer import Optimizer
from megatron.optimizer.update import StepScalars
from megatron.parallel.blocks import on_host_of

SMALL = 4096  # elements of a part of a file: layers of these models have several
FLAGS = (*BASE, "--micro-batch-size", "2")
HOST, PART = "--optimizer-cpu-offload", "--optimizer-cpu-offload --optimizer-offload-fraction 0.4"
FILES = "--optimizer-nvme-offload DISK"
SOME_FILES = f"{FILES} --optimizer-offload-fraction 0.6"
WEIGHTS = "--param-cpu-offload"
WEIGHTS_FILES = f"{WEIGHTS} {FILES}"
# the host steps the last blocks first: a part of them has the head, not the embedding
TWO_RATES = f"{RATES} --untie-embeddings-and-output-weights"
OVERFLOWS = "--fp16 --initial-loss-scale 1e12 --loss-scale-window 2"
PP = "--num-layers 4 --pipeline-model-parallel-size 2 --pipeline-schedule"
RUNS = {  # flags of 2 ranks, with a pipeline or copies of 4; more flags
    "--zero-stage 0 --log-num-zeros-in-grad": (HOST, PART, FILES),
    f"--zero-stage 1 {TWO_RATES}": (HOST, PART, FILES),
    "--zero-stage 2 --bf16 --log-num-zeros-in-grad": (HOST, PART),
    f"--zero-stage 2 {OVERFLOWS}": (HOST, PART, SOME_FILES),
    "--zero-stage 3 --eval-interval 3": (WEIGHTS,),
    "--zero-stage 3 --zero-shard-size 2": (WEIGHTS_FILES,),
    "--zero-stage 3 --bf16 --eval-interval 3": (HOST, PART),
    "--zero-stage 3 --zero3-keep-gathered --bf16 --no-overlap-param-gather": (HOST, PART, FILES),
    f"--zero-stage 3 --recompute-granularity full {TWO_RATES}": (HOST, PART),
    f"--zero-stage 2 --bf16 {PP} zero-bubble-v": (HOST, PART, SOME_FILES),
    f"--zero-stage 3 {OVERFLOWS} {PP} zero-bubble": (WEIGHTS,),
    f"--zero-stage 3 --bf16 {PP} zero-bubble-v --zero3-keep-gathered --no-overlap-param-gather": (
        WEIGHTS,
    ),
    f"--zero-stage 3 --bf16 {PP} gpipe": (WEIGHTS_FILES,),
    f"--zero-stage 3 --bf16 --recompute-granularity full {PP} 1f1b": (
        f"{WEIGHTS} --optimizer-offload-fraction 0.4",
    ),
    f"--zero-stage 3 --bf16 --freeze layers.0 --num-virtual-stages-per-pipeline-rank 2 "
    f"{PP} interleaved": (WEIGHTS,),
}


def looked_at(flags: tuple[str, ...]) -> tuple[Outcome, int, int]:
    """A run whose state is elsewhere: its outcome, how many blocks leave no weights on the device,
    and how many parts of files there are beyond one a block.
    """
    seen, check = [], worker.published_weights_are_the_masters

    def look(run) -> None:
        check(run)
        optimizer = run.optimizer
        beyond = 0
        if files := optimizer.files:
            memory = [len(room) for slot in files.ring for room in slot.memory.values()]
            assert sum(memory) == nvme.SLOTS * SMALL * 12  # whatever the model's size
            beyond = len(files.order) - len(files.parts)
        for block in optimizer.blocks:
            assert (block.master is None) == block.in_files
            assert block.in_files == (block.on_host and "--optimizer-nvme-offload" in flags)
            if WEIGHTS not in flags:
                continue
            assert block.offloaded == (block.on_host or not block.trained) and block.is_released
            assert block.offloaded or block.rounded is None
            for piece, held in optimizer.pieces(block, ("master",), "read"):
                gathered = block.gathered_from[piece].to(block.weight)
                assert torch.equal(gathered, held["master"].to(block.weight))
        seen.append((sum(block.offloaded for block in optimizer.blocks), beyond))

    with (
        mock.patch.object(nvme, "PART", SMALL),
        mock.patch.object(worker, "published_weights_are_the_masters", look),
    ):
        return run_case(flags), *seen[0]


def same_bits(ones: list[Outcome], others: list[Outcome], digits: float = 1e-13) -> None:
    """The same run, but for the last digits of a norm that is summed part by part."""
    assert not bits_off(ones, others, norms=0.0) and not ranks_agree(others)
    for row, same in zip(ones[0].metrics, others[0].metrics, strict=True):
        norms = row.get("params-norm", 0), same.get("params-norm", 0)
        assert norms[0] == pytest.approx(norms[1], rel=digits, abs=0)
        assert repr(row | {"params-norm": 0}) == repr(same | {"params-norm": 0})


@pytest.mark.parametrize("flags", RUNS, ids=str)
@pytest.mark.default("--zero-stage 0 --log-num-zeros-in-grad", "--zero-stage 3 --eval-interval 3")
def test_a_step_elsewhere_has_the_same_bits(gloo_world, tmp_path, flags):
    both = (*FLAGS, "--train-iters", "8", *flags.split())
    world = gloo_world(4 if "pipeline" in flags or "shard-size" in flags else 2)
    plain = world.run(run_case, both)
    for words in RUNS[flags]:
        more = words.replace("DISK", str(tmp_path)).split()
        outcomes, offloaded, beyond = zip(*world.run(looked_at, (*both, *more)), strict=True)
        same_bits(plain, list(outcomes), 0 if words in (HOST, PART) else 1e-13)
        assert all(offloaded) if WEIGHTS in words else not any(offloaded)
        assert any(beyond) or words not in (FILES, SOME_FILES)
        assert os.listdir(tmp_path) == []
    assert any(step.skipped for step in plain[0].steps) == ("fp16" in flags)
    assert all(math.isfinite(step.loss) for step in plain[0].steps)


@pytest.mark.parametrize("flags", ["", "--bf16 --freeze embedding", OVERFLOWS])
def test_one_rank_that_shares_with_nobody_trains_the_same_bits(one_thread, flags):
    """Without the flag it is at stage 0, which with one micro-batch adds nothing up in another
    order.
    """
    own = "--zero-stage 3 --train-iters 6 --micro-batch-size 8".split()
    flags = (*BASE, *own, *flags.split())
    found, count, _ = looked_at((*flags, WEIGHTS))
    same_bits([run_case(flags)], [found])
    assert count == 3


def same_checkpoints(one: Path, other: Path, iteration: int) -> bool:
    with open_checkpoint(one, iteration) as a, open_checkpoint(other, iteration) as b:
        assert sorted(a.names) == sorted(b.names) and len(a.names) % 3 == 0
        return all(torch.equal(a.read_tensor(name), b.read_tensor(name)) for name in a.names)


@pytest.mark.parametrize(
    ("flags", "more", "ranks"),
    [
        ("--zero-stage 2 --bf16", "files", 2),
        ("--zero-stage 0 --async-save", "files", 2),
        ("--zero-stage 3 --bf16", "weights", 2),
        ("--zero-stage 3 --bf16", "weights", 1),
    ],
)
@pytest.mark.default("--zero-stage 2 --bf16-files-2", "--zero-stage 3 --bf16-weights-1")
def test_checkpoints_are_those_of_a_run_in_memory(gloo_world, tmp_path, flags, more, ranks):
    """Saved by two ranks with and without, loaded with and without, gone on with: always the same
    bits.
    """
    (disk := tmp_path / "disk").mkdir()
    flags = (*BASE, *"--train-iters 6 --save-interval 3".split(), *flags.split())
    more = {"files": FILES.replace("DISK", str(disk)), "weights": WEIGHTS}[more].split()
    here, there, here_again, there_again = (tmp_path / str(number) for number in range(4))

    def train(ranks: int, save: Path, *own: str) -> None:
        words = (*flags, "--micro-batch-size", str(8 // ranks), "--save", str(save), *own)
        gloo_world(ranks).run(looked_at if set(more) <= set(own) else run_case, words)

    train(2, here)
    train(2, there, *more)
    assert same_checkpoints(here, there, 3) and same_checkpoints(here, there, 6)
    train(ranks, there_again, *more, "--load", str(here), "--ckpt-step", "3")
    train(ranks, here_again, "--load", str(there), "--ckpt-step", "3")
    assert same_checkpoints(here_again, there_again, 6)
    assert ranks == 1 or same_checkpoints(here, here_again, 6)


def on_host(sizes: list[int], fraction: float) -> list[bool]:
    """Of blocks of these sizes that are trained."""
    layouts = [SimpleNamespace(size=size, is_copied=False) for size in sizes]
    optimizer = OptimizerConfig(optimizer_cpu_offload=True, optimizer_offload_fraction=fraction)
    return on_host_of(layouts, [True] * len(sizes), optimizer)


def test_the_share_of_the_host_is_the_last_blocks():
    assert on_host([4, 2, 2, 2, 6], 1.0) == [True] * 5
    assert on_host([4, 2, 2, 2, 6], 0.0) == [False] * 5
    assert on_host([4, 2, 2, 2, 6], 0.5) == [False, False, False, True, True]
    # 2 of 16 are nearer to it than 6
    assert on_host([4, 2, 2, 2, 6], 0.1) == [False, False, False, True, False]


@pytest.mark.parametrize("fraction, wanted", [("0.5", [False, False]), ("1", [True, True])])
def test_both_ends_of_a_pipeline_step_a_tied_matrix_alike(fraction, wanted):
    """The kernels of host and device round differently."""
    more = f"{PP} 1f1b {PART} --optimizer-offload-fraction {fraction}"
    config = resolve(parse_arguments([*FLAGS, *more.split()]).config, 2, 50).config
    found = []
    for rank in range(2):
        _, _, blocks = build_rank(config, 50, 2, rank)
        assert fraction == "1" or sum(block.on_host for block in blocks) == 1
        found.append(blocks[0 if rank == 0 else -1].on_host)
    assert found == wanted


def test_the_host_does_not_wait_for_scalars_but_gradients_cross_behind_them():
    calls = mock.Mock()
    calls.scalar = mock.Mock(spec=torch.Tensor)
    optimizer = SimpleNamespace(
        waiting={},
        host=SimpleNamespace(order=[], begin=calls.begin),
        keeps_gradients=False,
        files=None,
    )
    numbers = [calls.scalar] * 5
    Optimizer._defer_host_steps(optimizer, {None: StepScalars(1e-3, 0.0, 1e-8, *numbers)})
    copied = mock.call.scalar.to("cpu", copy=True, non_blocking=True)
    assert calls.mock_calls == [copied] * 5 + [mock.call.begin()]
