"""The model of the plain PyTorch loop in the shape of GPT-2, with its own head."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from common import Work, tensor_of
from torch import Tensor, nn


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer whose bias begins with zeros."""
    layer = nn.Linear(inputs, outputs)
    nn.init.zeros_(layer.bias)
    return layer


class Layer(nn.Module):
    """Attention and MLP behind a norm each: x [b, s, h] -> [b, s, h]."""

    def __init__(self, work: Work):
        super().__init__()
        self.heads, self.dropout = work.heads, work.dropout
        self.norm1, self.norm2 = nn.LayerNorm(work.hidden), nn.LayerNorm(work.hidden)
        self.qkv, self.proj = linear(work.hidden, 3 * work.hidden), linear(work.hidden, work.hidden)
        self.fc1, self.fc2 = linear(work.hidden, work.ffn), linear(work.ffn, work.hidden)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        heads = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, h // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropped(self.proj(y.transpose(1, 2).reshape(b, s, h)))
        return x + self.dropped(self.fc2(F.gelu(self.fc1(self.norm2(x)))))

    def dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class GPT2(nn.Module):
    """Tokens and labels [b, s] -> the mean loss."""

    def __init__(self, work: Work):
        super().__init__()
        self.dropout = work.dropout
        self.embedding = nn.Embedding(work.vocab, work.hidden)
        self.position = nn.Embedding(work.seq, work.hidden)
        self.layers = nn.ModuleList(Layer(work) for _ in range(work.layers))
        self.norm = nn.LayerNorm(work.hidden)
        self.head = nn.Linear(work.hidden, work.vocab, bias=False)
        self.register_buffer("places", torch.arange(work.seq), persistent=False)

    @torch.no_grad()
    def load(self, start: Mapping[str, np.ndarray]) -> None:
        """Take the initial matrices; norms and biases begin as ours do."""
        self.embedding.weight.copy_(tensor_of(start, "embedding.word.weight"))
        self.position.weight.copy_(tensor_of(start, "embedding.position.weight"))
        self.head.weight.copy_(tensor_of(start, "head.weight"))
        for i, layer in enumerate(self.layers):
            attention, mlp = f"layers.{i}.attention", f"layers.{i}.mlp"
            qkv = tensor_of(start, *(f"{attention}.{part}.weight" for part in "qkv"))
            layer.qkv.weight.copy_(qkv)
            layer.proj.weight.copy_(tensor_of(start, f"{attention}.proj.weight"))
            layer.fc1.weight.copy_(tensor_of(start, f"{mlp}.up.weight"))
            layer.fc2.weight.copy_(tensor_of(start, f"{mlp}.down.weight"))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position(self.places)
        x = F.dropout(x, self.dropout, self.training)
        for layer in self.layers:
            x = layer(x)
        # as autocast does
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())
