"""Parameters against published models, FLOPs and batch sizes against numbers worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.batch_schedule import batch_steps
from megatron.config.groups import Config, DataConfig, ModelConfig, OptimizerConfig, TrainingConfig
from megatron.config.validate import resolve
from megatron.model.arithmetic import (
    flops_per_iteration,
    padded_vocab_size,
    parameter_count,
    peak_tflops,
    unit_parameters,
)
from megatron.optimizer.lr_schedule import global_batch_size_at, iterations_for, samples_after


def resolved(seq_length: int = 2048, **model) -> ModelConfig:
    config = Config(
        model=ModelConfig(**model),
        data=DataConfig(mock_data=True, vocab_size=1000, seq_length=seq_length),
        training=TrainingConfig(micro_batch_size=1, train_iters=1),
        optimizer=OptimizerConfig(lr=1e-3),
    )
    return resolve(config, 1, None).config.model


LLAMA = {
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "add_bias_linear": False,
    "position_embedding_type": "rope",
}
GPT3 = {"num_layers": 96, "hidden_size": 12288, "num_attention_heads": 96, "seq_length": 2048}


@pytest.mark.parametrize(
    "model, vocab, total",
    [
        # GPT-2 small: 12 L h^2 + 13 L h + (V + s) h + 2 h
        (
            {"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "seq_length": 1024},
            50257,
            124_439_808,
        ),
        # the total that the published checkpoint holds
        (
            {
                **LLAMA,
                "num_layers": 28,
                "hidden_size": 1024,
                "ffn_hidden_size": 3072,
                "num_attention_heads": 16,
                "kv_channels": 128,
                # Qwen3 0.6B
                "group_query_attention": True,
                "num_query_groups": 8,
                "qk_layernorm": True,
            },
            151936,
            596_049_920,
        ),
    ],
    ids=["gpt2", "qwen3-0.6b"],
)
def test_parameters_of_published_models(model, vocab, total):
    counts = parameter_count(resolved(**model), vocab)
    assert (
        counts["total"] == total == sum(count for kind, count in counts.items() if kind != "total")
    )


def test_padded_vocabulary():
    model = resolved(num_layers=1, hidden_size=64, num_attention_heads=4)
    assert [padded_vocab_size(50257, model, tp) for tp in (1, 2, 8)] == [50304, 50432, 51200]
    assert padded_vocab_size(128, model) == 128 and padded_vocab_size(1, model) == 128
    assert (
        padded_vocab_size(50257, dataclasses.replace(model, make_vocab_size_divisible_by=1))
        == 50257
    )


def test_flops_worked_out_by_hand():
    # One layer, h 8, 2 heads of 4, f 32, V 16, batch 3, seq 5: 6 15 [8 (8 + 16) + 64 + 2 256 + 128]
    # + 6 8 3 25
    small = resolved(seq_length=5, num_layers=1, hidden_size=8, num_attention_heads=2)
    assert flops_per_iteration(small, 3, 5, 16) == 90 * (192 + 64 + 512 + 128) + 3600 == 84240
    # GPT-3: 6 t (12 L h^2 + h V) + 6 L h s t; Narayanan et al. 2021 count 72 L t h^2 (1 + s / 6h +
    # V / 12 L h) with full attention
    gpt3, t = resolved(**GPT3), 1536 * 2048
    counted = flops_per_iteration(gpt3, 1536, 2048, 51200)
    assert counted == 6 * t * (12 * 96 * 12288**2 + 12288 * 51200) + 6 * 96 * 12288 * 2048 * t
    paper = 72 * 96 * t * 12288**2 * (1 + 2048 / (6 * 12288) + 51200 / (12 * 96 * 12288))
    assert counted == pytest.approx(paper - 6 * 96 * 12288 * 2048 * t, rel=1e-12)  # the causal half


@pytest.mark.parametrize(
    "name, dtype, peak",
    [
        ("NVIDIA H100 80GB HBM3", torch.float16, 989),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756),
        ("NVIDIA H200", torch.float32, 67),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", torch.bfloat16, None),
        ("CPU, 2 threads", torch.float32, None),
    ],
)
def test_peaks(name, dtype, peak):
    assert peak_tflops(name, dtype) == peak


def ramp(start: int, increment: int, samples: int, gbs: int) -> Config:
    return Config(
        training=TrainingConfig(
            global_batch_size=gbs, rampup_batch_size=(start, increment, samples)
        )
    )


def scheduled(words: str, seq_length: int) -> Config:
    training = TrainingConfig(step_batch_size_schedule=tuple(words.split()))
    return Config(training=training, data=DataConfig(seq_length=seq_length))


def test_a_schedule_in_tokens_is_the_ramp_up_of_the_same_steps():
    """Lengths, batches and iterations follow from the steps alone."""
    theirs = scheduled("5.76k:16,0:4,1920:8,0.00384M:12", 64)
    ours = ramp(4, 4, 90, 16)
    assert batch_steps(theirs.training, 64) == batch_steps(ours.training, 64)
    for consumed in range(0, 130):
        assert global_batch_size_at(consumed, theirs) == global_batch_size_at(consumed, ours)
        assert samples_after(consumed, theirs) == samples_after(consumed, ours)
        assert iterations_for(500, theirs, consumed) == iterations_for(500, ours, consumed)


@given(
    st.integers(1, 20),
    st.integers(1, 20),
    st.integers(1, 10),
    st.integers(1, 2000),
    st.integers(0, 300),
    st.integers(0, 4000),
)
def test_closed_forms_equal_stepping(start, increment, increments, samples, iterations, target):
    config = ramp(start, increment, samples, start + increment * increments)
    consumed, steps, halfway = 0, 0, None
    while steps < iterations or consumed < target:
        if consumed >= target and halfway is None:
            halfway = steps
        if steps == iterations:
            assert samples_after(iterations, config) == consumed
        size = global_batch_size_at(consumed, config)
        assert size == min(
            start + int(consumed * increments / samples + 1e-12) * increment,
            config.training.global_batch_size,
        )
        consumed, steps = consumed + size, steps + 1
    assert iterations_for(target, config) == (steps if halfway is None else halfway)
    assert samples_after(steps, config) == consumed
    assert iterations_for(consumed, config, consumed) == 0


def test_deepseek_v3_and_a_dense_model_with_its_attention():
    """DeepSeek-V3 has 671,026,404,352 parameters without the layer of multi-token prediction, and
    a bias for each of its 256 experts in 58 layers.
    """
    attention = {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "num_attention_heads": 128,
        "hidden_size": 7168,
        "ffn_hidden_size": 18432,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
    }
    model = resolved(
        **attention,
        num_layers=61,
        num_experts=256,
        moe_ffn_hidden_size=2048,
        moe_layer_freq="[0]*3+[1]*58",
        moe_router_topk=8,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_shared_expert_intermediate_size=2048,
    )
    # the bias of 256 experts in 58 layers is no parameter
    assert sum(unit_parameters(model, 129280)) == 671_026_404_352
    dense = resolved(**attention, num_layers=2)
    h, heads = 7168, 128
    products = h * 1536 + 1536 * heads * 192 + h * 576 + 512 * heads * 256 + heads * 128 * h
    assert parameter_count(dense, 1000)["attention"] == 2 * (products + 1536 + 512)
    per_token = 2 * (products + 3 * h * 18432) + heads * (192 + 128) * 2048
    assert flops_per_iteration(dense, 1, 2048, 1000) == 3 * 2048 * (2 * per_token + 2 * h * 1000)
