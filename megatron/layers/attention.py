"""Self-attention: fused QKV projection, grouped queries, optional QK norm and rotary positions, and
the attention core.

s query length, t key length, b batch, n query heads, g key/value heads, d head dim, h hidden.
Called from model/block.py, once a layer; model/gpt.py asks it for the mask of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.errors import UserError
from megatron.config.groups import ModelConfig
from megatron.config.workspace import ROUND_BYTES
from megatron.kernels.attention import attention_reference, flash_attention
from megatron.kernels.attention_launch import Options
from megatron.kernels.attention_masks import AttentionMask, attention_mask
from megatron.layers.context_parallel import (
    WHOLE,
    ContextParallel,
    Places,
    gather_keys,
    heads_for_sequence,
    sequence_for_heads,
)
from megatron.layers.dropout import Dropout, DropoutState
from megatron.layers.linear import ColumnLinear, RowLinear
from megatron.layers.norm import Norm, norm_parameters, saved_statistics
from megatron.layers.qk_norm import normed_projection
from megatron.layers.recompute import Rebuilder
from megatron.layers.ring_attention import (
    AttentionStep,
    BlockAttention,
    gathered_attention,
    ring_attention,
    ring_steps,
)
from megatron.layers.rotary import Rotary, apply_rotary, rotate_fused, rotate_projection
from megatron.layers.spec import (
    ZEROS,
    ParameterSpec,
    Shard,
    TensorSpec,
    normal,
    parts_under,
    under,
    vector,
)
from megatron.layers.tensor_parallel import DENSE, TensorParallel

CAUSAL = AttentionMask()
OURS = ("gluon", "triton")  # the backends of flash_attention, which takes masks with tables
# the backends of scaled_dot_product_attention; kernels/fa4.py puts its own kernels there
SDPA = ("sdpa", "fa4")


def mask_of(
    config: ModelConfig,
    length: int,
    document_starts: Tensor | None,
    own: Tensor | None = None,
) -> AttentionMask:
    """The mask of all layers for samples of this length, one document each or with document_starts
    [b, s]. `own`: the queries' positions, where they are not all.
    """
    given: dict[str, Any] = {"window": config.window_size, "document_starts": document_starts}
    if own is not None:
        given |= {"q_positions": own, "k_positions": torch.arange(length, device=own.device)}
        if document_starts is not None:
            given["document_starts"] = document_starts[:, own]
    if config.attention_backend in OURS:
        return attention_mask(length if own is None else len(own), length, **given)
    return AttentionMask(**given)


def steps_of(
    config: ModelConfig, cp: ContextParallel, places: Tensor, document_starts: Tensor | None
) -> tuple[AttentionStep, ...]:
    """The steps of attention of all layers, where it is computed in several. `places` [C, s / C] of
    all context-parallel ranks, document_starts [b, s].
    """
    if cp.ring.size > 1:
        places, rank = places.reshape(cp.ring.size, -1), cp.ring.rank
    elif cp.gathers and computes_blocks(config, places.device.type):
        rank = cp.axis.rank
    else:
        return ()
    return ring_steps(
        places,
        rank,
        config.window_size,
        document_starts,
        by_positions=config.attention_dropout > 0,
    )


def computes_blocks(config: ModelConfig, device: str) -> bool:
    """Whether attention over gathered keys is computed rank by rank: torch's fused kernel computes
    all pairs of a mask, and a block of another rank needs none. On a CPU alone, where that kernel
    gives its log-sum-exp.
    """
    return device == "cpu" and choose_attention(config, training=True) == "sdpa"


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | bool, scale: float) -> Tensor:
    """torch's fused attention on [s, b, n, d]; a mask that is no tensor says whether it is
    causal.
    """
    dtype = q.dtype
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    if not q.is_cuda:  # the backward pass of torch's CPU kernel takes three times as long in bf16
        q, k, v = (x.to(torch.promote_types(dtype, torch.float32)) for x in (q, k, v))
    tensor, causal = (None, mask) if isinstance(mask, bool) else (mask, False)
    if repeats_heads(q.device.type, tensor is not None, q.shape[1], k.shape[1]):
        # whose backward pass adds up in one order
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, tensor, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.to(dtype).permute(2, 0, 1, 3)


def repeats_heads(device: str, masked: bool, heads: int, groups: int) -> bool:
    """Whether keys and values are repeated for torch's fused attention: on a GPU only its
    memory-efficient kernel takes a mask, and that one needs as many of them as queries. Left to
    itself torch would take all scores into memory, [b, n, s, s], which ends at some 8,000
    tokens.
    """
    return device == "cuda" and masked and groups < heads


def beyond_sdpa(config: ModelConfig, *, training: bool) -> list[str]:
    """The settings, as flags with their remedy, that torch's fused attention cannot compute."""
    return [
        name
        for name, needed in (
            ("--attention-dropout above 0 (use 0)", training and config.attention_dropout > 0),
            ("--attn-logit-softcapping", config.attn_logit_softcapping is not None),
        )
        if needed
    ]


def choose_attention(config: ModelConfig, *, training: bool) -> str:
    """The implementation of the attention core: what the flag says, else torch's fused one where it
    can do what is asked.

    Raises UserError when --attention-backend sdpa or fa4 is forced with settings it cannot compute.
    """
    backend = config.attention_backend
    if backend in (*OURS, "plain"):
        return backend
    needs_plain = beyond_sdpa(config, training=training)
    if backend in SDPA and needs_plain:
        raise UserError(
            f"--attention-backend {backend} cannot compute {', '.join(needs_plain)}: drop it, "
            "or take --attention-backend auto"
        )
    return "plain" if needs_plain else "fa4" if backend == "fa4" else "sdpa"


def attention_core(
    *qkv: Tensor,
    scale: float,
    mask: AttentionMask = CAUSAL,
    backend: str = "sdpa",
    softcap: float | None = None,
    dropout: Dropout | None = None,
    state: DropoutState | None = None,
    first_head: int = 0,
    return_lse: bool = False,
    deterministic: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of q [s, b, n, d] over k, v [t, b, g, d] -> [s, b, n, d], with log-sum-exp [b, n,
    s] when asked (which sdpa cannot give).

    Backend triton also takes the fused projection [s, b, g, n / g + 2, d] instead of the three, and
    copies nothing in either pass. `mask` says which keys a query sees. Dropout acts where there is
    a state; first_head numbers q's first head within the model. What is not deterministic is our
    kernels' way to add up dq; torch's own follow torch.use_deterministic_algorithms.
    """
    if backend not in SDPA:
        compute = (
            partial(flash_attention, gluon=backend == "gluon", deterministic=deterministic)
            if backend in OURS
            else attention_reference
        )
        drop = _dropped(dropout, state, backend)
        out, lse = compute(
            *qkv, scale=scale, mask=mask, softcap=softcap, first_head=first_head, **drop
        )
        return (out, lse) if return_lse else out
    assert not return_lse and softcap is None and (dropout is None or not dropout.acts(state))
    q, k, v = qkv
    simple = mask.window is None and mask.q_positions is None and mask.document_starts is None
    return _sdpa(
        q, k, v, mask.causal if simple else mask.dense(q.shape[0], k.shape[0], q.device), scale
    )


def _dropped(dropout: Dropout | None, state: DropoutState | None, backend: str) -> dict[str, Any]:
    """How the attention core drops probabilities; nothing where it does not."""
    if dropout is None or state is None or not dropout.acts(state):
        return {}
    return {
        "drop": dropout.probability,
        "key": dropout.key if backend in OURS else dropout.words,
        "sample_ids": state.sample_ids,
    }


def attention_parameters(
    config: ModelConfig, name: str, sequence: bool = False
) -> dict[str, ParameterSpec]:
    """qkv [(n + 2g) d, h], whose rows are per key/value head [its query heads | key | value], and
    proj [h, n d], with their biases where there are any, and the norms of queries and keys [d].
    With fewer key/value heads than ranks, several ranks hold (and draw) the same one.
    """
    h, d = config.hidden_size, config.kv_channels
    residual = normal(config, residual_output=True)
    proj = TensorSpec(
        f"{name}.proj.weight",
        (h, config.num_attention_heads * d),
        residual,
        "matrix",
        shard=Shard(1),
    )
    made = {
        "qkv.weight": _fused_qkv(config, name, "weight", h),
        "proj.weight": ParameterSpec((proj,), product=True),
    }
    if config.add_bias_linear or config.add_qkv_bias:
        made["qkv.bias"] = _fused_qkv(config, name, "bias")
    if config.add_bias_linear:
        bias = vector(f"{name}.proj.bias", h, copies="tp", grad_sum=parts_under(sequence))
        made["proj.bias"] = ParameterSpec((bias,))
    # every rank sees its own heads alone
    for norm in ("q_norm", "k_norm") if config.qk_layernorm else ():
        parameters = norm_parameters(config.normalization, d, f"{name}.{norm}", grad_sum=("tp",))
        made |= {f"{norm}.{kind}": spec for kind, spec in parameters.items()}
    return made


def _fused_qkv(config: ModelConfig, name: str, kind: str, *rest: int) -> ParameterSpec:
    """The weights or biases of queries, keys and values; `rest`: the dimensions after the rows."""
    groups, d = config.num_query_groups, config.kv_channels
    init, of = (normal(config), "matrix") if rest else (ZEROS, "vector")
    decay = bool(rest)
    queries = (config.num_attention_heads * d, *rest)
    query = TensorSpec(f"{name}.q.{kind}", queries, init, of, decay, Shard(0))
    key, value = (
        TensorSpec(
            f"{name}.{part}.{kind}",
            (groups * d, *rest),
            init,
            of,
            decay,
            Shard(0, groups),
            "kv",
            ("kv",),
        )
        for part in "kv"
    )
    return ParameterSpec((query, key, value), interleave=groups, product=bool(rest))


class AttentionForm(nn.Module):
    """x [s, b, h] -> [s, b, h]; each rank computes its part of the heads. `rebuilder`: that of the
    layer. A form of attention gives it `proj`, and what the core reads.
    """

    proj: RowLinear

    def __init__(
        self,
        config: ModelConfig,
        seed: int,
        layer: int,
        tp: TensorParallel = DENSE,
        cp: ContextParallel = WHOLE,
        rebuilder: Rebuilder | None = None,
    ):
        super().__init__()
        self.rebuilder = rebuilder or Rebuilder()
        self.config, self.cp = config, cp
        self.head_dim, self.heads = config.kv_channels, config.num_attention_heads // tp.size
        self.first_head = tp.axis.rank * self.heads
        self.dropout = Dropout(config.attention_dropout, seed, "layers", layer, "attention.dropout")
        self.backend = {
            training: choose_attention(config, training=training) for training in (True, False)
        }

    def forward(
        self,
        x: Tensor,
        rotary: Rotary | None,
        mask: AttentionMask,
        state: DropoutState | None,
        places: Places | None = None,
    ) -> Tensor:
        backend = self.backend[state is not None]
        heads = partial(self._heads, rotary=rotary, backend=backend)
        attend = partial(self._attend, mask=mask, state=state, backend=backend, places=places)
        self.rebuilder.enter("qkv_linear")
        parts = self.rebuilder("qkv", heads, x)
        self.rebuilder.enter("core_attn")
        attended = self.rebuilder("core_attn", attend, *parts)
        self.rebuilder.enter("attn_proj")
        return self.proj(attended)

    def _heads(self, x: Tensor, rotary: Rotary | None, backend: str) -> tuple[Tensor, ...]:
        """What the attention core reads: the fused projection, or queries, keys and values."""
        raise NotImplementedError

    def _attend(
        self,
        *parts: Tensor,
        mask: AttentionMask,
        state: DropoutState | None,
        backend: str,
        places: Places | None,
    ) -> Tensor:
        """The attention core [s, b, n d] of what `_heads` gives."""
        core: Callable[..., Tensor] = partial(  # type: ignore[assignment]
            attention_core,
            scale=self.config.softmax_scale,
            mask=mask,
            backend=backend,
            softcap=self.config.attn_logit_softcapping,
            dropout=self.dropout,
            state=state,
            deterministic=self.config.deterministic_mode,
        )
        if places is None:
            return core(*parts, first_head=self.first_head).flatten(2)
        if places.steps:
            core = partial(self._by_blocks, steps=places.steps, state=state, backend=backend)
        return self._over_ranks(core, parts, places).flatten(2)

    def _over_ranks(
        self, core: Callable[..., Tensor], parts: tuple[Tensor, ...], places: Places
    ) -> Tensor:
        """Attention of this rank's queries [s / C, b, n, d] over all ranks' keys and values."""
        q, k, v = parts
        if self.cp.gathers and not places.steps:
            whole_k, whole_v = gather_keys(k, v, places, self.cp.axis)
            return core(q, whole_k, whole_v, first_head=self.first_head)
        axis = self.cp.heads
        if axis.size == 1:
            return core(q, k, v, first_head=self.first_head)
        whole = heads_for_sequence(q, k, v, axis)
        first_head = self.first_head + axis.rank * (self.heads // axis.size)
        return sequence_for_heads(core(*whole, first_head=first_head), axis)

    def _by_blocks(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        steps: tuple[AttentionStep, ...],
        state: DropoutState | None,
        backend: str,
        first_head: int,
    ) -> Tensor:
        """The attention core over the blocks of keys of a ring's ranks, or of all."""
        if q.is_cuda and backend in SDPA:  # which gives no log-sum-exp there
            backend = "plain"
        dropped = _dropped(self.dropout, state, backend)
        samples = dropped.pop("sample_ids", None)
        options = Options(
            self.config.softmax_scale,
            self.config.attn_logit_softcapping,
            first_head=first_head,
            deterministic=self.config.deterministic_mode,
            **dropped,
        )
        block = BlockAttention(backend, options, samples)
        if self.cp.gathers:
            return gathered_attention(q, k, v, steps, block, self.cp.axis)
        return ring_attention(q, k, v, steps, block, self.cp.ring)


class SelfAttention(AttentionForm):
    """Attention whose queries, keys and values are one projection of x."""

    def __init__(
        self,
        config: ModelConfig,
        seed: int,
        layer: int,
        tp: TensorParallel = DENSE,
        cp: ContextParallel = WHOLE,
        rebuilder: Rebuilder | None = None,
    ):
        super().__init__(config, seed, layer, tp, cp, rebuilder)
        self.groups = max(1, config.num_query_groups // tp.size)
        self.queries_per_group = self.heads // self.groups
        parameters = attention_parameters(config, f"layers.{layer}.attention", tp.sequence)
        self.qkv = ColumnLinear(parameters["qkv.weight"], parameters.get("qkv.bias"), tp)
        self.proj = RowLinear(parameters["proj.weight"], parameters.get("proj.bias"), tp)

        def norm(name: str) -> Norm:
            return Norm(under(parameters, name), config, tp)

        self.q_norm, self.k_norm = (
            (norm("q_norm"), norm("k_norm")) if config.qk_layernorm else (None, None)
        )

    def _heads(self, x: Tensor, rotary: Rotary | None, backend: str) -> tuple[Tensor, ...]:
        qkv = self.qkv(x)
        self.rebuilder.enter("core_attn")
        heads = self.groups, self.queries_per_group + 2, self.head_dim
        is_turned = rotary is None or self.config.rotary_backend == "triton"
        is_normed = self.q_norm is None or self.config.norm_backend == "triton"
        if self.q_norm is None and rotary is not None and is_turned:
            qkv, rotary = rotate_fused(qkv, rotary, heads), None
        # all that this context-parallel rank holds of the sequence, whatever part x is
        qkv = qkv.view(*qkv.shape[:2], *heads)
        if backend in OURS and is_turned and is_normed and self.cp.size == 1:
            if self.q_norm is not None:
                qkv = normed_projection(qkv, self.q_norm, self.k_norm, rotary)
            return (qkv,)
        return self._separate(qkv, rotary)

    def _separate(self, qkv: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [s, b, n, d], keys and values [s, b, g, d] of the projection [s, b, g, n/g + 2,
        d], normalised and rotated.
        """
        if self.q_norm is None and rotary is not None:
            return rotate_projection(qkv, rotary)
        q, k, v = qkv.split((self.queries_per_group, 1, 1), dim=3)
        q, k = q.flatten(2, 3), k.squeeze(3)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (apply_rotary(x, rotary, self.config.rotary_backend) for x in (q, k))
        return q, k, v.squeeze(3)


@dataclass(frozen=True)
class AttentionBytes:
    """What SelfAttention keeps and takes of a micro-batch of [seq, samples] on one rank, in bytes,
    for the plan.

    `model` has this rank's heads; `compute` and `wide` are bytes of an element of activations and
    of fp32 or fp64 statistics.
    """

    model: ModelConfig
    seq: int
    samples: int
    compute: int
    wide: int
    device: str  # cpu or cuda
    documents: bool  # attention ends at their bounds
    # ranks that hold parts of the sequence, of which this one holds `seq` positions; how many of
    # them exchange heads for positions, and how many make a ring. Without either, keys and values
    # of all are gathered.
    cp: int = 1
    exchanging: int = 1
    ring: int = 1

    @property
    def gathers(self) -> bool:
        """Whether keys and values of all ranks are gathered."""
        return self.cp > 1 and self.exchanging == self.ring == 1

    @property
    def blocks(self) -> int:
        """Blocks of keys that attention is computed over, see `steps_of`; 0 where it is not."""
        if self.ring > 1:
            return self.ring
        return self.cp if self.gathers and computes_blocks(self.model, self.device) else 0

    @property
    def widths(self) -> tuple[int, int]:
        """Elements a token of all queries, and of all keys."""
        return (
            self.model.kv_channels * self.model.num_attention_heads,
            self.model.kv_channels * self.model.num_query_groups,
        )

    @property
    def is_plain(self) -> bool:
        """Whether all scores are in memory."""
        return choose_attention(self.model, training=True) == "plain"

    @property
    def is_ours(self) -> bool:
        return self.model.attention_backend in OURS

    @property
    def rotates(self) -> bool:
        """Whether queries and keys are turned into tensors of their own: our kernel turns them in
        place.
        """
        return (
            self.model.position_embedding_type in ("rope", "yarn")
            and self.model.rotary_backend == "torch"
        )

    @property
    def takes_projection(self) -> bool:
        """Whether attention reads the fused projection itself, or a normed one of its shape, and
        writes its gradient.
        """
        is_fused = not self.model.qk_layernorm or self.norms_projection
        return self.is_ours and not self.rotates and is_fused

    @property
    def norms_projection(self) -> bool:
        """Whether the norms of queries and keys make a second tensor of the projection's shape."""
        is_fused = self.is_ours and not self.rotates and self.model.norm_backend == "triton"
        return self.model.qk_layernorm and is_fused

    @property
    def is_repeated(self) -> bool:
        """Whether torch's fused attention reads keys and values that were repeated for each query
        head.
        """
        masked = self.documents or self.model.window_size is not None
        fused = not self.is_ours and not self.is_plain
        return fused and repeats_heads(
            self.device, masked, self.model.num_attention_heads, self.model.num_query_groups
        )

    def saved(self, recomputed: frozenset[str] = frozenset()) -> int:
        """From the QKV projection's output to the output projection's input, and the mask, without
        what these modules of `Rebuilder` make again.
        """
        tokens = self.seq * self.samples
        if "core_attn" in recomputed:
            return 0 if "qkv" in recomputed else tokens * self._heads_per_token()
        if self.blocks:
            heads = 0 if "qkv" in recomputed else self._heads_for_blocks()
            return tokens * (heads + self._blocks_per_token())
        shared = self._shared_per_token() if self.cp > 1 else 0
        if "qkv" in recomputed:
            return tokens * (self._core_per_token() + max(0, shared)) + self._mask()
        return tokens * (self._saved_per_token() + shared) + self._mask()

    def leaving(
        self, recomputed: frozenset[str] = frozenset()
    ) -> tuple[list[tuple[int, int]], int]:
        """What `saved` counts, apart: (elements, bytes) of tensors, statistics and mask, and the
        bytes of the output projection's input. Of tensors that are taken together, elements of the
        smallest.
        """
        tokens, (q, k) = self.seq * self.samples, self.widths
        output = 0 if "core_attn" in recomputed else tokens * self.compute * q
        mask = self._mask() if output else 0
        sizes = [(each, self.wide * each) for each in self._statistics(recomputed)]
        rest = self.saved(recomputed) - output - mask - sum(size for _, size in sizes)
        apart = self.is_plain or self.is_widened or self.is_repeated or self.cp > 1
        projections = 0 if apart or recomputed else 2 if self.norms_projection else 1
        for width in [q + 2 * k] * projections + [q] * (2 * (projections == 1)):
            if tokens * self.compute * width <= rest:
                sizes.append((tokens * width, tokens * self.compute * width))
                rest -= sizes[-1][1]
        return [*sizes, (tokens * k, rest), (mask // self.compute, mask)], output

    def _statistics(self, recomputed: frozenset[str]) -> list[int]:
        """Elements of the log-sum-exp, and of what the norms of queries and keys keep."""
        tokens, model = self.seq * self.samples, self.model
        heads, groups = model.num_attention_heads, model.num_query_groups
        has_sums = (self.blocks or not self.is_plain) and "core_attn" not in recomputed
        found = [tokens * heads] if has_sums else []
        if model.qk_layernorm and "qkv" not in recomputed:
            each = saved_statistics(model.normalization, 1)
            if self.norms_projection:
                return [*found, tokens * (heads + 2 * groups) * each]
            return [*found, *[tokens * heads, tokens * groups] * each]
        return found

    @property
    def is_widened(self) -> bool:
        """Whether torch's fused attention computes a narrow run in fp32, as it does on a CPU."""
        narrow = self.device == "cpu" and self.compute < self.wide
        return narrow and not self.is_ours and not self.is_plain

    def _shared_per_token(self) -> int:
        """What context parallelism adds to what attention keeps for each position of this rank; may
        be negative, since parts of the projection are copied before attention reads them.
        """
        (q, k), norms = self.widths, self.model.qk_layernorm
        if self.is_plain:
            # keys and values repeated for each query head, or the output before it is exchanged
            copies = 2 * q * (self.cp - 1) if self.gathers else q
            return self.compute * copies + (self.cp - 1) * self._scores_per_token()
        if self.gathers:
            own = k if norms else q + 3 * k if self.rotates else 0
            return self.compute * (2 * k * self.cp - own)
        repeated = self.repeated
        if self.is_widened:
            return self.wide * 2 * (repeated - k)
        if norms:
            return self.compute * (q + 2 * repeated - k)
        own = 3 * k if self.rotates else 2 * k + self._gathered - q
        return self.compute * (2 * repeated - own)

    @property
    def repeated(self) -> int:
        """Elements a token of all keys, repeated where fewer heads than ranks are exchanged."""
        return max(self.widths[1], self.exchanging * self.model.kv_channels)

    def _heads_for_blocks(self) -> int:
        """What is kept of the projection and its parts, where attention is computed by blocks,
        which keeps the queries, and keys and values of its own.
        """
        model, (q, k) = self.model, self.widths
        copied = 1 < model.num_query_groups < model.num_attention_heads
        if model.qk_layernorm:
            statistics = saved_statistics(model.normalization, self.wide)
            inputs = q + 2 * k + (q if copied else 0)
            normed = 0 if self.exchanging > 1 else q
            groups = model.num_attention_heads + model.num_query_groups
            return self.compute * (inputs + normed) + statistics * groups
        if self.exchanging > 1:
            return 0
        return self.compute * (q if copied or self.rotates else q + 2 * k)

    def _blocks_per_token(self) -> int:
        """Keys and values of this rank, or of all where they are gathered, the output and the
        log-sum-exp; what was exchanged, and the output before it is.
        """
        (q, _), repeated = self.widths, self.repeated
        exchanged = 2 * q + 2 * repeated if self.exchanging > 1 else 0
        width = q + 2 * repeated * (self.cp if self.gathers else 1) + exchanged
        return self.compute * width + self.wide * self.model.num_attention_heads

    def _block_mask(self) -> int:
        """Bytes of a mask of one block of keys, as bits and as what torch's kernel adds to scores;
        our kernels have none.
        """
        masked = self.documents or self.model.window_size is not None
        if not masked or self.is_plain or self.is_ours:
            return 0
        pairs = (self.seq * self.exchanging) ** 2
        return (1 + self.wide) * pairs * (self.samples if self.documents else 1)

    def blocks_forward(self) -> int:
        """Bytes that attention by blocks takes in the forward pass: in fp32 or fp64 the output, the
        part of a block and what joins them; two blocks of keys and values on their way, or all.
        """
        (q, _), repeated = self.widths, self.repeated
        held = 2 * repeated * (1 + self.cp if self.gathers else 2)
        tokens = self.seq * self.samples
        return tokens * (self.wide * 4 * q + self.compute * held) + self._block_mask()

    def _in_block(self) -> int:
        """Bytes of what one block gives in the backward pass and of what is made for that, its
        scores where they are in memory; beside the gradient of all queries, which the first block
        begins. Where no mask is read, others are halves: of the keys, or of the queries.
        """
        (q, _), repeated = self.widths, self.repeated
        element = self.wide if self.is_widened else self.compute
        masked = self.documents or self.model.window_size is not None or self.is_plain
        count = 6 if self.model.attention_dropout > 0 else 5  # what has the scores' shape
        scores = count * self.wide * self.seq * self.model.num_attention_heads

        def given(q: int, keys: int) -> int:
            copies = self.wide * (3 * q + 2 * keys) if self.is_widened else 0
            return element * (q + 2 * keys) + copies

        most = (
            given(q, repeated)
            if masked
            else max(
                given(q, repeated) - self.wide * q,
                given(q, repeated // 2),
                given(q // 2, repeated),
            )
        )
        return self.seq * self.samples * (most + scores * self.is_plain) + self._block_mask()

    def blocks_backward(self) -> int:
        """Bytes that attention by blocks takes in the backward pass: the gradient of its output; in
        fp32 or fp64 that of the queries. Beside them in a ring blocks of keys and values on their
        way and, in fp32 or fp64, two of their gradients, of which two ranks have one while a block
        is computed. Else the gradients of all, and what Gloo takes to reduce-scatter them.
        """
        (q, _), repeated, tokens = self.widths, self.repeated, self.seq * self.samples
        own = tokens * self.compute * 2 * repeated
        kept = tokens * (self.wide * q + self.compute * q)
        if self.gathers:
            whole = own * self.cp
            received = min(whole - own, max(ROUND_BYTES, whole // 2))
            return kept + whole + max(self._in_block(), own + received)
        others = min(2, self.ring - 1)
        gradient = tokens * self.wide * 2 * repeated
        part = own if not self.is_widened else gradient
        return kept + others * own + max(others * gradient + self._in_block(), 2 * gradient + part)

    def _heads_per_token(self) -> int:
        """What `SelfAttention._heads` keeps and returns: the projection and what is made of it."""
        model, (q, k) = self.model, self.widths
        norms, rotates = model.qk_layernorm, self.rotates
        groups = model.num_query_groups * (2 if self.norms_projection else 1)
        statistics = saved_statistics(model.normalization, self.wide) if norms else 0
        width = q + 2 * k
        if self.norms_projection:
            width *= 2
        else:
            width += self._gathered if norms or not rotates else 0
            width += q + k if norms or rotates else 0
        return self.compute * width + statistics * (model.num_attention_heads + groups)

    def _core_per_token(self) -> int:
        """What the attention core makes and keeps beside what it reads."""
        model, compute, wide, (q, k) = self.model, self.compute, self.wide, self.widths
        if self.is_plain:
            # one key head: queries that lie in the projection are copied for the product
            lie = not model.qk_layernorm and not self.rotates and model.num_query_groups == 1
            copied = q if lie and model.num_attention_heads > 1 else 0
            return compute * (3 * q + copied) + self._scores_per_token()
        log_sum_exp = wide * model.num_attention_heads
        if self.is_repeated:
            return compute * 3 * q + log_sum_exp
        if self.is_widened:
            return compute * q + wide * (2 * q + 2 * k) + log_sum_exp
        return compute * q + log_sum_exp

    def _saved_per_token(self) -> int:
        model, compute, wide = self.model, self.compute, self.wide
        (q, k), heads, groups = self.widths, model.num_attention_heads, model.num_query_groups
        norms, rotates = model.qk_layernorm, self.rotates
        statistics = (heads + groups) * saved_statistics(model.normalization, wide) if norms else 0
        gathered = self._gathered
        if self.is_plain:
            return self._saved_per_token_plain() + statistics
        statistics += wide * heads  # log-sum-exp
        if self.is_repeated:
            return compute * self._repeated_width() + statistics
        if self.is_widened:
            width = q + (q + 2 * k + gathered if norms else 0)  # the output; inputs of the norms
            # the kernel's own inputs and output
            return compute * width + wide * (2 * q + 2 * k) + statistics
        if self.norms_projection:
            # values have statistics too, which nothing reads
            statistics += groups * saved_statistics(model.normalization, wide)
            return compute * (2 * (q + 2 * k) + q) + statistics
        width = q + 2 * k + q  # the fused projection, kept through its values; the output
        width += gathered if norms or not rotates else 0
        width += q + k if norms or rotates else 0
        return compute * width + statistics

    def _repeated_width(self) -> int:
        """Elements a token that are kept where keys and values are repeated."""
        q, k = self.widths
        width = 4 * q  # queries, repeated keys and values, the output
        if self.model.qk_layernorm:
            return width + q + 2 * k + self._gathered  # inputs of the norms
        if self.model.num_query_groups == 1 and not self.rotates:
            return width + 2 * k  # the projection, in which the queries are read
        return width

    @property
    def _gathered(self) -> int:
        """Elements a token of a copy of the queries, which stand between their groups' keys and
        values: our kernels read them there where nothing else does.
        """
        between = 1 < self.model.num_query_groups < self.model.num_attention_heads
        return self.widths[0] if between and not self.takes_projection else 0

    def _saved_per_token_plain(self) -> int:
        """Where all scores are in memory."""
        model, (q, k) = self.model, self.widths
        heads = model.num_attention_heads
        if model.qk_layernorm:
            # inputs of the norms; queries, repeated keys and values; the output
            width = q + 2 * k + self._gathered + 4 * q
        elif model.num_query_groups == heads and not self.rotates:
            width = q + 2 * k + 3 * q  # one head each: the values stay in the projection
        else:
            width = 4 * q
        return self.compute * width + self._scores_per_token()

    def _scores_per_token(self) -> int:
        """All that has the shape of the scores, where these are in memory."""
        model, dropped = self.model, self.model.attention_dropout > 0
        scores = self.wide  # softmax
        if model.attn_logit_softcapping is not None:
            scores += self.wide  # tanh
        if dropped:
            scores += 1  # mask
        if dropped or self.compute != self.wide:
            scores += self.compute  # the probabilities that multiply the values
        return scores * model.num_attention_heads * self.seq

    def _mask(self) -> int:
        """None when the fused attention is causal and no more, one for each sample with document
        masking. Our kernels have none.
        """
        masked = self.documents or self.gathers or self.model.window_size is not None
        if self.is_ours or self.blocks or not (self.is_plain or masked):
            return 0
        # torch's fused attention turns a boolean mask into numbers that are added to the scores
        element = 1 if self.is_plain else self.wide if self.is_widened else self.compute
        keys = self.seq * self.cp
        queries = self.seq if self.gathers else keys
        return element * queries * keys * (self.samples if self.documents else 1)

    def gradients(self) -> int:
        """Of queries, keys and values apart, then of the projection; where all scores are in
        memory, of probabilities and scores, beside those of the output and the values.
        """
        q, k = self.widths
        if self.blocks:
            return self.seq * self.samples * self.compute * 2 * (q + 2 * k)
        is_one = self.takes_projection and not self.norms_projection
        width = (1 if is_one else 2) * (q + 2 * k) + (2 * q if self.is_repeated else 0)
        per_token = self.compute * width
        if self.is_plain:
            scores = self.wide * self.seq * self.model.num_attention_heads
            per_token = max(per_token, 2 * scores + self.compute * 2 * q)
        return self.seq * self.samples * per_token
