"""Stages tile the units of a model; `auto` is the best of all splits."""

from __future__ import annotations

import dataclasses
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
from megatron.model.arithmetic import (
    flops_per_iteration,
    parameter_count,
    unit_flops,
    unit_parameters,
)
from megatron.model.stages import Stage, balance, pipeline_stages, whole


def resolved(layers: int, ranks: int, model: dict | None = None, **distributed) -> Config:
    config = Config(
        model=ModelConfig(
            **{"num_layers": layers, "hidden_size": 64, "num_attention_heads": 4, **(model or {})}
        ),
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


def test_the_whole_model():
    config = resolved(3, 1)
    assert whole(config.model) == pipeline_stages(config, 1024) == (Stage(True, range(0, 3), True),)
    assert whole(config.model)[0].units == range(0, 5)


@pytest.mark.parametrize(
    "layers, ranks, flags",
    [
        (8, 4, {}),
        (8, 2, {"num_virtual_stages_per_pipeline_rank": 2}),
        (8, 4, {"pipeline_schedule": "zero-bubble-v"}),
        (
            6,
            4,
            {
                "account_for_embedding_in_pipeline_split": True,
                "account_for_loss_in_pipeline_split": True,
            },
        ),
        (8, 4, {"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 3}),
        (5, 3, {"pipeline_model_parallel_layout": "E|ttttt|L"}),
        (5, 2, {"pipeline_model_parallel_layout": "Ett|(t|)*2tL"}),
    ],
)
def test_stages_tile_the_units(layers, ranks, flags):
    config = resolved(layers, ranks, **flags)
    stages = pipeline_stages(config, 1024)
    assert (
        tiles(stages, layers)
        and len(stages) == ranks * config.distributed.num_virtual_stages_per_pipeline_rank
    )


def test_the_stages_of_a_drawn_layout():
    assert pipeline_stages(resolved(5, 3, pipeline_model_parallel_layout="E|t*5|L"), 1024) == (
        Stage(True, range(0, 0), False),
        Stage(False, range(0, 5), False),
        Stage(False, range(5, 5), True),
    )


@given(
    st.integers(1, 30),
    st.integers(2, 6),
    st.integers(1, 3),
    st.sampled_from([128, 4096, 200_000]),
    st.booleans(),
)
def test_auto_tiles_the_units_and_shares_out_their_cost(layers, ranks, virtual, vocab, untied):
    if ranks * virtual > layers + 2:
        virtual, ranks = 1, min(ranks, layers + 2)
    model = {"untie_embeddings_and_output_weights": untied}
    config = resolved(
        layers,
        ranks,
        model,
        pipeline_model_parallel_layout="auto",
        num_virtual_stages_per_pipeline_rank=virtual,
    )
    stages, flops = pipeline_stages(config, vocab), unit_flops(config.model, 32, vocab)
    assert tiles(stages, layers) and len(stages) == ranks * virtual
    largest = max(sum(flops[i] for i in stage.units) for stage in stages)
    # a sharper bound would not hold for every list of costs
    assert largest < sum(flops) / len(stages) + max(flops)


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


def test_auto_worked_out_by_hand():
    # 32 layers of 10 and a head of 17 over 8 stages: 337 / 8 = 42.1, so 50 is the least that whole
    # layers allow; three go with the head
    assert balance([0] + [10] * 32 + [17], [5] + [10] * 32 + [7], 8) == (5, 4, 4, 4, 4, 4, 5, 4)
    # the same with a vocabulary that outweighs layers: within 50 FLOPs, 10 parameters are the
    # fewest for the largest stage
    assert balance([0] + [10] * 32 + [17], [9] + [1] * 32 + [9], 8) == (2, 5, 5, 5, 5, 5, 5, 2)
    # a head as large as all layers is alone
    assert balance([0, 1, 1, 1, 3], [9, 1, 1, 1, 9], 2) == (4, 1)
    # an embedding costs no time, only parameters
    assert balance([0, 2, 2, 2, 2, 2], [9, 1, 1, 1, 1, 1], 3) == (2, 2, 2)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "untie_embeddings_and_output_weights": True,
            "position_embedding_type": "rope",
            "normalization": "RMSNorm",
            "activation": "swiglu",
        },
        {
            "add_bias_linear": False,
            "qk_layernorm": True,
            "group_query_attention": True,
            "num_query_groups": 1,
        },
    ],
)
def test_costs_of_units_add_up_to_those_of_the_model(changes, tp):
    config = resolved(3, 1, changes)
    assert sum(unit_parameters(config.model, 1024)) == parameter_count(config.model, 1024)["total"]
    assert (
        sum(unit_parameters(config.model, 1024, tp))
        == parameter_count(config.model, 1024, tp)["total"]
    )
    copy = 0 if config.model.untie_embeddings_and_output_weights else 1024 // tp * 64
    assert (
        sum(unit_parameters(config.model, 1024, tp, copied=True))
        - sum(unit_parameters(config.model, 1024, tp))
        == copy
    )
    assert 3.0 * 2 * 32 * sum(unit_flops(config.model, 32, 1024)) == flops_per_iteration(
        config.model, 2, 32, 1024
    )
    deeper = dataclasses.replace(config.model, num_layers=4)
    assert unit_flops(deeper, 32, 1024)[:4] == unit_flops(config.model, 32, 1024)[:4]
