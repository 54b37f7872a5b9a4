"""Which implementation computes each operator of a run: the one place where flags, device and
precision meet the dispatch table.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from megatron.config.derive import attention_ranks, expert_ranks
from megatron.config.errors import UserError
from megatron.config.groups import Config, PrecisionConfig
from megatron.config.model import GATED
from megatron.kernels import grouped_gemm, lang, norm
from megatron.kernels.attention import unsupported_heads
from megatron.kernels.attention_backward import unsupported_atomics
from megatron.kernels.dispatch import (
    CANDIDATES,
    FAULTY,
    OPERATORS,
    Choice,
    choose,
    flag_of,
    load_candidate,
)
from megatron.model.attention.attention import OURS, beyond_sdpa


def compute_dtype(precision: PrecisionConfig) -> torch.dtype:
    """Precision of weights and activations."""
    if precision.bf16:
        return torch.bfloat16
    if precision.fp16:
        return torch.float16
    return torch.float64 if precision.fp64 else torch.float32


def choose_kernels(config: Config, device: torch.device) -> tuple[Config, dict[str, Choice]]:
    """The configuration that layers and optimizer are built from, in which no backend but
    attention's is `auto`, and for the banner what trains. Attention that is not ours is chosen by
    the layer, for evaluation and for training with dropout. Raises UserError when a flag asks for
    what this device, precision or model cannot have.
    """
    dtype = compute_dtype(config.precision)
    _check_fp8(config, device)
    # What this model cannot have is refused if a flag asks for it, and not taken by `auto`.
    # The table of configurations begins at 8.0; on older GPUs `choose` passes over Triton.
    arch = lang.capability(device)
    unable, measurements = _unable(config, max(arch, 80), dtype), _measurements(config, arch)
    operators = [operator for operator in OPERATORS if _takes_part(config, operator)]
    choices = {
        operator: choose(
            operator,
            _wanted(config, operator, device),
            device,
            dtype,
            unable.get(operator),
            **measurements.get(operator, {}),
        )
        for operator in operators
    }
    _check_ring(config, device, choices["attention"], unable["attention"])
    # The choices go into the configuration that layers are built from: they read one name each.
    # Attention's `auto` stays, see above.
    fields = {
        _field(operator): choice.implementation
        for operator, choice in choices.items()
        if operator != "attention" or choice.implementation in OURS
    }

    def chosen(group: Any) -> Any:
        own = {field: value for field, value in fields.items() if hasattr(group, field)}
        return dataclasses.replace(group, **own)

    model, optimizer = chosen(config.model), chosen(config.optimizer)
    return dataclasses.replace(config, model=model, optimizer=optimizer), choices


def _takes_part(config: Config, operator: str) -> bool:
    """Whether a run has such an operator."""
    if operator == "grouped-gemm":
        return config.model.num_experts is not None
    return operator != "adam" or config.optimizer.optimizer == "adam"


def _check_fp8(config: Config, device: torch.device) -> None:
    """Raises UserError where the flags ask for 8-bit floats and a GPU cannot multiply them."""
    precision = config.precision
    if precision.fp8_format is None or device.type != "cuda":
        return
    asked = f"--fp8-format {precision.fp8_format}"
    # torch._scaled_mm needs Hopper's tensor cores.
    arch = lang.capability(device)
    if arch < lang.HOPPER:
        raise UserError(
            f"{asked}: needs a GPU of compute capability 9.0 or newer, this one has {arch / 10}; "
            "drop it"
        )
    if precision.fp8_recipe == "blockwise":
        # torch._scaled_mm scales blocks of 1 x 128 there alone; a build without CUDA only plans
        cuda = torch.version.cuda or "12.9"
        if arch != lang.HOPPER or tuple(map(int, cuda.split("."))) < (12, 9):
            raise UserError(
                "--fp8-recipe blockwise: needs compute capability 9.0 and CUDA 12.9 or newer, not "
                f"{arch / 10} and {cuda}; give --fp8-recipe tensorwise or rowwise"
            )
    if not precision.bf16:
        raise UserError(f"{asked}: on a GPU the results are bf16; give --bf16")
    if fault := lang.unsupported_reason(device, torch.bfloat16) or FAULTY.get("fp8"):
        raise UserError(f"{asked}: {fault}; drop it")


def _check_ring(
    config: Config, device: torch.device, chosen: Choice, unable: dict[str, str]
) -> None:
    """Raises UserError where a GPU's ranks make a ring and attention gives no log-sum-exp.
    `unable`: implementations of attention that cannot do it, and why.
    """
    _, ring = attention_ranks(config.distributed)
    if ring == 1 or device.type != "cuda" or chosen.implementation in (*OURS, "plain"):
        return
    because = f" ({chosen.because})" if chosen.because else ""
    dtype = compute_dtype(config.precision)
    cannot = "triton" in unable or lang.unsupported_reason(device, dtype) or FAULTY.get("attention")
    remedy = "" if cannot else "--attention-backend triton, or "
    raise UserError(
        f"--cp-comm-type {config.distributed.cp_comm_type}: on a GPU the ring needs attention by "
        f"our kernels, and this run takes {chosen.implementation}{because}; give "
        f"{remedy}--cp-comm-type allgather or a2a"
    )


def _measurements(config: Config, arch: int) -> dict[str, dict[str, Any]]:
    """What `choose` makes of measurements, which are in 16 bits: with fp32 other kernels run.

    `auto` takes Triton's attention unmeasured in 16 bits on Hopper, for which torch's FLASH kernel
    was not made, and where that would read a mask of all scores, keep them in memory or give too
    little: context-parallel ranks read positions, a ring needs the log-sum-exp. There a loss to it
    in causal attention does not count either.
    """
    is_narrow = compute_dtype(config.precision).itemsize == 2
    needs_ours = bool(
        _masks(config)
        or beyond_sdpa(config.model, training=True)
        or attention_ranks(config.distributed)[0] < config.distributed.context_parallel_size
    )
    outcomes = (True, False) if is_narrow else ()
    return {
        "attention": {
            "unmeasured": needs_ours or (is_narrow and arch == lang.HOPPER),
            "outcomes": outcomes[:1] if needs_ours else outcomes,
        },
        "grouped-gemm": {"unmeasured": True, "outcomes": outcomes},
    }


def _masks(config: Config) -> list[str]:
    """The flags with which attention is more than causal."""
    flags = ["--window-size"] if config.model.window_size is not None else []
    return [*flags, "--reset-attention-mask"] if config.data.reset_attention_mask else flags


def masked_by_positions(config: Config) -> str | None:
    """What kernels that know no positions cannot compute: masks of gathered keys, and in a ring
    those that hide more than causality does.
    """
    heads, ring = attention_ranks(config.distributed)
    # All-to-all alone, or a ring of causal blocks: queries and keys count from 0.
    if heads == config.distributed.context_parallel_size or (ring > 1 and not _masks(config)):
        return None
    return (
        "masks by positions, which context parallelism needs here (use --cp-comm-type a2a, or a "
        "ring without documents and windows)"
    )


def remarks(choices: dict[str, Choice]) -> list[str]:
    """Lines for the banner: why something else is not taken, or what to know of what is."""
    names: dict[str, list[str]] = {}
    for name, choice in choices.items():
        names.setdefault(choice.because, []).append(name)
    return [f"{', '.join(names[reason])}: {reason}" for reason in sorted(names) if reason]


# the key of a layer's dropout is a number to these kernels, and numbers are constants of a graph
EACH_ITS_GRAPH = "under --torch-compile each layer would need its own graph"


def _unable(config: Config, arch: int, dtype: torch.dtype) -> dict[str, dict[str, str]]:
    """Operator -> implementation -> what it cannot do of what the flags ask for."""
    unable = {"attention": _unable_attention(config, arch, dtype)}
    if config.model.hidden_size > norm.WIDEST:
        unable["norm"] = {"triton": f"--hidden-size is above {norm.WIDEST}"}
    if config.model.torch_compile:
        unable["dropout"] = {"triton": EACH_ITS_GRAPH}
    if "bf16" in (config.optimizer.exp_avg_dtype, config.optimizer.exp_avg_sq_dtype):
        flags = "--exp-avg-dtype bf16 or --exp-avg-sq-dtype bf16"
        unable["adam"] = {"apex": f"its moments are fp32, not those of {flags}"}
    if config.precision.fp64:
        unable["grad-norm"] = {"apex": "it adds up in fp32"}
    if config.model.num_experts is not None:
        reasons = {
            "grouped-mm": _unable_grouped(config, dtype),
            "triton": grouped_gemm.unsupported_reason(dtype.itemsize, arch),
        }
        unable["grouped-gemm"] = {name: reason for name, reason in reasons.items() if reason}
    return unable


def _unable_grouped(config: Config, dtype: torch.dtype) -> str | None:
    """Why torch's grouped GEMM cannot take this model's experts; None where it can."""
    if dtype == torch.float64:
        return "float64"
    # grouped_mm reads rows of 16 bytes
    width = config.model.moe_ffn_hidden_size // expert_ranks(config).etp
    for flag, size in (("--hidden-size", config.model.hidden_size), ("an expert's width", width)):
        if size * dtype.itemsize % 16:
            return f"{flag} {size} is not a multiple of 16 bytes"
    return None


def _unable_attention(config: Config, arch: int, dtype: torch.dtype) -> dict[str, str]:
    """Of `_unable`: attention."""
    model, unable = config.model, {}
    # torch's kernels and FlashAttention 4 take no dropout of ours, no cap, and FA4 no mask either.
    needs = beyond_sdpa(model, training=True)
    if needs:
        unable["sdpa"] = f"cannot compute {', '.join(needs)}"
    if needs := [*needs, *_masks(config)]:
        unable["fa4"] = f"cannot compute {', '.join(needs)}"
    # Our kernels have limits by head dimension and architecture.
    given = {"softcap": model.attn_logit_softcapping, "drop": model.attention_dropout}
    d, asked = model.kv_channels, model.attention_backend
    if d is not None:
        reason = unsupported_heads(d, arch, dtype, **given)
        if not reason and not model.deterministic_mode:
            reason = unsupported_atomics(d, **given, arch=arch)
            reason = reason and f"--no-deterministic-mode with {reason}"
        if reason:
            unable["triton"] = reason
    if asked in CANDIDATES and (reason := load_candidate(asked).unsupported_heads(d, **given)):
        unable[asked] = reason
    if reason := masked_by_positions(config):
        for name in (*CANDIDATES, "fa4"):
            unable.setdefault(name, reason)
    if model.torch_compile and model.attention_dropout > 0:
        for name in OURS:
            unable.setdefault(name, f"with --attention-dropout above 0 {EACH_ITS_GRAPH}")
    return unable


# what torch.compile fuses where nothing else is asked for
COMPILED = ("norm", "rotary", "activation", "dropout")


def _wanted(config: Config, operator: str, device: torch.device) -> str:
    """What the flag asks for, `auto` narrowed by what is known without a measurement."""
    field = _field(operator)
    group = config.model if hasattr(config.model, field) else config.optimizer
    wanted = getattr(group, field)
    if wanted != "auto":
        return wanted
    if operator in COMPILED and config.model.torch_compile:
        return "torch"
    if operator == "rotary" and config.model.multi_latent_attention:
        return "torch"  # the kernel turns pairs of other channels
    if operator == "grouped-gemm":
        # One grouped launch pays where a loop of GEMMs is bound by the host.
        most = SMALL_GEMM["cuda" if device.type == "cuda" else "cpu"]
        return "auto" if expert_gemm_flops(config) < most else "torch"
    return "auto"


# FLOPs of an expert's GEMM below which the host's call of it takes longer: on a GPU a launch of
# 5 us at 500 TFLOP/s, on a CPU as measured (docs/performance.md)
SMALL_GEMM = {"cuda": 2.5e9, "cpu": 4e6}


def expert_gemm_flops(config: Config) -> float:
    """FLOPs of the first GEMM of an expert over its balanced rows of a micro-batch."""
    model, distributed = config.model, config.distributed
    etp, ep = expert_ranks(config)
    tp = distributed.tensor_model_parallel_size  # tokens are shared by sequence parallelism
    tokens = config.training.micro_batch_size * config.data.seq_length
    # Tokens of this rank, times choices, from all ranks whose tokens reach its experts.
    own = tokens / distributed.context_parallel_size / tp
    rows = own * model.moe_router_topk * etp * ep / model.num_experts
    width = model.moe_ffn_hidden_size / etp * (2 if model.activation in GATED else 1)
    return 2.0 * rows * width * model.hidden_size


def _field(operator: str) -> str:
    return flag_of(operator).removeprefix("--").replace("-", "_")
