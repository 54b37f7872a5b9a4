"""Latent attention against one process: every kind of parallelism, by the gates of the table of
parity.
"""

import pytest
from parity.compare import faults_in
from parity.layouts import Row

ROWS = (
    *(
        Row(layout, feature)
        for layout, feature in (
            ("tp2", "mla"),
            ("tp2 sp", "mla"),
            ("tp4", "mla-bias"),
            ("tp4 sp", "mla-bias"),
            ("tp2 sp serial", "mla-full"),
            ("tp2 sp dp2", "mla-dropout"),
            ("tp2 sp", "mla-documents"),
            ("tp2 sp", "mla-up"),
            ("tp2 sp", "mla-qkv"),
            ("cp2", "mla"),
            ("cp2 tp2 sp", "mla-documents"),
            ("cp2", "mla-dropout"),
            ("cp2 p2p", "mla"),
            ("cp2 p2p", "mla-documents"),
            ("cp2 p2p tp2 sp", "mla-dropout"),
            ("cp2 a2a", "mla-up"),
            ("dp2 zero1", "mla"),
            ("dp2 zero2", "mla-qkv"),
            ("dp2 zero3", "mla-up"),
            ("tp2 sp dp2 zero3", "mla-bias"),
            ("pp2 1f1b", "mla"),
            ("pp2 zero-bubble", "mla"),
            ("pp2 zero-bubble tp2 sp", "mla-up"),
            ("pp2 zero-bubble-v dp2", "mla-qkv"),
            ("pp2 interleaved v2", "mla-dropout"),
            ("dp2 ep2", "mla-moe"),
            ("tp2 sp etp1 ep2", "mla-moe"),
            ("dp2 offload zero2", "mla"),
            ("dp2", "mla-graphs"),
        )
    ),
    Row("tp2 sp", "mla", "bf16"),
    Row("pp2 zero-bubble tp2 sp", "mla", "bf16"),
)


@pytest.mark.table
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_layout_is_the_same_run(gloo_world, row):
    assert not faults_in(gloo_world, row)


MUTANTS = (
    (Row("tp2", "mla"), "position_gradients_of_own_heads"),
    (Row("tp2 sp", "mla"), "whole_down_gradients"),
    (Row("tp2 sp", "mla"), "scale_without_yarn"),
    (Row("tp2 sp", "mla"), "values_of_the_next_head"),
)


@pytest.mark.parametrize("row, mutant", MUTANTS, ids=str)
def test_what_may_go_wrong_is_found(gloo_world, row, mutant):
    assert faults_in(gloo_world, row, mutant)
