"""A plain PyTorch training loop in the style of nanoGPT, as fast as plain PyTorch gets without
changing the mathematics; with the option `compile` under torch.compile, with the option `liger`
with Liger's kernels for norm, rotary embedding, SwiGLU and loss.

Run by benchmarks/training.py, in one process or, with torch's DistributedDataParallel over
Gloo, in several. Parameters are fp32; with bf16 the forward pass runs under autocast.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import StepClock, Work, parse_work, rank_samples, report, tensor_of
from plain_gpt2 import GPT2
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class Kernels:
    """Norm, rotary embedding, gated activation and loss of PyTorch."""

    norm: type[nn.Module] = nn.RMSNorm

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Turn q and k [b, heads, s, d] by tables [s, d / 2]."""
        return rotate(q, cos, sin), rotate(k, cos, sin)

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), labels)  # as autocast does


class LigerKernels(Kernels):
    """The same from liger-kernel."""

    def __init__(self) -> None:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction
        from liger_kernel.transformers import (
            LigerCrossEntropyLoss,
            LigerRMSNorm,
            liger_rotary_pos_emb,
        )

        self.norm, self.rotary = LigerRMSNorm, liger_rotary_pos_emb
        self.gated, self.loss = LigerSiLUMulFunction.apply, LigerCrossEntropyLoss()

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = (torch.cat((table, table), dim=-1)[None] for table in (cos, sin))
        return self.rotary(q, k, cos, sin)

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.gated(gate.contiguous(), up.contiguous())


class Attention(nn.Module):
    def __init__(self, work: Work, kernels: Kernels):
        super().__init__()
        self.work, self.kernels, self.dropout = work, kernels, work.dropout
        self.head_dim = work.hidden // work.heads
        heads = work.heads + 2 * work.key_heads
        self.qkv = nn.Linear(work.hidden, heads * self.head_dim, bias=False)
        self.proj = nn.Linear(work.hidden, work.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        (b, s, h), work = x.shape, self.work
        heads = self.qkv(x).view(b, s, -1, self.head_dim).transpose(1, 2)
        q, k, v = heads.split((work.heads, work.key_heads, work.key_heads), dim=1)
        q, k = self.kernels.rotate(q, k, cos, sin)
        grouped = work.key_heads < work.heads
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return F.dropout(self.proj(y.transpose(1, 2).reshape(b, s, h)), self.dropout, self.training)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [b, n, s, d] by tables [s, d / 2] in x's precision."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class MLP(nn.Module):
    def __init__(self, work: Work, kernels: Kernels):
        super().__init__()
        self.kernels, self.dropout = kernels, work.dropout
        self.fc1 = nn.Linear(work.hidden, 2 * work.ffn, bias=False)
        self.fc2 = nn.Linear(work.ffn, work.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.fc1(x).chunk(2, dim=-1)
        return F.dropout(self.fc2(self.kernels.activate(gate, up)), self.dropout, self.training)


class Layer(nn.Module):
    def __init__(self, work: Work, kernels: Kernels):
        super().__init__()
        self.norm1, self.norm2 = (kernels.norm(work.hidden, eps=1e-5) for _ in range(2))
        self.attention, self.mlp = Attention(work, kernels), MLP(work, kernels)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, work: Work, table_dtype: torch.dtype):
        super().__init__()
        self.dropout = work.dropout
        self.kernels = LigerKernels() if "liger" in work.options else Kernels()
        self.embedding = nn.Embedding(work.vocab, work.hidden)
        self.layers = nn.ModuleList(Layer(work, self.kernels) for _ in range(work.layers))
        self.norm = self.kernels.norm(work.hidden, eps=1e-5)
        self.head = nn.Linear(work.hidden, work.vocab, bias=False)
        half = work.hidden // work.heads // 2
        angle = torch.arange(work.seq)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angle.cos().to(table_dtype), persistent=False)
        self.register_buffer("sin", angle.sin().to(table_dtype), persistent=False)

    @torch.no_grad()
    def load(self, start: Mapping[str, np.ndarray]) -> None:
        """Take the initial weights; those of the norms are ones already."""
        self.embedding.weight.copy_(tensor_of(start, "embedding.word.weight"))
        self.head.weight.copy_(tensor_of(start, "head.weight"))
        for i, layer in enumerate(self.layers):
            attention, mlp = f"layers.{i}.attention", f"layers.{i}.mlp"
            layer.attention.qkv.weight.copy_(
                tensor_of(start, *(f"{attention}.{part}.weight" for part in "qkv"))
            )
            layer.attention.proj.weight.copy_(tensor_of(start, f"{attention}.proj.weight"))
            layer.mlp.fc1.weight.copy_(tensor_of(start, f"{mlp}.gate.weight", f"{mlp}.up.weight"))
            layer.mlp.fc2.weight.copy_(tensor_of(start, f"{mlp}.down.weight"))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = F.dropout(self.embedding(tokens), self.dropout, self.training)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.kernels.loss(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def groups(model: nn.Module) -> list[dict]:
    """The optimizer's parameter groups: weight decay for matrices alone."""
    decayed, rest = (
        [p for p in model.parameters() if p.dim() > 1],
        [p for p in model.parameters() if p.dim() == 1],
    )
    return [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


def main() -> None:
    work, start = parse_work()
    torch.set_num_threads(work.threads)
    torch.manual_seed(1234)
    bf16, rank = work.precision == "bf16", 0
    with torch.device(work.device):  # initialized there, since a CPU takes seconds for it
        model = (
            GPT2(work)
            if work.shape == "GPT-2"
            else GPT(work, torch.bfloat16 if bf16 else torch.float32)
        )
    model.load(start)
    parameters = sum(p.numel() for p in model.parameters())
    tokens = tensor_of(start, "tokens").to(work.device)
    if "compile" in work.options:
        model = torch.compile(model)
    if work.processes > 1:
        assert work.processes == work.data_parallel and work.accumulation == 1
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        # the buffers are rotary tables
        model = DistributedDataParallel(
            model, gradient_as_bucket_view=True, broadcast_buffers=False
        )
    optimizer = torch.optim.AdamW(
        groups(model), lr=work.lr, betas=(0.9, 0.95), eps=1e-8, fused=True
    )
    clock, losses = StepClock(), []
    for step in range(work.steps):
        for group in optimizer.param_groups:
            group["lr"] = work.learning_rate(step)
        total = torch.zeros((), device=work.device)
        for batch in rank_samples(tokens, step, work, rank):
            with torch.autocast(work.device, torch.bfloat16, enabled=bf16):
                loss = model(batch[:, :-1], batch[:, 1:])
            (loss / work.accumulation).backward()
            total += loss.detach() / work.accumulation
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
    report(work, clock, torch.stack(losses).tolist(), parameters, {})


if __name__ == "__main__":
    main()
