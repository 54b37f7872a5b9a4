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

from megatron.config.groups import ModelConfig
from megatron.distributed.collectives import all_gather, all_reduce, reduce_scatter
from megatron.model.attention.attention import Attention, attention_parameters
from megatron.model.attention.rotary import Rotary, rotate_pairs, rotate_pairs_back
from megatron.model.linear import ColumnLinear, Linear, RowLinear
from megatron.model.norm import Norm, norm_parameters
from megatron.model.spec import (
    ParameterSpec,
    Shard,
    matrix,
    normal,
    parts_under,
    under,
    vector,
)
from megatron.model.tensor_parallel import TensorParallel


def _down(config: ModelConfig, name: str, rows: int, parts: tuple[str, ...]) -> ParameterSpec:
    """A down-projection [rows, h], which every tensor-parallel rank holds whole."""
    shape = (rows, config.hidden_size)
    return matrix(f"{name}.weight", shape, normal(config), copies="tp", grad_sum=parts)


def _by_heads(config: ModelConfig, name: str, rows: int, inputs: int) -> ParameterSpec:
    """A projection to that many rows of each head."""
    shape = (config.num_attention_heads * rows, inputs)
    return matrix(f"{name}.weight", shape, normal(config), shard=Shard(0))


def _bias(name: str, size: int, parts: tuple[str, ...]) -> dict[str, ParameterSpec]:
    """That of the output projection, which every tensor-parallel rank holds."""
    return {
        "proj.bias": ParameterSpec((vector(f"{name}.bias", size, copies="tp", grad_sum=parts),))
    }


def _norm(
    config: ModelConfig, name: str, own: str, size: int, parts: tuple[str, ...]
) -> dict[str, ParameterSpec]:
    """The norm of a latent, if there is one."""
    made = norm_parameters(config.normalization, size, f"{name}.{own}", parts)
    return {f"{own}.{kind}": spec for kind, spec in made.items() if config.qk_layernorm}


def _queries(
    config: ModelConfig, name: str, width: int, parts: tuple[str, ...]
) -> dict[str, ParameterSpec]:
    """The projections that queries are made by."""
    rank = config.q_lora_rank
    # without a latent: one projection of x
    if rank is None:
        return {"q.weight": _by_heads(config, f"{name}.q", width, config.hidden_size)}
    return {
        "q_down.weight": _down(config, f"{name}.q_down", rank, parts),
        **_norm(config, name, "q_norm", rank, parts),
        "q_up.weight": _by_heads(config, f"{name}.q_up", width, rank),
    }


def latent_parameters(
    config: ModelConfig, name: str, sequence: bool = False
) -> dict[str, ParameterSpec]:
    """q_down [q-lora-rank, h], q_up [n (c + r), q-lora-rank] or q [n (c + r), h], kv_down
    [kv-lora-rank + r, h], kv_up [n (c + v), kv-lora-rank], proj [h, n v] with its bias if there is
    one, and the norms of the latents, with n heads of all ranks.
    """
    h, heads, width = config.hidden_size, config.num_attention_heads, config.kv_channels
    parts = parts_under(sequence)

    made = _queries(config, name, width, parts)
    made["kv_down.weight"] = _down(
        config, f"{name}.kv_down", config.kv_lora_rank + config.qk_pos_emb_head_dim, parts
    )
    made |= _norm(config, name, "kv_norm", config.kv_lora_rank, parts)
    made["kv_up.weight"] = _by_heads(
        config, f"{name}.kv_up", config.qk_head_dim + config.v_head_dim, config.kv_lora_rank
    )
    out = (h, heads * config.v_head_dim)
    residual = normal(config, residual_output=True)
    made["proj.weight"] = matrix(f"{name}.proj.weight", out, residual, shard=Shard(1))
    return made if not config.add_bias_linear else made | _bias(f"{name}.proj", h, parts)


def parameters_of_attention(
    config: ModelConfig, name: str, sequence: bool = False
) -> dict[str, ParameterSpec]:
    """Those of the form of attention that the configuration names."""
    form = latent_parameters if config.multi_latent_attention else attention_parameters
    return form(config, name, sequence)


class _ForAllHeads(torch.autograd.Function):
    """What the heads of all tensor-parallel ranks read of x [s, b, r]: the identity, or under
    sequence parallelism an all-gather. Each rank's gradient is that of its own heads, and they are
    added up.
    """

    @staticmethod
    def forward(ctx, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return all_gather(x.contiguous(), tp.axis) if tp.sequence else x.view_as(x)

    @staticmethod
    def backward(ctx, dy: Tensor):
        if ctx.tp.sequence:
            # Each rank's dy is the gradient of its own heads: sum it over the ranks.
            return reduce_scatter(dy.contiguous(), ctx.tp.axis), None
        return all_reduce(dy.clone(), ctx.tp.axis), None


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
        # All heads read the same position channels of the key, so their gradients are added up, in
        # the table's precision.
        dq_position = rotate_pairs_back(dq[..., content:], cos, sin)
        position = dk[..., content:].sum(2, keepdim=True, dtype=cos.dtype)
        dkv = torch.cat((dk[..., :content], dv[..., :value]), dim=-1)
        dposition = rotate_pairs_back(position, cos, sin).to(dk.dtype)
        return torch.cat((dq[..., :content], dq_position), -1), dkv, dposition, None, None, None


class LatentAttention(Attention):
    """Attention whose keys and values are made of one narrow vector of each token."""

    # methods that RecomputeContext.wrap may replace, by the name of the module to recompute
    recomputable = {**Attention.recomputable, "mla_up_proj": "up_project"}

    def make_projections(self, config: ModelConfig, name: str) -> None:
        tp = self.tp
        parameters = latent_parameters(config, name, tp.sequence)
        epsilon = config.latent_norm_epsilon or config.norm_epsilon
        # Some families of models give the norms of latents a separate epsilon.
        norms = dataclasses.replace(config, norm_epsilon=epsilon)

        def norm(name: str) -> Norm | None:
            own = under(parameters, name)
            return Norm(own, norms, tp) if own else None

        narrow = config.q_lora_rank is not None
        self.q_down = Linear(parameters["q_down.weight"], tp=tp) if narrow else None
        self.q_norm = norm("q_norm")
        self.q_up = ColumnLinear(parameters["q_up.weight"], tp=tp) if narrow else None
        self.q = None if narrow else ColumnLinear(parameters["q.weight"], tp=tp)
        self.kv_down = Linear(parameters["kv_down.weight"], tp=tp)
        self.kv_norm = norm("kv_norm")
        self.kv_up = ColumnLinear(parameters["kv_up.weight"], tp=tp)
        self.proj = RowLinear(parameters["proj.weight"], parameters.get("proj.bias"), tp)

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
        assert rotary is not None
        q = q if self.q_norm is None else self.q_norm(q)
        latent = latent.contiguous()  # apart from the position channels, which are not kept
        latent = latent if self.kv_norm is None else self.kv_norm(latent)
        query = self.q if self.q_up is None else self.q_up
        assert query is not None
        # The up-projections gather the sequence; the position channels, which all heads share, are
        # gathered by themselves.
        position = _ForAllHeads.apply(position, self.tp) if self.tp.size > 1 else position
        return _Heads.apply(
            query(q).unflatten(-1, (self.heads, -1)),
            self.kv_up(latent).unflatten(-1, (self.heads, -1)),
            position.unsqueeze(2),
            *rotary,
            width,
        )
