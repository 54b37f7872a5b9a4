"""The tracker itself: what counts, once, for as long as it lives; against the C library's own count
of what is allocated.
"""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed.pool import World
from torch import Tensor
from unit.zero.tracker import CALLS, LiveBytes

from megatron.distributed.collectives import ALL_GATHER, REDUCE_SCATTER

KIB = 1024


def kibibytes(count: int) -> Tensor:
    return torch.zeros(count * KIB, dtype=torch.uint8)


def grown(live: LiveBytes, since: int = 0) -> int:
    """KiB beyond `since` that are alive at the next sample."""
    return live.sample()["total"] // KIB - since


def test_storages_count_once_and_as_long_as_they_live():
    with LiveBytes() as live:
        base = grown(live)
        x = kibibytes(8)
        assert grown(live, base) == 8
        views = [
            x[: 2 * KIB],
            x.view(2, -1),
            x.detach(),
            torch.nn.Parameter(x.view(torch.float32), requires_grad=False),
        ]
        assert grown(live, base) == 8
        del x
        assert grown(live, base) == 8
        del views
        assert grown(live, base) == 0


def test_a_resized_storage_counts_at_its_size():
    with LiveBytes() as live:
        base = grown(live)
        x = kibibytes(8)
        x.untyped_storage().resize_(0)
        assert grown(live, base) == 0
        x.untyped_storage().resize_(4 * KIB)
        assert grown(live, base) == 4
        y = torch.empty(0, dtype=torch.uint8)
        y.resize_(16 * KIB)
        assert grown(live, base) == 20
        span = live.mark()
        assert span.now["total"] // KIB - base == span.peak["total"] // KIB - base == 20


def test_in_place_operators_make_nothing_and_temporaries_make_a_peak():
    with LiveBytes() as live:
        x = kibibytes(8)
        base = live.mark().now["total"]
        x.add_(1).mul_(2)
        assert live.mark().peak["total"] == base
        x.copy_(x + 1)
        span = live.mark()
        assert (span.now["total"], span.peak["total"]) == (base, base + 8 * KIB)


def test_what_the_graph_alone_holds_counts_until_the_backward_pass():
    with LiveBytes() as live:
        x = torch.zeros(KIB, requires_grad=True)
        base = grown(live)
        y = x.exp().exp().sum()  # each exponential is kept for its derivative
        assert grown(live, base) == 8
        y.backward()
        assert grown(live, base) == 4  # x.grad


def test_what_lived_before_is_found():
    held, module, cycle = (
        kibibytes(512),
        torch.nn.Linear(256, 256, bias=False),
        {"a": [kibibytes(256)]},
    )
    cycle["b"] = cycle
    with LiveBytes() as live:
        before = live.mark().now["before"]
        del held
        assert before - live.mark().now["before"] == 512 * KIB
        module.weight.data = torch.empty(0)
        assert before - live.mark().now["before"] == 768 * KIB
        del cycle
        gc.collect()
        assert before - live.mark().now["before"] == 1024 * KIB


class Mallinfo(ctypes.Structure):
    """struct mallinfo2 of malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def allocated() -> int:
    """Bytes that the C library has handed out."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        pytest.skip("needs glibc >= 2.33")
    mallinfo2.restype = Mallinfo
    info = mallinfo2()
    return info.uordblks + info.hblkhd


def test_it_agrees_with_the_c_library():
    """Through forward, backward and an optimizer's first step, within 2%: what operators hide
    inside them is gone when they return.
    """
    layers = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
    optimizer, x = torch.optim.AdamW(layers.parameters(), fused=True), torch.ones(512, 512)
    optimizer.step()  # imports
    layers(x).sum().backward()
    optimizer.zero_grad()
    with LiveBytes() as live:
        held, base = [], (grown(live) * KIB, allocated())

        def compare() -> None:
            ours, theirs = grown(live) * KIB - base[0], allocated() - base[1]
            held.append(ours)
            assert abs(ours - theirs) <= 0.02 * ours + 64 * KIB

        y = layers(x).sum()
        compare()
        y.backward()
        compare()
        optimizer.step()
        compare()
    weights, activations = 4 * (512 + 1) * 512 * 4, 512 * 512 * 4
    assert (
        held == sorted(held)
        and held[0] >= 3 * activations
        and abs(held[2] - 3 * weights) <= 64 * KIB
    )


def hidden_bytes(name: str, size: int) -> tuple[int, int]:
    """(bytes that the tracker saw appear during a collective of `size` bytes a rank, bytes by which
    resident memory rose in it).
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    small, large = torch.zeros(size // 4), torch.zeros(world * size // 4)
    large.add_(1), small.add_(1)  # resident
    status = Path("/proc/self/status")

    def memory(row: str) -> int:
        return next(
            int(line.split()[1]) * KIB
            for line in status.read_text().splitlines()
            if line.startswith(row)
        )

    def messages() -> None:
        works = [dist.irecv(large[: small.numel()], src=1 - rank), dist.isend(small, dst=1 - rank)]
        for work in works:
            work.wait()

    parts = list(large.chunk(world))
    calls = {
        "isend": messages,
        "all_reduce": lambda: dist.all_reduce(large),
        "all_gather": lambda: dist.all_gather(parts, small),
        ALL_GATHER: lambda: getattr(dist, ALL_GATHER)(large, small),
        REDUCE_SCATTER: lambda: getattr(dist, REDUCE_SCATTER)(small, large),
    }
    with LiveBytes() as live:
        dist.barrier()
        before, base = live.mark().now["total"], memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
        calls[name]()
        top = memory("VmHWM")
        return live.mark().peak["total"] - before, top - base


@pytest.fixture(scope="module")
def fresh_world():
    """Processes that have freed nothing yet: what the C library kept would be used again, and
    resident memory not rise.
    """
    world = World(2)
    yield world
    world.close()


@pytest.mark.parametrize("name", ["isend", "all_reduce", "all_gather", ALL_GATHER, REDUCE_SCATTER])
def test_buffers_that_collectives_hide_are_counted(fresh_world, name):
    """Gloo's own all-gathers and reduce-scatters take as much again as their whole tensor: seen in
    the resident memory of both ranks.
    """
    size = 32 << 20
    for ours, real in fresh_world.run(hidden_bytes, name, size):
        assert abs(ours - real) <= size / 4, (ours / size, real / size)


def waits() -> list[int]:
    """KiB seen at each sample while a message arrives in a buffer that only the pending work
    holds.
    """
    rank, found = dist.get_rank(), []
    with LiveBytes() as live:
        base = grown(live)
        sample = live.sample

        def noted(hidden: int = 0):
            found.append(sample(hidden)["total"] // KIB - base)

        with mock.patch.object(live, "sample", noted):
            x, y = kibibytes(4), kibibytes(8)
            works = [dist.irecv(y, src=1 - rank), dist.isend(kibibytes(8), dst=1 - rank)]
            x.untyped_storage().resize_(0)  # no operator
            for work in works:
                work.wait()
    return found


def test_messages_and_waits_are_sampled(gloo_world):
    for found in gloo_world(2).run(waits):
        # the resize between two operators is seen at the wait
        assert max(found) == 20 and found[-1] == 16


def test_all_functions_of_torch_distributed_that_the_project_calls_are_sampled():
    source = "".join(
        path.read_text()
        for path in (Path(__file__).resolve().parents[3] / "megatron/distributed").glob("*.py")
    )
    called = {name for name in dir(dist) if f"dist.{name}(" in source}
    # one function calls what is looked up by name, and is given one of two names
    assert source.count("getattr(dist, ") == source.count("getattr(dist, operation)(") == 1
    operations = re.findall(r"[^f] _start_native\(\s*(\w+)", source)
    assert set(operations) == {"ALL_GATHER", "REDUCE_SCATTER"}, operations
    assert {ALL_GATHER, REDUCE_SCATTER} <= CALLS.keys()
    assert called - CALLS.keys() <= {
        "init_process_group",
        "destroy_process_group",
        "new_group",
        "get_backend",
        "get_rank",
        "get_world_size",
        "is_initialized",
        "is_nccl_available",
        "batch_isend_irecv",
        "P2POp",
        "TCPStore",
        "PrefixStore",
    }, called
