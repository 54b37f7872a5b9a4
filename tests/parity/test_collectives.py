"""How many collectives a layer and a step need, and how many bytes they send: from call arguments, and from the loopback interface."""

from collections import Counter

import pytest

from dist.pool import World
from parity.layouts import BASE
from parity.ledger import count, measure

LAYERS, SEQ, HIDDEN, FP64, FP32 = 2, 16, 32, 8, 4
STEPS, MICRO_BATCHES = 2, 8
ONE_TP = "--hidden-dropout 0 --attention-dropout 0 --eval-iters 0 --train-iters 2 --lr-warmup-iters 0".split()
ACTIVATION = SEQ * HIDDEN * FP64  # s x b x h of a micro-batch of one sample


def in_layers(gloo_world, size, *flags):
    """(kind, phase, caller) -> (how many a layer and micro-batch, bytes that a rank sends in each), the same on every rank."""
    flags = (*BASE, *ONE_TP, "--fp64", "--micro-batch-size", "1", "--tensor-model-parallel-size", str(size), *flags)
    by_rank = []
    for calls in gloo_world(size).run(count, flags):
        calls = [call for call in calls if call.phase != "elsewhere"]
        assert {call.ranks for call in calls} == {tuple(range(size))}
        messages, sent = Counter(), Counter()
        for call in calls:
            key = call.kind, call.phase, call.caller
            messages[key] += 1 if call.kind == "all-reduce" else 1 / (size - 1)  # the others are messages to each other rank
            sent[key] += call.bytes
        each = STEPS * MICRO_BATCHES * LAYERS
        by_rank.append({key: (round(messages[key] / each, 9), round(sent[key] / messages[key], 6)) for key in messages})
    assert all(row == by_rank[0] for row in by_rank)
    return by_rank[0]


@pytest.mark.parametrize("overlap", [(), ("--no-tp-comm-overlap",)], ids=["overlap", "serial"])
@pytest.mark.parametrize("size", [2, 4])
def test_tensor_parallelism(gloo_world, size, overlap):
    """A layer: 2 all-reduces forward, 2 backward, each of s b h elements."""
    bytes_each = 2 * (size - 1) / size * ACTIVATION
    assert in_layers(gloo_world, size, *overlap) == {
        ("all-reduce", "forward", "_RowLinear.forward"): (2, bytes_each), ("all-reduce", "backward", "_ColumnLinear.backward"): (2, bytes_each),
    }


@pytest.mark.parametrize("overlap", [(), ("--no-tp-comm-overlap",)], ids=["overlap", "serial"])
@pytest.mark.parametrize("size", [2, 4])
def test_sequence_parallelism(gloo_world, size, overlap):
    """A layer: 2 all-gathers and 2 reduce-scatters forward, the same backward, and 2 all-gathers of sharded inputs for weight gradients."""
    bytes_each = (size - 1) / size * ACTIVATION
    found = in_layers(gloo_world, size, "--sequence-parallel", *overlap)
    regathers = found.pop(("all-gather", "backward", "_ColumnLinear.backward"))
    assert regathers == (2, bytes_each)
    assert found == {
        ("all-gather", "forward", "_ColumnLinear.forward"): (2, bytes_each), ("reduce-scatter", "forward", "_RowLinear.forward"): (2, bytes_each),
        ("all-gather", "backward", "_RowLinear.backward"): (2, bytes_each), ("reduce-scatter", "backward", "_ColumnLinear.backward"): (2, bytes_each),
    }


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
@pytest.mark.parametrize("size, flags, wire", [(2, (), FP32), (4, (), FP32), (2, ("--no-overlap-grad-reduce",), FP32), (2, ("--grad-reduce-in-bf16",), 2)],
                         ids=["dp2", "dp4", "serial", "bf16"])
def test_data_parallelism(gloo_world, size, flags, wire, micro_batch):
    """A step: each rank sends 2 (N-1)/N of the gradient, once, whatever the number of micro-batches; padding to slices is the only extra."""
    if micro_batch * size > 8:
        pytest.skip("the global batch is 8 samples")
    vocabulary, positions, h = 50, SEQ, 64  # every tensor a multiple of 64 elements: only blocks are padded
    parameters = (vocabulary + positions + 2) * h + LAYERS * (12 * h**2 + 13 * h)
    padding = (1 + LAYERS) * 64 * size  # each block to equal slices on a grid of 64
    for calls in gloo_world(size).run(count, (*BASE, *ONE_TP, "--hidden-size", str(h), "--micro-batch-size", str(micro_batch), *flags)):
        sent = Counter()
        for call in calls:
            sent[call.kind if call.caller.startswith("GradientReduction.") else "else"] += call.bytes / STEPS
        least = (size - 1) / size * parameters * wire
        assert set(sent) == {"all-gather", "reduce-scatter", "else"}
        assert sent["all-gather"] == sent["reduce-scatter"]
        assert least <= sent["reduce-scatter"] <= least * (1 + padding / parameters)
        assert sent["else"] < 400  # the step's scalars


LARGE = "--hidden-size 128 --num-attention-heads 8 --seq-length 256 --micro-batch-size 8 --train-iters 3 --lr-warmup-iters 0 --eval-iters 0 --hidden-dropout 0 " \
        "--attention-dropout 0 --vocab-size 511".split()


@pytest.mark.parametrize("flags", ["--tensor-model-parallel-size 2", "--tensor-model-parallel-size 2 --sequence-parallel", "--micro-batch-size 1"],
                         ids=["tp2", "tp2sp", "dp2"])
def test_the_loopback_interface_saw_these_bytes(flags):
    """Within 5%, on a fresh pair of processes. Whatever else the machine sends can only add: the quietest of five runs counts."""
    world, excess = World(2), []
    try:
        while len(excess) < 5 and not (excess and min(excess) <= 1.05):
            (counted, seen), _ = world.run(measure, (*BASE, *LARGE, *flags.split()))
            assert counted > 4e6
            excess.append(seen / counted)
    finally:
        world.close()
    assert 0.95 <= min(excess) <= 1.05
