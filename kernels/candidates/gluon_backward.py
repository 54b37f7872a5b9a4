"""The backward pass of flash attention on Hopper, written out warp by warp in Gluon next to
gluon_forward.py: a kernel for dk and dv (gluon_dkv.py), then one for dq
(gluon_dq.py), so that every sum has one order.

Formulas and the launch that prepares lse and delta are attention_backward.py's, operands and masks
those of gluon_forward.py. A block of threads holds two operands, 64 rows for each of its two
consumers, and goes over the two others in blocks, which one warp loads through the TMA unit into a
ring of buffers. The longest tiles start first, one a block of threads, and the GPU deals out the
next one to whichever is free.

Roofline: 14 b n s t d FLOPs, half of it when causal, of which 10 count.
docs/results/attention_kernels.md has predictions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.kernels import lang
from megatron.kernels.attention_backward import BackwardTensors, add_parts, allocate, prepare
from megatron.kernels.attention_launch import Options, columns, features, section
from megatron.kernels.attention_masks import AttentionMask
from megatron.kernels.candidates.gluon_dkv import dkv_kernel
from megatron.kernels.candidates.gluon_dq import dq_kernel
from megatron.kernels.candidates.gluon_forward import (
    ROWS,
    TensorDescriptor,
    described,
    gl,
)
from megatron.kernels.configurations import find
from torch import Tensor

CONSUMERS = 2  # of ROWS rows each: together the TILE rows that a row of a mask's table serves
KEYS = CONSUMERS * ROWS  # that one program takes


@dataclass(frozen=True)
class GradientLayout:
    """How a block of threads is laid out: rows of a block that it goes over, buffers in the ring,
    registers of a thread in a consumer and in the producer, and how many consumers there are.
    """

    block: int
    stages: int
    registers: int
    producer_registers: int
    consumers: int = CONSUMERS


def configuration(kernel: str, d: int) -> GradientLayout:
    """Of the kernel "dkv" or "dq" for head dimension d, from the table."""
    return GradientLayout(**find(f"attention gluon {kernel}", lang.HOPPER, d=columns(d)).numbers)


def _lines(x: Tensor, count: int) -> Any:
    """x [b, n, padded] in fp32 for the TMA unit, `count` elements of a row at a time."""
    rows = x.flatten(0, 1)
    layout = gl.NVMMASharedLayout.get_default_for([1, count], gl.float32)
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [1, count], layout)


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    qkv: Sequence[Tensor],
    mask: AttentionMask,
    options: Options,
) -> list[Tensor]:
    """Gradients of qkv, three tensors or one, from those of out [s, b, n, d] and lse [b, n, s]: one
    launch to prepare, one for dk and dv, one for dq.
    """
    assert qkv[0].shape[-1] <= 128 and mask.q_positions is None
    assert options.softcap is None and options.drop == 0
    tensors = allocate(dout, out, lse, qkv, KEYS, deterministic=True)
    rows = prepare(tensors, lse, dlse)
    shared = {"heads": lse.shape[1], "group": tensors.q.shape[2], "scale": options.scale}
    shared |= {"starts": mask.document_starts, "FEATURES": features(mask, options), "num_warps": 4}
    _launch_dkv(tensors, shared | {"table": mask.by_key})
    _launch_dq(tensors, shared | rows | {"table": mask.by_query})
    return tensors.gradients


def _launch_dkv(tensors: BackwardTensors, shared: dict[str, Any]) -> None:
    """Fill dk and dv."""
    (s, _, m, d), (t, groups, _) = tensors.q.shape, tensors.k.shape
    layout = configuration("dkv", d)
    held = (x.unsqueeze(2) for x in (tensors.k, tensors.v, tensors.dk_parts, tensors.dv_parts))
    k, v, dk, dv = (described(x, ROWS) for x in held)
    dkv_kernel[(-(-t // KEYS) * groups * (m // tensors.members),)](
        described(tensors.q, layout.block),
        k,
        v,
        described(tensors.dout, layout.block),
        dk,
        dv,
        _lines(tensors.base, layout.block),
        _lines(tensors.delta, layout.block),
        s=s,
        t=t,
        members=tensors.members,
        section=section(s, d, tensors.q.dtype),
        LAYOUT=layout,
        **shared,
    )
    add_parts(tensors)


def _launch_dq(tensors: BackwardTensors, shared: dict[str, Any]) -> None:
    """Fill dq."""
    (s, groups, m, d), t = tensors.q.shape, len(tensors.k)
    layout = configuration("dq", d)
    dq_kernel[(-(-s // (CONSUMERS * ROWS)) * groups * m,)](
        described(tensors.q, ROWS),
        described(tensors.k.unsqueeze(2), layout.block),
        described(tensors.v.unsqueeze(2), layout.block),
        described(tensors.dout, ROWS),
        described(tensors.dq, ROWS),
        s=s,
        t=t,
        members=m,
        section=section(t, d, tensors.q.dtype, m),
        LAYOUT=layout,
        **shared,
    )
