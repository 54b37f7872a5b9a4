"""Several ranks save and load together: one owner for every box, the same bits in every cut, and
one outcome for all when a rank fails.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from checkpoint_cases import cut, example, loads, mounted, same_bits
from logged import logged, silently

from megatron.checkpoint import manifest, writer
from megatron.checkpoint.ranks import Ranks
from megatron.checkpoint.reader import Checkpoint, find_checkpoint
from megatron.checkpoint.writer import save_checkpoint, try_folder
from megatron.distributed.groups import ALONE, Axis, Groups, Layout, build_groups
from megatron.model.spec import Box
from megatron.optimizer.optimizer import Optimizer

STATE = {"iteration": 2, "consumed_samples": 16, "scale": float("inf")}
BOTH = 9  # a cut in which every one of 2 or 4 ranks owns something; of 1, one of two does
WHOLE = ["iter_0000001", "latest_checkpointed_iteration.txt"]


def listing(root) -> list[str]:
    return sorted(p.name for p in Path(root).iterdir())


# ---- who owns what -------------------------------------------------------------------------------


def _owns(box: Box, groups: Groups) -> bool:
    place = Optimizer.holder(SimpleNamespace(groups=groups, blocks=[SimpleNamespace(stage=0)]), box)
    return place is not None and place.rank == 0


def _without_replicas(box: Box, groups: Groups) -> bool:
    return {None: ALONE, "tp": groups.tp, "kv": groups.kv, "tied": groups.tied}[
        box.replicated
    ].rank == 0


def _without_kv(box: Box, groups: Groups) -> bool:
    return groups.dense.replicas.rank == 0 and (box.replicated != "tp" or groups.tp.rank == 0)


def _shifted(box: Box, groups: Groups) -> bool:
    return groups.dense.replicas.rank == groups.tp.rank == 0


def wrongly_owned(layout: Layout, kv_heads: int, rule) -> list:
    """Boxes that have not exactly one owner, or not the first of their holders: the holders are
    told by what they hold, not by groups.
    """
    holders: dict[tuple, list[int]] = {}
    owners: dict[tuple, list[int]] = {}
    for rank in range(layout.world):
        groups, at = (
            build_groups(layout, rank, lambda ranks, group_desc: object(), kv_heads),
            layout.coordinates(rank),
        )
        held = {
            None: at["tp"],
            "tp": 0,
            "kv": at["tp"] * kv_heads // layout.tp if kv_heads < layout.tp else at["tp"],
        }
        for replicated, part in held.items():
            content = (replicated, at["pp"], part)
            holders.setdefault(content, []).append(rank)
            if rule(Box("w", (8,), (part,), (1,), replicated=replicated), groups):
                owners.setdefault(content, []).append(rank)
    return [content for content, ranks in holders.items() if owners.get(content) != ranks[:1]]


LAYOUTS = [
    Layout(*sizes, order=order)
    for sizes in [
        (1, 1, 1, 1),
        (4, 1, 1, 1),
        (1, 1, 4, 1),
        (2, 1, 2, 1),
        (4, 2, 3, 2),
        (8, 2, 4, 4),
    ]
    for order in (("pp", "dp", "cp", "tp"), ("dp", "pp", "cp", "tp"))
]


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_every_box_has_one_owner(kv_heads):
    assert not any(wrongly_owned(layout, kv_heads, _owns) for layout in LAYOUTS)


@pytest.mark.parametrize("rule", [_without_replicas, _without_kv, _shifted])
def test_a_wrong_rule_of_ownership_is_caught(rule):
    assert any(wrongly_owned(layout, 2, rule) for layout in LAYOUTS)


# ---- what the ranks do: functions of a Gloo world ------------------------------------------------


def all_ranks() -> Ranks:
    return Ranks(Axis("world", dist.get_rank(), tuple(range(dist.get_world_size()))))


def part_of(full: torch.Tensor, offset: tuple, extent: tuple) -> torch.Tensor:
    return full[tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))]


def dealt(seed: int, cut_seed: int) -> dict[int, list[tuple[Box, torch.Tensor]]]:
    """The tensors of `example(seed)` cut at random and dealt to the ranks: some of them, sometimes,
    get none.
    """
    rng, world = random.Random(cut_seed), dist.get_world_size()
    takers = rng.sample(range(world), rng.randint(1, world))
    hands: dict[int, list] = {rank: [] for rank in range(world)}
    for name, full in example(seed).items():
        for offset, extent in cut(rng, tuple(full.shape), rng.randint(1, 5)):
            hands[rng.choice(takers)].append(
                (
                    Box(name, tuple(full.shape), offset, extent),
                    part_of(full, offset, extent).clone(),
                )
            )
    return hands


def save(
    root, iteration: int, seed: int, cut_seed: int, state: dict = STATE
) -> tuple[str, list[str]]:
    """(the error or the folder's name, what was said) on this rank."""
    with logged() as lines:
        try:
            hand = dealt(seed, cut_seed)[dist.get_rank()]
            outcome = save_checkpoint(root, iteration, hand, state, all_ranks()).name
        except ValueError as error:
            outcome = str(error)
    dist.barrier()  # the first rank has tidied up
    return outcome, lines


def owning_ranks(cut_seed: int) -> int:
    return sum(bool(hand) for hand in dealt(0, cut_seed).values())


def read_other_cut(path, seed: int, cut_seed: int) -> bool:
    """Whether the boxes that another cut deals to this rank come back bit for bit."""
    with Checkpoint(path) as checkpoint:
        for box, want in dealt(seed, cut_seed)[dist.get_rank()]:
            into = torch.zeros_like(want)
            checkpoint.read(box, into)
            if not same_bits(into, want):
                return False
        return True


@pytest.mark.parametrize("size", [2, 4])
def test_any_cut_over_ranks_comes_back_in_any_other(gloo_world, tmp_path, size):
    for cut_seed in range(6):
        root = tmp_path / str(cut_seed)
        assert gloo_world(size).run(save, root, 1, 7, cut_seed) == [("iter_0000001", [])] * size
        loads(silently(find_checkpoint, root), example(7))
        owners = gloo_world(size).run(owning_ranks, cut_seed)[0]
        shards = [
            f"shard-{i:05d}{kind}" for i in range(owners) for kind in (".digests", ".safetensors")
        ]
        assert listing(root / "iter_0000001") == ["MANIFEST.json", *shards]
        assert listing(root) == WHOLE
        assert all(gloo_world(size).run(read_other_cut, root / "iter_0000001", 7, cut_seed + 100))
        # the control: other values
        assert not all(
            gloo_world(size).run(read_other_cut, root / "iter_0000001", 8, cut_seed + 100)
        )


def save_by_rank(root) -> bool:
    """Each rank owns the row of its number; whether every shard holds the row of the rank at its
    place, rank 2 owning nothing.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = [r for r in range(size) if r != 2]
    mine = (
        [(Box("w", (len(rows), 3), (rows.index(rank), 0), (1, 3)), torch.full((1, 3), float(rank)))]
        if rank in rows
        else []
    )
    path = save_checkpoint(root, 1, mine, STATE, ranks=all_ranks())
    with Checkpoint(path) as checkpoint:
        where = {piece.offset[0]: piece.shard.path.name for piece in checkpoint.tensors["w"].pieces}
        return (
            where == {i: manifest.shard_file(i) for i in range(len(rows))}
            and checkpoint["w"][:, 0].tolist() == rows
        )


def test_shards_are_numbered_by_rank_and_a_rank_without_boxes_writes_none(gloo_world, tmp_path):
    assert gloo_world(4).run(save_by_rank, tmp_path) == [True] * 4


# ---- an iteration that exists already ------------------------------------------------------------


def test_a_different_cut_is_refused_on_every_rank(gloo_world, tmp_path):
    gloo_world(2).run(save, tmp_path, 1, 1, BOTH)
    first, second = gloo_world(2).run(save, tmp_path, 1, 1, 1, STATE)
    text = "differs from this run in: how tensors are cut into shards."
    assert first == second and f"iter_0000001 exists already, is whole, and {text}" in first[0]
    loads(find_checkpoint(tmp_path), example(1))
    assert listing(tmp_path) == WHOLE


# ---- failures ------------------------------------------------------------------------------------


def assert_one_error(outcomes, text: str, root) -> None:
    """Every rank ended with the same error, the older checkpoint is untouched, and no trace is
    left.
    """
    assert len({error for error, _ in outcomes}) == 1 and not any(said for _, said in outcomes)
    assert text in outcomes[0][0], outcomes[0][0]
    loads(silently(find_checkpoint, root), example(1))
    assert listing(root) == WHOLE


def save_with_little_room(
    root, iteration: int, small: int, rows: dict[int, int]
) -> tuple[str, list[str]]:
    """Every rank owns rows of 4 KiB. Rank `small` writes when the other has, which finds space."""
    rank, first = dist.get_rank(), 0
    for other in range(rank):
        first += rows[other]
    box = Box("w", (sum(rows.values()), 1024), (first, 0), (rows[rank], 1024))
    real = writer.write_shard

    def late(folder, index, *args, **options):
        end = time.monotonic() + 300
        while (
            not (table := folder / manifest.table_file(1 - index)).exists()
            or not table.stat().st_size
        ):
            assert time.monotonic() < end
            time.sleep(0.01)
        return real(folder, index, *args, **options)

    if rank == small:
        writer.write_shard = late
    try:
        outcome = save_checkpoint(
            root, iteration, [(box, torch.ones(rows[rank], 1024))], STATE, ranks=all_ranks()
        ).name
    except ValueError as error:
        outcome = str(error)
    finally:
        writer.write_shard = real
    dist.barrier()
    return outcome, []


KEPT = "Older checkpoints are untouched (newest: iteration 1)."


def test_disk_full_on_one_of_two_ranks(gloo_world, tmp_path):
    small = 1
    with mounted(tmp_path, "size=2m"):
        gloo_world(2).run(save, tmp_path, 1, 1, BOTH)
        outcomes = gloo_world(2).run(
            save_with_little_room, tmp_path, 2, small, {small: 600, 1 - small: 10}
        )
        assert_one_error(
            outcomes,
            (
                f"rank {small}: {tmp_path}: the checkpoint of iteration 2 was not saved: No "
                "space left on device"
            ),
            tmp_path,
        )
        assert "Free space" in outcomes[0][0] and KEPT in outcomes[0][0]
        assert [outcome for outcome, _ in gloo_world(2).run(save, tmp_path, 2, 2, BOTH)] == [
            "iter_0000002"
        ] * 2
        loads(find_checkpoint(tmp_path), example(2))


def test_several_failed_ranks_are_named_in_one_error(gloo_world, tmp_path):
    gloo_world(4).run(save, tmp_path, 1, 1, BOTH)
    outcomes = gloo_world(4).run(save_failing_on, tmp_path, [1, 3], "error", None)
    text = (
        f"ranks 1, 3: {tmp_path}: the checkpoint of iteration 2 was not saved: RuntimeError: "
        f"the device is gone ({tmp_path}). {KEPT}"
    )
    assert_one_error(outcomes, text, tmp_path)


def save_failing_on(
    root, ranks: list[int], kind: str, call: str | None, at: int = 0
) -> tuple[str, list[str]]:
    """Save iteration 2; on some ranks the write of the shard raises, or the system call number `at`
    fails.
    """
    name, module = ("write_shard", writer) if call is None else (call, os)
    real, left = getattr(module, name), at

    def failing(*args, **kwargs):
        nonlocal left
        left -= 1
        if left == -1:
            raise (
                RuntimeError("the device is gone")
                if kind == "error"
                else OSError(5, "Input/output error")
            )
        return real(*args, **kwargs)

    if dist.get_rank() in ranks:
        setattr(module, name, failing)
    try:
        return save(root, 2, 2, BOTH)
    finally:
        setattr(module, name, real)


@pytest.mark.parametrize(
    ("call", "rank"), [("open", 0), ("fsync", 0), ("rename", 0), ("pwritev", 1), ("fsync", 1)]
)
def test_any_failing_system_call_of_any_rank(gloo_world, tmp_path, call, rank):
    """Each call of one rank's save fails in turn: one error on both, or the save was complete
    before it; nothing waits for ever.
    """
    failed = 0
    for at in range(40):
        root = tmp_path / str(at)
        gloo_world(2).run(save, root, 1, 1, BOTH)
        outcomes = gloo_world(2).run(save_failing_on, root, [rank], "system", call, at)
        if outcomes[0][0] == "iter_0000002":
            loads(find_checkpoint(root), example(2))
            if (root / manifest.TRACKER).read_text() == "2\n":
                break  # no such call any more
        elif rank == 0 and call in ("open", "fsync") and (root / "iter_0000002").exists():
            # of the parent folder, after the rename: the checkpoint is there, but not known to be
            # durable
            failed += 1
            assert outcomes[0] == outcomes[1]
        else:
            failed += 1
            assert_one_error(
                outcomes,
                (
                    f"rank {rank}: {root}: the checkpoint of iteration 2 was not saved: "
                    "Input/output error"
                ),
                root,
            )
    assert at < 39 and failed >= {"open": 2, "pwritev": 2, "fsync": 2, "rename": 0}[call] + (
        rank == 0
    )


def save_elsewhere(root) -> tuple[str, list[str]]:
    return save(Path(root, str(dist.get_rank())), 1, 1, BOTH)


def try_elsewhere(root, shared: bool, forbidden: int | None) -> str | None:
    folder = Path(root) if shared else Path(root, str(dist.get_rank()))
    folder.mkdir(exist_ok=True)
    real = writer.new_file
    if dist.get_rank() == forbidden:
        writer.new_file = lambda path: (_ for _ in ()).throw(
            PermissionError(13, "Permission denied")
        )
    try:
        try_folder(folder, all_ranks())
    except ValueError as error:
        return str(error)
    finally:
        writer.new_file = real
        dist.barrier()


def test_a_folder_that_is_not_shared_is_found(gloo_world, tmp_path):
    (first, _), (second, _) = gloo_world(2).run(save_elsewhere, tmp_path)
    assert (
        first == second
        and first.startswith(f"rank 1: {tmp_path}/1: the folder .tmp-iter-1-")
        and "that all nodes share?" in first
    )
    first, second = gloo_world(2).run(try_elsewhere, tmp_path, False, None)
    assert (
        first == second
        and "rank 1: " in first
        and "is --save on a file system that all nodes share?" in first
    )
    assert listing(tmp_path / "0") == []


def test_every_rank_tries_the_folder(gloo_world, tmp_path):
    assert gloo_world(2).run(try_elsewhere, tmp_path, True, None) == [None, None]
    first, second = gloo_world(2).run(try_elsewhere, tmp_path, True, 1)
    assert first == second and first.startswith(
        f"rank 1: --save {tmp_path}: cannot be written to: Permission denied; "
    )
    assert listing(tmp_path) == []


def save_another_state(root) -> tuple[str, list[str]]:
    return save(root, 2, 2, BOTH, STATE | {"scale": float(dist.get_rank() // 3)})


def test_ranks_that_run_apart_are_found(gloo_world, tmp_path):
    gloo_world(4).run(save, tmp_path, 1, 1, BOTH)
    outcomes = gloo_world(4).run(save_another_state, tmp_path)
    assert_one_error(
        outcomes,
        "iteration 2 was not saved: the state of rank 3 differs from that of rank 0 in scale",
        tmp_path,
    )


# ---- owners that make mistakes -------------------------------------------------------------------


def save_with_a_mistake(root, mistake: str | None) -> str:
    """Three ranks' worth of rows on two ranks; one of them makes a mistake."""
    full, rank = torch.arange(60.0).view(6, 10), dist.get_rank()
    rows = {0: (0, 2), 1: (2, 6)}[rank]
    mine = [
        (Box("w", (6, 10), (rows[0], 0), (rows[1] - rows[0], 10)), full[rows[0] : rows[1]].clone())
    ]
    if rank == 1:
        box, tensor = mine[0]
        if mistake == "skips a box":
            mine = [(Box("other", (1,), (0,), (1,)), torch.ones(1))]
        elif mistake == "owns the other's box too":
            mine.append((Box("w", (6, 10), (0, 0), (2, 10)), full[:2].clone()))
        elif mistake == "wrong offset":
            mine = [(Box("w", (6, 10), (1, 0), (4, 10)), tensor)]
        elif mistake == "wrong rows":
            mine = [(box, tensor.flip(0))]
    try:
        return save_checkpoint(root, 1, mine, STATE, ranks=all_ranks()).name
    except ValueError as error:
        return str(error)
    finally:
        dist.barrier()


@pytest.mark.parametrize("mistake", ["skips a box", "owns the other's box too", "wrong offset"])
def test_an_owner_that_makes_a_mistake_commits_nothing(gloo_world, tmp_path, mistake):
    first, second = gloo_world(2).run(save_with_a_mistake, tmp_path, mistake)
    assert (
        first == second
        and first.startswith("rank 0: ")
        and "do not hold every element of w [6, 10] exactly once" in first
    )
    assert listing(tmp_path) == []


def test_comparing_bits_catches_wrong_rows(gloo_world, tmp_path):
    """The control of every test that compares what was loaded: right boxes, wrong values."""
    full = {"w": torch.arange(60.0).view(6, 10)}
    assert gloo_world(2).run(save_with_a_mistake, tmp_path / "right", None) == ["iter_0000001"] * 2
    loads(tmp_path / "right" / "iter_0000001", full)
    assert (
        gloo_world(2).run(save_with_a_mistake, tmp_path / "wrong", "wrong rows")
        == ["iter_0000001"] * 2
    )
    with pytest.raises(AssertionError):
        loads(tmp_path / "wrong" / "iter_0000001", full)
