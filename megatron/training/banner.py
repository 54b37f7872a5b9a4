"""The description of a run before its first step: its banner, and its record for the trackers."""

from __future__ import annotations

import platform
import subprocess
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron import __version__
from megatron.config.derive import data_parallel_size, expert_ranks
from megatron.config.fp8 import layer_in_fp8, wide_linears
from megatron.config.groups import OPTIMIZERS, Config
from megatron.distributed.groups import Layout, describe_layout, layout_of
from megatron.model.arithmetic import (
    active_parameters,
    flops_per_iteration,
    parameter_count,
    peak_tflops,
)
from megatron.model.kernels import choose_kernels, compute_dtype, remarks
from megatron.model.recompute import recompute_text
from megatron.observe.console import NOT_DONE
from megatron.optimizer.lr_schedule import last_iteration, samples_after
from megatron.optimizer.update import RULES
from megatron.training.advisor import Forecast
from megatron.training.resume import device_name

if TYPE_CHECKING:
    from megatron.training.run import Prepared

CHECKOUT = Path(__file__).resolve().parents[2]
GIT_SECONDS = 20  # timeout


def describe(
    prepared: Prepared,
    world_size: int,
    device: torch.device,
    planned_for: str | None = None,
    node: tuple[float, int] | None = None,
) -> Forecast:
    """The forecast of a run, planned for `planned_for` (cuda, cpu) or the device, with all sections
    of the banner. `node`: GiB of this node and its number of ranks. Raises UserError when host
    memory does not suffice.
    """
    config = prepared.config
    forecast = prepared.advisor.forecast(
        config, prepared.tokenizer.vocab_size, world_size, device, planned_for, node
    )
    # Found now rather than after training: no flag of a checkpoint can be changed afterwards.
    notes = [*prepared.notes]
    fault = config.checkpoint.save and prepared.advisor.export_fault(config.model)
    if fault:
        notes.append(f"no export of this run's checkpoints: {fault}")
    # Without a planner its sections are empty, and an empty section is not printed.
    planned = defaultdict(list, forecast.sections)
    peak = peak_tflops_of(config, device)
    against = f"{peak:g} TFLOP/s" if peak else "no known peak (--peak-tflops)"
    versions = f"megatron {__version__}, torch {torch.__version__}"
    sections = {
        NOT_DONE: [*prepared.not_done],
        "verdict": planned["verdict"],
        "versions": [f"{versions}, Python {platform.python_version()}"],
        "device": [f"{device_name(device)}; MFU against {against}"],
        "layout": [describe_layout(layout_of(config, world_size))],
        "model": _model_lines(prepared),
        "precision": [_precision_line(config)],
        "batch": _batch_lines(prepared, world_size),
        "pipeline": planned["pipeline"],
        # A dry run on a laptop describes the run on its GPU.
        "kernels": _kernel_lines(config, torch.device(planned_for or device)),
        "memory": planned["memory"],
        "time": planned["time"],
        "advice": planned["advice"],
        "data": [*prepared.data.notes],
        "paths": [_paths_line(prepared)],
        "changed": prepared.changed,
        "notes": notes,
    }
    return replace(forecast, sections=sections)


def _paths_line(prepared: Prepared) -> str:
    save, loaded = prepared.config.checkpoint.save or "-", prepared.checkpoint
    return f"save {save}; load {loaded.path if loaded else '-'}"


def peak_tflops_of(config: Config, device: torch.device) -> float | None:
    """TFLOP/s of --peak-tflops or of a known device: the reference of MFU."""
    # The flag comes first: a card may be limited below the number of its data sheet.
    known = peak_tflops(device_name(device), compute_dtype(config.precision))
    return config.logging.peak_tflops or known


def _model_lines(prepared: Prepared) -> list[str]:
    model, tokenizer = prepared.config.model, prepared.tokenizer
    # Of the model as published: neither the padding of the vocabulary nor what a rank holds.
    parameters = parameter_count(model, tokenizer.vocab_size)
    counts = [f"{name} {count:,}" for name, count in parameters.items() if name != "total"]
    lines = [
        f"{model.num_layers} layers, hidden {model.hidden_size}, ffn "
        f"{model.ffn_hidden_size} ({model.activation}), {model.num_attention_heads} heads of "
        f"{model.kv_channels}, {model.num_query_groups} key/value heads, "
        f"{model.normalization}, positions {model.position_embedding_type}"
    ]
    if model.multi_latent_attention:
        # Queries are compressed only where a rank is given.
        queries = "the token" if model.q_lora_rank is None else model.q_lora_rank
        lines.append(
            f"latent attention: queries of {queries}, keys and values of {model.kv_lora_rank}; a "
            f"head has {model.qk_head_dim} + {model.qk_pos_emb_head_dim} channels, its values "
            f"{model.v_head_dim}"
        )
    lines.append(f"{parameters['total']:,} parameters ({', '.join(counts)})")
    if any(model.expert_layers()):
        lines.append(_expert_line(prepared))
    lines.append(
        f"vocabulary {tokenizer.vocab_size} ({tokenizer.name}), padded to {prepared.padded_vocab}"
    )
    frozen = prepared.config.optimizer.freeze
    return [*lines, f"frozen: {frozen}"] if frozen else lines


def _expert_line(prepared: Prepared) -> str:
    model = prepared.config.model
    # What one token passes through decides the cost; the total decides the memory.
    active = active_parameters(model, prepared.tokenizer.vocab_size)
    here = model.num_experts // expert_ranks(prepared.config).ep
    return (
        f"{sum(model.expert_layers())} of {model.num_layers} layers have {model.num_experts} "
        f"experts of {model.moe_ffn_hidden_size}, {model.moe_router_topk} for each token: "
        f"{active:,} parameters are active; {here} experts a rank"
    )


def _precision_line(config: Config) -> str:
    dtype = compute_dtype(config.precision)
    kept = "float64" if dtype == torch.float64 else "float32"
    name = str(dtype).removeprefix("torch.")
    kinds = f"{name} weights, {kept} master weights, gradients and moments"
    # Which GEMMs are 8-bit depends on the layer and on the shape: the banner names them.
    wide = wide_linears(config.model, config.precision)
    if not wide:
        return kinds
    layers = config.model.num_layers
    taken = sum(layer_in_fp8(config.precision, index, layers) for index in range(layers))
    return (
        f"{kinds}; fp8 {config.precision.fp8_format}, {config.precision.fp8_recipe}: products of "
        f"{', '.join(linear.name for linear in wide)} in {taken} of {layers} layers"
    )


def _batch_lines(prepared: Prepared, world_size: int) -> list[str]:
    config, seq = prepared.config, prepared.config.data.seq_length
    size, micro = config.training.global_batch_size, config.training.micro_batch_size
    dp = data_parallel_size(config, world_size)
    iterations = last_iteration(config)
    samples = samples_after(iterations, config)
    # MFU counts the real vocabulary; Megatron-LM counts the padded one, so both are printed.
    flops, padded_flops = (
        flops_per_iteration(config.model, size, seq, vocab)
        for vocab in (prepared.tokenizer.vocab_size, prepared.padded_vocab)
    )
    return [
        f"micro-batch {micro} x {size // (micro * dp)} micro-batches x dp {dp} = global batch "
        f"{size}; sequence {seq}; {size * seq:,} tokens an iteration",
        f"{iterations:,} iterations, {samples:,} samples, {samples * seq:,} tokens in all",
        f"{flops / 1e12:.4g} TFLOP an iteration ({padded_flops / 1e12:.4g} with the padded "
        "vocabulary, Megatron's count)",
    ]


def _kernel_lines(config: Config, device: torch.device) -> list[str]:
    model = config.model
    # What `auto` has become on this device, with the reasons of each fallback.
    _, kernels = choose_kernels(config, device)
    chosen = [f"{operator} {choice.implementation}" for operator, choice in kernels.items()]
    if OPTIMIZERS[config.optimizer.optimizer].implementation is None:
        (implementation,) = RULES[config.optimizer.optimizer]
        chosen.append(f"{config.optimizer.optimizer} {implementation}")
    if model.torch_compile:
        chosen.append("layers compiled by torch.compile")
    chosen.append(f"recompute {recompute_text(config.training)}")
    chosen.append(f"deterministic mode {'on' if model.deterministic_mode else 'off'}")
    # A note where a flag keeps `auto` from a faster kernel.
    lines = ["; ".join(chosen)]
    if (
        kernels["attention"].implementation == "plain"
        and model.attention_dropout > 0
        and model.attention_backend == "auto"
    ):
        lines.append("--attention-dropout 0 allows a faster attention")
    return [*lines, *remarks(kernels)]


def run_record(
    config: Config, layout: Layout, banner: dict[str, list[str]], forecast: Forecast
) -> dict[str, Any]:
    """What metrics.config.json and wandb store of a run: configuration, layout, versions, git
    state, memory verdict, predicted step time and banner. Unknown entries are omitted.
    """
    # What a reader needs to make the run again, whatever tracker it is in.
    axes = {axis: getattr(layout, axis) for axis in ("tp", "cp", "pp", "dp")}
    versions = {
        "megatron": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
    }
    verdict = forecast.verdict
    found = {
        "config": config.to_dict(),
        "layout": {**axes, "ranks": layout.world},
        "versions": versions,
        "git": git_state(CHECKOUT),
        "memory": {"verdict": verdict.word, "reason": verdict.line} if verdict else None,
        "prediction": forecast.prediction,
        "banner": banner,
    }
    return {name: value for name, value in found.items() if value is not None}


def git_state(root: Path) -> dict[str, Any] | None:
    """Commit of the checkout at `root`, and whether a tracked file differs from it (`dirty`). None
    when `root` is not a checkout, or git is missing or slow.
    """
    if not (root / ".git").exists():
        return None
    # Without locks (`describe --dirty` would write the index): the checkout may be shared by many
    # jobs. Untracked files are data and logs.
    command = "git --no-optional-locks status --porcelain=v2 --branch --untracked-files=no".split()
    try:
        done = subprocess.run(
            command, cwd=root, capture_output=True, text=True, timeout=GIT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    # Lines with # are the state of the branch, its commit first; all others are changed files.
    lines = done.stdout.splitlines()
    return {"commit": lines[0].split()[-1], "dirty": not lines[-1].startswith("#")}
