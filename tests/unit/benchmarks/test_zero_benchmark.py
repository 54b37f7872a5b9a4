"""The measurement of ZeRO stages: our side takes turns and asks for the peers' work, and verdicts
name the best peer.
"""

from __future__ import annotations

import sys

import pytest
from megatron.benchmarks import zero as tool
from megatron.benchmarks.turn_group import Group

from megatron.config.arguments import parse_arguments
from megatron.config.validate import resolve
from megatron.model.arithmetic import parameter_count

MIB = 1 << 20


@pytest.mark.full
def test_our_own_run_takes_turns():
    flags = """--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16
    --micro-batch-size 1 --global-batch-size 2 --train-iters 9
    --mock-data --tokenizer-type NullTokenizer --vocab-size 63 --lr 1e-3 --log-interval 1
    --eval-iters 0"""
    group = Group("ours", [sys.executable, str(tool.SCRIPTS / "zero_ours.py"), *flags.split()], 1)
    try:
        group.turn("time 1")
        (timed,), (watched,) = group.turn("time 2"), group.turn("watch 1")
    finally:
        group.end()
    assert len(timed["losses"]) == 2 and timed["seconds"] > 0 and "bytes" not in timed
    sizes = watched["bytes"]
    assert sizes["resident"] < sizes["between"] < sizes["forward"] <= sizes["passes"]
    assert sizes["passes"] <= sizes["peak"] and sizes["resident"] < sizes["update"]


@pytest.mark.parametrize("system", [system for system in tool.SYSTEMS if system.startswith("ours")])
def test_our_command_line_asks_for_the_same_work(system):
    for work in tool.works([2, 4], [1, 4]):
        given = parse_arguments(tool.flags_of(system, work)).config
        config = resolve(given, work.processes, work.vocab).config
        distributed = config.distributed
        assert distributed.zero_stage == int(system[5]) and config.precision.bf16
        assert distributed.zero3_keep_gathered == system.endswith("keep")
        assert config.training.global_batch_size == work.accumulation * work.data_parallel
        assert parameter_count(config.model, work.vocab)["total"] == tool.parameters()


def test_verdicts_name_the_best_peer():
    """DeepSpeed's stage 0 accumulates in bf16: no yardstick for memory, one for bytes sent."""
    sizes = {"ours-0": 3, "ours-2": 9, "deepspeed-0": 1, "ddp-0": 2}
    runs = [
        {"system": system, "resident": size * MIB, "forward": 0, "peak": MIB, "wire": size * MIB}
        | {"losses": [8.0]}
        for system, size in sizes.items()
    ]
    settings = {"N=2, m=1": {"runs": runs}}
    found = {each["measure"]: (each["peer"], each["passed"]) for each in tool.verdicts(settings)}
    assert found == {
        "resident": ("ddp-0", False),
        "peak": ("ddp-0", True),
        "wire": ("deepspeed-0", False),
    }
    text = tool.memory_tables(settings)
    assert "1 of 3 comparisons" in text and "| N=2, m=1 | 0 | resident |" in text
