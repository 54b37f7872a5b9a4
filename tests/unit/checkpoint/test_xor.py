"""XOR groups of nodes: any one node of a group may be lost, and comes back bit for bit."""

from __future__ import annotations

import random
import shutil

import pytest
from checkpoint_cases import flip
from local_cases import RUN, restart, save
from test_local import ONE, files, leftovers, outcome

from megatron.checkpoint import manifest as m
from megatron.checkpoint.files import write_shard_file
from megatron.checkpoint.local.exchange import _turns, exchange
from megatron.checkpoint.local.xor import (
    XOR_GROUP,
    Stripe,
    stripes_in,
    stripes_of,
    xor_block_header,
    xor_groups_of,
)
from megatron.checkpoint.ranks import SINGLE_RANK

SEVEN = "iter_0000007"  # seeds 5 and 7 give every rank a shard


def test_every_node_is_in_one_xor_group_of_nearly_equal_size():
    for count in range(2, 70):
        groups = xor_groups_of(count)
        sizes = [len(nodes) for nodes in groups]
        assert sorted(node for nodes in groups for node in nodes) == list(range(count))
        assert (
            len(groups) == -(-count // XOR_GROUP)
            and max(sizes) <= XOR_GROUP
            and min(sizes) >= 2
            and max(sizes) - min(sizes) <= 1
        )
    stripes = stripes_of([(3 * node, 3 * node + 1, 3 * node + 2) for node in range(9)])
    assert sorted(rank for ranks in stripes for rank in ranks) == list(range(27)) and sorted(
        map(len, stripes)
    ) == [4, 4, 4, 5, 5, 5]
    # never two of a node
    assert all(len({rank // 3 for rank in ranks}) == len(ranks) for ranks in stripes)


@pytest.mark.parametrize("k", [2, 3, 5, 8])
def test_any_shard_is_made_of_what_the_others_have(tmp_path, k):
    """Shards of any lengths, some ranks without one; the files of all in one process."""
    rng = random.Random(k)
    numbers, records = [], []
    for place in range(k):
        numbers.append(None if rng.random() < 0.2 and place else len(records))
        if numbers[-1] is not None:
            data = rng.randbytes(rng.choice([0, 1, 999, 70_000]))
            records.append(
                write_shard_file(
                    tmp_path, len(records), m.encode_header([], {}), [memoryview(data)]
                )
            )
    (stripe,) = stripes_in(records, [numbers])

    def make(stream) -> bytes:
        made = []
        exchange(
            [stream],
            SINGLE_RANK,
            lambda number: 0,
            lambda number: tmp_path / m.shard_file(number),
            lambda number, pieces: made.extend(bytes(piece) for piece in pieces),
        )
        return b"".join(made)

    for place in range(k):
        data = make(stripe.xor_block(place, 0))
        assert len(data) == -(-max(stripe.sizes) // (k - 1))
        write_shard_file(
            tmp_path,
            stripe.first + place,
            xor_block_header(1, stripe.first + place),
            [memoryview(data)],
        )
    for place, number in enumerate(numbers):
        if number is not None:
            kept = (tmp_path / m.shard_file(number)).read_bytes()
            for lost in (number, stripe.first + place):
                (tmp_path / m.shard_file(lost)).rename(tmp_path / f"lost-{lost}")
            assert make(stripe.shard(place, 0)) == kept
            assert (
                make(stripe.xor_block(place, 0))
                == (tmp_path / f"lost-{stripe.first + place}").read_bytes()[m.ALIGN :]
            )
            for lost in (number, stripe.first + place):
                (tmp_path / f"lost-{lost}").rename(tmp_path / m.shard_file(lost))


def test_what_can_be_lost():
    stripe = Stripe((0, 1, None, 2), (9, 9, 0, 9), 3)
    whole = set(range(7))
    assert not any(
        stripe.lost(whole - lost) for lost in ({0}, {0, 3}, {1, 4}, {5}, {2, 6}, {3, 4, 5, 6})
    )
    assert (
        stripe.lost(whole - {0, 1}) == {0, 1}
        and stripe.lost(whole - {0, 4}) == {0}
        and stripe.lost(whole - {2, 5}) == {2}
    )


def test_a_rank_sends_to_fewer_than_a_group_at_a_time():
    """So its messages are few, whatever the number of nodes; all stripes of a save are made at
    once.
    """
    stripes = stripes_of([(2 * node, 2 * node + 1) for node in range(16)])
    made = [
        Stripe(tuple(ranks), (9,) * len(ranks), 32 + sum(map(len, stripes[:i])))
        for i, ranks in enumerate(stripes)
    ]
    turns = _turns(
        [
            stripe.xor_block(place, rank)
            for stripe, ranks in zip(made, stripes)
            for place, rank in enumerate(ranks)
        ],
        lambda number: number,
    )
    assert [len(turn) for turn in turns] == [32]
    turns = _turns([stripe.shard(1, 5) for stripe in made], lambda number: number % 32)
    assert [len(turn) for turn in turns] == [1] * len(made)  # all for one rank


# ---- real processes ------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "each"), [(3, 1), (4, 2)])
def test_a_node_keeps_a_part_of_the_largest_shard_more_than_its_own(
    gloo_world, tmp_path, size, each
):
    """1/(k-1), not a copy."""
    gloo_world(size).run(save, tmp_path, each, 1, 7, "xor")
    path = tmp_path / "0" / RUN.folder / ONE / m.MANIFEST
    content = m.decode_manifest(path.read_bytes(), tmp_path)
    assert [len(numbers) for numbers in content["sets"]] == [size // each] * each
    for stripe, numbers in zip(stripes_in(content["shards"], content["sets"]), content["sets"]):
        records = content["parities"][stripe.first - len(content["shards"]) :][: len(numbers)]
        assert {record["bytes"] for record in records} == {
            m.ALIGN - (-max(stripe.sizes) // (len(numbers) - 1))
        }


@pytest.mark.parametrize("mutant", ["a piece in no XOR block", "damaged on the way"])
def test_what_is_rebuilt_must_be_what_was_saved(gloo_world, tmp_path, mutant):
    gloo_world(3).run(
        save,
        tmp_path,
        1,
        1,
        7,
        "xor",
        RUN,
        "a piece in no XOR block" if mutant.startswith("a piece") else None,
    )
    shutil.rmtree(tmp_path / "1")
    shown = gloo_world(3).run(
        restart, tmp_path, 1, 7, 8, RUN, 0, None if mutant.startswith("a piece") else mutant
    )
    assert outcome(shown) == (None, True) and "is not taken: rank 1: " in shown[0][2][0]
    assert mutant.startswith("a piece") or "is not what was saved" in shown[0][2][0]
    assert leftovers(tmp_path) == [] and not list((tmp_path / "1").glob("*/*"))


def test_two_lost_nodes_of_a_group_leave_the_older_one(gloo_world, tmp_path):
    gloo_world(4).run(save, tmp_path, 1, 5, 5, "xor")
    gloo_world(4).run(save, tmp_path, 1, 7, 7, "xor")
    for node in (1, 2):
        shutil.rmtree(tmp_path / str(node) / RUN.folder / SEVEN)
    shown = gloo_world(4).run(restart, tmp_path, 1, 0, 8)
    assert outcome(shown) == (5, True) and "iteration 7 is not taken: of its " in shown[0][2][0]
    assert "one node of an XOR group may be lost, not two" in shown[0][2][0]


def test_one_lost_node_in_each_of_two_groups(gloo_world, tmp_path):
    """Groups of at most three: nodes 0 and 2, and 1 and 3."""
    gloo_world(4).run(save, tmp_path, 1, 1, 7, "xor", RUN, "XOR groups of three")
    before = files(tmp_path)
    for lost, comes_back in (((0, 1), True), ((2, 3), True), ((1, 3), False)):
        for node in lost:
            shutil.rmtree(tmp_path / str(node))
        shown = gloo_world(4).run(restart, tmp_path, 1, 7, 8)
        assert outcome(shown) == ((1, True) if comes_back else (None, True))
        assert (files(tmp_path) == before) == comes_back


@pytest.mark.parametrize(
    ("damaged", "comes_back"),
    [
        (["1/shard"], True),
        (["1/shard", "1/block"], True),
        (["1/table"], True),
        (["1/manifest"], True),
        (["1/shard", "2/block"], False),
        (["0/block", "1/block", "2/block"], True),
    ],
)
def test_damage_is_a_loss(gloo_world, tmp_path, damaged, comes_back):
    gloo_world(3).run(save, tmp_path, 1, 5, 5, "xor")
    gloo_world(3).run(save, tmp_path, 1, 7, 7, "xor")
    before = files(tmp_path)
    for what in damaged:
        node, kind = what.split("/")
        folder = tmp_path / node / RUN.folder / SEVEN
        shards, tables = (
            sorted(folder.glob(f"*.{suffix}")) for suffix in ("safetensors", "digests")
        )
        flip(
            {
                "shard": shards[0],
                "block": shards[1],
                "table": tables[0],
                "manifest": folder / m.MANIFEST,
            }[kind]
        )
    shown = gloo_world(3).run(restart, tmp_path, 1, 0, 8)
    assert outcome(shown) == ((7, True) if comes_back else (5, True))
    assert (files(tmp_path) == before) == comes_back


@pytest.mark.parametrize(
    ("before", "after", "lost"),
    [((4, 1), (2, 1), 3), ((3, 1), (4, 2), 0), ((4, 1), (4, 4), None)],
)
def test_other_ranks_and_nodes_than_before(gloo_world, tmp_path, before, after, lost):
    """Folders that lie on a node that is no more are found on another one when they are moved
    there; a stripe may then share a node.
    """
    (size, each), (ranks, there) = before, after
    gloo_world(size).run(save, tmp_path, each, 1, 7, "xor")
    if lost is not None:
        shutil.rmtree(tmp_path / str(lost))
    left = sorted(path for path in tmp_path.iterdir() if path.name.isdigit())
    for extra in left[ranks // there :]:  # what these nodes have is brought to the first one
        shutil.copytree(extra, left[0], dirs_exist_ok=True)
        shutil.rmtree(extra)
    for number, path in enumerate(left[: ranks // there]):
        path.rename(tmp_path / str(number))
    assert outcome(gloo_world(ranks).run(restart, tmp_path, there, 7, 8)) == (1, True)


def test_without_room_to_rebuild_the_older_one_is_taken(gloo_world, tmp_path):
    gloo_world(3).run(save, tmp_path, 1, 5, 5, "xor")
    gloo_world(3).run(save, tmp_path, 1, 7, 7, "xor")
    shutil.rmtree(tmp_path / "1" / RUN.folder / SEVEN)
    shown = gloo_world(3).run(restart, tmp_path, 1, 0, 8, RUN, 0, "no space for copies")
    assert (
        outcome(shown) == (5, True)
        and "iteration 7 is not taken: " in shown[0][2][0]
        and "No space left" in shown[0][2][0]
    )
    assert leftovers(tmp_path) == []
    shown = gloo_world(3).run(restart, tmp_path, 1, 0, 8)
    assert outcome(shown) == (7, True)
