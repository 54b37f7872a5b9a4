"""A stopped rank (SIGSTOP): every other one names it, reports in what it waited for it, and ends
soon after --distributed-timeout-minutes.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from faulty_stage import Fault, run_with_fault

TIMEOUT = 6.0  # seconds that a rank waits for another
SLACK = 25.0  # for the search for the silent one and the end of the programs, on a busy machine
FLAGS = f"""--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16
--micro-batch-size 1 --global-batch-size 8 --train-iters 4
--mock-data --tokenizer-type NullTokenizer --vocab-size 49 --lr 1e-2 --eval-iters 0
--distributed-timeout-minutes {TIMEOUT / 60}""".split()
CASES = {  # ranks, the one that is stopped, before what, and in what each of the others waits
    "dp2": (2, 1, "F 0 1", [], {0: r"an? [\w-]+ over \w+ for rank 1"}),
    "tp2 dp2 zero3": (
        4,
        2,
        "F 0 1",
        ["--tensor-model-parallel-size", "2", "--zero-stage", "3"],
        {
            0: r"an? [\w-]+ over \w+ for rank 2",
            1: r"an? [\w-]+ over \w+ for ranks? [023]",
            3: r"an? [\w-]+ over \w+ for ranks? [012]",
        },
    ),
    "tp2 pp2": (
        4,
        3,
        "F 1 1",
        ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"],
        {
            0: r"pipeline stage 1 \(rank 2\) to send the gradient",
            1: r"pipeline stage 1 \(rank 3\) to send the gradient",
            2: r"an? [\w-]+ over \w+ for rank 3",
        },
    ),
}


def run(folder: Path, ranks: int, victim: int, where: str, flags: list[str]) -> dict[int, str]:
    """The last error of each rank but the one that is stopped; checks exit codes and times."""
    errors = {}
    ends = run_with_fault(folder, ranks, Fault("stop", victim, where), [*FLAGS, *flags])
    for rank, end in enumerate(ends):
        if rank != victim:
            errors[rank] = end.last_error
            assert end.code == 1 and end.after < TIMEOUT + SLACK, end.errors
    return errors


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case == "dp2" else pytest.mark.full) for case in CASES],
)
def test_the_others_name_it(tmp_path, case):
    ranks, victim, where, flags, waits = CASES[case]
    errors = run(tmp_path, ranks, victim, where, flags)
    assert errors.keys() == waits.keys()
    for rank, what in waits.items():
        found = re.search(
            (
                rf"PeerError: rank {rank} waited ([\d.]+) s (in|for) {what}.* ended or hangs: "
                r"(.*)\. Look at its output"
            ),
            errors[rank],
        )
        assert found and float(found[1]) > TIMEOUT - 1, errors[rank]
        # its last report is of the moment when it was stopped, or of a collective just before
        silent = (
            rf"rank {victim} \(process \d+ on \S+\) is silent; its last report, \d+ s ago: "
            rf"(.*computing|in iteration \d+, rank {victim} waited \d\.\d s [^;]*)"
        )
        assert re.fullmatch(silent, found[3]), errors[rank]  # and no other


@pytest.mark.full
def test_the_rank_that_holds_the_store(tmp_path):
    errors = run(tmp_path, 2, 0, "F 0 1", [])
    assert re.search(
        (
            r"PeerError: rank 1 waited .* ended or hangs: rank 0, which holds the rendezvous "
            r"store, is silent\. "
        ),
        errors[1],
    ), errors[1]
