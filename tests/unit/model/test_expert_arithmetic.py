"""Parameters and operations of a mixture of experts, held against the model that is built."""

import math

import pytest

from megatron.config.arguments import parse_arguments
from megatron.config.derive import ExpertRanks
from megatron.config.validate import resolve
from megatron.model.arithmetic import (
    active_parameters,
    parameter_count,
    unit_flops,
    unit_parameters,
)
from megatron.model.build import declared

BASE = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --lr 1e-3
--micro-batch-size 1 --train-iters 1 --mock-data --vocab-size 49 --tokenizer-type NullTokenizer
--disable-bias-linear --num-experts 8 --moe-ffn-hidden-size 24""".split()
MODELS = {
    "mixtral": "--swiglu",
    "shared": "--swiglu --moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate",
    "bias": "--swiglu --moe-router-score-function sigmoid --moe-router-enable-expert-bias",
}


def model_of(words: str):
    return resolve(parse_arguments([*BASE, *words.split()]).config, 1, 50).config.model


@pytest.mark.parametrize("words", MODELS.values(), ids=MODELS)
def test_parameters_are_those_of_the_model(words):
    model = model_of(words)
    tensors = [
        tensor
        for spec in declared(model, 50).values()
        for tensor in spec.tensors
        if tensor.group != "state"
    ]
    total = sum(math.prod(tensor.shape) for tensor in tensors)
    assert parameter_count(model, 50)["total"] == total
    experts = sum(math.prod(tensor.shape) for tensor in tensors if tensor.group == "expert")
    assert parameter_count(model, 50)["experts"] == experts
    assert active_parameters(model, 50) == total - experts + experts * model.moe_router_topk // 8


def test_a_rank_holds_its_part_of_the_experts():
    ranks = ExpertRanks(2, 2)
    model = model_of("--swiglu --moe-layer-freq [0,1,1,0]")
    own = unit_parameters(model, 50, 1, ranks)
    whole = unit_parameters(model, 50)
    experts = parameter_count(model, 50)["experts"] // 2
    for layer in (0, 3):
        assert own[1 + layer] == whole[1 + layer]
    for layer in (1, 2):
        assert whole[1 + layer] - own[1 + layer] == experts - experts // (ranks.etp * ranks.ep)


def test_operations_are_those_of_the_experts_of_a_token():
    dense = unit_flops(model_of("--swiglu --moe-layer-freq [0,1,1,1] --ffn-hidden-size 48"), 16, 50)
    # two experts of 24 are as much work as an MLP of 48, and the router comes on top
    assert dense[2] - dense[1] == 2 * 32 * 8
    shared = unit_flops(
        model_of("--swiglu --moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate"),
        16,
        50,
    )
    assert shared[2] - dense[2] == 2 * (3 * 16 * 32 + 32)
