"""The compilations of kernels that are shipped: what manifest.py compiles without a GPU and tune.py
tries with other rows of the table of configurations.

A kernel is listed for an architecture with the types of its arguments and what is compiled in, at
the widths and kinds that models have. An argument without a type is a 32-bit integer. Pointers and
integers are multiples of 16, as torch's allocator and most strides are, but for those `unaligned`.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.kernels import (
    activation,
    adamw,
    attention,
    attention_backward,
    cross_entropy,
    dropout,
    fp8,
    grad_norm,
    grouped_gemm,
    initialise,
    lang,
    norm,
    qk_norm,
    rotary,
)
from megatron.kernels.attention_launch import (
    Options,
    columns,
    configuration,
    constants,
    table_key,
)
from megatron.kernels.attention_masks import TILE, Features
from megatron.kernels.candidates import gluon_backward, gluon_forward
from megatron.kernels.configurations import KernelLaunch, Row, find

TORCH = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Compiled:
    """One compilation of a kernel.

    `signature` maps argument names to Triton's types ("*bf16", "fp32", "i32", "tensordesc<bf16[128,
    64]>") or tuples of them, in any order; `constants` are its constexpr arguments; `divisible`
    names arguments that are multiples of 16.
    """

    name: str
    kernel: Any
    signature: Mapping[str, Any]
    constants: Mapping[str, Any]
    divisible: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    arch: int = lang.HOPPER
    # must use the tensor cores' wgmma instructions, and none of the older ones
    matmul: bool = False
    row: Row | None = None  # of the table of configurations
    options: Mapping[str, Any] = field(default_factory=dict)


def _compiled(
    name: str,
    kernel: Any,
    types: Mapping[str, Any],
    fixed: Mapping[str, Any],
    row: Row | None,
    num_warps: int = 0,
    unaligned: Collection[str] = (),
    **more: Any,
) -> Compiled:
    fixed = {key: value for key, value in fixed.items() if key in kernel.arg_names}
    signature = {key: types.get(key, "i32") for key in kernel.arg_names if key not in fixed}
    divisible = (
        key
        for key, kind in signature.items()
        if key not in unaligned and kind not in ("fp32", "u32")
    )
    warps = num_warps or (row.numbers["num_warps"] if row else 4)
    return Compiled(name, kernel, signature, fixed, tuple(divisible), warps, row=row, **more)


def _launched(
    name: str,
    kernel: Any,
    types: Mapping[str, Any],
    fixed: Mapping[str, Any],
    form: KernelLaunch,
    unaligned: Collection[str] = (),
) -> Compiled:
    """A kernel that follows its input's width."""
    sizes = {"ROWS": form.rows, "BLOCK": form.block, "PREFETCH": form.prefetch}
    return _compiled(name, kernel, types, {**sizes, **fixed}, form.row, form.num_warps, unaligned)


def _typed(kind: str, names: str) -> dict[str, str]:
    """The type of each of these arguments."""
    return dict.fromkeys(names.split(), kind)


# The variants of attention that are compiled for each head dimension.
ATTENTION = {
    "causal": Features(),
    "full": Features(causal=False),
    "window": Features(window=1024),
    "documents": Features(table=TILE, documents=True),
    "positions_documents": Features(table=TILE, documents=True, positions=True),
    "softcap": Features(softcap=50.0),
    "dropout": Features(dropout=True),
    "positions_dropout": Features(table=TILE, positions=True, dropout=True),
}
# Attention's kernels, and the operands that they read or write by descriptors of M or N rows.
KERNELS = {
    "forward": (attention.forward_kernel, {"q": "M", "k": "N", "v": "N", "out": "M"}),
    "dkv": (
        attention_backward.dkv_kernel,
        {"q": "M", "k": "N", "v": "N", "dout": "M", "dk": "N", "dv": "N"},
    ),
    "dkv_dq": (
        attention_backward.dkv_kernel,
        {"q": "M", "k": "N", "v": "N", "dout": "M", "dk": "N", "dv": "N", "dq": "M"},
    ),
    "dq": (
        attention_backward.dq_kernel,
        {"q": "M", "k": "N", "v": "N", "dout": "M", "dq": "M"},
    ),
}


def _operand(name: str, kind: str, rows: int, d: int, arch: int) -> str | tuple[str, ...]:
    """A descriptor of blocks of `rows`, or before Hopper a pointer, sizes and strides."""
    heads = 2 if name in ("q", "out", "dout", "dq") else 1
    if arch >= lang.HOPPER:
        return f"tensordesc<{kind}[{'1, ' * heads}{rows}, {columns(d)}]>"
    return (f"*{kind}", *["i32"] * (3 + heads))


def _absent(features: Features, name: str = "") -> dict[str, None]:
    """None for the tensors that a variant of a kernel does not have."""
    present = {
        "table": features.table > 0,
        "starts": features.documents,
        "q_positions": features.positions,
        "k_positions": features.positions,
        "samples": features.dropout,
        "dq": name != "dkv",
    }
    return dict.fromkeys(key for key, is_there in present.items() if not is_there)


def attention_compiled(
    name: str, d: int, row: Row, variant: str, arch: int = lang.HOPPER
) -> Compiled:
    """A kernel of attention in bf16."""
    (kernel, operands), features = KERNELS[name], ATTENTION[variant]
    types: dict[str, Any] = _typed("*fp32", "lse base delta") | _typed("u32", "k0 k1 threshold")
    types |= _typed("fp32", "scale inverse_keep") | {"samples": "*i64"}
    types |= _typed("*i32", "table starts q_positions k_positions")
    for key, rows in operands.items():
        kind = "fp32" if (name, key) == ("dkv_dq", "dq") else "bf16"
        types[key] = _operand(key, kind, row.numbers[rows], d, arch)
    return _compiled(
        f"attention_{name}_{d}_{variant}",
        kernel,
        types,
        constants(d, row, features) | _absent(features, name),
        row,
        # Lengths and numbers of heads are compiled once for all values.
        unaligned=[key for key in kernel.arg_names if str(types.get(key))[0] != "*"],
        num_stages=row.numbers["num_stages"],
        matmul=True,
        options={key: row.numbers[key] for key in ("maxnreg",) if key in row.numbers},
    )


def _attention(arch: int) -> Iterator[Compiled]:
    """Head dimension 96 takes what 128 compiles to. What the backward kernels spill lies outside of
    the loops over blocks, or is a few of their instructions.
    """
    for d in (64, 128, 256):
        for variant, features in ATTENTION.items():
            # Differs from dropout by a few loads: for Hopper and the usual head dimensions alone.
            if variant == "positions_dropout" and (arch != lang.HOPPER or d > 128):
                continue
            drop = 0.1 if features.dropout else 0.0
            options = Options(1.0, features.softcap or None, drop)
            atomic = attention_backward.unsupported_atomics(d, options.softcap, options.drop, arch)
            for name in KERNELS:
                if name == "dkv_dq" and atomic:
                    continue
                key = table_key(d, options, features.causal)
                if not find(f"attention {name}", arch, **key).refused:
                    row = configuration(name, d, options, features.causal, arch=arch)
                    yield attention_compiled(name, d, row, variant, arch)
        row = find("attention prepare", arch)
        types = _typed("*bf16", "out dout") | _typed("*fp32", "lse dlse base delta")
        fixed = {"d": d, "D": columns(d), "M": row.numbers["M"]}
        yield _compiled(
            f"attention_prepare_{d}", attention_backward.prepare_kernel, types, fixed, row
        )


GLUON = ("causal", "full", "window", "documents")


def _gluon(arch: int) -> Iterator[Compiled]:
    """The candidate in Gluon, of Hopper alone: head dimensions between take what 64 and 128 compile
    to. What is spilled lies outside of the loop over whole blocks.
    """
    if gluon_forward.gluon is None or arch != lang.HOPPER:
        return
    for d, kind in ((64, "shipped"), (64, "three consumers"), (128, "shipped")):
        for variant in GLUON if kind == "shipped" else GLUON[:2]:
            layout = gluon_forward.configuration(d, kind)
            rows = {
                "q": gluon_forward.ROWS,
                "k": layout.N,
                "v": layout.N,
                "out": gluon_forward.ROWS,
            }
            types = {
                name: gluon_forward.block_type("bf16", (1, 1, count, d))
                for name, count in rows.items()
            }
            yield _gluon_compiled(
                f"attention_gluon_{d}_{variant}{'_3_consumers' * (layout.consumers == 3)}",
                gluon_forward.forward_kernel,
                types,
                variant,
                layout,
                find("attention gluon", arch, d=d, kind=kind),
            )
    for d in (64, 128):
        for name in ("dkv", "dq"):
            layout = gluon_backward.configuration(name, d)
            for variant, parts in (*((each, False) for each in GLUON), ("documents", True)):
                if parts and name == "dq":
                    continue
                yield _gluon_compiled(
                    f"attention_gluon_{name}_{d}_{variant}{'_parts' * parts}",
                    getattr(gluon_backward, f"{name}_kernel"),
                    _gluon_types(name, d, layout.block, parts),
                    variant,
                    layout,
                    find(f"attention gluon {name}", arch, d=d),
                )


def _gluon_types(name: str, d: int, block: int, parts: bool) -> dict[str, str]:
    """Of the tensors of the kernel "dkv" or "dq" in bf16; `parts`: dk and dv are parts in fp32."""
    block_type = gluon_forward.block_type
    held, ring = (block_type("bf16", (1, 1, rows, d)) for rows in (gluon_forward.ROWS, block))
    if name == "dq":
        return {"q": held, "k": ring, "v": ring, "dout": held, "dq": held}
    result = block_type("fp32", (1, 1, gluon_forward.ROWS, d)) if parts else held
    lines = block_type("fp32", (1, block))
    operands = {"q": ring, "k": held, "v": held, "dout": ring}
    return operands | {"dk": result, "dv": result, "base": lines, "delta": lines}


def _gluon_compiled(
    name: str, kernel: Any, types: dict[str, str], variant: str, layout: Any, row: Row
) -> Compiled:
    features = ATTENTION[variant]
    fixed = {"FEATURES": features, "LAYOUT": layout} | _absent(features)
    types = _typed("*fp32", "lse base delta") | types | {"scale": "fp32"}
    types |= _typed("*i32", "table starts")
    unaligned = [key for key in kernel.arg_names if types.get(key, "i32")[0] != "*"]
    return _compiled(name, kernel, types, fixed, row, 4, unaligned, matmul=True)


def _norm(arch: int) -> Iterator[Compiled]:
    """Both norms at hidden sizes and, of strided views, at a head's width."""
    for dtype, width in (
        *(("bf16", width) for width in (128, 4096, 8192, 16384, 65536)),
        ("fp32", 8192),
    ):
        for centre, add in itertools.product((False, True), (False, True)):
            if add and width == 128 or not add and width > 4096:
                continue
            name = f"{'add_' * add}{'layer' if centre else 'rms'}_norm_{dtype}_{width}"
            flags: dict[str, Any] = {"ADD": add, "CENTRE": centre}
            flags |= {} if width == 128 else {"inner": 1, "inner_stride": 0}
            form = norm.configuration("forward", width, TORCH[dtype], arch)
            if form.block < width:  # its backward is that of 16384
                yield _row_of_norm(name, norm.wide_forward_kernel, dtype, flags, form)
                continue
            yield _row_of_norm(name, norm.forward_kernel, dtype, flags, form)
            form = norm.configuration("backward", width, TORCH[dtype], arch)
            backward = {"backward": norm.backward_kernel}
            if form.block < width:
                backward = {
                    "backward": norm.wide_backward_kernel,
                    "projection": norm.projection_kernel,
                }
            for part, kernel in backward.items():
                yield _row_of_norm(f"{name}_{part}", kernel, dtype, flags, form)


def _row_of_norm(
    name: str, kernel: Any, dtype: str, flags: dict[str, Any], form: KernelLaunch
) -> Compiled:
    types = _typed(f"*{dtype}", "x residual weight bias y total dy dtotal dx") | {"eps": "fp32"}
    types |= _typed("*fp32", "statistics projections partials")
    return _launched(name, kernel, types, flags, form, ("rows", "inner"))


def _qk_norm(arch: int) -> Iterator[Compiled]:
    """Both norms, of heads that turn whole, by half or not."""
    for dtype, d, half, centre in (
        ("bf16", 128, 64, False),
        ("bf16", 128, 32, False),
        ("bf16", 64, 0, False),
        ("bf16", 128, 64, True),
        ("fp32", 128, 64, False),
    ):
        types = _typed(f"*{dtype}", "x q_weight k_weight q_bias k_bias y dy dx") | {"eps": "fp32"}
        types |= _typed("*fp32", "statistics partials cos sin")
        for direction in ("forward", "backward"):
            yield _launched(
                f"qk_norm_{direction}_{dtype}_{d}_{2 * half}{'_layer' * centre}",
                getattr(qk_norm, f"{direction}_kernel"),
                types,
                {"CENTRE": centre, "TURN": half > 0, "HALF": half},
                qk_norm.configuration(direction, d, arch),
                ("rows", "heads", "per_token", "batch"),
            )


def _activation(arch: int) -> Iterator[Compiled]:
    """Every kind in bf16, with a bias a gated one and GELU, which in fp32 too."""
    for dtype, kind in (*(("bf16", kind) for kind in activation.KINDS), ("fp32", "gelu")):
        is_gated = kind in activation.GATED
        for bias in (False, True) if kind in ("swiglu", "gelu") else (False,):
            types = _typed(f"*{dtype}", "x bias y dy dx") | {"partials": "*fp32"}
            for direction in ("forward", "backward"):
                width = 14336 if is_gated else 16384
                yield _launched(
                    f"{kind}_{'bias_' * bias}{dtype}{'_backward' * (direction == 'backward')}",
                    getattr(activation, f"{direction}_kernel"),
                    types,
                    {"KIND": kind, "GATE": is_gated, "BIAS": bias},
                    activation.configuration(direction, kind, width, bias, arch),
                    ("rows",),
                )


def _dropout(arch: int) -> Iterator[Compiled]:
    """A hidden size's block, forward and backward."""
    form = dropout.configuration(4096, arch)
    for dtype in ("bf16", "fp32"):
        for add in (True, False):
            types = _typed(f"*{dtype}", "x residual y") | _typed("*i64", "sample_ids token_index")
            types |= {"scale": "fp32"} | _typed("u32", "k0 k1 threshold")
            name = f"dropout_{'add_' * add}{dtype}"
            yield _launched(name, dropout.dropout_kernel, types, {"ADD": add}, form, ("batch",))


def _rotary(arch: int) -> Iterator[Compiled]:
    """Fused QKV outputs with grouped heads, of which half or all channels turn, and a norm's output
    without groups.
    """
    for dtype, heads, group, half in (
        ("bf16", 40, 5, 64),
        ("bf16", 24, 2, 32),
        ("bf16", 32, 1, 64),
        ("fp32", 40, 5, 64),
    ):
        form = rotary.configuration(heads, half, arch)
        yield _launched(
            f"rotary_{dtype}_{heads}x{group}_{2 * half}",
            rotary.rotary_kernel,
            {"x": f"*{dtype}"} | _typed("*fp32", "cos sin"),
            {"GROUP": group, "HALF": half, "HEADS": form.rows},
            form,
            ("batch", "heads", "direction"),
        )


def _cross_entropy(arch: int) -> Iterator[Compiled]:
    """A large vocabulary in bf16."""
    form = cross_entropy.configuration(131072, arch)
    types = {"logits": "*bf16", "labels": "*i64", "softcap": "fp32"}
    types |= _typed("*fp32", "parts lse dloss dlse")
    for softcap in (False, True):
        for direction in ("parts", "backward"):
            yield _launched(
                f"cross_entropy {direction} {'capped' if softcap else 'plain'}",
                getattr(cross_entropy, f"{direction}_kernel"),
                types,
                {"SOFTCAP": softcap},
                form,
                ("tokens", "columns"),
            )


def _fp8(arch: int) -> Iterator[Compiled]:
    """Every kernel in bf16 and e4m3, from Hopper on; e5m2 differs in one instruction."""
    if arch < lang.HOPPER:
        return
    types = {"x": "*bf16"} | _typed("*fp32", "of_rows of_columns scale scale_t")
    tile, tiles = {"M": fp8.BLOCK, "N": fp8.BLOCK}, find("fp8 tiles", arch)
    yield _compiled("fp8_maxima", fp8.maxima_kernel, types, tile, tiles)
    for n in (4096, 16384):
        form = fp8.row_configuration(n, arch)
        fixed = {"LARGEST": 448.0, "COLUMNS": form.block, "LOOPS": form.block < n}
        given = types | {"q": "*fp8e4nv"}
        yield _launched(f"fp8_rows_{n}", fp8.row_kernel, given, fixed, form)
    for name, blocks, plain, transposed, kind, largest in (
        ("blocks", True, True, False, "*fp8e4nv", 448.0),
        ("blocks_transposed", True, True, True, "*fp8e4nv", 448.0),
        ("blocks_transposed_e5m2", True, True, True, "*fp8e5", 57344.0),
        ("blocks_transposed_alone", True, False, True, "*fp8e4nv", 448.0),
        ("scaled", False, True, False, "*fp8e4nv", 448.0),
        ("scaled_transposed", False, True, True, "*fp8e4nv", 448.0),
        ("scaled_transposed_alone", False, False, True, "*fp8e4nv", 448.0),
    ):
        fixed = {"LARGEST": largest, "BLOCKS": blocks, "PLAIN": plain, "TRANSPOSED": transposed}
        given, unaligned = types | _typed(kind, "q q_t"), ("step",)
        yield _compiled(
            f"fp8_{name}", fp8.tile_kernel, given, tile | fixed, tiles, unaligned=unaligned
        )


def _grouped_gemm(arch: int) -> Iterator[Compiled]:
    """Experts of Qwen3-30B on 8 ranks and of Mixtral on 8, in bf16, and in fp32 the former."""
    for dtype, itemsize in (("bf16", 2), ("fp32", 4)):
        types = _typed(f"*{dtype}", "x weight y dy") | {"grad": "*fp32", "ends": "*i32"}
        row = grouped_gemm.configuration("rows", itemsize, arch)
        made: list[tuple[str, Any, dict[str, Any], Row]] = [
            (
                f"grouped_{name}_{experts}_{dtype}",
                grouped_gemm.rows_kernel,
                {"TURNED": turned, "EXPERTS": experts, "GROUP": grouped_gemm.GROUP},
                row,
            )
            for name, turned in (("forward", True), ("input_grad", False))
            for experts in ((16, 1) if itemsize == 2 else (16,))
        ]
        row = grouped_gemm.configuration("weight", itemsize, arch)
        made += [
            (
                f"grouped_weight_grad_{name}_{dtype}",
                grouped_gemm.weight_kernel,
                {"OVERWRITE": overwrite},
                row,
            )
            for name, overwrite in (("added", False), ("written", True))
        ]
        for name, kernel, fixed, row in made:
            yield _compiled(
                name,
                kernel,
                types,
                fixed | grouped_gemm._sizes(row),
                row,
                unaligned=("experts", "tiles"),
                num_stages=row.numbers["num_stages"],
                matmul=itemsize == 2,
            )


def _adamw(arch: int) -> Iterator[Compiled]:
    """Gradients and moments in either precision, with rounded weights and (fp32 training)
    without.
    """
    row = find("adamw", arch)
    for grad, moments, out in (
        ("fp32", "fp32", "bf16"),
        ("bf16", "fp32", "bf16"),
        ("fp32", "bf16", "bf16"),
        ("fp32", "fp32", None),
    ):
        types = _typed("*fp32", "master step coefficient found_inf") | _typed("fp32", "lr decay")
        types |= {"grad": f"*{grad}", "out": f"*{out}"}
        types |= _typed(f"*{moments}", "exp_avg exp_avg_sq")
        fixed = adamw._constants(0.9, 0.95, 1e-8) | {"BLOCK": row.numbers["block"]}
        yield _compiled(
            f"adamw grad {grad} moments {moments} weights {out or 'themselves'}",
            adamw.adamw_kernel,
            types,
            fixed | ({} if out else {"out": None}),
            row,
            unaligned=("step", "coefficient", "found_inf"),
        )


def _grad_norm(arch: int) -> Iterator[Compiled]:
    """Gradients in fp32 and bf16."""
    row = find("grad_norm", arch)
    for dtype in ("fp32", "bf16"):
        types, fixed = {"piece": f"*{dtype}", "partials": "*fp64"}, {"BLOCK": row.numbers["block"]}
        name, unaligned = f"sum of squares {dtype}", ("partials",)
        yield _compiled(name, grad_norm.squares_kernel, types, fixed, row, unaligned=unaligned)


def _initialise(arch: int) -> Iterator[Compiled]:
    """The bytes "spilled" are the array in which sine and cosine reduce arguments that ours never
    are as large as.
    """
    form = initialise.configuration(4096, arch)
    yield _launched(
        "initialise normal",
        initialise.normal_kernel,
        {"out": "*fp32"} | _typed("u32", "k0 k1"),
        {"STD": 0.02, "ANGLE": initialise.ANGLE, "BLOCKS": form.block},
        form,
        ("first_row", "first_block", "rows"),
    )


FAMILIES = {
    "activation": _activation,
    "adamw": _adamw,
    "attention": _attention,
    "attention gluon": _gluon,
    "cross_entropy": _cross_entropy,
    "dropout": _dropout,
    "fp8": _fp8,
    "grad_norm": _grad_norm,
    "grouped_gemm": _grouped_gemm,
    "initialise": _initialise,
    "norm": _norm,
    "qk_norm": _qk_norm,
    "rotary": _rotary,
}


def compilations(arch: int = lang.HOPPER, family: str = "") -> Iterator[Compiled]:
    """All, or those of the operators whose rows in the table begin with `family`."""
    for name, rows in FAMILIES.items():
        if name.startswith(family):
            yield from rows(arch)
