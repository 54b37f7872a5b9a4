"""Large models on many ranks, without a device: what each rank holds by the plan is what the
blocks of its model take, to the byte.

Models are built on the meta device, where storages have sizes and no memory, with the groups of one
rank of the job.
"""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
from megatron.tools._plan.memory import rank_memories

from megatron.config.groups import (
    Config,
    DataConfig,
    DistributedConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    TrainingConfig,
)
from megatron.config.validate import resolve
from megatron.distributed.groups import build_groups, group_options, layout_of
from megatron.model.build import build_model
from megatron.model.gpt import GPTModel
from megatron.parallel import blocks as optimizer_blocks
from megatron.parallel.blocks import Block, build_run_blocks

LLAMA = {
    "activation": "swiglu",
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "add_bias_linear": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "untie_embeddings_and_output_weights": True,
}
GROUPED = {**LLAMA, "group_query_attention": True, "num_query_groups": 8}
# layers, hidden, heads, ffn, sequence, vocabulary, others, parameters
MODELS = {
    "7B": (32, 4096, 32, 11008, 4096, 32000, LLAMA, 6.74e9),
    "70B": (80, 8192, 64, 28672, 8192, 128256, GROUPED, 70.6e9),
    "175B": (
        96,
        12288,
        96,
        None,
        2048,
        50257,
        {"attention_dropout": 0.0, "hidden_dropout": 0.0},
        175e9,
    ),
    "405B": (126, 16384, 128, 53248, 8192, 128256, GROUPED, 405e9),
}
# ranks, tp, pp
LAYOUTS = {
    "7B": (256, 2, 2),
    "70B": (512, 8, 4),
    "175B": (1024, 8, 16),
    "405B": (2016, 8, 9),
}


def configure(name: str, world: int, tp: int, pp: int, **options) -> Config:
    layers, hidden, heads, ffn, seq, vocab, others, _ = MODELS[name]
    distributed = {
        key: value
        for key, value in options.items()
        if key in DistributedConfig.__dataclass_fields__
    }
    optimizer = {key: value for key, value in options.items() if key not in distributed}
    ranks = world // tp // pp
    config = Config(
        model=ModelConfig(
            num_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            ffn_hidden_size=ffn,
            **others,
        ),
        precision=PrecisionConfig(bf16=True),
        data=DataConfig(mock_data=True, vocab_size=vocab - 1, seq_length=seq),
        training=TrainingConfig(
            micro_batch_size=1,
            global_batch_size=16 * ranks,
            train_iters=1,
            recompute_granularity="full",
        ),
        optimizer=OptimizerConfig(lr=1.0, **optimizer),
        distributed=DistributedConfig(
            tensor_model_parallel_size=tp,
            sequence_parallel=tp > 1,
            pipeline_model_parallel_size=pp,
            world_size=world,
            pipeline_model_parallel_layout="auto" if pp > 1 else None,
            **distributed,
        ),
    )
    return resolve(config, world, vocab).config


def blocks_of(config: Config, world: int, rank: int, vocab: int) -> tuple[GPTModel, list]:
    """The blocks that training would build on the first rank of a pipeline rank."""
    layout = layout_of(config, world)
    groups = build_groups(
        layout,
        layout.rank({"tp": 0, "cp": 0, "dp": 0, "pp": rank}),
        lambda ranks, group_desc: None,
        **group_options(config),
    )
    model = build_model(config, vocab, groups, torch.device("cpu"))
    return model, build_run_blocks(config, model, torch.device("meta"), groups)


def nbytes(*tensors: torch.Tensor | None) -> int:
    """Bytes of the storages of tensors, each storage once."""
    storages = {
        id(tensor.untyped_storage()): tensor.untyped_storage()
        for tensor in tensors
        if tensor is not None
    }
    return sum(storage.nbytes() for storage in storages.values())


def gradient_bytes(blocks: list[Block]) -> int:
    """What is accumulated in a step: whole buffers, or at stages 2 and 3 slices of them."""
    total = 0
    for block in blocks:
        block.open()
        total += nbytes(block.grad) if block.zero_stage < 2 else block.grad[block.own_slice].nbytes
    return total


@pytest.mark.parametrize(
    "name, layout, stage",
    [(name, layout, stage) for stage, (name, layout) in enumerate(LAYOUTS.items())],
    ids=str,
)
def test_the_plan_is_what_the_blocks_take(name, layout, stage):
    world, tp, pp = layout
    vocab = MODELS[name][5]
    config = configure(name, world, tp, pp, zero_stage=stage)
    planned, shard = rank_memories(config, vocab, world), world // tp // pp
    for rank in sorted({0, pp // 2, pp - 1}):
        _, blocks = blocks_of(config, world, rank, vocab)
        elements = sum(block.size for block in blocks)
        held = planned[rank].static
        assert held["parameters"] == nbytes(*(block.weight for block in blocks))
        assert held["gradients"] == gradient_bytes(blocks)
        assert held["optimizer"] == 3 * sum(block.master.numel() * 4 for block in blocks)
        assert (
            planned[rank].resident * shard
            == elements * {0: 18 * shard, 1: 6 * shard + 12, 2: 2 * shard + 16, 3: 16}[stage]
        )


def test_hybrid_sharding_narrow_state_and_offload():
    world, vocab = 64, 32000
    for options in (
        {"zero_shard_size": 8},
        {"main_grads_dtype": "bf16", "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
        {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5},
        {"optimizer_nvme_offload": "files", "optimizer_offload_fraction": 0.5},
    ):
        for stage in (1, 2, 3):
            config = configure("7B", world, 1, 1, zero_stage=stage, **options)
            (planned,), (_, blocks) = (
                rank_memories(config, vocab, world),
                blocks_of(config, world, 0, vocab),
            )
            narrow = "exp_avg_dtype" in options
            state = [
                (block.on_host, (block.own[1] - block.own[0]) * (4 + (4 if narrow else 8)))
                for block in blocks
            ]
            apart = sum(size for on_host, size in state if on_host)
            pages = sum(-(-size // (12 * 4096)) * 12 * 4096 for on_host, size in state if on_host)
            in_files = "optimizer_nvme_offload" in options
            assert all(
                block.master is None
                if block.on_host and in_files
                else len(block.master) == block.own[1] - block.own[0]
                for block in blocks
            )
            assert planned.static == {
                "parameters": nbytes(
                    *itertools.chain.from_iterable(
                        (block.weight, block.rounded) for block in blocks
                    )
                ),
                "gradients": gradient_bytes(blocks),
                "optimizer": sum(size for on_host, size in state if not on_host),
                "host": 4 * 2**21 * 12 if in_files else apart,
                "disk": pages if in_files else 0,
            }
            assert (apart > 0) == ("optimizer_offload_fraction" in options)


def held_on_the_device(blocks: list[Block]) -> int:
    """Bytes of all tensors that blocks keep on the meta device, which replaces a GPU, between
    their uses.
    """
    return nbytes(
        *(
            value
            for block in blocks
            for value in vars(block).values()
            if isinstance(value, torch.Tensor) and value.is_meta
        )
    )


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer_offload_fraction": 0.5},
        {"optimizer_nvme_offload": "files", "freeze": "head"},
        {"zero_shard_size": 64},
    ],
    ids=str,
)
def test_offloaded_weights_leave_the_device(options):
    """What is stepped on the host or frozen leaves no byte of its weights there; a slice that stays
    is seen.
    """
    world, vocab = 512, 32000
    config = configure("7B", world, 1, 1, zero_stage=3, param_cpu_offload=True, **options)
    static, (_, blocks) = (
        rank_memories(config, vocab, world)[0].static,
        blocks_of(config, world, 0, vocab),
    )
    stays = [block for block in blocks if not block.offloaded]
    assert all(not block.on_host and block.trained for block in stays) and bool(stays) == (
        "optimizer_offload_fraction" in options
    )
    part = {block: block.own[1] - block.own[0] for block in blocks}
    assert (
        held_on_the_device(blocks) == sum(4 * part[block] for block in stays)
        and static["parameters"] == 0
    )
    assert static["optimizer"] == sum(12 * part[block] for block in stays)
    stepped = sum(12 * part[block] for block in blocks if block.on_host and not block.in_files)
    host = stepped + sum(block.gathered_from.nbytes for block in blocks if block.offloaded)
    # parts smaller than the largest there are
    ring = (
        4
        * 12
        * max((-(-part[block] // 4096) * 4096 for block in blocks if block.in_files), default=0)
    )
    assert static["host"] == host + ring and (ring > 0) == ("optimizer_nvme_offload" in options)
    with mock.patch.object(
        optimizer_blocks,
        "host_memory",
        lambda size, dtype, device: torch.zeros(size, dtype=dtype, device=device),
    ):
        assert held_on_the_device(blocks_of(config, world, 0, vocab)[1]) > held_on_the_device(
            blocks
        )
