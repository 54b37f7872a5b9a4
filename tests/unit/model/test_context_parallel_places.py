"""Which positions context-parallel ranks hold: each once, and as much work for all of them; and
which heads ranks that exchange them have.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron.model.attention import context_parallel
from megatron.model.attention.context_parallel import heads_for_sequence, places_of


def visible_pairs(places, starts, window=None):
    """Of each rank: pairs of its queries with the keys that they see, counted one by one."""
    positions = np.arange(starts.shape[1])
    seen = positions[:, None] >= positions[None, :]
    if window is not None:
        seen &= positions[:, None] - positions[None, :] < window
    found = np.zeros(len(places), np.int64)
    for sample in starts:
        whole = (seen & (positions[None, :] >= sample[:, None])).sum(1)
        found += [whole[own].sum() for own in places]
    return found


def documents(length, samples, mean, seed):
    """Starts [samples, length] of documents whose lengths are log-normal around a mean."""
    draw = np.random.default_rng(seed)
    starts = np.zeros((samples, length), np.int32)
    for sample in starts:
        at = 0
        while at < length:
            sample[at:] = at
            at += 1 + int(draw.lognormal(np.log(mean) - 0.5, 1.0))
    return starts


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_without_documents_each_rank_has_a_first_and_a_last_chunk(size):
    length = 96 * size
    places = places_of(length, size)
    assert np.array_equal(np.sort(places.flatten()), np.arange(length))
    assert all((np.diff(own) > 0).all() for own in places)
    assert len(set(visible_pairs(places, np.zeros((1, length), np.int32)))) == 1
    assert (places[0][:48] == np.arange(48)).all()
    assert (places[0][48:] == np.arange(length - 48, length)).all()


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("size, length, mean", [(2, 2048, 100), (4, 4096, 500), (8, 8192, 1000)])
def test_documents_are_given_out_by_work(size, length, mean, window):
    """At most 2% above the mean."""
    for seed in range(5):
        starts = documents(length, 2, mean, seed)
        places = places_of(length, size, starts, window)
        assert np.array_equal(np.sort(places.flatten()), np.arange(length))
        assert np.array_equal(places, places_of(length, size, starts.copy(), window))
        work = visible_pairs(places, starts, window)
        assert work.max() <= 1.02 * work.mean()


@pytest.mark.parametrize(
    "heads, groups, ranks", [(8, 2, 4), (8, 1, 2), (12, 3, 6), (8, 4, 2), (8, 8, 4)]
)
def test_a_rank_has_the_keys_that_its_query_heads_read(monkeypatch, heads, groups, ranks):
    """Also with fewer key/value heads than ranks. Every head holds the number of its group."""
    q = (torch.arange(heads) // (heads // groups)).view(1, 1, heads, 1)
    k = torch.arange(groups).view(1, 1, groups, 1)
    for rank in range(ranks):
        monkeypatch.setattr(context_parallel, "_to_sequence", lambda x, _: x[:, :, rank])
        own_q, own_k, own_v = heads_for_sequence(q, k, k + 100, SimpleNamespace(size=ranks))
        assert own_q.shape[2] == heads // ranks
        read = own_k.repeat_interleave(own_q.shape[2] // own_k.shape[2], 2)
        assert torch.equal(read, own_q) and torch.equal(own_v, own_k + 100)
