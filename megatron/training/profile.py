"""--profile: Chrome traces of torch's profiler, with named ranges (distributed/collectives.py)
that tools/_report/step_parts.py reads; and --record-memory-history.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from megatron.config.groups import Config
from megatron.distributed.collectives import profiler_range

logger = logging.getLogger(__name__)

MAX_ALLOCATIONS = 1_000_000  # in --record-memory-history, the last ones


class StepProfiler:
    """Records iterations --profile-step-start + 1 to --profile-step-end on one rank, as far as the
    run makes them.
    """

    def __init__(self, config: Config, folder: Path, rank: int, device: torch.device):
        self.config, self.folder, self.rank, self.device = config.logging, folder, rank, device
        on_gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
        # the forward passes of pairs have a separate thread
        all_threads = config.distributed.overlap_moe_expert_parallel_comm
        self.profiler = profile(
            activities=[ProfilerActivity.CPU, *on_gpu],
            record_shapes=self.config.pytorch_profiler_collect_shapes,
            with_stack=self.config.pytorch_profiler_collect_callstack,
            experimental_config=_ExperimentalConfig(profile_all_threads=all_threads),
        )
        self.state = "waiting"  # then "prepared", "recording", "over"
        self.step = ExitStack()  # the range of the present iteration

    def next_step(self, iterations: int, paused: Callable[[], AbstractContextManager]) -> None:
        """Begin the step after `iterations`. `paused` excludes the block from the time of steps."""
        self.step.close()
        if self.state == "over":
            return
        start, end = self.config.profile_step_start, self.config.profile_step_end
        turns = iterations >= (end if self.state == "recording" else start)
        if turns and self.device.type == "cuda":
            # A queued step is not in the trace, and its time is not the profiler's.
            torch.cuda.synchronize(self.device)
        with paused():
            if iterations >= end:
                self.close()
            # Prepared one step early: allocating the profiler's buffers is not in the trace.
            if self.state == "waiting" and iterations + 1 >= start:
                self.profiler.prepare_trace()
                self.state = "prepared"
            if self.state == "prepared" and iterations >= start:
                self.profiler.start_trace()
                self.state = "recording"
        if self.state == "recording":
            self.step.enter_context(profiler_range("iteration", iterations + 1))

    def close(self) -> None:
        """Write the trace, once."""
        state, self.state = self.state, "over"
        self.step.close()
        if state == "recording":
            self.profiler.stop_trace()  # waits for the work that is still queued
            try:
                self._write()
            except (OSError, RuntimeError) as error:  # training continues without
                logger.warning(f"--profile: not written: {error}")
        elif state != "over":
            logger.warning(
                "--profile: no step was recorded: the run made none of the iterations "
                f"{self.config.profile_step_start + 1} to {self.config.profile_step_end}"
            )

    def _write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"rank-{self.rank}.trace.json"
        self.profiler.export_chrome_trace(str(path))
        if self.config.record_memory_history:
            write_snapshot(self.folder, self.rank, self.device)
        del self.profiler  # and the trace in memory with it
        logger.info(f" profile: {path}")


def step_profiler(config: Config, rank: int, device: torch.device) -> StepProfiler | None:
    """The profiler of a rank of --profile-ranks; None on other ranks."""
    folder = profile_folder(config)
    if folder is None or not config.logging.profile or rank not in config.logging.profile_ranks:
        return None
    return StepProfiler(config, folder, rank, device)


def profile_folder(config: Config) -> Path | None:
    """Where traces and snapshots go: --profile-dir, or <save>/profile; None without either."""
    if config.logging.profile_dir is not None:
        return Path(config.logging.profile_dir)
    return None if config.checkpoint.save is None else Path(config.checkpoint.save) / "profile"


def record_memory_history(config: Config, device: torch.device) -> None:
    """Record the history of CUDA's allocator with --record-memory-history."""
    if not config.logging.record_memory_history:
        return
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=MAX_ALLOCATIONS)
    else:
        logger.warning("--record-memory-history has no effect without CUDA")


def write_snapshot(folder: Path, rank: int, device: torch.device) -> Path | None:
    """The history of CUDA's allocator as a file for pytorch.org/memory_viz; None on a CPU."""
    if device.type != "cuda":
        return None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{rank}.memory.pickle"
    torch.cuda.memory._dump_snapshot(str(path))
    return path
