"""NCCL's buffers: how many communicators the rank has, and the line with what they take."""

from __future__ import annotations

import pytest
from megatron.tools._plan.advice import Machine
from megatron.tools._plan.communicators import CHANNEL_BYTES, CHANNELS, nccl_buffers
from megatron.tools._plan.memory import MemoryPlan
from megatron.tools._plan.table import memory_report
from step_models import DENSE, VOCABULARY, resolved

PP = "--pipeline-model-parallel-size"
TP = "--tensor-model-parallel-size"
UNTIED = "--untie-embeddings-and-output-weights"


@pytest.mark.parametrize(
    ("flags", "ranks", "collectives", "messages"),
    [
        ("", 8, 2, 0),  # world, with dp and shard; shard_gather
        (f"{TP} 8", 8, 1, 0),
        (f"{TP} 2", 8, 4, 0),  # world, tp, dp, shard_gather
        (f"{TP} 2 {PP} 4 {UNTIED}", 64, 5, 4),
        (f"{PP} 2", 8, 4, 2),  # world, dp, pp with tied, shard_gather
        (f"{PP} 4", 8, 5, 4),
    ],
)
def test_the_communicators_of_a_rank(flags, ranks, collectives, messages):
    found = nccl_buffers(resolved(DENSE + flags, ranks), ranks)
    assert found.communicators == collectives + messages
    assert found.bytes == (CHANNELS * collectives + 4 * messages) * CHANNEL_BYTES


def test_the_line_stands_where_there_are_others_to_reach_with_nccl():
    def lines(ranks: int, device: str) -> list[str]:
        plan = MemoryPlan(resolved(DENSE, ranks), VOCABULARY, ranks, device)
        report = memory_report(plan, memory=80, machine=Machine())
        return [line for line in report if "NCCL" in line]

    assert lines(8, "cuda") == [
        "in addition NCCL's buffers, about 0.38 GiB (assumed: 2 communicators, 16 channels each "
        "and 4 for messages between stages, 12 MiB a channel)"
    ]
    assert lines(1, "cuda") == lines(8, "cpu") == []
