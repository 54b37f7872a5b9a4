"""What the peer scripts share: the work to do, the weights and tokens to start from, and the line
they answer with.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

STEPS_IN_TURNS = "STEPS_IN_TURNS"  # the variable of StepClock


@dataclass(frozen=True)
class Work:
    """One measurement: a GPT with an untied head, its layout and its steps. In the Llama shape it
    has rotary positions, RMSNorm, SwiGLU and no biases, in the GPT-2 shape learned positions,
    LayerNorm, GELU and biases. With experts every layer has them in the place of its MLP: the
    softmax of the chosen logits weighs them, all tokens are taken, and no loss balances them.
    """

    shape: str = "Llama"  # or GPT-2
    layers: int = 6
    hidden: int = 256
    heads: int = 8
    query_groups: int = 0  # key and value heads; 0: as many as heads
    ffn: int = 688
    experts: int = 0  # of each layer; 0: MLPs
    topk: int = 2  # experts of a token
    expert_ffn: int = 0
    seq: int = 256
    vocab: int = 8192
    micro_batch: int = 4  # of each data-parallel rank
    accumulation: int = 1
    data_parallel: int = 1
    expert_parallel: int = 1  # a part of the data-parallel ranks
    tensor_parallel: int = 1
    sequence_parallel: int = 0  # 0 or 1
    pipeline_parallel: int = 1  # 1 or 2
    first_stage_layers: int = 0  # with two stages
    schedule: str = "1f1b"  # ours; peers' is 1F1B
    dropout: float = 0.0
    precision: str = "fp32"  # fp32 or bf16
    steps: int = 30
    warmup: int = 10  # steps before the clock starts
    lr: float = 1e-3
    min_lr: float = 0.0
    lr_warmup: int = 5
    threads: int = 2  # of each process
    device: str = "cpu"  # or cuda
    options: str = ""  # of a peer, separated by commas

    @property
    def key_heads(self) -> int:
        return self.query_groups or self.heads

    @property
    def processes(self) -> int:
        return self.data_parallel * self.tensor_parallel * self.pipeline_parallel

    @property
    def step_samples(self) -> int:
        return self.micro_batch * self.accumulation * self.data_parallel

    @property
    def step_tokens(self) -> int:
        return self.step_samples * self.seq

    @property
    def timed_tokens(self) -> int:
        return (self.steps - self.warmup) * self.step_tokens

    def arguments(self) -> list[str]:
        """The command line that parse_work() reads back."""
        return [
            word
            for field in fields(self)
            for word in (f"--{field.name}", str(getattr(self, field.name)))
        ]

    def learning_rate(self, step: int) -> float:
        """Of step 0, 1, ...: linear warm-up, then cosine to min_lr at the last step."""
        done = step + 1
        if done <= self.lr_warmup:
            return self.lr * done / self.lr_warmup
        share = (done - self.lr_warmup) / (self.steps - self.lr_warmup)
        return self.min_lr + 0.5 * (self.lr - self.min_lr) * (1 + math.cos(math.pi * share))


@dataclass(frozen=True)
class TrainedWork(Work):
    """A whole training run of the quickstart's model and batch (scripts/quickstart.sh)."""

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    ffn: int = 320  # of the Llama shape; the GPT-2 shape has 4 x hidden without a gate
    vocab: int = 2048
    accumulation: int = 2
    steps: int = 600
    warmup: int = 20
    lr: float = 4e-3
    lr_warmup: int = 60
    threads: int = 1
    min_lr: float = 4e-4
    weight_decay: float = 0.1  # of matrices; norms and biases have none
    seed: int = 1  # of the initial weights and of the order of the data
    each_once: int = 0  # 1: windows are drawn without replacement by a trainer that does not do so
    initial_std: float = 0.02  # of every matrix; divided by sqrt(2 x layers) for residual outputs
    same_start: int = 0  # 1: begin with our weights and read our windows in our order


def parse_work(kind: type[Work] = Work) -> tuple[Work, Mapping[str, np.ndarray]]:
    """Read the command line of a peer script: the work, and the tensors that go with it. Those of
    start.py are initial weights (logical tensors by name) and `tokens`.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("start", type=Path, help="a folder")
    for field in fields(kind):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    args = vars(parser.parse_args())
    start = args.pop("start")
    index = json.loads((start / "index.json").read_text())
    tensors, offset = {}, 0
    for name, (dtype, shape) in index.items():
        # copy on write: an 8B model's layers are not held in memory twice
        mapped = np.memmap(start / "tensors.bin", dtype, "c", offset, tuple(shape))
        tensors[name] = mapped
        offset += mapped.nbytes
    return kind(**args), tensors


def tensor_of(start: Mapping[str, np.ndarray], *names: str) -> Tensor:
    """Concatenate logical tensors of the start along dim 0; a single one is not copied."""
    parts = [torch.from_numpy(start[name]) for name in names]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@torch.no_grad()
def validation_loss(logits: Callable[[Tensor], Tensor], rows: Tensor) -> float:
    """Mean loss per token over rows [n, seq + 1] of tokens, fp32 logits [b, seq, vocab], summed in
    float64.
    """
    total = 0.0
    for batch in rows.split(8):
        found = logits(batch[:, :-1].contiguous()).float().flatten(0, 1)
        losses = F.cross_entropy(found, batch[:, 1:].flatten(), reduction="none")
        total += float(losses.double().sum())
    return total / rows[:, 1:].numel()


def rank_samples(tokens: Tensor, step: int, work: Work, rank: int) -> tuple[Tensor, ...]:
    """The micro-batches [micro_batch, seq + 1] of a step for a data-parallel rank, of tokens
    [samples, seq + 1].
    """
    batch = tokens[step * work.step_samples : (step + 1) * work.step_samples]
    return batch.view(work.accumulation, work.data_parallel, work.micro_batch, -1)[:, rank].unbind()


def token_batches(tokens: Tensor, work: Work) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """The micro-batches of one process, in order, as torchtitan takes them."""
    for step in range(work.steps):
        for batch in rank_samples(tokens, step, work, 0):
            yield {"input": batch[:, :-1]}, batch[:, 1:]


def interleaved_rotary(weight: Tensor, work: Work) -> Tensor:
    """A query or key weight whose rotary pairs are half a head apart, for a model whose rotary
    pairs are neighbouring channels.
    """
    halves = weight.view(-1, 2, work.hidden // work.heads // 2, work.hidden)
    return halves.transpose(1, 2).reshape(weight.shape)


class StepClock:
    """Notes the time after each optimizer step of this process, whichever trainer takes it; on a
    GPU by an event, without waiting for it. A step may be that of several optimizers. Under
    STEPS_IN_TURNS the steps after the first are taken in turns (turns.py).
    """

    def __init__(self, optimizers: int = 1):
        self.optimizers, self.ticks = optimizers, 0
        self.stamps: list[tuple[float, float]] = []  # elapsed, CPU seconds of this process
        self.events: list[torch.cuda.Event] = []
        self.rates: list[float] = []  # the learning rate of each step
        self.turns = None
        if STEPS_IN_TURNS in os.environ:
            from turns import Turns

            self.turns = Turns()
        register_optimizer_step_post_hook(self.tick)

    def tick(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.ticks += 1
        if self.ticks % self.optimizers:
            return
        if torch.cuda.is_initialized():
            self.events.append(torch.cuda.Event(enable_timing=True))
            self.events[-1].record()
        self.stamps.append((time.perf_counter(), time.process_time()))
        self.rates.append(optimizer.param_groups[0]["lr"])
        if self.turns is not None:
            next(self.turns, None)

    def times(self) -> list[tuple[float, float]]:
        """Elapsed and CPU seconds at the end of each step; a GPU's events give its elapsed ones."""
        if not self.events:
            return self.stamps
        self.events[-1].synchronize()
        milliseconds = [self.events[0].elapsed_time(event) for event in self.events]
        return [(ms / 1e3, cpu) for ms, (_, cpu) in zip(milliseconds, self.stamps, strict=True)]

    def rate_error(self, work: Work) -> float:
        """The largest difference of a step's learning rate from that of the work, by the peak."""
        wanted = map(work.learning_rate, range(work.steps))
        return max(abs(a - b) for a, b in zip(self.rates, wanted, strict=True)) / work.lr


def report(
    work: Work,
    clock: StepClock,
    losses: list[float],
    parameters: int,
    versions: dict[str, str],
    **more: float,
) -> None:
    """Print the answer as JSON on its own line: throughput from the end of the last warm-up
    step to the end of the last step, and `more`.

    With several processes rank 0 prints the sum of their CPU seconds and the mean of their losses;
    a stage without the head hands in zeros.
    """
    stamps = clock.times()
    assert len(stamps) == work.steps, f"{len(stamps)} steps were timed, {work.steps} were asked for"
    elapsed, cpu = (last - first for first, last in zip(stamps[work.warmup - 1], stamps[-1]))
    first = True
    if work.processes > 1:
        total = torch.tensor([cpu, *losses], dtype=torch.float64)
        dist.all_reduce(total)
        cpu, *losses = total.tolist()
        losses = [loss * work.pipeline_parallel / work.processes for loss in losses]
        first = dist.get_rank() == 0
        # a rank that merely ends can take the other one's connections with it
        dist.destroy_process_group()
    answer = {
        "tokens_per_second": work.timed_tokens / elapsed,
        "tokens_per_cpu_second": work.timed_tokens / cpu,
        "step_seconds": [
            round(after[0] - before[0], 4) for before, after in zip(stamps, stamps[1:])
        ],
        "losses": losses,
        "parameters": parameters,
        "threads": torch.get_num_threads(),
        "peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None,
        "versions": {"torch": torch.__version__, "python": platform.python_version(), **versions},
        **more,
    }
    if first:
        print("\nRESULT " + json.dumps(answer), flush=True)
