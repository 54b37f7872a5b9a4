"""The computed order: a bijection, every token a target at most once an epoch, the same samples
however they are asked for.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.data.written_data import write

from megatron.data.indexed_dataset import DataError, IndexedDataset
from megatron.data.token_stream import TokenStream, key_of, mix, permute


def corpus(prefix: Path, sizes: list[int]) -> IndexedDataset:
    """Sequences of the given sizes whose token at position t is t: a sample shows where it came
    from.
    """
    ids = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    return IndexedDataset(write(prefix, ids, sum(sizes), dtype="i4"))


def read(stream: TokenStream, index: np.ndarray) -> np.ndarray:
    out = np.full((len(index), stream.seq_length + 1), -1, np.int64)
    stream.read(index, np.arange(len(index)), out)
    return out


@settings(max_examples=60, deadline=None)
@given(n=st.one_of(st.integers(1, 400), st.integers(1, 50_000)), key=st.integers(0, 2**64 - 1))
def test_permute_is_a_bijection(n, key):
    assert np.array_equal(
        np.sort(permute(np.arange(n), n, np.full(n, key, np.uint64))), np.arange(n)
    )


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(10**6, 10**15), start=st.integers(0, 10**6 - 1000), key=st.integers(0, 2**64 - 1)
)
def test_permute_of_large_ranges_stays_inside_and_never_repeats(n, start, key):
    index = np.arange(start, start + 1000)
    image = permute(index, n, np.full(1000, key, np.uint64))
    assert image.min() >= 0 and image.max() < n and len(np.unique(image)) == 1000


def test_values_are_fixed():
    """A change of these silently reorders every run that is resumed."""
    # SplitMix64 of seeds 0 and 1
    assert mix(np.array([0, 1], np.uint64)).tolist() == [16294208416658607535, 10451216379200822465]
    order = permute(np.arange(10), 10, np.full(10, 7, np.uint64)).tolist()
    assert order == [6, 2, 8, 0, 1, 7, 5, 4, 9, 3]
    assert int(key_of("a", 1)) == 12444202034427101082


@settings(max_examples=40, deadline=None)
@given(
    total=st.integers(9, 700),
    s=st.integers(1, 40),
    epoch=st.integers(0, 5),
    seed=st.integers(0, 99),
)
def test_every_token_is_a_target_at_most_once_an_epoch(tmp_path_factory, total, s, epoch, seed):
    s = min(s, total - 1)
    stream = TokenStream(corpus(tmp_path_factory.mktemp("d") / "x", [total]), 0, 1, s, seed, total)
    n = total // s
    assert stream.samples == n
    samples = read(stream, np.arange(epoch * n, (epoch + 1) * n))
    # contiguous modulo T
    assert np.array_equal((samples[:, :1] + np.arange(s + 1)) % total, samples)
    targets = samples[:, 1:].ravel()
    assert len(np.unique(targets)) == len(targets) == n * s  # so exactly T - n s are not


def test_samples_do_not_depend_on_how_they_are_asked_for(tmp_path):
    stream = TokenStream(corpus(tmp_path / "x", [40] * 50), 0, 50, 7, 3, 2000)
    whole = read(stream, np.arange(3000))  # three windows of remembered places, eleven epochs
    order = np.random.default_rng(0).permutation(3000)[:390]
    fresh = TokenStream(stream.dataset, 0, 50, 7, 3, 2000)
    assert np.array_equal(
        np.concatenate([read(fresh, order[k : k + 13]) for k in range(0, 390, 13)]), whole[order]
    )


def test_too_few_tokens(tmp_path):
    data = corpus(tmp_path / "x", [5, 5])
    TokenStream(data, 0, 1, 4, 1, 10)
    with pytest.raises(
        DataError,
        match=r"x: .*sequences \[0, 1\) of 2, holds 5 tokens, one sample needs seq-length \+ 1 = 6",
    ):
        TokenStream(data, 0, 1, 5, 1, 10)


@pytest.mark.parametrize("vocab_size, byte", [(95, 95 * 4), (99, 99 * 4)])
def test_foreign_ids_are_named_before_use(tmp_path, vocab_size, byte):
    stream = TokenStream(corpus(tmp_path / "x", [100]), 0, 1, 10, 1, vocab_size)
    with pytest.raises(
        DataError,
        match=rf"x\.bin, byte \d+: token id \d+ lies outside the vocabulary of {vocab_size}",
    ) as error:
        for k in range(stream.samples):
            read(stream, np.array([k]))
    assert int(str(error.value).split("byte ")[1].split(":")[0]) >= byte
