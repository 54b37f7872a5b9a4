"""Choosing the device prepares the CPU's allocator; what torch is asked for when groups are
made.
"""

from __future__ import annotations

import platform
import resource
import subprocess
import sys
import threading
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from megatron.distributed import setup
from megatron.distributed.groups import Layout
from megatron.distributed.setup import MESSAGE_CTAS, disconnect, make_groups, nccl_options

FAULTS = """
import resource, sys, torch
from megatron.distributed.setup import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
# The first few freed blocks may be split by small objects: too small for the next tensor.
for _ in range(20):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.full((9 << 20,), 1.0)  # 36 MiB, freed at once
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode: str) -> int:
    return int(
        subprocess.run(
            [sys.executable, "-c", FAULTS, mode], capture_output=True, text=True, check=True
        ).stdout
    )


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
@pytest.mark.full
def test_freed_memory_is_used_again_without_page_faults():
    pages = (36 << 20) // resource.getpagesize()
    assert faults("keep") < pages / 100 < faults("as it is")


class Options:
    """In place of torch's ProcessGroupNCCL.Options, with attributes that its type stub names."""

    def __init__(self, is_high_priority_stream=False):
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(min_ctas=None, max_ctas=None)
        self._timeout = timedelta(minutes=10)


@pytest.mark.parametrize(
    ("uses", "urgent", "few"),
    [
        ("world tp", True, False),
        ("dp replicas shard", True, False),
        ("dp replicas", False, False),
        ("pp tied", False, False),
        ("expert_replicas expert_shard", True, False),
        ("expert_shard_gather", True, False),
        ("expert_replicas", False, False),
        ("tp_cp", True, False),
        ("channel12", False, True),
    ],
)
def test_nccl_puts_what_computation_waits_for_first_and_messages_on_few_channels(uses, urgent, few):
    options = nccl_options(Options, uses, timedelta(minutes=3))
    assert options.is_high_priority_stream is urgent
    assert options.config.max_ctas == (MESSAGE_CTAS if few else None)
    assert options.config.min_ctas is None and options._timeout == timedelta(minutes=3)


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_the_channels_of_a_pipeline_are_connected_over_nccl_alone(monkeypatch, backend):
    dist = mock.MagicMock()
    dist.get_backend.return_value, dist.get_world_size.return_value = backend, 2
    monkeypatch.setattr(setup, "dist", dist)
    monkeypatch.setattr(setup, "build_groups", lambda *_, **__: "groups")
    monkeypatch.setattr(setup, "connect_channels", connect := mock.Mock())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    make_groups(Layout(pp=2))
    due = [mock.call("groups", torch.device("cuda", 1))] if backend == "nccl" else []
    assert connect.mock_calls == due


def descriptions():
    groups = make_groups(Layout(tp=2, pp=2), tied=True)
    axes = [groups.world, groups.tp, groups.pp, groups.tied, *groups.channels]
    return [axis.group.group_desc for axis in axes]


def test_a_group_of_torch_is_described_by_its_uses(gloo_world):
    # torch's own group of all ranks serves
    uses = ["default_pg", "tp", "pp tied", "pp tied", "channel0", "channel1"]
    assert gloo_world(4).run(descriptions) == [uses] * 4


def test_a_rank_stays_until_all_have_closed_their_files(monkeypatch):
    """A launcher kills the others when one has ended with an error code."""
    store, closed = HashStore(), []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(
        dist, "destroy_process_group", lambda: closed.append(store.add("closed", 0))
    )
    threading.Timer(0.3, store.add, ("closed", 1)).start()  # rank 0
    disconnect()
    assert closed == [2]
