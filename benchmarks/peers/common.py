"""What the peer scripts share: the work to do, the weights and tokens to start from, and the line
they answer with.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook


@dataclass(frozen=True)
class Work:
    """One measurement: a Llama-style GPT (rotary, RMSNorm, SwiGLU, untied head, no biases), its
    layout and its steps.
    """

    layers: int = 6
    hidden: int = 256
    heads: int = 8
    query_groups: int = 0  # key and value heads; 0: as many as heads
    ffn: int = 688
    seq: int = 256
    vocab: int = 8192
    micro_batch: int = 4  # of each data-parallel rank
    accumulation: int = 1
    data_parallel: int = 1
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
    lr_warmup: int = 5
    threads: int = 2  # of each process

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
        """Of step 0, 1, ...: linear warm-up, then cosine to zero at the last step."""
        done = step + 1
        if done <= self.lr_warmup:
            return self.lr * done / self.lr_warmup
        return (
            0.5
            * self.lr
            * (1 + math.cos(math.pi * (done - self.lr_warmup) / (self.steps - self.lr_warmup)))
        )


def parse_work() -> tuple[Work, Mapping[str, np.ndarray]]:
    """Read the command line of a peer script: the work, and what start.py wrote: initial weights
    (logical tensors by name) and `tokens`.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("start", type=Path, help="a folder")
    for field in fields(Work):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    args = vars(parser.parse_args())
    start = args.pop("start")
    index = json.loads((start / "index.json").read_text())
    with open(start / "tensors.bin", "rb") as file:
        tensors = {
            name: np.fromfile(file, dtype, math.prod(shape)).reshape(shape)
            for name, (dtype, shape) in index.items()
        }
    return Work(**args), tensors


def tensor_of(start: Mapping[str, np.ndarray], *names: str) -> Tensor:
    """Logical tensors of the start on top of each other."""
    return torch.cat([torch.from_numpy(start[name]) for name in names])


def rank_samples(tokens: Tensor, step: int, work: Work, rank: int) -> tuple[Tensor, ...]:
    """The micro-batches [micro_batch, seq + 1] of a step for a data-parallel rank, of tokens
    [samples, seq + 1].
    """
    batch = tokens[step * work.step_samples : (step + 1) * work.step_samples]
    return batch.view(work.accumulation, work.data_parallel, work.micro_batch, -1)[:, rank].unbind()


class StepClock:
    """Notes the time after each optimizer step of this process, whichever trainer takes it."""

    def __init__(self):
        self.stamps: list[tuple[float, float]] = []  # elapsed, CPU seconds of this process
        register_optimizer_step_post_hook(
            lambda *_: self.stamps.append((time.perf_counter(), time.process_time()))
        )


def report(
    work: Work, clock: StepClock, losses: list[float], parameters: int, versions: dict[str, str]
) -> None:
    """Print the answer as JSON on a line of its own: throughput from the end of the last warm-up
    step to the end of the last step.

    With several processes rank 0 prints the sum of their CPU seconds and the mean of their losses;
    a stage without the head hands in zeros.
    """
    stamps = clock.stamps
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
        "versions": {"torch": torch.__version__, "python": platform.python_version(), **versions},
    }
    if first:
        print("\nRESULT " + json.dumps(answer), flush=True)
