"""Products of 8-bit floats in layouts of every kind against one process: quantised numbers are the
same in all of them, so that the float64 gate of the table holds although each is rounded to four
bits.
"""

from dataclasses import dataclass

import pytest
from parity.compare import faults_in
from parity.layouts import BASE, Row

# tiles of 128 on each of two ranks, in both directions and over the tokens of a micro-batch
SIZES = """--hidden-size 256 --ffn-hidden-size 256 --num-attention-heads 4 --kv-channels 64
--seq-length 128 --micro-batch-size 1 --global-batch-size 4 --train-iters 3
--fp8-min-width 128 --hidden-dropout 0 --attention-dropout 0 --swiglu --disable-bias-linear
--normalization RMSNorm --position-embedding-type rope --group-query-attention
--num-query-groups 2 --fp64"""


@dataclass(frozen=True)
class Fp8Row(Row):
    """A layout with a recipe; a micro-batch is one sample in all of them."""

    fp8: str = ""

    def __str__(self) -> str:
        return f"{self.fp8.replace('--fp8-', '').replace(' ', '-')}-{super().__str__()}"

    def flags(self, *, layout: bool, exact: bool = False) -> tuple[str, ...]:
        words = self.words
        layers = ("--num-layers", str(self.layers))
        extra = words.flags if layout else ()
        return (*BASE, *SIZES.split(), *layers, *self.fp8.split(), *extra)


TENSOR = "--fp8-format hybrid --fp8-recipe tensorwise"
WISE_ROWS = "--fp8-format hybrid --fp8-recipe rowwise"
BLOCKS = "--fp8-format e4m3 --fp8-recipe blockwise"
ROWS = (
    *(Fp8Row("tp2", "llama", fp8=recipe) for recipe in (TENSOR, WISE_ROWS, BLOCKS)),
    *(Fp8Row("tp2 sp", "llama", fp8=recipe) for recipe in (TENSOR, WISE_ROWS, BLOCKS)),
    Fp8Row("dp2 zero3", "llama", fp8=TENSOR),
    Fp8Row("cp2", "llama", fp8=TENSOR),
    Fp8Row("cp2 a2a tp2 sp", "llama", fp8=TENSOR),
    Fp8Row("cp2", "llama", fp8=WISE_ROWS),
    Fp8Row("cp2 tp2", "llama", fp8=f"{BLOCKS} --no-fp8-wgrad"),
    Fp8Row("pp2 zero-bubble tp2 sp", "llama", fp8=TENSOR),
    Fp8Row("pp2 1f1b dp2 zero2", "llama", fp8=BLOCKS),
    Fp8Row(
        "tp2 sp",
        "llama",
        fp8=f"{BLOCKS} --no-fp8-wgrad --first-last-layers-bf16 --num-layers-at-end-in-bf16 0",
    ),
)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_layout_changes_no_quantised_number(gloo_world, row):
    assert not faults_in(gloo_world, row)


@pytest.mark.parametrize(
    "layout, recipe", [("tp2 sp", TENSOR), ("tp2 sp", WISE_ROWS), ("cp2", TENSOR)]
)
@pytest.mark.full
def test_scales_of_what_a_rank_holds_are_another_run(gloo_world, layout, recipe):
    row = Fp8Row(layout, "llama", fp8=recipe)
    assert faults_in(gloo_world, row, "own_maxima")
