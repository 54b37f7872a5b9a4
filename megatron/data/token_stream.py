"""The computed data order: sample k of a stream of T tokens, without building an index.

With s tokens to a sample and n = floor(T / s), sample j of epoch e is the s + 1 tokens that start
at permute(j; seed, e) * s + offset(seed, e), positions taken modulo T, offset uniform in [0, s). So
every token is a target at most once an epoch, and exactly T - n s are not.
"""

from __future__ import annotations

import hashlib

import numpy as np

from megatron.data.indexed_dataset import DataError, IndexedDataset

ROUNDS = 6


def mix(value: np.ndarray | np.uint64) -> np.ndarray:
    """A bijection of uint64 that scatters neighbours: one step of SplitMix64 (Steele, Lea, Flood
    2014).
    """
    with np.errstate(over="ignore"):
        value = value + np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))  # type: ignore[return-value]


def key_of(*parts: object) -> np.uint64:
    """A 64-bit key from printable values, equal on every machine."""
    return np.uint64(
        int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")
    )


def permute(index: np.ndarray, n: int, key: np.ndarray) -> np.ndarray:
    """A keyed bijection of [0, n): Feistel rounds on a grid of a x b >= n places, walked on while
    outside [0, n).

    index [m] int64 in [0, n), key [m] uint64 (elements with equal keys share one bijection) -> [m]
    int64.
    """
    side = int(np.ceil(np.sqrt(n)))
    side += side * side < n  # the root was rounded
    a = np.uint64(side)
    b = np.uint64(-(-n // side))
    keys = [mix(key + np.uint64(r)) for r in range(ROUNDS)]
    result = index.astype(np.uint64)
    pending = np.arange(len(result))
    while len(pending):
        left = result[pending] // b
        right = result[pending] % b
        for r in range(0, ROUNDS, 2):
            left = (left + mix(right ^ keys[r][pending]) % a) % a
            right = (right + mix(left ^ keys[r + 1][pending]) % b) % b
        result[pending] = left * b + right
        pending = pending[result[pending] >= np.uint64(n)]
    return result.astype(np.int64)


class TokenStream:
    """The sequences [first, stop) of a dataset as one shuffled, endless source of samples.

    identity names the order: two streams with equal identity give equal samples (content, range, s
    and seed; not the path). Raises DataError when the range holds fewer than s + 1 tokens.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        first: int,
        stop: int,
        seq_length: int,
        seed: int,
        vocab_size: int,
    ):
        self.dataset = dataset
        self.vocab_size = vocab_size
        self.seq_length = seq_length
        self.begin = dataset.first_token(first)
        self.num_tokens = dataset.first_token(stop) - self.begin
        if self.num_tokens < seq_length + 1:
            raise DataError(
                f"{dataset.prefix}: its part for this split, sequences [{first}, {stop}) of "
                f"{dataset.num_sequences}, "
                f"holds {self.num_tokens} tokens, one sample needs seq-length + 1 = "
                f"{seq_length + 1}: change --split, shorten --seq-length or add data"
            )
        self.samples = self.num_tokens // seq_length  # n: samples of one epoch
        self.weight: float = self.num_tokens  # in a blend, where none is given
        order = (dataset.fingerprint, self.begin, self.num_tokens, seq_length, seed)
        self.key = key_of(*order)
        self.identity = f"{int(key_of('identity', *order)):016x}"
        # names the tokens, in whatever order
        self.content = f"{int(key_of('content', *order[:3])):016x}"

    def places(self, index: np.ndarray) -> np.ndarray:
        """Position in the stream at which each sample begins: index [m] int64 >= 0 -> [m] int64 in
        [0, T).
        """
        epoch = index // self.samples
        j = index % self.samples
        keys = mix(self.key + mix(epoch.astype(np.uint64)))
        offset = (mix(keys) % np.uint64(self.seq_length)).astype(np.int64)
        return (permute(j, self.samples, keys) * self.seq_length + offset) % self.num_tokens

    def read(self, index: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
        """Write sample index[i] (s + 1 token ids) to out[rows[i]]. Raises DataError for an id
        outside the vocabulary.
        """
        tokens = self.dataset.tokens
        begin = self.begin
        total = self.num_tokens
        wanted = self.seq_length + 1
        places = self.places(index).tolist()
        for place, row in zip(places, rows.tolist()):
            inside = min(wanted, total - place)
            out[row, :inside] = tokens[begin + place : begin + place + inside]
            if inside < wanted:
                out[row, inside:] = tokens[begin : begin + wanted - inside]
        taken = out[rows]
        if int(taken.max()) >= self.vocab_size or int(taken.min()) < 0:
            # Name the first such id; a sample that reaches the end continues at the beginning.
            for place in (*places, 0):
                at, stop = begin + place, begin + min(place + wanted, total)
                self.dataset.refuse_foreign_ids(tokens[at:stop], at, self.vocab_size)
