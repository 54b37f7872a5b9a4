"""Large models on many ranks, without a device: what each rank holds by the plan is what the
blocks of its model take, to the byte.

Models are built on the meta device, where storages have sizes and no memory, with the groups of one
rank of the job.
"""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from megatron.tools._plan.memory import PlannedSteps, rank_memories
from step_models import LLAMA, model, resolved
from unit.meta_rank import build_rank

from megatron.config.groups import Config
from megatron.distributed.groups import layout_of
from megatron.parallel import blocks as optimizer_blocks
from megatron.parallel.blocks import Block

RUN = """--mock-data --micro-batch-size 1 --train-iters 1 --lr 1 --attention-dropout 0
--hidden-dropout 0 --recompute-granularity full"""
# vocabulary, flags
MODELS = {
    "7B": (32000, model(32, 4096, 32, 32, 11008, f"{LLAMA} --seq-length 4096")),
    "70B": (128256, model(80, 8192, 64, 8, 28672, f"{LLAMA} --seq-length 8192")),
    "175B": (50257, model(96, 12288, 96, 96, 49152, "--seq-length 2048")),
    "405B": (128256, model(126, 16384, 128, 8, 53248, f"{LLAMA} --seq-length 8192")),
}
# ranks, tp, pp
LAYOUTS = {
    "7B": (256, 2, 2),
    "70B": (512, 8, 4),
    "175B": (1024, 8, 16),
    "405B": (2016, 8, 9),
}


def configure(name: str, world: int, flags: str, tp: int = 1, pp: int = 1) -> Config:
    vocab, sizes = MODELS[name]
    layout = f"--global-batch-size {16 * world // tp // pp} --vocab-size {vocab - 1}"
    if tp > 1:
        layout += f" --tensor-model-parallel-size {tp} --sequence-parallel"
    if pp > 1:
        layout += f" --pipeline-model-parallel-size {pp}"
    precision = "" if "--fp64" in sizes else "--bf16"
    return resolved(f"{RUN} {precision} {sizes} {layout} {flags}", world, vocab)


def blocks_of(name: str, config: Config, world: int, pipe: int = 0) -> list[Block]:
    """The blocks that training would build on the first rank of a pipeline rank."""
    rank = layout_of(config, world).rank({"tp": 0, "cp": 0, "dp": 0, "pp": pipe})
    _, _, blocks = build_rank(config, MODELS[name][0], world, rank)
    return blocks


def nbytes(*tensors: torch.Tensor | None) -> int:
    """Bytes of the storages of tensors, each storage once."""
    storages = {
        id(tensor.untyped_storage()): tensor.untyped_storage()
        for tensor in tensors
        if tensor is not None
    }
    return sum(storage.nbytes() for storage in storages.values())


def gradient_bytes(blocks: list[Block]) -> int:
    """What is accumulated in a step: whole buffers, or at stages 2 and 3 slices of them."""
    total = 0
    for block in blocks:
        block.open()
        total += nbytes(block.grad) if block.zero_stage < 2 else block.grad[block.own_slice].nbytes
    return total


@pytest.mark.parametrize("stage, name", [*enumerate(LAYOUTS)])
def test_the_plan_is_what_the_blocks_take(stage, name):
    world, tp, pp = LAYOUTS[name]
    flags = f"--zero-stage {stage} --pipeline-model-parallel-layout auto"
    config = configure(name, world, flags, tp, pp)
    planned, shard = rank_memories(config, MODELS[name][0], world), world // tp // pp
    for rank in sorted({0, pp // 2, pp - 1}):
        blocks = blocks_of(name, config, world, rank)
        elements = sum(block.size for block in blocks)
        held = planned[rank].static
        assert held["parameters"] == nbytes(*(block.weight for block in blocks))
        assert held["gradients"] == gradient_bytes(blocks)
        assert held["optimizer"] == 3 * sum(block.master.numel() * 4 for block in blocks)
        bytes_each = {0: 18 * shard, 1: 6 * shard + 12, 2: 2 * shard + 16, 3: 16}[stage]
        assert planned[rank].resident * shard == elements * bytes_each


@pytest.mark.parametrize(
    "pp, layers, flags",
    [
        (2, 4, "--fp64"),
        (2, 4, "--pipeline-schedule zero-bubble-v --pipeline-model-parallel-layout auto"),
        (4, 12, "--num-virtual-stages-per-pipeline-rank 3"),
        (3, 4, "--position-embedding-type none --pipeline-model-parallel-layout E|tttt|L"),
    ],
)
def test_every_pipeline_rank_of_several_or_empty_stages(pp, layers, flags):
    sizes = model(layers, 64, 4, 4, 256, f"--seq-length 64 {flags}")
    with mock.patch.dict(MODELS, small=(301, sizes)):
        config = configure("small", 2 * pp, "", 2, pp)
        planned = rank_memories(config, 301, 2 * pp)
        for rank, memory in enumerate(planned):
            blocks = blocks_of("small", config, 2 * pp, rank)
            shapes = [entry.shape for block in blocks for entry in block.entries]
            assert memory.parameters == sum(map(math.prod, shapes))
            bytes_each = 32 if flags == "--fp64" else 18
            assert memory.resident == bytes_each * sum(block.size for block in blocks)
    largest = PlannedSteps(config, 301, 2 * pp, "cuda").largest_ranks()
    fullest = max(memory.total for memory in planned)
    assert max(planned[rank].total for rank in largest) == fullest


HALF = "--optimizer-offload-fraction 0.5"


@pytest.mark.parametrize(
    "flags",
    [
        "--zero-stage 1 --zero-shard-size 8",
        "--zero-stage 2 --optimizer sgd",
        "--zero-stage 2 --main-grads-dtype bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
        f"--zero-stage 2 --optimizer-cpu-offload {HALF}",
        f"--zero-stage 3 --optimizer-nvme-offload files {HALF}",
    ],
)
def test_hybrid_sharding_narrow_state_and_offload(flags):
    world, vocab = 64, 32000
    config = configure("7B", world, flags)
    (planned,) = rank_memories(config, vocab, world)
    blocks = blocks_of("7B", config, world)
    # masters and two moments; moments of half the size, or one
    bytes_each = 8 if "dtype" in flags or "sgd" in flags else 12
    state = {block: bytes_each * (block.own[1] - block.own[0]) for block in blocks}
    apart = {block: size for block, size in state.items() if block.on_host}
    assert bool(apart) == (HALF in flags)
    in_files = "nvme" in flags
    pages = sum(-(-size // (12 * 4096)) * 12 * 4096 for size in apart.values())
    weights = [held for block in blocks for held in (block.weight, block.rounded)]
    assert planned.static == {
        "parameters": nbytes(*weights),
        "gradients": gradient_bytes(blocks),
        "optimizer": sum(state.values()) - sum(apart.values()),
        "host": 4 * 2**21 * 12 if in_files else sum(apart.values()),
        "disk": pages if in_files else 0,
    }


def held_on_the_device(blocks: list[Block]) -> int:
    """Bytes of all tensors that blocks keep on the meta device, which replaces a GPU, between
    their uses.
    """
    values = [value for block in blocks for value in vars(block).values()]
    return nbytes(*(each for each in values if isinstance(each, torch.Tensor) and each.is_meta))


@pytest.mark.parametrize(
    "flags", [HALF, "--optimizer-nvme-offload files --freeze head", "--zero-shard-size 256"]
)
def test_offloaded_weights_leave_the_device(flags):
    """What is stepped on the host or frozen leaves no byte of its weights there; a slice that stays
    is seen.
    """
    world, vocab = 512, 32000
    config = configure("7B", world, f"--zero-stage 3 --param-cpu-offload {flags}")
    static = rank_memories(config, vocab, world)[0].static
    blocks = blocks_of("7B", config, world)
    stays = [block for block in blocks if not block.offloaded]
    assert bool(stays) == (HALF in flags)
    assert all(not block.on_host and block.trained for block in stays)
    part = {block: block.own[1] - block.own[0] for block in blocks}
    left = held_on_the_device(blocks)
    assert left == sum(4 * part[block] for block in stays) and static["parameters"] == 0
    assert static["optimizer"] == sum(12 * part[block] for block in stays)
    stepped = sum(12 * part[block] for block in blocks if block.on_host and not block.in_files)
    weights = sum(block.gathered_from.nbytes for block in blocks if block.offloaded)
    # parts of files, which are smaller than the largest that there are
    pages = [-(-part[block] // 4096) * 4096 for block in blocks if block.in_files]
    ring = 4 * 12 * max(pages, default=0)
    assert static["host"] == stepped + weights + ring
    assert (ring > 0) == ("nvme" in flags)

    def on_the_device(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    with mock.patch.object(optimizer_blocks, "host_memory", on_the_device):
        assert held_on_the_device(blocks_of("7B", config, world)) > left
