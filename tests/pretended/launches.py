"""Every operator of kernels/ launched for a GPU that is not there.

    python tests/pretended/launches.py --arch 90 --out FILE --log FILE GROUP...
    python tests/pretended/launches.py --arch 80 --out FILE --log FILE --quick

Triton compiles each kernel for the architecture and launches it through its own launcher, into the
driver of driver.c. That checks what the launcher hands over and computes nothing; pointers are of
tensors in the host's memory. FILE of --out gets what was launched, that of --log the driver's
lines.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
SHARED_MEMORY = {80: 166912, 90: 232448}  # bytes that a block of threads may have

# (name, call, whether every run of the tests makes it)
Calls = Iterator[tuple[str, Callable[[], object], bool]]


def load_driver(log: str, arch: int) -> None:
    """Make Triton find the pretended driver, in this process, before Triton is imported."""
    from pretended import libraries

    library = libraries.driver()
    os.environ["TRITON_LIBCUDA_PATH"] = str(library.parent)
    os.environ["PRETENDED_LOG"] = log
    os.environ["PRETENDED_SHARED_MEMORY"] = str(SHARED_MEMORY[arch])
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def use_driver(arch: int) -> None:
    """A device of this architecture is Triton's, and all that kernels/ knows of."""
    from megatron.kernels import lang
    from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils
    from triton.runtime import driver

    class Pretended(CudaDriver):
        def __init__(self) -> None:
            # what the class itself asks torch's CUDA build for
            self.utils = CudaUtils()
            self.launcher_cls = CudaLauncher
            self.get_device_capability = lambda device=0: divmod(arch, 10)
            self.get_current_stream = lambda device=0: 0
            self.get_current_device = lambda: 0
            self.set_current_device = lambda device: None

    driver.set_active(Pretended())
    # before the other modules take it by name
    lang.capability = lambda device: arch


def operands(s: int, t: int, b: int, g: int, m: int, d: int, dtype: Any, fused: bool) -> list:
    """Queries of g m heads, keys and values of g heads: one projection, or three tensors."""
    import torch

    shapes = [(s, b, g, m + 2, d)] if fused else [(s, b, g * m, d), (t, b, g, d), (t, b, g, d)]
    return [torch.zeros(shape, dtype=dtype).requires_grad_() for shape in shapes]


def attend(
    *sizes: int, has: dict | None = None, fused: bool = True, dtype: Any = None, **options: Any
) -> None:
    """Attention forward and backward; sizes: s, b, g, m, d, and t where it is not s."""
    import torch
    from megatron.kernels.attention import flash_attention
    from megatron.kernels.attention_masks import attention_mask

    s, b, g, m, d, *rest = sizes
    t = rest[0] if rest else s
    qkv = operands(s, t, b, g, m, d, dtype or torch.bfloat16, fused)
    mask = attention_mask(s, t, **(has or {}))
    out, lse = flash_attention(*qkv, scale=0.1, mask=mask, **options)
    torch.autograd.backward([out, lse], [torch.ones_like(out), torch.ones_like(lse)])


def documents(s: int, b: int) -> dict[str, Any]:
    import torch

    positions = torch.arange(s)
    return {"document_starts": torch.where(positions >= s // 2, s // 2, 0).expand(b, -1)}


def attention_calls(arch: int) -> Calls:
    """Shapes whose ends are no block's end, then every option."""
    import torch

    for sizes in (
        (1, 1, 1, 1, 64),
        (257, 2, 1, 7, 128),
        (128, 1, 8, 1, 128),
        (1000, 3, 2, 4, 64),
        (300, 1, 2, 2, 96),
        (100, 1, 1, 1, 40),
    ):
        yield f"causal {sizes}", partial(attend, *sizes), sizes[0] == 300
        yield f"causal {sizes}, three tensors", partial(attend, *sizes, fused=False), False
    sizes = (384, 2, 2, 2, 128)
    positions = torch.arange(384)
    dropped = {"drop": 0.1, "key": (4000000000, 5), "sample_ids": torch.zeros(2, dtype=torch.int64)}
    at = {"q_positions": positions, "k_positions": positions}
    yield "window", partial(attend, *sizes, has={"window": 100}), False
    yield "documents", partial(attend, *sizes, has=documents(384, 2)), False
    yield "positions", partial(attend, *sizes, has=at), False
    yield "full", partial(attend, *sizes, has={"causal": False}), False
    other = partial(attend, *sizes, 512, has={"causal": False}, fused=False)
    yield "more keys than queries", other, False
    yield "soft cap", partial(attend, *sizes, softcap=30.0), False
    yield "dropout", partial(attend, *sizes, **dropped), False
    yield "fp16", partial(attend, *sizes, dtype=torch.float16), False
    yield "fp32", partial(attend, *sizes, dtype=torch.float32), False
    yield "heads of 256", partial(attend, 384, 2, 2, 2, 256), False
    if arch >= 90:
        yield "atomic", partial(attend, *sizes, deterministic=False), False
        yield "atomic, 64", partial(attend, 384, 2, 2, 2, 64, deterministic=False), False


def gluon_calls(arch: int) -> Calls:
    """Of Hopper alone."""
    import torch

    for sizes in (
        ((257, 2, 1, 7, 128), (1000, 3, 2, 4, 64), (300, 1, 2, 2, 96)) if arch == 90 else ()
    ):
        yield f"causal {sizes}", partial(attend, *sizes, backend="gluon"), sizes[0] == 300
    for d in (64, 128) if arch == 90 else ():
        sizes = (384, 2, 2, 2, d)
        masks = {"full": {"causal": False}, "window": {"window": 100}}
        for name, has in (masks | {"documents": documents(384, 2)}).items():
            yield f"{name}, {d}", partial(attend, *sizes, has=has, backend="gluon"), False
        half = partial(attend, *sizes, backend="gluon", dtype=torch.float16)
        yield f"fp16, {d}", half, False


def normalise(rows: int, width: int, dtype: Any, bias: bool, residual: bool) -> None:
    import torch
    from megatron.kernels.norm import add_norm, norm, norm_backward

    x = torch.zeros(rows, 2, width + 8, dtype=dtype)[..., :width]
    weight = torch.zeros(width, dtype=dtype)
    shift = torch.zeros(width, dtype=dtype) if bias else None
    if residual:
        y, total, statistics = add_norm(x, x.clone(), weight, shift, 1e-5)
    else:
        y, statistics = norm(x, weight, shift, 1e-5)
        total = x
    norm_backward(torch.ones_like(y), total, weight, statistics, y if residual else None)


def norm_calls(arch: int) -> Calls:
    """Rows that one program holds, and wider ones."""
    import torch
    from megatron.kernels.norm import WIDEST

    quick = (72, WIDEST["backward"] + 40, WIDEST["forward"] + 40)
    for width in (72, 1000, 4096, WIDEST["backward"] + 40, WIDEST["forward"] + 40):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for both in (False, True):
                chosen = width in quick and dtype == torch.bfloat16 and both
                name = f"norm of {width}, {dtype}, {'bias and residual' if both else 'alone'}"
                yield name, partial(normalise, 5, width, dtype, both, both), chosen


def activate(rows: int, width: int, dtype: Any, kind: str, bias: bool) -> None:
    import torch
    from megatron.kernels.activation import activation, activation_backward

    columns = 2 * width if kind.endswith("glu") else width
    x = torch.zeros(rows, 2, columns, dtype=dtype)
    shift = torch.zeros(columns, dtype=dtype) if bias else None
    activation_backward(activation(x, shift, kind), x, shift, kind)


def rotate(s: int, b: int, g: int, n: int, d: int, width: int, dtype: Any) -> None:
    import torch
    from megatron.kernels.rotary import rotary_

    cos = torch.zeros(s, b, 1, width)
    x = torch.zeros(s, b, g, n, d, dtype=dtype)
    rotary_(x[:, :, :, : n - 1], cos, cos, 1)
    rotary_(x[:, :, :, 0], cos, cos, -1)


def norm_heads(s: int, b: int, g: int, n: int, d: int, width: int, dtype: Any) -> None:
    import torch
    from megatron.kernels.qk_norm import qk_norm, qk_norm_backward

    qkv, weight = torch.zeros(s, b, g, n, d, dtype=dtype), torch.zeros(d, dtype=dtype)
    tables = (torch.zeros(s, b, 1, width),) * 2 if width else (None, None)
    for bias in (None, weight):
        _, statistics = qk_norm(qkv, weight, weight, bias, bias, *tables, 1e-5)
        qk_norm_backward(qkv, qkv, weight, weight, *tables, statistics)


def drop(s: int, b: int, width: int, dtype: Any) -> None:
    import torch
    from megatron.kernels.dropout import dropout_add

    x = torch.zeros(s, b, width, dtype=dtype)
    where = torch.zeros(b, dtype=torch.int64), torch.arange(s), 1, 2, 0.1
    dropout_add(x, x, *where)
    dropout_add(x, None, *where)


def lose(tokens: int, columns: int, stored: int, dtype: Any, cap: float | None) -> None:
    import torch
    from megatron.kernels.cross_entropy import cross_entropy_backward_, cross_entropy_parts

    logits = torch.zeros(tokens, stored, dtype=dtype)
    labels = torch.zeros(tokens, dtype=torch.int64)
    numbers = torch.ones(tokens)
    cross_entropy_parts(logits, labels, columns, cap)
    cross_entropy_backward_(logits, labels, numbers, numbers, numbers, columns, cap)


def row_calls(arch: int) -> Calls:
    """Activations, rotary embedding, dropout and the loss."""
    import torch
    from megatron.kernels.activation import KINDS

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        bf16 = dtype == torch.bfloat16
        for kind in KINDS:
            for bias in (False, True):
                name = f"{kind}, {dtype}, {'bias' if bias else 'no bias'}"
                quick = bf16 and bias and kind == tuple(KINDS)[0]
                yield name, partial(activate, 3, 1100, dtype, kind, bias), quick
        for sizes in ((7, 2, 3, 5, 64, 48), (300, 1, 8, 6, 128, 128), (5, 3, 1, 3, 80, 80)):
            yield f"rotary {sizes}, {dtype}", partial(rotate, *sizes, dtype), bf16 and sizes[0] == 7
        for sizes in ((7, 2, 3, 5, 64, 48), (300, 1, 8, 6, 128, 128), (5, 3, 1, 3, 80, 0)):
            name = f"norms of heads {sizes}, {dtype}"
            yield name, partial(norm_heads, *sizes, dtype), bf16 and sizes[0] == 7
        for sizes in ((5, 2, 1100), (1000, 3, 4096)):
            yield f"dropout {sizes}, {dtype}", partial(drop, *sizes, dtype), bf16 and sizes[0] == 5
        for cap in (None, 30.0):
            yield f"loss, {dtype}, cap {cap}", partial(lose, 6, 1500, 1504, dtype, cap), bf16
        yield f"loss, wide, {dtype}", partial(lose, 70, 32000, 32000, dtype, None), False


def step(size: int, grad: Any, moments: Any, out: Any) -> None:
    import torch
    from megatron.kernels.adamw import adamw_

    master = torch.ones(size)
    first, second = (torch.ones(size, dtype=moments) for _ in range(2))
    rounded = None if out is None else torch.zeros(size, dtype=out)
    scalars = [torch.tensor(value) for value in (3.0, 1.0, 0.0)]
    gradient = torch.zeros(size, dtype=grad)
    adamw_(master, gradient, first, second, rounded, *scalars, 1e-3, 0.9, 0.95, 1e-8, 0.1)


def add_squares(dtype: Any) -> None:
    import torch
    from megatron.kernels.grad_norm import sum_of_squares

    x = torch.zeros(5000, dtype=dtype)
    sum_of_squares([x, x[:1], x[16:4099].clone()])


def draw(rows: int, columns: int) -> None:
    import torch
    from megatron.kernels.initialise import normal_

    normal_(torch.empty(rows, columns), 1, 2, 3, 7, 0.02)


def quantise(rows: int, columns: int, dtype: Any, scaling: str, transposed: bool) -> None:
    import torch
    from megatron.kernels import fp8

    x = torch.zeros(rows, columns, dtype=dtype)
    fp8.quantise(x, scaling=scaling, transposed=transposed)


def optimizer_calls(arch: int) -> Calls:
    """AdamW, the gradient's norm, initial weights, and 8-bit floats (of Hopper)."""
    import torch

    bf16, fp32 = torch.bfloat16, torch.float32
    for size in (5000, 1 << 20):
        for types in (
            (bf16, fp32, bf16),
            (fp32, fp32, bf16),
            (fp32, bf16, bf16),
            (fp32, fp32, None),
        ):
            quick = size == 5000 and types == (bf16, fp32, bf16)
            yield f"AdamW of {size}, {types}", partial(step, size, *types), quick
    for dtype in (bf16, torch.float16, fp32):
        yield f"sum of squares, {dtype}", partial(add_squares, dtype), dtype == bf16
    for sizes in ((5, 1030), (70000, 64), (1, 3)):
        yield f"initial weights {sizes}", partial(draw, *sizes), sizes[0] == 5
    for dtype in (bf16, torch.float16, fp32) if arch >= 90 else ():
        for scaling in ("tensor", "row", "block"):
            for transposed in (False, True):
                name = f"8-bit floats, {dtype}, {scaling}, {'both ways' * transposed}"
                quick = dtype == bf16 and scaling == "row"
                yield name, partial(quantise, 70, 150, dtype, scaling, transposed), quick


def multiply(counts: Sequence[int], outputs: int, inputs: int, dtype: Any, grad: Any) -> None:
    """Grouped GEMMs of experts with these numbers of rows, and all gradients."""
    import torch
    from megatron.kernels.grouped_gemm import grouped_gemm, grouped_weight_grad_

    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    x, dy = (torch.zeros(sum(counts), width, dtype=dtype) for width in (inputs, outputs))
    weight = torch.zeros(len(counts), outputs, inputs, dtype=dtype)
    grouped_gemm(x, weight, ends, True)
    grouped_gemm(dy, weight, ends, False)
    main_grad = torch.zeros(weight.shape, dtype=grad)
    for overwrite in (True, False):
        grouped_weight_grad_(main_grad, dy, x, ends, overwrite)


def expert_calls(arch: int) -> Calls:
    """Grouped products: few experts, many, and one; sizes that tiles do not divide."""
    import torch

    bf16, fp32 = torch.bfloat16, torch.float32
    for dtype in (bf16, torch.float16, fp32):
        for counts in ((5, 0, 170), (64,), (3,) * 128):
            for outputs, inputs in ((136, 72), (1536, 2048)):
                name = f"experts {len(counts)}, {outputs} x {inputs}, {dtype}"
                quick = dtype == bf16 and len(counts) == 3 and outputs == 136
                yield name, partial(multiply, counts, outputs, inputs, dtype, fp32), quick


GROUPS: dict[str, Callable[[int], Calls]] = {
    "attention": attention_calls,
    "gluon": gluon_calls,
    "norm": norm_calls,
    "rows": row_calls,
    "experts": expert_calls,
    "optimizer": optimizer_calls,
}


def compiled_kernels(arch: int) -> list[str]:
    """Names of all kernels that are shipped for an architecture."""
    from megatron.kernels.tools import manifest

    return sorted({_name(row.kernel) for row in manifest.rows().values() if row.arch == arch})


def _name(kernel: Any) -> str:
    return f"{kernel.fn.__module__.removeprefix('megatron.kernels.')}.{kernel.fn.__name__}"


@contextlib.contextmanager
def misaligned() -> Iterator[None]:
    """Every operand of attention lies two bytes off where a descriptor may begin, and nothing of
    Triton's looks before the driver does.
    """
    from megatron.kernels import attention, attention_backward
    from triton.tools.tensor_descriptor import TensorDescriptor

    def misaligned(x: Any) -> Any:
        room = x.new_zeros(x.numel() + 1)
        return room[1:].view(x.shape)

    with contextlib.ExitStack() as stack:
        for module in (attention, attention_backward):
            stack.enter_context(mock.patch.object(module, "aligned", misaligned))
        unchecked = mock.patch.object(TensorDescriptor, "__post_init__", lambda self: None)
        stack.enter_context(unchecked)
        yield


def run(arch: int, groups: list[str], quick: bool) -> dict[str, Any]:
    """Make the calls: their number, the kernels that were launched, and what failed."""
    from triton.runtime.jit import JITFunction

    launched: set[str] = set()
    failed: dict[str, str] = {}
    real = JITFunction.run
    calls = 0

    def watched(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        launched.add(_name(kernel))
        return real(kernel, *args, **kwargs)

    with mock.patch.object(JITFunction, "run", watched):
        for group in groups:
            for name, call, often in GROUPS[group](arch):
                if quick and not often:
                    continue
                calls += 1
                try:
                    call()
                except Exception as error:  # all that a first launch may meet
                    failed[f"{group}: {name}"] = f"{type(error).__name__}: {error}"[:500]
    return {"calls": calls, "launched": sorted(launched), "failed": failed}


def parse_arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="launch every operator into a pretended driver")
    parser.add_argument("groups", nargs="*", help=", ".join(GROUPS))
    parser.add_argument("--arch", type=int, choices=list(SHARED_MEMORY), default=90)
    parser.add_argument("--quick", action="store_true", help="what every run of the tests makes")
    parser.add_argument("--fault", choices=["misaligned"], help="put a fault in")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--log", required=True)
    return parser.parse_args(words)


def main(words: list[str]) -> int:
    arguments = parse_arguments(words)
    load_driver(arguments.log, arguments.arch)
    use_driver(arguments.arch)
    with misaligned() if arguments.fault else contextlib.nullcontext():
        found = run(arguments.arch, arguments.groups or list(GROUPS), arguments.quick)
    found["compiled"] = compiled_kernels(arguments.arch)
    arguments.out.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]
    sys.exit(main(sys.argv[1:]))
