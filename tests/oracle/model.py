"""GPT and Llama in plain torch: logical weights in a dictionary, one function for the forward pass,
autograd for the rest.

b batch, s sequence, h hidden, n heads, g key/value heads, d head dim, f ffn width, v vocabulary.
Everything is computed in float64; a narrow precision is imitated by rounding each result, and each
gradient of one, to it.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from oracle import philox
from oracle.mixture import STATES, mixture, shapes_of, sparse_layers
from torch import Tensor

Weights = dict[str, Tensor]


class Batch(NamedTuple):
    """Samples of a run by number [b]; everything else [b, s]."""

    samples: np.ndarray
    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    positions: Tensor
    document_starts: Tensor


def shapes(c: Namespace) -> dict[str, tuple[int, ...]]:
    """Every weight of the model: linear weights are [out, in]."""
    h, f = c.hidden_size, c.ffn_hidden_size
    q, k = c.num_attention_heads * c.kv_channels, c.num_query_groups * c.kv_channels
    found: dict[str, tuple[int, ...]] = {"embedding.word.weight": (c.vocabulary, h)}
    if c.position_embedding_type == "learned_absolute":
        found["embedding.position.weight"] = (c.max_position_embeddings, h)

    def linear(name: str, out: int, into: int, bias: bool) -> None:
        found[f"{name}.weight"] = (out, into)
        if bias:
            found[f"{name}.bias"] = (out,)

    def norm(name: str, size: int) -> None:
        found[f"{name}.weight"] = (size,)
        if c.normalization == "LayerNorm":
            found[f"{name}.bias"] = (size,)

    for i in range(c.num_layers):
        norm(f"layers.{i}.input_norm", h)
        for part, width in (("q", q), ("k", k), ("v", k)):
            linear(f"layers.{i}.attention.{part}", width, h, c.bias or c.add_qkv_bias)
        if c.qk_layernorm:
            norm(f"layers.{i}.attention.q_norm", c.kv_channels)
            norm(f"layers.{i}.attention.k_norm", c.kv_channels)
        linear(f"layers.{i}.attention.proj", h, q, c.bias)
        norm(f"layers.{i}.mlp_norm", h)
        if sparse_layers(c)[i]:
            kept = shapes_of(c, lambda name, *size, i=i: linear(f"layers.{i}.{name}", *size, False))
            found |= {f"layers.{i}.{name}": shape for name, shape in kept.items()}
            continue
        for part in ("gate", "up") if c.gated else ("up",):
            linear(f"layers.{i}.mlp.{part}", f, h, c.bias)
        linear(f"layers.{i}.mlp.down", h, f, c.bias)
    norm("final_norm", h)
    if c.untie_embeddings_and_output_weights:
        found["head.weight"] = (c.vocabulary, h)
    return found


def initial(c: Namespace) -> Weights:
    """GPT-2's initial values: normal(0, std), residual outputs with std / sqrt(2 layers), norms 1,
    biases 0.
    """
    weights = {}
    for name, shape in shapes(c).items():
        if name.endswith(STATES[1]):
            weights[name] = torch.full(shape, 1 / c.num_experts, dtype=torch.float64)
        elif name.endswith((".bias", STATES[0])):
            weights[name] = torch.zeros(shape, dtype=torch.float64)
        elif name.endswith("norm.weight"):
            weights[name] = torch.ones(shape, dtype=torch.float64)
        else:
            output = name.endswith(("attention.proj.weight", ".down.weight"))
            std = c.init_method_std / math.sqrt(2 * c.num_layers) if output else c.init_method_std
            weights[name] = philox.normal(c.seed, name, shape, std)
    return weights


class Rounded(torch.autograd.Function):
    """x as a narrow precision holds it; its gradient likewise."""

    @staticmethod
    def forward(ctx, x: Tensor, dtype: torch.dtype, largest: list[float]) -> Tensor:
        ctx.dtype, ctx.largest = dtype, largest
        return x.to(dtype).double()

    @staticmethod
    def backward(ctx, dy: Tensor):
        ctx.largest.append(float(torch.where(dy.isfinite(), dy, 0).abs().max()))
        return dy.to(ctx.dtype).double(), None, None


class Model:
    """A forward pass of these settings. `largest` collects the greatest finite gradient before each
    narrow rounding; `routers` the losses of the last pass and the tokens of experts, by layer.
    """

    def __init__(self, c: Namespace):
        self.c = c
        self.narrow = torch.float16 if c.fp16 else torch.bfloat16 if c.bf16 else None
        self.largest: list[float] = []
        self.routers: dict[int, tuple[Tensor, Tensor]] = {}

    def round(self, x: Tensor) -> Tensor:
        return x if self.narrow is None else Rounded.apply(x, self.narrow, self.largest)

    def losses(self, weights: Weights, batch: Batch, training: bool) -> tuple[Tensor, Tensor]:
        """(cross-entropy, log-sum-exp of the logits) of each token [b, s]."""
        c = self.c
        if self.narrow is not None:  # the gradients of weights stay wide
            weights = {
                name: w + (w.detach().to(self.narrow).double() - w.detach())
                for name, w in weights.items()
            }
        x = self.round(F.embedding(batch.tokens, weights["embedding.word.weight"]))
        if "embedding.position.weight" in weights:
            x = self.round(x + F.embedding(batch.positions, weights["embedding.position.weight"]))
        x = self.dropout(x, "embedding.dropout", batch, training)
        for i in range(c.num_layers):
            own = {
                name.removeprefix(f"layers.{i}."): w
                for name, w in weights.items()
                if name.startswith(f"layers.{i}.")
            }
            see = visible(c, batch, i)
            attended = self.attention(own, i, self.norm(own, "input_norm", x), batch, see, training)
            x = self.round(
                x + self.dropout(attended, f"layers/{i}/attention.output_dropout", batch, training)
            )
            y = self.norm(own, "mlp_norm", x)
            if sparse_layers(c)[i]:
                jitter = self.jitter(y, f"layers.{i}.mlp.router/jitter", batch, training)
                mlp = partial(self.mlp, own)
                y, *self.routers[i] = mixture(c, own, y, jitter, mlp)
            else:
                y = self.mlp(own, "mlp", y)
            x = self.round(x + self.dropout(y, f"layers/{i}/mlp.output_dropout", batch, training))
        x = self.norm(weights, "final_norm", x)
        logits = self.round(x @ weights.get("head.weight", weights["embedding.word.weight"]).T)
        logits = softcap(logits, c.final_logit_softcapping)
        lse = torch.logsumexp(logits, -1)
        return lse - logits.gather(-1, batch.labels[..., None]).squeeze(-1), lse

    def linear(self, weights: Weights, name: str, x: Tensor) -> Tensor:
        return self.round(F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias")))

    def norm(self, weights: Weights, name: str, x: Tensor) -> Tensor:
        if self.c.normalization == "LayerNorm":
            x = x - x.mean(-1, keepdim=True)
        y = x / torch.sqrt(x.square().mean(-1, keepdim=True) + self.c.norm_epsilon)
        return self.round(y * weights[f"{name}.weight"] + weights.get(f"{name}.bias", 0))

    def dropout(self, x: Tensor, name: str, batch: Batch, training: bool) -> Tensor:
        """Of hidden states [b, s, h]: counter (sample, position, channel // 8, 0)."""
        if not training or self.c.hidden_dropout == 0:
            return x
        rows = [batch.samples[:, None], np.arange(x.shape[1])[None, :]]
        return self.round(
            x * philox.hidden_dropout(self.c.seed, name, rows, x.shape[2], self.c.hidden_dropout)
        )

    def jitter(self, x: Tensor, name: str, batch: Batch, training: bool) -> Tensor:
        """Of what a router reads [b, s, h], counted as dropout of hidden states."""
        if not training or self.c.moe_input_jitter_eps == 0:
            return torch.ones(())
        rows = [batch.samples[:, None], np.arange(x.shape[1])[None, :]]
        return philox.jitter(self.c.seed, name, rows, x.shape[2], self.c.moe_input_jitter_eps)

    def attention(
        self, weights: Weights, layer: int, x: Tensor, batch: Batch, see: Tensor, training: bool
    ) -> Tensor:
        c = self.c
        b, s, _ = x.shape
        n, g, d = c.num_attention_heads, c.num_query_groups, c.kv_channels
        q = self.linear(weights, "attention.q", x).view(b, s, n, d)
        k = self.linear(weights, "attention.k", x).view(b, s, g, d)
        v = self.linear(weights, "attention.v", x).view(b, s, g, d)
        if c.qk_layernorm:
            q, k = (
                self.norm(weights, "attention.q_norm", q),
                self.norm(weights, "attention.k_norm", k),
            )
        if c.rotates and not listed(c.no_rope_freq, layer, every=True):
            q, k = (self.round(rotate(y, batch.positions, *frequencies(c))) for y in (q, k))
        group_of_head = torch.arange(n) // (n // g)
        q, k, v = (
            q.transpose(1, 2),
            k[:, :, group_of_head].transpose(1, 2),
            v[:, :, group_of_head].transpose(1, 2),
        )
        scores = softcap(q @ k.transpose(2, 3) / math.sqrt(d), c.attn_logit_softcapping)
        shares = torch.softmax(scores.masked_fill(~see[:, None], -math.inf), -1)  # [b, n, s, s]
        if training and c.attention_dropout > 0:
            rows = [
                batch.samples[:, None, None],
                np.arange(n)[None, :, None],
                np.arange(s)[None, None, :],
            ]
            shares = shares * philox.dropout(
                c.seed, f"layers/{layer}/attention.dropout", rows, s, c.attention_dropout
            )
        return self.linear(
            weights, "attention.proj", self.round(shares @ v).transpose(1, 2).reshape(b, s, n * d)
        )

    def mlp(self, weights: Weights, name: str, x: Tensor) -> Tensor:
        act = ACTIVATIONS[self.c.activation]
        up = self.linear(weights, f"{name}.up", x)
        y = act(self.linear(weights, f"{name}.gate", x)) * up if self.c.gated else act(up)
        return self.linear(weights, f"{name}.down", self.round(y))


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu-tanh": lambda x: (
        0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    ),
    "swiglu": lambda x: x * torch.sigmoid(x),
    "geglu": gelu,
    "squared-relu": lambda x: torch.relu(x) ** 2,
}


def softcap(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def listed(words: str | None, layer: int, *, every: bool) -> bool:
    """Whether a layer is in a list with 1 for each that is, or of a number N: every N-th layer is,
    counted from 1, or every layer but these is. None: no layer, or every one.
    """
    if words is None:
        return not every
    if words.isdigit():
        return ((layer + 1) % int(words) == 0) is every
    return words.strip("[]").split(",")[layer] == "1"


def visible(c: Namespace, batch: Batch, layer: int) -> Tensor:
    """[b, s, s], True where a query (row) of a layer sees a key: none later, the window's latest,
    none before its document's start.
    """
    at = torch.arange(batch.tokens.shape[1])
    query, key = at[:, None], at[None, :]
    see = key <= query
    if c.window_size is not None and listed(c.window_attn_skip_freq, layer, every=False):
        see = see & (key > query - c.window_size)
    if c.reset_attention_mask:
        return see & (key >= batch.document_starts[:, :, None])
    return see.expand(len(batch.tokens), -1, -1)


def frequencies(c: Namespace) -> tuple[Tensor, float]:
    """Radians per position of each pair of channels, and the factor on cosine and sine."""
    r = int(c.kv_channels * c.rotary_percent) // 2 * 2
    pair = torch.arange(r // 2, dtype=torch.float64)
    theta = c.rotary_base ** (-2 * pair / r)
    if c.rotary_seq_len_interpolation_factor:
        theta = theta / c.rotary_seq_len_interpolation_factor
    length, factor = c.rope_original_max_position_embeddings, c.rope_scaling_factor
    if (
        c.use_rope_scaling
    ):  # Llama 3.1: long wavelengths are divided, short ones kept, those between blended
        smooth = (length * theta / (2 * math.pi) - c.rope_low_freq_factor) / (
            c.rope_high_freq_factor - c.rope_low_freq_factor
        )
        smooth = smooth.clamp(0, 1)
        return (1 - smooth) * theta / factor + smooth * theta, 1.0
    if c.position_embedding_type == "yarn":  # Peng et al. 2023

        def pair_that_turns(rotations: float) -> float:
            return r * math.log(length / (2 * math.pi * rotations)) / (2 * math.log(c.rotary_base))

        low = max(math.floor(pair_that_turns(c.yarn_beta_fast)), 0)
        high = min(math.ceil(pair_that_turns(c.yarn_beta_slow)), r - 1)
        ramp = ((pair - low) / max(high - low, 0.001)).clamp(0, 1)
        return ramp * theta / factor + (1 - ramp) * theta, max(1.0, 0.1 * math.log(factor) + 1)
    return theta, 1.0


def rotate(x: Tensor, positions: Tensor, theta: Tensor, scale: float) -> Tensor:
    """x [b, s, n, d]: channels i and i + r / 2 of the first r turn as one complex number; the
    others stay.
    """
    half = len(theta)
    angle = positions[:, :, None, None] * theta
    turn = torch.polar(torch.full_like(angle, scale), angle)
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * turn
    return torch.cat([turned.real, turned.imag, x[..., 2 * half :]], -1)
