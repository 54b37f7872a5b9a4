"""Mixtures of experts against one process: every router and loss with every kind of parallelism, by
the gates of the table of parity.
"""

import pytest
from parity.compare import faults_in
from parity.layouts import Row

ROWS = (
    *(
        Row(layout, feature)
        for layout, feature in (
            ("dp2", "moe"),
            ("dp2 ep2", "moe-bias"),
            ("dp4 ep4", "moe"),
            ("dp4 ep2 paired zero1", "moe-bias"),
            ("dp4 ep2 zero2", "moe"),
            ("dp4 ep2 zero3", "moe-bias"),
            ("dp4 ep2 shard2 zero3", "moe"),
            ("dp4 ep4 zero3", "moe-recompute"),
            ("tp2 sp", "moe"),
            ("tp2 sp etp1", "moe-bias"),
            ("tp2 sp etp1 ep2", "moe"),
            ("tp2 sp etp2 ep2 dp2 paired", "moe-bias"),
            ("tp2 sp etp1 ep4 dp2 zero1", "moe-recompute"),
            ("tp4 sp etp2 ep2", "moe"),
            ("dp4 etp2 ep2", "moe"),
            ("cp2 ep2", "moe-bias"),
            ("cp2 tp2 sp ep2 etp2", "moe"),
            ("cp2 p2p dp2 ep4 paired zero2", "moe-recompute"),
            ("pp2 1f1b dp2 ep2 paired zero3", "moe-bias"),
            ("pp2 interleaved v2 dp2 ep2 paired zero2", "moe"),
            ("pp2 zero-bubble dp2 ep2 zero2", "moe-bias"),
            ("pp2 zero-bubble-v tp2 sp etp1 ep2", "moe"),
            ("pp2 zero-bubble dp2 ep2", "moe-recompute"),
            ("pp2 1f1b mapping dp2 ep2", "moe"),
            ("dp2 ep2 gathered-tokens", "moe-bias"),
            ("tp2 sp etp2 ep2 dp2 gathered-tokens", "moe-recompute"),
            ("cp2 ep2 gathered-tokens", "moe-capacity"),
            ("dp2 ep2", "moe-capacity"),
            ("tp2 sp etp1 ep2 paired", "moe-capacity"),
            ("cp2 tp2 sp ep2", "moe-position"),
            ("pp2 zero-bubble dp2 ep2", "moe-position"),
            ("dp4 ep2 shard2 zero3 kept paired", "moe-act"),
            ("pp2 zero-bubble-v dp2 ep2", "moe-act"),
            ("dp4 ep4 paired", "moe-sparse"),
            ("tp2 sp dp2 ep2 etp2 zero2", "moe-sparse"),
            ("dp2 ep2", "moe-forced"),
            ("dp4 ep2 offload zero2", "moe"),
            ("dp4 ep2 param-offload zero3", "moe-bias"),
            ("dp2 ep2 paired", "moe-odd"),
            ("dp4 ep4 paired zero2", "moe-recompute"),
            ("tp2 sp etp1 ep2 dp2 paired zero3", "moe-odd"),
        )
    ),
    Row("dp4 ep2 paired zero2", "moe", "bf16"),
    Row("tp2 sp etp1 ep2", "moe", "bf16"),
    Row("dp4 ep2", "moe", "wire"),
    Row("dp2 ep2", "moe-bias", "fp16"),
)


@pytest.mark.table
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_layout_is_the_same_run(gloo_world, row):
    assert not faults_in(gloo_world, row)


MUTANTS = (
    (Row("dp4 ep2", "moe"), "divided_by_copies"),
    (Row("dp2 ep2", "moe"), "times_expert_ranks"),
    (Row("dp2 ep2", "moe"), "norm_without_experts"),
    (Row("dp4 ep2", "moe"), "norm_counts_copies"),
    (Row("cp2 ep2", "moe"), "local_counts"),
    (Row("tp2 sp etp1", "moe"), "local_counts"),
    (Row("cp2 ep2", "moe"), "loss_times_ranks"),
    (Row("dp2 ep2", "moe-bias"), "bias_in_weights"),
    (Row("dp2 ep2", "moe-bias", "fp16"), "bias_of_skipped_steps"),
    (Row("dp2 ep2", "moe"), "experts_of_the_next_rank"),
    (Row("dp2 ep2", "moe"), "weights_in_the_order_of_tokens"),
    (Row("tp2 sp", "moe"), "one_part_of_an_expert"),
    (Row("tp2 sp etp1", "moe"), "whole_router_gradients"),
    (Row("cp2 ep2", "moe-capacity"), "capacity_of_local_tokens"),
    (Row("dp2 ep2", "moe"), "rows_come_back_elsewhere"),
)


@pytest.mark.parametrize("row, mutant", MUTANTS, ids=str)
def test_what_others_got_wrong_is_found(gloo_world, row, mutant):
    assert faults_in(gloo_world, row, mutant)
