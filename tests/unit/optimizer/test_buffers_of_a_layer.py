"""A layer with a second flat buffer, whose gradients are added up over other ranks than the
first.
"""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.config.groups import DistributedConfig, ModelConfig
from megatron.distributed.groups import ALONE, Axis, BufferGroups, Groups, Layout, one_process
from megatron.distributed.setup import make_groups
from megatron.model.gpt import GPTModel
from megatron.model.init import fill_initial
from megatron.model.layer import TransformerLayer
from megatron.model.linear import Linear
from megatron.model.spec import Init, ParameterSpec, TensorSpec
from megatron.model.tensor_parallel import NO_TP, TensorParallel
from megatron.parallel.blocks import Block, build_blocks
from megatron.parallel.layer_runner import LayerRunner
from megatron.parallel.pipeline import Pipeline
from megatron.parallel.schedule import build_schedule
from megatron.parallel.zero import Zero

H, S, B, VOCAB, RANKS, MICRO_BATCHES = 16, 8, 2, 30, 4, 2
CONFIG = ModelConfig(
    num_layers=2,
    hidden_size=H,
    ffn_hidden_size=24,
    num_attention_heads=4,
    kv_channels=4,
    num_query_groups=4,
    max_position_embeddings=S,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)


class Paired(TransformerLayer):
    """A layer that ends with a matrix of which two ranks each hold copies of their own."""

    def __init__(
        self, config: ModelConfig, seed: int, index: int, tp: TensorParallel = NO_TP, *rest: Any
    ):
        super().__init__(config, seed, index, tp, *rest)
        name = f"layers.{index}.pair.weight"
        matrix = TensorSpec(name, (H, H), Init(std=0.1), "matrix", group="pairs")
        self.pair = Linear(ParameterSpec((matrix,), is_gemm=True), None, tp)

    def forward(self, x: Tensor, micro) -> Tensor:
        y = super().forward(x, micro)
        return y + self.pair(y)


def groups_of_pairs() -> Groups:
    """Four data-parallel ranks; "pairs": the first two, and the last two."""
    groups = make_groups(Layout(dp=RANKS), None)
    pairs = [(0, 1), (2, 3)]
    made = [[dist.new_group(list(ranks)) for ranks in pairs] for _ in range(2)]
    place = groups.rank // 2

    def axis(process_groups: list) -> Axis:
        return Axis("pairs", groups.rank % 2, pairs[place], process_groups[place])

    own = BufferGroups(axis(made[0]), axis(made[0]), axis(made[1]), ALONE)
    return dataclasses.replace(groups, buffers={**groups.buffers, "pairs": own})


def gradients_by_range(groups: Groups, stage: int, schedule: str) -> list[tuple]:
    """What this rank's step leaves: (block, its part of it, gradient) of each block."""
    with mock.patch.object(GPTModel, "layer_class", Paired):
        model = GPTModel(CONFIG, vocab_size=VOCAB, padded_vocab=VOCAB, dtype=torch.float64, seed=5)
    cpu = torch.device("cpu")
    blocks = build_blocks(model, cpu, groups, zero_stage=stage)
    zero = Zero(model, blocks, groups, DistributedConfig(zero_stage=stage))
    for block in blocks:
        whole = torch.zeros(block.size, dtype=torch.float64)
        for entry in block.entries:
            for box in entry.boxes:
                fill_initial(box, entry.view(whole), 5)
        block.master.copy_(block.part(whole))
        if block.zero_stage < 3:
            block.weight.copy_(whole)
    pipeline = Pipeline(model, zero, LayerRunner(), (0,), (S, B, H), groups, cpu)
    first = dist.get_rank() * MICRO_BATCHES

    def micro_batch(index: int):
        draw = torch.Generator().manual_seed(first + index)
        ids = torch.randint(0, VOCAB, (B, S + 1), generator=draw)
        positions, samples = torch.arange(S).expand(B, S), torch.arange(B)
        return model.micro_batch(
            ids[:, :-1], ids[:, 1:], torch.ones(B, S), positions, samples, training=True
        )

    micro_batches = map(micro_batch, range(MICRO_BATCHES))
    pipeline.run(build_schedule(schedule, 1, 1, MICRO_BATCHES), micro_batches, 1.0)
    zero.end_step()
    return [(named(block), block.own, block.grad_shard.clone()) for block in blocks]


def named(block: Block) -> tuple[str, int, str]:
    """Name, size and group of a block."""
    return block.name, block.size, block.plan.group


def both(stage: int, schedule: str) -> tuple[list[tuple], list[tuple]]:
    """This rank's gradients without any sum, and those of the step."""
    alone = one_process()
    buffers = {**alone.buffers, "pairs": alone.dense}
    alone = dataclasses.replace(alone, buffers=buffers)
    return gradients_by_range(alone, 0, schedule), gradients_by_range(
        groups_of_pairs(), stage, schedule
    )


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_buffer_is_summed_over_its_own_ranks(gloo_world, stage, schedule):
    ranks = gloo_world(RANKS).run(both, stage, schedule)
    own = [{name: gradient for (name, *_), _, gradient in alone} for alone, _ in ranks]
    names = [named[0] for named, *_ in ranks[0][1]]
    assert names == ["embedding", "layers.0", "layers.0 (pairs)", "layers.1", "layers.1 (pairs)"]
    for rank, (_, parts) in enumerate(ranks):
        for (name, size, group), (start, stop), gradient in parts:
            together = range(RANKS) if group == "dense" else range(rank // 2 * 2, rank // 2 * 2 + 2)
            assert (stop - start) * (len(together) if stage else 1) == size
            whole = torch.zeros(size, dtype=torch.float64)
            for other in together:
                whole[: own[other][name].numel()] += own[other][name][:size]
            expected = whole[start:stop]
            assert (gradient - expected).norm() <= 1e-13 * whole.norm() and whole.norm() > 0
