"""Small models of each Hugging Face family. The first word of a name is the family's."""

from __future__ import annotations

from flag_tables import read_table

from megatron.config.arguments import parse_arguments
from megatron.config.groups import ModelConfig

TRAINED = "--seq-length 24 --micro-batch-size 1 --lr 1 --train-iters 1 --mock-data --vocab-size 66 "
# Words in capitals of the table.
WORDS = """
GPT2: --num-layers 3 --hidden-size 32 --ffn-hidden-size 96 --num-attention-heads 4 --kv-channels 8
        --num-query-groups 4 --max-position-embeddings 24 --hidden-dropout 0 --attention-dropout 0
LLAMA: GPT2 --ffn-hidden-size 80 --position-embedding-type rope --normalization RMSNorm
        --activation swiglu --disable-bias-linear --untie-embeddings-and-output-weights
GQA: --group-query-attention --num-query-groups 2
LAYERNORM: --normalization LayerNorm --norm-epsilon 1e-3
HALF: --rotary-percent 0.5 --kv-channels 8
STRETCHED: --rope-scaling-factor 4 --rope-original-max-position-embeddings 16 --rotary-base 50
YARN: STRETCHED --position-embedding-type yarn --yarn-beta-fast 2
EXPERTS: LLAMA --num-experts 5 --moe-ffn-hidden-size 24
SIGMOID: --moe-router-score-function sigmoid --moe-router-enable-expert-bias
        --moe-router-topk-scaling-factor 2.5 --moe-layer-freq [0]*1+[1]*2
# of DeepSeek's router, without latent attention
BIASED: EXPERTS SIGMOID --moe-ffn-hidden-size 20 --moe-shared-expert-intermediate-size 40
LATENT: LLAMA --multi-latent-attention --qk-layernorm --kv-lora-rank 12 --qk-head-dim 8
        --qk-pos-emb-head-dim 6 --kv-channels 14 --v-head-dim 10 --norm-epsilon 1e-6
        --latent-norm-epsilon 1e-6
LATENT_YARN: LATENT --position-embedding-type yarn --rope-scaling-factor 4 --mscale 0.7
        --mscale-all-dim 1.3 --rope-original-max-position-embeddings 8
DEEPSEEK: LATENT_YARN SIGMOID --q-lora-rank 20 --num-experts 8 --moe-ffn-hidden-size 24
        --moe-router-topk 4 --moe-shared-expert-intermediate-size 48
DEEPSEEK_2: LATENT_YARN --rotary-base 100 --num-experts 8 --moe-ffn-hidden-size 24
        --moe-layer-freq [0]*1+[1]*2 --moe-router-topk 3 --moe-router-pre-softmax
        --moe-router-topk-scaling-factor 2.5 --moe-shared-expert-intermediate-size 48
"""
TABLE = """
gpt2: GPT2
gpt2 untied, tanh: GPT2 --untie-embeddings-and-output-weights --activation gelu-tanh
        --norm-epsilon 1e-3
llama: LLAMA
llama tied, gqa, eps: LLAMA GQA --no-untie-embeddings-and-output-weights --norm-epsilon 1e-2
llama biases: LLAMA --add-bias-linear
llama geglu, wide heads: LLAMA --activation geglu --kv-channels 16 --rotary-base 500
llama 3 scaling: LLAMA --use-rope-scaling STRETCHED
llama linear scaling: LLAMA --rotary-seq-len-interpolation-factor 3
llama yarn: LLAMA YARN
mistral: LLAMA GQA --window-size 5
qwen2: LLAMA GQA --add-qkv-bias
qwen2 window: LLAMA --add-qkv-bias --window-size 5
qwen2 window of some layers: LLAMA --add-qkv-bias --window-size 5 --window-attn-skip-freq [1,0,1]
qwen3: LLAMA GQA --qk-layernorm --kv-channels 12 --norm-epsilon 1e-2
# of Mixtral ffn_hidden_size is the width of experts, since no layer is dense
mixtral: EXPERTS --moe-ffn-hidden-size 80
mixtral window, top 1: EXPERTS GQA --moe-ffn-hidden-size 80 --moe-router-topk 1 --window-size 5
        --norm-epsilon 1e-3
granitemoeshared: EXPERTS GQA --ffn-hidden-size 24 --kv-channels 12
        --moe-shared-expert-intermediate-size 40
qwen2_moe: EXPERTS GQA --add-qkv-bias --moe-router-pre-softmax
        --moe-shared-expert-intermediate-size 40 --moe-shared-expert-gate
qwen3_moe: EXPERTS GQA --qk-layernorm --kv-channels 12
qwen3_moe plain weights, dense layers, window: EXPERTS --qk-layernorm --moe-router-pre-softmax
        --moe-router-topk 3 --moe-layer-freq [0]*1+[1]*1+[0]*1 --window-size 6
        --moe-ffn-hidden-size 80
glm4_moe: BIASED GQA HALF --add-qkv-bias
glm4_moe qk-norm: BIASED GQA HALF --qk-layernorm
glm4_moe dense, scaled: LLAMA GQA HALF YARN
dots1: BIASED --qk-layernorm --rotary-base 500
phi3: LLAMA GQA --kv-channels 12
phi3 partial, window: LLAMA GQA HALF --window-size 5
seed_oss: LLAMA GQA --add-qkv-bias --kv-channels 12
ernie4_5: LLAMA GQA --kv-channels 12
arcee: LLAMA GQA YARN --activation squared-relu
arcee biases: LLAMA GQA --activation gelu-tanh --add-bias-linear
starcoder2: LLAMA GQA LAYERNORM --activation gelu-tanh --add-bias-linear --window-size 5
stablelm: LLAMA GQA LAYERNORM HALF --add-qkv-bias
nemotron: LLAMA LAYERNORM --activation squared-relu --rotary-percent 0.5 --kv-channels 12
nemotron biases: LLAMA GQA LAYERNORM HALF --activation gelu-tanh --add-bias-linear
gpt_neox: LLAMA LAYERNORM HALF --activation gelu --add-bias-linear
deepseek_v3: DEEPSEEK --moe-router-num-groups 4 --moe-router-group-topk 2
deepseek_v3 one group: DEEPSEEK --moe-router-topk 3 --rotary-base 100
deepseek_v3 dense: LATENT --q-lora-rank 20
deepseek_v3 whole queries: LATENT
deepseek_v3 epsilons: LATENT --q-lora-rank 20 --norm-epsilon 1e-2
deepseek_v3 yarn: LATENT_YARN --q-lora-rank 20 --rotary-base 100
deepseek_v3 yarn, unscaled: LATENT_YARN --q-lora-rank 20 --rotary-base 100 --mscale 1
        --mscale-all-dim 0
deepseek_v2: DEEPSEEK_2
deepseek_v2 groups: DEEPSEEK_2 --q-lora-rank 20 --moe-router-num-groups 4
        --moe-router-group-topk 3
glm4_moe_lite: DEEPSEEK --moe-router-topk 3 --norm-epsilon 1e-2
glm4_moe_lite every second: DEEPSEEK --moe-router-topk 3 --moe-layer-freq 2
"""
MODELS: dict[str, ModelConfig] = {
    name: parse_arguments((TRAINED + flags).split()).config.model
    for name, flags, _ in read_table(
        TABLE, {word: flags for word, flags, _ in read_table(WORDS, {})}
    )
}


def family(name: str) -> str:
    """The Hugging Face family of one of these models."""
    return name.partition(" ")[0]
