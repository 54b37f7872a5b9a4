"""The training benchmark: our command line is one that the program takes, its console lines are read right, noisy pairs do not count."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))

import benchmark_training as tool
from common import Work, parse_work

from megatron.config.arguments import parse_arguments


def line(iteration: int, second: int) -> str:
    return (f" [2026-01-01 00:00:{second:02d}.500000] iteration {iteration:8d}/      30 | consumed samples:  1 | "
            f"lm loss: {9 - iteration / 10:.6E} | loss scale: 1.0 |\n")


def test_throughput_is_taken_after_the_warm_up():
    work = Work(steps=30, warmup=10)
    lines = [("banner\n", 1.0), (line(10, 5), 4.0), (line(20, 10), 8.0), (line(30, 15), 14.0), (" training is complete\n", 20.0)]
    answer = tool.our_answer(lines, work)
    assert answer["tokens_per_second"] == pytest.approx(20 * 1024 / 10)
    assert answer["tokens_per_cpu_second"] == pytest.approx(20 * 1024 / 10)
    assert answer["losses"] == pytest.approx([8, 7, 6])


@pytest.mark.parametrize("name", tool.SETTINGS)
def test_our_command_line_asks_for_the_same_work(name):
    work = tool.SETTINGS[name]
    config = parse_arguments(tool.our_command(work)[2:]).config
    model, training = config.model, config.training
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size) == (work.layers, work.hidden, work.ffn)
    assert (model.num_attention_heads, model.position_embedding_type, model.add_bias_linear) == (work.heads, "rope", False)
    assert (model.normalization, model.activation) == ("RMSNorm", "swiglu")
    assert model.untie_embeddings_and_output_weights and (model.hidden_dropout, model.attention_dropout) == (work.dropout, 0)
    assert config.data.vocab_size + 1 == work.vocab and config.data.seq_length == work.seq and training.train_iters == work.steps
    assert training.global_batch_size * work.seq == work.step_tokens and config.precision.bf16 == (work.precision == "bf16")


def test_a_peer_reads_back_the_work_it_is_given(monkeypatch):
    work = replace(Work(), precision="bf16", dropout=0.1, steps=7)
    monkeypatch.setattr(sys, "argv", ["peer", *work.arguments()])
    assert parse_work() == work


def test_pairs_count_only_when_both_runs_had_the_machine():
    def entry(index: int, who: str, speed: float, others: float) -> dict:
        return {"setting": "fp32", "round": index, "who": who, "tokens_per_second": speed, "others_cores": others}

    runs = [entry(0, "ours", 10, 0.0), entry(0, "litgpt", 8, 0.1), entry(1, "ours", 11, 0.9), entry(1, "litgpt", 8, 0.0),
            entry(2, "litgpt", 9, 0.9), entry(2, "ours", 12, 0.0), entry(3, "ours", 9, 0.1)]
    assert tool.Rule(7, 0.2, "tokens_per_second").counted(runs, "fp32", "litgpt") == [(10, 8)]
    every = tool.Rule(7, math.inf, "tokens_per_second")
    assert every.counted(runs, "fp32", "litgpt") == [(10, 8), (11, 8), (12, 9)]
    (row,) = tool.summary(runs, every)
    assert row["peer"] == "litgpt" and row["median"] == pytest.approx(12 / 9) and not row["passed"]  # three pairs are too few
