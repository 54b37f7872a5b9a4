"""Bytes of a checkpoint among the ranks of a pipeline stage: equal within 2%, whatever the layout,
in every rank's own plan and in the files.
"""

from __future__ import annotations

import pytest
from megatron.benchmarks.parallel_write import byte_count, imbalance, optimizers, written

from megatron.checkpoint.boxes import tiles
from megatron.config.arguments import parse_arguments

MOST = 1.02  # of the fullest rank by the mean
BASE = """--num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 512
--micro-batch-size 1 --train-iters 1 --mock-data
    --tokenizer-type NullTokenizer --vocab-size 50256 --lr 1e-3"""
KV_HEADS = """--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
--untie-embeddings-and-output-weights
    --group-query-attention --num-query-groups 2 --bf16"""
TP, PP, ZERO = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--zero-stage"
LAYOUTS = {  # ranks, flags, and how many ranks at least hold most of what one owner would write
    "dp3": (3, "", 3),
    "tp2 dp4 zero2": (8, f"{TP} 2 {ZERO} 2", 1),
    "tp4 dp3 zero1, kv heads shared": (12, f"{TP} 4 {ZERO} 1 {KV_HEADS}", 1),
    "hybrid shards": (8, f"{TP} 2 {ZERO} 3 --zero-shard-size 2", 2),
    "pp2 dp first": (8, f"{PP} 2 --use-tp-pp-dp-mapping", 4),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_of_a_stage_plans_an_equal_part(name):
    """By what every rank of a layout would write: every element once. Without sharing, one of
    `copies` ranks writes what they all hold: the control.
    """
    ranks, flags, copies = LAYOUTS[name]
    batch = ["--global-batch-size", str(ranks)]  # a multiple of every number of data-parallel ranks
    parsed = parse_arguments([*BASE.split(), *flags.split(), *batch])
    sizes: dict[tuple, list[int]] = {}
    boxes: dict[tuple, list] = {}
    for groups, optimizer in optimizers(parsed.config, ranks):
        for mode in ("balanced", "owner"):
            pairs = written(optimizer, mode)
            sizes.setdefault((mode, groups.pp.rank), []).append(byte_count(pairs))
            for box, _ in pairs:
                key = mode, box.name, tuple(box.shape)
                boxes.setdefault(key, []).append((tuple(box.offset), tuple(box.extent)))
    assert all(tiles(shape, found) for (_, _, shape), found in boxes.items())
    for (mode, _), of_stage in sizes.items():
        fullest = imbalance(of_stage)
        assert fullest <= MOST if mode == "balanced" else fullest > 0.9 * copies
