"""Blends: the source and index of sample i of a run, and the data history, by which they continue
when a blend changes during a run.

A blend repeats a pattern of 65,536 source numbers, evenly spread, with quotas by largest remainder.
Everything is computed; only the history is stored.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from megatron.config.errors import UserError
from megatron.config.input_files import JsonObject
from megatron.data.indexed_dataset import DataError

PATTERN = 65536


def quotas(weights: list[float], names: list[str]) -> list[int]:
    """Weights rounded to whole shares of 65,536 by largest remainder. Raises DataError for a
    positive weight that rounds to nothing.
    """
    exact = np.array(weights) / sum(weights) * PATTERN
    shares = exact.astype(np.int64)
    by_remainder = np.argsort(shares - exact, kind="stable")
    shares[by_remainder[: PATTERN - shares.sum()]] += 1
    lost = [name for name, weight, share in zip(names, weights, shares) if share == 0 < weight]
    if lost:
        raise DataError(
            f"{', '.join(lost)}: a weight below 1/{2 * PATTERN} of the blend would never be read: "
            f"raise it, merge small sources, or remove it"
        )
    return shares.tolist()


def pattern(shares: list[int]) -> np.ndarray:
    """[sum of shares] source numbers, spread so that every prefix holds each source within 1 of its
    share.

    The k-th turn of a source with share q of P may come in slots [floor(k P / q), ceil((k + 1) P /
    q)); the earliest deadline goes first, which keeps every window because the windows of any
    shares that sum to P can be kept (Baruah et al. 1996, proportionate progress).
    """
    total = sum(shares)
    if len(shares) == 1:
        return np.zeros(total, np.int64)
    # release, deadline, source, turn
    waiting = [(0, -(-total // q), d, 0) for d, q in enumerate(shares) if q]
    heapq.heapify(waiting)
    ready: list[tuple[int, int, int]] = []
    result = []
    for slot in range(total):
        while waiting and waiting[0][0] <= slot:
            _, deadline, source, turn = heapq.heappop(waiting)
            heapq.heappush(ready, (deadline, source, turn))
        deadline, source, turn = heapq.heappop(ready)
        assert deadline > slot
        result.append(source)
        turn = turn + 1
        q = shares[source]
        if turn < q:
            heapq.heappush(waiting, (turn * total // q, -(-(turn + 1) * total // q), source, turn))
    return np.array(result)


class Blend:
    """Sample number -> (source, index within the source), from `first_sample` of the run on; source
    d starts at first_index[d].
    """

    def __init__(
        self, shares: list[int], first_sample: int = 0, first_index: list[int] | None = None
    ):
        self.first_sample = first_sample
        self.first_index = np.array(first_index or [0] * len(shares), np.int64)
        # the pattern repeats that much earlier
        shares = [share // math.gcd(*shares) for share in shares]
        self._shares = np.array(shares, np.int64)
        self._pattern = pattern(shares)
        # how often the slot's source came before within the pattern
        self._rank = np.empty(len(self._pattern), np.int64)
        for d in range(len(shares)):
            at = np.flatnonzero(self._pattern == d)
            self._rank[at] = np.arange(len(at))

    def locate(self, sample: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[m] sample numbers -> [m] sources, [m] indices. Raises UserError before the first
        sample.
        """
        if len(sample) and sample.min() < self.first_sample:
            raise UserError(
                f"sample {sample.min()} was read before the blend changed at sample "
                f"{self.first_sample}: replay it from an earlier checkpoint"
            )
        turn, slot = np.divmod(sample - self.first_sample, len(self._pattern))
        source = self._pattern[slot]
        return source, self.first_index[source] + turn * self._shares[source] + self._rank[slot]

    def indices_at(self, sample: int) -> list[int]:
        """The next index of each source at a sample number: the number of its samples before."""
        turn, slot = divmod(sample - self.first_sample, len(self._pattern))
        counts = np.bincount(self._pattern[:slot], minlength=len(self._shares))
        return (self.first_index + turn * self._shares + counts).tolist()


def _blend_of(segment: JsonObject) -> Blend:
    """The blend that a segment of the data history describes."""
    sources = segment["sources"]
    shares = [source["share"] for source in sources]
    return Blend(shares, segment["first_sample"], [source["first_index"] for source in sources])


def _indices_at(segments: list[JsonObject], consumed: int) -> dict[str, int]:
    """The next index of each source of the segments at sample `consumed`, by id."""
    indices: dict[str, int] = {}
    ends = [*(segment["first_sample"] for segment in segments[1:]), consumed]
    for segment, end in zip(segments, ends):
        ids = [source["id"] for source in segment["sources"]]
        indices.update(zip(ids, _blend_of(segment).indices_at(end)))
    return indices


def _ids_and_shares(sources: list[JsonObject]) -> list[tuple[str, int]]:
    return [(source["id"], source["share"]) for source in sources]


def extend_history(
    history: JsonObject | None, consumed: int, sources: list[JsonObject]
) -> tuple[JsonObject, Blend, list[str]]:
    """Continue a run's data history with the present sources.

    sources: {"id": order identity, "name": path, "share": of 65,536} each. Unchanged ids and shares
    continue the last segment; otherwise a new one begins at `consumed`, in which known ids continue
    and new ids start at 0. Returns the history (plain JSON), the blend of the last segment, and
    lines about changes.
    """
    segments = [dict(segment) for segment in history["segments"]] if history else []
    if segments and _ids_and_shares(segments[-1]["sources"]) == _ids_and_shares(sources):
        return {"segments": segments}, _blend_of(segments[-1]), []
    known = _indices_at(segments, consumed)
    entered = [{**source, "first_index": known.get(source["id"], 0)} for source in sources]
    notes = []
    for source in entered if segments else ():
        where = (
            f"continues at its sample {source['first_index']}"
            if source["id"] in known
            else "is new (content, range, seq-length or seed), starts at 0"
        )
        notes.append(f"blend changed at sample {consumed}: {source['name']} {where}")
    segments.append({"first_sample": 0 if history is None else consumed, "sources": entered})
    return {"segments": segments}, _blend_of(segments[-1]), notes
