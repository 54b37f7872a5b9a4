"""The one place that chooses the device and knows launchers."""

from __future__ import annotations

import ctypes
import os

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # names of mallopt's parameters in glibc's malloc.h


def choose_device() -> torch.device:
    """The GPU when there is one, else the CPU, whose freed memory then stays with the process."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    keep_freed_memory()
    return torch.device("cpu")


def launched_processes() -> int:
    """Processes that the launcher started for this job: torchrun sets WORLD_SIZE, srun SLURM_STEP_NUM_TASKS for its tasks; 1 without either."""
    return int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_STEP_NUM_TASKS") or 1)


def keep_freed_memory() -> bool:
    """Stop glibc from returning freed tensors to the system and faulting their pages in again each step; whether it could be asked to."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # another C library has none
    most = 2**31 - 1  # bytes; a C int
    return mallopt is not None and bool(mallopt(M_MMAP_THRESHOLD, most)) and bool(mallopt(M_TRIM_THRESHOLD, most))
