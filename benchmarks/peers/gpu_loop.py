"""A plain PyTorch training loop on a GPU, with Liger's norm, rotary embedding, SwiGLU and loss
where --liger is given: fp32 parameters under bf16 autocast, torch's fused attention and AdamW.

Run by benchmarks/training_gpu.py, which reads the rows that it writes. On a CPU only to try it.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Kernels:
    """What computes norm, rotary embedding, gated activation and loss: PyTorch or Liger."""

    def __init__(self, liger: bool):
        self.liger = liger
        if liger:
            from liger_kernel.ops.swiglu import LigerSiLUMulFunction
            from liger_kernel.transformers import (
                LigerCrossEntropyLoss,
                LigerRMSNorm,
                liger_rotary_pos_emb,
            )

            self.norm_class, self.rotary = LigerRMSNorm, liger_rotary_pos_emb
            self.gated, self.loss = LigerSiLUMulFunction.apply, LigerCrossEntropyLoss()

    def norm(self, width: int) -> nn.Module:
        return self.norm_class(width, eps=1e-5) if self.liger else nn.RMSNorm(width, eps=1e-5)

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """q [b, n, s, d], k [b, g, s, d] by tables [1, s, d] of two equal halves."""
        if self.liger:
            return self.rotary(q, k, cos, sin)
        return turned(q, cos, sin), turned(k, cos, sin)

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.gated(gate, up) if self.liger else F.silu(gate) * up

    def mean_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        logits, labels = logits.flatten(0, 1), labels.flatten()
        return self.loss(logits, labels) if self.liger else F.cross_entropy(logits.float(), labels)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Layer(nn.Module):
    def __init__(self, given: argparse.Namespace, kernels: Kernels):
        super().__init__()
        h, self.given, self.kernels = given.hidden, given, kernels
        self.width = h // given.heads
        self.norm1, self.norm2 = kernels.norm(h), kernels.norm(h)
        self.qkv = nn.Linear(h, (given.heads + 2 * given.groups) * self.width, bias=False)
        self.proj = nn.Linear(h, h, bias=False)
        self.fc1 = nn.Linear(h, 2 * given.ffn, bias=False)
        self.fc2 = nn.Linear(given.ffn, h, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        gate, up = self.fc1(self.norm2(x)).chunk(2, dim=-1)
        return x + self.fc2(self.kernels.activate(gate.contiguous(), up.contiguous()))

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        (b, s, h), given = x.shape, self.given
        heads = self.qkv(x).view(b, s, -1, self.width).transpose(1, 2)
        q, k, v = heads.split((given.heads, given.groups, given.groups), dim=1)
        q, k = self.kernels.rotate(q, k, cos, sin)
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=given.groups < given.heads
        )
        return self.proj(y.transpose(1, 2).reshape(b, s, h))


class GPT(nn.Module):
    def __init__(self, given: argparse.Namespace, kernels: Kernels):
        super().__init__()
        self.kernels = kernels
        self.embedding = nn.Embedding(given.vocab, given.hidden)
        self.layers = nn.ModuleList(Layer(given, kernels) for _ in range(given.layers))
        self.norm = kernels.norm(given.hidden)
        self.head = nn.Linear(given.hidden, given.vocab, bias=False)
        half = given.hidden // given.heads // 2
        angle = torch.arange(given.seq)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        angle = torch.cat((angle, angle), dim=-1)[None]
        self.register_buffer("cos", angle.cos().bfloat16(), persistent=False)
        self.register_buffer("sin", angle.sin().bfloat16(), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.kernels.mean_loss(self.head(self.norm(x)), labels)


def parse() -> argparse.Namespace:
    """The command line: sizes of the model and the step."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = ("layers", "hidden", "ffn", "heads", "groups", "vocab", "seq", "samples", "steps")
    for name in names:
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--liger", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Train on random tokens and write a row a step."""
    given = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(1234)
    with device:
        model = GPT(given, Kernels(given.liger))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    data = torch.randint(0, given.vocab, (given.steps, given.samples, given.seq + 1))
    rows: list[dict[str, Any]] = []
    before = time.perf_counter()
    for step, batch in enumerate(data.to(device)):
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        value, now = loss.item(), time.perf_counter()  # waits for the device
        row = {"iteration": step + 1, "lm loss": value, "iteration-time": now - before}
        if device.type == "cuda":
            row["mem-max-allocated-bytes"] = torch.cuda.max_memory_allocated()
        rows.append(row)
        before = time.perf_counter()
    with open(given.out, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
