"""Cross-entropy of the columns of a vocabulary that one rank holds: three numbers a token, and the
gradient in the logits' own storage.

Shapes: logits [n, width] of n tokens in bf16, fp16 or fp32 (fp64 in the definition), of which the
first `columns` are real and the others padding; labels [n] (int64) counted from this rank's first
column, anything outside [0, columns) being another rank's. z is the logit, or cap x tanh(logit /
cap) with a soft cap.

    parts       maximum m of z, sum of exp(z - m), z at the label or 0 where that is not here;
                (lowest fp32, 0, 0) where columns = 0
    all ranks   lse = log sum exp(z),  loss = lse - z[label]
    backward    dz = (dloss + dlse) exp(z - lse) - dloss [column is label]
                dlogits = dz (1 - (z / cap)^2), 0 in padding

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; three numbers a
token over ranks: model/loss.py.

Roofline: the forward pass reads each logit once and the backward pass reads and writes it once, 2 +
4 bytes each in bf16. 8192 tokens of 131072 columns at 4.3 TB/s: 0.50 + 1.0 ms. One exp an element
takes half of a Hopper's special-function units at that rate: so the maximum is one number a row,
and not one a lane, which would take two. The cap's tanh takes two more: with it those units bound
the forward pass, at 2.8 TB/s.
"""

from __future__ import annotations

import torch
from megatron.kernels.configurations import KernelLaunch, columns_launch
from megatron.kernels.elements import load_fp32, store_rounded
from megatron.kernels.lang import HOPPER, capability, jit, launch, operator, tl
from torch import Tensor


def cross_entropy_parts_reference(
    logits: Tensor, labels: Tensor, columns: int, softcap: float | None = None
) -> Tensor:
    """parts [3, n] in fp32, fp64 for fp64."""
    z = logits[:, :columns].to(torch.promote_types(logits.dtype, torch.float32))
    if columns == 0:
        parts = z.new_zeros(3, *labels.shape)
        parts[0] = torch.finfo(z.dtype).min
        return parts
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    top = z.amax(-1)
    here = (labels >= 0) & (labels < columns)
    target = z.gather(-1, labels.clamp(0, columns - 1)[:, None]).squeeze(-1)
    return torch.stack([top, (z - top[:, None]).exp().sum(-1), torch.where(here, target, 0)])


def cross_entropy_reference(
    logits: Tensor, labels: Tensor, columns: int, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """(loss, lse) [n] where one rank holds all columns, to be differentiated by autograd."""
    top, exponentials, target = cross_entropy_parts_reference(logits, labels, columns, softcap)
    lse = exponentials.log() + top
    return lse - target, lse


@jit
def load_logits(pointers, mask, softcap, SOFTCAP: tl.constexpr):
    """z in fp32 at a block of pointers, or at one; cap tanh(0) = 0 where the mask is false."""
    z = load_fp32(pointers, mask)
    if SOFTCAP:
        z = softcap * (2 * tl.sigmoid(2 * z / softcap) - 1)
    return z


@jit
def parts_kernel(
    logits,
    labels,
    parts,
    tokens,
    columns,
    width,
    stride,
    softcap,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a token. The loads' mask is `width`, a multiple of 16 where `columns` is not:
    they stay 16 bytes wide.
    """
    token = tl.program_id(0)
    row = logits + token.to(tl.int64) * stride
    top = tl.full((), -3.4028234663852886e38, tl.float32)
    exponentials = tl.zeros((), tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        z = load_logits(row + at, at < width, softcap, SOFTCAP)
        z = tl.where(at < columns, z, float("-inf"))
        higher = tl.maximum(top, tl.max(z, 0))
        exponentials = exponentials * tl.exp(top - higher) + tl.sum(tl.exp(z - higher), 0)
        top = higher
    label = tl.load(labels + token)
    here = (label >= 0) & (label < columns)
    target = load_logits(row + label, here, softcap, SOFTCAP)
    tl.store(parts + token, top)
    tl.store(parts + tokens + token, exponentials)
    tl.store(parts + 2 * tokens + token, tl.where(here, target, 0.0))


@jit
def backward_kernel(
    logits,
    labels,
    lse,
    dloss,
    dlse,
    columns,
    width,
    stride,
    softcap,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a token; each element is read and written by the same thread."""
    token = tl.program_id(0)
    row = logits + token.to(tl.int64) * stride
    label = tl.load(labels + token)
    normaliser = tl.load(lse + token)
    of_label = tl.load(dloss + token)
    of_all = of_label + tl.load(dlse + token)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        z = load_logits(row + at, at < width, softcap, SOFTCAP)
        dz = tl.exp(z - normaliser) * of_all
        dz = tl.where(at == label, dz - of_label, dz)
        if SOFTCAP:
            dz *= 1 - (z / softcap) * (z / softcap)
        store_rounded(row + at, tl.where(at < columns, dz, 0.0), at < width)


def configuration(width: int, arch: int = HOPPER) -> KernelLaunch:
    """Sixteen elements a thread: two loads of 16 bytes in flight in bf16, and registers for eight
    blocks of eight warps on a multiprocessor.
    """
    return columns_launch("cross_entropy", width, arch, least=512)


@operator("cross_entropy_parts")
def cross_entropy_parts(
    logits: Tensor, labels: Tensor, columns: int, softcap: float | None
) -> Tensor:
    """parts [3, n] (fp32) of logits [n, width], whose rows may lie apart."""
    _checked(logits)
    tokens, width = logits.shape
    parts = torch.empty((3, tokens), dtype=torch.float32, device=logits.device)
    if tokens:
        form = configuration(width, capability(logits.device))
        launch(
            parts_kernel,
            (tokens,),
            form,
            logits,
            labels.contiguous(),
            parts,
            tokens,
            columns,
            width,
            logits.stride(0),
            softcap or 0.0,
            SOFTCAP=softcap is not None,
            BLOCK=form.block,
        )
    return parts


@operator("cross_entropy_backward_", mutates_args=("logits",))
def cross_entropy_backward_(
    logits: Tensor,
    labels: Tensor,
    lse: Tensor,
    dloss: Tensor,
    dlse: Tensor,
    columns: int,
    softcap: float | None,
) -> None:
    """Overwrite logits [n, width] with their gradient; lse, dloss, dlse [n] in fp32."""
    _checked(logits)
    tokens, width = logits.shape
    if tokens:
        form = configuration(width, capability(logits.device))
        numbers = (each.float().contiguous() for each in (lse, dloss, dlse))
        launch(
            backward_kernel,
            (tokens,),
            form,
            logits,
            labels.contiguous(),
            *numbers,
            columns,
            width,
            logits.stride(0),
            softcap or 0.0,
            SOFTCAP=softcap is not None,
            BLOCK=form.block,
        )


def _checked(logits: Tensor) -> None:
    assert logits.dtype != torch.float64, "float64: the definition serves it"
    assert logits.stride(1) == 1 or logits.shape[1] <= 1
