"""The training benchmark: our command line is one that the program takes, its console lines are
read right, noisy pairs do not count, and a peer that starts from our weights and tokens computes
our losses.
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron.benchmarks import training as tool
from megatron.benchmarks.peers.common import (
    Work,
    parse_work,
    rank_samples,
    tensor_of,
)

from megatron.config.arguments import parse_arguments

TINY = Work(
    layers=2,
    hidden=32,
    heads=4,
    ffn=48,
    seq=16,
    vocab=64,
    micro_batch=2,
    steps=6,
    warmup=2,
    lr_warmup=2,
    threads=1,
)


@pytest.mark.parametrize("name", tool.SETTINGS)
def test_our_command_line_asks_for_the_same_work(name):
    work = tool.SETTINGS[name]
    config = parse_arguments(tool.our_flags(work)).config
    model, training, distributed = config.model, config.training, config.distributed
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size) == (
        work.layers,
        work.hidden,
        work.ffn,
    )
    assert model.num_attention_heads == work.heads
    assert (
        model.position_embedding_type,
        model.add_bias_linear,
        model.normalization,
        model.activation,
    ) == {
        "Llama": ("rope", False, "RMSNorm", "swiglu"),
        "GPT-2": ("learned_absolute", True, "LayerNorm", "gelu"),
    }[work.shape]
    assert model.untie_embeddings_and_output_weights and (
        model.hidden_dropout,
        model.attention_dropout,
    ) == (work.dropout, 0)
    assert (
        config.data.vocab_size + 1 == work.vocab
        and config.data.seq_length == work.seq
        and training.train_iters == work.steps
    )
    assert training.micro_batch_size == work.micro_batch and config.precision.bf16 == (
        work.precision == "bf16"
    )
    assert training.global_batch_size * work.seq == work.step_tokens
    assert (
        distributed.tensor_model_parallel_size == work.tensor_parallel
        and distributed.sequence_parallel == bool(work.sequence_parallel)
    )
    assert distributed.pipeline_model_parallel_size == work.pipeline_parallel
    experts = (model.num_experts or 0, distributed.expert_model_parallel_size)
    assert experts == (work.experts, work.expert_parallel)
    if work.experts:
        assert (model.moe_router_topk, model.moe_ffn_hidden_size) == (work.topk, work.expert_ffn)
        # as Mixtral: the chosen logits' softmax, all tokens, no losses
        assert (model.moe_router_score_function, model.moe_router_pre_softmax) == ("softmax", False)
        assert model.moe_expert_capacity_factor is None and model.moe_token_dispatcher_type == (
            "alltoall"
        )
        assert not any(model.moe_aux_loss_coeff) and model.moe_z_loss_coeff == 0
    if work.pipeline_parallel > 1:
        assert (distributed.pipeline_schedule, distributed.decoder_first_pipeline_num_layers) == (
            work.schedule,
            work.first_stage_layers,
        )
    assert any(peer.takes(work) for peer in tool.PEERS.values())


def test_several_processes_are_launched_by_torchrun_and_only_peers_that_can_take_part():
    alone, pair = tool.SETTINGS["fp32"], tool.SETTINGS["fp32, tp2"]
    assert tool.command_of("ours", alone, Path("p"), Path("s"))[1].endswith("pretrain_gpt.py")
    command = tool.command_of("megatron-core", pair, Path("p"), Path("s"))
    assert command[0] == "p/megatron-core/bin/python" and command[1:6] == [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    assert [name for name, peer in tool.PEERS.items() if peer.takes(pair)] == ["megatron-core"]
    assert (
        len([name for name, peer in tool.PEERS.items() if peer.takes(tool.SETTINGS["fp32, dp2"])])
        == 3
    )
    stages = tool.SETTINGS["fp32, pp2, 8 micro-batches"]
    assert [name for name, peer in tool.PEERS.items() if peer.takes(stages)] == [
        "DeepSpeed pipeline",
        "megatron-core",
    ]


def test_experts_are_the_work_of_peers_that_have_them():
    def takers(name: str) -> list[str]:
        return [peer for peer in tool.PEERS if tool.PEERS[peer].takes(tool.SETTINGS[name])]

    assert takers("fp32, 8 experts top-2") == ["Hugging Face Trainer", "megatron-core"]
    assert takers("fp32, 8 experts top-2, ep2") == ["megatron-core"]
    assert "megatron-core" not in takers("fp32")
    work = tool.SETTINGS["fp32, 8 experts top-2"]
    assert work.topk * work.expert_ffn == work.ffn  # a token is multiplied as often as without


def test_a_peer_reads_back_the_work_and_the_start_it_is_given(monkeypatch, tmp_path):
    work = replace(TINY, precision="bf16", dropout=0.1, data_parallel=2)
    tool.write_start(tmp_path / "start", work, tool.our_flags(work))
    monkeypatch.setattr(sys, "argv", ["peer", str(tmp_path / "start"), *work.arguments()])
    read, start = parse_work()
    assert read == work
    tokens = tensor_of(start, "tokens")
    assert tokens.shape == (work.steps * 4, work.seq + 1) and int(tokens.max()) < work.vocab
    seen = [
        batch
        for step in range(work.steps)
        for rank in range(2)
        for batch in rank_samples(tokens, step, work, rank)
    ]
    # micro-batch 2 of 2 ranks: each sample is read once, in order
    assert torch.equal(torch.cat(seen), tokens)


@pytest.mark.parametrize(
    "shape, groups, layer, ends",
    [
        # two key/value heads for four query heads
        ("Llama", 2, 3 * 32 * 32 + 3 * 32 * 48 + 2 * 32, 32),
        # biases, positions, and norms with a bias each
        pytest.param(
            *("GPT-2", 0, 4 * 32 * 32 + 4 * 32 + 2 * 32 * 48 + 48 + 32 + 4 * 32, 16 * 32 + 2 * 32),
            marks=pytest.mark.full,
        ),
    ],
)
@pytest.mark.full
def test_the_plain_loop_computes_our_losses(tmp_path, shape, groups, layer, ends):
    work = replace(TINY, shape=shape, query_groups=groups)
    tool.write_start(tmp_path / "start", work, tool.our_flags(work))
    ours, peer = (
        tool.run(who, work, tmp_path, tmp_path / "start") for who in ("ours", "plain loop")
    )
    assert peer["parameters"] == 2 * 64 * 32 + 2 * layer + ends and len(peer["losses"]) == 6
    # our console line is the mean of two steps
    pairs = [sum(peer["losses"][i : i + 2]) / 2 for i in (0, 2, 4)]
    # the console's 7 digits, 5e-7, and a dozen roundings of a loss near 4 in fp32, 2.4e-7 each
    bound = 5e-6
    assert ours["losses"] == pytest.approx(pairs, abs=bound)
    assert tool.last_loss({"who": "ours", **ours}, TINY) == pytest.approx(
        tool.last_loss({"who": "plain loop", **peer}, TINY), abs=bound
    )


def fake_run(who: str, work: Work, *_: object) -> dict:
    """A run of ours at twice a peer's speed; two peers are not installed."""
    if who == "Liger":
        raise RuntimeError("No module named 'liger_kernel'")
    if who == "litgpt":
        raise FileNotFoundError("litgpt/bin/python")
    speed = 2.0 if who == "ours" else 1.0
    losses = [5.0] if who == "ours" else [5.0] * work.steps
    return {"tokens_per_second": speed, "others_cores": 9.0, "losses": losses, "peak_bytes": 1}


@pytest.mark.parametrize("window, pairs", [(1e9, 7), (-1.0, 0)])
def test_a_window_ends_in_time_and_leaves_out_a_peer_that_fails(
    monkeypatch, tmp_path, capsys, window, pairs
):
    monkeypatch.setattr(tool, "run", fake_run)
    monkeypatch.setattr(tool, "write_start", lambda *_: None)
    work, runs = tool.SETTINGS["125M on a GPU"], []
    rule = tool.Rule(7, math.inf, "tokens_per_second", time.monotonic() + window, True)
    peers = ["plain loop", "Liger", "litgpt"]
    assert list(tool.rounds("gpu", work, peers, tmp_path, tmp_path, rule, runs))
    assert len(rule.counted(runs, "gpu", "plain loop")) == pairs
    assert not rule.counted(runs, "gpu", "Liger")
    if pairs:
        printed = capsys.readouterr().out
        assert "Liger failed and is left out" in printed
        assert "litgpt failed and is left out" in printed
        (row,) = tool.summary(runs, {"gpu": work}, rule)
        assert row["passed"] and row["equal_losses"] and row["peak_bytes"] == [1, 1]
        for run in runs:
            run["losses"] = [loss * (1.01 if run["who"] == "ours" else 1) for loss in run["losses"]]
        (row,) = tool.summary(runs, {"gpu": work}, rule)
        assert not row["passed"] and "unequal losses" in tool.table([row])


def test_pairs_count_only_when_both_runs_had_the_machine():
    def entry(index: int, who: str, speed: float, others: float) -> dict:
        return {
            "setting": "fp32",
            "round": index,
            "who": who,
            "tokens_per_second": speed,
            "others_cores": others,
        }

    runs = [
        entry(0, "ours", 10, 0.0),
        entry(0, "litgpt", 8, 0.1),
        entry(1, "ours", 11, 0.9),
        entry(1, "litgpt", 8, 0.0),
        entry(2, "litgpt", 9, 0.9),
        entry(2, "ours", 12, 0.0),
        entry(3, "ours", 9, 0.1),
    ]
    assert tool.Rule(7, 0.2, "tokens_per_second").counted(runs, "fp32", "litgpt") == [(10, 8)]
    every = tool.Rule(7, math.inf, "tokens_per_second")
    assert every.counted(runs, "fp32", "litgpt") == [(10, 8), (11, 8), (12, 9)]
    runs = [entry | {"losses": [7.5]} for entry in runs]
    (row,) = tool.summary(runs, {"fp32": Work(steps=30)}, every)
    assert row["our_loss"] == row["their_loss"] == 7.5 and "| 7.50000 | 7.50000 |" in tool.table(
        [row]
    )
    # three pairs are too few
    assert row["peer"] == "litgpt" and row["median"] == pytest.approx(12 / 9) and not row["passed"]
