"""Builds a run and trains it: the order of everything that happens outside of the loop."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence

import torch

from megatron import __version__
from megatron.checkpoint.lease import Lease
from megatron.checkpoint.local.checkpoints import LocalCheckpoints
from megatron.checkpoint.ranks import Ranks
from megatron.checkpoint.reader import Checkpoint
from megatron.config.errors import UserError
from megatron.config.groups import Config, GivenConfig
from megatron.config.stages import placement_of
from megatron.config.validate import resolve
from megatron.distributed.groups import ALONE, Groups, group_options, layout_of
from megatron.distributed.interleaver import Interleaver
from megatron.distributed.launchers import Launch, slurm_job
from megatron.distributed.logs import job_log
from megatron.distributed.peers import PEERS
from megatron.distributed.rank_errors import raise_on_all_ranks
from megatron.distributed.setup import (
    choose_device,
    connect,
    disconnect,
    make_groups,
    read_launch,
    set_determinism,
    share_cores,
    warn_of_idle_gpus,
)
from megatron.kernels import fa4
from megatron.model.build import build_model, hidden_shape
from megatron.model.compile import compile_layers
from megatron.observe.console import NOT_DONE, banner
from megatron.observe.goodput import goodput
from megatron.observe.metrics import Metrics
from megatron.observe.tracking import Tracker
from megatron.optimizer.optimizer import Optimizer
from megatron.optimizer.scaler import LossScaler
from megatron.parallel.blocks import build_run_blocks
from megatron.parallel.graphs import GraphedPipeline, GraphedRunner
from megatron.parallel.layer_runner import LayerRunner
from megatron.parallel.offload import OffloadingPipeline, OffloadingRunner
from megatron.parallel.pairs import PairedPipeline
from megatron.parallel.pipeline import Pipeline, objectives_of
from megatron.parallel.zero import Zero
from megatron.training.advisor import Advisor, Forecast, Verdict
from megatron.training.banner import describe, peak_tflops_of, run_record
from megatron.training.checkpointing import (
    fetch,
    finalize,
    join_local_checkpoints,
    lease_save_folder,
    load,
    make_manager,
    prepare_save_folder,
)
from megatron.training.exit import ExitConditions
from megatron.training.loop import COMPLETE, NonFiniteError, evaluate_all, train
from megatron.training.out_of_memory import explained_out_of_memory
from megatron.training.prepare import Prepared, check_kernels, prepare
from megatron.training.profile import record_memory_history, step_profiler
from megatron.training.resume import continuity, device_name, take_checkpoint_args
from megatron.training.run import Run
from megatron.training.timing import make_timing

logger = logging.getLogger(__name__)

NO_ADVISOR = Advisor()


def pretrain(
    flags: GivenConfig,
    notes: Sequence[str] = (),
    *,
    not_done: Sequence[str] = (),
    dry_run: bool = False,
    advisor: Advisor = NO_ADVISOR,
) -> int:
    """Carry out one run; the exit code of the process. `not_done`: requested features that do not
    exist. Raises UserError (with the fix) for everything that a user can fix.
    """
    if dry_run:
        return _dry_run(flags, notes, not_done, advisor)
    with start(flags, notes, not_done=not_done, advisor=advisor) as run:
        return _train_and_evaluate(run)


@contextlib.contextmanager
def start(
    flags: GivenConfig,
    notes: Sequence[str] = (),
    *,
    not_done: Sequence[str] = (),
    advisor: Advisor = NO_ADVISOR,
) -> Iterator[Run]:
    """A run on this rank, ready for `train`: connected with the other ranks, its weights and state
    initialized or loaded. It ends with the block.
    """
    launch, flags, world_size, config = _requested(flags)

    # 1. The device and the other ranks.
    device = _start_device(launch, flags, config)
    with contextlib.ExitStack() as stack:
        # 2. Everything that the run consists of.
        stack.enter_context(job_log())
        warn_of_idle_gpus(launch, device)
        run, checkpoint = build(flags, list(notes), world_size, device, stack, not_done, advisor)
        stack.callback(run.exits.close)
        if run.checkpoints is not None:
            stack.callback(run.checkpoints.close)
        if run.tracker is not None:
            stack.callback(run.tracker.close)

        # 3. Weights and state, and what the caller does with the run.
        try:
            with explained_out_of_memory(run.config, run.vocab_size, run.groups, device, advisor):
                _initialize_or_load(run, checkpoint)
                yield run
            if run.profiler is not None:
                run.profiler.close()
            # weights that are still on their way would write into memory that is freed
            run.zero.wait_for_weights()
        except Exception as error:
            _report_failure(run, error)
            raise
    disconnect()


def _requested(flags: GivenConfig) -> tuple[Launch, GivenConfig, int, Config]:
    """How this process was launched, the flags with those of the checkpoint, the number of ranks,
    and the resolved flags. Faults of flags are reported before those of files and of other ranks.
    """
    launch = read_launch()
    flags = take_checkpoint_args(flags)
    world_size = flags.distributed.world_size or launch.world_size
    return launch, flags, world_size, resolve(flags, world_size, None).config


def _start_device(launch: Launch, flags: GivenConfig, config: Config) -> torch.device:
    """This rank's device, connected with the other ranks, which must have the same configuration
    and versions.
    """
    # The order matters: determinism and cores are set before any kernel runs or thread starts.
    device, backend = choose_device(launch, flags.distributed)
    set_determinism(device, config.model.deterministic_mode)
    if device.type == "cuda" and config.optimizer.optimizer_cpu_offload:
        share_cores(launch)
    versions = {"megatron": __version__, "torch": torch.__version__}
    same = {**flags.to_dict(), "versions": versions}
    connect(launch, backend, flags.distributed.distributed_timeout_minutes, same)
    return device


def _report_failure(run: Run, error: Exception) -> None:
    """Note in an error where the run failed, and report the failure to the other ranks."""
    # Other ranks read the reason from the store and name this rank instead of timing out.
    error.add_note(f"[{run.groups.describe()}, iteration {run.progress.iteration}]")
    first_line = str(error).splitlines()[0] if str(error) else ""
    reason = f"{type(error).__name__}: {first_line}"
    _end(run, 1, reason)
    PEERS.end(reason)


def _dry_run(
    flags: GivenConfig, notes: Sequence[str], not_done: Sequence[str], advisor: Advisor
) -> int:
    _, flags, world_size, _ = _requested(flags)
    here = torch.device("cpu")
    with job_log():
        prepared = prepare(flags, list(notes), world_size, here, ALONE, advisor, planned_for="cuda")
        sections, forecast = describe(prepared, world_size, here, advisor, planned_for="cuda")
    text, code = end_of_dry_run(forecast.verdict)
    print(banner({NOT_DONE: list(not_done), **sections}) + "\n" + text, flush=True)
    return code


def end_of_dry_run(verdict: Verdict | None) -> tuple[str, int]:
    """The last line of a dry run and its exit code."""
    if verdict is None or verdict.word == "fits":
        return "dry run: everything is in order; nothing was trained", 0
    # Exit code 2 lets a script refuse to submit a job that cannot run.
    fault = "memory is tight" if verdict.fits else "the run does not fit into memory"
    text = f"dry run: the settings are in order, but {fault} (see verdict above); nothing was "
    return text + "trained", 0 if verdict.fits else 2


def build(
    flags: GivenConfig,
    notes: list[str],
    world_size: int,
    device: torch.device,
    closing: contextlib.ExitStack,
    not_done: Sequence[str],
    advisor: Advisor,
) -> tuple[Run, Checkpoint | None]:
    """Build the run on this rank; weights and optimizer state are not initialized yet. Rank 0 logs
    the banner. Raises UserError.

    `closing` releases the lease of --save, also when building fails.
    """
    # 1. This rank among the others, and the checkpoints that their nodes hold.
    groups, ranks, local_checkpoints = _join(flags, world_size, device)

    # 2. Files, flags and kernels, checked before memory is taken.
    prepared = prepare(flags, notes, world_size, device, groups.world, advisor, local_checkpoints)
    config, tokenizer = prepared.config, prepared.tokenizer
    check_kernels(prepared, device, ranks)
    sections, forecast = _describe_on_rank_0(prepared, groups, device, advisor)
    lease = _lease_save_folder(prepared, ranks, local_checkpoints, closing)

    # 3. The model, sharded, with its executor and optimizer.
    timing = make_timing(config, groups, ranks, prepared.progress.iteration, closing)
    zero, pipeline, optimizer = _build_engine(config, tokenizer.vocab_size, groups, device, advisor)

    # 4. Trackers and the banner, which names their places.
    tracker = _open_tracker(prepared, sections, forecast, groups, not_done)
    return Run(
        config=config,
        groups=groups,
        device=device,
        device_names=_device_names(device, ranks),
        vocab_size=tokenizer.vocab_size,
        padded_vocab=prepared.padded_vocab,
        tokenizer_fingerprint=tokenizer.fingerprint,
        model=pipeline.model,
        zero=zero,
        pipeline=pipeline,
        optimizer=optimizer,
        schedule=prepared.schedule,
        scaler=LossScaler(config.precision),
        data=prepared.data,
        tracker=tracker,
        exits=_exit_conditions(config),
        timing=timing,
        progress=prepared.progress,
        checkpoints=make_manager(config, optimizer, ranks, tracker, local_checkpoints),
        lease=lease,
        peak_tflops=peak_tflops_of(config, device),
        decode=tokenizer.decode,
        advisor=advisor,
        forecast=forecast,
        profiler=step_profiler(config, groups.rank, device, advisor),
    ), prepared.checkpoint


def _join(
    flags: GivenConfig, world_size: int, device: torch.device
) -> tuple[Groups, Ranks, LocalCheckpoints | None]:
    options = group_options(resolve(flags, world_size, None).config)
    groups = make_groups(layout_of(flags, world_size), **options)
    ranks = Ranks(groups.world, device, groups.pp.rank)
    return groups, ranks, join_local_checkpoints(flags, ranks)


def _device_names(device: torch.device, ranks: Ranks) -> str:
    """Of all ranks, each name once."""
    return ", ".join(sorted(set(ranks.gather_or_raise(lambda: device_name(device)))))


def _describe_on_rank_0(
    prepared: Prepared, groups: Groups, device: torch.device, advisor: Advisor
) -> tuple[dict[str, list[str]], Forecast | None]:
    """The banner's sections and the forecast, on rank 0; its UserError is raised on all ranks."""
    # The plan takes seconds for thousands of ranks: rank 0 makes it, the others wait for its
    # verdict.
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    node = pages / 2**30, read_launch().local_size
    with raise_on_all_ranks(groups.world, device):
        if groups.rank != 0:
            return {}, None
        return describe(prepared, groups.world.size, device, advisor, node=node)


def _lease_save_folder(
    prepared: Prepared,
    ranks: Ranks,
    local_checkpoints: LocalCheckpoints | None,
    closing: contextlib.ExitStack,
) -> Lease | None:
    """Make this run the only one that writes to --save, until `closing` releases the lease."""
    lease = lease_save_folder(prepared.config, ranks, slurm_job())
    if lease is not None:
        closing.callback(lease.release)
    resumed = prepared.checkpoint is not None
    prepare_save_folder(prepared.config, ranks, local_checkpoints, goes_on=resumed)
    return lease


def _build_engine(
    config: Config, vocab_size: int, groups: Groups, device: torch.device, advisor: Advisor
) -> tuple[Zero, Pipeline, Optimizer]:
    """This rank's stages, sharded, with their executor and their optimizer."""
    # From here on memory is taken: an error gets the out-of-memory report.
    record_memory_history(config, device)
    with explained_out_of_memory(config, vocab_size, groups, device, advisor):
        zero, pipeline = _build_pipeline(config, vocab_size, groups, device)
        with raise_on_all_ranks(groups.world, device):
            optimizer = Optimizer(zero.blocks, config, groups, zero)
    return zero, pipeline, optimizer


def _exit_conditions(config: Config) -> ExitConditions:
    # The log line when a signal comes depends on what the run can still do.
    on_signal = "saving and exiting after this step"
    if config.evaluation.skip_train:
        on_signal = "ending the evaluation and exiting"
    elif config.checkpoint.save is None:
        on_signal = "exiting after this step; --save is not set, so no checkpoint is written"
    return ExitConditions(config.training, on_signal)


def _build_pipeline(
    config: Config, vocab_size: int, groups: Groups, device: torch.device
) -> tuple[Zero, Pipeline]:
    # 1. The stages of this rank on the meta device, then one flat buffer for each layer.
    model = build_model(config, vocab_size, groups, device)
    blocks = build_run_blocks(config, model, device, groups)
    if model.config.attention_backend == "fa4":
        fa4.activate()
    if model.config.weight_grad_backend == "apex":
        for parameter in model.parameters():
            parameter.by_apex = True  # read where its gradient is formed
    if model.config.torch_compile:
        with raise_on_all_ranks(groups.world, device):
            compile_layers(model, device)
    zero = Zero(model, blocks, groups, config.distributed)

    # 2. The executor. Offload, graphs and pairs exclude each other, and each has its own: an
    # ordinary run has no code of theirs in its step.
    training, objectives = config.training, objectives_of(model)
    sharing = groups.tp if training.distribute_saved_activations else ALONE
    stages = placement_of(config), hidden_shape(config), groups, device
    if training.activation_offload:
        smallest = training.min_offloaded_tensor_size
        offloading = OffloadingRunner(device, smallest, sharing, objectives)
        return zero, OffloadingPipeline(model, zero, offloading, *stages)
    if training.cuda_graphs:
        for block in zero.trained:
            block.keep_grad_place()
        return zero, GraphedPipeline(model, zero, GraphedRunner(model, device), *stages)
    passes = LayerRunner(sharing, objectives)
    if config.distributed.overlap_moe_expert_parallel_comm:
        overlapped = Interleaver().run_overlapped
        return zero, PairedPipeline(model, zero, passes, *stages, run_overlapped=overlapped)
    return zero, Pipeline(model, zero, passes, *stages)


def _open_tracker(
    prepared: Prepared,
    sections: dict[str, list[str]],
    forecast: Forecast | None,
    groups: Groups,
    not_done: Sequence[str],
) -> Tracker | None:
    """Open wandb, TensorBoard and metrics.jsonl on rank 0, which has a forecast, and log the
    banner with their places.
    """
    if forecast is None:
        return None
    # Trackers are opened before the banner is printed: it names their places.
    sections = {NOT_DONE: list(not_done), **sections, "layout": [groups.describe()]}
    record = run_record(
        prepared.config, groups.layout, sections, forecast.verdict, forecast.prediction
    )
    tracker = Tracker(
        prepared.config,
        {**record, "vocab_size": prepared.tokenizer.vocab_size},
        prepared.progress.iteration,
        resumed_samples=prepared.progress.consumed_samples,
    )
    sections["paths"] += tracker.notes
    logger.info(banner(sections))
    return tracker


def _initialize_or_load(run: Run, checkpoint: Checkpoint | None) -> None:
    if checkpoint is None:
        run.optimizer.initialise()
    else:
        with run.timing.events.restoring(run.progress.iteration):
            fetch(checkpoint, run)
            with raise_on_all_ranks(run.groups.world, run.device):
                load(checkpoint, run)
        logger.info(
            f" loaded checkpoint {checkpoint.path} at iteration "
            f"{run.progress.iteration}{continuity(checkpoint, run)}"
        )
        checkpoint.close()
    run.timing.events.ready(run.progress.iteration)


def _train_and_evaluate(run: Run) -> int:
    """Train and evaluate as the flags ask for; the exit code."""
    # 1. Validation that is due before training.
    skip_train = run.config.evaluation.skip_train
    if skip_train or run.progress.evaluation_due:
        run.progress.evaluation_due = evaluate_all(run, "validation") is None

    # 2. Training.
    code = 0
    if not skip_train:
        try:
            ended = train(run)
        except NonFiniteError as error:
            finalize(run)
            _end(run, 1, str(error).splitlines()[0])
            if run.groups.rank == 0:
                print(error, file=sys.stderr, flush=True)
            return 1
        code = ended.code
        logger.info(f" {ended.reason}: exiting at iteration {run.progress.iteration}")
        if ended.reason != COMPLETE:
            _end(run, code, ended.reason)
            return code
    elif run.progress.evaluation_due:
        return _end_of_cut_evaluation(run)

    # 3. The test split.
    if run.data.test and evaluate_all(run, "test") is None:
        return _end_of_cut_evaluation(run)
    _end(run, code, COMPLETE)
    return code


def _end_of_cut_evaluation(run: Run) -> int:
    """End a run when a signal interrupted an evaluation outside of training; the exit code."""
    # The same on all ranks: they agreed on the signal.
    ended = run.exits.check(run.progress.iteration)
    assert ended is not None
    logger.info(
        f" {ended.reason}: exiting at iteration {run.progress.iteration}; the evaluation is "
        "incomplete"
    )
    _end(run, ended.code, ended.reason)
    return ended.code


def _end(run: Run, code: int, reason: str) -> None:
    """Write the last event of this start, and log the goodput of all starts."""
    # The last event of this start; goodput counts from the first start of the run.
    run.timing.events.end(run.progress.iteration, code, reason)
    folder = run.config.checkpoint.save

    def summary() -> Metrics:
        try:
            return goodput(folder).summary()
        except UserError:  # no events: their disk failed
            return {}

    if run.tracker is not None and folder is not None:
        run.tracker.summarise(summary)
