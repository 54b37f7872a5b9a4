"""The plan against bytes that really live while a run trains: `python tests/unit/plan/measured.py`
writes docs/results/plan_memory.json, or with names of cases their rows in it.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from pathlib import Path
from unittest import mock

import torch

TESTS = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]
# the kernels' operators take CPU tensors; Triton reads it when it is first imported
os.environ["TRITON_INTERPRET"] = "1"

from distributed.pool import Worlds  # noqa: E402
from megatron.tools._plan import activations  # noqa: E402
from megatron.tools._plan.memory import rank_memories  # noqa: E402
from unit.zero.measure import measure  # noqa: E402

from megatron.config.arguments import parse_arguments  # noqa: E402
from megatron.config.validate import resolve  # noqa: E402
from megatron.config.workspace import HEAD_CHUNK_BYTES  # noqa: E402

VOCAB = 1023
# bytes of logits that are made at once where the flags ask for it: a fraction of all
HEAD_CHUNK = 1 << 18
COMMON = f"""--mock-data --tokenizer-type NullTokenizer --vocab-size {VOCAB}
--make-vocab-size-divisible-by 64 --lr 1e-3 --train-iters 2
--log-interval 1 --eval-iters 0 --hidden-dropout 0 --attention-dropout 0"""
# 1M parameters
SMALL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --micro-batch-size 4"
)
# 3M
LARGER = (
    "--num-layers 6 --hidden-size 192 --num-attention-heads 4 --seq-length 192 --micro-batch-size 2"
)
LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights"
)
FULL = "--recompute-granularity full"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
PP2 = "--pipeline-model-parallel-size 2"
# whose worst moment is the head's
WIDE_HEAD = "--fused-linear-cross-entropy --untie-embeddings-and-output-weights --num-layers 2"
TP2 = "--tensor-model-parallel-size 2"
RING = "--cp-comm-type p2p"
CP2 = "--context-parallel-size 2"
OFFLOAD = "--activation-offload --min-offloaded-tensor-size 4096"
FP8 = "--fp8-format hybrid --fp8-min-width 128"
TILED = "--tiled-mlp 8"
# where a layer's tensors outweigh its weights
LONG = (
    "--num-layers 3 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 256 "
    "--seq-length 1024 --micro-batch-size 2"
)
EXPERTS = (
    "--num-layers 3 --hidden-size 64 --num-attention-heads 4 --seq-length 512 --micro-batch-size 2 "
    f"{LLAMA} --num-experts 4 --moe-ffn-hidden-size 128 --moe-router-force-load-balancing "
    "--moe-aux-loss-coeff 1e-2"
)
EP2 = "--expert-model-parallel-size 2"
PAIRS = "--overlap-moe-expert-parallel-comm"
LATENT = (
    "--num-layers 3 --hidden-size 96 --num-attention-heads 4 --ffn-hidden-size 256 "
    f"--seq-length 256 --micro-batch-size 2 {LLAMA} --multi-latent-attention --qk-layernorm "
    "--q-lora-rank 48 --kv-lora-rank 32 --qk-head-dim 24 --qk-pos-emb-head-dim 8 --v-head-dim 24"
)
# whose worst moment is attention's
LATENT_WIDE = (
    f"{LATENT} --qk-head-dim 64 --qk-pos-emb-head-dim 16 --v-head-dim 48 --ffn-hidden-size 64 "
    "--fused-linear-cross-entropy"
)
LATENT_EXPERTS = (
    "--num-experts 4 --moe-ffn-hidden-size 96 --moe-router-force-load-balancing "
    "--moe-shared-expert-intermediate-size 96 --moe-layer-freq [0,1,1]"
)
SHARED_EXPERT = "--moe-shared-expert-intermediate-size 128 --moe-layer-freq [0,1,1]"
KERNELS = " ".join(
    f"--{operator}-backend triton"
    for operator in ("attention", "norm", "rotary", "activation", "dropout", "cross-entropy")
)
KERNELS += " --nan-policy skip"  # they compute nothing here

# name: ranks, micro-batches, flags
CASES: dict[str, tuple[int, int, str]] = {
    "one rank": (1, 2, SMALL),
    "one rank, bf16": (1, 1, f"{SMALL} --bf16"),
    "one rank, llama, larger": (1, 1, f"{LARGER} {LLAMA}"),
    "one rank, llama, bf16, recompute": (1, 2, f"{LARGER} {LLAMA} --bf16 {FULL}"),
    "one rank, recompute": (1, 2, f"{SMALL} {FULL}"),
    "one rank, dropout": (1, 1, f"{SMALL} --hidden-dropout 0.1 --attention-dropout 0.1"),
    "one rank, plain attention, bf16": (1, 1, f"{SMALL} --attention-backend plain --bf16"),
    "stage 0, dp2": (2, 2, f"{SMALL} --zero-stage 0"),
    "stage 1, dp2": (2, 2, f"{SMALL} --zero-stage 1"),
    "stage 2, dp2": (2, 2, f"{SMALL} --zero-stage 2"),
    "stage 3, dp2": (2, 2, f"{SMALL} --zero-stage 3"),
    "stage 3, dp2, kept gathered": (2, 2, f"{SMALL} --zero-stage 3 --zero3-keep-gathered"),
    "stage 0, dp2, bf16 on the wire": (2, 2, f"{SMALL} --zero-stage 0 --grad-reduce-in-bf16"),
    "stage 1, dp2, llama, bf16": (2, 2, f"{LARGER} {LLAMA} --bf16 --zero-stage 1"),
    "stage 2, dp2, llama, bf16": (2, 2, f"{LARGER} {LLAMA} --bf16 --zero-stage 2"),
    "stage 3, dp2, llama, bf16": (2, 2, f"{LARGER} {LLAMA} --bf16 --zero-stage 3"),
    "stage 2, dp2, recompute": (2, 2, f"{SMALL} {FULL} --zero-stage 2"),
    "stage 3, dp2, recompute, narrow gradients and moments": (
        2,
        2,
        (
            f"{SMALL} {FULL} --bf16 --zero-stage 3 --main-grads-dtype bf16 --exp-avg-dtype bf16 "
            "--exp-avg-sq-dtype bf16"
        ),
    ),
    "stage 2, dp2, no overlap": (2, 2, f"{SMALL} --zero-stage 2 --no-overlap-grad-reduce"),
    "stage 3, dp2, no overlap": (2, 2, f"{SMALL} --zero-stage 3 --no-overlap-param-gather"),
    "experts": (1, 2, EXPERTS),
    "experts, bf16": (1, 2, f"{EXPERTS} --bf16"),
    "experts, ep2": (2, 2, f"{EXPERTS} {EP2}"),
    "experts, ep2, stage 2": (4, 2, f"{EXPERTS} {EP2} --zero-stage 2"),
    "experts, ep2, stage 3, bf16": (4, 2, f"{EXPERTS} {EP2} --zero-stage 3 --bf16"),
    "experts, ep2, recompute": (2, 2, f"{EXPERTS} {EP2} {FULL}"),
    "experts, ep2, in pairs": (2, 4, f"{EXPERTS} {EP2} {PAIRS}"),
    "experts, ep2, stage 3, bf16, in pairs": (
        2,
        4,
        f"{EXPERTS} {EP2} --zero-stage 3 --bf16 {PAIRS}",
    ),
    "experts, ep2, recompute, in pairs": (2, 4, f"{EXPERTS} {EP2} {FULL} {PAIRS}"),
    "experts, ep2, two pipeline ranks, in pairs": (
        4,
        4,
        f"{EXPERTS} {EP2} {PP2} {PAIRS} --num-layers 4",
    ),
    "experts, ep2, recompute moe": (2, 2, f"{EXPERTS} {EP2} {SELECTIVE} moe"),
    "experts, recompute moe_act": (1, 2, f"{EXPERTS} {SELECTIVE} moe_act"),
    "experts, shared, ep2": (2, 2, f"{EXPERTS} {SHARED_EXPERT} {EP2}"),
    "experts, tp2 sp": (2, 2, f"{EXPERTS} {TP2} --sequence-parallel"),
    "experts, tp2 sp, ep2": (
        2,
        2,
        f"{EXPERTS} {TP2} --sequence-parallel {EP2} --expert-tensor-parallel-size 1",
    ),
    "experts, ep2, on the host": (2, 2, f"{EXPERTS} {EP2} {OFFLOAD}"),
    "experts, ep2, bf16, all tokens gathered": (
        2,
        2,
        f"{EXPERTS} {EP2} --bf16 --moe-token-dispatcher-type allgather",
    ),
    "latent attention": (1, 2, LATENT),
    "latent attention, bf16": (1, 2, f"{LATENT} --bf16"),
    "latent attention, recompute": (1, 2, f"{LATENT} {FULL}"),
    "latent attention, recompute mla_up_proj": (1, 2, f"{LATENT} {SELECTIVE} mla_up_proj"),
    "latent attention, plain, queries of the token": (
        1,
        2,
        f"{LATENT} --attention-backend plain".replace("--q-lora-rank 48 ", ""),
    ),
    "latent attention, tp2 sp": (2, 2, f"{LATENT} {TP2} --sequence-parallel"),
    "latent attention, pp2": (2, 4, f"{LATENT} {PP2} --num-layers 4"),
    "latent attention, pp2, zero-bubble": (
        2,
        4,
        f"{LATENT} {PP2} --num-layers 4 --pipeline-schedule zero-bubble",
    ),
    "latent attention, stage 2, dp2": (2, 2, f"{LATENT} --zero-stage 2"),
    "latent attention, cp2": (2, 2, f"{LATENT} {CP2}"),
    "latent attention, cp2, heads exchanged": (2, 2, f"{LATENT} {CP2} --cp-comm-type a2a"),
    "latent attention, cp2, ring, bf16": (2, 2, f"{LATENT} {CP2} {RING} --bf16"),
    "latent attention, experts, ep2": (2, 2, f"{LATENT} {LATENT_EXPERTS} {EP2}"),
    "latent attention, experts, ep2, tp2 sp, recompute mla_up_proj and moe_act": (
        2,
        2,
        f"{LATENT} {LATENT_EXPERTS} {EP2} {TP2} --sequence-parallel "
        f"--expert-tensor-parallel-size 1 {SELECTIVE} mla_up_proj moe_act",
    ),
    "latent attention, on the host": (1, 2, f"{LATENT} {OFFLOAD}"),
    "wide latent attention": (1, 2, LATENT_WIDE),
    "wide latent attention, recompute": (1, 2, f"{LATENT_WIDE} {FULL}"),
    "wide latent attention, bf16, recompute": (1, 2, f"{LATENT_WIDE} --bf16 {FULL}"),
    "wide latent attention, recompute mla_up_proj": (
        1,
        2,
        f"{LATENT_WIDE} {SELECTIVE} mla_up_proj",
    ),
    "wide latent attention, plain": (1, 2, f"{LATENT_WIDE} --attention-backend plain"),
    "wide latent attention, tp2 sp, recompute": (
        2,
        2,
        f"{LATENT_WIDE} {TP2} --sequence-parallel {FULL}",
    ),
    "wide latent attention, pp2, zero-bubble": (
        2,
        4,
        f"{LATENT_WIDE} {PP2} --num-layers 4 --pipeline-schedule zero-bubble",
    ),
    "wide latent attention, cp2, heads exchanged, recompute, stage 3": (
        2,
        2,
        f"{LATENT_WIDE} {CP2} --cp-comm-type a2a {FULL} --zero-stage 3",
    ),
    "pp2": (2, 4, f"{SMALL} {PP2}"),
    "pp2, llama, interleaved": (
        2,
        4,
        f"{SMALL} {LLAMA} {PP2} --num-virtual-stages-per-pipeline-rank 2",
    ),
    "stage 2, pp2 dp2": (4, 4, f"{SMALL} {PP2} --zero-stage 2"),
    "stage 3, pp2 dp2": (4, 4, f"{SMALL} {PP2} --zero-stage 3"),
    "stage 2, pp2 dp2, zero-bubble": (
        4,
        4,
        f"{SMALL} {LLAMA} {PP2} --pipeline-schedule zero-bubble --zero-stage 2",
    ),
    "stage 2, pp2 dp2, zero-bubble-v": (
        4,
        4,
        f"{SMALL} {PP2} --pipeline-schedule zero-bubble-v --zero-stage 2",
    ),
    "one rank, bf16, head in chunks": (1, 2, f"{SMALL} {WIDE_HEAD} --bf16"),
    "tp2 sp, head in chunks, soft cap": (
        2,
        2,
        (
            f"{SMALL} {WIDE_HEAD} {TP2} --sequence-parallel --final-logit-softcapping 30 "
            "--micro-batch-size 8"
        ),
    ),
    "pp2, gpipe, head in chunks": (2, 4, f"{SMALL} {WIDE_HEAD} {PP2} --pipeline-schedule gpipe"),
    "pp2, windows and positions of some layers": (
        2,
        4,
        (
            f"{SMALL} {PP2} {LLAMA} --num-layers 4 --window-size 16 --window-attn-skip-freq 2 "
            "--no-rope-freq 3"
        ),
    ),
    "pp2, bf16, soft cap": (2, 4, f"{SMALL} {PP2} --bf16 --final-logit-softcapping 30"),
    "stage 3, dp2, squared relu, recompute": (
        2,
        2,
        f"{SMALL} --activation squared-relu {FULL} --zero-stage 3",
    ),
    "tp2": (2, 2, f"{SMALL} {TP2}"),
    "tp2 sp, llama": (2, 2, f"{LARGER} {LLAMA} {TP2} --sequence-parallel"),
    "stage 2, tp2 sp dp2": (4, 2, f"{SMALL} {TP2} --sequence-parallel --zero-stage 2"),
    "stage 3, tp2 sp dp2, bf16": (
        4,
        2,
        f"{LARGER} {LLAMA} {TP2} --sequence-parallel --zero-stage 3 --bf16",
    ),
    "held out: grouped, squared relu, norms of queries": (
        1,
        2,
        (
            f"{LARGER} --group-query-attention --num-query-groups 2 --qk-layernorm --activation "
            "squared-relu --position-embedding-type rope"
        ),
    ),
    "held out: documents, soft caps, plain attention, sgd": (
        1,
        1,
        (
            f"{SMALL} --reset-attention-mask --attn-logit-softcapping 30 "
            "--final-logit-softcapping 30 --optimizer sgd"
        ),
    ),
    "held out: stage 3, pp2 dp2, zero-bubble-v, recompute, bf16": (
        4,
        3,
        (
            f"{LARGER} {PP2} --num-layers 8 --pipeline-schedule zero-bubble-v --bf16 {FULL} "
            "--zero-stage 3"
        ),
    ),
    "held out: stage 2, pp2 dp2, gpipe": (
        4,
        4,
        f"{SMALL} {PP2} {LLAMA} --pipeline-schedule gpipe --zero-stage 2",
    ),
    "stage 3, dp2, stepped on the host": (
        2,
        2,
        f"{SMALL} --zero-stage 3 --bf16 --optimizer-cpu-offload",
    ),
    "one rank, stage 3, weights on the host": (
        1,
        2,
        f"{SMALL} --zero-stage 3 --bf16 --param-cpu-offload",
    ),
    "stage 3, pp2 dp2, zero-bubble, weights on the host": (
        4,
        4,
        (
            f"{SMALL} {LLAMA} {PP2} --pipeline-schedule zero-bubble --zero-stage 3 --bf16 "
            "--param-cpu-offload"
        ),
    ),
    "stage 3, dp2, fp32, kept gathered, weights on the host": (
        2,
        2,
        f"{SMALL} --zero-stage 3 --zero3-keep-gathered --param-cpu-offload",
    ),
    "one rank, our kernels": (
        1,
        2,
        f"{SMALL} {KERNELS} --hidden-dropout 0.1 --attention-dropout 0.1",
    ),
    "one rank, our kernels, no dropout, bf16": (1, 1, f"{SMALL} {KERNELS} --bf16"),
    "one rank, our kernels, llama, bf16": (
        1,
        2,
        f"{LARGER} {LLAMA} {KERNELS} --bf16 --hidden-dropout 0.1",
    ),
    "stage 2, tp2 sp dp2, our kernels, grouped, documents": (
        4,
        2,
        f"{LARGER} {KERNELS} {TP2} --sequence-parallel --zero-stage 2 "
        "--group-query-attention --num-query-groups 2 "
        "--position-embedding-type rope --reset-attention-mask --activation squared-relu",
    ),
    "one rank, our kernels, grouped, narrow MLP": (  # whose worst moment is attention's
        1,
        1,
        (
            f"{LARGER} {KERNELS} --group-query-attention --num-query-groups 2 --ffn-hidden-size "
            f"64 {FULL} --fused-linear-cross-entropy"
        ),
    ),
    "one rank, our kernels, atomic": (
        1,
        1,
        (
            f"{LARGER} {KERNELS} --no-deterministic-mode --ffn-hidden-size 64 "
            f"--micro-batch-size 4 {FULL} --fused-linear-cross-entropy"
        ),
    ),
    "held out: our kernels, norms of queries, recompute, grouped": (
        1,
        2,
        (
            f"{LARGER} {KERNELS} {FULL} --qk-layernorm --group-query-attention "
            "--num-query-groups 2 --position-embedding-type rope --swiglu"
        ),
    ),
    "pp2, zero-bubble, dropout": (
        2,
        4,
        f"{SMALL} {PP2} --pipeline-schedule zero-bubble --hidden-dropout 0.1",
    ),
    "pp2, zero-bubble, our kernels, head in chunks": (
        2,
        4,
        (
            f"{SMALL} {WIDE_HEAD} {LLAMA} {PP2} {KERNELS} --num-layers 4 --pipeline-schedule "
            "zero-bubble --hidden-dropout 0.1"
        ),
    ),
    "one rank, fp8 by tensors, bf16": (1, 2, f"{SMALL} {FP8} --bf16"),
    "one rank, fp8 by rows": (1, 1, f"{SMALL} {FP8} --fp8-recipe rowwise"),
    "tp2 sp, fp8 by tensors, llama, bf16": (
        2,
        2,
        f"{LARGER} {LLAMA} {FP8} {TP2} --sequence-parallel --bf16",
    ),
    "one rank, fp8 by blocks, recompute": (
        1,
        2,
        f"{SMALL} {FULL} --fp8-format e4m3 --fp8-min-width 128 --fp8-recipe blockwise",
    ),
    "one rank, norms and activation rebuilt": (1, 2, f"{SMALL} {SELECTIVE} layernorm mlp_act"),
    "one rank, core attention rebuilt, plain": (
        1,
        1,
        f"{SMALL} {SELECTIVE} core_attn --attention-backend plain --hidden-dropout 0.1",
    ),
    "one rank, llama, bf16, MLP and norms rebuilt": (
        1,
        2,
        f"{LARGER} {LLAMA} --bf16 {SELECTIVE} mlp layernorm",
    ),
    "one rank, our kernels, llama, all rebuilt": (
        1,
        2,
        f"{LARGER} {LLAMA} {KERNELS} --bf16 {SELECTIVE} layernorm qkv core_attn mlp",
    ),
    "tp2 sp, llama, all rebuilt": (
        2,
        2,
        f"{LARGER} {LLAMA} {TP2} --sequence-parallel {SELECTIVE} layernorm qkv core_attn mlp",
    ),
    "pp2, zero-bubble, dropout, all but attention rebuilt": (
        2,
        4,
        f"{SMALL} {PP2} --pipeline-schedule zero-bubble --hidden-dropout 0.1 {SELECTIVE} "
        "layernorm qkv mlp",
    ),
    "pp2, llama, norms and activation rebuilt": (
        2,
        4,
        f"{SMALL} {LLAMA} {PP2} {SELECTIVE} layernorm mlp_act",
    ),
    "stage 2, dp2, MLP rebuilt": (2, 2, f"{SMALL} --zero-stage 2 {SELECTIVE} mlp"),
    "stage 3, dp2, recompute in groups of 3": (
        2,
        2,
        f"{LARGER} {FULL} --recompute-num-layers 3 --zero-stage 3",
    ),
    "one rank, recompute in uneven groups": (
        1,
        2,
        f"{LARGER} {LLAMA} {FULL} --recompute-num-layers 4",
    ),
    "pp2, interleaved, the first layer of each stage recomputed": (
        2,
        4,
        f"{SMALL} {PP2} --num-layers 8 --num-virtual-stages-per-pipeline-rank 2 {FULL} "
        "--recompute-method block --recompute-num-layers 1",
    ),
    "tp2, recompute, inputs shared": (
        2,
        2,
        f"{LARGER} --num-layers 12 {TP2} {FULL} --distribute-saved-activations",
    ),
    "cp2": (2, 2, f"{SMALL} {CP2}"),
    "cp2, heads exchanged": (2, 2, f"{SMALL} {CP2} --cp-comm-type a2a"),
    "cp2, heads exchanged, recompute qkv": (
        2,
        2,
        f"{SMALL} {CP2} --cp-comm-type a2a {SELECTIVE} qkv --position-embedding-type rope",
    ),
    "cp2, our kernels, gathered keys, recompute qkv": (
        2,
        2,
        f"{SMALL} {CP2} {KERNELS} {SELECTIVE} qkv --position-embedding-type rope",
    ),
    "cp2, our kernels, heads exchanged, norms of queries, recompute qkv": (
        2,
        2,
        f"{SMALL} {CP2} {KERNELS} --cp-comm-type a2a {SELECTIVE} qkv --qk-layernorm",
    ),
    "cp2, llama, bf16": (2, 2, f"{LARGER} {LLAMA} {CP2} --bf16"),
    "cp2, llama, grouped, heads exchanged": (
        2,
        2,
        f"{LARGER} {LLAMA} {CP2} --cp-comm-type a2a --group-query-attention --num-query-groups 2",
    ),
    "stage 2, cp2 tp2 sp, llama": (
        4,
        2,
        f"{LARGER} {LLAMA} {CP2} {TP2} --sequence-parallel --zero-stage 2",
    ),
    "stage 3, cp2, documents, recompute": (
        2,
        2,
        f"{SMALL} {CP2} --zero-stage 3 --reset-attention-mask {FULL}",
    ),
    "cp2, ring": (2, 2, f"{SMALL} {CP2} {RING}"),
    "cp2, ring, llama, grouped": (
        2,
        2,
        f"{LARGER} {LLAMA} {CP2} {RING} --group-query-attention --num-query-groups 2",
    ),
    "cp2, ring, llama, bf16": (2, 2, f"{LARGER} {LLAMA} {CP2} {RING} --bf16"),
    "cp2 tp2 sp, ring, documents, stage 2": (
        4,
        2,
        f"{LARGER} {CP2} {RING} {TP2} --sequence-parallel --zero-stage 2 --reset-attention-mask",
    ),
    "cp4, ring, QK norm, recompute, stage 3": (
        4,
        2,
        f"{SMALL} --context-parallel-size 4 {RING} --qk-layernorm --zero-stage 3 {FULL}",
    ),
    "cp4, two levels, llama": (
        4,
        2,
        f"{LARGER} {LLAMA} --context-parallel-size 4 --cp-comm-type a2a+p2p "
        "--hierarchical-context-parallel-sizes 2 2",
    ),
    "cp2, ring, selective": (
        2,
        2,
        f"{LARGER} {LLAMA} {CP2} {RING} --recompute-granularity selective "
        "--recompute-modules core_attn mlp",
    ),
    "one rank, activations on the host": (1, 2, f"{SMALL} {OFFLOAD} --hidden-dropout 0.1"),
    "one rank, llama, bf16, layer inputs on the host": (
        1,
        2,
        f"{LARGER} {LLAMA} --bf16 {FULL} {OFFLOAD} --num-layers 12",
    ),
    "pp2, zero-bubble, llama, half of the layers on the host": (
        2,
        4,
        f"{SMALL} {LLAMA} {PP2} --num-layers 8 --pipeline-schedule zero-bubble {OFFLOAD} "
        "--activation-offload-fraction 0.5",
    ),
    "stage 2, pp2 dp2, interleaved, some rebuilt, some on the host": (
        4,
        4,
        f"{SMALL} {PP2} --num-layers 8 --num-virtual-stages-per-pipeline-rank 2 --zero-stage 2 "
        f"{SELECTIVE} layernorm mlp_act {OFFLOAD} --offload-modules attn_norm core_attn mlp_act",
    ),
    "tp2 sp, llama, stage 3, bf16, activations on the host": (
        4,
        2,
        f"{LARGER} {LLAMA} {TP2} --sequence-parallel --bf16 --zero-stage 3 {OFFLOAD}",
    ),
    "tp2, groups, shares on the host": (
        2,
        2,
        f"{LARGER} --num-layers 12 {TP2} {FULL} --recompute-num-layers 2 {OFFLOAD} "
        "--distribute-saved-activations",
    ),
    "one rank, our kernels, activations on the host": (
        1,
        2,
        f"{LARGER} {LLAMA} {KERNELS} --bf16 {OFFLOAD} --hidden-dropout 0.1",
    ),
    "one rank, MLP in pieces": (1, 2, f"{SMALL} {TILED}"),
    "one rank, llama, bf16, recompute, MLP and head in pieces": (
        1,
        2,
        f"{LONG} {LLAMA} --bf16 {FULL} {TILED} --fused-linear-cross-entropy",
    ),
    "one rank, llama, grouped, recompute, MLP in pieces": (
        1,
        1,
        f"{LONG} {LLAMA} {FULL} {TILED} --group-query-attention --num-query-groups 1 "
        "--fused-linear-cross-entropy",
    ),
    "tp2 sp, llama, MLP in pieces": (
        2,
        2,
        f"{LONG} {LLAMA} {TP2} --sequence-parallel {TILED} --num-layers 2 "
        "--fused-linear-cross-entropy",
    ),
    "stage 3, cp2, heads exchanged, llama, recompute, MLP and head in pieces": (
        2,
        2,
        f"{LONG} {LLAMA} {CP2} --cp-comm-type a2a --zero-stage 3 {FULL} {TILED} "
        "--fused-linear-cross-entropy",
    ),
    "pp2, zero-bubble, dropout, MLP in pieces": (
        2,
        4,
        f"{SMALL} {PP2} --pipeline-schedule zero-bubble --hidden-dropout 0.1 {TILED}",
    ),
    "pp2, zero-bubble-v, llama, dropout, MLP in two pieces": (
        2,
        4,
        f"{SMALL} {LLAMA} {PP2} --pipeline-schedule zero-bubble-v --hidden-dropout 0.1 "
        "--tiled-mlp 2 --fused-linear-cross-entropy",
    ),
    "one rank, our kernels, llama, bf16, norms rebuilt, MLP in pieces": (
        1,
        1,
        f"{LONG} {LLAMA} {KERNELS} --bf16 {SELECTIVE} layernorm {TILED} --num-layers 3",
    ),
    "one rank, fp8 by tensors, bf16, MLP in pieces": (1, 2, f"{SMALL} {FP8} --bf16 {TILED}"),
    "stage 3, cp2, ring, llama, recompute, MLP and head in pieces": (
        2,
        2,
        f"{LONG} {LLAMA} {CP2} {RING} --zero-stage 3 {FULL} {TILED} --fused-linear-cross-entropy",
    ),
    "stage 3, cp4, gathered keys, llama, recompute, MLP and head in pieces": (
        4,
        2,
        f"{LONG} {LLAMA} --context-parallel-size 4 --zero-stage 3 {FULL} {TILED} "
        "--fused-linear-cross-entropy",
    ),
    "stage 3, cp2, gathered keys, documents, llama, recompute, MLP and head in pieces": (
        2,
        2,
        f"{LONG} {LLAMA} {CP2} --zero-stage 3 --reset-attention-mask {FULL} {TILED} "
        "--fused-linear-cross-entropy",
    ),
    "cp2, ring, documents, dropout, layer inputs on the host": (
        2,
        2,
        f"{SMALL} {CP2} {RING} --reset-attention-mask --attention-dropout 0.1 {FULL} {OFFLOAD}",
    ),
    "stage 2, dp4, shared by 2": (4, 2, f"{SMALL} --zero-stage 2 --zero-shard-size 2"),
}


def command(name: str) -> tuple[str, ...]:
    """The command line of a case."""
    ranks, micro_batches, flags = CASES[name]
    config = parse_arguments([*COMMON.split(), *flags.split()]).config
    distributed = config.distributed
    shared = (
        distributed.tensor_model_parallel_size
        * distributed.context_parallel_size
        * distributed.pipeline_model_parallel_size
    )
    return (
        *COMMON.split(),
        *flags.split(),
        "--global-batch-size",
        str(micro_batches * (ranks // shared) * config.training.micro_batch_size),
    )


def compare(name: str, worlds: Worlds) -> list[dict]:
    """`compare_flags` of a case."""
    rows = compare_flags(command(name), CASES[name][0], worlds)
    return [{"case": name, **row} for row in rows]


def compare_flags(flags: tuple[str, ...], ranks: int, worlds: Worlds) -> list[dict]:
    """Of each pipeline rank: the bytes at the worst moment of a run's second step, as measured and
    as planned.
    """
    config = resolve(parse_arguments(list(flags)).config, ranks, VOCAB + 1).config
    activations._unit_bytes.cache_clear()  # with the head's usual chunks
    with mock.patch.dict(HEAD_CHUNK_BYTES, cpu=HEAD_CHUNK):
        planned = rank_memories(config, VOCAB + 1, ranks, "cpu")
    rows = {}
    for pipeline_rank, spans in worlds(ranks).run(measure, flags, None, None, HEAD_CHUNK):
        span = spans["step"][-1]
        found = {
            kind: size
            for kind, size in sorted(span.at_peak.items())
            if kind not in ("total", "before") and size
        }
        row = {
            "pipeline_rank": pipeline_rank,
            "measured": sum(found.values()),
            "measured_kinds": found,
            "where": span.where,
        }
        rows[pipeline_rank] = max(
            row, rows.get(pipeline_rank, row), key=lambda row: row["measured"]
        )
    for pipeline_rank, row in rows.items():
        rank = planned[pipeline_rank]
        total = rank.total + rank.static["host"]  # here the device's memory is the host's
        row |= {
            "planned": total,
            "planned_kinds": {
                kind: size for kind, size in {**rank.static, **rank.peak.bytes}.items() if size
            },
            "when": rank.peak.when,
            "ratio": round(total / row["measured"], 4),
        }
    return [rows[rank] for rank in sorted(rows)]


def write(name: str, rows: list[dict]) -> None:
    """Keep rows in docs/results/NAME.json."""
    report = {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "rows": rows,
    }
    path = TESTS.parent / "docs/results" / f"{name}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")


def main(names: list[str]) -> None:
    """Measure the named cases, or all, and write them down."""
    path = TESTS.parent / "docs/results/plan_memory.json"
    kept = json.loads(path.read_text()) if names else {"rows": []}
    worlds, rows = Worlds(), [row for row in kept["rows"] if row["case"] not in names]
    for name in names or CASES:
        for row in compare(name, worlds):
            rows.append(row)
            print(f"{row['ratio']:.4f}  {name}, pipeline rank {row['pipeline_rank']}", flush=True)
            if names or abs(row["ratio"] - 1) > 0.03:
                print(
                    f"        measured {row['measured']:,} {row['measured_kinds']} {row['where']}\n"
                    f"        planned {row['planned']:,} {row['planned_kinds']} {row['when']}",
                    flush=True,
                )
    worlds.close()
    order = list(CASES)
    rows.sort(key=lambda row: order.index(row["case"]))
    if names:  # dated as the others
        path.write_text(json.dumps(kept | {"rows": rows}, indent=1) + "\n")
    else:
        write("plan_memory", rows)


if __name__ == "__main__":
    main(sys.argv[1:])
