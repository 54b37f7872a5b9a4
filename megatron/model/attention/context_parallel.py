"""Context parallelism (CP): each rank of an axis holds some positions of every sample, and only
attention reads what the others hold.

Which positions a rank holds is a function of the length, the number of ranks and the documents
(`places_of`): every rank computes it, and nothing is exchanged. A sequence without documents is cut
into 2C chunks, of which rank r holds r and 2C - 1 - r, so that all ranks see as many pairs of
queries and keys ("zig-zag"). Where attention ends at documents' bounds, blocks of up to 128
positions are given out by the pairs that they see.

    allgather    keys and values of all positions are gathered (Grattafiori et al., "The Llama 3
                 herd of models", 2024); in the backward pass their gradients are reduce-scattered.
                 Any mask and any number of heads; 2 s b g d elements live while attention runs.
    a2a          each rank gives up its part of the sequence for a part of the heads (Jacobs et al.,
                 "DeepSpeed Ulysses", 2023): attention sees all positions of n / C heads. Key/value
                 heads are repeated where there are fewer than ranks.
    p2p          keys and values go round the ranks (ring_attention.py): no rank ever holds all.
    a2a+p2p      A neighbouring ranks exchange heads for positions, and C / A such groups make a
                 ring: each rank then computes n / A heads of a group's positions.

Ranks that exchange heads share one of these parts, each some of its positions in a row. Gathered
keys are put in their natural order, so that masks and dropout are those of the whole sequence.

s length of the sample, C ranks, b batch, n query heads, g key/value heads of this tensor-parallel
rank, d head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron.distributed.collectives import all_gather, all_to_all, reduce_scatter
from megatron.distributed.groups import Axis
from megatron.model.linear_map import linear_map
from megatron.model.model_parallel import ContextParallel

BLOCK = 128  # positions that go together where documents are masked, at most
# work of the busiest rank, as a multiple of the mean, that is good enough; and how many exchanges
# of blocks a rank are tried to come there
EVEN, EXCHANGES = 1.002, 8


class Places(NamedTuple):
    """The positions of a micro-batch on the ranks of a context-parallel axis."""

    own: Tensor  # [s / C] of this rank, ascending
    order: Tensor  # [s] of all ranks, one rank behind the other
    inverse: Tensor  # [s] where each position is in `order`

    @classmethod
    def of(cls, places: Tensor, cp: ContextParallel) -> Places:
        """Of `places_of_ranks`'s answer [C, s / C], on its device."""
        order = places.flatten()  # as a gather brings the positions
        return cls(places[cp.axis.rank], order, order.argsort())


def places_of_ranks(
    length: int,
    cp: ContextParallel,
    document_starts: np.ndarray | None = None,
    window: int | None = None,
) -> np.ndarray:
    """The positions [C, length / C] of each rank of an axis, ascending, see `places_of`."""
    # The ranks that exchange heads share a part: each has some of its positions in a row.
    parts = places_of(length, cp.size // cp.heads.size, document_starts, window)
    return parts.reshape(cp.size, -1)  # the ranks that exchange heads are neighbours


def places_of(
    length: int, size: int, document_starts: np.ndarray | None = None, window: int | None = None
) -> np.ndarray:
    """The positions [size, length / size] of each of `size` parts, ascending, of samples of this
    length. `document_starts` [b, length], where attention ends at them: position at which each
    token's document begins.
    """
    if document_starts is None:
        # Zig-zag: chunk r and its mirror image 2C - 1 - r see as many pairs together for every r.
        chunks = np.arange(length).reshape(2 * size, -1)
        return np.concatenate([chunks[:size], chunks[::-1][:size]], axis=1)
    each = length // size
    block = min(BLOCK, each & -each)  # the largest power of two that divides a rank's positions
    # keys that each query sees, from its document's beginning on, [b, length]
    pairs = np.arange(length) - document_starts + 1
    if window is not None:
        pairs = np.minimum(pairs, window)
    # Every sample of a micro-batch is cut alike, so their work is added up, block by block.
    work = pairs.reshape(len(pairs), -1, block).sum(axis=(0, 2))
    blocks = np.sort(_shares(work, size), axis=1)
    return (blocks[:, :, None] * block + np.arange(block)).reshape(size, each)


def _shares(work: np.ndarray, size: int) -> np.ndarray:
    """[size, blocks / size]: as many blocks for each rank, and about as much work. The heaviest
    come first, each to the rank with the least work so far; then the ranks with the most and the
    least exchange blocks while that brings them closer.
    """
    # longest processing time first (Graham 1969)
    taken: list[list[int]] = [[] for _ in range(size)]
    loads = np.zeros(size)
    for block in np.argsort(-work, kind="stable"):
        rank = loads.argmin()
        taken[rank].append(block)
        is_full = len(taken[rank]) == len(work) // size
        loads[rank] = np.inf if is_full else loads[rank] + work[block]
    shares = np.array(taken)

    for _ in range(EXCHANGES * size):
        totals = work[shares].sum(1)
        if totals.max() <= EVEN * totals.mean():
            break
        most, least = shares[totals.argmax()], shares[totals.argmin()]
        # The best exchange moves half of the gap.
        gap = totals.max() - totals.min()
        moved = work[most][:, None] - work[least]
        one, other = np.unravel_index(np.abs(moved - gap / 2).argmin(), moved.shape)
        if not 0 < moved[one, other] < gap:
            break
        most[one], least[other] = least[other], most[one]
    return shares


def _gather(x: Tensor, places: Places, axis: Axis) -> Tensor:
    """x [s / C, ...] of each rank -> [s, ...] in the natural order."""
    return all_gather(x, axis).index_select(0, places.inverse)


def _scatter(dy: Tensor, places: Places, axis: Axis) -> Tensor:
    """The sum of the ranks' dy [s, ...] of this rank's positions [s / C, ...]."""
    return reduce_scatter(dy.index_select(0, places.order), axis)


def gather_keys(k: Tensor, v: Tensor, places: Places, axis: Axis) -> tuple[Tensor, Tensor]:
    """Keys and values [s / C, b, g, d] of this rank -> [s, b, g, d], in one collective."""
    # Keys and values travel as one tensor [s / C, 2, b, g, d].
    both = torch.stack((k, v)).transpose(0, 1)
    whole_k, whole_v = linear_map(both, _gather, _scatter, places, axis).unbind(1)
    return whole_k, whole_v


def _to_sequence(x: Tensor, axis: Axis) -> Tensor:
    """[s / C, b, C, m, d] -> [s, b, m, d]: of all positions the heads of this rank."""
    return all_to_all(x.movedim(2, 0).contiguous(), axis).flatten(0, 1)


def _to_heads(x: Tensor, axis: Axis) -> Tensor:
    """[s, b, m, d] -> [s / C, b, C, m, d]: of the positions of this rank all heads."""
    return all_to_all(x.unflatten(0, (axis.size, -1)), axis).movedim(0, 2)


def heads_for_sequence(
    q: Tensor, k: Tensor, v: Tensor, axis: Axis
) -> tuple[Tensor, Tensor, Tensor]:
    """q [s / A, b, n, d], k and v [s / A, b, g, d] of the positions of one of A ranks -> those of
    all their positions, rank by rank, of n / A query heads and the key/value heads that they read,
    at least one. One collective.
    """
    size = axis.size
    if k.shape[2] < size:
        # Each rank needs at least one key/value head.
        k, v = (x.repeat_interleave(size // x.shape[2], 2) for x in (k, v))
    # [s / A, b, A, heads of a rank, d]: one message to each rank carries all three.
    parts = [x.unflatten(2, (size, -1)) for x in (q, k, v)]
    whole = linear_map(torch.cat(parts, 3), _to_sequence, _to_heads, axis)
    q, k, v = whole.split([part.shape[3] for part in parts], 2)
    return q, k, v


def sequence_for_heads(x: Tensor, axis: Axis) -> Tensor:
    """The result [s, b, n / A, d] of attention -> [s / A, b, n, d]."""
    return linear_map(x, _to_heads, _to_sequence, axis).flatten(2, 3)
