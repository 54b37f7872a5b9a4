"""The optimizer's step through files (--optimizer-nvme-offload) against the disk's own streaming of
the same bytes.

    OMP_WAIT_POLICY=passive python benchmarks/nvme.py DIR --out docs/results/nvme.json

DIR lies on the disk to measure; the machine should be quiet. Ours is the whole step of a GPT (125M
parameters by default) in bf16: fp32 master weights and moments are read, stepped, and written back,
24 bytes a parameter, and the weights rounded; it ends when all is written. Raw moves the same bytes
in requests of the same size, with as many threads, around the page cache, and computes nothing:
each thread reads a piece and writes it back. A round is a turn of each, in turning order; a ratio
is our seconds by those of raw in the same round, and passes by ratio_rule.py when it is at most the
goal.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: this folder's `kernels` and `data` must hide no package
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from megatron.benchmarks import ratio_rule
from megatron.benchmarks.training import busy_seconds, machine

from megatron.config.groups import Config, ModelConfig, OptimizerConfig
from megatron.distributed.groups import one_process
from megatron.model.gpt import GPTModel
from megatron.optimizer import nvme
from megatron.optimizer.lr_schedule import StepRates
from megatron.optimizer.optimizer import Optimizer
from megatron.parallel.blocks import build_blocks
from megatron.parallel.zero import Zero

GOAL = 1.3
VOCABULARY = 50304


class Step:
    """Our side: an optimizer whose blocks are all in files, and gradients that are the same in
    every step.
    """

    def __init__(self, folder: Path, layers: int, hidden: int):
        heads = hidden // 64
        shape = ModelConfig(
            num_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            ffn_hidden_size=4 * hidden,
            kv_channels=64,
            num_query_groups=heads,
            max_position_embeddings=1024,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )
        config = Config(
            model=shape,
            optimizer=OptimizerConfig(
                optimizer_cpu_offload=True, optimizer_nvme_offload=str(folder)
            ),
        )
        model = GPTModel(
            shape, vocab_size=VOCABULARY, padded_vocab=VOCABULARY, dtype=torch.bfloat16, seed=1
        )
        blocks = build_blocks(model, torch.device("cpu"), optimizer=config.optimizer)
        self.zero = Zero(model, blocks, one_process(), config.distributed)
        self.optimizer = Optimizer(blocks, config, one_process(), self.zero)
        self.optimizer.keeps_gradients = True
        self.optimizer.initialise()
        draw = torch.Generator().manual_seed(1)
        for block in blocks:
            block.open()
            block.grad.normal_(std=1e-3, generator=draw)
        self.squares = self.optimizer.grad_sq_sum()
        self.parts = [
            (kind, part)
            for part in self.optimizer.files.order
            for kind in self.optimizer.files.dtypes
        ]
        self.elements = sum(block.size for block in blocks)
        self.bytes = 2 * sum(self.size(kind, part) for kind, part in self.parts)

    def size(self, kind: str, part: nvme.StatePart) -> int:
        return nvme.in_pages(part.size) * self.optimizer.files.dtypes[kind].itemsize

    def __call__(self) -> None:
        self.optimizer.step(
            rates=StepRates(1e-4, 1e-4, 0.1),
            grad_sq_sum=self.squares,
            grad_scale=1.0,
        )
        self.zero.wait_for_weights()
        for slot in self.optimizer.files.ring:
            self.optimizer.files.wait(slot)  # all is written


class Raw:
    """The disk alone: requests of the same sizes in files of their own."""

    def __init__(self, folder: Path, step: Step):
        sizes = {
            kind: nvme.in_pages(
                max(part.position + part.size for part in step.optimizer.files.order)
            )
            * dtype.itemsize
            for kind, dtype in step.optimizer.files.dtypes.items()
        }
        self.files = {kind: nvme.new_file(folder, size)[0] for kind, size in sizes.items()}
        self.requests = [
            (
                self.files[kind],
                step.size(kind, part),
                part.position * step.optimizer.files.dtypes[kind].itemsize,
            )
            for kind, part in step.parts
        ]
        self.threads = ThreadPoolExecutor(nvme.SLOTS)
        self.memory = [
            nvme._aligned(max(size for _, size, _ in self.requests)) for _ in range(nvme.SLOTS)
        ]

    def __call__(self) -> None:
        for work in [self.threads.submit(self._share, index) for index in range(nvme.SLOTS)]:
            work.result()

    def _share(self, index: int) -> None:
        for file, size, start in self.requests[index :: nvme.SLOTS]:
            data = memoryview(self.memory[index])[:size]
            assert os.preadv(file, [data], start) == os.pwritev(file, [data], start) == size


def timed(side: Callable[[], None]) -> dict[str, float]:
    """Seconds, and cores that others used in that time."""
    begun, busy, own = time.perf_counter(), busy_seconds(), time.process_time()
    side()
    seconds = time.perf_counter() - begun
    return {
        "seconds": seconds,
        "others_cores": round(
            max(0.0, busy_seconds() - busy - (time.process_time() - own)) / seconds, 3
        ),
    }


def measure(folder: Path, layers: int, hidden: int, rounds: int) -> dict[str, Any]:
    """Every turn, and the verdict."""
    step = Step(folder, layers, hidden)
    sides = {"ours": step, "raw": Raw(folder, step)}
    runs: list[dict[str, Any]] = []
    for side in sides.values():
        side()  # a file's first write makes its blocks
    for index in range(rounds):
        for name in list(sides)[:: 1 if index % 2 == 0 else -1]:
            runs.append({"round": index, "side": name, **timed(sides[name])})
        print(
            f"round {index}: "
            + "; ".join(
                f"{run['side']} {run['seconds']:.3f} s, "
                f"{step.bytes / run['seconds'] / 1e9:.2f} GB/s, others "
                f"{run['others_cores']:.2f} cores"
                for run in runs[-2:]
            ),
            flush=True,
        )
    seconds = {
        name: [
            run["seconds"]
            for run in sorted(runs, key=lambda run: run["round"])
            if run["side"] == name
        ]
        for name in sides
    }
    verdict = ratio_rule.verdict(
        [ours / raw for ours, raw in zip(*seconds.values())], GOAL, upper_limit=True
    )
    files = step.optimizer.files
    ring = sum(len(memory) for slot in files.ring for memory in slot.memory.values())
    return {
        "parameters": step.elements,
        "bytes": step.bytes,
        "ring_bytes": ring,
        "part": nvme.PART,
        "slots": nvme.SLOTS,
        "workers": nvme.SLOTS,
        "direct": all(direct for _, direct in files.files.values()),
        "median_seconds": {name: statistics.median(each) for name, each in seconds.items()},
        **asdict(verdict),
        "runs": runs,
    }


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=ratio_rule.PAIRS + 2)
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count(), help="of torch, for the arithmetic"
    )
    parser.add_argument("--out", type=Path, help="JSON of every run")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    found = measure(args.folder, args.layers, args.hidden, args.rounds)
    if args.out:
        args.out.write_text(
            json.dumps(
                {
                    "started": datetime.now().isoformat(timespec="seconds"),
                    "command": argv,
                    "machine": machine(),
                    "threads": args.threads,
                    **found,
                },
                indent=1,
            )
            + "\n"
        )
    ours, raw = found["median_seconds"].values()
    print(
        "\n| parameters | bytes moved | our step, s | raw, s | ours by raw (95% interval) | "
        f"goal | pairs | verdict |\n{'|---' * 8}|\n"
        f"| {found['parameters'] / 1e6:.0f}M | {found['bytes'] / 1e9:.2f} GB | {ours:.2f} | "
        f"{raw:.2f} | {found['median']:.3f} ({found['low']:.3f}-"
        f"{found['high']:.3f}) | {GOAL:g} | {found['pairs']} | "
        f"{'reached' if found['passed'] else 'lost'} |"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
