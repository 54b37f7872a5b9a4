"""The variants of our kernels that Triton compiles for a run, which the check at start computes in
small shapes.

A compilation depends on dtypes, on the constants of a kernel (widths, number of heads, Adam's
betas), and for each integer on whether it is 1 or a multiple of 16. Settings are those of
kernels/cases.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron.config.derive import attention_ranks, expert_ranks
from megatron.config.groups import Config
from megatron.config.layers import LayerRecord, layer_records
from megatron.config.model import GATED
from megatron.kernels.dispatch import Choice
from megatron.kernels.self_check import Variant
from megatron.model.attention.attention import OURS, is_projection_read
from megatron.model.build import declared
from megatron.model.fp8 import SCALINGS
from megatron.model.kernels import masked_by_positions
from megatron.parallel.blocks import accumulation_dtype


def alike(number: int, most: int) -> int:
    """A number up to `most` + 1 that compiles to the same kernel; `most` is a multiple of 16."""
    # A kernel depends on a size above `most` only through its being a multiple of 16.
    if number <= most:
        return number
    return most if number % 16 == 0 else most + 1


@dataclass(frozen=True)
class RunShape:
    """The shapes of one micro-batch on a rank; `config` is the result of `choose_kernels`."""

    config: Config
    dtype: torch.dtype
    padded_vocab: int
    vocab_size: int

    @property
    def tp(self) -> int:
        return self.config.distributed.tensor_model_parallel_size

    @property
    def length(self) -> int:
        """Positions of a sample in a rank's hidden states."""
        # Context parallelism cuts the sequence, and sequence parallelism cuts a rank's part again.
        distributed = self.config.distributed
        parts = distributed.context_parallel_size
        parts *= self.tp if distributed.sequence_parallel else 1
        return max(self.config.data.seq_length // parts, 1)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch in tensors that tensor parallelism does not split."""
        ranks = self.config.distributed.context_parallel_size
        return self.config.data.seq_length // ranks * self.config.training.micro_batch_size

    @property
    def heads(self) -> dict[str, int]:
        """Query groups of a rank's projection, queries of each, and the head dimension."""
        model = self.config.model
        # With fewer groups than tensor-parallel ranks, several ranks hold the same group.
        groups = max(1, (model.num_query_groups or model.num_attention_heads) // self.tp)
        queries = model.num_attention_heads // self.tp // groups
        return {"g": groups, "m": queries, "d": model.kv_channels or 0}

    @property
    def forms(self) -> list[LayerRecord]:
        """A layer of each form of attention."""
        found = {(each.window, each.rotary): each for each in layer_records(self.config.model)}
        return list(found.values())

    def is_fused(self, record: LayerRecord) -> bool:
        """Whether attention reads the output of the QKV projection."""
        model, size = self.config.model, self.config.distributed.context_parallel_size
        return not record.latent and is_projection_read(
            model, model.attention_backend, size, record.rotary
        )


def kernel_variants(shape: RunShape, choices: Mapping[str, Choice]) -> dict[str, list[Variant]]:
    """Operator -> variants of its kernels, for the operators that our kernels compute."""
    # Other implementations are checked by their own projects.
    by_us = [name for name, choice in choices.items() if choice.implementation in OURS]
    if shape.config.precision.fp8_format is not None:
        by_us.append("fp8")
    dtype = str(shape.dtype).removeprefix("torch.")
    return {
        operator: [
            Variant(kernel, dtype, settings) for kernel, settings in VARIANTS[operator](shape)
        ]
        for operator in by_us
    }


SIZES = (9008, 9001)  # of flat buffers: a multiple of 16 and not
Setting = dict[str, Any]
Settings = list[tuple[str, Setting]]  # (row of the table, what a launch depends on)


def _both_passes(operator: str, *settings: Setting) -> Settings:
    return [
        (f"{operator} {direction}", setting)
        for direction in ("forward", "backward")
        for setting in settings
    ]


def _attention(shape: RunShape) -> Settings:
    config, model, heads = shape.config, shape.config.model, shape.heads
    latent = model.multi_latent_attention
    _, ring = attention_ranks(config.distributed)
    common = {
        "s": alike(config.data.seq_length // ring, 192),
        "b": alike(config.training.micro_batch_size, 2),
        **(heads | {"g": heads["g"] * heads["m"], "m": 1} if latent else heads),
        "scale": model.softmax_scale,
        "softcap": model.attn_logit_softcapping,
        "documents": config.data.reset_attention_mask,
        "positions": masked_by_positions(config) is not None,
        "backend": model.attention_backend,
    }
    # Deterministic mode takes two kernels; else one adds the gradients of queries with atomics.
    backward = "attention dq" if model.deterministic_mode else "attention dkv_dq"
    forms = dict.fromkeys((each.window, shape.is_fused(each)) for each in shape.forms)
    return [
        (kernel, common | {"window": window, "fused": fused, "causal": causal, "drop": drop})
        for window, fused in forms
        for drop in sorted({model.attention_dropout, 0.0})  # evaluation drops nothing
        for causal in ((True, False) if ring > 1 else (True,))
        for kernel in ("attention forward", backward)
    ]


def _norm(shape: RunShape) -> Settings:
    model, heads = shape.config.model, shape.heads
    common = {"centre": model.normalization == "LayerNorm", "eps": model.norm_epsilon}
    batch = shape.config.training.micro_batch_size
    rows = {"rows": alike(shape.length * batch, 64)}
    whole = common | rows | {"width": model.hidden_size}
    # The norms of a layer: alone, and with the addition of the residual stream before them.
    found = _both_passes("norm", whole | {"add": False}, whole | {"add": True})
    if not model.qk_layernorm:
        return found
    # Norms of queries and keys: in the projection's output together with the rotation, or on
    # separate tensors.
    sizes = {"s": alike(shape.config.data.seq_length, 16), "b": alike(batch, 2)}
    turned = {each.rotary * model.rotary_width for each in shape.forms if shape.is_fused(each)}
    for turns in sorted(turned):
        found += _both_passes("qk_norm", common | sizes | heads | {"rotary": turns})
    if all(map(shape.is_fused, shape.forms)):
        return found
    if model.multi_latent_attention:
        widths = [(rank, rank) for rank in (model.kv_lora_rank, model.q_lora_rank) if rank]
    else:
        widths = [(heads["d"], heads["d"]), (heads["d"], (heads["m"] + 2) * heads["d"])]
    parts = [common | rows | {"width": width, "stride": stride} for width, stride in widths]
    return found + _both_passes("norm", *parts)


def _rotary(shape: RunShape) -> Settings:
    model, heads = shape.config.model, shape.heads
    # Backward is the rotation by the opposite angle.
    turned = [each for each in shape.forms if each.rotary]
    if not turned or (model.qk_layernorm and shape.is_fused(turned[0])):  # qk_norm turns them
        return []
    batch = shape.config.training.micro_batch_size
    length = shape.config.data.seq_length // shape.config.distributed.context_parallel_size
    common = {"s": alike(length, 16), "b": alike(batch, 2), "rotary": model.rotary_width}
    g, m, d = heads.values()
    tensors = [{"n": n, "d": d} for n in sorted({g * m, g})] if model.qk_layernorm else [heads]
    return [
        ("rotary", common | tensor | {"direction": direction})
        for tensor in tensors
        for direction in (1, -1)
    ]


def _activation(shape: RunShape) -> Settings:
    model, etp = shape.config.model, expert_ranks(shape.config).etp
    # Dense layers, shared experts and routed experts have different widths, so different kernels.
    dense = [model.ffn_hidden_size] if not all(model.expert_layers()) else []
    shared = [model.moe_shared_expert_intermediate_size] if model.num_experts is not None else []
    rows, bias = alike(shape.tokens, 64), {"bias": model.add_bias_linear}
    found = [{"width": width // shape.tp, "rows": rows} | bias for width in dense + shared if width]
    if model.num_experts is not None:  # their number of rows differs from step to step
        width = (model.moe_ffn_hidden_size or 0) // etp
        found += [{"width": width, "rows": rows, "bias": False} for rows in (64, 65)]
    return _both_passes("activation", *({**each, "activation": model.activation} for each in found))


def _dropout(shape: RunShape) -> Settings:
    model, batch = shape.config.model, shape.config.training.micro_batch_size
    if model.hidden_dropout == 0:
        return []
    sizes = {"s": alike(shape.length, 16), "b": alike(batch, 2), "width": model.hidden_size}
    return [("dropout", sizes | {"drop": model.hidden_dropout})]


def _cross_entropy(shape: RunShape) -> Settings:
    width, tp = shape.padded_vocab // shape.tp, shape.tp
    # The last tensor-parallel ranks may hold padding alone, or a part with padding.
    own = {min(max(shape.vocab_size - rank * width, 0), width) for rank in range(tp)}
    softcap = shape.config.model.final_logit_softcapping
    common = {"tokens": alike(shape.tokens, 16), "width": width, "softcap": softcap}
    return [("cross_entropy", common | {"columns": columns}) for columns in sorted(own) if columns]


def _init(shape: RunShape) -> Settings:
    """Of whole matrices; with ZeRO a rank may begin and end within a row."""
    # A matrix that another axis cuts has another width on a rank.
    parts = shape.tp, expert_ranks(shape.config).etp
    matrices = {
        (tensor.local_shape(parts[tensor.expert is not None])[1], tensor.init.std)
        for spec in declared(shape.config.model, shape.vocab_size).values()
        for tensor in spec.tensors
        if tensor.init.std > 0
    }
    return [
        ("initialise", {"width": width, "std": std, "skip": 0}) for width, std in sorted(matrices)
    ]


def _grad_dtype(shape: RunShape) -> str:
    # The dtype in which gradients are accumulated, which GEMMs and norm read and write.
    narrow = shape.config.optimizer.main_grads_dtype == "bf16"
    dtype = shape.dtype if narrow else accumulation_dtype(shape.dtype)
    return str(dtype).removeprefix("torch.")


def _grad_norm(shape: RunShape) -> Settings:
    return [
        ("grad_norm", {"grad": _grad_dtype(shape), "size": size, "pieces": 2}) for size in SIZES
    ]


def _adam(shape: RunShape) -> Settings:
    optimizer = shape.config.optimizer
    # Each combination of narrow moments is a separate compilation.
    moments = {
        name: "bfloat16" if getattr(optimizer, f"{name}_dtype") == "bf16" else "float32"
        for name in ("exp_avg", "exp_avg_sq")
    }
    numbers = {
        "beta1": optimizer.adam_beta1,
        "beta2": optimizer.adam_beta2,
        "eps": optimizer.adam_eps,
    }
    out = {"out": shape.dtype != torch.float32, "grad": _grad_dtype(shape)}
    return [("adamw", {"size": size, **moments, **numbers, **out}) for size in SIZES]


def _grouped_gemm(shape: RunShape) -> Settings:
    model, etp = shape.config.model, expert_ranks(shape.config).etp
    width = (model.moe_ffn_hidden_size or 0) // etp
    # A gated activation has two matrices in one; each weight gradient is overwritten once a step
    # and added to afterwards.
    fused = width * (2 if model.activation in GATED else 1)
    sizes = [{"o": o, "i": i} for o, i in ((fused, model.hidden_size), (model.hidden_size, width))]
    grad = {"grad": _grad_dtype(shape)}
    return [("grouped_gemm rows", size) for size in sizes] + [
        ("grouped_gemm weight", size | grad | {"overwrite": overwrite})
        for size in sizes
        for overwrite in (False, True)
    ]


def _fp8(shape: RunShape) -> Settings:
    precision, model = shape.config.precision, shape.config.model
    # Hybrid: gradients have a wider range and fewer bits than activations and weights.
    gradient = "float8_e5m2" if precision.fp8_format == "hybrid" else "float8_e4m3fn"
    sizes = {"rows": alike(shape.tokens, 128), "width": model.hidden_size}
    return [
        (
            f"fp8 {'tiles' if turned else 'rows'}",
            sizes | {"scaling": SCALINGS[precision.fp8_recipe], "transposed": turned, "to": to},
        )
        for to in sorted({"float8_e4m3fn", gradient})
        for turned in (False, True)
    ]


VARIANTS = {
    "attention": _attention,
    "norm": _norm,
    "rotary": _rotary,
    "activation": _activation,
    "dropout": _dropout,
    "cross-entropy": _cross_entropy,
    "grouped-gemm": _grouped_gemm,
    "init": _init,
    "grad-norm": _grad_norm,
    "adam": _adam,
    "fp8": _fp8,
}
