"""kernels/philox.py inside Triton kernels: the same words, the same dropout masks, bit for bit.

Pass a key's two words and the threshold to the kernel as arguments annotated `tl.uint32` (what
Triton would choose by itself, i32 or i64, depends on the value), and name them in
`do_not_specialize`. The threshold is round(drop * 2**32) for attention; for hidden states, whose
elements take half a word each, it is lowest_kept(drop) * 2**16, annotated `tl.int32`.

About 70 integer instructions make four words, whose four decisions travel as one integer until they
meet the values they decide about.
"""

from __future__ import annotations

from megatron.kernels.lang import jit, tl


@jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Philox4x32-10: four uint32 words for counters c0..c3 (tensors of one shape, or of shapes that
    broadcast) under the key (k0, k1).
    """
    c0, c1 = tl.broadcast(c0.to(tl.uint32), c1.to(tl.uint32))
    c2, c3 = tl.broadcast(c2.to(tl.uint32), c3.to(tl.uint32))
    c0, c2 = tl.broadcast(c0, c2)
    c1, c3 = tl.broadcast(c1, c3)
    k0, k1 = k0.to(tl.uint32), k1.to(tl.uint32)
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = p1.to(tl.uint32), p0.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@jit
def keep_bits(c0, c1, c2, c3, k0, k1, threshold):
    """int32 of the counters' broadcast shape: bit i is set where lane i, an element of the four at
    this counter, is kept by dropout.
    """
    w0, w1, w2, w3 = philox4x32(c0, c1, c2, c3, k0, k1)
    low = threshold.to(tl.uint32)
    return (
        (w0 >= low).to(tl.int32)
        | (w1 >= low).to(tl.int32) << 1
        | (w2 >= low).to(tl.int32) << 2
        | (w3 >= low).to(tl.int32) << 3
    )


@jit
def lanes_to_columns(bits, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """keep_bits [ROWS, COLUMNS / 4] -> keep mask [ROWS, COLUMNS], bool."""
    lanes = bits[:, :, None] >> tl.arange(0, 4)[None, None, :]
    return tl.reshape(lanes & 1, [ROWS, COLUMNS]) != 0


@jit
def lanes_to_rows(bits, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """keep_bits [ROWS / 4, COLUMNS] -> keep mask [ROWS, COLUMNS], bool: the transposed tile, keys
    or hidden elements along the rows.
    """
    lanes = bits[:, None, :] >> tl.arange(0, 4)[None, :, None]
    return tl.reshape(lanes & 1, [ROWS, COLUMNS]) != 0


@jit
def keep_two(word, threshold):
    """Two bits: whether the lower and the upper half of a word, as signed numbers, are kept."""
    upper = word.to(tl.int32, bitcast=True)
    return (upper << 16 >= threshold).to(tl.int32) | (upper >= threshold).to(tl.int32) << 1


@jit
def keep_tile(
    word0, word1, first_column, k0, k1, threshold, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Keep mask [ROWS, COLUMNS] of `philox.keep_mask_of_halves(key, [word0, word1], ...)` from
    first_column on, a multiple of 8: row words [ROWS].
    """
    block = first_column // 8 + tl.arange(0, COLUMNS // 8)
    zero = tl.zeros([1, 1], tl.uint32)
    w0, w1, w2, w3 = philox4x32(word0[:, None], word1[:, None], block[None, :], zero, k0, k1)
    bits = keep_two(w0, threshold) | keep_two(w1, threshold) << 2
    bits |= keep_two(w2, threshold) << 4 | keep_two(w3, threshold) << 6
    lanes = bits[:, :, None] >> tl.arange(0, 8)[None, None, :]
    return tl.reshape(lanes & 1, [ROWS, COLUMNS]) != 0


@jit
def keep_scores(
    sample, head, query, fours, k0, k1, threshold, QUERIES: tl.constexpr, KEYS: tl.constexpr
):
    """Keep mask [QUERIES, KEYS] of attention probabilities: row words (sample, head, query
    [QUERIES]); `fours` [KEYS / 4] are the positions of each four keys, divided by 4.
    """
    zero = tl.zeros([1, 1], tl.uint32)
    sample, head = zero + sample.to(tl.uint32), zero + head.to(tl.uint32)
    return lanes_to_columns(
        keep_bits(sample, head, query[:, None], fours[None, :], k0, k1, threshold), QUERIES, KEYS
    )


@jit
def drop_of_head(samples, b, head, k0, k1, threshold, inverse_keep, DROPOUT: tl.constexpr):
    """What decides which scores of a head of the model are dropped in sample b: (sample's id, head,
    k0, k1, threshold, 1 / (1 - drop)), with a sample of 0 where there is no dropout.
    """
    sample = tl.load(samples + b) if DROPOUT else 0
    return sample, head, k0, k1, threshold, inverse_keep


@jit
def drop_scores(x, drop, query, fours):
    """x [queries, keys] as dropout leaves it: what is kept times 1 / (1 - drop). `drop` is what
    drop_of_head gives.
    """
    sample, head, k0, k1, threshold, inverse_keep = drop
    keep = keep_scores(sample, head, query, fours, k0, k1, threshold, x.shape[0], x.shape[1])
    return tl.where(keep, x * inverse_keep, 0.0)


@jit
def drop_scores_transposed(x, y, drop, query, fours):
    """x and y [keys, queries] as dropout leaves them, both by the mask of one tile of scores."""
    sample, head, k0, k1, threshold, inverse_keep = drop
    keep = keep_scores_transposed(
        sample, head, query, fours, k0, k1, threshold, x.shape[0], x.shape[1]
    )
    return tl.where(keep, x * inverse_keep, 0.0), tl.where(keep, y * inverse_keep, 0.0)


@jit
def keep_scores_transposed(
    sample, head, query, fours, k0, k1, threshold, KEYS: tl.constexpr, QUERIES: tl.constexpr
):
    """The transpose [KEYS, QUERIES] of keep_scores, without moving a tile."""
    zero = tl.zeros([1, 1], tl.uint32)
    sample, head = zero + sample.to(tl.uint32), zero + head.to(tl.uint32)
    return lanes_to_rows(
        keep_bits(sample, head, query[None, :], fours[:, None], k0, k1, threshold), KEYS, QUERIES
    )
