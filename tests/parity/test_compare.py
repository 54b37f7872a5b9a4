"""The gates notice what they are there for: each is shown a healthy outcome and one with a small
fault.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from parity import compare
from parity.compare import faults_of, gather
from parity.layouts import Row
from parity.worker import Outcome, Piece, reference

PRECISIONS = ("fp64", "fp32", "bf16", "fp16")


def healthy(precision: str) -> tuple[Row, Outcome]:
    """A row, and the outcome of the run in one process."""
    row = Row("dp2", "gpt", precision)
    return row, reference(row.flags(layout=False), row.patches)


def off(pieces: list[Piece], name: str, relative: float) -> list[Piece]:
    """The pieces with one of them moved by a share of its norm, in one element."""
    moved = {piece.name: piece.values.clone() for piece in pieces}
    moved[name].view(-1)[0] += relative * moved[name].norm()
    return [replace(piece, values=moved[piece.name]) for piece in pieces]


def with_step(one: Outcome, number: int, **fields: Any) -> Outcome:
    """The outcome with other numbers in one step."""
    steps = [replace(step, **fields) if i == number else step for i, step in enumerate(one.steps)]
    return replace(one, steps=steps)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_equal_runs_have_no_fault(precision):
    row, one = healthy(precision)
    assert not faults_of(row, [one])


@pytest.mark.parametrize("part", ["gradients", "weights"])
@pytest.mark.parametrize("precision, relative", [*zip(PRECISIONS, (2e-10, 1e-5, 0.1, 0.01))])
def test_one_element_off(precision, relative, part):
    row, one = healthy(precision)
    narrow = precision in ("bf16", "fp16")
    name = "embedding.word.weight" if narrow else "layers.1.mlp.up.weight"
    faults = faults_of(row, [replace(one, **{part: off(getattr(one, part), name, relative)})])
    assert len(faults) == 1 and f"{part} of {name}" in faults[0]


@pytest.mark.parametrize("field", ["loss", "grad_norm"])
@pytest.mark.parametrize(
    "precision, step, relative, begin",
    [
        ("fp64", 1, 2e-10, "step 2: {}"),
        ("bf16", 5, 0.1, "{}: error"),
        ("fp16", 5, 0.01, "{}: error"),
    ],
)
def test_one_step_off(precision, step, relative, begin, field):
    row, one = healthy(precision)
    assert not one.steps[step].skipped
    value = getattr(one.steps[step], field) * (1 + relative)
    faults = faults_of(row, [with_step(one, step, **{field: value})])
    assert len(faults) == 1 and faults[0].startswith(begin.format(field))


@pytest.mark.parametrize("precision, relative", [*zip(PRECISIONS, (2e-10, 1e-5, 0.1, 0.01))])
def test_one_evaluation_off(precision, relative):
    row, one = healthy(precision)
    validation, test = one.evaluations
    faults = faults_of(row, [replace(one, evaluations=[validation, test * (1 + relative)])])
    assert len(faults) == 1 and "evaluation" in faults[0]


def test_another_pattern_of_skipped_steps():
    row, one = healthy("fp16")
    assert sum(step.skipped for step in one.steps) == 4
    assert len({step.loss_scale for step in one.steps}) >= 3
    other = with_step(one, 3, loss_scale=one.steps[3].loss_scale * 2)
    assert any("skipped steps" in fault for fault in faults_of(row, [other]))


def test_ranks_that_disagree():
    _, one = healthy("fp64")
    other = with_step(one, 0, loss=one.steps[0].loss * (1 + 1e-15))
    assert compare.ranks_agree([one, one]) == []
    assert "rank 1 reports other steps" in compare.ranks_agree([one, other])[0]


def test_a_wide_reduction_is_no_narrow_one():
    _, wide = healthy("fp32")
    assert faults_of(Row("dp2", "gpt", "wire"), [wide]) == [
        "gradients: no tensor shows the rounding of a narrow reduction"
    ]


@pytest.mark.parametrize(
    "second, fault",
    [
        ((0, [1, 2], False), None),
        ((0, [1, 2.0001], False), "w at (0,): ranks 0 and 1 hold other bits"),
        ((0, [1, 2], True), "w: boxes are owned [1, 2] times"),
        ((3, [4], True), "w: boxes are owned [0, 1] times"),
    ],
)
def test_boxes_must_tile_and_copies_must_be_equal(second, fault):
    ranks = [(0, [1, 2], True), second, *([(2, [3, 4], True)] if second[0] == 0 else [])]
    outcomes, faults = [], []
    for first, values, owner in ranks:
        piece = Piece("w", (4,), (first,), torch.tensor(values, dtype=torch.float64), owner)
        outcomes.append(Outcome([], [], [], [piece], []))
    whole = gather(outcomes, "weights", faults)["w"].tolist()
    assert faults == ([] if fault is None else [fault])
    assert fault is not None or whole == [1, 2, 3, 4]
