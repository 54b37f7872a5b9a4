"""Triton's interpreter, made honest about bf16. It keeps bf16 as 16-bit integers and computes with
those integers, silently.

Fixed: matrix multiplies, and conversions from and to fp32 (to nearest, ties to even, as a GPU
does), those to 8-bit floats too (saturating, as a GPU's do; the interpreter's are off by one in
some percent of values), and numbers made of arrays of one element, which numpy 2.4 refuses. Added:
descriptors that add to memory. All other arithmetic on bf16 has wrong results: a kernel widens what
it loads.
"""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter

EIGHT = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
Builder, Handle = interpreter.InterpreterBuilder, interpreter.TensorHandle


def is_bf16(value: object) -> bool:
    return isinstance(value, Handle) and value.dtype.scalar == tl.bfloat16


def widen(bits: np.ndarray) -> np.ndarray:
    """bf16 as 16-bit integers -> float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """float32 -> the nearest bf16 as 16-bit integers, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def narrow_to_8(values: np.ndarray, kind: tl.dtype) -> np.ndarray:
    """float32 -> the nearest 8-bit float as integers, ties to even, the largest for what is beyond;
    NaN stays NaN.
    """
    dtype = EIGHT[kind]
    most = torch.finfo(dtype).max
    return (
        torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
        .clamp(-most, most)
        .to(dtype)
        .view(torch.uint8)
        .numpy()
    )


def check_float32(kind: tl.dtype, conversion: str) -> None:
    if kind != tl.float32:
        raise TypeError(f"{conversion} in the interpreter: go through float32")


def patch() -> None:
    """Change the interpreter of this process; again does nothing."""
    if getattr(Builder, "honest", False):
        return
    Builder.honest = True
    dot, cast, round_to = Builder.create_dot, Builder.cast_impl, Builder.create_fp_to_fp

    def create_dot(self, a, b, d, precision, imprecise):
        if is_bf16(a) or is_bf16(b):
            left, right = (widen(x.data) if is_bf16(x) else x.data for x in (a, b))
            return Handle(np.matmul(left, right, dtype=np.float32) + d.data, d.dtype.scalar)
        return dot(self, a, b, d, precision, imprecise)

    def cast_impl(self, source, target):
        kind = target.scalar
        if is_bf16(source) and kind != tl.bfloat16:
            check_float32(kind, f"bf16 to {kind}")
            return Handle(widen(source.data), kind)
        if kind == tl.bfloat16 and not is_bf16(source):
            check_float32(source.dtype.scalar, f"{source.dtype.scalar} to bf16")
            return Handle(narrow(source.data), kind)
        return cast(self, source, target)

    def create_fp_to_fp(self, source, target, mode):
        kind = target.scalar
        if kind in EIGHT:
            check_float32(source.dtype.scalar, f"{source.dtype.scalar} to {kind}")
            return Handle(narrow_to_8(source.data, kind), kind)
        if is_bf16(source) or kind == tl.bfloat16:
            return cast_impl(self, source, target)
        return round_to(self, source, target, mode)

    def create_descriptor_reduce(self, kind, descriptor, value, indices):
        assert kind == ir.DESCRIPTOR_REDUCE_KIND.ADD
        pointers, inside = descriptor.materialize_pointers(indices)
        order = ir.MEM_SEMANTIC.RELAXED, ir.MEM_SYNC_SCOPE.GPU
        mask = Handle(inside, tl.int1)
        return self.create_atomic_rmw(ir.ATOMIC_OP.FADD, pointers, value, mask, *order)

    for function in (create_dot, cast_impl, create_fp_to_fp, create_descriptor_reduce):
        setattr(Builder, function.__name__, function)
    patch_tensor = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_lang_tensor
