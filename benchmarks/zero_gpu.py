"""ZeRO's memory and speed on one GPU that plays one rank of 4 or 8: real kernels, real memory, no
communication (torch's fake process group).

    python benchmarks/zero_gpu.py --out FOLDER           # on a GPU: zero_gpu.json and zero_gpu.md
    python benchmarks/zero_gpu.py --out FOLDER --tiny    # to try it: small shapes, also on a CPU

Every case is a separate process, with a fresh allocator, which builds the run of
pretrain_gpt.py's flags and takes its steps on random tokens. A case that runs out of memory is
recorded as such. Parts (--parts), in this order until --minutes are used up; the rest is listed as
not run:

stages   1.3B parameters, 8 ranks, ZeRO 0 to 3, 1 and 4 micro-batches, and 4 with full recompute
users    two experiments of others, at stages 0 to 3, next to the figures that they published
(research notes: DeepSpeed, ZeRO-2 against ZeRO-3)
offload  1.3B, stage 2: a step of 8k, 16k and 32k tokens on each rank, with the optimizer on the
host and without
params   weights on the host too: 1.3B, stage 3, next to the optimizer alone there; 2.7B on one rank
that shares with no other, 4k and 16k tokens a
         micro-batch, next to all of it on the GPU
more     1 micro-batch with full recompute, and 2.7B parameters at stages 1 to 3

Memory: torch.cuda.memory_allocated between two steps and its most within them, against
tools/_plan (goal: within 3%). On a CPU live storages are summed up instead. Time: from the
beginning of a step to the next one's, median of 6 after 3 to warm up; on GPUs by events. A fake
all-gather fills the buffer with the own slice, so weights are finite and as many bytes are written
as by a real one; a reduce-scatter keeps the own slice; other collectives move nothing. Steps that
were skipped for a non-finite gradient are counted: there must be none.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if not __package__:  # run as a file: this folder's `kernels` and `data` must hide no package
    sys.path[0] = str(ROOT)

import torch
import torch.distributed as dist
from megatron.benchmarks.peers.live_bytes import LiveBytes
from megatron.tools._plan.memory import rank_memories
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.config.arguments import parse_arguments
from megatron.config.stages import placement_of
from megatron.config.validate import resolve
from megatron.data.loader import Batch, Data
from megatron.data.tokenizer import build_tokenizer
from megatron.distributed.collectives import ALL_GATHER, REDUCE_SCATTER
from megatron.distributed.groups import build_groups, group_options, layout_of
from megatron.distributed.setup import set_determinism
from megatron.model.arithmetic import padded_vocab_size
from megatron.model.build import build_model, hidden_shape
from megatron.observe.events import EventLog, Timers
from megatron.observe.tracking import Tracker
from megatron.optimizer.lr_schedule import ParamSchedule, StepRates
from megatron.optimizer.optimizer import Optimizer
from megatron.optimizer.scaler import LossScaler
from megatron.parallel.blocks import build_run_blocks
from megatron.parallel.layer_runner import LayerRunner
from megatron.parallel.pipeline import Pipeline
from megatron.parallel.zero import Zero
from megatron.training.exit import ExitConditions
from megatron.training.run import Progress, Run
from megatron.training.step import (
    PendingStep,
    all_reduce_totals,
    forward_backward,
    next_batch,
    update,
)
from megatron.training.timing import Timing

COMMON = (
    "--mock-data --tokenizer-type NullTokenizer --bf16 --lr 1e-4 --train-iters 100 --eval-iters 0"
)
LLAMA = f"""{COMMON} --swiglu --normalization RMSNorm --position-embedding-type rope
--disable-bias-linear --untie-embeddings-and-output-weights
--hidden-dropout 0 --attention-dropout 0 --vocab-size 31999 --seq-length 2048"""
MODELS = {
    "1.3B": (
        f"{LLAMA} --num-layers 24 --hidden-size 2048 --ffn-hidden-size 5504 "
        "--num-attention-heads 16"
    ),
    "2.7B": (
        f"{LLAMA} --num-layers 32 --hidden-size 2560 --ffn-hidden-size 6912 "
        "--num-attention-heads 32"
    ),
    # of BERT-large's size, and of a ViT of 1.8B parameters (256 tokens an image, next to no
    # vocabulary)
    "340M": (
        f"{COMMON} --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length "
        "128 --max-position-embeddings 512 --vocab-size 30521"
    ),
    "1.8B": f"""{COMMON} --num-layers 48 --hidden-size 1664 --ffn-hidden-size 8192
    --num-attention-heads 16 --seq-length 256 --vocab-size 1023
            --hidden-dropout 0 --attention-dropout 0""",
}
TINY = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 "
    "--seq-length 32 --max-position-embeddings 32 --vocab-size 127"
)
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
PUBLISHED = {  # MB of CUDA memory at stages 0 to 3, as their users gave them; None: not given
    "340M": ("BERT-large, 4 x V100 16 GB, 64 samples a GPU", (15853, 13509, 13499, 14237)),
    "1.8B": ("ViT, 8 GPUs, 16 samples a GPU, fp16", (42251, 20201, 21152, 20208)),
}
WARMUP, STEPS = 3, 6
GOAL = 3.0  # percent
MIB = 2**20


@dataclass(frozen=True)
class Case:
    """One process. `micro_batch` samples in each of `accumulation` micro-batches."""

    part: str
    model: str
    stage: int
    micro_batch: int
    accumulation: int
    ranks: int = 8
    recompute: bool = False
    offload: bool = False
    params: bool = False

    def flags(self, tiny: bool) -> list[str]:
        """Of pretrain_gpt.py."""
        batch = self.micro_batch * self.accumulation * self.ranks
        words = [
            MODELS[self.model],
            TINY * tiny,
            RECOMPUTE * self.recompute,
            "--optimizer-cpu-offload" * self.offload,
            "--param-cpu-offload" * self.params,
            (
                f"--zero-stage {self.stage} --micro-batch-size {self.micro_batch} "
                f"--global-batch-size {batch}"
            ),
        ]
        return " ".join(words).split()


def cases(parts: list[str]) -> list[Case]:
    """In the order in which they are run."""
    found = [
        Case("stages", "1.3B", stage, 2, count, recompute=recompute)
        for count, recompute in ((1, False), (4, False), (4, True))
        for stage in range(4)
    ]
    found += [
        Case("users", model, stage, samples, 1, ranks)
        for model, samples, ranks in (("340M", 64, 4), ("1.8B", 16, 8))
        for stage in range(4)
    ]
    found += [
        Case("offload", "1.3B", 2, 4, count, offload=offload)
        for count in (1, 2, 4)
        for offload in (False, True)
    ]
    found += [
        Case("params", "1.3B", 3, 4, 2, offload=True, params=params) for params in (False, True)
    ]
    found += [
        Case(
            "params",
            "2.7B",
            3 * params,
            samples,
            1,
            1,
            recompute=True,
            offload=params,
            params=params,
        )
        for samples in (2, 8)
        for params in (False, True)
    ]
    found += [Case("more", "1.3B", stage, 2, 1, recompute=True) for stage in range(4)]
    found += [
        Case("more", "2.7B", stage, 2, 4, recompute=recompute)
        for recompute in (True, False)
        for stage in (1, 2, 3)
    ]
    return [case for case in found if case.part in parts]


# ---------------------------------------------------------------- one case, in a separate process


class RandomTokens:
    """In place of a run's data: the same random micro-batch for ever."""

    def __init__(self, samples: int, length: int, vocab: int):
        ids = torch.randint(
            0, vocab, (samples, length + 1), generator=torch.Generator().manual_seed(0)
        )
        positions, ones = (
            torch.arange(length).expand(samples, length).contiguous(),
            torch.ones(samples, length),
        )
        self.made = Batch(
            ids[:, :-1].contiguous(),
            ids[:, 1:].contiguous(),
            ones,
            positions,
            torch.arange(samples),
        )

    def batch(self, first_sample: int, count: int) -> Batch:
        assert count == len(self.made.sample_ids)
        return self.made


class Landed:
    """The handle of a collective that is over when all that was queued on its stream is."""

    def __init__(self) -> None:
        self.event = torch.cuda.current_stream().record_event()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


def keep_own_slice(out: Tensor, x: Tensor, **_: Any) -> FakeWork:
    """Rank 0's reduce-scatter: torch 2.11's fake one leaves `out` as it was found, so not finite at
    times.
    """
    out.copy_(x.view(-1)[: out.numel()].view_as(out))
    return FakeWork()


def make_streams_wait() -> None:
    """Have the current stream wait for what is awaited, as with NCCL: torch's fake handle lets it
    run on.
    """

    def landing(function: Callable[..., Any]) -> Callable[..., Landed]:
        def start(*args: Any, **settings: Any) -> Landed:
            function(*args, **settings)
            return Landed()

        return start

    for name in ("all_reduce", ALL_GATHER, REDUCE_SCATTER):
        setattr(dist, name, landing(getattr(dist, name)))


def build(flags: list[str], ranks: int, device: torch.device) -> Run:
    """What training/pretrain.py builds, as rank 0 of `ranks`, with random tokens for data."""
    parsed = parse_arguments(flags).config
    vocab = parsed.data.vocab_size + 1
    config = resolve(parsed, ranks, vocab).config
    padded = padded_vocab_size(vocab, config.model, config.distributed.tensor_model_parallel_size)
    groups = build_groups(layout_of(config, ranks), 0, dist.new_group, **group_options(config))
    model = build_model(config, vocab, groups, device)
    blocks = build_run_blocks(config, model, device, groups)
    zero, passes = Zero(model, blocks, groups, config.distributed), LayerRunner()
    seq, samples = config.data.seq_length, config.training.micro_batch_size
    timing = Timing(EventLog(None, 0, Timers()))
    return Run(
        config=config,
        groups=groups,
        device=device,
        device_names=device.type,
        tokenizer=build_tokenizer(config.data),
        padded_vocab=padded,
        model=model,
        zero=zero,
        pipeline=Pipeline(
            model, zero, passes, placement_of(config), hidden_shape(config), groups, device
        ),
        optimizer=Optimizer(blocks, config, groups, zero),
        schedule=ParamSchedule.of(config),
        scaler=LossScaler(config.precision),
        data=Data(RandomTokens(samples, seq, vocab), {}, {}, {}, []),
        tracker=Tracker(config, None, 0),
        exits=ExitConditions(config.training),
        progress=Progress(),
        timing=timing,
    )


def static_kinds(run: Run) -> dict[str, int]:
    """Bytes on the device that the run's buffers hold between two steps, by the planner's kinds;
    each storage once. There are no gradients then.
    """
    blocks, seen = run.zero.blocks, set()

    def size(buffers: list[torch.Tensor | None]) -> int:
        total = 0
        for buffer in filter(torch.is_tensor, buffers):
            storage = buffer.untyped_storage()
            if buffer.device == run.device and storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += storage.nbytes()
        return total

    return {
        "parameters": size(
            [buffer for block in blocks for buffer in (block.weight, block.rounded)]
        ),
        "optimizer": size(
            [
                *(block.master for block in blocks),
                *(
                    run.optimizer.states[block][name]
                    for block in run.optimizer.trained
                    for name in run.optimizer.state_names
                ),
            ]
        ),
    }


def take_steps(run: Run, count: int) -> tuple[list[float], list[PendingStep]]:
    """Real steps: the milliseconds of each, and what it left to be read."""
    cuda, marks, pendings = run.device.type == "cuda", [], []

    def mark() -> None:
        marks.append(torch.cuda.Event(enable_timing=True) if cuda else time.perf_counter())
        if cuda:
            marks[-1].record()

    mark()
    for _ in range(count):
        batch = next_batch(run)  # the same each time: progress is not counted
        totals = all_reduce_totals(run, batch, forward_backward(run, batch))
        pendings.append(update(run, batch, totals, StepRates(1e-4, 1e-4, 0.1)))
        mark()
    if cuda:
        torch.cuda.synchronize()
    return [
        a.elapsed_time(b) if cuda else 1e3 * (b - a) for a, b in zip(marks, marks[1:])
    ], pendings


def measure(case: Case, tiny: bool) -> dict[str, Any]:
    """The results of a case."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.ranks)
    setattr(dist, REDUCE_SCATTER, keep_own_slice)
    if cuda:
        torch.cuda.set_device(device)
        set_determinism(device, True)
        make_streams_wait()
    with contextlib.nullcontext() if cuda else LiveBytes() as live:
        allocated = torch.cuda.memory_allocated if live is None else lambda: live.now
        before = allocated()
        run = build(case.flags(tiny), case.ranks, device)
        run.optimizer.initialise()
        _, pendings = take_steps(run, WARMUP if cuda else 1)
        # a step on the host is put off to the next pass, and its gradients with it
        run.zero.wait_for_weights()
        gc.collect()
        between, kinds = allocated() - before, static_kinds(run)
        if live is None:
            torch.cuda.reset_peak_memory_stats()
        else:
            live.peak = 0
        times, more = take_steps(run, STEPS if cuda else 1)
        peak = (torch.cuda.max_memory_allocated() if live is None else live.peak) - before
    if not cuda:  # without the counter
        times, more = take_steps(run, STEPS)
    run.exits.close()
    dist.destroy_process_group()
    return {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "tokens": case.micro_batch * case.accumulation * run.config.data.seq_length,
        "times": times,
        "milliseconds": statistics.median(times),
        "loss": more[-1].read().loss,
        "skipped": sum(pending.read().skipped for pending in [*pendings, *more]),
        "between": between,
        "between_kinds": kinds | {"other": between - sum(kinds.values())},
        "peak": peak,
        "reserved": torch.cuda.max_memory_reserved() if cuda else None,
        **planned_figures(run, case.ranks, device, peak),
    }


def planned_figures(run: Run, ranks: int, device: torch.device, peak: int) -> dict[str, Any]:
    """The plan of the case, and its error against the measured peak in bytes."""
    plan = rank_memories(run.config, run.tokenizer.vocab_size, ranks, device.type)[0]
    on_host = plan.static["host"] if device.type == "cpu" else 0  # a CPU's own memory
    planned = plan.total + on_host
    return {
        "parameters": plan.parameters,
        "planned_between": plan.resident - plan.static["gradients"] + on_host,
        "planned_kinds": {**plan.static, **plan.peak.bytes},
        "planned_peak": planned,
        "planned_when": plan.peak.when,
        "error_percent": 100 * (planned - peak) / peak,
    }


# ---------------------------------------------------------------- all of them


def run_case(case: Case, tiny: bool, patience: float) -> dict[str, Any]:
    """The results of a fresh process, or {"failed": why}; it is killed after `patience` seconds."""
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--case",
        json.dumps(asdict(case)),
        *["--tiny"] * tiny,
    ]
    begun = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=patience)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {patience:g} s"}
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT ")) | {
                "wall": round(time.monotonic() - begun, 1)
            }
    return {"failed": f"exit code {done.returncode}: {done.stderr[-2000:]}"}


def measured(
    chosen: list[Case], tiny: bool, minutes: float, patience: float
) -> Iterator[dict[str, Any]]:
    """Each case with its results; once the time is used up without."""
    until = time.monotonic() + 60 * minutes
    for case in chosen:
        row = asdict(case) | {"flags": " ".join(case.flags(tiny))}
        yield row | (
            run_case(case, tiny, patience)
            if time.monotonic() < until
            else {"failed": f"not run: the {minutes:g} minutes were used up"}
        )


def _what(row: dict[str, Any]) -> str:
    words = [
        row["model"],
        f"{row['ranks']} ranks",
        f"{row['accumulation']} x {row['micro_batch']}",
        *["recompute"] * row["recompute"],
        *(["offload of weights"] if row["params"] else ["offload"] * row["offload"]),
    ]
    return f"{', '.join(words)} | {row['stage']}"


def tables(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        (
            "MiB; `other` is what lives between two steps in addition to the run's own buffers "
            "(workspaces of libraries, scalars)."
        ),
        "",
        (
            "| run | stage | between steps | other | planned | peak | planned | error | ms a "
            "step | tokens/s a rank |"
        ),
        "|---" * 10 + "|",
    ]
    for row in rows:
        if "failed" in row:
            lines.append(f"| {_what(row)} | {row['failed'].splitlines()[0][:100]} |" + " - |" * 7)
            continue
        late = " **over the goal**" * (
            abs(row["error_percent"]) > GOAL
        ) + f" **{row['skipped']} skipped**" * bool(row["skipped"])
        sizes = [
            row["between"],
            row["between_kinds"]["other"],
            row["planned_between"],
            row["peak"],
            row["planned_peak"],
        ]
        lines.append(
            f"| {_what(row)} | {' | '.join(f'{size / MIB:.1f}' for size in sizes)} | "
            f"{row['error_percent']:+.1f}%{late} "
            f"| {row['milliseconds']:.1f} | {1e3 * row['tokens'] / row['milliseconds']:.0f} |"
        )
    found = {
        (row["part"], row["model"], row["stage"], row["accumulation"], row["offload"]): row
        for row in rows
        if "failed" not in row
    }
    return "\n".join([*lines, "", *_offload_table(found), "", *_users_table(found)])


def _offload_table(found: dict[tuple, dict[str, Any]]) -> list[str]:
    lines = [
        "| tokens a rank and step | ms without offload | with | throughput kept |",
        "|---" * 4 + "|",
    ]
    for (part, model, stage, count, offload), row in found.items():
        if (
            part == "offload"
            and offload
            and (without := found.get((part, model, stage, count, False)))
        ):
            lines.append(
                f"| {row['tokens']} | {without['milliseconds']:.1f} | {row['milliseconds']:.1f} "
                f"| {100 * without['milliseconds'] / row['milliseconds']:.0f}% |"
            )
    return lines if len(lines) > 2 else []


def _users_table(found: dict[tuple, dict[str, Any]]) -> list[str]:
    lines = [
        (
            "Peak of memory in MB (2^20). Theirs are published figures, of other models of this "
            "size and of other GPUs."
        ),
        "",
        "| what | ZeRO-0 | ZeRO-1 | ZeRO-2 | ZeRO-3 |",
        "|---" * 5 + "|",
    ]
    for model, (theirs, figures) in PUBLISHED.items():
        ours = [found.get(("users", model, stage, 1, False)) for stage in range(4)]
        lines.append(f"| theirs, published: {theirs} | {' | '.join(map(str, figures))} |")
        for name, key in (("measured", "peak"), ("planned", "planned_peak")):
            lines.append(
                f"| ours, {name}: GPT of {model} | "
                f"{' | '.join('-' if row is None else f'{row[key] / MIB:.0f}' for row in ours)} |"
            )
    return lines if any(key[0] == "users" for key in found) else []


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    every_case = cases(["stages", "users", "offload", "params", "more"])
    parts = [*dict.fromkeys(case.part for case in every_case)]
    parser.add_argument("--out", type=Path, metavar="FOLDER")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--tiny", action="store_true", help="small shapes")
    parser.add_argument(
        "--minutes",
        type=float,
        default=8.0,
        help="no case begins later (on an H100 all take about 15 seconds each: assumed)",
    )
    parser.add_argument("--patience", type=float, default=120.0, help="seconds for a case")
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.case:
        try:
            result = measure(Case(**args.case), args.tiny)
        except torch.OutOfMemoryError as error:
            result = {"failed": f"out of memory: {error}"}
        print("RESULT " + json.dumps(result), flush=True)
        return 0
    error = None
    if args.out is None:
        error = "--out FOLDER is missing"
    elif not (args.tiny or torch.cuda.is_available()):
        error = f"torch {torch.__version__} sees no CUDA device; --tiny tries the tool on a CPU"
    if error is not None:
        print(f"error: {error}", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {
        "started": datetime.now().isoformat(timespec="seconds"),
        "command": argv,
        "torch": torch.__version__,
        "shapes": "tiny: figures that only try the tool" if args.tiny else "full",
        "rows": [],
    }
    for row in measured(cases(args.parts), args.tiny, args.minutes, args.patience):
        document["rows"].append(row)
        # an interrupted measurement keeps what it has
        (args.out / "zero_gpu.json").write_text(json.dumps(document, indent=1) + "\n")
        outcome = row.get("failed") or (
            f"peak {row['peak'] / MIB:.1f} MiB, planned {row['error_percent']:+.2f}%, "
            f"{row['milliseconds']:.1f} ms"
        )
        print(f"{_what(row)}: {outcome}", flush=True)
    text = tables(document["rows"]) + "\n"
    if args.tiny:
        text = "Small shapes: these figures only try the tool.\n\n" + text
    (args.out / "zero_gpu.md").write_text(text)
    print("\n" + text, end="", flush=True)
    return int(all("failed" in row for row in document["rows"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
