"""What one run consists of, and its progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch

from megatron.checkpoint.lease import Lease
from megatron.checkpoint.manager import CheckpointManager
from megatron.checkpoint.reader import Checkpoint
from megatron.config.groups import Config
from megatron.data.loader import Data
from megatron.data.tokenizer import Tokenizer
from megatron.distributed.groups import Groups
from megatron.distributed.peers import waiting
from megatron.model.gpt import GPTModel
from megatron.observe.events import Timers
from megatron.observe.tracking import Tracker
from megatron.optimizer.lr_schedule import ParamSchedule
from megatron.optimizer.optimizer import Optimizer
from megatron.optimizer.scaler import LossScaler
from megatron.parallel.pipeline import Pipeline
from megatron.parallel.schedule import Schedule, build_schedule
from megatron.parallel.zero import Zero
from megatron.training.advisor import Advisor, Forecast
from megatron.training.exit import ExitConditions
from megatron.training.profile import StepProfiler
from megatron.training.timing import Timing


@dataclass
class Progress:
    """The progress of a run: all that changes in addition to weights and optimizer state.
    Checkpoints hold it.
    """

    iteration: int = 0
    consumed_samples: int = 0
    scheduled_samples: int = 0  # samples of steps that were not skipped: the clock of the schedules
    skipped_samples: int = 0
    evaluation_due: bool = False  # a signal cut the evaluation of this iteration short
    # Of the steps since the last console line, which a run that is continued between two lines must
    # not lose:
    open_loss: float = 0.0  # sum of the losses of those that were not skipped
    open_steps: int = 0  # their number
    open_skipped: int = 0
    open_nan: int = 0  # of the skipped ones


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The inputs of a run, read and checked before its model is built."""

    config: Config  # resolved: with every derived and chosen value
    tokenizer: Tokenizer
    padded_vocab: int  # rows of the embedding: tensor-parallel ranks hold equal parts of them
    data: Data
    schedule: ParamSchedule
    progress: Progress
    advisor: Advisor = field(default_factory=Advisor)
    checkpoint: Checkpoint | None = None  # that the run starts from
    not_done: Sequence[str] = ()  # requested features that do not exist
    notes: Sequence[str] = ()
    changed: list[str] = field(default_factory=list)  # since the checkpoint was written
    accepted: frozenset[str] = frozenset()  # values of --accept-changed that the changes needed


@dataclass(frozen=True, kw_only=True)
class Run(Prepared):
    """Everything one run is made of on one rank, built by pretrain.py."""

    groups: Groups
    device: torch.device
    device_names: str  # of all ranks, each kind once
    # The engine: the stages of this rank, how they are sharded, executed and updated.
    model: GPTModel
    zero: Zero
    pipeline: Pipeline
    optimizer: Optimizer
    scaler: LossScaler
    # What records the run and ends it.
    tracker: Tracker  # which writes on rank 0
    exits: ExitConditions
    timing: Timing
    checkpoints: CheckpointManager | None = None  # with --save
    lease: Lease | None = None  # of --save, on rank 0
    peak_tflops: float | None = None
    profiler: StepProfiler | None = None  # on the ranks of --profile-ranks
    forecast: Forecast | None = None  # on rank 0

    @cached_property
    def timers(self) -> Timers:
        """Wall time by name."""
        return self.timing.events.timers

    @cached_property
    def global_micro_batch_size(self) -> int:
        """Samples of one micro-batch of all data-parallel ranks."""
        return self.config.training.micro_batch_size * self.groups.dp.size

    @cached_property
    def schedule_of(self) -> Callable[[int], Schedule]:
        """What the pipeline ranks do in a step of a number of micro-batches."""
        distributed = self.config.distributed
        return partial(
            build_schedule,
            distributed.pipeline_schedule,
            self.groups.pp.size,
            distributed.num_virtual_stages_per_pipeline_rank,
            pairs=distributed.overlap_moe_expert_parallel_comm,
        )

    @cached_property
    def reports_loss(self) -> bool:
        """Whether this rank's losses and tokens enter sums over all ranks: on the last stage, one
        of the tensor-parallel ranks, which compute the same loss. Context-parallel ranks each count
        their own positions.
        """
        return self.pipeline.has_head and self.groups.tp.rank == 0

    @cached_property
    def waiting_for_all(self) -> Callable[[], AbstractContextManager[None]]:
        """Around a sum over all ranks at the end of a step; if it fails, the message names the rank
        to look at.
        """

        def text(seconds: float) -> str:
            return (
                f"rank {self.groups.rank} had done its part of the step and waited {seconds:.1f} s "
                "for all others to do theirs. The rank whose output lacks this message"
            )

        return nullcontext if self.groups.world.size == 1 else partial(waiting, text)
