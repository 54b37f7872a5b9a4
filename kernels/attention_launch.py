"""What the kernels of flash attention are launched with, forward and backward: descriptors, tile
sizes, and one set of arguments for all.

q, k, v and what becomes of them are read and written through tensor descriptors (the TMA unit of
Hopper; pointers on older GPUs), query heads as [b g, m, length, d] (m heads read one key head), key
heads as [b g, length, d]: they lie as well in tensors of their own as in the fused projection [s,
b, g, m + 2, d]. A head dimension that is no power of two needs no special kernel (96 takes the one
for 128), and rows beyond the last read as zeros and are not written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.kernels import lang
from megatron.kernels.attention_masks import STEP, TILE, AttentionMask, Features
from megatron.kernels.configurations import Row, find
from torch import Tensor

from megatron.config.errors import UserError

L2_BYTES = 24 << 20  # of a GPU's 50 MB: the inner operands of the heads that are worked on together
# one compilation for all values
RUNTIME = "s t padded heads group members section first_head k0 k1 threshold".split()


@dataclass(frozen=True)
class Options:
    """What a call computes apart from its mask; `tile` is 0 but in tests."""

    scale: float
    softcap: float | None = None
    drop: float = 0.0
    key: tuple[int, int] = (0, 0)
    first_head: int = 0
    # Adds up dq in one order, else atomically: faster, but equal runs give unequal last bits.
    deterministic: bool = True
    tile: int = 0
    sample_ids: Tensor | None = None  # [b], where probabilities are dropped


def table_key(d: int, options: Options, causal: bool) -> dict[str, Any]:
    """The table's key for a call: tiles follow the head dimension and the costliest thing that is
    done to a score.
    """
    kind = "causal" if causal else "full"
    if options.drop > 0:
        kind = "dropout"
    elif options.softcap is not None:
        kind = "softcap"
    return {"d": max(64, columns(d)), "kind": kind}


def configuration(
    kernel: str,
    d: int,
    options: Options,
    causal: bool,
    dtype: torch.dtype = torch.bfloat16,
    arch: int = lang.HOPPER,
) -> Row:
    """Tiles of M queries by N keys of the kernel "forward", "dkv", "dkv_dq" or "dq". In fp32 there
    is one size: fp32 GEMMs use no tensor cores here.

    On Hopper by what compiles without spills in the loops and without products that wait for each
    other, and by how many blocks of threads an SM then holds: up to d = 64 two, of which one
    multiplies while the other one computes exponentials, beyond one with larger tiles. Random bits
    and soft-caps are left with smaller ones.
    """
    name, key = f"attention {kernel}", table_key(d, options, causal)
    if options.tile or dtype == torch.float32:
        size = options.tile or 32
        return Row(name, arch, key, {"M": size, "N": size, "num_warps": 4, "num_stages": 2})
    row = find(name, arch, **key)
    if reason := row.unsupported_reason(arch):
        raise UserError(reason)
    return row


def columns(d: int) -> int:
    """Width of a tile for head dimension d."""
    return max(16, 1 << (d - 1).bit_length())


def by_key_head(qkv: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Views q [s, b, g, m, d], k and v [t, b, g, d] of (q [s, b, g m, d], k, v), or of the one
    fused [s, b, g, m + 2, d].
    """
    if len(qkv) == 1:
        return qkv[0][:, :, :, :-2], qkv[0][:, :, :, -2], qkv[0][:, :, :, -1]
    q, k, v = qkv
    return q.unflatten(2, (k.shape[2], -1)), k, v


def outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate out [s, b, g m, d] and lse [b, g m, s] in fp32 for queries [s, b, g, m, d]."""
    s, b, g, m, d = q.shape
    out = torch.empty(s, b, g * m, d, dtype=q.dtype, device=q.device)
    return out, torch.empty(b, g * m, s, dtype=torch.float32, device=q.device)


def aligned(x: Tensor) -> Tensor:
    """x [length, ..., d] where a descriptor can address it (rows contiguous, all else at multiples
    of 16 bytes), a copy where not.
    """
    steps = [stride for size, stride in zip(x.shape[:-1], x.stride()) if size > 1]
    is_regular = all(step > 0 and step * x.element_size() % 16 == 0 for step in steps)
    if x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and is_regular:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def descriptor(x: Tensor, rows: int) -> Any:
    """Blocks [1, ..., rows, columns(d)] of x [length, ..., d], as [..., length, d]."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    length, *heads, d = x.shape
    step, *steps, _ = (
        given if size > 1 else d for size, given in zip(x.shape, x.stride(), strict=True)
    )
    assert d * x.element_size() % 16 == 0, "check with unsupported_heads()"
    block = [1] * len(heads) + [rows, columns(d)]
    return TensorDescriptor(x, [*heads, length, d], [*steps, step, 1], block)


def operand(x: Tensor, rows: int) -> Any:
    """x [length, b g, ..., d] as the kernels take it (attention_tiles.py): a descriptor; before
    Hopper its pointer, length, width, strides.
    """
    if lang.capability(x.device) >= lang.HOPPER:
        return descriptor(x, rows)
    (length, *_, d), (step, *steps, _) = x.shape, x.stride()
    return (x, length, d, step, *steps)


def section(length: int, d: int, dtype: torch.dtype, heads: int = 1) -> int:
    """How many heads are worked on together, when `heads` of them share two operands [length, d]
    that stay in the L2 cache.
    """
    return max(1, L2_BYTES // (2 * length * d * dtype.itemsize)) * heads


def runtime_arguments(q: Tensor, t: int, mask: AttentionMask, options: Options) -> dict[str, Any]:
    """The arguments that all kernels take and that are not compiled in, for queries [s, b, g, m, d]
    of t keys.
    """
    s, _, g, m, _ = q.shape
    return {
        "q_positions": mask.q_positions,
        "k_positions": mask.k_positions,
        "starts": mask.document_starts,
        "samples": options.sample_ids,
        "s": s,
        "t": t,
        "heads": g * m,
        "group": m,
        "scale": options.scale,
        "first_head": options.first_head,
        "k0": options.key[0],
        "k1": options.key[1],
        "threshold": round(options.drop * 2**32),
        "inverse_keep": 1 / (1 - options.drop),
    }


def features(mask: AttentionMask, options: Options) -> Features:
    """What of a call is compiled in."""
    documents = mask.document_starts is not None
    positions = mask.q_positions is not None
    return Features(
        causal=mask.causal,
        window=mask.window or 0,
        table=(options.tile or TILE) if documents or positions else 0,
        documents=documents,
        positions=positions,
        softcap=float(options.softcap or 0),
        dropout=options.drop > 0,
    )


def constants(d: int, tiles: Row, compiled_in: Features) -> dict[str, Any]:
    """The arguments that are compiled in."""
    sizes = {"D": columns(d), "M": tiles.numbers["M"], "N": tiles.numbers["N"]}
    return {**sizes, "FEATURES": compiled_in}


assert TILE % STEP == 0
