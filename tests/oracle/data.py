"""Which tokens sample i of a run is: .bin/.idx files, the computed order, blends, documents.
Definitions: docs/data.md.

b batch, s sequence length.
"""

from __future__ import annotations

import hashlib
import json
import struct
from argparse import Namespace
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from oracle.model import Batch

SPLITS = ("train", "valid", "test")
PATTERN = 65536
WORD = (1 << 64) - 1


def mix(x: int) -> int:
    """SplitMix64's step on 64-bit words (Steele, Lea, Flood 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)


def key_of(*parts: object) -> int:
    """BLAKE2b with 8 bytes of the parts, written as a Python tuple; little-endian."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


class Corpus:
    """The token ids of a .bin file and the lengths of its sequences."""

    def __init__(self, prefix: str):
        with open(f"{prefix}.idx", "rb") as file:
            index = file.read()
        assert index[:9] == b"MMIDIDX\0\0"
        _, code, sequences, _ = struct.unpack_from("<QBQQ", index, 9)
        self.lengths = np.frombuffer(index, "<i4", sequences, 34)
        offsets = np.frombuffer(index, "<i8", sequences, 34 + 4 * sequences)
        self.tokens = np.fromfile(
            f"{prefix}.bin", {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}[code]
        )
        probes = (
            np.arange(sequences)
            if sequences <= 1024
            else np.linspace(0, sequences - 1, 1024).astype(int)
        )
        digest = hashlib.blake2b(
            index[:34] + struct.pack("<QQ", len(index), self.tokens.nbytes), digest_size=16
        )
        digest.update(self.lengths[probes].tobytes() + offsets[probes].tobytes())
        for start in np.linspace(0, max(len(self.tokens) - 512, 0), 64).astype(int):
            digest.update(self.tokens[start : start + 512].tobytes())
        self.fingerprint = digest.hexdigest()


class Reader(Protocol):
    """Anything that knows the s + 1 tokens of sample i."""

    def sample(self, i: int) -> np.ndarray: ...


class Stream:
    """Sequences [first, stop) of a corpus as endless samples in a separate order."""

    def __init__(self, corpus: Corpus, first: int, stop: int, s: int, seed: int):
        begin = int(corpus.lengths[:first].sum())
        self.tokens = corpus.tokens[begin : int(corpus.lengths[:stop].sum())].astype(np.int64)
        self.total, self.s = len(self.tokens), s
        self.identity = (corpus.fingerprint, begin, self.total, s, seed)
        self.key = key_of(*self.identity)

    def sample(self, i: int) -> np.ndarray:
        epoch, j = divmod(i, self.total // self.s)
        key = mix((self.key + mix(epoch)) & WORD)
        start = permute(j, self.total // self.s, key) * self.s + mix(key) % self.s
        return self.tokens[(start + np.arange(self.s + 1)) % self.total]


def permute(j: int, n: int, key: int) -> int:
    """Six Feistel rounds on a grid of a x b >= n places, repeated until the result is below n."""
    a = next(a for a in range(n + 1) if a * a >= n)
    b = -(-n // a)
    while True:
        left, right = divmod(j, b)
        for r in range(0, 6, 2):
            left = (left + mix(right ^ mix((key + r) & WORD)) % a) % a
            right = (right + mix(left ^ mix((key + r + 1) & WORD)) % b) % b
        j = left * b + right
        if j < n:
            return j


class Mock:
    """Computed documents of 100 tokens: progressions over the vocabulary, every twentieth token at
    random.
    """

    def __init__(self, c: Namespace, seed: int, split: str):
        self.c, self.key = c, key_of("mock", seed, split)

    def token(self, position: int) -> int:
        document, inside = divmod(position, 100)
        if inside == 99:
            return self.c.eod
        drawn, ordinary = mix((self.key + mix(document)) & WORD), self.c.vocabulary - 1
        token = int(ordinary * ((drawn >> 11) / 2**53) ** 3) + inside * (1 + drawn % 3)
        noise = mix((mix(self.key) + position) & WORD)
        token = (noise >> 20 if noise % 20 == 0 else token) % ordinary
        return token + (token >= self.c.eod)

    def sample(self, i: int) -> np.ndarray:
        return np.array(
            [self.token(i * self.c.seq_length + k) for k in range(self.c.seq_length + 1)]
        )


def shares_of(weights: list[float]) -> list[int]:
    """Weights in whole parts of 65,536, by largest remainder; of equal remainders the first."""
    exact = [weight / sum(weights) * PATTERN for weight in weights]
    shares = [int(x) for x in exact]
    for d in sorted(range(len(exact)), key=lambda d: shares[d] - exact[d])[: PATTERN - sum(shares)]:
        shares[d] += 1
    return shares


class Source(NamedTuple):
    """A stream in a blend: its share and the first of its samples that the blend reads."""

    stream: Stream
    share: int
    first_index: int = 0


class Blend:
    """From sample `first` of the run on: turn k of a source with share q may come in slots [floor(k
    P / q), ceil((k + 1) P / q)) of the pattern; each slot takes the open turn with the earliest
    deadline, of equal ones the first source's.
    """

    def __init__(self, sources: list[Source], first: int = 0):
        self.sources, self.first = sources, first
        self.read = [0] * len(sources)  # samples given out of each source
        self.placed: list[tuple[int, int]] = []  # source and index of each slot so far

    def _next(self) -> None:
        slot, period = len(self.placed) % PATTERN, len(self.placed) // PATTERN
        turns = [
            (k - period * source.share, d)
            for d, (k, source) in enumerate(zip(self.read, self.sources, strict=True))
            if source.share
        ]
        ready = [
            (-(-(k + 1) * PATTERN // self.sources[d].share), d)
            for k, d in turns
            if k * PATTERN // self.sources[d].share <= slot
        ]
        _, d = min(ready)
        self.placed.append((d, self.sources[d].first_index + self.read[d]))
        self.read[d] += 1

    def sample(self, i: int) -> np.ndarray:
        while len(self.placed) <= i - self.first:
            self._next()
        d, index = self.placed[i - self.first]
        return self.sources[d].stream.sample(index)

    def reached(self, consumed: int) -> dict[tuple, int]:
        """The next sample of each source, by its identity, when that number of samples of the run
        have been read.
        """
        if consumed > self.first:
            self.sample(consumed - 1)
        found = {source.stream.identity: source.first_index for source in self.sources}
        for d, index in self.placed[: consumed - self.first]:
            found[self.sources[d].stream.identity] = index + 1
        return found


def pairs(values: list[str]) -> list[tuple[float | None, str]]:
    """`weight prefix weight prefix` or prefixes alone."""
    try:
        return [
            (float(weight), prefix)
            for weight, prefix in zip(values[::2], values[1::2], strict=True)
        ]
    except ValueError:
        return [(None, prefix) for prefix in values]


def streams(c: Namespace, split: str) -> list[tuple[float | None, str, Stream]]:
    """(weight, prefix, stream) of each file of a split, without those of weight 0."""
    paths = pairs(c.data_path or getattr(c, f"{split}_data_path") or [])
    seed = c.seed if split == "train" else 0
    parts = [Fraction(part) for part in c.split.split(",")]
    k, found = SPLITS.index(split), []
    for weight, prefix in paths:
        corpus, first, stop = Corpus(prefix), 0, None
        n = stop = len(corpus.lengths)
        if c.data_path:
            first, stop = (round(sum(parts[:m]) / sum(parts) * n) for m in (k, k + 1))
        if weight != 0 and stop > first:
            found.append((weight, prefix, Stream(corpus, first, stop, c.seq_length, seed)))
    return found


def training_data(
    c: Namespace, before: Blend | None, known: dict[tuple, int], consumed: int
) -> Reader:
    """What a run trains on, after the blend that it read `before` and with the next samples of all
    sources `known` so far.
    """
    if c.mock_data:
        return Mock(c, c.seed, "train")
    found = streams(c, "train")
    shares = shares_of([stream.total if weight is None else weight for weight, _, stream in found])
    now = [
        Source(stream, share, known.get(stream.identity, 0))
        for (_, _, stream), share in zip(found, shares, strict=True)
    ]
    if before is not None and named(before.sources) == named(now):
        return before
    return Blend(now, consumed)


def named(sources: list[Source]) -> list[tuple]:
    """What makes two blends the same one."""
    return [(source.stream.identity, source.share) for source in sources]


class HeldOut(NamedTuple):
    """A source that is evaluated: the name that its loss is logged under, its part in the mean over
    its split's sources, and the bytes of text of a token where a sidecar has it.
    """

    name: str
    reader: Reader
    weight: float = 1.0
    bytes_per_token: float | None = None


def held_out_data(c: Namespace, split: str, title: str) -> list[HeldOut]:
    """What is evaluated by --eval-iters and the files of a split."""
    if c.eval_iters == 0:
        return []
    if c.mock_data:
        return [HeldOut(title, Mock(c, 0, title))]
    return [
        HeldOut(
            prefix.split("/")[-1].removesuffix("_text_document"),
            stream,
            stream.total if weight is None else weight,
            bytes_per_token(prefix),
        )
        for weight, prefix, stream in streams(c, split)
    ]


def bytes_per_token(prefix: str) -> float | None:
    """What a corpus' sidecar holds for all of it."""
    sidecar = Path(f"{prefix}.json")
    if not sidecar.is_file():
        return None
    counts = json.loads(sidecar.read_text())
    return counts["text_bytes"] / counts["tokens"]


def batch_of(c: Namespace, reader: Reader, first: int, count: int) -> Batch:
    """Samples first .. first + count - 1, with masks and positions as --eod-mask-loss,
    --reset-position-ids.
    """
    windows = torch.from_numpy(np.stack([reader.sample(i) for i in range(first, first + count)]))
    tokens = windows[:, :-1]
    positions = torch.arange(c.seq_length).repeat(count, 1)
    starts = torch.zeros_like(tokens)
    for row in range(count):
        for t in range(1, c.seq_length):  # an end of document belongs to the document that it ends
            starts[row, t] = t if tokens[row, t - 1] == c.eod else starts[row, t - 1]
    mask = (
        (tokens != c.eod).double()
        if c.eod_mask_loss
        else torch.ones(tokens.shape, dtype=torch.float64)
    )
    return Batch(
        np.arange(first, first + count),
        tokens,
        windows[:, 1:],
        mask,
        positions - starts if c.reset_position_ids else positions,
        starts,
    )
