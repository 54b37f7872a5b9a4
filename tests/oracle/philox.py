"""Philox4x32-10 from its publication, and what a run draws with it: initial weights and dropout
masks.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC11. Keys and counters:
docs/numerics.md, "Random numbers".
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)


def philox(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Four random words (uint64 below 2^32) of each counter [..., 4]."""
    a, b, c, d = np.moveaxis(counter.astype(np.uint64), -1, 0)
    k0, k1 = (np.uint64(word) for word in key)
    for _ in range(10):
        first = np.uint64(0xD2511F53) * a
        second = np.uint64(0xCD9E8D57) * c
        a, b, c, d = (second >> HALF) ^ b ^ k0, second & LOW, (first >> HALF) ^ d ^ k1, first & LOW
        k0 = (k0 + np.uint64(0x9E3779B9)) & LOW
        k1 = (k1 + np.uint64(0xBB67AE85)) & LOW
    return np.stack([a, b, c, d], axis=-1)


def key_of(seed: int, name: str) -> tuple[int, int]:
    """The key of a stream: BLAKE2b with 8 bytes of `seed/name`, as two little-endian words."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def field(key: tuple[int, int], rows: list[np.ndarray], columns: int) -> np.ndarray:
    """Random words [..., columns] for row words of one shape [...]: counter (rows..., column // 4,
    0...), lane column % 4.
    """
    shape = np.broadcast_shapes(*(row.shape for row in rows))
    counter = np.zeros((*shape, -(-columns // 4), 4), np.uint64)
    for place, row in enumerate(rows):
        counter[..., place] = np.broadcast_to(row, shape)[..., None]
    counter[..., len(rows)] = np.arange(counter.shape[-2])
    return philox(counter, key).reshape(*shape, -1)[..., :columns]


def normal(seed: int, name: str, shape: tuple[int, int], std: float) -> torch.Tensor:
    """Box-Muller of the matrix's words, pair by pair, rounded once to fp32; float64 [rows,
    columns].
    """
    rows, columns = shape
    words = field(key_of(seed, name), [np.arange(rows)], -(-columns // 4) * 4).astype(np.float64)
    radius = np.sqrt(-2 * np.log((words[:, 0::2] + 0.5) / 2**32))
    angle = 2 * np.pi * words[:, 1::2] / 2**32
    pairs = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1)
    return torch.from_numpy(
        (std * pairs.reshape(rows, -1)[:, :columns]).astype(np.float32).astype(np.float64)
    )


def jitter(seed: int, name: str, rows: list[np.ndarray], columns: int, eps: float) -> torch.Tensor:
    """Numbers from 1 - eps to 1 + eps in fp32, by the upper 24 bits of words."""
    bits = field(key_of(seed, name), rows, columns) >> np.uint64(8)
    share = torch.from_numpy(bits.astype(np.float32)) / 2**24
    return (share * (2 * eps) + (1 - eps)).double()


def dropout(
    seed: int, name: str, rows: list[np.ndarray], columns: int, share: float
) -> torch.Tensor:
    """The factor of each score: 0 where its word is below share x 2^32, else 1 / (1 - share)."""
    kept = field(key_of(seed, name), rows, columns) >= np.uint64(round(share * 2**32))
    return torch.from_numpy(kept / (1 - share))


def hidden_dropout(
    seed: int, name: str, rows: list[np.ndarray], columns: int, share: float
) -> torch.Tensor:
    """The factor of each channel: 0 where its number is among the lowest share of all signed ones
    of 16 bits, else 1 / (1 - share). Eight channels have a counter, whose words are cut in halves,
    the lower one first.
    """
    words = field(key_of(seed, name), rows, -(-columns // 8) * 4)
    halves = np.stack([words & np.uint64(0xFFFF), words >> np.uint64(16)], axis=-1)
    numbers = halves.reshape(*words.shape[:-1], -1)[..., :columns].astype(np.uint16)
    kept = numbers.view(np.int16).astype(int) + 2**15 >= round(share * 2**16)
    return torch.from_numpy(kept / (1 - share))
