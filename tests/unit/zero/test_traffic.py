"""What each ZeRO stage sends: kinds, counts and bytes of its collectives as the schedule's action
list gives them, never above the table.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from parity.ledger import Call, count
from unit.zero.rows import FOUR, PRECISIONS, SPLIT, Row, V

from megatron.distributed.groups import ALONE
from megatron.observe.stragglers import BLOCKS, SECTIONS
from megatron.parallel.schedule import Kind, build_schedule
from megatron.parallel.zero import sum_partial_gradients

TESTS = Path(__file__).resolve().parents[2]
STEPS = 2
NO_EVALUATION = "--eval-iters 0"


def schedule_of(row: Row) -> str:
    return "zero-bubble-v" if row.has_v else "zero-bubble" if "zero-bubble" in row.flags else "1f1b"


def reads(row: Row, pipe: int) -> list[str]:
    """The blocks whose weights a pipeline rank's computations read in a step, in order: forward and
    backward passes do, weight gradients and the embedding's backward pass do not.
    """
    layers, stages = dict(row.size)["layers"], row.pp * (1 + row.has_v)
    blocks, found = row.blocks(pipe), []
    for action in build_schedule(schedule_of(row), row.pp, 1 + row.has_v, row.micro).actions[pipe]:
        first, end = (stage * layers // stages for stage in (action.stage, action.stage + 1))
        units = [f"layer {layer}" for layer in range(first, end)]
        units += ["head" if "head" in blocks else "embedding"] * (action.stage == stages - 1)
        if action.kind is Kind.FORWARD:
            found += ["embedding"] * (action.stage == 0) + units
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            found += reversed(units)
    return found


def gathers(row: Row, pipe: int) -> Counter[str]:
    """How often stage 3 gathers each block in a step: what is read now and the block read next are
    there, never two of the vocabulary's size; a block stays while it is one of the next two.
    """
    order, held, found = reads(row, pipe), set(), Counter()
    if "keep-gathered" in row.flags:
        return Counter(set(order))

    def next_to(index: int) -> str | None:
        other = next((name for name in order[index + 1 :] if name != order[index]), None)
        return other if other and ("layer" in other or "layer" in order[index]) else None

    for index, block in enumerate(order):
        for name in {block, next_to(index)} - {None} - held:
            found[name] += 1
            held.add(name)
        if index + 1 == len(order) or block not in (order[index + 1], next_to(index + 1)):
            held.remove(block)
    return found


def messages_due(row: Row, pipe: int) -> Counter[tuple[str, float]]:
    """(kind, bytes) -> messages that a rank sends to those with whom it shares, over a run of STEPS
    steps. A reduction is one round here.
    """
    n, (_, weight, gradient), due = row.sharers, PRECISIONS[row.precision], Counter()
    wire = 2 if "bf16" in row.flags else gradient
    often = gathers(row, pipe)
    for name, size in row.blocks(pipe).items():
        held_for_the_step = name == "embedding" and row.has_v and "head" not in row.blocks(pipe)
        due["reduce-scatter", size // n * wire] += (
            (n - 1) * STEPS * (row.micro if row.stage >= 2 and not held_for_the_step else 1)
        )
        if row.stage == 0:
            due["all-gather", size // n * wire] += (n - 1) * STEPS
        else:
            # and the first weights
            due["all-gather", size // n * weight] += (n - 1) * (
                STEPS * often[name] if row.stage == 3 else STEPS + 1
            )
    return +due


def most(row: Row, pipe: int) -> float:
    """The table's bytes that a rank sends in a step."""
    _, p, g = PRECISIONS[row.precision]
    g = 2 if "bf16" in row.flags else g
    each = [
        2 * g,
        g + p,
        row.micro * g + p,
        row.micro * g + p if "keep-gathered" in row.flags else row.micro * (g + 2 * p),
    ][row.stage]
    return (row.sharers - 1) / row.sharers * each * sum(row.blocks(pipe).values())


def of_zero(calls: list[Call]) -> list[Call]:
    return [call for call in calls if call.caller.startswith("Zero.")]


ROWS = [
    *(Row(stage, 2, 1, 4, flags=NO_EVALUATION) for stage in range(4)),
    *(Row(stage, 4, 1, 1, "fp32", flags=NO_EVALUATION) for stage in range(4)),
    Row(3, 2, 1, 4, model="llama", flags=NO_EVALUATION),
    Row(3, 2, 1, 4, flags=f"--zero3-keep-gathered {NO_EVALUATION}"),
    Row(0, 2, 1, 1, flags=f"--grad-reduce-in-bf16 {NO_EVALUATION}"),
    Row(2, 2, 1, 4, flags=f"--grad-reduce-in-bf16 {NO_EVALUATION}"),
    Row(2, 2, 2, 4, flags=NO_EVALUATION),
    Row(3, 2, 2, 4, model="llama", flags=NO_EVALUATION),
    Row(3, 2, 2, 4, flags=f"{SPLIT} {NO_EVALUATION}"),
    *(Row(stage, 2, 2, 4, flags=f"{V} {NO_EVALUATION}", size=FOUR) for stage in (2, 3)),
]


@pytest.mark.parametrize("row", sorted(ROWS, key=lambda row: row.world), ids=str)
def test_messages_are_those_of_the_action_list(gloo_world, row):
    for rank, calls in enumerate(gloo_world(row.world).run(count, row.command)):
        pipe, sent = rank // row.dp, of_zero(calls)
        assert Counter((call.kind, call.bytes) for call in sent) == messages_due(row, pipe)
        weights = PRECISIONS[row.precision][1] * sum(row.blocks(pipe).values())
        shares_at_start = (row.sharers - 1) / row.sharers * (row.stage in (1, 2))
        weights_at_start = weights * shares_at_start
        assert (sum(call.bytes for call in sent) - weights_at_start) / STEPS <= most(row, pipe)
        shard = tuple(range(pipe * row.dp, (pipe + 1) * row.dp))
        assert {call.ranks for call in sent} == {shard}
        # scalars, and in a step that is logged the times of all ranks
        assert all(
            call.bytes < 400 + 8 * (BLOCKS + len(SECTIONS)) * row.world
            for call in calls
            if call.kind == "all-reduce" and set(shard) <= set(call.ranks)
        )


def test_copies_are_summed_once_a_step_and_apart(gloo_world):
    """Hybrid sharding: each block's slice once a step over those that hold the same one, whatever
    the number of micro-batches.
    """
    row = Row(3, 4, 1, 2, shard=2, flags=NO_EVALUATION)
    for rank, calls in enumerate(gloo_world(4).run(count, row.command)):
        sent = of_zero(calls)
        assert Counter((call.kind, call.bytes) for call in sent) == messages_due(row, 0)
        assert {call.ranks for call in sent} == {(rank // 2 * 2, rank // 2 * 2 + 1)}
        copies = Counter(
            (call.kind, call.ranks, call.bytes) for call in calls if call.caller == "sum_copies"
        )
        due = Counter(size // 2 * 4 for size in row.blocks(0).values())
        assert copies == {
            ("all-reduce", (rank % 2, rank % 2 + 2), size): STEPS * number
            for size, number in due.items()
        }


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_tied_matrix_is_summed_over_the_pipeline_once_a_step_and_apart(gloo_world, stage):
    """Each rank its slice, of real rows: those of the padded vocabulary have no gradient, but lie
    in it.
    """
    row = Row(stage, 2, 2, 4, flags=NO_EVALUATION)
    for rank, calls in enumerate(gloo_world(4).run(count, row.command)):
        tied = [call for call in calls if call.caller == "sum_partial_gradients"]
        assert len(tied) == STEPS and {(call.kind, call.ranks) for call in tied} == {
            ("all-reduce", (rank % 2, rank % 2 + 2))
        }
        size = row.blocks(0)["embedding"]
        assert {call.bytes for call in tied} == {size / 2 * 4}  # 2 (R-1)/R = 1 of the fp32 slice


def test_a_tied_matrix_shares_its_block_with_nothing():
    spec = SimpleNamespace(grad_sum=True, copies="tied")
    tied = SimpleNamespace(boxes=[SimpleNamespace(spec=spec)])
    other = SimpleNamespace(boxes=[])
    block = SimpleNamespace(zero_stage=1, entries=[tied, other])
    groups = SimpleNamespace(tp=ALONE, kv=ALONE, tied=SimpleNamespace(size=2))
    with pytest.raises(AssertionError):
        sum_partial_gradients([block], groups)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_tensor_parallel_ranks_see_in_part_is_summed_once_a_step_and_apart(gloo_world, stage):
    """Under sequence parallelism, packed, over all slices of the pair once: norms, row-parallel
    biases and positions, with none of their padding.
    """
    flags = f"--tensor-model-parallel-size 2 --sequence-parallel {NO_EVALUATION}"
    row = Row(stage, 2, 1, 2, flags=flags)
    size = dict(row.size)
    parts = Counter()
    for rank, calls in enumerate(gloo_world(4).run(count, row.command)):
        tp = [call for call in calls if call.caller == "sum_partial_gradients"]
        assert len(tp) in (0, STEPS)  # a slice may have none of them
        pair = rank // 2 * 2, rank // 2 * 2 + 1
        assert all(
            (call.kind, call.ranks, call.bytes) == ("all-reduce", pair, tp[0].bytes) for call in tp
        )
        parts[rank % 2] += tp[0].bytes if tp else 0
    # a layer: two norms of two vectors, two biases
    whole = 4 * (size["layers"] * 6 + 2 + size["seq"]) * size["hidden"]
    # at stage 0 both have all of it
    assert set(parts.values()) == {whole * (2 if stage == 0 else 1)}
