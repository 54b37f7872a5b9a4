"""Tensors of Hugging Face's models, made of ours."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.interop.huggingface_rules import Rule


def made_of(rule: Rule, held: dict[str, Tensor]) -> Tensor:
    """Their tensor of one rule."""
    value = torch.cat([held[name] for name in rule.ours])
    if rule.matrices is not None:
        value = value.unflatten(0, (rule.matrices, -1))
    return (value.t() if rule.transposed else value).contiguous()
