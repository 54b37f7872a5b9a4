"""The variants of our kernels that Triton compiles for a run, which the check at start computes in
small shapes.

A compilation depends on dtypes, on the constants of a kernel (widths, number of heads, Adam's
betas), and for each integer on whether it is 1 or a multiple of 16. Settings are those of
kernels/cases.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron.config.derive import attention_ranks, expert_ranks
from megatron.config.fp8 import wide_linears
from megatron.config.groups import Config
from megatron.config.layers import LayerRecord, layer_records
from megatron.config.model import GATED
from megatron.kernels.dispatch import Choice
from megatron.kernels.self_check import Variant
from megatron.model.attention.attention import OURS, is_projection_read
from megatron.model.build import hidden_shape
from megatron.model.fp8 import SCALINGS
from megatron.model.kernels import masked_by_positions
from megatron.parallel.blocks import accumulation_dtype


def alike(number: int, most: int) -> int:
    """A number up to `most` + 1 that compiles to the same kernel; `most` is a multiple of 16."""
    # A kernel depends on a size above `most` only through its being a multiple of 16.
    if number <= most:
        return number
    return most if number % 16 == 0 else most + 1


class RunShape:
    """The shapes of one micro-batch on a rank; `config` is the result of `choose_kernels`."""

    def __init__(self, config: Config, dtype: torch.dtype, padded_vocab: int, vocab_size: int):
        model, distributed = config.model, config.distributed
        self.config, self.model, self.dtype = config, model, dtype
        self.padded_vocab, self.vocab_size = padded_vocab, vocab_size
        self.tp, (self.etp, self.ep) = distributed.tensor_model_parallel_size, expert_ranks(config)
        # Positions of a rank, and those of its hidden states, which sequence parallelism cuts.
        positions = config.data.seq_length // distributed.context_parallel_size
        self.length, self.batch, _ = hidden_shape(config)
        self.tokens = positions * self.batch
        self.sizes = {"s": alike(positions, 16), "b": alike(self.batch, 2)}
        # Query groups of a rank's projection, queries of each, and the head dimension. With fewer
        # groups than tensor-parallel ranks, several ranks hold the same group.
        groups = max(1, model.num_query_groups // self.tp)
        queries = model.num_attention_heads // self.tp // groups
        self.heads = {"g": groups, "m": queries, "d": model.kv_channels}
        # A layer of each form of attention.
        forms = {(each.window, each.rotary): each for each in layer_records(model)}
        self.forms = list(forms.values())
        # The dtype in which gradients are accumulated, which GEMMs and norm read and write.
        narrow = config.optimizer.main_grads_dtype == "bf16"
        self.grad = name_of(dtype if narrow else accumulation_dtype(dtype))

    def is_fused(self, record: LayerRecord) -> bool:
        """Whether attention reads the output of the QKV projection."""
        model, size = self.model, self.config.distributed.context_parallel_size
        return not record.latent and is_projection_read(
            model, model.attention_backend, size, record.rotary
        )


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def kernel_variants(shape: RunShape, choices: Mapping[str, Choice]) -> dict[str, list[Variant]]:
    """Operator -> variants of its kernels, for the operators that our kernels compute."""
    # Other implementations are checked by their own projects.
    by_us = [name for name, choice in choices.items() if choice.implementation in OURS]
    if shape.config.precision.fp8_format is not None:
        by_us.append("fp8")
    dtype = name_of(shape.dtype)
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


def _visible(config: Config, window: int | None) -> list[Setting]:
    """Numbers of queries, and what the masks of layers with this window know
    (model/attention/attention.py).
    """
    ranks, ring = attention_ranks(config.distributed)
    s = config.data.seq_length // (config.distributed.context_parallel_size // ranks)
    positions = masked_by_positions(config) is not None
    if ring > 1:
        has_documents, drop = config.data.reset_attention_mask, config.model.attention_dropout
        positions = window is not None or has_documents or drop > 0
    whole = {"s": alike(s, 192), "causal": True, "positions": positions}
    if ring == 1 or positions:
        return [whole]
    # A block of another rank is seen whole, by all queries or by half of them.
    return [whole, whole | {"s": alike(s // 2, 192), "causal": False}]


def _attention(shape: RunShape) -> Settings:
    config, model, heads = shape.config, shape.model, shape.heads
    latent = model.multi_latent_attention
    common = {
        "b": alike(shape.batch, 2),
        **(heads | {"g": heads["g"] * heads["m"], "m": 1} if latent else heads),
        "scale": model.softmax_scale,
        "softcap": model.attn_logit_softcapping,
        "documents": config.data.reset_attention_mask,
        "backend": model.attention_backend,
    }
    # Deterministic mode takes two kernels; else one adds the gradients of queries with atomics.
    backward = "attention dq" if model.deterministic_mode else "attention dkv_dq"
    forms = dict.fromkeys((each.window, shape.is_fused(each)) for each in shape.forms)
    return [
        (kernel, common | seen | {"window": window, "fused": fused, "drop": drop})
        for window, fused in forms
        for drop in sorted({model.attention_dropout, 0.0})  # evaluation drops nothing
        for seen in _visible(config, window)
        for kernel in ("attention forward", backward)
    ]


def _norm(shape: RunShape) -> Settings:
    model, heads = shape.model, shape.heads
    common = {"centre": model.normalization == "LayerNorm", "eps": model.norm_epsilon}
    rows = {"rows": alike(shape.length * shape.batch, 64)}
    whole = common | rows | {"width": model.hidden_size}
    # The norms of a layer: alone, and with the addition of the residual stream before them.
    found = _both_passes("norm", whole | {"add": False}, whole | {"add": True})
    if not model.qk_layernorm:
        return found
    # Norms of queries and keys: in the projection's output together with the rotation, or on
    # separate tensors.
    turned = {each.rotary * model.rotary_width for each in shape.forms if shape.is_fused(each)}
    for turns in sorted(turned):
        found += _both_passes("qk_norm", common | shape.sizes | heads | {"rotary": turns})
    if all(map(shape.is_fused, shape.forms)):
        return found
    widths = [(heads["d"], heads["d"]), (heads["d"], (heads["m"] + 2) * heads["d"])]
    if model.multi_latent_attention:
        widths = [(rank, rank) for rank in (model.kv_lora_rank, model.q_lora_rank) if rank]
    parts = [common | rows | {"width": width, "stride": stride} for width, stride in widths]
    return found + _both_passes("norm", *parts)


def _rotary(shape: RunShape) -> Settings:
    model, heads = shape.model, shape.heads
    # Backward is the rotation by the opposite angle.
    turned = [each for each in shape.forms if each.rotary]
    if not turned or (model.qk_layernorm and shape.is_fused(turned[0])):  # qk_norm turns them
        return []
    common = shape.sizes | {"rotary": model.rotary_width}
    g, m, d = heads.values()
    tensors = [{"n": n, "d": d} for n in sorted({g * m, g})] if model.qk_layernorm else [heads]
    return [
        ("rotary", common | tensor | {"direction": direction})
        for tensor in tensors
        for direction in (1, -1)
    ]


def _activation(shape: RunShape) -> Settings:
    model, rows = shape.model, alike(shape.tokens, 64)
    # Dense layers, shared experts and routed experts have different widths, so different kernels.
    widths = [] if all(model.expert_layers()) else [model.ffn_hidden_size]
    found: list[Setting] = []
    if model.num_experts is not None:  # the rows of routed experts differ from step to step
        widths.append(model.moe_shared_expert_intermediate_size)
        routed = {"width": model.moe_ffn_hidden_size // shape.etp, "bias": False}
        found = [routed | {"rows": number} for number in (64, 65)]
    dense = {"rows": rows, "bias": model.add_bias_linear}
    found += [dense | {"width": width // shape.tp} for width in widths if width]
    return _both_passes("activation", *(each | {"activation": model.activation} for each in found))


def _dropout(shape: RunShape) -> Settings:
    model = shape.model
    if model.hidden_dropout == 0:
        return []
    sizes = {"s": alike(shape.length, 16), "b": alike(shape.batch, 2), "width": model.hidden_size}
    return [("dropout", sizes | {"drop": model.hidden_dropout})]


def _cross_entropy(shape: RunShape) -> Settings:
    width = shape.padded_vocab // shape.tp
    # The last tensor-parallel ranks may hold padding alone, or a part with padding.
    own = {min(max(shape.vocab_size - rank * width, 0), width) for rank in range(shape.tp)}
    common = {
        "tokens": alike(shape.tokens, 16),
        "width": width,
        "softcap": shape.model.final_logit_softcapping,
    }
    return [("cross_entropy", common | {"columns": columns}) for columns in sorted(own) if columns]


def _grad_norm(shape: RunShape) -> Settings:
    return [("grad_norm", {"grad": shape.grad, "size": size, "pieces": 2}) for size in SIZES]


def _adam(shape: RunShape) -> Settings:
    optimizer = shape.config.optimizer
    # Each combination of narrow moments is a separate compilation.
    moments = {
        name: "bfloat16" if getattr(optimizer, f"{name}_dtype") == "bf16" else "float32"
        for name in ("exp_avg", "exp_avg_sq")
    }
    settings: Setting = {
        **moments,
        "beta1": optimizer.adam_beta1,
        "beta2": optimizer.adam_beta2,
        "eps": optimizer.adam_eps,
        "out": shape.dtype != torch.float32,
        "grad": shape.grad,
    }
    return [("adamw", {"size": size, **settings}) for size in SIZES]


def _grouped_gemm(shape: RunShape) -> Settings:
    model, h = shape.model, shape.model.hidden_size
    width = model.moe_ffn_hidden_size // shape.etp
    # A gated activation has two matrices in one; each weight gradient is overwritten once a step
    # and added to afterwards.
    fused = width * (2 if model.activation in GATED else 1)
    pairs, experts = ((fused, h), (h, width)), model.num_experts // shape.ep
    sizes = [{"experts": experts, "o": alike(o, 272), "i": alike(i, 272)} for o, i in pairs]
    return [("grouped_gemm rows", size) for size in sizes] + [
        ("grouped_gemm weight", size | {"grad": shape.grad, "overwrite": overwrite})
        for size in sizes
        for overwrite in (False, True)
    ]


def _fp8(shape: RunShape) -> Settings:
    precision = shape.config.precision
    scaling, wide = SCALINGS[precision.fp8_recipe], wide_linears(shape.model, precision)
    # Hybrid: gradients have a wider range and fewer bits than activations and weights.
    gradient = "float8_e5m2" if precision.fp8_format == "hybrid" else "float8_e4m3fn"
    widths = sorted({size for each in wide for size in each.on_rank(shape.tp)})
    # In the backward pass dy is wanted both ways, weights and inputs transposed alone. Rows are
    # tokens, or outputs of a weight; ranks that hold parts of rows give their maxima.
    given = {"width": widths[0], "maxima": scaling == "row" and shape.tp > 1}
    forms: list[Setting] = [
        given | {"rows": rows, "plain": plain, "transposed": transposed}
        for rows in sorted({alike(shape.tokens, 128), 128})
        for plain, transposed in ((True, False), (True, True), (False, True))
    ]
    if scaling == "row":  # whole ones are scaled by a kernel of their width
        forms += [{"rows": 128, "width": width, "transposed": False} for width in widths]
    return [
        (f"fp8 {'tiles' if form['transposed'] else 'rows'}", {"scaling": scaling, "to": to} | form)
        for to in sorted({"float8_e4m3fn", gradient})
        for form in forms
    ]


VARIANTS = {
    "attention": _attention,
    "norm": _norm,
    "rotary": _rotary,
    "activation": _activation,
    "dropout": _dropout,
    "cross-entropy": _cross_entropy,
    "grouped-gemm": _grouped_gemm,
    "grad-norm": _grad_norm,
    "adam": _adam,
    "fp8": _fp8,
}
