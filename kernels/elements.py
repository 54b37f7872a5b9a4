"""How every kernel reads and writes elements: in fp32 inside, in the tensor's own precision
outside, nothing beyond a mask.
"""

from __future__ import annotations

from megatron.kernels.lang import jit, tl


@jit
def load_fp32(pointers, mask):
    """The elements at a block of pointers, widened to fp32; zeros where the mask is false."""
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@jit
def store_rounded(pointers, values, mask):
    """Write a block of fp32 values where the mask is true, each rounded once to what the pointers
    point at.
    """
    tl.store(pointers, values.to(pointers.dtype.element_ty), mask=mask)
