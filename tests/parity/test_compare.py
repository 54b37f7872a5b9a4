"""The gates notice what they are there for: each is shown a healthy outcome and one with a small
fault.
"""

from dataclasses import replace

import pytest
import torch
from parity import compare
from parity.compare import faults_of, gather
from parity.layouts import Row
from parity.worker import Outcome, Piece, reference


def outcome(row: Row) -> Outcome:
    return reference(row.flags(layout=False), row.patches)


def off(pieces: list[Piece], name: str, relative: float) -> list[Piece]:
    """The pieces with one of them moved by a share of its norm, in one element."""

    def moved(values: torch.Tensor) -> torch.Tensor:
        values = values.clone()
        values.view(-1)[0] += relative * values.norm()
        return values

    return [
        replace(piece, values=moved(piece.values)) if piece.name == name else piece
        for piece in pieces
    ]


def test_equal_runs_have_no_fault():
    for row in (
        Row("dp2", "gpt"),
        Row("dp2", "gpt", "fp32"),
        Row("dp2", "gpt", "bf16"),
        Row("dp2", "gpt", "fp16"),
    ):
        assert not faults_of(row, [outcome(row)])


@pytest.mark.parametrize("part", ["gradients", "weights"])
@pytest.mark.parametrize(
    "precision, relative, name",
    [
        ("fp64", 2e-10, "layers.1.mlp.up.weight"),
        ("fp32", 1e-5, "layers.1.mlp.up.weight"),
        ("bf16", 0.1, "embedding.word.weight"),
        ("fp16", 0.01, "embedding.word.weight"),
    ],
)
def test_one_element_off(precision, relative, name, part):
    row = Row("dp2", "gpt", precision)
    one = outcome(row)
    faults = faults_of(row, [replace(one, **{part: off(getattr(one, part), name, relative)})])
    assert len(faults) == 1 and f"{part} of {name}" in faults[0]


@pytest.mark.parametrize("field", ["loss", "grad_norm"])
@pytest.mark.parametrize("precision, relative", [("bf16", 0.1), ("fp16", 0.01)])
def test_one_step_of_a_narrow_run_off(precision, relative, field):
    row = Row("dp2", "gpt", precision)
    one = outcome(row)
    steps = list(one.steps)
    steps[5] = replace(steps[5], **{field: getattr(steps[5], field) * (1 + relative)})
    assert not steps[5].skipped
    faults = faults_of(row, [replace(one, steps=steps)])
    assert len(faults) == 1 and faults[0].startswith(f"{field}: error")


@pytest.mark.parametrize("field", ["loss", "grad_norm"])
def test_one_step_off(field):
    row = Row("dp2", "gpt")
    one = outcome(row)
    steps = list(one.steps)
    steps[1] = replace(steps[1], **{field: getattr(steps[1], field) * (1 + 2e-10)})
    faults = faults_of(row, [replace(one, steps=steps)])
    assert len(faults) == 1 and faults[0].startswith(f"step 2: {field}")


def test_another_pattern_of_skipped_steps():
    row = Row("dp2", "gpt", "fp16")
    one = outcome(row)
    assert (
        sum(step.skipped for step in one.steps) == 4
        and len({step.loss_scale for step in one.steps}) >= 3
    )
    steps = list(one.steps)
    steps[3] = replace(steps[3], loss_scale=steps[3].loss_scale * 2)
    assert any("skipped steps" in fault for fault in faults_of(row, [replace(one, steps=steps)]))


def test_ranks_that_disagree():
    one = outcome(Row("dp2", "gpt"))
    other = replace(
        one, steps=[replace(one.steps[0], loss=one.steps[0].loss * (1 + 1e-15)), *one.steps[1:]]
    )
    assert (
        compare.ranks_agree([one, one]) == []
        and "rank 1 reports other steps" in compare.ranks_agree([one, other])[0]
    )


def test_a_wide_reduction_is_no_narrow_one():
    row = Row("dp2", "gpt", "wire")
    wide = replace(row, precision="fp32")
    assert faults_of(row, [outcome(wide)]) == [
        "gradients: no tensor shows the rounding of a narrow reduction"
    ]


def test_boxes_must_tile_and_copies_must_be_equal():
    def rank(first: int, values: list[float], owner: bool = True) -> Outcome:
        return Outcome(
            [],
            [],
            [],
            [Piece("w", (4,), (first,), torch.tensor(values, dtype=torch.float64), owner)],
            [],
        )

    def gathered(*ranks: Outcome) -> tuple[list[float], list[str]]:
        faults: list[str] = []
        return gather(list(ranks), lambda outcome: outcome.weights, faults)["w"].tolist(), faults

    assert gathered(rank(0, [1, 2]), rank(2, [3, 4])) == ([1, 2, 3, 4], [])
    assert gathered(rank(0, [1, 2]), rank(0, [1, 2], False), rank(2, [3, 4]))[1] == []
    assert gathered(rank(0, [1, 2]), rank(0, [1, 2.0001], False), rank(2, [3, 4]))[1] == [
        "w at (0,): ranks 0 and 1 hold other bits"
    ]
    assert gathered(rank(0, [1, 2]), rank(0, [1, 2]), rank(2, [3, 4]))[1] == [
        "w: boxes are owned [1, 2] times"
    ]
    assert gathered(rank(0, [1, 2]), rank(3, [4]))[1] == ["w: boxes are owned [0, 1] times"]
