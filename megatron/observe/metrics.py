"""Arithmetic of metrics, whose names are the same in the console line, metrics.jsonl, TensorBoard
and wandb. Nothing here waits for a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

Metrics = dict[str, float]  # by name

_MEASURED = {
    "timestamp",
    "throughput",
    "tokens-per-second-per-gpu",
    "mfu",
    "data-wait-fraction",
    "pipeline-bubble-fraction",
    "world-size",
    "resumed-from-iteration",
}


def is_measured(name: str) -> bool:
    """Whether a metric depends on the machine (times, rates, memory, world size, resume marks), so
    that comparisons of two runs ignore it.
    """
    return (
        name in _MEASURED
        or name.endswith("-time")
        or name.startswith(("mem-", "save-checkpoint-", "rank-time-", "slowest-rank", "goodput"))
    )


# x axes of wandb in addition to `iteration`, on every row
AXES = {"consumed_samples": "samples", "consumed-tokens": "tokens"}
# section: prefixes of names; of the others, measured ones are in `speed`, the rest in `train`
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
    """`section/name`, as wandb groups charts; axes, and names with a section (norms of layers), are
    unchanged. A source's name may be a path.
    """
    if name in AXES or "/" in name and not name.startswith(SECTIONS["validation"]):
        return AXES.get(name, name)
    rest = "speed" if is_measured(name) else "train"
    found = (section for section, begins in SECTIONS.items() if name.startswith(begins))
    return f"{next(found, rest)}/{name}"


def rates(
    *,
    seconds: float,
    tokens: float,
    flops: float,
    padded_flops: float,
    world_size: int,
    peak_tflops: float | None,
) -> Metrics:
    """Speed of an iteration of `seconds` and `tokens` (global batch x sequence length).

    `flops` counts the real vocabulary and gives `mfu`, relative to `peak_tflops` (TFLOP/s of one
    device; None: no `mfu`). `padded_flops` counts the padded one and gives Megatron's `throughput`.
    """
    per_rank = 1 / (seconds * world_size)
    result = {
        "iteration-time": seconds,
        "throughput": padded_flops * per_rank / 1e12,
        "tokens-per-second-per-gpu": tokens * per_rank,
    }
    if peak_tflops is not None:
        result["mfu"] = flops * per_rank / (peak_tflops * 1e12)
    return result


def perplexity(loss: float) -> float:
    """exp(min(20, loss)), capped as in Megatron-LM; NaN stays NaN."""
    return math.exp(loss if math.isnan(loss) else min(20.0, loss))


def evaluation_metrics(
    loss: float,
    *,
    split: str = "validation",
    source: str | None = None,
    bytes_per_token: float | None = None,
) -> Metrics:
    """Metrics of an evaluation with a `loss` in nats per token: the loss, its perplexity, and
    bits-per-byte for validation data whose bytes per token are known. `source` names one of several
    validation sources and is appended to every name.
    """
    suffix = "" if source is None else f" {source}"
    result = {f"lm loss {split}{suffix}": loss, f"lm loss {split} ppl{suffix}": perplexity(loss)}
    if bytes_per_token is not None and split == "validation":
        result[f"bits-per-byte{suffix}"] = loss / math.log(2) / bytes_per_token
    return result


def expert_load_metrics(counts: Mapping[str, list[float]], by_layer: bool) -> Metrics:
    """The greatest and the smallest load of an expert in any layer, as a multiple of the mean, and
    the share of dropped choices. `counts`: by layer the tokens of each expert, and last the dropped
    choices. `by_layer`: also for each layer.
    """
    end = ".expert-tokens"  # layers.3.expert-tokens
    rows = {name.removesuffix(end): row for name, row in counts.items() if name.endswith(end)}
    layers = [layer for layer, (*tokens, _) in rows.items() if any(tokens)]
    if not layers:
        return {}
    table = np.array([rows[layer] for layer in layers])
    tokens, dropped = table[:, :-1], table[:, -1]
    loads = tokens / tokens.mean(1, keepdims=True)
    found = {
        "expert-load-max": float(loads.max()),
        "expert-load-min": float(loads.min()),
        "expert-dropped": float(dropped.sum() / tokens.sum()),
    }
    if by_layer:
        columns = loads.max(1), loads.min(1), dropped / tokens.sum(1)
        for name, column in zip([*found], columns):
            found |= {f"{name}/{layer}": float(value) for layer, value in zip(layers, column)}
    return found


def save_metrics(*, size: int, seconds: float, stall: float) -> Metrics:
    """Metrics of a checkpoint of `size` bytes that took `seconds`, in which training waited for
    `stall` seconds.
    """
    return {
        "save-checkpoint-seconds": seconds,
        "save-checkpoint-stall-seconds": stall,
        "save-checkpoint-gb-per-second": size / 1e9 / seconds,
        "save-checkpoint-bytes": size,
    }


def memory_metrics(device: torch.device) -> Metrics:
    """Memory of this process in bytes, without synchronizing the device: of torch's CUDA allocator,
    or the resident set and its peak on Linux (with the interpreter and its libraries). Empty on
    other systems.
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
    kib = dict(line.partition(":")[::2] for line in status.read_text().splitlines())
    fields = {"mem-allocated-bytes": "VmRSS", "mem-max-allocated-bytes": "VmHWM"}
    # sandboxes count no peak
    return {name: int(kib[key].split()[0]) * 1024 for name, key in fields.items() if key in kib}


def timer_metrics(
    seconds: Metrics, *, iterations: int, elapsed: float, timing_log_level: int
) -> Metrics:
    """`data-wait-fraction`, and at --timing-log-level 1 `<timer>-time` in seconds per iteration.
    `seconds`: `Timers.take()` over `iterations` that took `elapsed` seconds of wall time.
    """
    result = {"data-wait-fraction": seconds.get("data", 0.0) / elapsed}
    if timing_log_level > 0:
        result.update({f"{name}-time": total / iterations for name, total in seconds.items()})
    return result
