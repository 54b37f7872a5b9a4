"""A checkpoint that an earlier version wrote loads, and its run continues.

Each folder of `formats/` was written by the code of the commit that it is named after: the last
one before fields of the state were added. All saved iteration 2 of the same run.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from reshard_cases import start

from megatron.checkpoint.reader import open_checkpoint
from megatron.observe.tracking import read_metrics

FORMATS = Path(__file__).parent / "formats"
RUN = """--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8
--micro-batch-size 1 --global-batch-size 2 --mock-data --tokenizer-type NullTokenizer
--vocab-size 15 --lr 1e-3 --train-iters 3 --lr-decay-iters 10 --eval-iters 0 --log-interval 1
--log-throughput""".split()
# What the commit before did not write: tensors, kernels and the open part of a log line; the
# rates of --decoupled-lr (written by runs that give it).
FLAGS = {"8dfc5ed": (), "c7b2e9f": (), "2497f94": ("--decoupled-lr", "5e-4")}


@pytest.mark.parametrize("commit", FLAGS)
def test_a_checkpoint_of_an_earlier_version_loads(tmp_path, commit):
    folder = FORMATS / commit
    with open_checkpoint(folder) as checkpoint:
        checkpoint.verify()
        assert ("tensors" in checkpoint.state) == (commit != "8dfc5ed")
        assert ("decoupled_max_lr" in checkpoint.state["schedule"]) == (commit == "2497f94")
    shown = start((*RUN, *FLAGS[commit], "--load", str(folder), "--save", str(tmp_path)))
    assert "at iteration 2; resumes " in shown and shown.endswith("exit code 0"), shown

    # its third step is the one that the earlier version took
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    wanted = json.loads((folder / "third_step.json").read_text())
    assert row["iteration"] == 3
    for name in ("lm loss", "grad-norm"):
        assert math.isclose(row[name], wanted[name], rel_tol=1e-5), name
