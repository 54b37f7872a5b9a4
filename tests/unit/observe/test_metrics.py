"""Rates, timers and memory."""

from __future__ import annotations

import math
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from distributed.pool import warm_context
from megatron.tools._report.metric_names import METRICS

from megatron.observe.events import Timers
from megatron.observe.metrics import (
    evaluation_metrics,
    is_measured,
    memory_metrics,
    save_metrics,
    timer_metrics,
    wandb_name,
)


def test_evaluation_metrics():
    assert evaluation_metrics(math.log(16), bytes_per_token=4.0) == {
        "lm loss validation": math.log(16),
        "lm loss validation ppl": pytest.approx(16),
        "bits-per-byte": pytest.approx(1.0),
    }
    assert evaluation_metrics(25.0)["lm loss validation ppl"] == math.exp(20)  # the greatest
    assert math.isnan(evaluation_metrics(math.nan)["lm loss validation ppl"])
    assert set(evaluation_metrics(1.0, split="test", bytes_per_token=4.0)) == {
        "lm loss test",
        "lm loss test ppl",
    }
    assert set(evaluation_metrics(1.0, source="wiki", bytes_per_token=4.0)) == {
        "lm loss validation wiki",
        "lm loss validation ppl wiki",
        "bits-per-byte wiki",
    }


def test_timers_sum_and_start_again(monkeypatch):
    ticks = iter([0.0, 1.0, 10.0, 12.0, 20.0, 25.0, 30.0, 30.5])
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks))
    timers = Timers()
    for name in ("data", "data", "optimizer"):
        with timers(name):
            pass
    with pytest.raises(KeyError), timers("data"):
        raise KeyError("the time until an exception counts too")
    seconds = timers.take()
    assert seconds == {"data": 3.5, "optimizer": 5.0} and timers.take() == {}
    assert timer_metrics(seconds, iterations=2, elapsed=14.0, timing_log_level=0) == {
        "data-wait-fraction": 0.25
    }
    assert timer_metrics(seconds, iterations=2, elapsed=14.0, timing_log_level=1) == {
        "data-wait-fraction": 0.25,
        "data-time": 1.75,
        "optimizer-time": 2.5,
    }


def memory_of_64_mib() -> tuple[dict[str, float], dict[str, float], int]:
    """Memory of this process before and with a touched tensor, and the tensor's bytes."""
    before, held = memory_metrics(torch.device("cpu")), torch.ones(16 * 2**20)
    return before, memory_metrics(torch.device("cpu")), held.nbytes


def test_memory_of_a_cpu_process_follows_what_it_holds():
    """In a separate process: one that trained before keeps freed memory
    (megatron/distributed/setup.py) and takes new tensors from it.
    """
    with ProcessPoolExecutor(1, mp_context=warm_context()) as process:
        before, after, size = process.submit(memory_of_64_mib).result()
    assert after["mem-allocated-bytes"] - before["mem-allocated-bytes"] > 0.9 * size
    assert after["mem-max-allocated-bytes"] >= after["mem-allocated-bytes"]
    assert set(after) <= set(METRICS) and "mem-reserved-bytes" not in after


def test_a_status_file_with_another_kind_of_line_and_no_peak(monkeypatch):
    text = "a line without a value\nVmRSS:\t 3 kB\n"
    monkeypatch.setattr(Path, "read_text", lambda _path: text)
    assert memory_metrics(torch.device("cpu")) == {"mem-allocated-bytes": 3072}


def test_sections_of_wandb():
    found = [
        ("consumed_samples", "samples"),
        ("consumed-tokens", "tokens"),
        ("lm loss", "train/lm loss"),
        ("output-penalty", "train/output-penalty"),  # a layer's scalar
        ("lm loss validation ppl wiki", "validation/lm loss validation ppl wiki"),
        ("lm loss test", "validation/lm loss test"),
        ("bits-per-byte", "validation/bits-per-byte"),
        ("mfu", "speed/mfu"),
        ("forward-backward-time", "speed/forward-backward-time"),
        ("save-checkpoint-seconds", "speed/save-checkpoint-seconds"),
        ("mem-reserved-bytes", "memory/mem-reserved-bytes"),
        ("grad-norm", "health/grad-norm"),
        ("grad-norm/layers.3", "grad-norm/layers.3"),
        ("params-norm/embedding", "params-norm/embedding"),
        ("lm loss validation de/web", "validation/lm loss validation de/web"),
    ]
    assert [(name, wandb_name(name)) for name, _ in found] == found
    assert len({wandb_name(name) for name in METRICS}) == len(METRICS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_of_a_gpu():
    held = torch.ones(2**20, device="cuda")
    row = memory_metrics(held.device)
    assert set(row) == {"mem-reserved-bytes", "mem-allocated-bytes", "mem-max-allocated-bytes"}
    assert row["mem-reserved-bytes"] >= row["mem-allocated-bytes"] >= held.nbytes


def test_what_depends_on_the_machine():
    """No comparison of two runs looks at it."""
    same = {name for name in METRICS if not is_measured(name)}
    assert {"lm loss", "grad-norm", "learning-rate", "consumed_samples", "expert-load-max"} <= same
    assert not {"timestamp", "throughput", "mfu", "goodput", "rank-time-max", "world-size"} & same
    assert not set(save_metrics(size=1, seconds=1.0, stall=1.0)) & same
    assert is_measured("forward-backward-time") and not is_measured("lm loss validation wiki")
