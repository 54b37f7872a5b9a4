"""Bytes of a checkpoint among the ranks of a pipeline stage: equal within 2%, whatever the layout,
in every rank's own plan and in the files.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import pytest
from unit.meta_rank import build_rank

from megatron.checkpoint.boxes import tiles
from megatron.checkpoint.writer import own_part, shard_bytes
from megatron.config.arguments import parse_arguments
from megatron.config.groups import Config
from megatron.config.validate import resolve
from megatron.distributed.groups import Groups
from megatron.optimizer.optimizer import Optimizer
from megatron.parallel.zero import Zero

MOST = 1.02  # of the fullest rank by the mean
BASE = """--num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 512
--micro-batch-size 1 --train-iters 1 --mock-data
    --tokenizer-type NullTokenizer --vocab-size 50256 --lr 1e-3"""
KV_HEADS = """--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
--untie-embeddings-and-output-weights
    --group-query-attention --num-query-groups 2 --bf16"""
TP, PP, ZERO = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--zero-stage"
LAYOUTS = {  # ranks, flags
    "dp3": (3, ""),
    "tp2 dp4 zero2": (8, f"{TP} 2 {ZERO} 2"),
    "tp4 dp3 zero1, kv heads shared": (12, f"{TP} 4 {ZERO} 1 {KV_HEADS}"),
    "hybrid shards": (8, f"{TP} 2 {ZERO} 3 --zero-shard-size 2"),
    "pp2 dp first": (8, f"{PP} 2 --use-tp-pp-dp-mapping"),
}


def optimizers(config: Config, ranks: int) -> Iterator[tuple[Groups, Optimizer]]:
    """Every rank's, of a job of that number of ranks, on the meta device: what a rank computes at
    its start, without processes and without memory.
    """
    config = resolve(config, ranks, None).config
    for rank in range(ranks):
        groups, model, blocks = build_rank(config, config.data.vocab_size + 1, ranks, rank)
        zero = Zero(model, blocks, groups, config.distributed)
        yield groups, Optimizer(blocks, config, groups, zero)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_of_a_stage_plans_an_equal_part(name):
    """By what every rank of a layout would write: every element once."""
    ranks, flags = LAYOUTS[name]
    batch = ["--global-batch-size", str(ranks)]  # a multiple of every number of data-parallel ranks
    parsed = parse_arguments([*BASE.split(), *flags.split(), *batch])
    sizes: dict[int, list[int]] = {}
    boxes: dict[tuple, list] = {}
    for groups, optimizer in optimizers(parsed.config, ranks):
        held = [*optimizer.weight_boxes(), *optimizer.state_boxes()]
        pairs = own_part(held, optimizer.holder)
        sizes.setdefault(groups.pp.rank, []).append(shard_bytes(pairs))
        for box, _ in pairs:
            key = box.name, tuple(box.shape)
            boxes.setdefault(key, []).append((tuple(box.offset), tuple(box.extent)))
    assert all(tiles(shape, found) for (_, shape), found in boxes.items())
    for of_stage in sizes.values():
        assert max(of_stage) / statistics.fmean(of_stage) <= MOST
