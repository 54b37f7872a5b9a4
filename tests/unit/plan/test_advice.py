"""Which transfers hide, whether memory falls with each stage of ZeRO, and what a banner prints of
both.
"""

from __future__ import annotations

import re

import pytest
from megatron.tools._plan.advice import Machine, order_of_peaks, transfers
from megatron.tools._plan.memory import MemoryPlan
from megatron.tools._plan.table import banner_lines, memory_report
from step_models import LLAMA, resolved

from megatron.config.groups import Config

VOCAB = 50257
COMMON = (
    f"--mock-data --vocab-size {VOCAB - 1} --train-iters 1 --lr 1e-3 --bf16 --hidden-dropout "
    "0 --attention-dropout 0 --micro-batch-size 1"
)
GPT2 = (
    "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 64 "
    "--max-position-embeddings 1024"
)
SEVEN = f"--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 1024 {LLAMA}"


def configure(flags: str, world: int, *more: object) -> Config:
    return resolved(" ".join([COMMON, flags, *map(str, more)]), world, VOCAB)


@pytest.mark.parametrize(
    "flags, needed",
    [
        # g F MFU / (4 BW): 989e12 x 0.4 / 50e9 = 7912 FLOPs a byte
        ("--zero-stage 0", [2 * 7912]),
        ("--zero-stage 2", [7912, 7912]),
        ("--zero-stage 2 --grad-reduce-in-bf16", [3956, 7912]),
        ("--zero-stage 3 --zero3-keep-gathered", [7912, 7912]),
        ("--zero-stage 2 --recompute-granularity full", [5275, 7912]),
    ],
)
def test_tokens_that_hide_a_transfer(flags, needed):
    found = transfers(configure(SEVEN, 8, *flags.split()), 8)
    assert [transfer.tokens_needed for transfer in found] == needed
    assert all(transfer.tokens == 1024 and not transfer.hides for transfer in found)


@pytest.mark.parametrize("ep", [4, 8])
def test_experts_that_other_ranks_hold_too_are_sent_without_each_token_using_them(ep):
    """16 of them, 2 for each token; on 8 expert-parallel ranks each is held once."""
    experts = "--num-experts 16 --moe-router-topk 2 --moe-ffn-hidden-size 1024"
    config = configure(SEVEN, 8, *experts.split(), "--expert-model-parallel-size", ep)
    dense, expert = 4 * 4096**2 + (2 + 16) * 4096, 3 * 4096 * 1024
    sent, active = dense + (16 // ep * expert if ep < 8 else 0), dense + 2 * expert
    (reduction,) = transfers(config, 8)
    assert reduction.tokens_needed == pytest.approx(2 * 7912 * sent / active, abs=2)


@pytest.mark.parametrize("samples", [1, 12])
def test_the_flags_that_are_named_help(samples):
    flags = f"--zero-stage 2 --micro-batch-size {samples} --global-batch-size {samples * 32}"
    for index, transfer in enumerate(transfers(configure(SEVEN, 8, *flags.split()), 8)):
        assert transfer.hides == (transfer.tokens >= transfer.tokens_needed)
        assert transfer.hides == (" hides: " in transfer.line())
        for flag in transfer.flags.split(" or "):
            batch = int(flag.split()[1]) * 32 if "micro" in flag else samples * 32
            more = *flags.split(), *flag.split(), "--global-batch-size", batch
            assert transfers(configure(SEVEN, 8, *more), 8)[index].hides


@pytest.mark.parametrize(
    "flags, world, needed",
    [
        ("", 1, [7912]),
        ("--zero-shard-size 1", 8, [7912]),
        ("", 8, [989, 7912, 11868]),
        ("--zero3-keep-gathered", 4, [1978, 7912, 7912]),
    ],
)
def test_tokens_that_hide_weights_from_host_memory(flags, world, needed):
    """p F MFU / (2 BW N) at 50 GB/s: each rank copies its own slice. A rank that shares with none
    sends nothing; another bandwidth is another need.
    """
    config = configure(SEVEN, world, "--zero-stage", 3, "--param-cpu-offload", *flags.split())
    found = transfers(config, world)
    assert [transfer.tokens_needed for transfer in found] == needed
    assert "from host memory (50 GB/s)" in found[0].what
    slow = transfers(config, world, Machine(host_bandwidth=25.0))[0].tokens_needed
    assert slow == pytest.approx(2 * needed[0], abs=1)
    report = memory_report(MemoryPlan(config, VOCAB, world), memory=80.0, machine=Machine())
    assert report[-len(needed)].startswith("copy of the weights")
    on_host = any("weights are in host memory between their uses" in line for line in report)
    assert on_host == (world == 1)
    assert any(line.startswith("in the host's memory") for line in report)


def micro_batches(ranks: int) -> tuple[object, ...]:
    """Four of them, recomputed: the peak is not at the start of the one backward pass."""
    return "--global-batch-size", 4 * ranks, "--recompute-granularity", "full"


def test_memory_falls_with_each_stage():
    config = configure(GPT2, 4, *micro_batches(4))
    order = order_of_peaks(MemoryPlan(config, VOCAB, 4, "cpu"))
    assert order.broken == [] and len(set(order.totals)) == 4
    assert sorted(order.totals, reverse=True) == order.totals


def test_what_prevents_it_is_named():
    config = configure(GPT2, 4, *micro_batches(2), "--pipeline-model-parallel-size", 2)
    (first, *_) = order_of_peaks(MemoryPlan(config, VOCAB, 4, "cpu")).broken
    assert re.match(r"stage 2 needs .* and stage 1 .* GiB on pipeline rank [01]: the", first)
    assert "whose gradient is whole in the backward pass of" in first
    config = configure(GPT2, 2, *micro_batches(2), "--zero3-keep-gathered", "--zero-stage", 3)
    kept = order_of_peaks(MemoryPlan(config, VOCAB, 2, "cpu")).broken
    held = "--zero3-keep-gathered holds all weights whole"
    assert [line.split(": ")[1] for line in kept] == [held]


def test_what_a_banner_says():
    config = configure(SEVEN, 64, "--zero-stage", 2)
    silent, loud = (
        banner_lines(MemoryPlan(config, VOCAB, 64), machine) for machine in (None, Machine())
    )
    assert silent[0].startswith("estimate per rank (GiB): parameters 12.7, ") and not any(
        "warning" in line for line in silent
    )
    assert loud[: len(silent)] == silent
    warning = loud[len(silent)]
    assert warning.startswith("warning: with 50 GB/s a rank and 40% of 989 TFLOP/s the reduce-")
    assert warning.endswith(
        "1,024 tokens a micro-batch of 7,912 needed; --micro-batch-size 8 helps"
    )
    hidden = MemoryPlan(configure(SEVEN, 64, "--zero-stage 2 --micro-batch-size 8"), VOCAB, 64)
    assert banner_lines(hidden, Machine()) == banner_lines(hidden, None)
