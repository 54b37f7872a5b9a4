"""The constants of this machine: kernels and links timed alone, and short runs of the program that
give the rest.

The runs are those that train, on all processes that the machine has room for. On a GPU nothing of
this has run yet.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.tools._plan.fit import Sample, fit, run_sample
from megatron.tools._plan.hardware import Hardware, load_hardware

from megatron.config.errors import UserError
from megatron.model.arithmetic import peak_tflops

ROOT = Path(__file__).resolve().parents[2]


class ShortRun(NamedTuple):
    """A run of the program that is timed. `batch`: sequences in a step."""

    hidden: int
    layers: int
    seq: int
    ranks: int
    more: str = ""
    micro_batch: int = 2
    batch: int = 8


CPU_RUNS = (
    ShortRun(64, 8, 32, 1, micro_batch=1),
    ShortRun(64, 2, 32, 1, micro_batch=1, batch=16),
    ShortRun(128, 4, 256, 1),
    ShortRun(256, 4, 256, 1),
    ShortRun(512, 2, 128, 1, micro_batch=4),
    ShortRun(256, 4, 256, 2),
    ShortRun(128, 4, 128, 2, "--zero-stage 3"),
    ShortRun(256, 4, 256, 2, "--tensor-model-parallel-size 2"),
    ShortRun(128, 4, 128, 4, "--tensor-model-parallel-size 2 --zero-stage 1"),
)
GPU_RUNS = (
    ShortRun(1024, 8, 2048, 1, "--bf16"),
    ShortRun(4096, 2, 4096, 1, "--bf16"),
    ShortRun(4096, 2, 4096, 2, "--bf16", batch=16),
    ShortRun(
        4096, 2, 4096, 2, "--bf16 --tensor-model-parallel-size 2 --sequence-parallel", batch=16
    ),
)
ITERATIONS, WARM = 24, 4
SIZES = (1 << 16, 1 << 20, 1 << 23)  # bytes of collectives


def _best(device: torch.device, call: Callable[[], object], times: int = 7) -> float:
    """Seconds of the fastest of some calls."""
    found = []
    for _ in range(times):
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        found.append(time.perf_counter() - start)
    return min(found)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def kernel_constants(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Rates of products, of copies and of launches."""
    most, half = _product_rate(device, dtype)
    x = torch.randn((1 << 28 if device.type == "cuda" else 1 << 22), device=device)
    y = torch.empty_like(x)
    moved = 2 * x.nbytes / _best(device, lambda: y.copy_(x)) / 1e9
    tiny = torch.ones(8, device=device)

    def launches() -> None:
        for _ in range(1000):
            tiny.add_(1.0)

    # the program's own operators take the host longer than this one, which the short runs show
    return {
        "peak_tflops": most,
        "product_half": half,
        "memory_gbps": moved,
        "launch_us": _best(device, launches) * 1e3,
    }


def _product_rate(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """(TFLOP/s of large products, the dimension at which half of it is reached)."""
    cuda = device.type == "cuda"
    sizes = (2048, 4096, 8192) if cuda else (64, 128, 256, 512, 1024)
    rates = []
    for size in sizes:
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        repeat = max(1, (8192 if cuda else 512) // size)

        def products(a: torch.Tensor = a, b: torch.Tensor = b, repeat: int = repeat) -> None:
            for _ in range(repeat):
                torch.mm(a, b)

        rates.append(2.0 * size**3 * repeat / _best(device, products) / 1e12)
    # rate = most x d / (d + half), through the smallest and the best size
    small, best = rates[0], max(rates)
    at = sizes[rates.index(best)]
    half = (best - small) / max(small / sizes[0] - best / at, 1e-12)
    half = min(max(half, 1.0), 1000.0)
    return best * (at + half) / at, half


def _link_process(rank: int, ranks: int, store: str, out: str) -> None:
    torch.set_num_threads(1)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(rank)
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks
    )
    found = []
    for size in SIZES:
        x = torch.ones(size // 4, device=device)
        dist.all_reduce(x)
        found.append(_best(device, partial(dist.all_reduce, x), 11))
    if rank == 0:
        Path(out).write_text(" ".join(map(str, found)))
    dist.destroy_process_group()


def link_constants(ranks: int) -> dict[str, float]:
    """Latency of a collective, and bytes a second within the node, from all-reduces."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        store = str(Path(folder) / "store")
        mp.spawn(_link_process, (ranks, store, str(out)), nprocs=ranks)
        seconds = [float(word) for word in out.read_text().split()]
    moved = [2 * (ranks - 1) / ranks * size for size in SIZES]
    rate = (moved[-1] - moved[0]) / max(seconds[-1] - seconds[0], 1e-9)
    return {
        "collective_us": max(seconds[0] - moved[0] / rate, 1e-6) * 1e6,
        "link_gbps": rate / 1e9,
    }


def run_flags(run: ShortRun) -> list[str]:
    """The flags of a short run."""
    hidden, layers, seq, _, more, micro, batch = run
    text = (
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {max(4, hidden // 64)}"
        f" --seq-length {seq} --micro-batch-size {micro} --global-batch-size {batch} --mock-data"
        f" --vocab-size 1000 --train-iters {ITERATIONS} --lr 1e-4 --log-interval 1 --eval-iters 0"
        f" --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"
        f" --hidden-dropout 0 --attention-dropout 0 {more}"
    )
    return text.split()


def timed_run(folder: Path, run: ShortRun, environment: dict[str, str]) -> Path:
    """The metrics file of a run. Raises UserError where it fails."""
    metrics = folder / "metrics.jsonl"
    command = [sys.executable]
    if run.ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={run.ranks}"]
    command += ["-m", "pretrain_gpt", *run_flags(run), "--metrics-file", str(metrics)]
    environment = environment | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise UserError(f"measure: a run of {run.ranks} ranks failed: {lines[-1] if lines else ''}")
    return metrics


def short_runs(runs: Sequence[ShortRun], environment: dict[str, str], device: str) -> list[Sample]:
    """How long the iterations of these took."""
    samples = []
    with tempfile.TemporaryDirectory() as folder:
        for number, run in enumerate(runs):
            place = Path(folder) / str(number)
            place.mkdir()
            samples.append(run_sample(timed_run(place, run, environment), device, WARM))
    return samples


def measure_machine(environment: dict[str, str]) -> tuple[Hardware, dict[str, str]]:
    """(the device, where each constant comes from). The short runs get this environment."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda") if cuda else torch.device("cpu")
    torch.set_num_threads(1)
    kernels = kernel_constants(device, torch.bfloat16 if cuda else torch.float32)
    devices = torch.cuda.device_count() if cuda else len(os.sched_getaffinity(0))
    links = link_constants(min(2, devices)) if devices > 1 else {}
    prior = _prior(cuda, kernels | links, devices)
    most = devices if cuda else 2 * devices  # processes may share a core, not a GPU
    runs = [run for run in (GPU_RUNS if cuda else CPU_RUNS) if run.ranks <= most]
    samples = short_runs(runs, environment, device.type)
    hardware = fit(samples, prior, rounds=16)
    timed = f"timed alone on this machine, torch {torch.__version__}"
    sources = dict.fromkeys((*kernels, *links), timed)
    fitted = f"fitted to {len(samples)} short runs on this machine"
    for each in dataclasses.fields(Hardware):
        if each.name not in ("name", "errors"):
            moved = getattr(hardware, each.name) != getattr(prior, each.name)
            kept = sources.get(each.name, "assumed")
            sources[each.name] = f"{fitted}; before: {kept}" if moved else kept
    return hardware, sources


def _prior(cuda: bool, measured: dict[str, Any], devices: int) -> Hardware:
    """The device before the short runs."""
    if cuda:
        name = torch.cuda.get_device_name()
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        known = load_hardware("h100")
        peak = peak_tflops(name, torch.bfloat16) or measured["peak_tflops"]
        measured["product_efficiency"] = min(measured.pop("peak_tflops") / peak, 0.9)
        found = dataclasses.replace(known, name=name, memory_gib=memory, node_size=devices)
        return dataclasses.replace(found, peak_tflops=peak, errors={}, **measured)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return Hardware(
        name=f"CPU with {devices} cores",
        memory_gib=pages / devices,
        peak_fp8_tflops=measured["peak_tflops"],
        network_gbps=1.0,
        host_gbps=measured["memory_gbps"],
        host_memory_gbps=measured["memory_gbps"],
        node_size=64,
        product_efficiency=0.9,
        fp8_efficiency=0.5,
        fp8_half=100.0,
        flash1_efficiency=0.3,
        flash2_efficiency=0.3,
        flash3_efficiency=0.3,
        attention_half=50.0,
        memory_efficiency=0.5,
        hidden_traffic=2.0,
        link_efficiency=0.9,
        switch_gain=1.0,
        network_efficiency=0.9,
        congestion=0.05,
        link_latency_us=10.0,
        network_latency_us=50.0,
        overlap=0.3,
        slowdown=0.5,
        jitter=0.003,
        layer_jitter=0.01,
        step_ms=2.0,
        cores=devices,
        **({"collective_us": 100.0, "link_gbps": 1.0} | measured),
    )
