"""The compilations of kernels that are shipped: what manifest.py compiles without a GPU and tune.py
tries with other rows of the table of configurations.

The calls of kernels/cases.py run on tensors of the meta device, at the widths and kinds that models
have, and their launches are recorded. What is compiled of a launch are the types of its arguments,
the constants, and which pointers and integers are multiples of 16: sizes that seldom are, such as
numbers of rows, are none here. The candidates in Gluon are listed with their types.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from megatron.kernels import attention, attention_backward, grouped_gemm, lang, norm
from megatron.kernels.activation import GATED, KINDS
from megatron.kernels.attention_masks import TILE, Features
from megatron.kernels.candidates import gluon_backward, gluon_forward
from megatron.kernels.cases import case_of
from megatron.kernels.configurations import Row, find
from megatron.kernels.self_check import Variant
from torch import Tensor

from megatron.config.errors import UserError

TYPES = {  # Triton's
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int32: "i32",
    torch.int64: "i64",
}
BF16, FP32 = "bfloat16", "float32"
SHORT = {BF16: "bf16", FP32: "fp32"}
# In 16 bits they must use tensor cores.
MATMULS = (
    attention.forward_kernel,
    attention_backward.dkv_kernel,
    attention_backward.dq_kernel,
    grouped_gemm.rows_kernel,
    grouped_gemm.weight_kernel,
)
# Of a call: the names of the compilations of its launches in their order, "" for none; what is
# called, in which precision and with which settings.
Call = tuple[tuple[str, ...], str, str, dict[str, Any]]


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


def _type(value: Any) -> Any:
    """Triton's type of an argument."""
    if isinstance(value, Tensor):
        return f"*{TYPES[value.dtype]}"
    if isinstance(value, tuple):
        return tuple(map(_type, value))
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, int):
        return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
    if isinstance(value, float):
        return "fp32"
    return f"tensordesc<{TYPES[value.base.dtype]}{value.block_shape}>"


def _is_divisible(value: Any) -> bool:
    """Whether Triton compiles for a multiple of 16."""
    if isinstance(value, Tensor):
        value = value.data_ptr()  # on the meta device, from the start of its storage
    return type(value) is int and value % 16 == 0


def compiled_from(name: str, kernel: Any, row: Any, given: dict[str, Any]) -> Compiled:
    """What Triton compiles for a launch with these arguments."""
    declared, options = kernel.fn.__annotations__, row.launch()
    # of Triton's interpreter, its decorator's arguments
    decorated = vars(kernel) | vars(kernel).get("kwargs", {})
    plain = decorated.get("do_not_specialize") or ()
    ones = {key for key, value in given.items() if type(value) is int and value == 1}
    fixed = {
        key: value
        for key, value in given.items()
        if value is None or declared.get(key) == "tl.constexpr" or key in ones.difference(plain)
    }
    signature = {
        key: "u32" if declared.get(key) == "tl.uint32" else _type(given[key])
        for key in kernel.arg_names
        if key not in fixed
    }
    first, *_ = signature.values()
    return Compiled(
        name,
        kernel,
        signature,
        fixed,
        tuple(key for key in signature if key not in plain and _is_divisible(given[key])),
        options.pop("num_warps", 4),
        options.pop("num_stages", 3),
        matmul=kernel in MATMULS and "bf16" in str(first),
        row=getattr(row, "row", row),
        options=options,
    )


def _launched(call: Call, arch: int) -> list[Compiled]:
    """The named launches of a call on a GPU of this architecture, up to one that the table
    refuses.
    """
    names, kernel, dtype, settings = call
    launches: list[tuple[Any, Any, dict[str, Any]]] = []

    def record(kernel: Any, _: Any, row: Any, *args: Any, **kwargs: Any) -> None:
        launches.append((kernel, row, dict(zip(kernel.arg_names, args)) | kwargs))

    with mock.patch.object(lang, "ARCH_WITHOUT_GPU", arch):
        try:
            case = case_of(Variant(kernel, dtype, settings), torch.device("meta"))
            with lang.launches_to(record):
                case.call()
        except UserError:
            names = names[: len(launches)]
    named = zip(names, launches, strict=True)
    return [compiled_from(name, *launch) for name, launch in named if name]


# The variants of attention that are compiled for each head dimension.
ATTENTION: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 1024},
    "documents": {"documents": True},
    "positions_documents": {"positions": True, "documents": True},
    "softcap": {"softcap": 50.0},
    "dropout": {"drop": 0.1},
    "positions_dropout": {"positions": True, "drop": 0.1},
}


def _attention(arch: int) -> Iterator[Call]:
    """In bf16. Head dimension 96 takes what 128 compiles to. What the backward kernels spill lies
    outside of the loops over blocks, or is a few of their instructions.
    """
    for d, (variant, given) in itertools.product((64, 128, 256), ATTENTION.items()):
        # Differs from dropout by a few loads: for Hopper and the usual head dimensions alone.
        if variant == "positions_dropout" and (arch != lang.HOPPER or d > 128):
            continue
        settings = {"s": 4096, "b": 4, "g": 8, "m": 4, "d": d, **given}
        kernels = ("forward", "dkv", "dq", "dkv_dq")
        forward, dkv, dq, both = (f"attention_{kernel}_{d}_{variant}" for kernel in kernels)
        prepare = f"attention_prepare_{d}" if variant == "causal" else ""
        yield (forward,), "attention forward", BF16, settings
        yield (prepare, dkv, dq), "attention dq", BF16, settings
        yield ("", both), "attention dkv_dq", BF16, settings


GLUON = {
    "causal": Features(),
    "full": Features(causal=False),
    "window": Features(window=1024),
    "documents": Features(table=TILE, documents=True),
}


def _gluon(arch: int) -> Iterator[Compiled]:
    """The candidate in Gluon, of Hopper alone: head dimensions between take what 64 and 128 compile
    to. What is spilled lies outside of the loop over whole blocks.
    """
    if gluon_forward.gluon is None or arch != lang.HOPPER:
        return
    for d, kind in ((64, "shipped"), (64, "three consumers"), (128, "shipped")):
        for variant in GLUON if kind == "shipped" else ("causal", "full"):
            layout = gluon_forward.configuration(d, kind)
            held, ring = (_block(d, rows) for rows in (gluon_forward.ROWS, layout.N))
            yield _gluon_compiled(
                f"attention_gluon_{d}_{variant}{'_3_consumers' * (layout.consumers == 3)}",
                gluon_forward.forward_kernel,
                {"q": held, "k": ring, "v": ring, "out": held},
                variant,
                layout,
                find("attention gluon", arch, d=d, kind=kind),
            )
    for d, name in itertools.product((64, 128), ("dkv", "dq")):
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


def _block(d: int, rows: int, kind: str = "bf16") -> str:
    return gluon_forward.block_type(kind, (1, 1, rows, d))


def _gluon_types(name: str, d: int, block: int, parts: bool) -> dict[str, str]:
    """Of the tensors of the kernel "dkv" or "dq" in bf16; `parts`: dk and dv are parts in fp32."""
    held, ring = (_block(d, rows) for rows in (gluon_forward.ROWS, block))
    if name == "dq":
        return {"q": held, "k": ring, "v": ring, "dout": held, "dq": held}
    result = _block(d, gluon_forward.ROWS, "fp32") if parts else held
    lines = gluon_forward.block_type("fp32", (1, block))
    operands = {"q": ring, "k": held, "v": held, "dout": ring}
    return operands | {"dk": result, "dv": result, "base": lines, "delta": lines}


def _gluon_compiled(
    name: str, kernel: Any, types: dict[str, str], variant: str, layout: Any, row: Row
) -> Compiled:
    fixed: dict[str, Any] = {"FEATURES": GLUON[variant], "LAYOUT": layout}
    if variant != "documents":
        fixed |= {"table": None, "starts": None}
    types = dict.fromkeys(("lse", "base", "delta"), "*fp32") | types | {"scale": "fp32"}
    types |= dict.fromkeys(("table", "starts"), "*i32")
    signature = {key: types.get(key, "i32") for key in kernel.arg_names if key not in fixed}
    pointers = tuple(key for key, kind in signature.items() if kind.startswith("*"))
    return Compiled(name, kernel, signature, fixed, pointers, matmul=True, row=row)


def _norm(arch: int) -> Iterator[Call]:
    """Both norms at hidden sizes and, of strided views, at a head's width."""
    widths = [(BF16, 128, False), (BF16, 4096, False), (BF16, 4096, True), (BF16, 8192, True)]
    widths += [(BF16, 16384, True), (FP32, 8192, True)]
    for (dtype, width, add), centre in itertools.product(widths, (False, True)):
        settings = {"rows": 8200, "width": width, "add": add, "centre": centre}
        if width == 128:
            settings["inner"] = 40
        name = f"{'add_' * add}{'layer' if centre else 'rms'}_norm_{SHORT[dtype]}_{width}"
        yield (name,), "norm forward", dtype, settings
        names = [f"{name}_backward"]
        if width > norm.WIDEST_BACKWARD:
            names = [f"{name}_projection", *names]
        yield tuple(names), "norm backward", dtype, settings


def _qk_norm(arch: int) -> Iterator[Call]:
    """Both norms, of heads that turn whole, by half or not."""
    for dtype, d, width, centre in (
        (BF16, 128, 128, False),
        (BF16, 128, 64, False),
        (BF16, 64, 0, False),
        (BF16, 128, 128, True),
        (FP32, 128, 128, False),
    ):
        sizes = {"s": 4099, "b": 3, "g": 5, "m": 5, "d": d}
        settings = sizes | {"rotary": width, "centre": centre}
        for direction in ("forward", "backward"):
            name = f"qk_norm_{direction}_{SHORT[dtype]}_{d}_{width}{'_layer' * centre}"
            yield (name,), f"qk_norm {direction}", dtype, settings


def _activation(arch: int) -> Iterator[Call]:
    """Every kind in bf16, with a bias a gated one and GELU, which in fp32 too."""
    for dtype, kind in (*((BF16, kind) for kind in KINDS), (FP32, "gelu")):
        sizes = {"rows": 8200, "width": 14336 if kind in GATED else 16384}
        for bias in (False, True) if kind in ("swiglu", "gelu") else (False,):
            name = f"{kind}_{'bias_' * bias}{SHORT[dtype]}"
            settings = sizes | {"activation": kind, "bias": bias}
            yield (name,), "activation forward", dtype, settings
            yield (f"{name}_backward",), "activation backward", dtype, settings


def _dropout(arch: int) -> Iterator[Call]:
    """A hidden size's block, forward and backward."""
    for dtype in (BF16, FP32):
        names = f"dropout_add_{SHORT[dtype]}", f"dropout_{SHORT[dtype]}"
        yield names, "dropout", dtype, {"s": 2048, "b": 4, "width": 4096}


def _rotary(arch: int) -> Iterator[Call]:
    """Fused QKV outputs with grouped heads, of which half or all channels turn, and a norm's output
    without groups.
    """
    for name, dtype, width, heads in (
        ("bf16_40x5", BF16, 128, {"g": 8, "m": 4}),
        ("bf16_24x2", BF16, 64, {"g": 12, "m": 1}),
        ("bf16_32x1", BF16, 128, {"n": 32}),
        ("fp32_40x5", FP32, 128, {"g": 8, "m": 4}),
    ):
        settings = {"s": 2048, "b": 3, "d": 128, "rotary": width, "direction": -1}
        yield (f"rotary_{name}_{width}",), "rotary", dtype, settings | heads


def _cross_entropy(arch: int) -> Iterator[Call]:
    """A large vocabulary in bf16."""
    for kind, softcap in (("plain", None), ("capped", 30.0)):
        names = f"cross_entropy parts {kind}", f"cross_entropy backward {kind}"
        settings = {"tokens": 8200, "width": 131072, "columns": 131000, "softcap": softcap}
        yield names, "cross_entropy", BF16, settings


def _fp8(arch: int) -> Iterator[Call]:
    """Every kernel in bf16 and e4m3, from Hopper on; e5m2 differs in one instruction."""
    if arch < lang.HOPPER:
        return
    for width in (4096, 16384):
        yield (f"fp8_rows_{width}",), "fp8 rows", BF16, {"rows": 8192, "width": width}
    for names, scaling, given in (
        (("fp8_blocks",), "block", {"transposed": False}),
        (("fp8_blocks_transposed",), "block", {}),
        (("fp8_blocks_transposed_e5m2",), "block", {"to": "float8_e5m2"}),
        (("fp8_blocks_transposed_alone",), "block", {"plain": False}),
        (("fp8_maxima", "fp8_scaled"), "tensor", {"transposed": False}),
        (("", "fp8_scaled_transposed"), "tensor", {}),
        (("", "fp8_scaled_transposed_alone"), "tensor", {"plain": False}),
    ):
        settings = {"rows": 8192, "width": 4096, "scaling": scaling, **given}
        yield names, "fp8 tiles", BF16, settings


def _grouped_gemm(arch: int) -> Iterator[Call]:
    """Experts of Qwen3-30B on 8 ranks and of Mixtral on 8, in bf16, and in fp32 the former."""
    experts, sizes = (700,) * 11 + (500,), {"o": 2048, "i": 4096}  # rows of each
    for dtype, name, counts in (
        (BF16, "16_bf16", experts),
        (BF16, "1_bf16", (8200,)),
        (FP32, "16_fp32", experts),
    ):
        names = f"grouped_forward_{name}", f"grouped_input_grad_{name}"
        yield names, "grouped_gemm rows", dtype, sizes | {"counts": counts}
    for dtype, (name, overwrite) in itertools.product(
        (BF16, FP32), (("added", False), ("written", True))
    ):
        settings = sizes | {"counts": experts, "overwrite": overwrite}
        yield (
            (f"grouped_weight_grad_{name}_{SHORT[dtype]}",),
            "grouped_gemm weight",
            dtype,
            settings,
        )


def _adamw(arch: int) -> Iterator[Call]:
    """Gradients and moments in either precision, with rounded weights and (fp32 training)
    without.
    """
    for grad, moments, out in (
        (FP32, FP32, "bf16"),
        (BF16, FP32, "bf16"),
        (FP32, BF16, "bf16"),
        (FP32, FP32, "themselves"),
    ):
        name = f"adamw grad {SHORT[grad]} moments {SHORT[moments]} weights {out}"
        settings = {"size": 1 << 20, "grad": grad, "exp_avg": moments, "exp_avg_sq": moments}
        yield (name,), "adamw", BF16, settings | {"out": out == "bf16"}


def _grad_norm(arch: int) -> Iterator[Call]:
    """Gradients in fp32 and bf16, of the second of two pieces: its sums lie anywhere."""
    for dtype in (FP32, BF16):
        settings = {"grad": dtype, "size": 255 * 4096, "pieces": 2}
        yield ("", f"sum of squares {SHORT[dtype]}"), "grad_norm", BF16, settings


FAMILIES: dict[str, Callable[[int], Iterator[Call]]] = {
    "activation": _activation,
    "adamw": _adamw,
    "attention": _attention,
    "cross_entropy": _cross_entropy,
    "dropout": _dropout,
    "fp8": _fp8,
    "grad_norm": _grad_norm,
    "grouped_gemm": _grouped_gemm,
    "norm": _norm,
    "qk_norm": _qk_norm,
    "rotary": _rotary,
}


def compilations(arch: int = lang.HOPPER, family: str = "") -> Iterator[Compiled]:
    """All, or those of the operators whose rows in the table begin with `family`."""
    for name, calls in FAMILIES.items():
        if name.startswith(family):
            for call in calls(arch):
                yield from _launched(call, arch)
    if "attention gluon".startswith(family):
        yield from _gluon(arch)
