"""Studies are read: rows, their names, what the program refuses, and every mistake in the file."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron.tools._study.description import read_study
from megatron.tools._study.launch import flags_of
from megatron.tools._study.runner import run_of

from megatron.config.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
BASE = """
name: small
base: {num-layers: 2, hidden-size: 32, num-attention-heads: 4, seq-length: 16, vocab-size: 63,
  micro-batch-size: 1, global-batch-size: 4, mock-data: true, lr: 1e-3}
"""


def study(folder: Path, text: str, base: str = BASE):
    path = folder / "study.yaml"
    path.write_text(base + text)
    return read_study(path)


def test_a_grid_its_exclusions_and_rows(tmp_path):
    plan = study(
        tmp_path,
        """
grid: {world-size: [1, 2], zero-stage: [0, 1], overlap-grad-reduce: [null, false]}
exclude: [{world-size: 1, zero-stage: [1, 2]}, {zero-stage: 0, overlap-grad-reduce: false}]
rows: [{name: mine, world-size: 2, lr: 2.0}, {world-size: 4, sequence-parallel: true,
  tensor-model-parallel-size: 2}]
""",
    )
    names = {row.name: row for row in plan.rows}
    assert list(names) == [
        "w1 zero0",
        "w2 zero0",
        "w2 zero1",
        "w2 zero1 no overlap-grad-reduce",
        "mine",
        "w4 tp2 sequence-parallel",
    ]
    assert "--no-overlap-grad-reduce" in names["w2 zero1 no overlap-grad-reduce"].flags
    assert names["mine"].flags[-8:-6] == ("--lr", "2.0") and names["mine"].world_size == 2
    assert names["mine"].work != names["w2 zero0"].work
    assert len({row.work for row in plan.rows}) == 2, "layouts do the same work"
    assert len({row.key for row in plan.rows}) == len(plan.rows)
    assert len({row.config_digest for row in plan.rows}) == len(plan.rows)


def test_a_row_that_the_program_refuses_stays_with_its_words(tmp_path):
    plan = study(tmp_path, "rows: [{}, {num-attention-heads: 5}, {sede: 1}]\n")
    good, heads, typo = plan.rows
    assert good.refusal is None and good.config["model.num_layers"] == 2
    assert "--num-attention-heads 5" in heads.refusal
    assert "--sede 1: unknown flag; did you mean --seed?" in typo.refusal


@pytest.mark.parametrize(
    "text, message",
    [
        ("rows: []", "give at least one row"),
        ("rows: [{}, {}]", "is the same as row"),
        ("rows: [{name: a}, {name: a, seed: 2}]", "two rows have this name"),
        ("row: [{}]", "row: a study has no such key"),
        ("rows: [{--lr: 1}]", "write it without dashes"),
        ("rows: [{save: here}]", "save: leave it out; runs of a study save nothing"),
        ("rows: [{}]\nwarmup: 20", "must be below iterations, which is 20"),
        ("rows: [{}]\nrepeats: 0", "repeats: 0: expected a whole number from 1 on"),
        ("rows: [{}]\nlauncher: mpi", "choose local or sbatch"),
        ("rows: [{world-size: two}]", "world-size: 'two': expected a whole number"),
        ("grid: {lr: 1}", "grid: lr: expected a list of values"),
        ("grid: {lr: [1, 2]}\nexclude: [{seed: 1}]", "exclude: seed: the grid has no such key"),
        ("rows: [{memory-limit: 1}]\nlauncher: sbatch", "acts with `launcher: local`"),
        (
            "rows: [{world-size: 12, global-batch-size: 12}]\nlauncher: sbatch",
            "world-size 12: must be a multiple of ranks-per-node, which is 8",
        ),
        ("rows: [{world-size: 3, tensor-model-parallel-size: 2}]", "the program refuses every row"),
        ("rows: [{}]\nrows: [{}]", "twice"),
    ],
)
def test_mistakes_in_the_file_are_named(tmp_path, text, message):
    with pytest.raises(UserError) as error:
        study(tmp_path, text + "\n")
    assert message in str(error.value) and str(tmp_path / "study.yaml") in str(error.value)


def test_a_study_has_a_name(tmp_path):
    with pytest.raises(UserError, match="name: a/b: give the study a name"):
        study(tmp_path, "rows: [{}]\n", BASE.replace("small", "a/b"))


def test_a_run_is_in_the_wandb_group_of_its_study(tmp_path):
    plan = study(tmp_path, "rows: [{name: the-row, wandb-project: p}]\n")
    flags = flags_of(plan, run_of(tmp_path, plan.rows[0], 2))
    assert flags[-6:-2] == ["--wandb-group", "small", "--wandb-exp-name", "the-row r2"]


def test_the_studies_that_are_shipped():
    """Every row of the published grid is accepted; the scaled one has what it should show."""
    large = read_study(ROOT / "studies/2.7b_a100.yaml")
    assert not [row.refusal for row in large.rows if row.refusal]
    assert {row.world_size for row in large.rows} == {8, 16}
    assert len({row.work for row in large.rows}) == 1
    small = read_study(ROOT / "studies/two_cores.yaml")
    assert len(small.rows) == 12 and {row.world_size for row in small.rows} == {1, 2, 4}
    assert sum(row.memory_limit is not None for row in small.rows) == 1
    assert len({row.work for row in small.rows}) == 2, "the row that crashes has another rate"
