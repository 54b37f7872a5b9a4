"""Operands of attention in Gluon, for both of its passes."""

from __future__ import annotations

import torch
from megatron.kernels.attention_masks import AttentionMask, attention_mask
from torch import Tensor


def starts_of_documents(s: int, b: int, ends: tuple[int, ...]) -> torch.Tensor:
    """[b, s]: the first row of each row's document; those of sample i end i rows later."""
    at = torch.arange(s)
    rows = []
    for i in range(b):
        starts = torch.zeros_like(at)
        for end in ends:
            starts = torch.where(at >= end + i, end + i, starts)
        rows.append(starts)
    return torch.stack(rows)


def make(case: tuple) -> tuple[Tensor, Tensor, Tensor, AttentionMask, int]:
    """(q, k, v as strided views, mask, processors) of a case (s, t, b, n, g, d, dtype, mask,
    processors).
    """
    s, t, b, n, g, d, dtype, has, processors = case
    generator = torch.Generator().manual_seed(s + d)
    q, k, v = (
        torch.randn(length, b, heads + 1, d, generator=generator).to(dtype)[:, :, :heads]
        for length, heads in ((s, n), (t, g), (t, g))
    )
    mask = dict(has)
    if ends := mask.pop("documents", None):
        mask["document_starts"] = starts_of_documents(s, b, ends)
    return q, k, v, attention_mask(s, t, **mask), processors
