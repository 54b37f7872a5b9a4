"""Small models whose planned memory tests compare with the storages that live."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist

from megatron.config.arguments import parse_arguments
from megatron.config.groups import Config
from megatron.config.validate import resolve
from megatron.distributed.groups import Layout, build_groups
from megatron.model.arithmetic import padded_vocab_size
from megatron.model.gpt import GPTModel
from megatron.model.kernels import choose_kernels, compute_dtype
from megatron.model.layer import MicroBatch
from megatron.model.model_parallel import NO_TP, ModelParallel, TensorParallel
from megatron.parallel.blocks import build_blocks

SEQ, BATCH, VOCAB = 64, 2, 301
BASE = f"""--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length {SEQ}
--micro-batch-size {BATCH} --train-iters 1 --lr 1 --mock-data --vocab-size {VOCAB - 1}"""
DRY = "--attention-dropout 0 --hidden-dropout 0"
GROUPED = "--group-query-attention --num-query-groups 2"
LLAMA = f"{DRY} {GROUPED} --swiglu --normalization RMSNorm --position-embedding-type rope"
LATENT = f"""{DRY} --swiglu --normalization RMSNorm --position-embedding-type rope
--disable-bias-linear --multi-latent-attention --qk-layernorm --kv-lora-rank 16 --qk-head-dim 16
--qk-pos-emb-head-dim 8 --v-head-dim 12"""


def configure(flags: str, world: int = 1) -> Config:
    """A configuration with the kernels that a CPU takes named: what is measured here is planned for
    a GPU, whose `auto` takes others.
    """
    config = resolve(parse_arguments(f"{BASE} {flags}".split()).config, world, VOCAB).config
    config, choices = choose_kernels(config, torch.device("cpu"))
    model = dataclasses.replace(config.model, attention_backend=choices["attention"].implementation)
    return dataclasses.replace(config, model=model)


def whole_model(config: Config) -> tuple[GPTModel, MicroBatch]:
    """A whole model that has its storage, shared by the ranks of this job, and a micro-batch."""
    size, tp = config.distributed.tensor_model_parallel_size, NO_TP
    if size > 1:
        groups = build_groups(
            Layout(tp=size), dist.get_rank(), dist.new_group, config.model.num_query_groups
        )
        tp = TensorParallel(groups.tp, groups.kv, config.distributed.sequence_parallel)
    model = GPTModel(
        config.model,
        vocab_size=VOCAB,
        padded_vocab=padded_vocab_size(VOCAB, config.model, size),
        dtype=compute_dtype(config.precision),
        seed=1,
        parallel=ModelParallel(tp),
    )
    model.choose_recompute(config.training)
    for block in build_blocks(model, torch.device("cpu")):
        block.open()
    tokens, ids = torch.zeros(BATCH, SEQ, dtype=torch.int64), torch.arange(BATCH)
    positions = torch.arange(SEQ).expand(BATCH, SEQ)
    mask = torch.ones(BATCH, SEQ)
    return model, model.micro_batch(tokens, tokens, mask, positions, ids, training=True)
