"""Local checkpoints: each node keeps its own shards and its neighbour's, and a restart on any nodes
reads the rest of them.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import pytest
from checkpoint_cases import flip
from local_cases import (
    OTHER,
    RUN,
    checked,
    found_nodes,
    join_on,
    read_unfetched,
    restart,
    save,
    save_with_pictures,
    save_without_room,
)

ONE, TWO = "iter_0000001", "iter_0000002"


def files(root: Path) -> dict[str, str]:
    """Digest of every file below `root`."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def leftovers(root: Path) -> list[str]:
    """All but whole checkpoints in the folders of the runs and next to them."""
    return [
        str(path)
        for path in [*root.glob("*/*/*"), *root.glob("*/*")]
        if not path.name.startswith(("iter_", "run-"))
    ]


def outcome(shown: list[tuple]) -> tuple[int | None, bool]:
    """(iteration, whether every rank read the right bits): the same iteration on all ranks."""
    assert len({row[0] for row in shown}) == 1
    return shown[0][0], not any(row[1] for row in shown)


def test_nodes_are_who_sees_the_same_folder(gloo_world, tmp_path):
    two, one = ((0, 1), (2, 3)), ((0, 1, 2, 3),)
    assert gloo_world(4).run(found_nodes, tmp_path, 2) == [
        (two, r // 2, r % 2 == 0, r % 2, []) for r in range(4)
    ]
    assert gloo_world(4).run(found_nodes, tmp_path, 4) == [
        (one, 0, r == 0, r, []) for r in range(4)
    ]


@pytest.mark.parametrize(("size", "each"), [(2, 2), (4, 2), (4, 1)])
def test_what_is_saved_comes_back_in_any_cut(gloo_world, tmp_path, size, each):
    """Each node has its own shards and, with a partner, those of the one before it; nothing else
    stays.
    """
    partner = each < size
    assert (
        gloo_world(size).run(save, tmp_path, each, 1, 7, "partner" if partner else "none")
        == [ONE] * size
    )
    shown = gloo_world(size).run(restart, tmp_path, each, 7, 8)
    assert [row[:3] for row in shown] == [(1, [], [])] * size
    # the control: other values
    assert outcome(gloo_world(size).run(restart, tmp_path, each, 9, 8)) == (1, False)
    same_cut = gloo_world(size).run(restart, tmp_path, each, 7, 7)
    # every node has what its ranks read
    assert outcome(same_cut) == (1, True) and same_cut[0][3] == 0
    held = [
        {path.name for path in (tmp_path / str(node) / RUN.folder / ONE).glob("*.safetensors")}
        for node in range(size // each)
    ]
    assert {sum(name in names for names in held) for name in set.union(*held)} == {
        2 if partner else 1
    }
    assert leftovers(tmp_path) == []


def test_what_was_not_fetched_is_refused(gloo_world, tmp_path):
    """Wherever it lies."""
    gloo_world(4).run(save, tmp_path, 1, 1, 7, "none")
    assert all("No such file" in text for text in gloo_world(4).run(read_unfetched, tmp_path, 1))
    assert outcome(gloo_world(4).run(restart, tmp_path, 1, 7, 8, RUN, 0, "nothing is fetched")) == (
        1,
        False,
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [((4, 2), (2, 1)), ((2, 1), (4, 2)), ((4, 1), (4, 2))],
)
def test_another_number_of_ranks_and_nodes(gloo_world, tmp_path, before, after):
    """Folders 0, 1, ... are nodes; with fewer nodes than before the partners' copies serve, with
    more the new ones are empty.
    """
    (size, each), (ranks, there) = before, after
    gloo_world(size).run(save, tmp_path, each, 1, 7)
    shown = gloo_world(ranks).run(restart, tmp_path, there, 7, 8)
    lost = before == (4, 1)  # nodes 2 and 3 are not there any more, and they were neighbours
    assert outcome(shown) == ((None, True) if lost else (1, True))


def test_ranks_on_other_nodes_than_before(gloo_world, tmp_path):
    gloo_world(4).run(save, tmp_path, 1, 1, 7, "none")
    for before, after in (("0", "x"), ("1", "0"), ("3", "1"), ("x", "3")):
        (tmp_path / before).rename(tmp_path / after)
    shown = gloo_world(4).run(restart, tmp_path, 1, 7, 7)
    assert outcome(shown) == (1, True) and shown[0][3] > 0


@pytest.mark.parametrize(
    ("redundancy", "size", "each"),
    [("partner", 4, 2), ("partner", 4, 1), ("xor", 3, 1), ("xor", 4, 2)],
)
def test_any_lost_node_is_rebuilt_bit_for_bit(gloo_world, tmp_path, redundancy, size, each):
    gloo_world(size).run(save, tmp_path, each, 1, 7, redundancy)
    before = files(tmp_path)
    origin = "partners" if redundancy == "partner" else "XOR groups"
    for node in range(size // each):
        shutil.rmtree(tmp_path / str(node))
        shown = gloo_world(size).run(restart, tmp_path, each, 7, 8)
        assert outcome(shown) == (1, True)
        assert f"rebuilt from their {origin}: node {node} (" in shown[0][2][0]
        assert shown[1][2] == shown[0][2]
        assert files(tmp_path) == before and leftovers(tmp_path) == []


def test_without_real_partners_a_node_is_lost(gloo_world, tmp_path):
    words = (tmp_path, 2, 1, 7, "partner", RUN, "copies at home")
    assert gloo_world(4).run(save, *words) == [ONE] * 4
    shutil.rmtree(tmp_path / "1")
    shown = gloo_world(4).run(restart, tmp_path, 2, 7, 8)
    assert outcome(shown) == (None, True) and "are whole on no node" in shown[0][2][0]


def test_two_lost_neighbours_leave_the_older_one(gloo_world, tmp_path):
    """And of four nodes every second one may be lost."""
    gloo_world(4).run(save, tmp_path, 1, 1, 1)
    gloo_world(4).run(save, tmp_path, 1, 2, 2)
    for node in (0, 2):
        shutil.rmtree(tmp_path / str(node) / RUN.folder / TWO)
    assert outcome(gloo_world(4).run(restart, tmp_path, 1, 2, 8)) == (2, True)
    for node in (1, 2):
        shutil.rmtree(tmp_path / str(node) / RUN.folder / TWO)
    shown = gloo_world(4).run(restart, tmp_path, 1, 1, 8)
    assert (
        outcome(shown) == (1, True)
        and "local checkpoint of iteration 2 is not taken: of its " in shown[0][2][0]
    )
    for node in (1, 2):
        shutil.rmtree(tmp_path / str(node))
    shown = gloo_world(4).run(restart, tmp_path, 1, 1, 8)
    assert outcome(shown) == (None, True) and len(shown[0][2]) == 2


def test_only_iterations_that_count(gloo_world, tmp_path):
    gloo_world(2).run(save, tmp_path, 1, 1, 1)
    gloo_world(2).run(save, tmp_path, 1, 2, 2)
    assert outcome(gloo_world(2).run(restart, tmp_path, 1, 2, 8)) == (2, True)
    assert outcome(gloo_world(2).run(restart, tmp_path, 1, 2, 8, RUN, 2)) == (2, True)
    assert outcome(gloo_world(2).run(restart, tmp_path, 1, 2, 8, RUN, 3)) == (None, True)


def test_two_are_kept_and_an_abandoned_pass_is_not(gloo_world, tmp_path):
    def kept() -> list[str]:
        return sorted(path.name for path in (tmp_path / "0" / RUN.folder).iterdir())

    for iteration in (1, 2, 3):
        gloo_world(2).run(save, tmp_path, 1, iteration, iteration)
    assert kept() == [TWO, "iter_0000003"]
    gloo_world(2).run(save, tmp_path, 1, 2, 5)  # the run went back
    assert kept() == [TWO] and outcome(gloo_world(2).run(restart, tmp_path, 1, 5, 8)) == (2, True)
    assert leftovers(tmp_path) == []


# ---- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["safetensors", "digests", "json"])
def test_damage_is_found_and_mended_from_the_partner(gloo_world, tmp_path, kind):
    gloo_world(2).run(save, tmp_path, 1, 1, 7)
    before = files(tmp_path)
    for path in (tmp_path / "1" / RUN.folder / ONE).glob(f"*.{kind}"):
        flip(path)
    shown = gloo_world(2).run(restart, tmp_path, 1, 7, 8)
    assert outcome(shown) == (1, True) and "rebuilt" in shown[0][2][0] and files(tmp_path) == before


def test_damage_without_a_copy_leaves_the_older_one(gloo_world, tmp_path):
    gloo_world(2).run(save, tmp_path, 1, 1, 1, "none")
    gloo_world(2).run(save, tmp_path, 1, 2, 2, "none")
    flip(next(tmp_path.glob(f"*/{RUN.folder}/{TWO}/*.safetensors")))
    assert outcome(
        gloo_world(2).run(restart, tmp_path, 1, 2, 2, RUN, 0, "nothing is read to the end")
    ) == (2, False)
    assert outcome(gloo_world(2).run(restart, tmp_path, 1, 1, 1)) == (1, True)


def test_what_changes_on_the_way_to_the_partner_is_refused(gloo_world, tmp_path):
    shown = gloo_world(2).run(save, tmp_path, 1, 1, 7, "partner", RUN, "damaged on the way")
    assert (
        shown[0] == shown[1] and "is not what was saved" in shown[0] and leftovers(tmp_path) == []
    )


def test_two_saves_of_an_iteration_are_never_mixed(gloo_world, tmp_path):
    for name, seed in (("a", 7), ("b", 9)):
        gloo_world(2).run(save, tmp_path / name, 1, 1, seed, "none")
    (tmp_path / "mixed").mkdir()
    for name, node in (("a", "0"), ("b", "1")):
        shutil.copytree(tmp_path / name / node, tmp_path / "mixed" / node)
    assert outcome(gloo_world(2).run(restart, tmp_path / "mixed", 1, 7, 8)) == (None, True)


def test_leftovers_of_another_run_are_not_seen(gloo_world, tmp_path):
    """By the folder's name, and by the manifest."""
    gloo_world(2).run(save, tmp_path / "plain", 1, 1, 7, "partner", OTHER)
    assert outcome(gloo_world(2).run(restart, tmp_path / "plain", 1, 7, 8)) == (None, True)
    assert outcome(gloo_world(2).run(restart, tmp_path / "plain", 1, 7, 8, OTHER)) == (1, True)
    gloo_world(2).run(save, tmp_path, 1, 1, 7, "partner", OTHER, "the folder of any run")
    assert outcome(
        gloo_world(2).run(restart, tmp_path, 1, 7, 8, RUN, 0, "the folder of any run")
    ) == (None, True)


# ---- a save that does not end --------------------------------------------------------------------


def _pictures(
    gloo_world, tmp_path: Path, redundancy: str, mutant: str | None = None
) -> list[tuple[int | None, bool]]:
    """What a restart finds when the save of iteration 2 over iteration 1 ended before any change of
    one node, and before or after all of the other's:
    (iteration, whether it has its bits).
    """
    live, before, pictures = tmp_path / "live", tmp_path / "before", tmp_path / "pictures"
    gloo_world(2).run(save, live, 1, 1, 5, redundancy)
    shutil.copytree(live, before)
    taken = gloo_world(2).run(save_with_pictures, live, 1, 2, 5, pictures, redundancy, mutant)
    shown, seen = [], set()
    for node, at in [(node, at) for node in (0, 1) for at in range(taken[node])]:
        picture = pictures / f"{node}-{node}-{at}"
        visible = frozenset(
            str(path.relative_to(picture))
            for path in picture.rglob("*")
            if ".tmp-" not in str(path)
        )
        # of those that differ in the temporary folder alone every fourth
        if (node, visible) in seen and at % 4:
            continue
        seen.add((node, visible))
        for other in (before, live):
            now = tmp_path / f"now-{node}-{at}-{other.name}"
            shutil.copytree(picture, now / str(node))
            shutil.copytree(other / str(1 - node), now / str(1 - node))
            shown.append(outcome(gloo_world(2).run(restart, now, 1, 5, 8)))
    # the next save removes what the interrupted one has left
    gloo_world(2).run(save, now, 1, 3, 5, redundancy)
    assert leftovers(now) == []
    return shown


@pytest.mark.parametrize("redundancy", ["partner", "xor"])
def test_whenever_a_save_ends_a_whole_checkpoint_is_there(gloo_world, tmp_path, redundancy):
    shown = _pictures(gloo_world, tmp_path, redundancy)
    assert set(shown) == {(1, True), (2, True)} and len(shown) >= 16


def test_a_save_that_removes_the_older_one_first_is_caught(gloo_world, tmp_path):
    assert None in {
        iteration
        for iteration, _ in _pictures(gloo_world, tmp_path, "none", "thinned before it is written")
    }


@pytest.mark.parametrize("redundancy", ["partner", "xor"])
def test_no_room_on_one_node(gloo_world, tmp_path, redundancy):
    """For the neighbour's shard or a block: one error, for which no rank waits, and nothing is lost
    or left.
    """
    gloo_world(4).run(save, tmp_path, 2, 1, 1, redundancy)
    shown = gloo_world(4).run(save_without_room, tmp_path, 2, 2, "write_shard_file", redundancy)
    begins = (
        f"rank 2: --local-checkpoint-dir {tmp_path}/1: the local checkpoint of iteration 2 "
        "was not saved: No space left on device; "
    )
    end = "free space there, or give a larger folder. Older ones are untouched"
    assert set(shown) == {begins + end} and leftovers(tmp_path) == []
    assert outcome(gloo_world(4).run(restart, tmp_path, 2, 1, 8)) == (1, True)


def test_without_room_to_rebuild_a_restart_reads_the_one_copy(gloo_world, tmp_path):
    gloo_world(2).run(save, tmp_path, 1, 1, 5)
    shutil.rmtree(tmp_path / "1")
    shown = gloo_world(2).run(restart, tmp_path, 1, 5, 8, RUN, 0, "no space for copies")
    assert (
        outcome(shown) == (1, True)
        and "have one copy only: " in shown[0][2][0]
        and "No space left" in shown[0][2][0]
    )
    assert leftovers(tmp_path) == [] and not (tmp_path / "1" / RUN.folder / ONE).exists()


# ---- before training -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("redundancy", "alone", "said"),
    [
        ("partner", "a partner is another one", "when a host is lost, so may be both copies"),
        (
            "xor",
            "an XOR group has several",
            "2 nodes in 1 XOR group(s) of 2; in addition to its own shards a node keeps a copy of",
        ),
    ],
)
def test_redundancy_needs_several_nodes_of_one_size(gloo_world, tmp_path, redundancy, alone, said):
    words = "require_redundancy", redundancy
    error, _ = gloo_world(2).run(checked, tmp_path, 2, *words)[0]
    assert f"--local-redundancy {redundancy}: all ranks see the same" in error
    assert f"counts as one node, and {alone}" in error
    assert "found " in gloo_world(4).run(checked, tmp_path, 3, *words)[3][0]
    shown = gloo_world(4).run(checked, tmp_path, 2, *words)
    assert all(error == "" for error, _ in shown) and said in "".join(shown[0][1])


def test_room_is_asked_for_before_training(gloo_world, tmp_path):
    """Three times this rank's bytes, and the partner's; what the run has there counts as free."""
    disk = os.statvfs(tmp_path)
    free = disk.f_bavail * disk.f_frsize
    for part, redundancy, enough in (
        (4, "none", True),
        (2, "none", False),
        (7, "partner", True),
        (4, "partner", False),
        (7, "xor", True),
        (5, "xor", False),
    ):
        shown = gloo_world(2).run(
            checked, tmp_path, 1, "require_space", RUN, free // part, redundancy
        )
        assert {error == "" for error, _ in shown} == {enough}, (part, redundancy)
    assert (
        "3 checkpoints (2 kept, one being written) of " in shown[0][0]
        and "or --local-redundancy none" in shown[0][0]
    )


def test_folders_that_others_may_change_are_refused(gloo_world, tmp_path):
    mine, open_to_all, theirs, link = (
        tmp_path / name for name in ("mine", "open", "theirs", "link")
    )
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
    assert gloo_world(2).run(join_on, [mine, tmp_path / "made" / "new"]) == ["", ""]
    assert (tmp_path / "made" / "new").stat().st_mode & 0o777 == 0o700 and list(
        mine.iterdir()
    ) == []
