"""Names, units and arithmetic of everything that is logged; the timers.

The console line, metrics.jsonl, TensorBoard and wandb all show these names. Nothing here waits for
a GPU.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Metrics = dict[str, float]  # by name

METRICS: dict[str, tuple[str, str]] = {  # name: (unit, meaning)
    "consumed_samples": ("samples", "samples read since the start of the run"),
    "consumed-tokens": ("tokens", "consumed samples x sequence length"),
    "lm loss": (
        "nats/token",
        "training loss: sum over tokens / valid tokens, mean over the log interval",
    ),
    "learning-rate": ("", "learning rate of the last step"),
    "decoupled-learning-rate": (
        "",
        "the same of word embedding and output layer (--decoupled-lr)",
    ),
    "batch-size": ("samples", "global batch of the last step"),
    "load-balancing-loss": (
        "",
        "auxiliary loss of experts before its coefficient, mean over layers: 1 where all have as "
        "many tokens (also seq- and global-load-balancing-loss)",
    ),
    "seq-load-balancing-loss": ("", "the same, of each sample by itself"),
    "global-load-balancing-loss": ("", "the same, by the shares of the step before"),
    "router-z-loss": ("", "the square of log sum exp of the router's logits, mean over layers"),
    "router-objective": (
        "nats/token",
        "all losses of routers times their coefficients, summed over layers: differentiated "
        "beside the loss",
    ),
    "expert-load-max": (
        "",
        "tokens of the expert with most of them in any layer, as a multiple of the mean",
    ),
    "expert-load-min": ("", "the same of the expert with the fewest tokens"),
    "expert-dropped": ("", "share of choices that experts at their capacity did not take"),
    "expert-load-max/<layer>": ("", "the same of one layer (--moe-per-layer-logging)"),
    "expert-load-min/<layer>": ("", "the same of one layer (--moe-per-layer-logging)"),
    "expert-dropped/<layer>": ("", "the same of one layer (--moe-per-layer-logging)"),
    "loss-scale": ("", "loss scale of the last step (1 without fp16)"),
    "grad-norm": ("", "global L2 norm of the gradient, before clipping"),
    "params-norm": ("", "global L2 norm of the parameters (--log-params-norm)"),
    "grad-norm/<layer>": (
        "",
        "the same of embedding, layers.N and head alone (--log-layer-norms); squares add up",
    ),
    "params-norm/<layer>": ("", "the same of the parameters of one layer (--log-layer-norms)"),
    "num-zeros": ("", "gradient elements that are exactly zero (--log-num-zeros-in-grad)"),
    "skipped-train-samples": (
        "samples",
        "samples of steps that were skipped, since the start of the run",
    ),
    "lm loss validation": (
        "nats/token",
        (
            "loss on the fixed validation batches; of several sources the mean by their weights "
            "in the blend"
        ),
    ),
    "lm loss validation ppl": ("", "exp(min(20, lm loss validation))"),
    "lm loss test": ("nats/token", "loss on the test split"),
    "lm loss test ppl": ("", "exp(min(20, lm loss test))"),
    "bits-per-byte": ("bits/byte", "validation loss / ln 2 / bytes per token of the data"),
    "resumed-from-iteration": (
        "iteration",
        "on the first row after a restart: the checkpoint that it started from",
    ),
    "timestamp": ("s", "when the row was written: seconds since 1970-01-01 00:00 UTC"),
    "world-size": ("ranks", "processes of the job"),
    "iteration-time": ("s", "wall time of an iteration, mean over the log interval"),
    "predicted-iteration-time": (
        "s",
        "the same by the plan, where the device is known (--hardware)",
    ),
    "throughput": (
        "TFLOP/s/GPU",
        "model FLOPs (padded vocabulary, causal half, no recompute) / time / ranks",
    ),
    "tokens-per-second-per-gpu": ("tokens/s/GPU", "tokens of a global batch / time / ranks"),
    "mfu": (
        "fraction of the peak",
        "as throughput with the real vocabulary, divided by the peak that the banner names",
    ),
    "data-wait-fraction": (
        "fraction of the time",
        "wall time spent waiting for batches / wall time",
    ),
    "pipeline-bubble-fraction": (
        "fraction of the time",
        "share of the last step in which the ranks of a pipeline do not compute",
    ),
    "pipeline-timeline": (
        "",
        "wandb alone: picture of that step, at the first line of a start and the last of a run",
    ),
    "sample-text": (
        "",
        (
            "wandb alone: what the model writes at an evaluation after the start of the first "
            "validation sample (--log-sample-text)"
        ),
    ),
    "goodput": (
        "fraction of the time",
        (
            "time of steps that moved the weights / wall time since the run was first started, "
            "over all restarts (docs/logging.md)"
        ),
    ),
    "goodput-since-start": ("fraction of the time", "the same of this start alone"),
    "rank-time-min": (
        "s",
        (
            "what the fastest rank needed for its own part of a step, without waiting for others; "
            "mean over the log interval"
        ),
    ),
    "rank-time-median": ("s", "the same of the middle rank"),
    "rank-time-max": ("s", "the same of the slowest rank"),
    "slowest-rank": ("rank", "a rank that keeps the others waiting; absent where there is none"),
    "slowest-rank-excess": ("fraction", "by which it is slower than its peers"),
    "slowest-rank-section": (
        "",
        "where it loses most: 0 data, 1 forward, 2 backward, 3 optimizer, 4 host",
    ),
    "save-checkpoint-seconds": (
        "s",
        "from the beginning of a save until its checkpoint was committed, in the background or not",
    ),
    "save-checkpoint-stall-seconds": ("s", "of these, seconds in which training stood still"),
    "save-checkpoint-gb-per-second": ("GB/s", "bytes of all ranks / save-checkpoint-seconds / 1e9"),
    "save-checkpoint-bytes": ("bytes", "bytes of all ranks' shards"),
    "mem-reserved-bytes": ("bytes", "held by torch's CUDA allocator (absent on a CPU)"),
    "mem-allocated-bytes": ("bytes", "live CUDA tensors; on a CPU the resident set of the process"),
    "mem-max-allocated-bytes": (
        "bytes",
        "most CUDA bytes ever live; on a CPU the largest resident set so far",
    ),
}
_MEASURED = {
    "timestamp",
    "throughput",
    "tokens-per-second-per-gpu",
    "mfu",
    "data-wait-fraction",
    "pipeline-bubble-fraction",
    "pipeline-timeline",
    "world-size",
    "resumed-from-iteration",
}


def is_measured(name: str) -> bool:
    """True for what depends on the machine and not on the mathematics of the run: times, rates,
    memory, world size, resume marks.

    Comparisons of two runs leave these out.
    """
    return (
        name in _MEASURED
        or name.endswith("-time")
        or name.startswith(("mem-", "save-checkpoint-", "rank-time-", "slowest-rank", "goodput"))
    )


# wandb's x axes beside `iteration`, on every row of its
AXES = {"consumed_samples": "samples", "consumed-tokens": "tokens"}
# section: how names in it begin; of what is in none, measured values are in `speed`, all else in
# `train`
SECTIONS = {
    "validation": ("lm loss validation", "lm loss test", "bits-per-byte"),
    "memory": ("mem-",),
    "health": (
        "grad-norm",
        "params-norm",
        "num-zeros",
        "loss-scale",
        "skipped-train-samples",
        "resumed-from-iteration",
    ),
}


def wandb_name(name: str) -> str:
    """`section/name`, as wandb groups charts; an axis, and what has a section in its name (norms of
    layers), as they are.
    """
    if name in AXES or "/" in name:
        return AXES.get(name, name)
    rest = "speed" if is_measured(name) else "train"
    found = (section for section, begins in SECTIONS.items() if name.startswith(begins))
    return f"{next(found, rest)}/{name}"


def rates(
    *,
    seconds: float,
    tokens: int,
    flops: float,
    padded_flops: float,
    world_size: int,
    peak_tflops: float | None,
) -> Metrics:
    """Speed of one iteration that took `seconds` for `tokens` tokens (global batch x sequence
    length) on `world_size` ranks.

    `flops` counts the iteration with the real vocabulary (model/arithmetic.py) and gives `mfu`, as
    a fraction of `peak_tflops` (TFLOP/s of one device; without it there is no `mfu`);
    `padded_flops` counts the padded vocabulary and gives Megatron's `throughput`.
    """
    assert seconds > 0 and world_size > 0
    per_rank = 1 / (seconds * world_size)
    result = {
        "iteration-time": seconds,
        "throughput": padded_flops * per_rank / 1e12,
        "tokens-per-second-per-gpu": tokens * per_rank,
    }
    if peak_tflops is not None:
        result["mfu"] = flops * per_rank / (peak_tflops * 1e12)
    return result


def eta_seconds(iteration: int, train_iters: int, seconds: float) -> float:
    """Seconds until iteration `train_iters` at `seconds` an iteration; evaluations and checkpoints
    are not counted.
    """
    return max(0, train_iters - iteration) * seconds


def perplexity(loss: float) -> float:
    """exp(min(20, loss)): the cap is Megatron's, so that an untrained model prints a number. NaN
    stays NaN.
    """
    return math.exp(loss if math.isnan(loss) else min(20.0, loss))


def evaluation_metrics(
    loss: float,
    *,
    split: str = "validation",
    source: str | None = None,
    bytes_per_token: float | None = None,
) -> Metrics:
    """Metrics of one evaluation: `lm loss <split>`, its ppl and, for the validation loss of data
    whose bytes per token are known, bits-per-byte.

    `loss` is in nats per token; `source` names one of several validation sources and is appended to
    every name.
    """
    suffix = "" if source is None else f" {source}"
    result = {f"lm loss {split}{suffix}": loss, f"lm loss {split} ppl{suffix}": perplexity(loss)}
    if bytes_per_token is not None and split == "validation":
        result[f"bits-per-byte{suffix}"] = loss / math.log(2) / bytes_per_token
    return result


def save_metrics(*, size: int, seconds: float, stall: float) -> Metrics:
    """Metrics of a checkpoint of `size` bytes that took `seconds` in all and held training up for
    `stall`.
    """
    return {
        "save-checkpoint-seconds": seconds,
        "save-checkpoint-stall-seconds": stall,
        "save-checkpoint-gb-per-second": size / 1e9 / seconds,
        "save-checkpoint-bytes": size,
    }


def memory_metrics(device: torch.device) -> Metrics:
    """Memory of this process in bytes, without a device synchronisation.

    CUDA: torch's allocator. CPU on Linux: resident set and its high-water mark (VmRSS and VmHWM of
    /proc/self/status), which hold the interpreter and its libraries too. Elsewhere nothing is known
    and nothing is returned.
    """
    if device.type == "cuda":
        import torch

        return {
            "mem-reserved-bytes": torch.cuda.memory_reserved(device),
            "mem-allocated-bytes": torch.cuda.memory_allocated(device),
            "mem-max-allocated-bytes": torch.cuda.max_memory_allocated(device),
        }
    status = Path("/proc/self/status")
    if not status.exists():
        return {}
    kib = {
        key: int(rest.split()[0])
        for key, _, rest in (line.partition(":") for line in status.read_text().splitlines())
        if key in ("VmRSS", "VmHWM")
    }
    return {
        "mem-allocated-bytes": kib["VmRSS"] * 1024,
        "mem-max-allocated-bytes": kib["VmHWM"] * 1024,
    }


class Timers:
    """Named wall-clock timers: `with timers("data"): ...`, then `timers.take()` at each log step.

    They never synchronise the device: on a GPU a timer sees the time its code took on the host, and
    work still queued there is counted where the host next waits. Times of an iteration
    (`iteration-time`) are right over a log interval, which ends in such a wait.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        in_trace: Callable[[str], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        """`in_trace`: the range that a timer's block is in traces."""
        self._clock, self._in_trace = clock, in_trace
        self._seconds: Metrics = {}
        self._taken: Metrics = {}  # of all intervals before
        self._inside = 0.0  # seconds of the timers that ran inside the present one

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the wall time of the block, without that of timers inside it, to timer `name`, also
        when the block raises.
        """
        start = self._clock()
        outer = self._inside
        self._inside = 0.0
        try:
            with self._in_trace(name):
                yield
        finally:
            seconds = self._clock() - start
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds - self._inside
            self._inside = outer + seconds

    def take(self) -> Metrics:
        """Seconds of each timer since the last call; all start again from zero."""
        seconds = self._seconds
        for name, value in seconds.items():
            self._taken[name] = self._taken.get(name, 0.0) + value
        self._seconds = {}
        return seconds

    def total(self, name: str) -> float:
        """Seconds of a timer since the beginning, whatever was taken."""
        return self._taken.get(name, 0.0) + self._seconds.get(name, 0.0)


def timer_metrics(
    seconds: Metrics, *, iterations: int, elapsed: float, timing_log_level: int
) -> Metrics:
    """`data-wait-fraction` from the timer `data`, and at --timing-log-level 1 `<timer>-time` in
    seconds per iteration.

    `seconds` is `Timers.take()` over `iterations` iterations that took `elapsed` seconds of wall
    time.
    """
    result = {"data-wait-fraction": seconds.get("data", 0.0) / elapsed}
    if timing_log_level > 0:
        result.update({f"{name}-time": total / iterations for name, total in seconds.items()})
    return result
