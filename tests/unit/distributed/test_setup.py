"""Choosing the device prepares the CPU's allocator."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys

import pytest
import torch

from megatron.config.groups import DistributedConfig
from megatron.distributed.setup import Launch, choose_device, keep_freed_memory

FAULTS = """
import resource, sys, torch
from megatron.distributed.setup import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
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
def test_freed_memory_is_used_again_without_page_faults():
    pages = (36 << 20) // resource.getpagesize()
    assert faults("keep") < pages / 100 < faults("as it is")


def test_the_device_is_the_gpu_when_there_is_one():
    device, backend = choose_device(Launch(), DistributedConfig())
    assert (device.type, backend) == (
        ("cuda", "nccl") if torch.cuda.is_available() else ("cpu", "gloo")
    )


def test_a_c_library_without_mallopt_is_left_alone(monkeypatch):
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    assert keep_freed_memory() is False
