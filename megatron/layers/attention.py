"""Self-attention: fused QKV projection, grouped queries, optional QK norm and rotary positions, and the attention core.

s query length, t key length, b batch, n query heads, g key/value heads, d head dim, h hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.groups import ModelConfig
from megatron.layers.dropout import Dropout, DropoutState
from megatron.layers.linear import ColumnLinear, RowLinear
from megatron.layers.norm import Norm
from megatron.layers.rotary import Rotary, apply_rotary
from megatron.layers.tensor_parallel import DENSE, TensorParallel


def attention_mask(q_positions: Tensor, k_positions: Tensor, document_starts: Tensor | None, window: int | None) -> Tensor:
    """True where a query may see a key: [1 or b, 1, s, t] from positions [s], [t] within the sample and document_starts [b, s]."""
    distance = q_positions[:, None] - k_positions[None, :]
    visible = distance >= 0
    if window is not None:
        visible = visible & (distance < window)
    visible = visible[None]
    if document_starts is not None:
        visible = visible & (k_positions[None, None, :] >= document_starts[:, :, None])
    return visible.unsqueeze(1)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """torch's fused attention on [b, n, s, d]; mask None means causal."""
    dtype = q.dtype
    if not q.is_cuda:  # the backward pass of torch's CPU kernel takes three times as long in bf16
        q, k, v = (x.to(torch.promote_types(dtype, torch.float32)) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.to(dtype)


def _plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None, dropout: Dropout | None,
           state: DropoutState | None, first_head: int) -> tuple[Tensor, Tensor]:
    """The definition: (output [b, n, s, d], log-sum-exp of the scores [b, n, s] in fp32 or fp64)."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    probabilities = torch.softmax(scores, dim=-1)
    if dropout is not None:
        probabilities = dropout.attention(probabilities, state, first_head)
    return probabilities.to(v.dtype) @ v, lse


def beyond_sdpa(config: ModelConfig, *, training: bool) -> list[str]:
    """The settings, as flags with their remedy, that torch's fused attention cannot compute."""
    return [name for name, needed in (
        ("--attention-dropout above 0 (use 0)", training and config.attention_dropout > 0),
        ("--attn-logit-softcapping", config.attn_logit_softcapping is not None),
    ) if needed]


def choose_attention(config: ModelConfig, *, training: bool) -> str:
    """The implementation of the attention core: what the flag says, else torch's fused one where it can do what is asked.

    Raises ValueError when --attention-backend sdpa is forced with settings it cannot compute.
    """
    if config.attention_backend in ("triton", "plain"):
        return config.attention_backend
    needs_plain = beyond_sdpa(config, training=training)
    if config.attention_backend == "sdpa" and needs_plain:
        raise ValueError(f"--attention-backend sdpa cannot compute {', '.join(needs_plain)}: drop it, or take --attention-backend auto")
    return "plain" if needs_plain else "sdpa"


def attention_core(q: Tensor, k: Tensor, v: Tensor, *, scale: float, backend: str = "sdpa", q_positions: Tensor | None = None,
                   k_positions: Tensor | None = None, document_starts: Tensor | None = None, window: int | None = None,
                   softcap: float | None = None, dropout: Dropout | None = None, state: DropoutState | None = None, first_head: int = 0,
                   return_lse: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention of q [s, b, n, d] over k, v [t, b, g, d] -> [s, b, n, d], with log-sum-exp [b, n, s] when asked.

    A query at position p sees keys at positions <= p, within `window` latest ones (itself included), not before its document's first
    position document_starts [b, s]. first_head numbers q's first head within the model. q_positions [s] and k_positions [t] count within the sample; None means 0, 1, 2, ... for both.
    """
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    plain = backend == "plain" or return_lse
    mask = None
    if plain or q_positions is not None or document_starts is not None or window is not None:
        if q_positions is None:
            q_positions = torch.arange(q.shape[2], device=q.device)
        if k_positions is None:
            k_positions = torch.arange(k.shape[2], device=k.device)
        mask = attention_mask(q_positions, k_positions, document_starts, window)
    if plain:
        out, lse = _plain(q, k, v, mask, scale, softcap, dropout, state, first_head)
    else:
        assert softcap is None and (dropout is None or dropout.probability == 0 or state is None)
        out, lse = _sdpa(q, k, v, mask, scale), None
    out = out.permute(2, 0, 1, 3)
    return (out, lse) if return_lse else out


class SelfAttention(nn.Module):
    """x [s, b, h] -> [s, b, h]. QKV rows: per key/value head [its query heads][key][value].

    Each rank computes its part of the heads. With fewer key/value heads than ranks, several ranks hold (and draw) the same one.
    """

    def __init__(self, config: ModelConfig, seed: int, layer: int, tp: TensorParallel = DENSE):
        super().__init__()
        self.config = config
        self.head_dim, self.heads = config.kv_channels, config.num_attention_heads // tp.size
        self.groups = max(1, config.num_query_groups // tp.size)
        self.queries_per_group = self.heads // self.groups
        self.first_head = tp.axis.rank * self.heads
        width = self.head_dim * self.heads
        qkv_bias = config.add_bias_linear or config.add_qkv_bias
        self.qkv = ColumnLinear(config.hidden_size, width + 2 * self.head_dim * self.groups, qkv_bias, tp)
        self.proj = RowLinear(width, config.hidden_size, config.add_bias_linear, tp)
        norms = config.qk_layernorm
        self.q_norm = Norm(config.normalization, self.head_dim, config.norm_epsilon) if norms else None
        self.k_norm = Norm(config.normalization, self.head_dim, config.norm_epsilon) if norms else None
        self.dropout = Dropout(config.attention_dropout, seed, "layers", layer, "attention.dropout")
        self.backend = {training: choose_attention(config, training=training) for training in (True, False)}

    def forward(self, x: Tensor, rotary: Rotary | None, document_starts: Tensor | None, state: DropoutState | None) -> Tensor:
        qkv = self.qkv(x)
        s, b, _ = qkv.shape  # the whole sequence, whatever part x is
        qkv = qkv.view(s, b, self.groups, self.queries_per_group + 2, self.head_dim)
        q, k, v = qkv.split((self.queries_per_group, 1, 1), dim=3)
        q, k, v = q.reshape(s, b, -1, self.head_dim), k.squeeze(3), v.squeeze(3)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rotary(q, rotary), apply_rotary(k, rotary)
        out = attention_core(
            q, k, v, scale=self.head_dim**-0.5, backend=self.backend[state is not None],
            document_starts=document_starts, window=self.config.window_size, softcap=self.config.attn_logit_softcapping,
            dropout=self.dropout, state=state, first_head=self.first_head,
        )
        return self.proj(out.reshape(s, b, -1))
