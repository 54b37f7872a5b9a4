"""Rotary position embedding with linear, Llama-3 and YaRN scaling; positions are an argument. s
sequence, b batch, n heads, d head dim.

Channels i and i + r/2 of the r rotating ones form a pair (the "halves" convention of GPT-NeoX and
Hugging Face). Sources: Su et al. 2021 (RoPE); Chen et al. 2023 (linear); Llama 3.1 release
(by-parts); Peng et al. 2023 (YaRN).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron.config.model import ModelConfig, yarn_scale
from megatron.kernels.rotary import rotary_

Rotary = tuple[Tensor, Tensor]


def _kept_by_parts(config: ModelConfig, frequency: Tensor) -> Tensor:
    """Llama 3: the share of each pair's frequency [r / 2] that is not divided by the factor."""
    original = config.rope_original_length
    rotations = original * frequency / (2 * math.pi)  # full turns over the original length
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    return ((rotations - low) / (high - low)).clamp(0, 1)


def _kept_by_yarn(config: ModelConfig, rotating: int) -> Tensor:
    """YaRN: the share of each pair's frequency [r / 2] that is not divided by the factor."""
    original = config.rope_original_length

    def pair_with(rotations: float) -> float:
        return (
            rotating
            * math.log(original / (rotations * 2 * math.pi))
            / (2 * math.log(config.rotary_base))
        )

    # Pairs below `low` turn often over the original length and keep their frequency, those above
    # `high` are interpolated; between them is a linear ramp.
    low = max(math.floor(pair_with(config.yarn_beta_fast)), 0)
    high = min(math.ceil(pair_with(config.yarn_beta_slow)), rotating - 1)
    pair = torch.arange(0, rotating, 2, dtype=torch.float64) / 2
    return 1 - ((pair - low) / max(high - low, 0.001)).clamp(0, 1)


def inverse_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Radians per position of each pair [r / 2] in float64; the factor on cos and sin (YaRN's)."""
    rotating = config.rotary_width
    channel = torch.arange(0, rotating, 2, dtype=torch.float64)
    # theta_i = base^(-2i / r)
    frequency = config.rotary_base ** -(channel / rotating)
    if config.rotary_seq_len_interpolation_factor:
        # position interpolation (Chen et al.): the same factor for all pairs
        frequency = frequency / config.rotary_seq_len_interpolation_factor
    factor, temperature = config.rope_factor, 1.0
    if config.position_embedding_type == "yarn":
        keep = _kept_by_yarn(config, rotating)
        temperature = yarn_scale(factor, config.mscale) / yarn_scale(factor, config.mscale_all_dim)
    elif config.use_rope_scaling:
        keep = _kept_by_parts(config, frequency)
    else:
        return frequency, temperature
    return keep * frequency + (1 - keep) * frequency / factor, temperature


class RotaryTables:
    """Makes the tables of a model's micro-batches, in fp32 (fp64 for float64)."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype):
        self.config = config
        self.wide = torch.promote_types(dtype, torch.float32)
        # a copy for each micro-batch would make the host wait for all that a GPU has queued
        self.frequencies: dict[torch.device, tuple[Tensor, float]] = {}

    def table(self, positions: Tensor) -> Rotary:
        """(cos, cos) and (-sin, sin) over the two halves [s, b, 1, r], from positions [s, b]."""
        if positions.device not in self.frequencies:
            frequency, scale = inverse_frequencies(self.config)
            self.frequencies[positions.device] = frequency.to(positions.device), scale
        frequency, scale = self.frequencies[positions.device]
        # [s, b, 1, r / 2] in fp64: an fp32 angle of 100,000 rad is off by up to 0.004.
        angle = positions[..., None, None].double() * frequency
        cos, sin = (angle.cos() * scale).to(self.wide), (angle.sin() * scale).to(self.wide)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """x * cos + (x with its halves swapped) * sin in three passes; direction -1 turns back."""
    width = cos.shape[-1]
    # Under --rotary-percent channels from `width` on do not turn.
    turning = x if width == x.shape[-1] else x[..., :width]
    first, second = turning.chunk(2, dim=-1)
    swapped = torch.cat((second, first), dim=-1)
    # Out of place, and converted only to another dtype: torch.compile in 2.11 loses the gradient
    # of an output that is the same tensor as an intermediate result (pytorch issue 180642).
    y = torch.addcmul(turning * cos, swapped, sin, value=direction)
    y = y if y.dtype == x.dtype else y.to(x.dtype)
    return y if turning is x else torch.cat((y, x[..., width:]), dim=-1)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1)

    @staticmethod
    def backward(ctx, dy: Tensor):
        cos, sin = ctx.saved_tensors
        # the transpose of a rotation turns the other way
        return _rotate(dy, cos, sin, -1), None, None


class RotaryOfProjection(torch.autograd.Function):
    """Queries [s, b, g m, d] and keys [s, b, g, d] of the projection qkv [s, b, g, m + 2, d],
    rotated, and its values [s, b, g, d] as they are.
    """

    @staticmethod
    def forward(ctx, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        # The last two of the m + 2 heads of a group are its key and its value.
        q = _rotate(qkv[:, :, :, :-2], cos.unsqueeze(2), sin.unsqueeze(2), 1)
        k = _rotate(qkv[:, :, :, -2], cos, sin, 1)
        return q.flatten(2, 3), k, qkv[:, :, :, -1]

    @staticmethod
    def backward(ctx, dq: Tensor, dk: Tensor, dv: Tensor):
        cos, sin = ctx.saved_tensors
        # the transpose of a rotation turns the other way
        dq, dk = _rotate(dq, cos, sin, -1), _rotate(dk, cos, sin, -1)
        # The gradient of the projection in one concatenation: per group [queries | key | value].
        parts = dq.unflatten(2, (dk.shape[2], -1)), dk.unsqueeze(3), dv.unsqueeze(3)
        return torch.cat(parts, dim=3), None, None


class RotaryInPlace(torch.autograd.Function):
    """Turns the first `turning` heads of each group of x in place, which nothing else may read: [s,
    b, ...] seen as [s, b, *heads] = [s, b, g, n, d].
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int, int], turning: int
    ) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.heads, ctx.turning = heads, turning
        # autograd forbids to write into x where a layer's function returned it as a view
        y = x.detach()
        rotary_(y.view(*y.shape[:2], *heads)[:, :, :, :turning], cos, sin, 1)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):
        cos, sin = ctx.saved_tensors
        # what attention's backward made for this alone: as it is, it is turned in place
        dy = dy.contiguous()
        rotary_(dy.view(*dy.shape[:2], *ctx.heads)[:, :, :, : ctx.turning], cos, sin, -1)
        return dy, None, None, None, None


def apply_rotary(x: Tensor, rotary: Rotary, backend: str = "torch") -> Tensor:
    """Rotate x [s, b, n, d], in place with backend triton."""
    return (
        RotaryInPlace.apply(x, *rotary, (x.shape[2], 1, x.shape[3]), 1)
        if backend == "triton"
        else _Rotary.apply(x, *rotary)
    )


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [s, b, n, r], of which channels 2i and 2i + 1 are a pair, by the table: first the
    first channels of all pairs, then the second ones.
    """
    half = x.shape[-1] // 2
    # the real parts of all pairs, then the imaginary parts
    turned = _turn(x[..., 0::2], x[..., 1::2], cos[..., :half], sin[..., half:])
    return torch.cat(turned, dim=-1).to(x.dtype)


def rotate_pairs_back(dy: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The adjoint of `rotate_pairs`."""
    half = dy.shape[-1] // 2
    # by -phi, whose sine is the first half of the table; each pair back in neighbouring channels
    turned = _turn(dy[..., :half], dy[..., half:], cos[..., :half], sin[..., :half])
    return torch.stack(turned, dim=-1).flatten(-2).to(dy.dtype)


def _turn(real: Tensor, imaginary: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """(real + i imaginary) e^(i phi)."""
    return real * cos - imaginary * sin, imaginary * cos + real * sin
