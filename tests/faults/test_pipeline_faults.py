"""A stage of a real run dies, hangs or raises: the others end in time and report whom they waited
for, for what, and of which micro-batch.
"""

from __future__ import annotations

import re
import signal

import pytest
from faulty_stage import Ended, Fault, run_with_fault

RANKS, TIMEOUT = 3, 9.0  # seconds that a rank waits for another
LONG = 120.0  # for ranks that are to end before any limit
FLAGS = f"""--num-layers 6 --hidden-size 32 --num-attention-heads 4 --seq-length 16
--micro-batch-size 1 --global-batch-size 8 --train-iters 4
--mock-data --tokenizer-type NullTokenizer --vocab-size 49 --lr 1e-2 --eval-iters 0
--pipeline-model-parallel-size {RANKS}
--distributed-timeout-minutes {TIMEOUT / 60}""".split()
PATIENT = "--distributed-timeout-minutes", LONG / 60


@pytest.fixture
def run(tmp_path):
    """`run(kind, victim, where, *flags)`: how each rank of a run with this fault ended; None for
    one that hangs.
    """

    def start(kind: str, victim: int, where: str, *flags: object) -> list[Ended | None]:
        given = [*FLAGS, *map(str, flags)]
        return run_with_fault(tmp_path, RANKS, Fault(kind, victim, where), given)

    return start


def waited(end: Ended, stage: int, what: str) -> float:
    """Checks that a rank names the stage and what it should have sent; the seconds that it reports
    it waited.
    """
    found = re.search(
        (
            rf"PeerError: rank \d waited ([\d.]+) s for pipeline stage {stage} \(rank {stage}\) "
            rf"to {what}\. "
        ),
        end.last_error,
    )
    assert found and end.code == 1, end.errors
    # the layout and where the run stood
    assert any(line.endswith(", iteration 1]") for line in end.errors.splitlines()[-2:])
    return float(found[1])


def test_a_stage_is_killed(run):
    first, victim, last = run("kill", 1, "F 1 3", *PATIENT)
    assert victim.code == -signal.SIGKILL
    waited(first, 1, "send the gradient of micro-batch 2 to the backward pass of stage 0")
    waited(last, 1, "send activations of micro-batch 3 to the forward pass of stage 2")
    assert first.after < LONG and last.after < LONG


@pytest.mark.full
def test_a_stage_is_gone_before_it_is_sent_something(run):
    """The first stage computes while its neighbour dies, and finds out when it turns to it: not by
    a wait.
    """
    first, victim, _ = run("kill", 1, "F 1 1, F 0 2", *PATIENT)
    assert victim.code == -signal.SIGKILL
    assert (
        waited(
            first,
            1,
            (
                "(take activations|send the gradient) of micro-batch [0-2]( to the backward "
                "pass of stage 0)?"
            ),
        )
        < LONG / 2
    )
    assert first.after < LONG


def test_a_stage_hangs(run):
    first, _, last = run("stop", 1, "I 1 1", "--pipeline-schedule", "zero-bubble")
    seconds = [
        waited(
            first, 1, "send the gradient of micro-batch [01] to the input gradient pass of stage 0"
        ),
        waited(last, 1, "send activations of micro-batch [23] to the forward pass of stage 2"),
    ]
    assert all(TIMEOUT - 1 < each < LONG for each in seconds)


@pytest.mark.full
def test_a_stage_raises(run):
    """The neighbour names it; the one behind names the neighbour, or learns of the end when it
    waits itself.
    """
    first, middle, victim = run("raise", 2, "B 2 0", *PATIENT)
    assert (
        victim.code == 1
        and "ZeroDivisionError: something of the user's own went wrong" in victim.last_error
    ), victim.errors
    waited(middle, 2, "send the gradient of micro-batch 0 to the backward pass of stage 1")
    waited(first, 1, "send the gradient of micro-batch 0 to the backward pass of stage 0")
    assert first.after < LONG and middle.after < LONG


PAIRS = f"""--pipeline-model-parallel-size 1 --global-batch-size 12 --num-experts {2 * RANKS}
--moe-ffn-hidden-size 16 --expert-model-parallel-size {RANKS} --disable-bias-linear
--overlap-moe-expert-parallel-comm""".split()


@pytest.mark.full
@pytest.mark.parametrize("fault", ["kill", "raise"])
@pytest.mark.parametrize("where", ["exchange 5", "exchange 8"])
def test_a_rank_ends_within_a_pair_of_passes(run, fault, where):
    """In the midst of two passes that take turns, of which one is in a separate thread."""
    ends = run(fault, 1, where, *PAIRS, *PATIENT)
    first, victim, last = ends
    if fault == "kill":
        assert victim.code == -signal.SIGKILL
    else:
        assert victim.code == 1 and "ZeroDivisionError: something of the" in victim.last_error
    for end in (first, last):
        assert end.code == 1 and end.after < LONG, end.errors
        assert "PeerError" in end.last_error, end.errors


@pytest.mark.full
def test_a_stage_hangs_when_the_others_have_done_their_part(run):
    """The first stage, in its last computation: the last one waits for the gradient of the tied
    matrix, the one between for the step's sum, unless its last gradient has not been taken.
    """
    _, middle, last = run("stop", 0, "B 0 7")
    done = (
        r"PeerError: rank {} had done its part of the step and waited ([\d.]+) s for all "
        r"others to do theirs\. "
    )
    taken = (
        r"PeerError: rank 1 waited ([\d.]+) s for pipeline stage 0 \(rank 0\) to take the "
        r"last messages of the step\. "
    )
    for end, pattern in ((middle, f"{done.format(1)}|{taken}"), (last, done.format(2))):
        found = re.search(pattern, end.last_error)
        assert found and end.code == 1, end.errors
        assert TIMEOUT - 1 < float(found[found.lastindex]) < LONG
