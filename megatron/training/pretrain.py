"""Build a run, in visible order, and carry it out."""

from __future__ import annotations

import platform
import sys

import torch

from megatron import __version__
from megatron.checkpoint.manifest import CheckpointError
from megatron.checkpoint.reader import Checkpoint
from megatron.config.groups import Config, PrecisionConfig
from megatron.config.validate import resolve
from megatron.data.loader import Data, build_data
from megatron.data.tokenizer import Tokenizer, build_tokenizer
from megatron.dist.setup import choose_device, read_launch
from megatron.layers.attention import choose_attention
from megatron.model.arithmetic import flops_per_iteration, padded_vocab_size, parameter_count, peak_tflops
from megatron.model.block import BlockWrapper, PlainBlocks
from megatron.model.gpt import GPTModel
from megatron.observe.console import banner
from megatron.observe.tracking import Tracker
from megatron.optimizer.blocks import build_blocks
from megatron.optimizer.lr_schedule import Schedule
from megatron.optimizer.optimizer import Optimizer
from megatron.optimizer.scaler import LossScaler
from megatron.optimizer.update import choose_adam
from megatron.parallel.recompute import Recompute
from megatron.plan import memory
from megatron.training.checkpointing import load, locate_checkpoint, prepare_save_folder, save
from megatron.training.exit import ExitConditions
from megatron.training.loop import COMPLETE, NonFiniteError, Progress, Run, evaluate_all, train
from megatron.training.resume import refuse_foreign, resumed_schedule


def compute_dtype(precision: PrecisionConfig) -> torch.dtype:
    """Precision of weights and activations."""
    chosen = (torch.bfloat16, precision.bf16), (torch.float16, precision.fp16), (torch.float64, precision.fp64)
    return next((dtype for dtype, on in chosen if on), torch.float32)


def block_wrapper(config: Config) -> BlockWrapper:
    """How units are called, composed from what the flags ask for."""
    wrapper: BlockWrapper = PlainBlocks()
    if config.training.recompute_granularity == "full":
        wrapper = Recompute(wrapper)
    return wrapper


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def describe(config: Config, notes: list[str], tokenizer: Tokenizer, data: Data, device: torch.device, padded_vocab: int, world_size: int,
             checkpoint: Checkpoint | None) -> dict[str, list[str]]:
    """The banner's sections: all that a reader of a log needs to know about a run."""
    model, training, seq = config.model, config.training, config.data.seq_length
    dtype, gbs = compute_dtype(config.precision), config.training.global_batch_size
    parameters = parameter_count(model, tokenizer.vocab_size)
    peak = config.logging.peak_tflops or peak_tflops(_device_name(device), dtype)
    flops = [flops_per_iteration(model, gbs, seq, vocab) for vocab in (tokenizer.vocab_size, padded_vocab)]
    estimate = memory.estimate(config, tokenizer.vocab_size, world_size)
    attention = choose_attention(model, training=True)
    slow = " (--attention-dropout 0 allows the fused one)" if attention == "plain" and model.attention_dropout > 0 else ""
    adam = choose_adam(config.optimizer, device) if config.optimizer.optimizer == "adam" else "torch-fused"
    length = f"{training.train_iters} iterations" if training.train_iters is not None else f"{training.train_samples} samples"
    gib = ", ".join(f"{name} {size / 2**30:.3g}" for name, size in estimate.items())
    return {
        "versions": [f"megatron {__version__}, torch {torch.__version__}, Python {platform.python_version()}"],
        "device": [f"{_device_name(device)}; MFU against {f'{peak:g} TFLOP/s' if peak else 'no known peak (--peak-tflops)'}"],
        "layout": [f"tp1 cp1 pp1 dp{world_size}"],
        "model": [
            f"{model.num_layers} layers, hidden {model.hidden_size}, ffn {model.ffn_hidden_size} ({model.activation}), {model.num_attention_heads} heads of "
            f"{model.kv_channels}, {model.num_query_groups} key/value heads, {model.normalization}, positions {model.position_embedding_type}",
            f"{parameters['total']:,} parameters ({', '.join(f'{name} {count:,}' for name, count in parameters.items() if name != 'total')})",
            f"vocabulary {tokenizer.vocab_size} ({tokenizer.name}), padded to {padded_vocab}",
        ],
        "precision": [f"{str(dtype).removeprefix('torch.')} weights, {'float64' if dtype == torch.float64 else 'float32'} master weights, gradients and moments"],
        "batch": [
            f"micro-batch {training.micro_batch_size} x {gbs // (training.micro_batch_size * world_size)} micro-batches x dp {world_size} = global batch {gbs}; "
            f"sequence {seq}; {gbs * seq:,} tokens an iteration; {length}",
            f"{flops[0] / 1e12:.4g} TFLOP an iteration ({flops[1] / 1e12:.4g} with the padded vocabulary, Megatron's count)",
        ],
        "kernels": [f"attention {attention}{slow}; {config.optimizer.optimizer} {adam}; recompute {training.recompute_granularity or 'none'}"],
        "memory": [f"estimate per rank (GiB): {gib}"],
        "data": data.notes,
        "paths": [
            f"save {config.checkpoint.save or '-'}; load {checkpoint.path if checkpoint else '-'}",
        ],
        "notes": notes,
    }


def pretrain(config: Config, notes: list[str], *, dry_run: bool = False) -> int:
    """Carry out one run; the exit code of the process. Raises ValueError (with the fix) for everything a user can mend."""
    world_size = config.distributed.world_size or read_launch().world_size
    device = torch.device("cpu") if dry_run else choose_device(read_launch(), config.distributed)[0]
    tokenizer = build_tokenizer(resolve(config, world_size, None).config.data)  # faults of flags come before those of files
    resolved = resolve(config, world_size, tokenizer.vocab_size)
    config, notes = resolved.config, [*notes, *resolved.notes]
    dtype = compute_dtype(config.precision)
    padded_vocab = padded_vocab_size(tokenizer.vocab_size, config.model)

    checkpoint = locate_checkpoint(config)
    progress, schedule = Progress(), Schedule.of(config)
    if checkpoint is not None:
        refuse_foreign(checkpoint, config, tokenizer.vocab_size, tokenizer.fingerprint)
        if not config.checkpoint.finetune:
            if "schedule" not in checkpoint.state:
                raise CheckpointError(f"{checkpoint.path}: holds weights alone (converted from another format), no run to go on with; give --finetune")
            fields = Progress.__dataclass_fields__
            progress = Progress(**{name: checkpoint.state[name] for name in fields})
            schedule = resumed_schedule(schedule, checkpoint.state["schedule"], config)
    resumes = progress.iteration > 0
    data = build_data(config, tokenizer, checkpoint.state["ledger"] if resumes else None, progress.consumed_samples)
    sections = describe(config, notes, tokenizer, data, device, padded_vocab, world_size, checkpoint)
    if dry_run:
        print(banner(sections) + "\ndry run: everything is in order; nothing was trained", flush=True)
        return 0

    prepare_save_folder(config)
    model = GPTModel(config.model, vocab_size=tokenizer.vocab_size, padded_vocab=padded_vocab, dtype=dtype, seed=config.training.seed)
    optimizer = Optimizer(build_blocks(model, device), config)
    exits = ExitConditions(config.training)
    tracker = Tracker(config, {"config": config.to_dict(), "banner": sections}, progress.iteration)
    sections["paths"] += tracker.notes
    print(banner(sections), flush=True)
    run = Run(
        config=config, device=device, vocab_size=tokenizer.vocab_size, padded_vocab=padded_vocab, tokenizer_fingerprint=tokenizer.fingerprint,
        model=model, wrapper=block_wrapper(config), optimizer=optimizer, schedule=schedule, scaler=LossScaler(config.precision), data=data,
        tracker=tracker, exits=exits, progress=progress, save=save,
        peak_tflops=config.logging.peak_tflops or peak_tflops(_device_name(device), dtype),
    )
    try:
        return _carry_out(run, checkpoint)
    finally:
        tracker.close()
        exits.close()


def _carry_out(run: Run, checkpoint: Checkpoint | None) -> int:
    if checkpoint is None:
        run.optimizer.initialise(run.config)
    else:
        load(checkpoint, run)
        print(f" loaded checkpoint {checkpoint.path} at iteration {run.progress.iteration}", flush=True)
        checkpoint.close()
    if run.config.evaluation.skip_train or run.progress.evaluation_due:
        run.progress.evaluation_due = evaluate_all(run, "validation") is None
    code = 0
    if not run.config.evaluation.skip_train:
        try:
            ended = train(run)
        except NonFiniteError as error:
            print(error, file=sys.stderr, flush=True)
            return 1
        code = ended.code
        print(f" {ended.reason}: exiting at iteration {run.progress.iteration}", flush=True)
        if ended.reason != COMPLETE:
            return code
    if run.data.test:
        evaluate_all(run, "test")
    return code
