"""A rank of a real run dies, hangs or raises: the others end in time and name whom they waited for,
for what, and of which micro-batch.
"""

from __future__ import annotations

import re
import signal

import pytest
from faulty_stage import Ended, Fault, run_with_fault

STAGES, TIMEOUT = 3, 9.0  # seconds that a rank waits for another
LONG = 120.0  # for ranks that are to end before any limit
SLACK = 25.0  # for the search for the silent one and the end of the programs, on a busy machine
FLAGS = f"""--num-layers 6 --hidden-size 32 --num-attention-heads 4 --seq-length 16
--micro-batch-size 1 --global-batch-size 8 --train-iters 4
--mock-data --tokenizer-type NullTokenizer --vocab-size 49 --lr 1e-2 --eval-iters 0
--distributed-timeout-minutes {TIMEOUT / 60}""".split()
PIPELINE = f"--pipeline-model-parallel-size {STAGES}"
PATIENT = f"--distributed-timeout-minutes {LONG / 60}"
USERS = "ZeroDivisionError: something of the user's own went wrong"


@pytest.fixture
def run(tmp_path):
    """`run(ranks, fault, flags)`: how each rank of a run with this fault ended; None for one that
    hangs. What is killed, or raises, ends with that.
    """

    def start(ranks: int, fault: Fault, flags: str = "") -> list[Ended | None]:
        ends = run_with_fault(tmp_path, ranks, fault, [*FLAGS, *flags.split()])
        victim = ends[fault.victim]
        if fault.kind == "kill":
            assert victim.code == -signal.SIGKILL
        elif fault.kind == "raise":
            assert victim.code == 1 and USERS in victim.last_error, victim.errors
        return ends

    return start


def found_in(end: Ended, pattern: str) -> re.Match[str]:
    """What a rank that ended with a PeerError said."""
    found = re.search(f"PeerError: {pattern}", end.last_error)
    assert found and end.code == 1, end.errors
    return found


# ---- pipeline stages -----------------------------------------------------------------------------

GRADIENT, ACTIVATIONS = "send the gradient of micro-batch", "send activations of micro-batch"
CASES = {  # the fault; flags; the stage that each of the others waits for, and what it should do
    "killed": (
        Fault("kill", 1, "F 1 3"),
        PATIENT,
        {
            0: (1, f"{GRADIENT} 2 to the backward pass of stage 0"),
            2: (1, f"{ACTIVATIONS} 3 to the forward pass of stage 2"),
        },
    ),
    # the first stage computes at that time, and finds out when it turns to it: not by a wait
    "gone before it is sent something": (
        Fault("kill", 1, "F 1 1, F 0 2"),
        PATIENT,
        {0: (1, r"(take activations|send the gradient) of micro-batch [0-2]( to .* stage 0)?")},
    ),
    "hangs": (
        Fault("stop", 1, "I 1 1"),
        "--pipeline-schedule zero-bubble",
        {
            0: (1, f"{GRADIENT} [01] to the input gradient pass of stage 0"),
            2: (1, f"{ACTIVATIONS} [23] to the forward pass of stage 2"),
        },
    ),
    # the one behind its neighbour names the neighbour, or learns of the end when it waits itself
    "raises": (
        Fault("raise", 2, "B 2 0"),
        PATIENT,
        {
            1: (2, f"{GRADIENT} 0 to the backward pass of stage 1"),
            0: (1, f"{GRADIENT} 0 to the backward pass of stage 0"),
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.default("killed", "hangs")
def test_the_other_stages_name_it(run, case):
    fault, flags, waits = CASES[case]
    ends = run(STAGES, fault, f"{PIPELINE} {flags}")
    for rank, (stage, what) in waits.items():
        end = ends[rank]
        waiting = rf"rank {rank} waited ([\d.]+) s for pipeline stage {stage} \(rank {stage}\) to "
        seconds = float(found_in(end, rf"{waiting}{what}\. ")[1])
        # the layout and where the run stood
        assert any(line.endswith(", iteration 1]") for line in end.errors.splitlines()[-2:])
        if fault.kind == "stop":
            assert TIMEOUT - 1 < seconds < LONG
        else:
            assert end.after < LONG and seconds < LONG / (2 if "gone" in case else 1)


@pytest.mark.full
def test_a_stage_hangs_when_the_others_have_done_their_part(run):
    """The first stage, in its last computation: the last one waits for the gradient of the tied
    matrix, the one between for the step's sum, unless its last gradient has not been taken.
    """
    _, middle, last = run(STAGES, Fault("stop", 0, "B 0 7"), PIPELINE)
    done = r"had done its part of the step and waited ([\d.]+) s for all others to do theirs\. "
    taken = r"waited ([\d.]+) s for pipeline stage 0 \(rank 0\) to take the last messages of the "
    for end, pattern in ((middle, f"rank 1 (?:{done}|{taken}step)"), (last, f"rank 2 {done}")):
        found = found_in(end, pattern)
        assert TIMEOUT - 1 < float(found[found.lastindex]) < LONG


PAIRS = f"""--global-batch-size 12 --num-experts {2 * STAGES} --moe-ffn-hidden-size 16
--expert-model-parallel-size {STAGES} --disable-bias-linear --overlap-moe-expert-parallel-comm"""


@pytest.mark.full
@pytest.mark.parametrize("kind", ["kill", "raise"])
@pytest.mark.parametrize("where", ["exchange 5", "exchange 8"])
def test_a_rank_ends_within_a_pair_of_passes(run, kind, where):
    """In the midst of two passes that take turns, of which one is in a separate thread."""
    first, _, last = run(STAGES, Fault(kind, 1, where), f"{PAIRS} {PATIENT}")
    for end in (first, last):
        found_in(end, "")
        assert end.after < LONG, end.errors


# ---- a stopped rank of any layout ----------------------------------------------------------------

COLLECTIVE = r"in an? [\w-]+ over \w+ for"
STOPPED = {  # ranks, the one that is stopped, before what, and for what each of the others waits
    "": (2, 1, "F 0 1", {0: f"{COLLECTIVE} rank 1"}),
    "--tensor-model-parallel-size 2 --zero-stage 3": (
        4,
        2,
        "F 0 1",
        {
            0: f"{COLLECTIVE} rank 2",
            1: f"{COLLECTIVE} ranks? [023]",
            3: f"{COLLECTIVE} ranks? [012]",
        },
    ),
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2": (
        4,
        3,
        "F 1 1",
        {
            0: r"for pipeline stage 1 \(rank 2\) to send the gradient",
            1: r"for pipeline stage 1 \(rank 3\) to send the gradient",
            2: f"{COLLECTIVE} rank 3",
        },
    ),
}


@pytest.mark.parametrize("flags", STOPPED)
@pytest.mark.default("")
def test_the_others_name_the_silent_rank(run, flags):
    """Its last report is of the moment when it was stopped, or of a collective just before."""
    ranks, victim, where, waits = STOPPED[flags]
    ends = run(ranks, Fault("stop", victim, where), flags)
    silent = (
        rf"rank {victim} \(process \d+ on \S+\) is silent; its last report, \d+ s ago: "
        rf"(.*computing|in iteration \d+, rank {victim} waited \d\.\d s [^;]*)"
    )
    assert waits.keys() == set(range(ranks)) - {victim}
    for rank, what in waits.items():
        waiting = rf"rank {rank} waited ([\d.]+) s {what}.* ended or hangs: (.*)\. Look at its"
        found = found_in(ends[rank], waiting)
        assert float(found[1]) > TIMEOUT - 1 and ends[rank].after < TIMEOUT + SLACK
        assert re.fullmatch(silent, found[2]), ends[rank].last_error  # and no other


@pytest.mark.full
def test_the_rank_that_holds_the_store_is_silent(run):
    _, end = run(2, Fault("stop", 0, "F 0 1"))
    found_in(end, "rank 1 waited .* hangs: rank 0, which holds the rendezvous store, is silent")
