"""Builds a run and trains it: the order of everything that happens outside of the loop.

`flags` is a configuration as it was given, `config` the resolved one. That of `_resolve_flags` has
nothing that depends on the tokenizer or the planner; `prepared.config` has every derived value.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from megatron import __version__
from megatron.checkpoint.local.checkpoints import LocalCheckpoints
from megatron.checkpoint.ranks import SINGLE_RANK, Ranks
from megatron.config.groups import Config, GivenConfig
from megatron.config.stages import placement_of
from megatron.config.validate import resolve
from megatron.data.loader import PythonReader
from megatron.distributed.groups import ALONE, Groups, group_options, layout_of
from megatron.distributed.interleaver import Interleaver
from megatron.distributed.launchers import Launch
from megatron.distributed.logs import job_log
from megatron.distributed.peers import PEERS, is_out_of_memory
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
from megatron.observe.console import banner
from megatron.observe.tracking import Tracker
from megatron.optimizer.optimizer import Optimizer
from megatron.optimizer.scaler import LossScaler
from megatron.parallel.blocks import build_run_blocks
from megatron.parallel.graphs import GraphedPipeline, GraphedRunner
from megatron.parallel.layer_runner import LayerRunner
from megatron.parallel.offload import OffloadingPipeline, OffloadingRunner
from megatron.parallel.pairs import PairedPipeline
from megatron.parallel.pipeline import Pipeline, aux_losses_of
from megatron.parallel.zero import Zero
from megatron.training.advisor import Advisor, Forecast
from megatron.training.banner import describe, peak_tflops_of, run_record
from megatron.training.checkpointing import claim_save_folder, fetch, finalize, load, make_manager
from megatron.training.exit import Exit, ExitConditions
from megatron.training.loop import COMPLETE, NonFiniteError, evaluate_all, train
from megatron.training.prepare import check_kernels, prepare
from megatron.training.profile import record_memory_history, step_profiler
from megatron.training.resume import continuity, device_name, take_checkpoint_args
from megatron.training.run import Prepared, Run
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
    reader: PythonReader | None = None,
) -> int:
    """Carry out one run; the exit code of the process. `not_done`: requested features that do not
    exist; `reader`: of the training samples, with `mock_data` in the configuration. Raises
    UserError (with the fix) for everything that a user can fix.
    """
    if dry_run:
        return _dry_run(flags, notes, not_done, advisor)
    with start(flags, notes, not_done=not_done, advisor=advisor, reader=reader) as run:
        return _train_and_evaluate(run)


@contextlib.contextmanager
def start(
    flags: GivenConfig,
    notes: Sequence[str] = (),
    *,
    not_done: Sequence[str] = (),
    advisor: Advisor = NO_ADVISOR,
    reader: PythonReader | None = None,
) -> Iterator[Run]:
    """A run on this rank, ready for `train`: connected with the other ranks, its weights and state
    initialized or loaded. It ends with the block. Arguments are those of `pretrain`.
    """
    launch, flags, config, world_size = _resolve_flags(flags)

    # 1. The device and the other ranks.
    device = _start_device(launch, flags, config)
    with contextlib.ExitStack() as last:
        with contextlib.ExitStack() as stack:
            stack.enter_context(job_log())
            warn_of_idle_gpus(launch, device)
            groups = make_groups(layout_of(config, world_size), **group_options(config))
            ranks = Ranks(groups.world, device, groups.pp.rank)
            local_checkpoints, folder = None, config.checkpoint.local_checkpoint_dir
            if folder is not None:
                redundancy = config.checkpoint.local_redundancy
                local_checkpoints = LocalCheckpoints(folder, ranks, redundancy)

            # 2. Everything that the run consists of.
            prepared = prepare(
                flags,
                notes,
                ranks,
                advisor,
                local_checkpoints,
                not_done=not_done,
                reader=reader,
            )
            run = build(prepared, groups, ranks, launch, local_checkpoints, stack)
            # Signals are received until all ranks have closed: one would kill ranks that wait.
            last.callback(run.exits.close)
            # one callback each: a failure of one does not skip the others
            for part in (run.checkpoints, run.tracker):
                if part is not None:
                    stack.callback(part.close)

            # 3. Weights and state, and what the caller does with the run.
            try:
                with _explained_out_of_memory(prepared, groups, device):
                    _initialize_or_load(run)
                    yield run
                if run.profiler is not None:
                    run.profiler.close()
                # weights that are still on their way would write into memory that is freed
                run.zero.wait_for_weights()
            except Exception as error:
                _end_with(error, run)
                raise
        disconnect()


def _resolve_flags(flags: GivenConfig) -> tuple[Launch, GivenConfig, Config, int]:
    """How this process was launched, the flags with those of the checkpoint, what follows from
    them, and the number of ranks. Faults of flags are reported before those of files and of other
    ranks.
    """
    launch = read_launch()
    flags = take_checkpoint_args(flags)
    world_size = flags.distributed.world_size or launch.world_size
    return launch, flags, resolve(flags, world_size, None).config, world_size


def _start_device(launch: Launch, flags: GivenConfig, config: Config) -> torch.device:
    """This rank's device, connected with the other ranks, which must have the same configuration
    and versions.
    """
    # The order matters: determinism and cores are set before any kernel runs or thread starts.
    device, backend = choose_device(launch, config.distributed)
    set_determinism(device, config.model.deterministic_mode)
    if device.type == "cuda" and config.optimizer.optimizer_cpu_offload:
        share_cores(launch)
    same = flags.to_dict() | {"versions": {"megatron": __version__, "torch": torch.__version__}}
    connect(launch, backend, config.distributed.distributed_timeout_minutes, same)
    return device


def _forecast_on_rank_0(
    prepared: Prepared, groups: Groups, device: torch.device, node_ranks: int
) -> Forecast | None:
    """The forecast with the banner's sections, on rank 0; its UserError is raised on all ranks."""
    # The plan takes seconds for thousands of ranks: rank 0 makes it, the others wait for its
    # verdict.
    with raise_on_all_ranks(groups.world):
        if groups.rank != 0:
            return None
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        node = pages / 2**30, node_ranks
        return describe(prepared, groups.world.size, device, node=node)


def _dry_run(
    flags: GivenConfig, notes: Sequence[str], not_done: Sequence[str], advisor: Advisor
) -> int:
    _, flags, _, world_size = _resolve_flags(flags)
    with job_log():
        prepared = prepare(
            flags,
            notes,
            SINGLE_RANK,
            advisor,
            world_size=world_size,
            planned_for="cuda",
            not_done=not_done,
        )
        forecast = describe(prepared, world_size, SINGLE_RANK.device, planned_for="cuda")
    # Exit code 2 lets a script refuse to submit a job that cannot run.
    text, code = "everything is in order", 0
    verdict = "fits" if forecast.verdict is None else forecast.verdict.word
    if verdict == "tight":
        text = "the settings are in order, but memory is tight (see verdict above)"
    elif verdict == "does not fit":
        text = "the settings are in order, but the run does not fit into memory (see verdict above)"
        code = 2
    print(banner(forecast.sections))
    print(f"dry run: {text}; nothing was trained", flush=True)
    return code


def build(
    prepared: Prepared,
    groups: Groups,
    ranks: Ranks,
    launch: Launch,
    local_checkpoints: LocalCheckpoints | None,
    closing: contextlib.ExitStack,
) -> Run:
    """Build the run on this rank; weights and optimizer state are not initialized yet. Rank 0 logs
    the banner. Raises UserError.

    `closing` is called back when the run ends, also when building fails.
    """
    config, device = prepared.config, ranks.device

    # 1. Kernels, the plan and --save are checked before memory is taken.
    check_kernels(prepared, device, ranks, first_of_node=launch.local_rank == 0)
    forecast = _forecast_on_rank_0(prepared, groups, device, launch.local_size)
    lease = claim_save_folder(
        config, ranks, local_checkpoints, closing, resumed=prepared.checkpoint is not None
    )

    # 2. The model, sharded, with its executor and optimizer.
    timing = make_timing(
        config, groups, ranks, prepared.progress.iteration, prepared.advisor, closing
    )
    record_memory_history(config, device)
    with _explained_out_of_memory(prepared, groups, device):
        zero, pipeline = _build_pipeline(config, prepared.tokenizer.vocab_size, groups, device)
        with raise_on_all_ranks(groups.world):
            optimizer = Optimizer(zero.blocks, config, groups, zero)

    # 3. Trackers and the banner, which names their places.
    tracker = _open_tracker(prepared, forecast, groups)
    names = ranks.gather_or_raise(partial(device_name, device))
    return Run(
        **vars(prepared),
        groups=groups,
        device=device,
        device_names=", ".join(sorted({*names})),
        model=pipeline.model,
        zero=zero,
        pipeline=pipeline,
        optimizer=optimizer,
        scaler=LossScaler(config.precision),
        tracker=tracker,
        exits=_exit_conditions(config),
        timing=timing,
        checkpoints=make_manager(config, optimizer, ranks, tracker, local_checkpoints),
        lease=lease,
        peak_tflops=peak_tflops_of(config, device),
        profiler=step_profiler(config, groups.rank, device),
        forecast=forecast,
    )


@contextlib.contextmanager
def _explained_out_of_memory(
    prepared: Prepared, groups: Groups, device: torch.device
) -> Iterator[None]:
    """Adds the advisor's report to an out-of-memory error in the block."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            try:
                prepared.advisor.explain_out_of_memory(
                    error, prepared.config, prepared.tokenizer.vocab_size, groups, device
                )
            except Exception as fault:  # the error matters more than the report
                error.add_note(f"memory ran out; {type(fault).__name__} in explaining it: {fault}")
        raise


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
        compile_layers(model, device)
    zero = Zero(model, blocks, groups, config.distributed)

    # 2. The executor. Offload, graphs and pairs exclude each other, and each has its own executor.
    training, aux_losses = config.training, aux_losses_of(model)
    sharing = groups.tp if training.distribute_saved_activations else ALONE
    stages = placement_of(config), hidden_shape(config), groups, device
    if training.activation_offload:
        smallest = training.min_offloaded_tensor_size
        offloading = OffloadingRunner(device, smallest, sharing, aux_losses)
        return zero, OffloadingPipeline(model, zero, offloading, *stages)
    if training.cuda_graphs:
        for block in zero.trained:
            block.keep_grad_place()
        return zero, GraphedPipeline(model, zero, GraphedRunner(model, device), *stages)
    runner = LayerRunner(sharing, aux_losses)
    if config.distributed.overlap_moe_expert_parallel_comm:
        overlapped = Interleaver().run_overlapped
        return zero, PairedPipeline(model, zero, runner, *stages, run_overlapped=overlapped)
    return zero, Pipeline(model, zero, runner, *stages)


def _open_tracker(prepared: Prepared, forecast: Forecast | None, groups: Groups) -> Tracker:
    """Open wandb, TensorBoard and metrics.jsonl on rank 0, which has a forecast, and log the
    banner with their places.
    """
    config, progress = prepared.config, prepared.progress
    reached = progress.iteration, progress.consumed_samples
    if forecast is None:
        return Tracker(config, None, *reached)
    sections = forecast.sections | {"layout": [groups.describe()]}
    record = run_record(config, groups.layout, sections, forecast)
    record["vocab_size"] = prepared.tokenizer.vocab_size
    tracker = Tracker(config, record, *reached)
    sections["paths"] += tracker.notes
    logger.info(banner(sections))
    return tracker


def _initialize_or_load(run: Run) -> None:
    checkpoint, iteration = run.checkpoint, run.progress.iteration
    if checkpoint is None:
        run.optimizer.initialise()
    else:
        with checkpoint, run.timing.events.restoring(iteration):
            fetch(checkpoint, run)
            with raise_on_all_ranks(run.groups.world):
                load(checkpoint, run)
        logger.info(
            f" loaded checkpoint {checkpoint.path} at iteration "
            f"{iteration}{continuity(checkpoint, run)}"
        )
    run.optimizer.copy_masters_to_weights()  # a collective: only after no rank has failed
    run.timing.events.ready(iteration)


def _train_and_evaluate(run: Run) -> int:
    """Train and evaluate as the flags ask for; the exit code."""
    # 1. Validation that is due before training. A signal cuts an evaluation short; all ranks agreed
    # on it, and it is due again in the next start.
    skip_train, is_evaluated = run.config.evaluation.skip_train, True
    if skip_train or run.progress.evaluation_due:
        is_evaluated = evaluate_all(run, "validation")

    # 2. Training.
    ended = Exit(COMPLETE, 0)
    if is_evaluated and not skip_train:
        try:
            ended = train(run)
        except NonFiniteError as error:
            if run.groups.rank == 0:
                print(error, file=sys.stderr, flush=True)
            finalize(run)
            _write_end(run, 1, str(error).splitlines()[0])
            return 1
        logger.info(f" {ended.reason}: exiting at iteration {run.progress.iteration}")

    # 3. The test split.
    if ended.reason == COMPLETE:
        if not is_evaluated or not evaluate_all(run, "test"):
            ended = run.exits.check(run.progress.iteration)
            logger.info(
                f" {ended.reason}: exiting at iteration {run.progress.iteration}; the evaluation "
                "is incomplete"
            )
    _write_end(run, ended.code, ended.reason)
    return ended.code


def _end_with(error: Exception, run: Run) -> None:
    """Other ranks read the reason from the store and name this rank instead of timing out."""
    error.add_note(f"[{run.groups.describe()}, iteration {run.progress.iteration}]")
    first_line = str(error).partition("\n")[0]
    reason = f"{type(error).__name__}: {first_line}"
    _write_end(run, 1, reason)
    PEERS.end(reason)


def _write_end(run: Run, code: int, reason: str) -> None:
    """Write the last event of this start; wandb's summary shows the goodput of all starts."""
    run.tracker.exit_code = int(code == 1)  # 85 and 143 are continued
    run.timing.events.end(run.progress.iteration, code, reason)
    folder = run.config.checkpoint.save
    if folder is not None:
        run.tracker.summarise(lambda: run.advisor.goodput(Path(folder)))
