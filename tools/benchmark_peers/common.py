"""What the peer scripts share: the work to do, the tokens to do it on, and the line they answer with."""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import dataclass, fields

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


@dataclass(frozen=True)
class Work:
    """One measurement: a Llama-style GPT (rotary, RMSNorm, SwiGLU, untied head, no biases) and its steps."""

    layers: int = 6
    hidden: int = 256
    heads: int = 8
    ffn: int = 688
    seq: int = 256
    vocab: int = 8192
    micro_batch: int = 4
    accumulation: int = 1
    dropout: float = 0.0
    precision: str = "fp32"  # fp32 or bf16
    steps: int = 30
    warmup: int = 10  # steps before the clock starts
    lr: float = 1e-3
    lr_warmup: int = 5
    threads: int = 2

    @property
    def step_tokens(self) -> int:
        return self.micro_batch * self.accumulation * self.seq

    @property
    def timed_tokens(self) -> int:
        return (self.steps - self.warmup) * self.step_tokens

    def arguments(self) -> list[str]:
        """The command line that parse_work() reads back."""
        return [word for field in fields(self) for word in (f"--{field.name}", str(getattr(self, field.name)))]


def parse_work() -> Work:
    """Read the command line of a peer script."""
    parser = argparse.ArgumentParser()
    for field in fields(Work):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    return Work(**vars(parser.parse_args()))


def tokens_of(work: Work) -> torch.Tensor:
    """[samples, seq + 1] random token ids, one sample for each use."""
    samples = work.steps * work.accumulation * work.micro_batch
    return torch.randint(work.vocab, (samples, work.seq + 1), generator=torch.Generator().manual_seed(1))


class StepClock:
    """Notes the time after each optimizer step of this process, whichever trainer takes it."""

    def __init__(self):
        self.stamps: list[tuple[float, float]] = []  # elapsed, CPU seconds of this process
        register_optimizer_step_post_hook(lambda *_: self.stamps.append((time.perf_counter(), time.process_time())))


def report(work: Work, clock: StepClock, losses: list[float], parameters: int, versions: dict[str, str]) -> None:
    """Print the answer as JSON on a line of its own: throughput from the end of the last warm-up step to the end of the last step."""
    stamps = clock.stamps
    assert len(stamps) == work.steps, f"{len(stamps)} steps were timed, {work.steps} were asked for"
    elapsed, cpu = (last - first for first, last in zip(stamps[work.warmup - 1], stamps[-1]))
    answer = {
        "tokens_per_second": work.timed_tokens / elapsed, "tokens_per_cpu_second": work.timed_tokens / cpu,
        "step_seconds": [round(after[0] - before[0], 4) for before, after in zip(stamps, stamps[1:])],
        "losses": losses, "parameters": parameters, "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "python": platform.python_version(), **versions},
    }
    print("\nRESULT " + json.dumps(answer), flush=True)
