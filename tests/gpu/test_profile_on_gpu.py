"""--profile on a GPU: kernels next to the ranges that launched them, and parts that add up; and a
GPU's memory that runs out.
"""

import json

import pytest
import torch
from megatron.tools._report.step_parts import step_table

from pretrain_gpt import main

pytestmark = pytest.mark.gpu

BASE = """--num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 256
--micro-batch-size 2 --global-batch-size 4 --train-iters 4 --log-interval 1 --mock-data --bf16
--tokenizer-type NullTokenizer --vocab-size 1023 --lr 1e-3 --eval-iters 0""".split()


def test_the_parts_of_a_step_add_up(tmp_path):
    chosen = "--profile --profile-step-start 1 --profile-step-end 3".split()
    assert main([*BASE, *chosen, "--profile-dir", str(tmp_path), "--record-memory-history"]) == 0
    events = json.loads((tmp_path / "rank-0.trace.json").read_text())["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)
    steps = step_table(tmp_path)
    assert [step.iteration for step in steps] == [2, 3]
    for step in steps:
        assert sum(step.parts.values()) == pytest.approx(step.seconds, rel=0.01)
        assert {"compute", "optimizer", "host"} <= step.parts.keys()
    assert (tmp_path / "rank-0.memory.pickle").stat().st_size > 0


def test_memory_that_runs_out_is_explained(tmp_path):
    free, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(0.2 * free / total)
    large = "--micro-batch-size 512 --global-batch-size 512 --seq-length 4096".split()
    flags = ["--max-position-embeddings", "4096", "--profile-dir", str(tmp_path)]
    try:
        with pytest.raises(torch.OutOfMemoryError) as raised:
            main([*BASE, *large, *flags, "--record-memory-history"])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "memory ran out on rank 0" in "\n".join(raised.value.__notes__)
    text = (tmp_path / "rank-0.out-of-memory.txt").read_text()
    assert "plan: " in text and "activation that " in text and "history of the allocator: " in text
