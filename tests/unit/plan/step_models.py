"""Runs whose steps are planned: of a dense model, of one with experts, with latent attention."""

from __future__ import annotations

from megatron.tools._plan.hardware import load_hardware
from megatron.tools._plan.step import StepModel

from megatron.config.arguments import parse_arguments
from megatron.config.groups import Config
from megatron.config.validate import resolve

VOCABULARY, TOKENS, HIDDEN, HEADS, CHOICES = 32000, 4096, 2048, 16, 4
LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights "
)
DENSE = (
    f"--num-layers 8 --hidden-size {HIDDEN} --num-attention-heads {HEADS} "
    "--ffn-hidden-size 5632 --swiglu --normalization RMSNorm --position-embedding-type rope "
    f"--disable-bias-linear --seq-length {TOKENS} --attention-dropout 0 --hidden-dropout 0 --bf16 "
    "--mock-data --tokenizer-type NullTokenizer --train-iters 10 --lr 1e-4 --vocab-size 31999 "
    "--micro-batch-size 1 --global-batch-size 64 "
)
EXPERTS = (
    f"{DENSE} --num-layers 4 --num-experts 32 --moe-ffn-hidden-size 768 "
    f"--moe-router-topk {CHOICES} --moe-layer-freq [0,1,1,1] "
)
SHARED = "--moe-shared-expert-intermediate-size 1024 --moe-shared-expert-gate "
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 "
H100 = load_hardware("h100")


def model(layers: int, hidden: int, heads: int, groups: int, ffn: int, more: str = LLAMA) -> str:
    """Flags of a model's sizes."""
    sizes = f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} "
    grouped = f"--group-query-attention --num-query-groups {groups} " if groups != heads else ""
    return f"{sizes}--ffn-hidden-size {ffn} {grouped}{more}"


def asked(flags: str) -> Config:
    """As parsed."""
    return parse_arguments(flags.split()).config


def resolved(flags: str, world: int = 8, vocabulary: int = VOCABULARY) -> Config:
    return resolve(asked(flags), world, vocabulary).config


def step(flags: str, world: int = 8) -> StepModel:
    """The steps of a run."""
    return StepModel(resolved(flags, world), VOCABULARY, world)
