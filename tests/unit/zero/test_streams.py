"""What overlaps what on a GPU: no two things touch the same memory without an order between
them, and the losses are a CPU's.
"""

from __future__ import annotations

import pytest
from unit.zero.rows import FOUR, SPLIT, Row, V
from unit.zero.streams import losses_of, races

NARROW, TP = "--grad-reduce-in-bf16", "--tensor-model-parallel-size 2"
SERIAL = "--no-overlap-grad-reduce --no-overlap-param-gather"
HOST, PARAM_HOST = "--optimizer-cpu-offload", "--param-cpu-offload"
AWAY = "--activation-offload --min-offloaded-tensor-size 256"
INPUTS_AWAY = f"{AWAY} --recompute-granularity full"


def row(stage: int, dp: int = 2, pp: int = 1, flags: str = "", **more) -> Row:
    return Row(stage, dp, pp, 4 if pp > 1 else 2, "fp32", flags=flags, **more)


RUNS = [
    (each.world * (2 if TP in each.flags else 1), each)
    for each in (
        *(row(stage) for stage in range(4)),
        row(3, flags="--zero3-keep-gathered"),
        row(1, flags=SERIAL),
        row(3, flags=SERIAL),
        row(0, flags=NARROW),
        row(2, flags=NARROW),
        row(3, 4, shard=2),
        row(0, 1, 2),
        row(2, 2, 2, SPLIT),
        row(3, 2, 2, V, size=FOUR),
        row(1, 1, flags=f"{TP} --sequence-parallel"),
        row(2, 1, flags=TP),
        row(1, flags=HOST),
        row(3, flags=PARAM_HOST),
        row(3, 1, flags=PARAM_HOST),
        row(0, 1, flags=AWAY),
        row(3, 2, flags=AWAY),
        row(0, 1, 2, AWAY),
        row(2, 2, 2, f"{V} {AWAY}", size=FOUR),
        row(1, 1, flags=f"{TP} --sequence-parallel {INPUTS_AWAY}"),
    )
]


def faults_of(found: list) -> str:
    """Those of all ranks, a line each."""
    return "\n".join(fault for faults, _ in found for fault in faults)


@pytest.mark.parametrize("world, row", RUNS, ids=str)
@pytest.mark.default("2-stage3-dp2-pp1-m2-fp32-gpt")
def test_nothing_races(gloo_world, world, row):
    found = gloo_world(world).run(races, row.command)
    assert not faults_of(found)
    plain = gloo_world(world).run(losses_of, row.command)
    for (_, losses), expected in zip(found, plain, strict=True):
        # NCCL adds narrow gradients in their own precision
        assert losses == pytest.approx(expected, rel=1e-3 if NARROW in row.flags else 1e-5)


@pytest.mark.parametrize(
    "function, row",
    [
        *(("on_stream", row(stage)) for stage in range(4)),
        *(("wait_for_block", row(stage)) for stage in (1, 3)),
        *(("_finish_reduction", row(stage)) for stage in (0, 2)),
        ("_free_spent", row(2)),
        ("finish_gradients", row(0)),
        ("finish_gradients", row(2)),
        ("wait_for", row(0, 1, 2)),
        ("_finish_send", row(0, 1, 2)),
        ("step", row(1, flags=HOST)),
        ("step", row(3, 1, flags=PARAM_HOST)),
        *(
            (function, row(0, 1, 2, flags))
            for function in ("send", "fetch", "let_go", "arrive")
            for flags in (AWAY, INPUTS_AWAY)
        ),
    ],
    ids=str,
)
@pytest.mark.default("on_stream-stage2-dp2-pp1-m2-fp32-gpt", f"let_go-{row(0, 1, 2, AWAY)}")
def test_a_wait_that_is_left_out_is_found(gloo_world, function, row):
    assert all(faults for faults, _ in gloo_world(row.world).run(races, row.command, function))


@pytest.mark.parametrize("function", [None, "before_update", "hand_over"])
@pytest.mark.full
def test_a_wait_that_a_save_leaves_out_is_found(gloo_world, tmp_path, function):
    """Where none is left out, nothing races with a save in the background."""
    flags = row(1, flags=f"--async-save --save-interval 1 --save {tmp_path}").command
    found = gloo_world(2).run(races, flags, function)
    assert not faults_of(found) if function is None else all(faults for faults, _ in found)
