"""Multi-head latent attention (MLA): keys and values of all heads are made of one narrow vector of
each token, and positions rotate channels of their own (DeepSeek-AI, "DeepSeek-V2", 2024).

    queries         x -> q_down [r] -> norm -> q_up, or x -> q: of each head [content | position]
    keys, values    x -> kv_down: [latent | position]; latent -> norm -> kv_up: of each head
                    [content | value]

The position channels of a key are the same for all heads. Channels 2i and 2i + 1 of them make a
pair, as in DeepSeek's weights. The norms are there with --qk-layernorm. Heads are shared over
tensor-parallel ranks; the down-projections, which are narrow, every rank holds whole, and under
sequence parallelism it is the latents that are gathered. Values are narrower than keys, and zeros
fill them up where the attention core takes one width.

s sequence, b batch, n heads of this rank, c content, r position and v value channels of a head, h
hidden.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from megatron.distributed.collectives import all_gather, all_reduce, reduce_scatter
from megatron.model.attention.attention import Attention
from megatron.model.attention.rotary import Rotary, rotate_pairs, rotate_pairs_back
from megatron.model.linear import ColumnLinear, Linear
from megatron.model.linear_map import linear_map
from megatron.model.model_parallel import TensorParallel
from megatron.model.norm import Norm
from megatron.model.spec import Shard, matrix, normal, whole_on_every_rank


def _for_all_heads(x: Tensor, tp: TensorParallel) -> Tensor:
    """x [s, b, r] for the heads of all tensor-parallel ranks: under SP that of all ranks."""
    return all_gather(x.contiguous(), tp.axis) if tp.sequence else x.view_as(x)


def _of_all_heads(dy: Tensor, tp: TensorParallel) -> Tensor:
    """The sum of the ranks' gradients: each rank has that of its heads."""
    if tp.sequence:
        return reduce_scatter(dy.contiguous(), tp.axis)
    return all_reduce(dy.clone(), tp.axis)


class _Heads(torch.autograd.Function):
    """Queries and keys [s, b, n, c + r] and values [s, b, n, width], of queries [s, b, n, c + r]
    before rotation, the up-projection [s, b, n, c + v] of the latent, and position channels
    [s, b, 1, r] of the keys; values are followed by zeros. Keeps the rotary table alone.
    """

    @staticmethod
    def forward(
        ctx, q: Tensor, kv: Tensor, position: Tensor, cos: Tensor, sin: Tensor, width: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        rotating = position.shape[-1]
        # The key's position channels are the same for all heads: rotated once, then expanded.
        content = q.shape[-1] - rotating
        ctx.save_for_backward(cos, sin)
        ctx.widths = content, rotating, kv.shape[-1] - content
        heads = (*q.shape[:-1], rotating)
        turned = rotate_pairs(position, cos, sin).expand(heads)
        key, value = kv.split(ctx.widths[::2], dim=-1)
        q = torch.cat((q[..., :content], rotate_pairs(q[..., content:], cos, sin)), dim=-1)
        # a view of one zero, which the concatenation copies
        zeros = value.new_zeros(()).expand(*value.shape[:-1], width - value.shape[-1])
        return q, torch.cat((key, turned), dim=-1), torch.cat((value, zeros), dim=-1)

    @staticmethod
    def backward(ctx, dq: Tensor, dk: Tensor, dv: Tensor):
        cos, sin = ctx.saved_tensors
        content, rotating, value = ctx.widths
        # All heads read these channels of the key: gradients add up in the table's precision.
        dq_position = rotate_pairs_back(dq[..., content:], cos, sin)
        position = dk[..., content:].sum(2, keepdim=True, dtype=cos.dtype)
        dkv = torch.cat((dk[..., :content], dv[..., :value]), dim=-1)
        dposition = rotate_pairs_back(position, cos, sin).to(dk.dtype)
        return torch.cat((dq[..., :content], dq_position), -1), dkv, dposition, None, None, None


class LatentAttention(Attention):
    """Attention whose keys and values are made of one narrow vector of each token."""

    recomputable = {**Attention.recomputable, "mla_up_proj": "up_project"}

    def make_projections(self, name: str) -> None:
        config = self.config
        # Queries: through a latent, or by one projection of x.
        self.q_down = self.q_norm = self.q_up = self.q = None
        rank, width = config.q_lora_rank, config.kv_channels
        if rank is None:
            self.q = self._by_heads(f"{name}.q", width, config.hidden_size)
        else:
            self.q_down = self._down(f"{name}.q_down", rank)
            self.q_norm = self._norm(f"{name}.q_norm", rank)
            self.q_up = self._by_heads(f"{name}.q_up", width, rank)
        # Keys and values.
        latent = config.kv_lora_rank
        self.kv_down = self._down(f"{name}.kv_down", latent + config.qk_pos_emb_head_dim)
        self.kv_norm = self._norm(f"{name}.kv_norm", latent)
        made = config.qk_head_dim + config.v_head_dim
        self.kv_up = self._by_heads(f"{name}.kv_up", made, latent)
        self.proj = self.output_projection(name)

    def _down(self, name: str, rows: int) -> Linear:
        """A down-projection [rows, h], which every tensor-parallel rank holds whole."""
        weight = matrix(
            f"{name}.weight",
            (rows, self.config.hidden_size),
            normal(self.config),
            **whole_on_every_rank(self.tp),
        )
        return Linear(weight, tp=self.tp)

    def _by_heads(self, name: str, rows: int, inputs: int) -> ColumnLinear:
        """A projection to that many rows of each head [n rows, inputs], with n of all ranks."""
        weight = matrix(
            f"{name}.weight",
            (self.config.num_attention_heads * rows, inputs),
            normal(self.config),
            shard=Shard(0),
        )
        return ColumnLinear(weight, tp=self.tp)

    def _norm(self, name: str, size: int) -> Norm | None:
        """The norm of a latent, if there is one."""
        config = self.config
        if not config.qk_layernorm:
            return None
        # Some families of models give the norms of latents a separate epsilon.
        epsilon = config.latent_norm_epsilon or config.norm_epsilon
        config = dataclasses.replace(config, norm_epsilon=epsilon)
        return Norm(config, name, size, grad_sum=self.tp.sequence)

    def project(self, x: Tensor, *, rotary: Rotary | None, training: bool) -> tuple[Tensor, ...]:
        config = self.config
        q = x if self.q_down is None else self.q_down(x)
        # [s, b, kv-lora-rank] and [s, b, r]
        latent, position = self.kv_down(x).split(
            (config.kv_lora_rank, config.qk_pos_emb_head_dim), dim=-1
        )
        # values as wide as keys where the core takes one width
        is_plain = self.core.backend[training] == "plain" and self.cp_size == 1
        width = config.v_head_dim if is_plain else self.head_dim
        return self.up_project(q, latent, position, rotary=rotary, width=width)

    def up_project(
        self, q: Tensor, latent: Tensor, position: Tensor, *, rotary: Rotary | None, width: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the queries' latent [s, b, r] (or x), that of keys and values
        and the keys' position channels; under sequence parallelism of this rank's part of s.
        """
        q = q if self.q_norm is None else self.q_norm(q)
        latent = latent.contiguous()  # apart from the position channels, which are not kept
        latent = latent if self.kv_norm is None else self.kv_norm(latent)
        query = self.q if self.q_up is None else self.q_up
        # The up-projections gather the sequence; position channels are gathered by themselves.
        if self.tp.size > 1:
            position = linear_map(position, _for_all_heads, _of_all_heads, self.tp)
        return _Heads.apply(
            query(q).unflatten(-1, (self.heads, -1)),
            self.kv_up(latent).unflatten(-1, (self.heads, -1)),
            position.unsqueeze(2),
            *rotary,
            width,
        )
