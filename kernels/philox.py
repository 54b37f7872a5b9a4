"""Philox4x32-10, the one generator of the project, on integers: a value depends on a key and a
counter and on nothing else.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11. This is the PyTorch
definition that every kernel must equal bit for bit. Words are 32 bits wide and held in int64, whose
wrapping product keeps the high half recoverable.

A *field* is a matrix of random words addressed by row words and a column: the counter is (row
words..., column // 4, 0...), the lane column % 4. Any rectangle of a field can be computed alone,
so every layout of a run sees the same weights and dropout masks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
# Counters of random words computed at once, and the bytes of one (six of int64). On a CPU for each
# thread (torch gives a thread no less), whose part of the working set stays in its core's cache; a
# GPU wants few launches instead.
DROPOUT_COUNTERS = {"cpu": 1 << 15, "cuda": 1 << 22}

# two numbers of 32 bits, or 0-dimensional int64 tensors
Key = tuple[int, int] | tuple[Tensor, Tensor]


def key(seed: int, *names: object) -> Key:
    """The 64-bit key of a stream: a digest of the seed and the stream's name."""
    digest = hashlib.blake2b("/".join(map(str, (seed, *names))).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def philox4x32(counter: Sequence[Tensor], key: Key) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random 32-bit words (int64 tensors of the broadcast shape) for a counter of four
    words.
    """
    c0, c1, c2, c3 = (word.clone() for word in torch.broadcast_tensors(*counter))
    k0, k1 = key
    for _ in range(ROUNDS):  # in place: the chunk's few buffers stay in cache
        p0, p1 = c0.mul_(MULTIPLIERS[0]), c2.mul_(MULTIPLIERS[1])
        # c1 and c3 keep their upper halves: the masks take them off a round later
        high0, high1 = p0 >> 32, p1 >> 32
        c0, c2 = (
            high1.bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(MASK),
            high0.bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(MASK),
        )
        c1, c3 = p1, p0
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK, (k1 + KEY_STEPS[1]) & MASK
    return c0, c1.bitwise_and_(MASK), c2, c3.bitwise_and_(MASK)


def fill(
    out: Tensor,
    key: Key,
    rows: Sequence[Tensor],
    first_column: int,
    transform: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    blocks: Tensor | None = None,
) -> None:
    """Write the rectangle [rows, first_column : first_column + C] of a field, each word passed
    through `transform`, into out [R, C].

    `rows` are one to three int64 tensors [R], the row words; `transform` maps the four lanes to
    four tensors of values. `blocks` [ceil(C / 4)]: columns divided by 4, of each four of them,
    where these do not lie side by side; first_column is 0 then.
    """
    columns, skip = out.shape[1], first_column % 4
    if blocks is None:
        last_block = -(-(first_column + columns) // 4)
        blocks = torch.arange(first_column // 4, last_block, device=out.device)
    for part, words in _words(out, key, rows, blocks):
        values = torch.stack(list(transform(words)), dim=-1)  # [rows, blocks, lanes]
        part.copy_(values.flatten(1)[:, skip : skip + columns])


def _words(
    out: Tensor, key: Key, rows: Sequence[Tensor], blocks: Tensor
) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]]:
    """Yield pieces of the rows of out [R, C], each with the words at its counters (row words...,
    block, 0...): as many rows as keep the words in the cache, where they are written out.
    """
    row_count, step = out.shape[0], max(1, out.shape[0])
    if not torch.compiler.is_compiling() and not out.is_meta:
        threads = 1 if out.is_cuda else torch.get_num_threads()
        step = max(1, DROPOUT_COUNTERS[out.device.type] * threads // len(blocks))
    blocks = blocks.unsqueeze(0)
    zeros = [torch.zeros_like(blocks)] * (3 - len(rows))
    for start in range(0, row_count, step):
        some = slice(start, min(start + step, row_count))
        counters = [word[some, None] for word in rows]
        yield out[some], philox4x32([*counters, blocks, *zeros], key)


def _box_muller(lanes: Sequence[Tensor]) -> list[Tensor]:
    """Four words -> four standard normals in float64; equal on every CPU after rounding to
    float32.
    """
    normals = []
    for u, v in ((lanes[0], lanes[1]), (lanes[2], lanes[3])):
        radius = u.double().add_(0.5).div_(2**32).log_().mul_(-2).sqrt_()
        angle = v.double().mul_(2 * math.pi / 2**32)
        normals += [angle.cos().mul_(radius), angle.sin_().mul_(radius)]
    return normals


def normal(out: Tensor, key: Key, first_row: int, first_column: int, std: float) -> None:
    """Fill out [R, C] with the rectangle at (first_row, first_column) of a normal(0, std) matrix:
    drawn in float64, rounded once to float32.
    """
    rows = torch.arange(first_row, first_row + out.shape[0], device=out.device)
    fill(
        out,
        key,
        [rows],
        first_column,
        lambda lanes: [x.mul_(std).float() for x in _box_muller(lanes)],
    )


def keep_mask(
    key: Key, rows: Sequence[Tensor], columns: int, drop: float, blocks: Tensor | None = None
) -> Tensor:
    """Attention's dropout mask [R, columns] (bool, True = keep): an element is dropped when its
    word is below drop x 2^32. `blocks`: see `fill`.
    """
    out = torch.empty(rows[0].shape[0], columns, dtype=torch.bool, device=rows[0].device)
    threshold = round(drop * 2**32)
    fill(out, key, rows, 0, lambda lanes: [lane >= threshold for lane in lanes], blocks)
    return out


def keep_mask_of_halves(key: Key, rows: Sequence[Tensor], columns: int, drop: float) -> Tensor:
    """Hidden states' dropout mask [R, columns] (bool, True = keep), by half the words.

    The counter of a column is (row words..., column // 8, 0...), its lane column % 8: the lower
    and the upper half of word 0, of word 1, ..., as numbers from -2^15 to 2^15 - 1. It is dropped
    when that is below `lowest_kept(drop)`.
    """
    device = rows[0].device
    out = torch.empty(rows[0].shape[0], columns, dtype=torch.bool, device=device)
    blocks = torch.arange(-(-columns // 8), device=device)
    for part, (w0, w1, w2, w3) in _words(out, key, rows, blocks):
        # two words of 64 bits, in memory eight numbers of 16 side by side
        words = torch.stack([w1.bitwise_left_shift_(32) | w0, w3.bitwise_left_shift_(32) | w2], -1)
        part.copy_((words.flatten(1).view(torch.int16) >= lowest_kept(drop))[:, :columns])
    return out


def lowest_kept(drop: float) -> int:
    """The least signed number of 16 bits that is kept: drop x 2^16 of them are below."""
    return min(round(drop * 2**16), 2**16 - 1) - 2**15


def uniform(out: Tensor, key: Key, rows: Sequence[Tensor]) -> None:
    """Fill out [R, C] with numbers of [0, 1), of 24 bits each so that fp32 holds them: the rows
    `rows`, see `fill`.
    """
    fill(out, key, rows, 0, lambda lanes: [(lane >> 8).float() / 2**24 for lane in lanes])
