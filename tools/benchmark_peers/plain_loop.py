"""A plain PyTorch training loop in the style of nanoGPT, as fast as plain eager PyTorch gets without changing the mathematics.

Run by tools/benchmark_training.py, in one process. Parameters are fp32; with bf16 the forward pass runs under autocast.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from common import StepClock, Work, parse_work, report, tokens_of
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, work: Work):
        super().__init__()
        self.heads, self.dropout = work.heads, work.dropout
        self.qkv = nn.Linear(work.hidden, 3 * work.hidden, bias=False)
        self.proj = nn.Linear(work.hidden, work.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.heads, h // self.heads).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.dropout(self.proj(y.transpose(1, 2).reshape(b, s, h)), self.dropout, self.training)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [b, n, s, d] by tables [s, d / 2] in x's precision."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class MLP(nn.Module):
    def __init__(self, work: Work):
        super().__init__()
        self.dropout = work.dropout
        self.fc1 = nn.Linear(work.hidden, 2 * work.ffn, bias=False)
        self.fc2 = nn.Linear(work.ffn, work.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.fc1(x).chunk(2, dim=-1)
        return F.dropout(self.fc2(F.silu(gate) * up), self.dropout, self.training)


class Layer(nn.Module):
    def __init__(self, work: Work):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(work.hidden, eps=1e-5), nn.RMSNorm(work.hidden, eps=1e-5)
        self.attention, self.mlp = Attention(work), MLP(work)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, work: Work, table_dtype: torch.dtype):
        super().__init__()
        self.dropout = work.dropout
        self.embedding = nn.Embedding(work.vocab, work.hidden)
        self.layers = nn.ModuleList(Layer(work) for _ in range(work.layers))
        self.norm = nn.RMSNorm(work.hidden, eps=1e-5)
        self.head = nn.Linear(work.hidden, work.vocab, bias=False)
        half = work.hidden // work.heads // 2
        angle = torch.arange(work.seq)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angle.cos().to(table_dtype), persistent=False)
        self.register_buffer("sin", angle.sin().to(table_dtype), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                residual_output = name.endswith(("proj.weight", "fc2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * work.layers) if residual_output else 0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = F.dropout(self.embedding(tokens), self.dropout, self.training)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def learning_rate(step: int, work: Work) -> float:
    """Linear warm-up, then cosine to zero."""
    if step < work.lr_warmup:
        return work.lr * (step + 1) / work.lr_warmup
    return 0.5 * work.lr * (1 + math.cos(math.pi * (step - work.lr_warmup) / (work.steps - work.lr_warmup)))


def main() -> None:
    work = parse_work()
    torch.set_num_threads(work.threads)
    torch.manual_seed(1234)
    bf16 = work.precision == "bf16"
    model = GPT(work, torch.bfloat16 if bf16 else torch.float32)
    decayed, rest = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=work.lr, betas=(0.9, 0.95), eps=1e-8, fused=True)
    data = tokens_of(work)
    clock, losses, sample = StepClock(), [], 0
    for step in range(work.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, work)
        total = 0.0
        for _ in range(work.accumulation):
            batch = data[sample : sample + work.micro_batch]
            sample += work.micro_batch
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = model(batch[:, :-1], batch[:, 1:])
            (loss / work.accumulation).backward()
            total += loss.item() / work.accumulation
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
    report(work, clock, losses, sum(p.numel() for p in model.parameters()), {})


if __name__ == "__main__":
    main()
