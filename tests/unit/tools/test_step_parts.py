"""Where a step went: traces small enough to be worked out by hand, as a CPU and as CUDA write
them, and intervals against a count of every moment.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from megatron.tools._report.step_parts import (
    in_milliseconds,
    mean_steps,
    parts_of_events,
    step_table,
)

from megatron.config.errors import UserError


def event(cat: str, name: str, begin: float, end: float, tid: int = 1, **args: object) -> dict:
    when = {"ts": begin, "dur": end - begin, "tid": tid}
    return {"ph": "X", "cat": cat, "name": name, **when, "args": args}


def ranges(*words: tuple) -> list[dict]:
    return [event("user_annotation", *each) for each in words]


ON_A_CPU = [
    *ranges(
        ("iteration 7", 0, 100),
        ("forward-backward", 0, 78),
        ("data", 0, 8),
        ("forward layers.0 micro-batch 0", 9, 58),
        ("all-reduce tp", 45, 55),
        ("receive pp", 60, 75),
        ("optimizer", 80, 95),
        ("all-reduce world", 84, 86),
        ("all-reduce tp", 90, 99, 9),
    ),
    event("cpu_op", "aten::copy_", 2, 4),
    event("cpu_op", "aten::linear", 10, 30),
    event("cpu_op", "aten::addmm", 12, 20),
    event("cpu_op", "_RowLinear", 40, 60),
    event("cpu_op", "c10d::allreduce_", 46, 47),
    event("cpu_op", "aten::_fused_adamw_", 82, 90),
    event("cpu_op", "aten::mm", 0, 100, 9),  # of another thread
]


def launched(cat: str, name: str, at: float, begin: float, end: float, number: int, tid: int = 1):
    """Work on the device, and the call that launched it."""
    return [
        event("cuda_runtime", "cudaLaunchKernel", at, at + 1, tid, correlation=number),
        event(cat, name, begin, end, 7, correlation=number, stream=7),
    ]


NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
ON_A_GPU = [
    *ranges(
        ("iteration 1", 0, 100),
        ("data", 0, 10),
        ("all-reduce tp", 14, 18),
        ("all-reduce tp", 20, 24, 2),  # in a backward pass, on autograd's thread
        ("receive pp", 26, 30),
        ("send pp", 33, 36),
        ("optimizer", 40, 60),
        ("iteration 2", 100, 220),
        ("data", 150, 165),
        ("reduce-scatter dp", 170, 175),
    ),
    *launched("kernel", "gemm", 12, 20, 50, 1),
    *launched("kernel", NCCL, 15, 40, 70, 2),
    *launched("kernel", NCCL, 22, 60, 75, 3, tid=2),
    *launched("kernel", "ncclDevKernel_SendRecv", 27, 75, 90, 4),
    *launched("kernel", "gemm", 32, 85, 110, 5),
    *launched("kernel", "ncclDevKernel_SendRecv", 34, 105, 118, 6),
    *launched("kernel", "adamw", 45, 125, 140, 7),
    *launched("kernel", "gemm", 105, 140, 150, 8),
    *launched("gpu_memcpy", "Memcpy DtoD", 168, 170, 180, 9),
    *launched("kernel", "ncclDevKernel_ReduceScatter", 172, 170, 200, 10),
    *launched("kernel", NCCL, 176, 200, 206, 11),  # in no range
]


def microseconds(parts: dict[str, float]) -> dict[str, int]:
    return {name: round(1e6 * seconds) for name, seconds in parts.items()}


def listed(text: str) -> dict[str, int]:
    """Microseconds by part."""
    parts = (each.rpartition(" ") for each in text.split(", "))
    return {name: int(number) for name, _, number in parts}


def test_the_thread_that_trains_on_a_cpu():
    (step,) = parts_of_events(3, ON_A_CPU)
    assert (step.rank, step.iteration, round(1e6 * step.seconds)) == (3, 7, 100)
    passes = listed("compute 30, optimizer 13, exposed tp 10, exposed world 2")
    assert microseconds(step.parts) == passes | listed("pipeline idle 15, host 22, data 8")


def test_the_streams_of_a_gpu():
    """The second step begins on the device when the first one's last kernel has ended there, which
    is later than on the host.
    """
    first, second = parts_of_events(0, ON_A_GPU)
    assert round(1e6 * first.seconds) == 140 and round(1e6 * second.seconds) == 66
    expected = (
        "compute 55, optimizer 15, exposed pp 8, exposed tp 25, pipeline idle 10, host 17, data 10"
    )
    assert microseconds(first.parts) == listed(expected)
    expected = "compute 20, exposed dp 20, exposed unnamed 6, host 5, data 15"
    assert microseconds(second.parts) == listed(expected)


SAVING = ranges(
    ("iteration 1", 0, 100),
    ("optimizer", 10, 90),
    ("save-checkpoint", 20, 30),
)


def test_a_wait_for_a_save_is_within_the_optimizer():
    """What the optimizer does after it is the optimizer's."""
    (step,) = parts_of_events(0, SAVING)
    assert microseconds(step.parts) == {"optimizer": 70, "host": 20, "save-checkpoint": 10}
    updates = [
        *launched("kernel", "adamw", 15, 16, 20, 1),
        *launched("kernel", "adamw", 40, 41, 90, 2),
        *launched("kernel", "gemm", 95, 96, 100, 3),
    ]
    (step,) = parts_of_events(0, [*SAVING, *updates])
    expected = "compute 4, optimizer 53, host 33, save-checkpoint 10"
    assert microseconds(step.parts) == listed(expected)


def test_a_folder_of_traces_and_its_means(tmp_path: Path):
    assert step_table(tmp_path) == []
    for rank, events in ((10, ON_A_CPU), (2, ON_A_GPU)):
        path = tmp_path / f"rank-{rank}.trace.json"
        path.write_text(json.dumps({"traceEvents": [*events, {"ph": "M", "name": "process_name"}]}))
    steps = step_table(tmp_path)
    assert [(step.rank, step.iteration) for step in steps] == [(2, 1), (2, 2), (10, 7)]
    second, tenth = mean_steps(steps)
    assert (second.rank, second.steps) == (2, 2) and (tenth.rank, tenth.steps) == (10, 1)
    assert in_milliseconds(second, "compute") == "0.0 (36%)"  # of 206 us in two
    assert in_milliseconds(second, "exposed dp") == "0.0 (10%)"


@pytest.mark.parametrize("text", ["", "[]", '{"events": []}', '{"traceEvents": [{"ph": "X"'])
def test_what_is_no_trace_is_refused(tmp_path, text):
    (tmp_path / "rank-0.trace.json").write_text(text)
    with pytest.raises(UserError, match=r"rank-0.trace.json: not a trace of --profile"):
        step_table(tmp_path)
