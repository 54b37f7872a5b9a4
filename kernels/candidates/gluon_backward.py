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
from megatron.kernels.attention_backward import (
    add_parts,
    heads_of_a_program,
    prepared,
    room_for_gradients,
    room_for_parts,
)
from megatron.kernels.attention_launch import Options, columns, section
from megatron.kernels.attention_masks import TILE, AttentionMask
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
    registers of a thread in a consumer and in the producer.
    """

    block: int
    stages: int
    registers: int
    producer_registers: int


def configuration(kernel: str, d: int) -> GradientLayout:
    """Of the kernel "dkv" or "dq" for head dimension d, from the table."""
    return GradientLayout(**find(f"attention gluon {kernel}", lang.HOPPER, d=columns(d)).numbers)


def _lines(x: Tensor, count: int) -> Any:
    """x [b, n, padded] in fp32 for the TMA unit, `count` elements of a row at a time."""
    rows = x.flatten(0, 1)
    layout = gl.NVMMASharedLayout.get_default_for([1, count], gl.float32)
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [1, count], layout)


def fixed(
    layout: GradientLayout, block: str, causal: bool, window: int | None, documents: bool
) -> dict[str, Any]:
    """The arguments that are compiled in; `block` is the name of the rows that the ring takes."""
    return {
        "CAUSAL": causal,
        "WINDOW": window or 0,
        "TABLE": TILE if documents else 0,
        block: layout.block,
        "PARTS": CONSUMERS,
        "STAGES": layout.stages,
        "REGISTERS": layout.registers,
        "PRODUCER_REGISTERS": layout.producer_registers,
    }


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
    gradients, (dq, dk, dv) = room_for_gradients(qkv)
    call = prepared(dout, dlse, out, lse, qkv, mask, options, None)
    _launch_dkv(call, dk, dv)
    _launch_dq(call, dq)
    return gradients


def _launch_dkv(call: Any, dk: Tensor, dv: Tensor) -> None:
    """dk and dv [t, b g, d] of a prepared call."""
    (s, _, m, d), (t, groups, _), mask = call.q.shape, call.k.shape, call.mask
    layout = configuration("dkv", d)
    programs = -(-t // KEYS) * groups
    members = heads_of_a_program(programs, m, lang.multiprocessors(call.q.device))
    parts = [room_for_parts(x, m // members) for x in (dk, dv)]
    dkv_kernel[(programs * (m // members),)](
        described(call.q, layout.block),
        described(call.k.unsqueeze(2), ROWS),
        described(call.v.unsqueeze(2), ROWS),
        described(call.dout, layout.block),
        *(described(x.unsqueeze(2), ROWS) for x in parts),
        *(_lines(call.shared[name], layout.block) for name in ("base", "delta")),
        mask.by_key,
        mask.document_starts,
        s=s,
        t=t,
        heads=call.shared["heads"],
        group=m,
        members=members,
        section=section(s, d, call.q.dtype),
        scale=call.options.scale,
        **fixed(layout, "M", mask.causal, mask.window, mask.document_starts is not None),
        num_warps=4,
    )
    for part, whole in zip(parts, (dk, dv), strict=True):
        add_parts(part, whole)


def _launch_dq(call: Any, dq: Tensor) -> None:
    """dq [s, b g, m, d] of a prepared call."""
    (s, groups, m, d), t, mask = call.q.shape, len(call.k), call.mask
    layout = configuration("dq", d)
    dq_kernel[(-(-s // (CONSUMERS * ROWS)) * groups * m,)](
        described(call.q, ROWS),
        described(call.k.unsqueeze(2), layout.block),
        described(call.v.unsqueeze(2), layout.block),
        described(call.dout, ROWS),
        described(dq, ROWS),
        call.shared["base"],
        call.shared["delta"],
        mask.by_query,
        mask.document_starts,
        s=s,
        t=t,
        heads=call.shared["heads"],
        group=m,
        members=m,
        section=section(t, d, call.q.dtype, m),
        padded=call.shared["padded"],
        scale=call.options.scale,
        **fixed(layout, "N", mask.causal, mask.window, mask.document_starts is not None),
        num_warps=4,
    )
