"""Several ranks save and load together: one owner for every box, the same bits in every cut, and
one outcome for all when a rank fails.
"""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from checkpoint_cases import WHOLE, all_ranks, dealt, example, listing, loads
from logged import logged, silently

from megatron.checkpoint import manifest, writer
from megatron.checkpoint.reader import open_checkpoint
from megatron.checkpoint.writer import save_checkpoint, try_folder

STATE = {"iteration": 2, "consumed_samples": 16, "scale": float("inf")}
BOTH = 9  # a cut in which every one of 2 or 4 ranks owns something; of 1, one of two does


# ---- what the ranks do: functions of a Gloo world ------------------------------------------------


def save(
    root, iteration: int, seed: int, cut_seed: int, state: dict = STATE
) -> tuple[str, list[str]]:
    """(the error or the folder's name, lines logged) on this rank."""
    with logged() as lines:
        try:
            hand = dealt(seed, cut_seed)
            outcome = save_checkpoint(root, iteration, hand, state, all_ranks()).name
        except ValueError as error:
            outcome = str(error)
    dist.barrier()  # the first rank has tidied up
    return outcome, lines


# ---- failures ------------------------------------------------------------------------------------


def assert_one_error(outcomes, text: str, root) -> None:
    """Every rank ended with the same error, the older checkpoint is untouched, and no trace is
    left.
    """
    assert len({error for error, _ in outcomes}) == 1 and not any(lines for _, lines in outcomes)
    assert text in outcomes[0][0], outcomes[0][0]
    loads(silently(open_checkpoint, root).path, example(1))
    assert listing(root) == WHOLE


def test_several_failed_ranks_are_named_in_one_error(gloo_world, tmp_path):
    gloo_world(4).run(save, tmp_path, 1, 1, BOTH)
    outcomes = gloo_world(4).run(save_failing_on, tmp_path, [1, 3])
    text = (
        f"ranks 1, 3: {tmp_path}: the checkpoint of iteration 2 was not saved: RuntimeError: "
        f"the device is gone ({tmp_path}). Older checkpoints are untouched (newest: iteration 1)."
    )
    assert_one_error(outcomes, text, tmp_path)


def save_failing_on(
    root, ranks: list[int], call: str | None = None, at: int = 0
) -> tuple[str, list[str]]:
    """Save iteration 2; on some ranks the write of the shard raises, or the system call number `at`
    fails.
    """
    name, module, fault = call, os, OSError(5, "Input/output error")
    if call is None:
        name, module, fault = "write_shard", writer, RuntimeError("the device is gone")
    real, left = getattr(module, name), at

    def failing(*args, **kwargs):
        nonlocal left
        left -= 1
        if left == -1:
            raise fault
        return real(*args, **kwargs)

    if dist.get_rank() not in ranks:
        return save(root, 2, 2, BOTH)
    with mock.patch.object(module, name, failing):
        return save(root, 2, 2, BOTH)


@pytest.mark.parametrize(
    ("call", "rank"), [("fsync", 0), ("pwrite", 1), ("rename", 0), ("open", 0), ("open", 1)]
)
def test_any_failing_system_call_of_any_rank(gloo_world, tmp_path, call, rank):
    """Each call of one rank's save fails in turn: one error on both, or the save was complete
    before it; nothing waits for ever.
    """
    failed = 0
    for at in range(40):
        root = tmp_path / str(at)
        gloo_world(2).run(save, root, 1, 1, BOTH)
        outcomes = gloo_world(2).run(save_failing_on, root, [rank], call, at)
        if outcomes[0][0] == "iter_0000002":
            loads(open_checkpoint(root).path, example(2))
            if (root / manifest.TRACKER).read_text() == "2\n":
                break  # no such call any more
        elif rank == 0 and (root / "iter_0000002").exists():
            # of the parent folder, after the rename: the checkpoint is there, but not known to be
            # durable
            failed += 1
            assert outcomes[0] == outcomes[1]
        else:
            failed += 1
            failure = f"rank {rank}: {root}: the checkpoint of iteration 2 was not saved: "
            assert_one_error(outcomes, failure, root)
            assert "Input/output error" in outcomes[0][0]
    assert at < 39 and failed >= {"fsync": 3, "pwrite": 2, "rename": 1, "open": 3}[call]


def save_elsewhere(root) -> tuple[str, list[str]]:
    return save(Path(root, str(dist.get_rank())), 1, 1, BOTH)


def try_elsewhere(root, shared: bool, forbidden: int | None) -> str | None:
    folder = Path(root) if shared else Path(root, str(dist.get_rank()))
    folder.mkdir(exist_ok=True)
    error = PermissionError(13, "Permission denied") if dist.get_rank() == forbidden else None
    try:
        with mock.patch.object(writer, "write_file", side_effect=error, wraps=writer.write_file):
            try_folder(folder, all_ranks())
    except ValueError as error:
        return str(error)
    finally:
        dist.barrier()


def test_a_folder_that_is_not_shared_is_found(gloo_world, tmp_path):
    (first, _), (second, _) = gloo_world(2).run(save_elsewhere, tmp_path)
    not_shared = "or is not on a file system that all of its ranks share"
    assert first == second and not_shared in first
    assert first.startswith(
        f"rank 1: {tmp_path}/1: the checkpoint of iteration 1 was not saved: No"
    )
    first, second = gloo_world(2).run(try_elsewhere, tmp_path, False, None)
    assert first == second and "rank 1: " in first
    assert not_shared in first
    assert listing(tmp_path / "0") == []
    assert gloo_world(2).run(try_elsewhere, tmp_path / "1", True, None) == [None, None]
    first, second = gloo_world(2).run(try_elsewhere, tmp_path / "1", True, 1)
    assert first == second and first.startswith(
        f"rank 1: --save {tmp_path / '1'}: cannot be written to: Permission denied; "
    )
    assert listing(tmp_path / "1") == []


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
