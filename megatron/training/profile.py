"""Records steps with torch's profiler: a Chrome trace of each rank of --profile-ranks, and a
snapshot of CUDA's allocator under --record-memory-history.

Called from training/loop.py before each step, and from training/pretrain.py. What runs has names in
the trace (megatron/distributed/ranges.py); megatron/observe/step_parts.py reads it.
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from megatron.config.groups import Config
from megatron.distributed.ranges import named
from megatron.observe.step_parts import parts_of_trace, trace_path, where_the_step_went

logger = logging.getLogger(__name__)

MOST_ALLOCATIONS = 1_000_000  # that --record-memory-history remembers, the last ones


class StepProfiler:
    """Records the steps of iterations --profile-step-start + 1 to --profile-step-end on one rank.
    A run that begins or ends between them records those that it makes.
    """

    def __init__(self, config: Config, rank: int, device: torch.device):
        self.config, self.rank, self.device = config.logging, rank, device
        # the forward passes of pairs have a thread of their own
        self.all_threads = config.distributed.overlap_moe_expert_parallel_comm
        folder = profile_folder(config)
        assert folder is not None
        self.folder = folder
        self.profiler: profile | None = None
        self.recording = False
        self.step = ExitStack()  # the range of the present iteration
        self.over = False

    def next_step(self, iterations: int) -> float:
        """The step after so many iterations begins now; seconds that this took. In the step before
        the first that is recorded the profiler warms up, which would be in the trace.
        """
        begun = time.perf_counter()
        self._begin(iterations)
        return time.perf_counter() - begun

    def _begin(self, iterations: int) -> None:
        self.step.close()
        if self.over:
            return
        if iterations >= self.config.profile_step_end:
            self.close()
            return
        if iterations + 1 >= self.config.profile_step_start and self.profiler is None:
            self._prepare()
        if iterations >= self.config.profile_step_start:
            self._record()
            self.step.enter_context(named("iteration", iterations + 1))

    def _prepare(self) -> None:
        on_gpu = [ProfilerActivity.CUDA] if self.device.type == "cuda" else []
        self.profiler = profile(
            activities=[ProfilerActivity.CPU, *on_gpu],
            record_shapes=self.config.pytorch_profiler_collect_shapes,
            with_stack=self.config.pytorch_profiler_collect_callstack,
            experimental_config=_ExperimentalConfig(profile_all_threads=self.all_threads),
        )
        self.profiler.prepare_trace()

    def _record(self) -> None:
        if self.recording:
            return
        assert self.profiler is not None
        self.recording = True
        self._synchronize()  # no work of the steps before is in the trace
        self.profiler.start_trace()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Write what was recorded, once."""
        if self.over:
            return
        self.over = True
        self.step.close()
        if not self.recording:
            logger.warning(
                "--profile: no step was recorded: the run made none of the iterations "
                f"{self.config.profile_step_start + 1} to {self.config.profile_step_end}"
            )
            return
        assert self.profiler is not None
        self._synchronize()
        self.profiler.stop_trace()
        self.folder.mkdir(parents=True, exist_ok=True)
        path = trace_path(self.folder, self.rank)
        self.profiler.export_chrome_trace(str(path))
        self.profiler = None
        if self.config.record_memory_history:
            write_snapshot(self.folder, self.rank, self.device)
        lines = where_the_step_went(parts_of_trace(path))
        logger.info("\n".join([f" profile: {path}; where the steps went:", *lines]))


def step_profiler(config: Config, rank: int, device: torch.device) -> StepProfiler | None:
    """That of a rank of --profile-ranks."""
    chosen = config.logging.profile and rank in config.logging.profile_ranks
    return StepProfiler(config, rank, device) if chosen else None


def profile_folder(config: Config) -> Path | None:
    """Where traces and snapshots go: --profile-dir, or <save>/profile; None without either."""
    if config.logging.profile_dir is not None:
        return Path(config.logging.profile_dir)
    return None if config.checkpoint.save is None else Path(config.checkpoint.save) / "profile"


def record_memory_history(config: Config, device: torch.device) -> None:
    """Let CUDA's allocator remember where memory was taken, under --record-memory-history."""
    if not config.logging.record_memory_history:
        return
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS)
    else:
        logger.warning("--record-memory-history: acts on CUDA alone, nothing is recorded")


def write_snapshot(folder: Path, rank: int, device: torch.device) -> Path | None:
    """The history of CUDA's allocator as a file for pytorch.org/memory_viz; None on a CPU."""
    if device.type != "cuda":
        return None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{rank}.memory.pickle"
    torch.cuda.memory._dump_snapshot(str(path))
    return path
