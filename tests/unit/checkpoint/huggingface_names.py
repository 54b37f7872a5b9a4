"""Tensors of Hugging Face's models, made of ours."""

from __future__ import annotations

from megatron.tools._convert.huggingface_rules import Rule, row_runs
from torch import Tensor


def made_of(rule: Rule, held: dict[str, Tensor]) -> Tensor:
    """Their tensor of one rule."""
    parts = [held[name] for name in rule.ours]
    value = parts[0].new_empty((sum(map(len, parts)), *parts[0].shape[1:]))
    for part in row_runs(rule, len(value)):
        rows = held[part.name][part.start : part.start + part.rows]
        value[part.first :: part.stride][: part.rows] = rows - rule.offset
    if rule.matrices is not None:
        value = value.unflatten(0, (rule.matrices, -1))
    return (value.t() if rule.transposed else value).contiguous()
