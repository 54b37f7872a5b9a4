"""Context parallelism against one process: every type of communication with every other kind of
parallelism, masks, dropout and grouped heads, by the gates of the table of parity.
"""

import pytest
from parity.compare import faults_of
from parity.layouts import Row
from parity.worker import run_case

ROWS = (
    *(
        Row(f"{layout} {kind}", feature)
        for kind in ("allgather", "a2a")
        for layout, feature in (
            ("cp2", "dropout"),
            ("cp4", "gpt"),
            ("cp2", "documents"),
            ("cp2", "documents-rope"),
            ("cp4", "gqa2-qknorm"),
            ("cp2", "mqa-qknorm-bias"),
            ("cp2", "caps-zloss"),
            ("cp2", "recompute"),
            ("cp2 tp2 sp", "llama"),
            ("cp2 tp2", "documents-rope"),
            ("cp2 dp2 zero1", "dropout"),
            ("cp2 dp2 zero2", "gpt"),
            ("cp2 zero3", "llama"),
            ("cp2 dp2 zero3", "documents"),
            ("cp2 dp2 shard2 zero3", "gqa4-qkvbias"),
            ("cp2 pp2 1f1b", "documents-rope"),
            ("cp2 pp2 zero-bubble tp2 sp", "llama"),
            ("cp2 pp2 zero-bubble-v dp2 zero2", "dropout"),
            ("cp4 pp2 interleaved v2", "gqa4-qkvbias"),
        )
    ),
)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_layout_is_the_same_run(gloo_world, row):
    outcomes = gloo_world(row.world).run(run_case, row.flags(layout=True), row.patches)
    assert not faults_of(row, outcomes)


MUTANTS = (
    (Row("cp2", "llama"), "local_positions"),
    (Row("cp2", "gpt"), "labels_of_the_slice"),
    (Row("cp2", "documents"), "whole_loss_mask"),
    (Row("cp2", "gpt"), "factor_of_ranks"),
    (Row("cp2", "gpt"), "order_of_ranks"),
    (Row("cp2 a2a", "gpt"), "order_of_ranks"),
    (Row("cp2", "gpt"), "no_sum_of_key_gradients"),
    (Row("cp2", "gpt"), "first_queries"),
    (Row("cp2 a2a", "dropout"), "heads_of_the_first_rank"),
    (Row("cp4 a2a", "gqa2-qknorm"), "key_heads_of_the_first_ranks"),
)


@pytest.mark.parametrize("row, mutant", MUTANTS, ids=str)
def test_what_others_got_wrong_is_found(gloo_world, row, mutant):
    outcomes = gloo_world(row.world).run(run_case, row.flags(layout=True), (mutant,))
    assert faults_of(row, outcomes)
