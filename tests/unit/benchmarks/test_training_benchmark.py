"""The training benchmark: our command line asks for the peers' work, a peer that starts from our
weights and tokens computes our losses, and only pairs on a quiet machine count.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import pytest
import torch
from megatron.benchmarks import training as tool
from megatron.benchmarks.peers.common import Work, parse_work, rank_samples, tensor_of

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
SHAPES = {  # positions, biases, norm, activation
    "Llama": ("rope", False, "RMSNorm", "swiglu"),
    "GPT-2": ("learned_absolute", True, "LayerNorm", "gelu"),
}


@pytest.mark.parametrize("name", tool.SETTINGS)
def test_our_command_line_asks_for_the_same_work(name):
    work = tool.SETTINGS[name]
    config = parse_arguments(tool.our_flags(work)).config
    model, training, distributed = config.model, config.training, config.distributed
    shape = model.position_embedding_type, model.add_bias_linear
    assert (*shape, model.normalization, model.activation) == SHAPES[work.shape]
    sizes = model.num_layers, model.hidden_size, model.num_attention_heads, model.ffn_hidden_size
    assert sizes == (work.layers, work.hidden, work.heads, work.ffn)
    assert model.untie_embeddings_and_output_weights
    assert (model.hidden_dropout, model.attention_dropout) == (work.dropout, 0)
    data = config.data.vocab_size + 1, config.data.seq_length, training.train_iters
    assert data == (work.vocab, work.seq, work.steps)
    assert training.micro_batch_size == work.micro_batch
    assert training.global_batch_size * work.seq == work.step_tokens
    assert config.precision.bf16 == (work.precision == "bf16")
    tensor = distributed.tensor_model_parallel_size, distributed.sequence_parallel
    assert tensor == (work.tensor_parallel, bool(work.sequence_parallel))
    assert distributed.pipeline_model_parallel_size == work.pipeline_parallel
    experts = model.num_experts or 0, distributed.expert_model_parallel_size
    assert experts == (work.experts, work.expert_parallel)
    if work.experts:
        # as Mixtral: the chosen logits' softmax, all tokens, no losses; as many FLOPs as without
        router = model.moe_router_score_function, model.moe_router_pre_softmax
        assert router == ("softmax", False) and model.moe_expert_capacity_factor is None
        assert not any(model.moe_aux_loss_coeff) and model.moe_z_loss_coeff == 0
        assert model.moe_router_topk * model.moe_ffn_hidden_size == work.ffn
    if work.pipeline_parallel > 1:
        split = distributed.pipeline_schedule, distributed.decoder_first_pipeline_num_layers
        assert split == (work.schedule, work.first_stage_layers)
    assert any(peer.takes(work) for peer in tool.PEERS.values())


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
    "peer, work",
    [
        ("plain loop", {"shape": "Llama", "query_groups": 2}),
        pytest.param("plain loop", {"shape": "GPT-2"}, marks=pytest.mark.full),
        pytest.param("torch DDP", {"shape": "GPT-2", "data_parallel": 2}, marks=pytest.mark.full),
    ],
)
def test_programs_take_their_steps_in_turns(tmp_path, peer, work):
    """Every turn is a round, and equal work gives equal losses."""
    work = replace(TINY, **work)
    rule, runs = tool.Rule(7, math.inf, "tokens_per_second"), []
    yielded = list(tool.turns("tiny", work, [peer], tmp_path, tmp_path / "start", rule, runs))
    assert yielded == [index for index in range(7) for _ in range(2)]
    (row,) = tool.summary(runs, {"tiny": work}, rule)
    assert (row["peer"], row["pairs"]) == (peer, 7) and row["median"] > 0
    # a dozen roundings of a loss near 4 in fp32, 2.4e-7 each
    assert row["our_loss"] == pytest.approx(row["their_loss"], abs=3e-6)


def entry(index: int, who: str, speed: float, others: float = 0.0) -> dict:
    """A run of a round; `others`: cores that other programs used in it."""
    run = {"setting": "fp32", "round": index, "who": who, "tokens_per_second": speed}
    return run | {"others_cores": others, "losses": [7.5]}


def test_pairs_count_only_when_both_runs_had_the_machine():
    runs = [
        *(entry(0, "ours", 10), entry(0, "litgpt", 8, 0.1)),
        *(entry(1, "ours", 11, 0.9), entry(1, "litgpt", 8)),
        *(entry(2, "litgpt", 9, 0.9), entry(2, "ours", 12)),
        entry(3, "ours", 9, 0.1),
    ]
    assert tool.Rule(7, 0.2, "tokens_per_second").counted(runs, "fp32", "litgpt") == [(10, 8)]
    every = tool.Rule(7, math.inf, "tokens_per_second")
    assert every.counted(runs, "fp32", "litgpt") == [(10, 8), (11, 8), (12, 9)]


@pytest.mark.parametrize("loss, passed", [(7.5, True), (7.6, False)])
def test_a_faster_run_on_a_gpu_passes_with_equal_losses_alone(loss, passed):
    runs = [entry(index, "ours", 2) for index in range(7)]
    runs += [entry(index, "litgpt", 1) | {"losses": [loss]} for index in range(7)]
    rule = tool.Rule(7, math.inf, "tokens_per_second")
    (row,) = tool.summary(runs, {"fp32": tool.SETTINGS["125M on a GPU"]}, rule)
    assert (row["peer"], row["median"], row["passed"]) == ("litgpt", 2, passed)
    assert ("unequal losses" in tool.table([row])) == (not passed)
