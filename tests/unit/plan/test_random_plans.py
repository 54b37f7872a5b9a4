"""The planner on flags and layouts drawn at random, those of tests/parity/random_rows.py with the
sizes of large models: every command has an answer, and answers agree.
"""

from __future__ import annotations

import json
import re

import pytest
from megatron.tools._plan.hardware import names
from parity.random_rows import Draw, resized

from tools.plan import run

SIZES = {
    "--hidden-size": 4096,
    "--num-attention-heads": 32,
    "--num-query-groups": 8,
    "--kv-channels": 128,
    "--seq-length": 4096,
    "--rope-original-max-position-embeddings": 1024,
    "--vocab-size": 32000,
    "--window-size": 1024,
    "--kv-lora-rank": 512,
    "--qk-head-dim": 128,
    "--qk-pos-emb-head-dim": 64,
    "--v-head-dim": 128,
    "--q-lora-rank": 1536,
    "--moe-ffn-hidden-size": 1536,
    "--moe-shared-expert-intermediate-size": 1536,
}
DEVICES = names()


def large(flags: tuple[str, ...]) -> list[str]:
    """The same flags with the sizes of a large model, in bf16."""
    return ["--bf16" if flag == "--fp64" else flag for flag in resized(flags, SIZES)]


def drawn(seed: int) -> tuple[list[str], list[str]]:
    """(the run's flags with the number of ranks and a device, the flags of its layout)."""
    case = Draw(seed).case()
    layout = case.layouts[0]
    device = DEVICES[seed % len(DEVICES)]
    given = "--world-size", f"{layout.ranks}", "--hardware", device
    return [*large(case.flags), *given], large(layout.flags)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.default("1", "10")
def test_every_command_has_an_answer(seed):
    flags, layout = drawn(seed)
    found = json.loads(run("step", ["--json", *flags, *layout])[0])
    assert 0 < found["low_s"] <= found["step_s"] <= found["high_s"] and found["peak_gib"] > 0
    assert min(found["spent_s"].values()) >= 0
    assert sum(found["spent_s"].values()) == pytest.approx(found["step_s"], rel=1e-6)
    assert "one flag changed" in " ".join(run("explain", [*flags, *layout]))
    without_device = flags[: flags.index("--hardware")]
    for command in ("memory", "checkpoint"):
        assert run(command, [*without_device, *layout])


def test_embedding_and_head_refuse_no_kernel_of_attention():
    """FlashAttention 4 has no masks by positions; all-to-all needs none."""
    chosen = "--cp-comm-type a2a --attention-backend fa4 --attention-dropout 0"
    words = """--num-layers 2 --hidden-size 1024 --num-attention-heads 8 --seq-length 1024
    --micro-batch-size 1 --global-batch-size 2 --train-iters 3 --mock-data --vocab-size 32000
    --lr 1e-3 --bf16 --context-parallel-size 2 --world-size 2 --hardware"""
    found = json.loads(run("step", ["--json", *words.split(), DEVICES[0], *chosen.split()])[0])
    assert found["step_s"] > 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.default("3")
def test_a_layout_that_a_search_prints_takes_what_it_says(seed):
    flags, _ = drawn(seed)
    text = "\n".join(run("search", flags))
    printed = re.findall(r"^1\. ([0-9.]+) s, .*?([0-9.]+) GiB: (.*)$", text, re.MULTILINE)
    assert printed, text
    seconds, gib, words = printed[0]
    found = json.loads(run("step", ["--json", *flags, *words.split()])[0])
    assert found["step_s"] == pytest.approx(float(seconds), rel=2e-3)
    assert found["peak_gib"] == pytest.approx(float(gib), abs=0.06)
