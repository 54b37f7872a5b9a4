"""Build a run, in visible order, and carry it out."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron import __version__
from megatron.checkpoint.local.tiers import Tiers
from megatron.checkpoint.manifest import CheckpointError
from megatron.checkpoint.ranks import Ranks
from megatron.checkpoint.reader import Checkpoint
from megatron.config.derive import data_parallel_size
from megatron.config.groups import Config
from megatron.config.stages import placement_of
from megatron.config.validate import resolve
from megatron.data.loader import Data, build_data
from megatron.data.tokenizer import Tokenizer, build_tokenizer
from megatron.distributed.groups import ALONE, Axis, describe_layout, group_options, layout_of
from megatron.distributed.peers import PEERS
from megatron.distributed.setup import (
    choose_device,
    connect,
    disconnect,
    make_groups,
    read_launch,
    set_determinism,
    share_cores,
    slurm_job,
)
from megatron.distributed.speech import one_voice
from megatron.distributed.together import together
from megatron.model.arithmetic import (
    flops_per_iteration,
    padded_vocab_size,
    parameter_count,
    peak_tflops,
)
from megatron.model.build import build_model, hidden_shape
from megatron.model.kernels import choose_kernels, compute_dtype, remarks
from megatron.observe.console import NOT_DONE, banner
from megatron.observe.tracking import Tracker
from megatron.optimizer.blocks import build_run_blocks
from megatron.optimizer.lr_schedule import ParamSchedule
from megatron.optimizer.optimizer import Optimizer
from megatron.optimizer.scaler import LossScaler
from megatron.optimizer.zero import Zero
from megatron.parallel.layer_passes import LayerPasses
from megatron.parallel.pipeline import Pipeline
from megatron.plan.advice import Machine
from megatron.plan.stages import stage_lines
from megatron.plan.table import banner_lines
from megatron.plan.verdict import DEVICE_MEMORY, Verdict, memory_verdict
from megatron.training.checkpointing import (
    drain,
    fetch,
    join_tiers,
    lease_save_folder,
    load,
    locate_checkpoint,
    make_manager,
    prepare_save_folder,
)
from megatron.training.exit import ExitConditions
from megatron.training.length import epoch_lines, length_line
from megatron.training.loop import COMPLETE, NonFiniteError, evaluate_all, train
from megatron.training.neighbours import megatron_core_lines
from megatron.training.resume import (
    accept_changes,
    changed_data,
    changed_fields,
    check_complete,
    continuity,
    device_name,
    resumed_schedule,
    said_changes,
    schedule_changes,
    take_checkpoint_args,
)
from megatron.training.run import Progress, Run


def describe(
    config: Config,
    notes: list[str],
    tokenizer: Tokenizer,
    data: Data,
    device: torch.device,
    padded_vocab: int,
    world_size: int,
    checkpoint: Checkpoint | None,
    verdict: Verdict | None,
    planned_for: str | None = None,
    changed: Sequence[str] = (),
) -> dict[str, list[str]]:
    """The banner's sections: all that a reader of a log needs to know about a run. Memory is that
    of `planned_for` (cuda, cpu) or of the device.
    """
    model, training, seq = config.model, config.training, config.data.seq_length
    dtype, gbs, dp = (
        compute_dtype(config.precision),
        config.training.global_batch_size,
        data_parallel_size(config, world_size),
    )
    parameters = parameter_count(model, tokenizer.vocab_size)
    counts = [f"{name} {count:,}" for name, count in parameters.items() if name != "total"]
    peak = config.logging.peak_tflops or peak_tflops(device_name(device), dtype)
    flops = [
        flops_per_iteration(model, gbs, seq, vocab)
        for vocab in (tokenizer.vocab_size, padded_vocab)
    ]
    # nodes, whose links the plan knows
    across = device.type == "cuda" and world_size > torch.cuda.device_count()
    machine = Machine(peak) if across and peak else None
    _, kernels = choose_kernels(config, torch.device(planned_for or device))
    slow = (
        kernels["attention"].implementation == "plain"
        and model.attention_dropout > 0
        and model.attention_backend == "auto"
    )
    return {
        "verdict": [verdict.line] if verdict else [],
        "versions": [
            (
                f"megatron {__version__}, torch {torch.__version__}, Python "
                f"{platform.python_version()}"
            ),
            *megatron_core_lines(),
        ],
        "device": [
            (
                f"{device_name(device)}; MFU against "
                f"{f'{peak:g} TFLOP/s' if peak else 'no known peak (--peak-tflops)'}"
            )
        ],
        "layout": [describe_layout(layout_of(config, world_size))],
        "model": [
            f"{model.num_layers} layers, hidden {model.hidden_size}, ffn "
            f"{model.ffn_hidden_size} ({model.activation}), {model.num_attention_heads} heads of "
            f"{model.kv_channels}, {model.num_query_groups} key/value heads, "
            f"{model.normalization}, positions {model.position_embedding_type}",
            f"{parameters['total']:,} parameters ({', '.join(counts)})",
            f"vocabulary {tokenizer.vocab_size} ({tokenizer.name}), padded to {padded_vocab}",
            *([f"frozen: {config.optimizer.freeze}"] if config.optimizer.freeze else []),
        ],
        "precision": [
            (
                f"{str(dtype).removeprefix('torch.')} weights, "
                f"{'float64' if dtype == torch.float64 else 'float32'} master weights, gradients "
                "and moments"
            )
        ],
        "batch": [
            f"micro-batch {training.micro_batch_size} x "
            f"{gbs // (training.micro_batch_size * dp)} micro-batches x dp {dp} = global "
            f"batch {gbs}; sequence {seq}; {gbs * seq:,} tokens an iteration",
            length_line(config),
            (
                f"{flops[0] / 1e12:.4g} TFLOP an iteration ({flops[1] / 1e12:.4g} with the "
                "padded vocabulary, Megatron's count)"
            ),
        ],
        "pipeline": stage_lines(
            config, tokenizer.vocab_size, world_size, planned_for or device.type
        ),
        "kernels": [
            "; ".join(
                [
                    *(
                        f"{operator} {choice.implementation}"
                        for operator, choice in kernels.items()
                    ),
                    *(["sgd torch-fused"] if config.optimizer.optimizer == "sgd" else []),
                    f"recompute {training.recompute_granularity or 'none'}",
                    f"deterministic mode {'on' if model.deterministic_mode else 'off'}",
                ]
            ),
            *(["--attention-dropout 0 allows a faster attention"] if slow else []),
            *remarks(kernels),
        ],
        "memory": banner_lines(
            config, tokenizer.vocab_size, world_size, planned_for or device.type, machine
        ),
        "data": [*data.notes, *epoch_lines(config, data)],
        "paths": [
            f"save {config.checkpoint.save or '-'}; load {checkpoint.path if checkpoint else '-'}",
        ],
        "changed": list(changed),
        "notes": notes,
    }


def verdict_of(
    config: Config, vocab_size: int, world_size: int, device: torch.device, planned_for: str | None
) -> Verdict | None:
    """Whether the run fits into a GPU's memory: --device-memory, or what the GPU has, or that of a
    usual one. None on a CPU.
    """
    if (planned_for or device.type) != "cuda":
        return None
    memory = config.distributed.device_memory
    if memory is None and device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory / 2**30
    return memory_verdict(config, vocab_size, world_size, memory or DEVICE_MEMORY)


def end_of_dry_run(verdict: Verdict | None) -> tuple[str, int]:
    """The last line of a dry run and its exit code."""
    if verdict is None or verdict.word == "fits":
        return "dry run: everything is in order; nothing was trained", 0
    if verdict.fits:
        return (
            (
                "dry run: the settings are in order, but memory is tight (see verdict above); "
                "nothing was trained"
            ),
            0,
        )
    return (
        (
            "dry run: the settings are in order, but the run does not fit into memory (see "
            "verdict above); nothing was trained"
        ),
        2,
    )


def pretrain(
    config: Config, notes: list[str], *, not_done: Sequence[str] = (), dry_run: bool = False
) -> int:
    """Carry out one run; the exit code of the process. `not_done`: what the flags ask for and does
    not exist.

    Raises UserError (with the fix) for everything a user can mend.
    """
    launch = read_launch()
    config = take_checkpoint_args(config)
    world_size = config.distributed.world_size or launch.world_size
    # faults of flags come before those of files and of other ranks
    resolved = resolve(config, world_size, None).config
    if dry_run:
        prepared = prepare(
            config, notes, world_size, torch.device("cpu"), ALONE, planned_for="cuda"
        )
        text, code = end_of_dry_run(prepared.verdict)
        print(banner({NOT_DONE: list(not_done), **prepared.sections}) + "\n" + text, flush=True)
        return code
    device, backend = choose_device(launch, config.distributed)
    set_determinism(device, resolved.model.deterministic_mode)
    if device.type == "cuda" and resolved.optimizer.optimizer_cpu_offload:
        share_cores(launch)
    versions = {"megatron": __version__, "torch": torch.__version__}
    connect(
        launch,
        backend,
        config.distributed.distributed_timeout_minutes,
        {**config.to_dict(), "versions": versions},
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(one_voice())
        run, checkpoint = build(config, notes, world_size, device, stack, not_done)
        stack.callback(run.exits.close)
        if run.checkpoints is not None:
            stack.callback(run.checkpoints.close)
        if run.tracker is not None:
            stack.callback(run.tracker.close)
        try:
            code = _carry_out(run, checkpoint)
            run.zero.settle()
        except Exception as error:
            error.add_note(f"[{run.groups.describe()}, iteration {run.progress.iteration}]")
            PEERS.end(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            raise
    disconnect()
    return code


@dataclass(frozen=True)
class Prepared:
    """All that is known about a run before its model is built."""

    config: Config
    tokenizer: Tokenizer
    padded_vocab: int
    checkpoint: Checkpoint | None
    progress: Progress
    schedule: ParamSchedule
    data: Data
    sections: dict[str, list[str]]  # of the banner, on the rank that prints it
    verdict: Verdict | None  # on that rank; None where no GPU is planned for


def prepare(
    config: Config,
    notes: list[str],
    world_size: int,
    device: torch.device,
    world: Axis,
    planned_for: str | None = None,
    tiers: Tiers | None = None,
) -> Prepared:
    """Read everything that a run depends on, and refuse what does not fit, on every rank of `world`
    or on none. Raises UserError.
    """
    with together(world, device):
        tokenizer = build_tokenizer(resolve(config, world_size, None).config.data)
        resolved = resolve(config, world_size, tokenizer.vocab_size)
        config, notes = resolved.config, [*notes, *resolved.notes]
        schedule = ParamSchedule.of(config)
    checkpoint = locate_checkpoint(config, Ranks(world, device), tiers)
    with together(world, device):
        progress, changed = Progress(), []
        if checkpoint is not None:
            state = checkpoint.state
            check_complete(
                checkpoint, weights_alone=config.checkpoint.finetune or "schedule" not in state
            )
            changes = changed_fields(state, config, tokenizer.vocab_size, tokenizer.fingerprint)
            if not all(change.accept for change in changes):
                accept_changes(checkpoint, changes, config)
            if not config.checkpoint.finetune:
                if "schedule" not in checkpoint.state:
                    raise CheckpointError(
                        f"{checkpoint.path}: holds only weights (converted from another "
                        "format) and no run to resume; give --finetune"
                    )
                progress = Progress(
                    **{name: state[name] for name in Progress.__dataclass_fields__ if name in state}
                )
        scanned = (
            config
            if world.rank == 0
            else dataclasses.replace(
                config, data=dataclasses.replace(config.data, check_data=False)
            )
        )
        data = build_data(
            scanned,
            tokenizer,
            checkpoint.state["ledger"] if progress.iteration > 0 else None,
            progress.consumed_samples,
        )
        if checkpoint is not None:
            changed = said_changes(state, config)
            notes += accept_changes(
                checkpoint, [*changes, *changed_data(state, config, data.ledger)], config
            )
            if not config.checkpoint.finetune:
                taken = (
                    "the checkpoint's is taken"
                    if config.optimizer.use_checkpoint_opt_param_scheduler
                    else "the command line's is taken"
                )
                changed += [
                    f"schedule: {line}; {taken}"
                    for line in schedule_changes(schedule, state["schedule"])
                ]
                schedule = resumed_schedule(schedule, state["schedule"], config)
        padded_vocab = padded_vocab_size(
            tokenizer.vocab_size, config.model, config.distributed.tensor_model_parallel_size
        )
        sections, verdict = {}, None
        if world.rank == 0:
            verdict = verdict_of(config, tokenizer.vocab_size, world_size, device, planned_for)
            sections = describe(
                config,
                notes,
                tokenizer,
                data,
                device,
                padded_vocab,
                world_size,
                checkpoint,
                verdict,
                planned_for,
                changed,
            )
    return Prepared(
        config, tokenizer, padded_vocab, checkpoint, progress, schedule, data, sections, verdict
    )


def build(
    config: Config,
    notes: list[str],
    world_size: int,
    device: torch.device,
    closing: contextlib.ExitStack,
    not_done: Sequence[str] = (),
) -> tuple[Run, Checkpoint | None]:
    """Everything one run is made of on this rank, weights and state still unset; rank 0 prints the
    banner. Raises UserError.

    `closing` gives up the lease of --save, also when building fails.
    """
    layout = layout_of(config, world_size)
    resolved = resolve(config, world_size, None).config
    groups = make_groups(layout, **group_options(resolved))
    ranks = Ranks(groups.world, device, groups.pp.rank)
    tiers = join_tiers(config, ranks)
    prepared = prepare(config, notes, world_size, device, groups.world, tiers=tiers)
    config, tokenizer = prepared.config, prepared.tokenizer
    sections = {NOT_DONE: list(not_done), **prepared.sections}
    lease = lease_save_folder(config, ranks, slurm_job())
    if lease is not None:
        closing.callback(lease.release)
    prepare_save_folder(config, ranks, tiers, goes_on=prepared.checkpoint is not None)
    device_names = ", ".join(sorted(set(ranks.agree(lambda: device_name(device)))))
    model = build_model(config, tokenizer.vocab_size, groups, device)
    blocks = build_run_blocks(config, model, device, groups)
    for parameter in model.parameters() if model.config.weight_grad_backend == "apex" else ():
        parameter.by_apex = True  # read where its gradient is formed
    zero = Zero(model, blocks, groups, config.distributed)
    passes = LayerPasses(recompute=config.training.recompute_granularity == "full")
    with together(groups.world, device):
        optimizer = Optimizer(blocks, config, groups, zero.publish)
    exits = ExitConditions(config.training)
    tracker = None
    if groups.rank == 0:
        sections["layout"] = [groups.describe()]
        tracker = Tracker(
            config,
            {"config": config.to_dict(), "banner": sections},
            prepared.progress.iteration,
            resumed_samples=prepared.progress.consumed_samples,
        )
        sections["paths"] += tracker.notes
        print(banner(sections), flush=True)
    return Run(
        config=config,
        groups=groups,
        device=device,
        device_names=device_names,
        vocab_size=tokenizer.vocab_size,
        padded_vocab=prepared.padded_vocab,
        tokenizer_fingerprint=tokenizer.fingerprint,
        model=model,
        zero=zero,
        pipeline=Pipeline(
            model, zero, passes, placement_of(config), hidden_shape(config), groups, device
        ),
        optimizer=optimizer,
        schedule=prepared.schedule,
        scaler=LossScaler(config.precision),
        data=prepared.data,
        tracker=tracker,
        exits=exits,
        progress=prepared.progress,
        checkpoints=make_manager(config, optimizer, ranks, tracker, tiers),
        lease=lease,
        peak_tflops=config.logging.peak_tflops or peak_tflops(device_name(device), model.dtype),
    ), prepared.checkpoint


def _carry_out(run: Run, checkpoint: Checkpoint | None) -> int:
    if checkpoint is None:
        run.optimizer.initialise()
    else:
        fetch(checkpoint, run)
        with together(run.groups.world, run.device):
            load(checkpoint, run)
        print(
            (
                f" loaded checkpoint {checkpoint.path} at iteration "
                f"{run.progress.iteration}{continuity(checkpoint, run)}"
            ),
            flush=True,
        )
        checkpoint.close()
    if run.config.evaluation.skip_train or run.progress.evaluation_due:
        run.progress.evaluation_due = evaluate_all(run, "validation") is None
    code = 0
    if not run.config.evaluation.skip_train:
        try:
            ended = train(run)
        except NonFiniteError as error:
            drain(run)
            if run.groups.rank == 0:
                print(error, file=sys.stderr, flush=True)
            return 1
        code = ended.code
        print(f" {ended.reason}: exiting at iteration {run.progress.iteration}", flush=True)
        if ended.reason != COMPLETE:
            return code
    if run.data.test:
        evaluate_all(run, "test")
    return code
