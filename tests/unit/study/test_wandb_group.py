"""All runs of a study are one group in wandb."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron.tools._study.description import read_study
from megatron.tools._study.launch import flags_of
from megatron.tools._study.runner import run_of

from megatron.config.arguments import parse_arguments
from megatron.observe.tracking import Tracker

STUDY = """
name: layouts-in-a-group
base: {num-layers: 1, hidden-size: 8, num-attention-heads: 1, seq-length: 8, vocab-size: 63,
  micro-batch-size: 1, mock-data: true, lr: 1e-3, wandb-project: p}
rows: [{name: the-row}]
"""


def test_a_run_is_in_the_group_of_its_study(tmp_path: Path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    file = tmp_path / "study.yaml"
    file.write_text(STUDY)
    plan = read_study(file)
    run = run_of(tmp_path, plan.rows[0], 2)
    Tracker(parse_arguments(flags_of(plan, run)).config, {}, 0).close()
    (record,) = run.folder.glob("wandb/offline-run-*/run-*.wandb")
    stored = record.read_bytes()
    assert b"layouts-in-a-group" in stored and b"the-row r2" in stored
