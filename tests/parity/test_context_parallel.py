"""Context parallelism against one process: every type of communication with every other kind of
parallelism, masks, dropout and grouped heads, by the gates of the table of parity.
"""

import pytest
from parity.compare import faults_in
from parity.layouts import Row
from selection import one_in

# half of the layouts with one, the other half with the other, on every run
GATHERED_OR_EXCHANGED = [
    Row(f"{layout} {kind}", feature)
    for kind in ("allgather", "a2a")
    for layout, feature in (
        ("cp2", "dropout"),
        ("cp4", "gpt"),
        ("cp2", "documents"),
        ("cp2", "documents-rope"),
        ("cp4", "mqa-bias"),
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
]
ROWS = (
    *one_in(2, [(row,) for row in GATHERED_OR_EXCHANGED], list(map(str, GATHERED_OR_EXCHANGED))),
    *(
        Row(layout, feature)
        for layout, feature in (
            ("cp2 p2p", "dropout"),
            ("cp4 p2p", "gpt"),
            ("cp2 p2p", "documents"),
            ("cp4 p2p", "documents-rope"),
            ("cp4 p2p", "gqa2-qknorm"),
            ("cp2 p2p", "mqa-qknorm-bias"),
            ("cp2 p2p", "caps-zloss"),
            ("cp2 p2p", "recompute"),
            ("cp2 tp2 sp p2p", "llama"),
            ("cp2 dp2 zero1 p2p", "dropout"),
            ("cp2 dp2 zero2 p2p", "gpt"),
            ("cp4 zero3 p2p", "llama"),
            ("cp2 dp2 shard2 zero3 p2p", "gqa4-qkvbias"),
            ("cp2 pp2 1f1b p2p", "documents-rope"),
            ("cp2 pp2 zero-bubble tp2 sp p2p", "llama"),
            ("cp2 pp2 zero-bubble-v dp2 zero2 p2p", "dropout"),
            ("cp4 pp2 interleaved v2 p2p", "gqa4-qkvbias"),
            ("cp4 a2a2+p2p", "dropout"),
            ("cp4 a2a2+p2p", "documents-rope"),
            ("cp4 a2a2+p2p", "mqa-qknorm-bias"),
            ("cp4 tp2 sp a2a2+p2p", "gqa2-qknorm"),
            ("cp4 zero3 a2a2+p2p", "recompute"),
            ("cp4 pp2 zero-bubble a2a2+p2p", "llama"),
        )
    ),
    # fewer key/value heads than ranks: which of them a rank needs
    Row("cp4 a2a", "gqa2-qknorm"),
    Row("cp4 allgather", "gqa2-qknorm"),
    Row("cp2 tp2 sp", "gqa2-qknorm", "bf16"),
    Row("cp4 p2p", "documents-rope", "bf16"),
    Row("cp2 p2p", "dropout", "bf16"),
    Row("cp2 a2a", "documents-rope", "bf16"),
    Row("cp4 zero3", "gpt", "fp16"),
    Row("cp2 dp2 zero2", "gpt", "wire"),
)


@pytest.mark.table
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_layout_is_the_same_run(gloo_world, row):
    assert not faults_in(gloo_world, row)


MUTANTS = (
    (Row("cp2", "llama"), "local_positions"),
    (Row("cp2", "gpt"), "labels_of_the_slice"),
    (Row("cp2", "documents"), "whole_loss_mask"),
    (Row("cp2", "gpt"), "factor_of_ranks"),
    (Row("cp2", "dropout"), "order_of_ranks"),
    (Row("cp2 a2a", "gpt"), "order_of_exchanged_parts"),
    (Row("cp2", "gpt"), "no_sum_of_key_gradients"),
    (Row("cp2", "dropout"), "first_queries"),
    (Row("cp2", "gpt"), "other_chunk"),
    (Row("cp2 a2a", "dropout"), "heads_of_the_first_rank"),
    (Row("cp4 a2a", "gqa2-qknorm"), "key_heads_of_the_first_ranks"),
    (Row("cp4 a2a2+p2p", "dropout"), "heads_of_the_first_rank"),
    (Row("cp4 a2a2+p2p", "gpt"), "order_of_exchanged_parts"),
    (Row("cp2 p2p", "llama"), "local_positions"),
    (Row("cp2 p2p", "gpt"), "lost_hop_of_gradients"),
    (Row("cp4 p2p", "gpt"), "values_of_this_rank"),
    (Row("cp2 p2p", "gpt"), "other_chunk"),
    (Row("cp2 p2p", "gpt"), "narrow_log_sum_exp"),
    (Row("cp2 p2p", "gpt"), "parts_of_equal_weight"),
    (Row("cp2 p2p", "gpt"), "log_sum_exp_of_the_block"),
    (Row("cp2 p2p", "dropout"), "keys_count_from_0"),
)


@pytest.mark.parametrize("row, mutant", MUTANTS, ids=str)
def test_what_others_got_wrong_is_found(gloo_world, row, mutant):
    assert faults_in(gloo_world, row, mutant)
