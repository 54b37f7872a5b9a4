"""Local checkpoints: each node keeps its own shards and XOR parity blocks of others', and a restart
on any nodes reads or rebuilds the rest of them bit for bit.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import random
import shutil
from pathlib import Path

import pytest
from checkpoint_cases import flip, listing
from local_cases import (
    OTHER,
    RUN,
    found_nodes,
    join_on,
    newest_of_both,
    num_verified,
    prepared,
    restart,
    save,
    save_with_pictures,
    save_without_room,
)

from megatron.checkpoint import manifest as m
from megatron.checkpoint.local.nodes import is_same
from megatron.checkpoint.local.redundancy import (
    XOR_GROUP,
    Stream,
    Stripe,
    kept_bytes,
    stripes_of,
    xor_groups_of,
)

FOLDER = f"run-{RUN}"
ONE, TWO, SEVEN = "iter_0000001", "iter_0000002", "iter_0000007"


class Job:
    """Saves and restarts of `size` ranks, `each` on a node with its folder under `root`."""

    def __init__(self, worlds, root: Path, size: int, each: int) -> None:
        self.worlds, self.root, self.size, self.each = worlds, root, size, each

    def run(self, function, *args: object) -> list:
        return self.worlds(self.size).run(function, self.root, self.each, *args)

    def save(self, iteration: int, seed: int, *more: object) -> list[str]:
        return self.run(save, iteration, seed, *more)

    def restart(self, seed: int, *more: object, cut: int = 8) -> tuple[int | None, bool, list[str]]:
        """(iteration, whether every rank has read the right bits, what rank 0 logged)."""
        shown = self.run(restart, seed, cut, *more)
        assert len({row[0] for row in shown}) == 1
        return shown[0][0], not any(row[1] for row in shown), shown[0][2]

    def outcome(self, seed: int, *more: object, cut: int = 8) -> tuple[int | None, bool]:
        return self.restart(seed, *more, cut=cut)[:2]

    def lose(self, *nodes: int, iteration: str = "") -> None:
        """What these nodes have of an iteration, or all of it."""
        for node in nodes:
            shutil.rmtree(self.root / str(node) / (f"{FOLDER}/{iteration}" if iteration else ""))

    def files(self) -> dict[str, str]:
        """Digest of every file."""
        return {
            str(path.relative_to(self.root)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(self.root.rglob("*"))
            if path.is_file()
        }

    def leftovers(self) -> list[str]:
        """All but whole checkpoints in the folders of the runs and next to them."""
        found = [*self.root.glob("*/*/*"), *self.root.glob("*/*")]
        return [path.name for path in found if not path.name.startswith(("iter_", "run-"))]


@pytest.fixture
def job(gloo_world, tmp_path):
    return lambda size, each, root=tmp_path: Job(gloo_world, root, size, each)


NOTHING = (None, True)


def test_a_folder_may_be_named_in_two_ways(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    assert is_same(f"{tmp_path}/run", f"{tmp_path}/link/run/")


def test_nodes_are_who_sees_the_same_folder(job):
    two, one = ((0, 1), (2, 3)), ((0, 1, 2, 3),)
    assert job(4, 2).run(found_nodes) == [(two, r // 2, r % 2 == 0, r % 2, []) for r in range(4)]
    assert job(4, 4).run(found_nodes) == [(one, 0, r == 0, r, []) for r in range(4)]


@pytest.mark.parametrize(("size", "each"), [(2, 2), (4, 1)])
def test_what_is_saved_comes_back_in_any_cut(job, tmp_path, size, each):
    """With a partner the first pair is nodes 0 and 2; a block is a copy of the other's shard."""
    partner = each < size
    nodes = job(size, each)
    assert nodes.save(1, 7, "partner" if partner else "none") == [ONE] * size
    assert nodes.restart(7) == (1, True, [])
    assert nodes.outcome(9) == (1, False)  # the control: other values
    same_cut = nodes.run(restart, 7, 7)
    assert [row[3] for row in same_cut] == [0] * size  # every node has what its ranks read
    assert nodes.leftovers() == []
    files = {path.name: path.read_bytes() for path in tmp_path.glob(f"*/*/{ONE}/*.safetensors")}
    for block, shard in enumerate((2, 0, 3, 1), start=4) if partner else ():
        assert files[m.shard_file(block)][m.ALIGN :].startswith(files[m.shard_file(shard)])


@pytest.mark.parametrize(
    ("redundancy", "before", "after", "lost"),
    [
        ("partner", (4, 2), (2, 1), None),
        ("partner", (2, 1), (4, 2), None),
        ("xor", (4, 1), (2, 1), 3),
        ("xor", (3, 1), (4, 2), 0),
    ],
)
def test_another_number_of_ranks_and_nodes(job, tmp_path, redundancy, before, after, lost):
    """Folders 0, 1, ... are nodes; what a node that is no more had is brought to the first one: a
    stripe may then share a node. New nodes are empty.
    """
    job(*before).save(1, 7, redundancy)
    if lost is not None:
        shutil.rmtree(tmp_path / str(lost))
    kept = sorted(path for path in tmp_path.iterdir() if path.name.isdigit())
    count = after[0] // after[1]
    for extra in kept[count:]:
        shutil.copytree(extra, kept[0], dirs_exist_ok=True)
        shutil.rmtree(extra)
    for number, path in enumerate(kept[:count]):
        path.rename(tmp_path / str(number))
    assert job(*after).outcome(7) == (1, True)


@pytest.mark.parametrize(
    ("redundancy", "size", "each"), [("partner", 4, 2), ("xor", 4, 1), ("xor", 4, 2)]
)
def test_any_lost_node_is_rebuilt_bit_for_bit(job, redundancy, size, each):
    nodes = job(size, each)
    nodes.save(1, 7, redundancy)
    before = nodes.files()
    for node in range(size // each):
        other = nodes.root / str((node + 1) % (size // each)) / FOLDER / ONE
        untouched = other.stat().st_ino
        nodes.lose(node)
        iteration, good, lines = nodes.restart(7)
        assert (iteration, good) == (1, True)
        assert f"rebuilt from their XOR groups: node {node} (" in lines[0]
        assert nodes.files() == before and nodes.leftovers() == []
        assert other.stat().st_ino == untouched  # a kill between two renames could lose it


@pytest.mark.parametrize(("redundancy", "lost"), [("partner", (1, 3)), ("xor", (1, 2))])
def test_two_lost_nodes_of_a_group_leave_the_older_one(job, redundancy, lost):
    """Of two pairs, nodes 0 and 2, and 1 and 3, one of each may be lost."""
    nodes = job(4, 1)
    for iteration in (5, 7):  # these seeds give every rank a shard
        nodes.save(iteration, iteration, redundancy)
    before = nodes.files()
    if redundancy == "partner":
        nodes.lose(0, 1, iteration=SEVEN)
        assert nodes.outcome(7) == (7, True) and nodes.files() == before
    nodes.lose(*lost, iteration=SEVEN)
    iteration, good, lines = nodes.restart(0)
    assert (iteration, good) == (5, True) and "iteration 7 is not taken: of its " in lines[0]
    assert "of the nodes of an XOR group one may be lost, not two" in lines[0]
    assert nodes.files() != before


def test_what_is_rebuilt_lies_on_another_node_than_its_block(job, tmp_path):
    """The partner of node 0 is gone, and there is no new node."""
    job(4, 1).save(1, 7)
    shutil.rmtree(tmp_path / "2")
    (tmp_path / "3").rename(tmp_path / "2")
    nodes = job(3, 1)
    assert nodes.outcome(7) == (1, True)
    nodes.lose(0)
    assert nodes.outcome(7) == (1, True)


def test_copies_that_an_earlier_version_kept_serve(job, tmp_path):
    """With a partner each node had the shards of the one before it; no manifest lists them."""
    nodes = job(2, 1)
    nodes.save(1, 7, "none")
    for path in (tmp_path / "0" / FOLDER / ONE).glob("shard-*"):
        shutil.copy(path, tmp_path / "1" / FOLDER / ONE)
    nodes.lose(0)
    assert nodes.outcome(7) == (1, True)


def test_two_are_kept_and_an_abandoned_pass_is_not(job, tmp_path):
    def kept() -> list[str]:
        return listing(tmp_path / "0" / FOLDER)

    nodes = job(2, 1)
    for iteration in (1, 2, 3):
        nodes.save(iteration, iteration)
    assert kept() == [TWO, "iter_0000003"]
    assert nodes.outcome(3, RUN, 3) == (3, True) and nodes.outcome(3, RUN, 4) == NOTHING
    nodes.save(2, 5)  # the run went back
    assert kept() == [TWO] and nodes.outcome(5) == (2, True)
    assert nodes.leftovers() == []


def test_a_failing_deletion_fails_no_save(job):
    nodes = job(2, 1)
    for iteration in (1, 2):
        nodes.save(iteration, iteration)
    assert nodes.save(3, 3, "partner", RUN, "nothing can be removed") == ["iter_0000003"] * 2
    assert nodes.outcome(3) == (3, True)
    nodes.save(4, 4)
    assert nodes.leftovers() == []


# ---- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("redundancy", "damaged", "comes_back"),
    [
        ("xor", ["1/shard", "1/block"], True),
        ("xor", ["1/table"], True),
        ("xor", ["1/shard", "2/block"], False),
        ("xor", ["0/block", "1/block", "2/block"], True),
        ("none", ["1/shard"], False),
        ("none", ["1/manifest"], True),
    ],
)
def test_damage_is_a_loss(job, tmp_path, redundancy, damaged, comes_back):
    nodes = job(3, 1)
    for iteration in (5, 7):
        nodes.save(iteration, iteration, redundancy)
    before = nodes.files()
    for what in damaged:
        node, kind = what.split("/")
        folder = tmp_path / node / FOLDER / SEVEN
        shards = sorted(folder.glob("*.safetensors"))
        names = {"table": sorted(folder.glob("*.digests"))[0], "manifest": folder / m.MANIFEST}
        flip(shards[int(kind == "block")] if kind in ("shard", "block") else names[kind])
    assert nodes.outcome(0) == ((7, True) if comes_back else (5, True))
    # a manifest is needed of one node alone
    assert (nodes.files() == before) == (comes_back and damaged != ["1/manifest"])


def test_ranks_of_a_node_share_the_reading(job):
    nodes = job(4, 2)
    nodes.save(1, 7, "xor")  # four shards and four blocks
    assert nodes.run(num_verified) == [4] * 4


def test_what_is_rebuilt_must_be_what_was_saved(job, tmp_path):
    nodes = job(3, 1)
    nodes.save(1, 7, "xor")
    nodes.lose(1)
    *outcome, lines = nodes.restart(7, RUN, 0, "damaged on the way")
    assert tuple(outcome) == NOTHING and "is not taken: rank 1: " in lines[0]
    assert "is not what was saved" in lines[0]
    assert nodes.leftovers() == [] and not list((tmp_path / "1").glob("*/*"))


def test_two_saves_of_an_iteration_are_never_mixed(job, tmp_path):
    for name, seed in (("a", 7), ("b", 9)):
        job(2, 1, tmp_path / name).save(1, seed, "none")
    mixed = tmp_path / "mixed"
    for name, node in (("a", "0"), ("b", "1")):
        shutil.copytree(tmp_path / name / node, mixed / node)
    assert job(2, 1, mixed).outcome(7) == NOTHING


def test_leftovers_of_another_run_are_not_seen(job, tmp_path):
    """By the folder's name, and by the manifest."""
    nodes = job(2, 1, tmp_path / "plain")
    nodes.save(1, 7, "partner", OTHER)
    assert nodes.outcome(7) == NOTHING and nodes.outcome(7, OTHER) == (1, True)
    nodes, any_run = job(2, 1), "the folder of any run"
    nodes.save(1, 7, "partner", OTHER, any_run)
    assert nodes.outcome(7, RUN, 0, any_run) == NOTHING


# ---- a save that does not end --------------------------------------------------------------------


def test_whenever_a_save_ends_a_whole_checkpoint_is_there(job, tmp_path):
    """What a restart finds when the save of iteration 2 over iteration 1 ended before any change of
    one node, and before or after all of the other's.
    """
    live, before, pictures = tmp_path / "live", tmp_path / "before", tmp_path / "pictures"
    job(2, 1, live).save(1, 5)
    shutil.copytree(live, before)
    taken = job(2, 1, live).run(save_with_pictures, 2, 5, pictures)
    shown, seen = [], set()
    for node, at in [(node, at) for node in (0, 1) for at in range(taken[node])]:
        picture = pictures / f"{node}-{node}-{at}"
        visible = frozenset(
            str(path.relative_to(picture))
            for path in picture.rglob("*")
            if ".tmp-" not in str(path)
        )
        # of those that differ in the temporary folder alone every eighth
        if (node, visible) in seen and at % 8:
            continue
        seen.add((node, visible))
        for other in (before, live):
            now = tmp_path / f"now-{node}-{at}-{other.name}"
            shutil.copytree(picture, now / str(node))
            shutil.copytree(other / str(1 - node), now / str(1 - node))
            shown.append(job(2, 1, now).outcome(5))
    # the next save removes what the interrupted one has left
    job(2, 1, now).save(3, 5)
    assert job(2, 1, now).leftovers() == [] and len(shown) >= 10
    assert set(shown) == {(1, True), (2, True)}


def test_no_room_on_one_node(job, tmp_path):
    """For a block, or no right to write it: one error with the fix, for which no rank waits, and
    nothing is lost or left.
    """
    nodes = job(4, 2)
    nodes.save(1, 1)
    begins = (
        f"rank 2: --local-checkpoint-dir {tmp_path}/1: the local checkpoint of iteration 2 "
        "was not saved: "
    )
    for number, fix in (
        (errno.ENOSPC, "free space, raise the quota or give another folder"),
        (errno.EROFS, "make it writable or give another folder"),
    ):
        text = f"{begins}{os.strerror(number)}; {fix}. Older ones are untouched"
        assert set(nodes.run(save_without_room, 2, number)) == {text}
    assert nodes.leftovers() == [] and nodes.outcome(1) == (1, True)


def test_without_room_to_rebuild(job, tmp_path):
    """Of shards the older checkpoint is taken; blocks are not needed to go on."""
    nodes = job(3, 1)
    for iteration in (5, 7):
        nodes.save(iteration, iteration, "xor")
    nodes.lose(1, iteration=SEVEN)
    iteration, good, lines = nodes.restart(0, RUN, 0, "no space to rebuild")
    assert (iteration, good) == (5, True) and "No space left" in lines[0]
    assert "iteration 7 is not taken: " in lines[0]
    assert nodes.leftovers() == [] and not (tmp_path / "1" / FOLDER / SEVEN).exists()
    assert nodes.outcome(0) == (7, True)
    flip(tmp_path / "1" / FOLDER / SEVEN / m.shard_file(4))
    iteration, good, lines = nodes.restart(0, RUN, 0, "no space to rebuild")
    assert (iteration, good) == (7, True)
    assert "iteration 7 is taken without its redundancy: " in lines[0]


@pytest.mark.parametrize("seen", [True, False])
def test_an_older_local_one_replaces_a_damaged_one_alone(gloo_world, tmp_path, seen):
    """A whole one that a rank does not see is an error: the run would go back without need."""
    for found in gloo_world(2).run(newest_of_both, tmp_path, seen):
        assert found == 1 if seen else "is not seen from here" in found


# ---- before training -----------------------------------------------------------------------------


def test_redundancy_needs_several_nodes_of_one_size(job):
    for size, each in ((2, 2), (4, 3)):
        error = job(size, each).run(prepared, "xor")[0]
        assert "--local-redundancy xor: needs two or more nodes" in error
    assert job(4, 2).run(prepared, "xor") == [""] * 4


def test_room_is_asked_for_before_training(job, tmp_path):
    """Three times this rank's bytes, and its block's; what the run has there counts as free."""
    disk = os.statvfs(tmp_path)
    free = disk.f_bavail * disk.f_frsize
    for part, redundancy, enough in (
        (4, "none", True),
        (2, "none", False),
        (7, "xor", True),
        (5, "xor", False),
    ):
        shown = job(2, 1).run(prepared, redundancy, free // part)
        assert {error == "" for error in shown} == {enough}, (part, redundancy)
    size = f"{(free // 5 + m.ALIGN + free // 5) / 2**30:.3g}"
    assert f"3 checkpoints (2 kept, 1 being written) of {size} GiB each need " in shown[0]
    assert shown[0].endswith("give a larger folder, or --local-redundancy none")
    job(2, 1).save(1, 7, "none", OTHER)
    shown = job(2, 1).run(prepared, "none", free)
    assert "(other runs have " in shown[0] and "Remove run-*" in shown[0]


def test_folders_that_others_may_change_are_refused(gloo_world, tmp_path):
    names = ("mine", "open", "theirs", "link")
    mine, open_to_all, theirs, link = (tmp_path / name for name in names)
    for folder in (mine, open_to_all, theirs):
        folder.mkdir()
    open_to_all.chmod(0o1777)
    (tmp_path / "file").touch()
    link.symlink_to(mine)
    cases = [
        (open_to_all, "may be written to by other users"),
        (link, "links are not followed"),
        (tmp_path / "file" / "x", "Not a directory"),
    ]
    if os.geteuid() == 0:
        os.chown(theirs, 12345, 12345)
        cases.append((theirs, "belongs to another user (uid 12345)"))
    for folder, text in cases:
        first, second = gloo_world(2).run(join_on, [mine, folder])
        assert first == second and first.startswith("rank 1: ") and text in first
    made = tmp_path / "made" / "new"
    assert gloo_world(2).run(join_on, [mine, made]) == ["", ""]
    assert made.stat().st_mode & 0o777 == 0o700 and list(mine.iterdir()) == []


# ---- the arithmetic of XOR groups, in one process ------------------------------------------------


def test_every_node_is_in_one_xor_group_of_nearly_equal_size():
    for count, most in itertools.product(range(2, 70), (2, XOR_GROUP)):
        groups = xor_groups_of(count, "partner" if most == 2 else "xor")
        sizes = [len(nodes) for nodes in groups]
        assert sorted(node for nodes in groups for node in nodes) == list(range(count))
        assert len(groups) == (count // 2 if most == 2 else -(-count // most)) and 2 <= min(sizes)
        assert max(sizes) <= min(sizes) + 1 and max(sizes) <= most + (most == 2 and count % 2)
    stripes = stripes_of([(3 * node, 3 * node + 1, 3 * node + 2) for node in range(9)], "xor")
    assert sorted(rank for ranks in stripes for rank in ranks) == list(range(27))
    assert sorted(map(len, stripes)) == [4, 4, 4, 5, 5, 5]
    # never two of a node
    assert all(len({rank // 3 for rank in ranks}) == len(ranks) for ranks in stripes)


def made(stream: Stream, files: dict[int, bytes]) -> bytes:
    """What an exchange makes."""
    found = b""
    for length, parts in stream.runs:
        run = 0
        for number, at in parts:
            piece = files[number][at : at + length].ljust(length, b"\0")
            run ^= int.from_bytes(piece)
        found += run.to_bytes(length)
    return found


@pytest.mark.parametrize("k", [2, 5, 8])
def test_any_place_of_a_stripe_is_made_of_the_others(k):
    """Shards of several sizes, of which one rank has none."""
    rng = random.Random(k)
    files = {place: rng.randbytes(rng.randrange(1, 500)) for place in range(k) if place != 2}
    numbers = [place if place in files else None for place in range(k)]
    stripe = Stripe(numbers, [len(files.get(place, b"")) for place in range(k)], k)
    for place in range(k):
        files[k + place] = bytes(m.ALIGN) + made(stripe.xor_block(place, 0), files)
    assert stripe.lost(set(files) - {0, 1}) == {0, 1}
    for place, number in enumerate(numbers):
        present = {each: data for each, data in files.items() if each not in (number, k + place)}
        assert stripe.lost(set(present)) == set()
        if number is not None:
            assert made(stripe.shard(place, 0), present) == files[number]
        assert m.ALIGN + len(made(stripe.xor_block(place, 0), files)) == len(files[k + place])


def test_a_node_needs_what_its_own_xor_group_keeps():
    """Groups of five and four nodes: a large shard makes large blocks in its own group alone."""
    sizes = [100, *[10] * 8]
    need = kept_bytes([[node] for node in range(9)], sizes, "xor")
    assert need == [
        10 + m.ALIGN + (25 if node % 2 == 0 else 4) + 90 * (node == 0) for node in range(9)
    ]
