"""In fp32 a pipeline of an untied model gives the bits of one process, under every schedule: no sum
is taken in another order.
"""

import pytest
import torch
from parity.layouts import BASE, LLAMA, SCHEDULES, Row
from parity.worker import Outcome, reference, run_case

ADAM = "--clip-grad 0"
SGD = "--clip-grad 0 --optimizer sgd --lr 0.1"
# Untied, clipping off: the one thing that adds over stages is the norm.
COMMON = "--untie-embeddings-and-output-weights --num-layers 4 --train-iters 4 --micro-batch-size 1"


def bits(outcomes: list[Outcome]) -> tuple[list[float], list[float], dict[tuple, torch.Tensor]]:
    """Losses, evaluations and final parameters."""
    weights = {
        (piece.name, piece.offset): piece.values
        for outcome in outcomes
        for piece in outcome.weights
    }
    return [step.loss for step in outcomes[0].steps], outcomes[0].evaluations, weights


def same(one, other) -> bool:
    return (
        one[:2] == other[:2]
        and one[2].keys() == other[2].keys()
        and all(torch.equal(one[2][key], other[2][key]) for key in one[2])
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "flags", [f"{ADAM} --hidden-dropout 0.1", f"{SGD} {LLAMA}"], ids=["adam-dropout", "sgd-llama"]
)
@pytest.mark.default("adam-dropout-interleaved v2", "adam-dropout-zero-bubble-v")
def test_the_same_bits_as_one_process(gloo_world, flags, schedule):
    flags = (*BASE, *COMMON.split(), *flags.split())
    outcomes = gloo_world(2).run(run_case, (*flags, *Row(f"pp2 {schedule}", "gpt").words.flags))
    assert same(bits(outcomes), bits([reference(flags)]))


def test_another_order_of_the_sums_gives_other_bits():
    """The control: two samples in a micro-batch instead of one."""
    flags = (*BASE, *COMMON.split(), *SGD.split(), *LLAMA.split())
    assert not same(
        bits([reference(flags)]), bits([reference((*flags, "--micro-batch-size", "2"))])
    )
