"""The tracker itself: what counts, once, for as long as it lives."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from unit.zero.tracker import CALLS, LiveBytes

from megatron.distributed.collectives import NATIVE

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


def test_all_functions_of_torch_distributed_that_the_project_calls_are_sampled():
    source = "".join(
        path.read_text()
        for path in (Path(__file__).resolve().parents[3] / "megatron/distributed").glob("*.py")
    )
    called = {name for name in dir(dist) if f"dist.{name}(" in source}
    # one function calls what is looked up by name
    assert source.count("getattr(dist, ") == source.count("getattr(dist, NATIVE[operation])(") == 1
    called |= set(NATIVE.values())
    assert called - set(CALLS) <= {
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
