"""Self-attention: fused QKV projection, grouped queries, optional QK norm and rotary positions, and
the attention core.

s query length, t key length, b batch, n query heads, g key/value heads, d head dim, h hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.groups import ModelConfig
from megatron.kernels.attention_masks import AttentionMask, attention_mask
from megatron.kernels.dispatch import CANDIDATES
from megatron.model.attention.context_parallel import (
    Places,
    gather_keys,
    heads_for_sequence,
    sequence_for_heads,
)
from megatron.model.attention.ring_attention import (
    AttentionSteps,
    BlockAttention,
    GatheredAttention,
    RingAttention,
    ring_steps,
)
from megatron.model.attention.rotary import Rotary, RotaryInPlace, RotaryOfProjection, apply_rotary
from megatron.model.dropout import Dropout, DropoutState
from megatron.model.linear import ColumnLinear, RowLinear
from megatron.model.model_parallel import NO_CP, ONE_RANK, ContextParallel, ModelParallel
from megatron.model.norm import Norm, normed_projection
from megatron.model.spec import (
    ParameterSpec,
    Shard,
    fuse,
    matrix,
    normal,
    vector,
    whole_on_every_rank,
)

OURS = ("triton", *CANDIDATES)  # the backends of flash_attention, which takes masks with tables
# the backends of scaled_dot_product_attention; kernels/fa4.py puts its own kernels there
SDPA = ("sdpa", "fa4")


@dataclass(frozen=True)
class Seen:
    """The attention mask of layers with the same window, and the steps of context parallelism."""

    mask: AttentionMask
    places: Places | None = None  # under context parallelism
    steps: AttentionSteps = ()  # of attention, where it is computed in several


def seen_by_queries(
    config: ModelConfig,
    window: int | None,
    length: int,
    document_starts: Tensor | None = None,
    cp: ContextParallel = NO_CP,
    places: Places | None = None,
) -> Seen:
    """What this rank's queries see in the layers with this window, of samples of this length, one
    document each or with document_starts [b, s]. The mask of several steps is the first one's.
    """
    steps = () if places is None else _steps(config, window, cp, places, document_starts)
    if steps:
        return Seen(steps[0].mask, places, steps)
    queries = length
    given: dict[str, Any] = {"window": window, "document_starts": document_starts}
    if places is not None and cp.gathers:
        # Queries of some positions only, keys of all.
        own, queries = places.own, len(places.own)
        given |= {"q_positions": own, "k_positions": torch.arange(length, device=own.device)}
        if document_starts is not None:
            given["document_starts"] = document_starts[:, own]
    if config.attention_backend in OURS:
        # Our kernels read tables of bounds, made here once for all layers with this window.
        return Seen(attention_mask(queries, length, **given), places)
    return Seen(AttentionMask(**given), places)


def _steps(
    config: ModelConfig,
    window: int | None,
    cp: ContextParallel,
    places: Places,
    document_starts: Tensor | None,
) -> AttentionSteps:
    """The steps of attention, one a block of keys; none where it is computed at once."""
    # a2a+p2p: the ranks that exchange heads are one rank of the ring
    axis = cp.ring
    if axis.size == 1:
        # Over gathered keys, rank by rank: torch's fused kernel computes all pairs of a mask, and a
        # block of another rank needs none. On a CPU alone, where it gives its log-sum-exp.
        on_cpu = places.own.device.type == "cpu"
        if not (cp.gathers and on_cpu and choose_attention(config, training=True) == "sdpa"):
            return ()
        axis = cp.axis
    return ring_steps(
        places.order.view(axis.size, -1),
        axis.rank,
        window,
        document_starts,
        by_positions=config.attention_dropout > 0,
    )


def beyond_sdpa(config: ModelConfig, *, training: bool) -> list[str]:
    """The settings, as flags with their remedy, that torch's fused attention cannot compute."""
    needs = []
    if training and config.attention_dropout > 0:
        needs.append("--attention-dropout above 0 (use 0)")
    if config.attn_logit_softcapping is not None:
        needs.append("--attn-logit-softcapping")
    return needs


def choose_attention(config: ModelConfig, *, training: bool) -> str:
    """The attention core: what the flag names; of `auto` torch's fused one where that is enough."""
    if config.attention_backend != "auto":
        return config.attention_backend
    return "plain" if beyond_sdpa(config, training=training) else "sdpa"


def fused_attention(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float) -> Tensor:
    """torch's fused attention of q [s, b, n, d] over k, v [t, b, g, d] -> [s, b, n, d]."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    dtype = q.dtype
    simple = mask.window is None and mask.q_positions is None and mask.document_starts is None
    dense = None if simple else mask.dense(q.shape[2], k.shape[2], q.device)  # [b or 1, 1, s, t]
    if not q.is_cuda and q.element_size() == 2:
        # the backward pass of torch's CPU kernel takes three times as long in bf16, and longer
        # where positions are not contiguous
        q, k, v = (x.to(torch.float32, memory_format=torch.contiguous_format) for x in (q, k, v))
    elif (
        q.is_cuda
        and (dense is not None or q.element_size() > 2)
        # torch's flash kernel takes neither a mask nor fp32, and its memory-efficient kernel needs
        # as many key heads as query heads. Without one of them torch would keep all scores,
        # [b, n, s, s].
        and k.shape[1] < q.shape[1]
    ):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        dense,
        is_causal=simple and mask.causal,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    if out.dtype != dtype:
        out = out.to(dtype)
    return out.permute(2, 0, 1, 3)


class CoreAttention(nn.Module):
    """softmax(q k^T scale) v: queries [s, b, n, d], keys and values [s, b, g, d], or the fused
    projection where the backend reads that, -> [s, b, n d]. Each tensor-parallel rank computes its
    heads; each context-parallel rank has the queries, keys and values of its positions, and gives
    the attention of its queries over all keys.
    """

    recomputable = {"core_attn": "forward"}

    def __init__(self, config: ModelConfig, seed: int, layer: int, parallel: ModelParallel):
        super().__init__()
        tp, cp = parallel.tp, parallel.cp
        self.cp = cp
        heads = config.num_attention_heads // tp.size
        # the number, within the model, of the first head that this rank computes
        first_head = tp.axis.rank * heads + cp.heads.rank * (heads // cp.heads.size)
        self.value_width = config.value_channels
        # by whether the model is trained: evaluation needs no dropout, which not all can compute
        self.backend = {
            training: choose_attention(config, training=training) for training in (True, False)
        }
        drop = config.attention_dropout
        self.dropout = (
            Dropout(drop, seed, "layers", layer, "attention.dropout") if drop > 0 else None
        )
        self.settings: dict[str, Any] = {
            "scale": config.softmax_scale,
            "softcap": config.attn_logit_softcapping,
            "first_head": first_head,
            # of our kernels' sum of dq; torch's follow torch.use_deterministic_algorithms
            "deterministic": config.deterministic_mode,
        }

    def forward(self, *qkv: Tensor, seen: Seen, dropout_state: DropoutState | None) -> Tensor:
        """`dropout_state`: None in evaluation."""
        cp = self.cp
        backend = self.backend[dropout_state is not None]
        if cp.heads.size > 1:  # all-to-all: the positions of all ranks of fewer heads
            q, k, v = qkv
            qkv = heads_for_sequence(q, k, v, cp.heads)
        if seen.steps:
            out = self._by_blocks(qkv, seen.steps, dropout_state, backend)
        else:
            if cp.gathers and seen.places is not None:  # one call over all keys
                q, k, v = qkv
                qkv = q, *gather_keys(k, v, seen.places, cp.axis)
            if backend in SDPA:
                q, k, v = qkv
                out = fused_attention(q, k, v, seen.mask, self.settings["scale"])
            else:
                block = BlockAttention(backend, self._options(dropout_state, backend))
                out, _ = block.forward(*qkv, mask=seen.mask)
        if cp.heads.size > 1:  # and back
            out = sequence_for_heads(out, cp.heads)
        # [s, b, n, d] -> [s, b, n d]; latent attention fills values with zeros to the keys' width
        if out.shape[-1] != self.value_width:
            out = out[..., : self.value_width]
        return out.flatten(2)

    def _by_blocks(
        self,
        qkv: tuple[Tensor, ...],
        steps: AttentionSteps,
        dropout_state: DropoutState | None,
        backend: str,
    ) -> Tensor:
        """Attention over the blocks of keys of a ring's ranks, or of all."""
        if qkv[0].is_cuda and backend in SDPA:  # which gives no log-sum-exp there
            backend = "plain"
        block = BlockAttention(backend, self._options(dropout_state, backend))
        if self.cp.gathers:
            return GatheredAttention.apply(*qkv, steps, block, self.cp.axis)
        return RingAttention.apply(*qkv, steps, block, self.cp.ring)

    def _options(self, dropout_state: DropoutState | None, backend: str) -> dict[str, Any]:
        """The fields of Options, with those of dropout where probabilities are dropped."""
        dropout = self.dropout
        if dropout is None or dropout_state is None:
            return self.settings
        # The kernels take the key as numbers; the definition, for --torch-compile, as tensors too.
        key = dropout.key if backend in OURS else dropout.words
        samples = dropout_state.sample_ids
        return self.settings | {"drop": dropout.probability, "key": key, "sample_ids": samples}


class Attention(nn.Module):
    """x [s, b, h] -> [s, b, h]. Subclasses make the projections that the core reads."""

    recomputable = {"qkv": "project"}
    proj: RowLinear

    def __init__(
        self,
        config: ModelConfig,
        seed: int,
        layer: int,
        parallel: ModelParallel = ONE_RANK,
    ):
        super().__init__()
        self.config, self.tp, self.cp_size = config, parallel.tp, parallel.cp.size
        self.head_dim, self.heads = config.kv_channels, config.num_attention_heads // self.tp.size
        self.make_projections(f"layers.{layer}.attention")
        self.core = CoreAttention(config, seed, layer, parallel)

    def forward(
        self, x: Tensor, rotary: Rotary | None, seen: Seen, dropout_state: DropoutState | None
    ) -> Tensor:
        """`dropout_state`: None in evaluation."""
        # [s, b, g, n / g + 2, d], or q, k and v; under SP of the whole sequence
        qkv = self.project(x, rotary=rotary, training=dropout_state is not None)
        return self.proj(self.core(*qkv, seen=seen, dropout_state=dropout_state))

    def make_projections(self, name: str) -> None:
        """The linear layers and norms, whose tensors have names that begin with `name`."""
        raise NotImplementedError

    def project(self, x: Tensor, *, rotary: Rotary | None, training: bool) -> tuple[Tensor, ...]:
        """What the attention core reads: the fused projection, or queries, keys and values."""
        raise NotImplementedError

    def output_projection(self, name: str) -> RowLinear:
        """[h, n v], with the bias if there is one."""
        config = self.config
        h, width = config.hidden_size, config.num_attention_heads * config.value_channels
        # GPT-2 scales the initial values of matrices that write to the residual stream.
        init = normal(config, residual_output=True)
        weight = matrix(f"{name}.proj.weight", (h, width), init, shard=Shard(1))
        bias = None
        if config.add_bias_linear:
            bias = vector(f"{name}.proj.bias", h, **whole_on_every_rank(self.tp))
        return RowLinear(weight, bias, self.tp)


def is_projection_read(config: ModelConfig, backend: str, cp_size: int, rotates: bool) -> bool:
    """Whether the attention core reads the fused projection [s, b, g, n / g + 2, d], because all
    that comes before it can: norms of heads and the rotary embedding, where there are any.
    """
    rotary_fits = not rotates or config.rotary_backend == "triton"
    norm_fits = not config.qk_layernorm or config.norm_backend == "triton"
    return backend in OURS and rotary_fits and norm_fits and cp_size == 1


def fused_qkv(config: ModelConfig, name: str) -> tuple[ParameterSpec, ParameterSpec]:
    """Weight [(n + 2g) d, h] and bias of the projection to queries, keys and values. Rows are per
    key/value head [its query heads | key | value]. With fewer key/value heads than ranks, several
    ranks hold (and draw) the same one.
    """
    d, groups = config.kv_channels, config.num_query_groups
    of_groups = {"shard": Shard(0, groups), "copies": "kv", "grad_sum": True}
    weights, biases = [], []
    for part in "qkv":
        rows = d * (config.num_attention_heads if part == "q" else groups)
        held: dict[str, Any] = {"shard": Shard(0)} if part == "q" else of_groups
        shape = rows, config.hidden_size
        weights.append(matrix(f"{name}.{part}.weight", shape, normal(config), **held))
        biases.append(vector(f"{name}.{part}.bias", rows, **held))
    return fuse(weights, groups), fuse(biases, groups)


class SelfAttention(Attention):
    """Attention whose queries, keys and values are one projection of x."""

    def make_projections(self, name: str) -> None:
        config, tp = self.config, self.tp
        self.groups = max(1, config.num_query_groups // tp.size)
        self.queries_per_group = self.heads // self.groups
        weight, bias = fused_qkv(config, name)
        has_bias = config.add_bias_linear or config.add_qkv_bias
        self.qkv = ColumnLinear(weight, bias if has_bias else None, tp)
        self.proj = self.output_projection(name)
        # every rank sees its own heads alone
        self.q_norm, self.k_norm = (
            Norm(config, f"{name}.{each}", config.kv_channels, grad_sum=True)
            if config.qk_layernorm
            else None
            for each in ("q_norm", "k_norm")
        )
        # by whether positions rotate: whether the core reads the projection as it is
        self.reads_projection = {
            rotates: is_projection_read(config, config.attention_backend, self.cp_size, rotates)
            for rotates in (True, False)
        }

    def project(self, x: Tensor, *, rotary: Rotary | None, training: bool) -> tuple[Tensor, ...]:
        qkv = self.qkv(x)
        reads_projection = self.reads_projection[rotary is not None]
        # [g, n / g + 2, d] for each token of this context-parallel rank, under SP too
        shape = self.groups, self.queries_per_group + 2, self.head_dim

        # 1. Without norms the fused projection is rotated: by our kernel in place.
        if self.q_norm is None and rotary is not None:
            if self.config.rotary_backend != "triton":
                return RotaryOfProjection.apply(qkv.unflatten(-1, shape), *rotary)  # q, k, v
            # queries and keys, not the value of each group
            qkv = RotaryInPlace.apply(qkv, *rotary, shape, shape[1] - 1)

        # 2. The core reads the fused projection: one kernel norms and rotates it.
        qkv = qkv.unflatten(-1, shape)
        if reads_projection:
            if self.q_norm is not None:
                qkv = normed_projection(qkv, self.q_norm, self.k_norm, rotary)
            return (qkv,)

        # 3. Separately: queries [s, b, n, d], keys and values [s, b, g, d].
        q, k, v = qkv.split((self.queries_per_group, 1, 1), dim=3)
        q, k, v = q.flatten(2, 3), k.squeeze(3), v.squeeze(3)
        if self.q_norm is not None:
            # over the channels of a head, before the rotation
            q, k = self.q_norm(q), self.k_norm(k)
            if rotary is not None:
                q, k = (apply_rotary(x, rotary, self.config.rotary_backend) for x in (q, k))
        return q, k, v
