"""The out-of-memory report: available memory, the largest tensors, the plan's prediction, and what
to change.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.tools._plan.memory import MemoryPlan
from megatron.tools._plan.verdict import RESERVE, memory_verdict
from torch import Tensor

from megatron.config.groups import Config
from megatron.distributed.groups import Groups
from megatron.optimizer.optimizer import Optimizer
from megatron.parallel.blocks import Block
from megatron.parallel.layer_runner import Graph
from megatron.training.profile import profile_folder, write_snapshot

SHOWN = 12  # largest kinds of tensors
GIB = 2**30
Buffer = tuple[str, Tensor | None]  # with what it is


def explain(
    error: Exception, config: Config, vocab_size: int, groups: Groups, device: torch.device
) -> None:
    """Add the report to an out-of-memory error, and write it to `rank-N.out-of-memory.txt` in
    --profile-dir.
    """
    # 1. What is alive, while the frames of the error still hold it.
    folder = profile_folder(config)
    found = live_tensors(device)
    largest = _largest_lines(found)
    taken, memory = _memory(device, sum(each.size for each in found))
    if config.logging.record_memory_history and folder is not None:
        path = write_snapshot(folder, groups.rank, device)
        largest += [f"history of the allocator: {path}"] if path else []
    del found
    # 2. What the plan had expected, and what to change.
    traceback.clear_frames(error.__traceback__)  # free memory for the plan
    gc.collect()
    try:
        planned = _advice(
            config, vocab_size, groups.world.size, device.type, groups.pp.rank, memory
        )
    except Exception as fault:
        planned = [f"the plan could not be made again: {type(fault).__name__}: {fault}"]
    # 3. The report, in the error and in a file: another rank's output may be all that a user sees.
    lines = [f"memory ran out on rank {groups.rank}", taken, *planned, *largest]
    if folder is not None:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"rank-{groups.rank}.out-of-memory.txt"
            text = "\n".join([*lines, f"{type(error).__name__}: {error}"]) + "\n"
            path.write_text(text, encoding="utf-8")
            lines.append(f"this text is in {path}")
    error.add_note("\n  ".join(lines))


def _advice(
    config: Config, vocab_size: int, world_size: int, device: str, pp_rank: int, gib: float
) -> list[str]:
    """The plan of a pipeline rank, and what to change so that it fits into `gib`."""
    plan = MemoryPlan(config, vocab_size, world_size, device)
    sizes = plan.ranks[pp_rank].sizes()
    total = sizes.pop("total")
    parts = ", ".join(f"{kind} {_gib(size)}" for kind, size in sizes.items())
    lines = [f"plan: {_gib(total)} at the worst moment of a step ({parts})"]
    # the reserve is a GPU's, for its kernels and NCCL
    verdict = memory_verdict(plan, gib if device == "cuda" else gib + RESERVE)
    if verdict.word != "fits":
        return [*lines, f"advice: {verdict.line.partition('; ')[2]}"]
    advice = "raise the limit (ulimit -v)"
    if device == "cuda":
        setting = "expandable_segments:True"
        older = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
        is_set = setting in os.environ.get("PYTORCH_ALLOC_CONF", older)
        advice = f"set PYTORCH_ALLOC_CONF={setting} against fragmentation"
        advice = "lower --micro-batch-size" if is_set else advice
    return [*lines, f"advice: by the plan the run fits; look for other processes, or {advice}"]


def _gib(size: float) -> str:
    return f"{size / GIB:.3g} GiB"


def _memory(device: torch.device, live: int) -> tuple[str, float]:
    """A line about available and used memory, `live` bytes of it in tensors; and the GiB that a run
    may use.
    """
    if device.type == "cuda":
        # Of the device as a whole: other processes take part of it, too.
        free, total = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        other = total - free - torch.cuda.memory_reserved(device)
        return (
            f"device: {_gib(total)}, of them {_gib(live)} live tensors, {_gib(kept)} that the "
            f"allocator keeps, {_gib(other)} of kernels, NCCL and other processes, "
            f"{_gib(free)} free"
        ), total / GIB
    # On a CPU the limit is the smaller of the machine's memory and ulimit -v.
    page = resource.getpagesize()
    total, limit = os.sysconf("SC_PHYS_PAGES") * page, resource.getrlimit(resource.RLIMIT_AS)[0]
    limited = limit != resource.RLIM_INFINITY and limit < total
    # ulimit -v limits addresses, not resident memory
    taken = page * int(Path("/proc/self/statm").read_text().split()[0 if limited else 1])
    what = "addresses (ulimit -v)" if limited else "memory"
    usable = (limit if limited else total) - max(0, taken - live)
    return (
        f"host: {_gib(limit if limited else total)} of {what}, of which this process has taken "
        f"{_gib(taken)}, {_gib(live)} of them by live tensors"
    ), usable / GIB


class LiveTensors(NamedTuple):
    """Tensors of one kind and shape: their number and bytes, views counted once."""

    label: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    number: int
    size: int


def _largest_lines(found: list[LiveTensors]) -> list[str]:
    lines = ["largest live tensors:"]
    for label, shape, dtype, count, size in found[:SHOWN]:
        times = f"{count} x " if count > 1 else ""
        kind = str(dtype).removeprefix("torch.")
        lines.append(f"  {_gib(size)}: {label}, {times}{list(shape)} {kind}")
    rest = found[SHOWN:]
    if rest:
        count, size = sum(each.number for each in rest), sum(each.size for each in rest)
        lines.append(f"  {_gib(size)}: {count} others")
    return lines


def live_tensors(device: torch.device) -> list[LiveTensors]:
    """The tensors in a device's memory, the largest first: buffers by block, activations by the
    operator that saved them, and everything else that Python can reach.
    """
    sizes: dict[tuple[str, tuple[int, ...], torch.dtype], list[int]] = {}
    seen = set()
    for label, tensor in _reachable():
        if tensor is None or tensor.device.type != device.type or tensor.layout != torch.strided:
            continue
        # Views share a storage, which counts once, under the first name it was found by.
        storage = tensor.untyped_storage()
        if storage._cdata in seen or not storage.nbytes():
            continue
        seen.add(storage._cdata)
        key = (label, tuple(tensor.shape), tensor.dtype)
        sizes.setdefault(key, []).append(storage.nbytes())
    found = [LiveTensors(*key, len(each), sum(each)) for key, each in sizes.items()]
    return sorted(found, key=lambda each: each.size, reverse=True)


def _reachable() -> list[Buffer]:
    """All tensors, identified ones first."""
    # The collector knows every object: a run's blocks, states and graphs are found without a
    # registry.
    buffers: list[Buffer] = []
    states: list[Buffer] = []  # master weights may be views of a block's
    nodes: list[Any] = []
    others: list[Buffer] = []
    for thing in gc.get_objects():
        kind = type(thing)  # isinstance would load lazy modules
        if issubclass(kind, Tensor):
            others.append(("tensor", thing))
        elif issubclass(kind, Block):
            buffers += _of_block(thing)
        elif issubclass(kind, Optimizer):
            for block, tensors in getattr(thing, "states", {}).items():
                states += [(f"{name} of {block.name}", x) for name, x in tensors.items()]
        elif kind is Graph:
            nodes += [edge.node for edge in thing.edges]
    return [*buffers, *states, *_kept_by_autograd(nodes), *others]


def _of_block(block: Block) -> list[Buffer]:
    """The flat buffers of a block that exist so far; views come after what they view."""
    names = {
        "weight": "weights",
        "grad": "main_grad",
        "grad_place": "main_grad",
        "summed": "reduced gradient",
        "master": "master weights",
        "rounded": "rounded weights",
    }
    return [
        (f"{what} of {block.name}", getattr(block, field, None)) for field, what in names.items()
    ]


def _kept_by_autograd(nodes: list[Any]) -> list[Buffer]:
    """The saved tensors of the graphs that end in these nodes, raw: unpacking one could recompute
    it.
    """
    found: list[Buffer] = []
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        # Saved tensors are attributes of a node; recomputed and offloaded ones appear as
        # their placeholders.
        nodes += [following for following, _ in node.next_functions]
        for name in dir(node):
            saved = getattr(node, name) if name.startswith("_raw_saved_") else ()
            for each in saved if isinstance(saved, (tuple, list)) else (saved,):
                tensor = getattr(each, "data", None)
                if isinstance(tensor, Tensor):
                    found.append((f"activation that {node.name()} keeps", tensor))
    return found
