"""--profile: Chrome traces of torch's profiler, with named ranges (distributed/collectives.py)
that tools/_report/step_parts.py reads; and --record-memory-history.
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
from megatron.distributed.collectives import named
from megatron.training.advisor import Advisor

logger = logging.getLogger(__name__)

MAX_ALLOCATIONS = 1_000_000  # in --record-memory-history, the last ones


class StepProfiler:
    """Records iterations --profile-step-start + 1 to --profile-step-end on one rank, as far as the
    run makes them.
    """

    def __init__(self, config: Config, rank: int, device: torch.device, advisor: Advisor):
        self.config, self.rank, self.device = config.logging, rank, device
        self.advisor = advisor
        # the forward passes of pairs have a separate thread
        self.all_threads = config.distributed.overlap_moe_expert_parallel_comm
        folder = profile_folder(config)
        assert folder is not None
        self.folder = folder
        self.profiler: profile | None = None
        self.recording = False
        self.step = ExitStack()  # the range of the present iteration
        self.over = False

    def next_step(self, iterations: int) -> float:
        """Begin the step after `iterations`; the seconds that this took. The profiler warms up in
        the step before the first recorded one.
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
        # Prepared one step early: the profiler's own start-up is not in the trace.
        on_gpu = [ProfilerActivity.CUDA] if self.device.type == "cuda" else []
        self.profiler = profile(
            activities=[ProfilerActivity.CPU, *on_gpu],
            record_shapes=self.config.pytorch_profiler_collect_shapes,
            with_stack=self.config.pytorch_profiler_collect_callstack,
            experimental_config=_ExperimentalConfig(profile_all_threads=self.all_threads),
        )
        # The warm-up allocates the profiler's buffers; recording starts with the next step.
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
        """Write the trace, once."""
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
        # One file a rank; the table of where the time went is the tools'.
        self.folder.mkdir(parents=True, exist_ok=True)
        # Work that is still queued belongs to the trace: it was awaited above.
        path = self.folder / f"rank-{self.rank}.trace.json"
        self.profiler.export_chrome_trace(str(path))
        self.profiler = None
        if self.config.record_memory_history:
            write_snapshot(self.folder, self.rank, self.device)
        table = self.advisor.step_table(path)
        title = f" profile: {path}" + ("; where the steps went:" if table else "")
        logger.info("\n".join([title, *table]))


def step_profiler(
    config: Config, rank: int, device: torch.device, advisor: Advisor
) -> StepProfiler | None:
    """The profiler of a rank of --profile-ranks; None on other ranks."""
    # On other ranks there is no profiler, and the loop asks for none.
    chosen = config.logging.profile and rank in config.logging.profile_ranks
    return StepProfiler(config, rank, device, advisor) if chosen else None


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
