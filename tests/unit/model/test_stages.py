"""Stages tile the units of a model; `auto` is the best of all splits."""

from __future__ import annotations

from itertools import accumulate, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config.groups import (
    Config,
    DataConfig,
    DistributedConfig,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
)
from megatron.config.validate import resolve
from megatron.model.stages import Stage, balance, pipeline_stages


def resolved(layers: int, ranks: int, **distributed) -> Config:
    config = Config(
        model=ModelConfig(num_layers=layers, hidden_size=64, num_attention_heads=4),
        data=DataConfig(mock_data=True, vocab_size=1000, seq_length=32),
        training=TrainingConfig(micro_batch_size=1, train_iters=1),
        optimizer=OptimizerConfig(lr=1.0),
        distributed=DistributedConfig(
            pipeline_model_parallel_size=ranks, world_size=ranks, **distributed
        ),
    )
    return resolve(config, ranks, None).config


def tiles(stages: tuple[Stage, ...], layers: int) -> bool:
    units, last = [unit for stage in stages for unit in stage.units], len(stages) - 1
    whole = units == list(range(layers + 2)) and [
        i for stage in stages for i in stage.layers
    ] == list(range(layers))
    return whole and all(
        len(stage.units) > 0 and (stage.embedding, stage.head) == (k == 0, k == last)
        for k, stage in enumerate(stages)
    )


@pytest.mark.parametrize(
    "layers, ranks, flags",
    [
        (8, 4, {}),
        (8, 2, {"num_virtual_stages_per_pipeline_rank": 2}),
        (8, 4, {"pipeline_schedule": "zero-bubble-v"}),
        (8, 4, {"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 3}),
        (5, 2, {"pipeline_model_parallel_layout": "Ett|(t|)*2tL"}),
        (
            7,
            3,
            {"pipeline_model_parallel_layout": "auto", "num_virtual_stages_per_pipeline_rank": 2},
        ),
    ],
)
def test_stages_tile_the_units(layers, ranks, flags):
    config = resolved(layers, ranks, **flags)
    stages = pipeline_stages(config, 1024)
    assert (
        tiles(stages, layers)
        and len(stages) == ranks * config.distributed.num_virtual_stages_per_pipeline_rank
    )


costs = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=9)


@settings(max_examples=300)
@given(costs, st.data())
def test_balance_is_the_best_of_all_splits(units, data):
    count = data.draw(st.integers(1, len(units)))
    flops, parameters = zip(*units, strict=True)

    def rating(sizes: tuple[int, ...]) -> tuple[int, int, int]:
        ends = list(accumulate(sizes, initial=0))
        own = [(sum(flops[a:b]), sum(parameters[a:b])) for a, b in zip(ends, ends[1:])]
        return max(f for f, _ in own), max(p for _, p in own), sum(f * f for f, _ in own)

    found = balance(flops, parameters, count)
    assert len(found) == count and sum(found) == len(units) and min(found) > 0
    every = [
        tuple(b - a for a, b in zip((0, *cuts), (*cuts, len(units))))
        for cuts in combinations(range(1, len(units)), count - 1)
    ]
    assert rating(found) == min(map(rating, every))
