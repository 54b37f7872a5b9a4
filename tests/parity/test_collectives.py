"""How many collectives a layer and a step need, and how many bytes they send: from call arguments,
and from the loopback interface.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from parity.layouts import BASE, SCHEDULES, Row
from parity.ledger import count, own_loopback

from megatron.config import schedules
from megatron.observe.stragglers import SECTIONS

TESTS = Path(__file__).resolve().parents[1]

LAYERS, SEQ, HIDDEN, FP64, FP32 = 2, 16, 32, 8, 4
STEPS, MICRO_BATCHES = 2, 8
ALONE = ("all-reduce", "hop")  # are one call each
SHORT = (
    *BASE,
    *"--hidden-dropout 0 --attention-dropout 0 --eval-iters 0 --train-iters 2".split(),
    *"--lr-warmup-iters 0 --micro-batch-size 1".split(),
)
TP, CP, EP = (f"--{axis}-parallel-size" for axis in ("tensor-model", "context", "expert-model"))
ACTIVATION = SEQ * HIDDEN * FP64  # s x b x h of a micro-batch of one sample
TOKEN = FP64 * SEQ  # one number of each token


def in_layers(gloo_world, size, shared, flags=""):
    """{"kind phase caller": (how many a layer and micro-batch, bytes that a rank sends in each)},
    the same on every rank.
    """
    flags = (*SHORT, "--fp64", shared, str(size), *flags.split())
    by_rank = []
    for calls in gloo_world(size).run(count, flags):
        messages, sent = Counter(), Counter()
        for call in calls:
            if call.phase == "elsewhere":
                continue
            key = f"{call.kind} {call.phase} {call.caller}"
            # the others are messages to each other rank
            messages[key] += 1 if call.kind in ALONE else 1 / (len(call.ranks) - 1)
            sent[key] += call.bytes
        each = STEPS * MICRO_BATCHES * LAYERS
        means = {key: round(sent[key] / number, 6) for key, number in messages.items()}
        by_rank.append({key: (round(messages[key] / each, 9), means[key]) for key in messages})
    assert all(row == by_rank[0] for row in by_rank)
    return by_rank[0]


@pytest.mark.parametrize("size", [2, 4])
def test_tensor_parallelism(gloo_world, size):
    """A layer: 2 all-reduces forward, 2 backward, each of s b h elements."""
    bytes_each = 2 * (size - 1) / size * ACTIVATION
    assert in_layers(gloo_world, size, TP) == {
        "all-reduce forward _RowLinear.forward": (2, bytes_each),
        "all-reduce backward _ColumnLinear.backward": (2, bytes_each),
    }


@pytest.mark.parametrize("size", [2, 4])
def test_sequence_parallelism(gloo_world, size):
    """A layer: 2 all-gathers and 2 reduce-scatters forward, the same backward, and 2 all-gathers of
    sharded inputs for weight gradients. Each reduce-scatter of a forward pass is two of half the
    bytes.
    """
    each = (size - 1) / size * ACTIVATION
    assert in_layers(gloo_world, size, TP, "--sequence-parallel") == {
        "all-gather forward _ColumnLinear.forward": (2, each),
        "reduce-scatter forward _RowLinear.forward": (4, each / 2),
        "all-gather backward _RowLinear.backward": (2, each),
        "all-gather backward _ColumnLinear.backward": (2, each),
        "reduce-scatter backward _ColumnLinear.backward": (2, each),
    }


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("size", [2, 4])
def test_context_parallelism(gloo_world, size, groups):
    """A layer with q = n d and k = g d channels of T = s / C tokens. Keys and values gathered, and
    their gradients reduce-scattered: 2 k T (C - 1) elements each way. Heads exchanged:
    (q + 2 k + q) T (C - 1) / C, where k counts key/value heads that are repeated. In a ring each
    rank sends C - 1 blocks of keys and values, of 2 k T elements, in the forward pass, and in the
    backward pass as many again with as many of gradients. In two levels heads are exchanged by two
    ranks, and rings have half as many: blocks of 2 T positions and half the heads.
    """
    grouped = f"--group-query-attention --num-query-groups {groups}"
    tokens, channels = SEQ // size, HIDDEN // 8
    block = 2 * groups * channels * tokens * FP64

    def found(flags):
        return in_layers(gloo_world, size, CP, f"{grouped} {flags}")

    for backend, forward, backward in (
        ("auto", "GatheredAttention.forward", "GatheredAttention.backward"),
        ("plain", "_gather", "_scatter"),
    ):
        assert found(f"--attention-backend {backend}") == {
            f"all-gather forward {forward}": (1, block * (size - 1)),
            f"reduce-scatter backward {backward}": (1, block * (size - 1)),
        }
    sent = tokens * channels * (size - 1) // size * FP64
    assert found("--cp-comm-type a2a") == exchanges((8 + 2 * max(groups, size)) * sent, 8 * sent)
    assert found("--cp-comm-type p2p") == hops(size, block)
    if size == 4:
        levels = "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2"
        sent = tokens * channels // 2 * FP64
        block = 2 * max(groups, 2) // 2 * channels * 2 * tokens * FP64
        exchanged = exchanges((8 + 2 * max(groups, 2)) * sent, 8 * sent)
        assert found(levels) == hops(2, block) | exchanged


def exchanges(qkv, out):
    """Of `in_layers`: heads exchanged for positions, and back, in messages of these bytes."""
    return {
        "all-to-all forward _to_sequence": (1, qkv),
        "all-to-all forward _to_heads": (1, out),
        "all-to-all backward _to_sequence": (1, out),
        "all-to-all backward _to_heads": (1, qkv),
    }


def hops(size, block):
    """Of `in_layers`, in a ring of `size` ranks and blocks of `block` bytes: keys and values in
    either pass, and their gradients.
    """
    return {
        "hop forward _around_ring": (size - 1, block),
        "hop backward _around_ring": (size - 1, block),
        "hop backward RingAttention.backward": (size - 1, block),
    }


EXPERTS = """--disable-bias-linear --swiglu --num-experts 8 --moe-router-force-load-balancing
--moe-router-topk 2 --ffn-hidden-size 16"""


@pytest.mark.parametrize("size", [2, 4])
def test_experts(gloo_world, size):
    """A layer sends T k h (ep - 1) / ep elements of rows to the experts and as many back, forward
    and backward; the T k weights of rows go one way in each, and the numbers of rows once. Ranks
    share the micro-batches that `in_layers` divides by.
    """
    each, share = 1 / size, (size - 1) / size
    rows, weights = 2 * HIDDEN * TOKEN * share, 2 * TOKEN * share
    mean = round((2 * rows + weights) / 3, 6)
    assert in_layers(gloo_world, size, EP, EXPERTS) == {
        "all-to-all forward Dispatcher.plan": (each, 8 * 8 * share),  # 8 experts, in 8 bytes each
        "all-to-all forward _exchanged": (3 * each, mean),
        "all-to-all backward _exchanged": (3 * each, mean),
    }


# ---- outside of layers

# of what console lines show
OTHER_CALLERS = {"_metrics_of_all_ranks"}


@pytest.mark.parametrize("sequence", [False, True])
def test_embedding_head_and_loss(gloo_world, sequence):
    """The loss takes three numbers a token from each rank, in one all-gather; no rank gathers
    logits. Under sequence parallelism messages are halved, and partial gradients are summed once a
    step in one all-reduce.
    """
    flags = (*SHORT, "--fp64", TP, "2", *["--sequence-parallel"] * sequence)
    sent, messages = Counter(), Counter()
    for call in gloo_world(2).run(count, flags)[1]:
        if call.phase == "elsewhere" and call.caller not in OTHER_CALLERS | {"all_reduce_totals"}:
            key = f"{call.kind} {call.caller}"
            sent[key] += call.bytes
            messages[key] += 1
    found = {key: (number / STEPS, sent[key] / number) for key, number in messages.items()}
    expected = {"all-gather ShardedCrossEntropy.combine": (MICRO_BATCHES, 3 * TOKEN)}
    if sequence:
        half = MICRO_BATCHES, ACTIVATION / 2
        expected |= {
            "reduce-scatter _Embedding.forward": half,
            "all-gather _Embedding.backward": half,
            "all-gather _ColumnLinear.forward": half,
            "all-gather _ColumnLinear.backward": half,
            "reduce-scatter _ColumnLinear.backward": half,
        }
        # norms, row-parallel biases, positions
        partial = (4 * LAYERS + 2 + 2 * LAYERS + SEQ) * HIDDEN * FP64
        expected["all-reduce sum_partial_gradients"] = (1, partial)
    else:
        expected["all-reduce _Embedding.forward"] = (MICRO_BATCHES, ACTIVATION)
        expected["all-reduce _ColumnLinear.backward"] = (MICRO_BATCHES, ACTIVATION)
    assert found == expected


@pytest.mark.parametrize(
    "layout, precision, activation, gradient",
    [
        *((f"pp2 {schedule}", "--fp64", FP64, FP64) for schedule in SCHEDULES),
        ("pp4 interleaved v2", "--fp64", FP64, FP64),
        ("pp2 zero-bubble tp2 sp", "--fp64", FP64, FP64),
        ("pp2 1f1b", "--bf16", 2, FP32),
    ],
)
def test_messages_between_stages(gloo_world, layout, precision, activation, gradient):
    """For each micro-batch and each boundary between ranks one activation forward and one gradient
    back, of s (s/tp under sequence parallelism) x b x h elements. Else there is the step's one
    all-reduce, and the sum of a tied matrix's gradients; logging and the start are left out.
    """
    row = Row(layout, "gpt")
    virtual = 2 if layout.endswith(("v2", "-v")) else 1
    rule, tp = schedules.SCHEDULES[layout.split()[1]], row.words.tp
    placement = rule.place(row.words.pp, virtual)
    flags = (*SHORT, precision, "--num-layers", str(row.layers), *row.words.flags)
    for rank, calls in enumerate(gloo_world(row.world).run(count, flags)):
        own = rank // tp  # this rank's pipeline rank
        scalars = 1 + 2 * MICRO_BATCHES + 3  # squares, losses and tokens, requests to end
        scalars += row.world * (1 + len(SECTIONS))  # at each log line the times of all ranks
        scalar_bytes = 2 * (row.world - 1) / row.world * scalars * FP64
        due = Counter({("all_reduce_totals", None, scalar_bytes): 1})
        message = SEQ // tp * HIDDEN * activation
        for below, above in pairwise(placement):
            for source, target in ((below, above), (above, below)):
                if source == own != target:
                    due["StageMessages.send", target * tp + rank % tp, message] += MICRO_BATCHES
        if placement[0] != placement[-1] and own in (placement[0], placement[-1]):
            due["sum_partial_gradients", None, 50 // tp * HIDDEN * gradient] = 1
        across = [
            call
            for call in calls
            if call.caller not in OTHER_CALLERS | {"Recording.timeline"}
            and len({other // tp for other in (*call.ranks, rank)}) > 1
        ]
        sent = Counter((call.caller, call.to, call.bytes) for call in across)
        assert sent == Counter({key: number * STEPS for key, number in due.items()})
        # a tag names what a message carries
        assert set(Counter(call.tag for call in across if call.to is not None).values()) == {STEPS}


LARGE = """--hidden-size 128 --num-attention-heads 8 --seq-length 256 --train-iters 3
--lr-warmup-iters 0 --eval-iters 0 --hidden-dropout 0 --attention-dropout 0 --vocab-size 511"""


@pytest.mark.full
def test_the_loopback_interface_saw_these_bytes():
    """Within 5%, on a fresh pair of processes with a separate interface where possible; else
    what else the machine sends can only add.
    """
    tp = f"--micro-batch-size 8 {TP} 2"
    layouts = tp, f"{tp} --sequence-parallel", "--micro-batch-size 1"
    cases = [[*BASE, *LARGE.split(), *flags.split()] for flags in layouts]
    done = subprocess.run(
        [sys.executable, str(TESTS / "parity/ledger.py"), json.dumps(cases)],
        preexec_fn=own_loopback,
        text=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"},
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(cases)
    for counted, seen in results:
        assert counted > 4e6 and 0.95 <= seen / counted <= 1.05
