"""Flags of a mixture of experts: each fault is one message that names the flag and what to give."""

import pytest
from rule_rows import answers

from megatron.config.arguments import parse_arguments
from megatron.config.errors import UserError
from megatron.config.experts import expert_pattern
from megatron.config.validate import cross_field_faults, resolve

BASE = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --lr 1e-3
--micro-batch-size 1 --train-iters 1 --mock-data --vocab-size 127 --tokenizer-type NullTokenizer
--disable-bias-linear --num-experts 8""".split()


PAIRS = "--overlap-moe-expert-parallel-comm"
EP2 = "--expert-model-parallel-size 2"


def faults(words: str, ranks: int = 1) -> list[str]:
    """Those of BASE with more flags."""
    return cross_field_faults(parse_arguments([*BASE, *words.split()]).config, ranks, 127)


# Ranks and flags, and a part of a fault.
FAULTS = """
1 --moe-router-topk 1
    fault --moe-router-topk 1: the softmax of one chosen logit is
1 --activation-offload --offload-modules mlp_norm mlp_act
    fault --offload-modules mlp_act: experts' activations are not offloaded
1 --moe-layer-freq [1]*3
    fault '[1]*3' has 3 entries, and --num-layers is 4
1 --moe-layer-freq [0]*4
    fault no layer has experts; drop --num-experts
1 --moe-layer-freq foo()
    fault neither a number nor a list of 0 and 1
1 --moe-router-enable-expert-bias
    fault set --moe-router-score-function sigmoid
1 --moe-router-num-groups 8 --moe-router-group-topk 2 --moe-router-topk 3
    fault --moe-router-group-topk 2: must divide --moe-router-topk 3
1 --moe-router-num-groups 8 --moe-router-group-topk 2 --moe-router-topk 4
    fault 2 groups of 1 experts hold fewer than --moe-router-topk 4; give 4 or more
1 --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.01
    fault must be one number for each of --moe-router-load-balancing-type
1 --moe-router-load-balancing-type none --moe-aux-loss-coeff 0.01
    fault none has no loss; give aux_loss
3 --expert-model-parallel-size 3
    fault must divide --num-experts 8; the nearest that fits is 2
2 --expert-model-parallel-size 4
    fault must divide the 2 rank(s) of a pipeline stage
2 --tensor-model-parallel-size 2
    fault would all send the same tokens to experts; give --sequence-parallel
1 --add-bias-linear
    fault set --disable-bias-linear
2 --overlap-moe-expert-parallel-comm --expert-model-parallel-size 2 --moe-token-dispatcher-type \\
allgather
    fault set --moe-token-dispatcher-type alltoall
4 --overlap-moe-expert-parallel-comm --expert-model-parallel-size 2 \\
--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble
    fault which has no pairs of passes; set --pipeline-schedule 1f1b or interleaved
2 --overlap-moe-expert-parallel-comm --expert-model-parallel-size 2 --activation-offload
    fault recompute instead, or remove one of them
2 --overlap-moe-expert-parallel-comm --expert-model-parallel-size 2 --micro-batch-size 1 \\
--global-batch-size 2
    fault has no effect with one micro-batch a step
""".replace("\\\n", "")


@pytest.mark.parametrize("line, wanted", answers(FAULTS, "fault"))
def test_a_fault_says_what_to_give(line, wanted):
    ranks, _, words = line.partition(" ")
    found = faults(words, int(ranks))
    assert any(wanted["fault"][0] in each for each in found), found


def test_flags_of_experts_without_experts_are_faults():
    words = "--num-experts 1 --expert-model-parallel-size 2 --moe-layer-recompute"
    found = faults(words, 2)
    for text in (
        "--expert-model-parallel-size 2: has no effect without --num-experts N",
        "--recompute-modules moe: moe is a part of --num-experts, which is not set; give mlp",
    ):
        assert any(text in each for each in found), found


def test_what_is_not_given_follows():
    config = parse_arguments(
        [*BASE, "--tensor-model-parallel-size", "2", "--sequence-parallel"]
    ).config
    resolved = resolve(config, 2, 127).config
    assert resolved.distributed.expert_tensor_parallel_size == 2
    assert resolved.model.moe_ffn_hidden_size == resolved.model.ffn_hidden_size == 256
    one = resolve(parse_arguments([*BASE, "--num-experts", "1"]).config, 1, 127)
    assert one.config.model.num_experts is None
    assert "num-experts = None: one expert is the MLP itself" in one.notes


@pytest.mark.parametrize(
    "text, layers, expected",
    [("1", 3, "111"), ("2", 5, "10101"), ("([0]*3+[1]*2)", 5, "00011"), ("2*[0,1]", 4, "0101")],
)
def test_which_layers_have_experts(text, layers, expected):
    assert expert_pattern(text, layers) == tuple(digit == "1" for digit in expected)


@pytest.mark.parametrize("text", ["[2]", "[1]*10**9", "[0]*99999999", "x", "", "-1", "[[1]]"])
def test_another_pattern_is_refused(text):
    with pytest.raises(UserError):
        expert_pattern(text, 4)
