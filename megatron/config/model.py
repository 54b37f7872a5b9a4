"""The settings of the model: the transformer's shape, attention, experts, kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from megatron.config.layers import MOST_LAYERS, expert_pattern
from megatron.config.metadata import (
    BELOW_ONE,
    DROPOUT,
    KERNEL,
    NOT_NEGATIVE,
    ROUNDING,
    SHARE,
    STEPS,
    Bound,
    flag,
    model_flag,
    position_flag,
)

LAYERS = Bound(f"from 1 to {MOST_LAYERS:,}", lambda value: 1 <= value <= MOST_LAYERS)
ROTARY = "position_embedding_type=rope,yarn"
YARN = "position_embedding_type=yarn"
yarn_flag = partial(position_flag, needs=YARN, idle_without=ROTARY)
mscale_flag = partial(yarn_flag, bound=NOT_NEGATIVE, needs=f"multi_latent_attention {YARN}")
rope_flag = partial(position_flag, needs="position_embedding_type=rope")
rescaled_flag = partial(position_flag, needs=f"{YARN}|use_rope_scaling", idle_without=ROTARY)
llama_rope_flag = partial(
    position_flag, needs="use_rope_scaling", idle_without="position_embedding_type=rope"
)
latent_flag = partial(model_flag, needs="multi_latent_attention")
expert_flag = partial(model_flag, needs="num_experts")
expert_steps_flag = partial(flag, needs="num_experts", change=STEPS)
expert_rounding_flag = partial(flag, idle_without="num_experts", change=ROUNDING)
kernel_flag = partial(flag, "auto", change=KERNEL)
Backend = Literal["auto", "triton", "torch"]
ApexBackend = Literal["auto", "triton", "apex", "torch"]
Balancing = Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "none"]

# --activation, and whether it is gated: fc1 then has a second half, which multiplies the activation
# of the first. kernels/activation.py has their functions.
ACTIVATIONS = {
    "gelu": False,
    "gelu-tanh": False,
    "swiglu": True,
    "geglu": True,
    "squared-relu": False,
}
GATED = tuple(kind for kind, is_gated in ACTIVATIONS.items() if is_gated)


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the transformer, attention, experts, kernels."""

    num_layers: int | None = model_flag(bound=LAYERS)
    """Number of transformer layers."""
    hidden_size: int | None = model_flag()
    """Hidden size of the transformer."""
    ffn_hidden_size: int | None = model_flag()
    """MLP width. Default: 4 x hidden-size; for gated activations 2/3 of it, a multiple of 64."""
    num_attention_heads: int | None = model_flag()
    """Number of query heads."""
    kv_channels: int | None = model_flag()
    """Width of one attention head. Default: hidden-size / num-attention-heads."""
    group_query_attention: bool = model_flag(False)
    """Share each key/value head between several query heads (--num-query-groups)."""
    num_query_groups: int | None = model_flag(needs="group_query_attention|one_group_a_head=True")
    """Number of key/value heads when --group-query-attention is given."""
    max_position_embeddings: int | None = position_flag()
    """Longest sequence: rows of a learned position table. Default: seq-length."""
    position_embedding_type: Literal["learned_absolute", "rope", "yarn", "none"] = position_flag(
        "learned_absolute"
    )
    """Position encoding. For --multi-latent-attention see --rope-type."""
    rotary_base: float = position_flag(10000.0, idle_without=ROTARY)
    """Base of the rotary frequencies."""
    rotary_percent: float = position_flag(1.0, bound=SHARE, idle_without=ROTARY)
    """Share of each head's channels that rotates."""
    no_rope_freq: str | None = position_flag(idle_without=ROTARY)
    """Layers whose queries and keys do not rotate, by default none: N for every N-th, or a list
    with 1 for each such layer and 0 for each that rotates, such as [0,0,0,1]*8."""
    rotary_seq_len_interpolation_factor: float | None = rope_flag()
    """Divide rotary positions by this factor (linear scaling)."""
    use_rope_scaling: bool = rope_flag(False)
    """Rescale the rotary frequencies as Llama 3.x does."""
    rope_scaling_factor: float | None = rescaled_flag(None, "--rotary-scaling-factor")
    """Factor of --use-rope-scaling (default 8) and of YaRN (default 1: no change)."""
    rope_original_max_position_embeddings: int | None = rescaled_flag(
        None, "--yarn-original-max-position-embeddings", "--original-max-position-embeddings"
    )
    """Sequence length of the unscaled frequencies. Default: 8192, for YaRN 4096."""
    rope_low_freq_factor: float = llama_rope_flag(1.0)
    """Llama-3 scaling: longer wavelengths than original length / this are fully scaled."""
    rope_high_freq_factor: float = llama_rope_flag(4.0)
    """Llama-3 scaling: shorter wavelengths than original length / this are unchanged."""
    yarn_beta_fast: float = yarn_flag(32.0)
    """YaRN: channels that rotate more often than this over the original length are unchanged."""
    yarn_beta_slow: float = yarn_flag(1.0)
    """YaRN: channels that rotate less often than this over it are fully scaled."""
    normalization: Literal["LayerNorm", "RMSNorm"] = model_flag("LayerNorm")
    """Normalization layer used throughout the model."""
    norm_epsilon: float = model_flag(1e-5, "--layernorm-epsilon")
    """Added to the variance inside the normalization."""
    activation: Literal[*ACTIVATIONS] = model_flag("gelu")  # type: ignore[valid-type]
    """Activation of the MLP; swiglu and geglu are gated."""
    add_bias_linear: bool = model_flag(True, off="--disable-bias-linear")
    """Biases in the linear layers."""
    add_qkv_bias: bool = model_flag(False)
    """A bias in the QKV projection only, when --disable-bias-linear is given."""
    qk_layernorm: bool = model_flag(False)
    """Normalize each head's queries and keys, with --multi-latent-attention the latent vectors."""
    window_size: int | None = model_flag()
    """Sliding-window attention: each token attends to this many latest tokens, itself included."""
    window_attn_skip_freq: str | None = model_flag(needs="window_size")
    """Which layers have the window, by default all: N for all but every N-th, or a list with 1 for
    each layer that has it and 0 for each that attends to all tokens, such as [1,1,1,0]*8."""
    attn_logit_softcapping: float | None = model_flag()
    """Bound attention scores smoothly: cap x tanh(score / cap)."""
    final_logit_softcapping: float | None = model_flag()
    """Bound the logits smoothly: cap x tanh(logit / cap)."""
    z_loss_coeff: float = flag(0.0, bound=NOT_NEGATIVE, change=STEPS)
    """Add coeff x (log sum exp of the logits)^2 to each token's loss during training."""
    untie_embeddings_and_output_weights: bool = model_flag(False)
    """Give the output head its own matrix."""
    hidden_dropout: float = flag(0.1, bound=BELOW_ONE, change=DROPOUT)
    """Dropout after the embedding, attention and MLP."""
    attention_dropout: float = flag(0.1, bound=BELOW_ONE, change=DROPOUT)
    """Dropout on attention probabilities. Kernels other than ours need 0 to be fused."""
    init_method_std: float = 0.02
    """Standard deviation of the initial weights; residual outputs: / sqrt(2 x num-layers)."""
    make_vocab_size_divisible_by: int = model_flag(128)
    """The vocabulary is padded to a multiple of this times the tensor-parallel size."""
    padded_vocab_size: int | None = model_flag()
    """Rows of embedding and head. Default: see --make-vocab-size-divisible-by."""
    attention_backend: Literal["auto", "gluon", "triton", "fa4", "sdpa", "plain"] = kernel_flag()
    """Attention kernel: ours in Triton or, for Hopper, Gluon; FlashAttention-4 (fa4) or another of
    torch's scaled_dot_product_attention; or plain matmuls."""
    norm_backend: ApexBackend = kernel_flag()
    """Implementation of LayerNorm and RMSNorm."""
    rotary_backend: Backend = kernel_flag()
    """Implementation of the rotary embedding."""
    activation_backend: Backend = kernel_flag()
    """Implementation of the MLP's activation."""
    dropout_backend: Backend = kernel_flag()
    """Implementation of dropout on hidden states."""
    cross_entropy_backend: Backend = kernel_flag()
    """Implementation of the loss."""
    weight_grad_backend: Literal["auto", "apex", "torch"] = kernel_flag()
    """Implementation of the weight gradients' sum in fp32 on a GPU."""
    deterministic_mode: bool = flag(True, change=ROUNDING)
    """Use only kernels that give the same bits every time; others may be faster on a GPU."""
    torch_compile: bool = flag(False, change=KERNEL)
    """Compile each layer with torch.compile; element-wise kernels are torch's where auto."""
    fused_linear_cross_entropy: bool = flag(False, change=ROUNDING)
    """Compute the logits in chunks of tokens, again in the backward pass, to save memory."""
    tiled_mlp: int = flag(1, change=ROUNDING)
    """Pieces of the sequence that the MLP is computed in, again in the backward pass, to save
    memory. Start with sequence / hidden size, rounded up; more make GEMMs too small for a GPU."""

    # Mixture of experts (MoE)
    num_experts: int | None = model_flag()
    """Experts of each mixture-of-experts (MoE) layer; a router chooses some for each token."""
    moe_ffn_hidden_size: int | None = expert_flag()
    """Width of an expert. Default: ffn-hidden-size."""
    moe_layer_freq: str = expert_flag("1")
    """Layers with experts: N for every N-th from the first on, or a list such as [0]*3+[1]*58."""
    moe_router_topk: int = expert_flag(2)
    """Experts that the router chooses for each token."""
    moe_router_score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = expert_flag(
        "softmax"
    )
    """Scores of the router's logits; normalized over the chosen unless --moe-router-pre-softmax."""
    moe_router_pre_softmax: bool = expert_flag(
        False, idle_without="moe_router_score_function=softmax"
    )
    """Apply the softmax to the logits of all experts, not to those of the chosen ones."""
    moe_router_num_groups: int | None = expert_flag()
    """Groups of neighbouring experts; a token uses the best --moe-router-group-topk of them."""
    moe_router_group_topk: int | None = model_flag(needs="num_experts moe_router_num_groups")
    """Groups that a token's experts are chosen from."""
    moe_router_topk_scaling_factor: float | None = expert_flag()
    """Factor of the weights of the chosen experts."""
    moe_router_enable_expert_bias: bool = expert_flag(False)
    """Balance experts by a bias on scores, updated each step; needs sigmoid or sqrtsoftplus."""
    moe_router_bias_update_rate: float = flag(
        1e-3, bound=NOT_NEGATIVE, needs="num_experts moe_router_enable_expert_bias", change=STEPS
    )
    """Change of an expert's bias in a step."""
    moe_router_load_balancing_type: tuple[Balancing, ...] = expert_steps_flag(("aux_loss",))
    """Auxiliary balancing losses: over a micro-batch (aux_loss), each sample (seq_aux_loss), or
    with the last step's shares of the global batch (global_aux_loss)."""
    moe_aux_loss_coeff: tuple[float, ...] = expert_steps_flag((0.0,))
    """Coefficient of each of --moe-router-load-balancing-type."""
    moe_z_loss_coeff: float = expert_steps_flag(0.0, bound=NOT_NEGATIVE)
    """Add coeff x (log sum exp of the router's logits)^2 to each token's loss."""
    moe_router_dtype: Literal["fp32", "fp64"] = expert_rounding_flag("fp32")
    """Precision of the router's GEMM and scores."""
    moe_router_force_load_balancing: bool = expert_steps_flag(False)
    """Give each expert equally many tokens, whatever the scores: for speed measurements only."""
    moe_input_jitter_eps: float = expert_steps_flag(0.0, bound=BELOW_ONE)
    """In training multiply what the router reads by random numbers between 1 - eps and 1 + eps."""
    moe_expert_capacity_factor: float | None = expert_steps_flag()
    """Capacity of an expert in even shares of a micro-batch; further tokens skip it.
    Default: no limit."""
    moe_token_drop_policy: Literal["probs", "position"] = flag(
        "probs", needs="num_experts moe_expert_capacity_factor", change=STEPS
    )
    """Tokens that an expert at capacity takes: the greatest weights, or the first ones."""
    moe_shared_expert_intermediate_size: int | None = expert_flag()
    """Width of an MLP for all tokens in addition to the experts (shared experts)."""
    moe_shared_expert_gate: bool = model_flag(
        False, needs="num_experts moe_shared_expert_intermediate_size"
    )
    """Multiply the shared expert's output by the sigmoid of a linear layer of the token."""
    grouped_gemm_backend: Literal["auto", "triton", "grouped-mm", "torch"] = kernel_flag(
        idle_without="num_experts"
    )
    """Kernel of the experts' GEMMs: one GEMM an expert (torch), torch's grouped GEMM, or ours in
    Triton, which also adds up weight gradients in fp32."""

    # Multi-head latent attention (MLA)
    multi_latent_attention: bool = model_flag(False)
    """Multi-head latent attention (MLA): keys and values come from one narrow vector a token."""
    q_lora_rank: int | None = latent_flag()
    """Width of the latent vector of queries. Default: queries come from the token itself."""
    kv_lora_rank: int = latent_flag(32)
    """Width of the latent vector of keys and values."""
    qk_head_dim: int = latent_flag(128)
    """Channels of a head's queries and keys that do not rotate."""
    qk_pos_emb_head_dim: int = latent_flag(64)
    """Channels of a head's queries and keys that rotate; keys share them over all heads."""
    v_head_dim: int = latent_flag(128)
    """Channels of a head's values."""
    rope_type: Literal["rope", "yarn"] | None = model_flag(idle_without="multi_latent_attention")
    """Rotary positions of latent attention. Default: yarn, as in Megatron-LM."""
    latent_norm_epsilon: float | None = latent_flag(idle_without="qk_layernorm")
    """Epsilon of the latent vectors' norms. Default: norm-epsilon; Hugging Face's models: 1e-6."""
    mscale: float = mscale_flag(1.0)
    """YaRN: rotary table scale m(mscale) / m(mscale-all-dim), m(x) = 0.1 x ln(factor) + 1."""
    mscale_all_dim: float = mscale_flag(0.0)
    """YaRN: scale attention scores by m(mscale-all-dim)^2, see --mscale."""

    @property
    def is_rotary(self) -> bool:
        return self.position_embedding_type in ("rope", "yarn")

    @property
    def rope_factor(self) -> float:
        """--rope-scaling-factor, or Megatron-LM's default if it is not set."""
        if self.rope_scaling_factor is not None:
            return self.rope_scaling_factor
        return 1.0 if self.position_embedding_type == "yarn" else 8.0

    @property
    def rope_original_length(self) -> int:
        """--rope-original-max-position-embeddings, or Megatron-LM's default if it is not set."""
        if self.rope_original_max_position_embeddings is not None:
            return self.rope_original_max_position_embeddings
        return 4096 if self.position_embedding_type == "yarn" else 8192

    # The rest is of a resolved configuration.

    def expert_layers(self) -> tuple[bool, ...]:
        """Whether each layer has experts."""
        if self.num_experts is None:
            return (False,) * self.num_layers
        return expert_pattern(self.moe_layer_freq, self.num_layers)

    @property
    def rotary_width(self) -> int:
        """Channels of a head that rotate."""
        if self.multi_latent_attention:
            return self.qk_pos_emb_head_dim
        return int(self.kv_channels * self.rotary_percent) // 2 * 2

    @property
    def value_channels(self) -> int:
        return self.v_head_dim if self.multi_latent_attention else self.kv_channels

    @property
    def softmax_scale(self) -> float:
        scale = self.kv_channels**-0.5
        if self.multi_latent_attention and self.position_embedding_type == "yarn":
            scale *= yarn_scale(self.rope_factor, self.mscale_all_dim) ** 2
        return scale


# Defaults before YaRN took Megatron-LM's. Earlier versions wrote them for every model.
FORMER_ROPE = {"rope_scaling_factor": 8.0, "rope_original_max_position_embeddings": 8192}


def yarn_scale(factor: float, weight: float) -> float:
    """YaRN's m(weight) where lengths grow by `factor`; 1 where they do not."""
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


def without_former_defaults(model: dict[str, Any]) -> dict[str, Any]:
    """Saved settings of a model, less FORMER_ROPE where they rescale no frequencies."""
    if model.get("position_embedding_type") == "yarn" or model.get("use_rope_scaling"):
        return model
    formers = FORMER_ROPE.items()
    return {name: value for name, value in model.items() if (name, value) not in formers}
