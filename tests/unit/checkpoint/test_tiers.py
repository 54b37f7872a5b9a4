"""Real runs with two tiers: a restart takes the newest of both, whatever is lost, on any layout;
background saves come from the local one.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from local_cases import on_nodes, start_and_die
from reshard_cases import LAYOUTS, differing, flags, load_and_compare, saved, start

from megatron.checkpoint.local.nodes import RUN_FILE

FEATURE, LAYOUT = "gqa-untied", "tp2dp2"
EVERY = ("--save-interval", 3, "--local-save-interval", 2)


def folders(root: Path) -> tuple:
    return (
        "--save",
        root / "shared",
        "--load",
        root / "shared",
        "--local-checkpoint-dir",
        root / "local",
    )


def run(gloo_world, root: Path, *more: object) -> str:
    """What rank 0 printed, or the error of all."""
    return gloo_world(LAYOUTS[LAYOUT][0]).run(
        on_nodes, 2, None, start, flags(FEATURE, LAYOUT, *folders(root), *EVERY, *more)
    )[0]


@pytest.fixture(scope="module")
def trained(gloo_world, tmp_path_factory):
    """A run of 6 iterations with partners, which died before the save of iteration 6 to --save was
    over; `whole` has that one.
    """
    root = tmp_path_factory.mktemp("tiers")
    text = run(gloo_world, root, "--local-redundancy", "partner")
    assert text.endswith("exit code 0"), text
    shutil.copytree(saved(root / "shared", 6), saved(root / "whole", 6))
    shutil.rmtree(saved(root / "shared", 6))
    return root


@pytest.fixture
def died(trained, tmp_path):
    """The same, to be spoilt; it takes the copy for itself."""
    root = tmp_path / "run"
    shutil.copytree(trained, root)
    name = (root / "shared" / RUN_FILE).read_text().split()[0]
    (root / "shared" / RUN_FILE).write_text(f"{name}\n{(root / 'shared').resolve()}\n")
    for path in (root / "local").glob("*/*/*/MANIFEST.json"):
        _moved(path, str((trained / "shared").resolve()), str((root / "shared").resolve()))
    return root


def _moved(path: Path, before: str, after: str) -> None:
    from megatron.checkpoint.manifest import decode_manifest, encode_manifest

    content = decode_manifest(path.read_bytes(), path)
    assert content["run"]["save"] == before
    content["run"]["save"] = after
    path.write_bytes(encode_manifest(content))


def die_before(root: Path, iteration: int) -> None:
    """Forget what was saved locally from `iteration` on."""
    for path in (root / "local").glob("*/*/iter_*"):
        if int(path.name[5:]) >= iteration:
            shutil.rmtree(path)


def goes_on_as_it_was(gloo_world, root: Path, *more: object) -> str:
    """The text of a restart, which ends with the bits of the run that did not die."""
    text = run(gloo_world, root, *more)
    assert text.endswith("exit code 0"), text
    assert differing(saved(root / "shared", 6), saved(root / "whole", 6)) == []
    return text


def test_a_lost_node_and_two_lost_nodes(gloo_world, died, tmp_path):
    die_before(died, 6)
    shutil.copytree(died, tmp_path / "two")
    shutil.rmtree(died / "local" / "1")
    text = goes_on_as_it_was(gloo_world, died, "--local-redundancy", "partner")
    assert (
        "taking the local checkpoint of iteration 4 (" in text
        and "/shared has iteration 3\n" in text
        and "rebuilt from their partners: node 1 (" in text
        and "at iteration 4; resumes bit for bit\n" in text
    )
    shutil.rmtree(tmp_path / "two" / "local")
    text = goes_on_as_it_was(gloo_world, tmp_path / "two", "--local-redundancy", "partner")
    assert "taking the local" not in text and "at iteration 3; resumes bit for bit\n" in text


def test_a_run_whose_nodes_are_a_set(gloo_world, tmp_path):
    """Four nodes of one rank; one is lost. The restart resumes bit for bit."""
    words = flags(FEATURE, LAYOUT, *folders(tmp_path), *EVERY, "--local-redundancy", "xor")
    text = gloo_world(4).run(on_nodes, 1, None, start, words)[0]
    assert (
        text.endswith("exit code 0")
        and "--local-redundancy xor: 4 nodes in 1 XOR group(s) of 4; " in text
    ), text
    shutil.move(saved(tmp_path / "shared", 6), saved(tmp_path / "whole", 6))
    die_before(tmp_path, 6)
    shutil.rmtree(tmp_path / "local" / "2")
    text = gloo_world(4).run(on_nodes, 1, None, start, words)[0]
    assert (
        "taking the local checkpoint of iteration 4 (" in text
        and "rebuilt from their XOR groups: node 2 (" in text
    ), text
    assert differing(saved(tmp_path / "shared", 6), saved(tmp_path / "whole", 6)) == []


def test_the_shared_one_is_taken_when_it_is_newer(gloo_world, died):
    shutil.copytree(saved(died / "whole", 6), saved(died / "shared", 6))
    die_before(died, 6)
    text = run(gloo_world, died)
    assert (
        "taking the local" not in text
        and f"loaded checkpoint {saved(died / 'shared', 6)} at iteration 6" in text
    )


def test_an_older_local_one_is_taken_when_that_is_allowed(gloo_world, died):
    """The newest of --load is damaged, and the local one is newer than the one before."""
    shutil.copytree(saved(died / "whole", 6), saved(died / "shared", 6))
    (saved(died / "shared", 6) / "shard-00001.digests").unlink()
    die_before(died, 6)
    assert "iter_0000006 cannot be loaded; load the older whole one with --ckpt-step 3" in run(
        gloo_world, died
    )
    text = run(gloo_world, died, "--allow-older-checkpoint")
    assert (
        "taking the local checkpoint of iteration 4 (" in text
        and "has iteration 6, which is not whole" in text
    )
    assert "at iteration 4; resumes bit for bit" in text


@pytest.mark.parametrize(("layout", "each"), [("one", 1), ("dp4zero3shard2", 1), ("tp4sp", 4)])
def test_any_layout_on_any_nodes(gloo_world, died, layout, each):
    """Where folder 1 is no node any more, the partners' copies serve."""
    arguments = flags(FEATURE, layout, *folders(died), "--local-save-interval", 2)
    size, work = LAYOUTS[layout][0], (load_and_compare, arguments, saved(died / "whole", 6))
    assert (
        gloo_world(size).run(on_nodes, each, None, *work)
        if size > 1
        else [on_nodes(each, None, *work)]
    ) == [[]] * size
    if layout == "dp4zero3shard2":  # nodes 2 and 3 have nothing
        with pytest.raises(AssertionError, match="No such file"):
            gloo_world(size).run(on_nodes, each, "nothing is fetched", *work)


# ---- whose local checkpoints ---------------------------------------------------------------------


def test_a_new_run_in_the_same_folder_does_not_take_the_old_ones(gloo_world, died):
    """Run 1 died before its first save to --save. Run 2 begins anew there and dies at once: its
    restart must not go on with run 1.
    """
    shutil.rmtree(saved(died / "shared", 3))
    save, shared, _, _, *local = folders(died)
    anew = flags(FEATURE, LAYOUT, save, shared, *local, *EVERY)
    assert gloo_world(4).run(on_nodes, 2, None, start_and_die, anew)[0].endswith("exit code 0")
    assert "taking the local checkpoint" not in run(gloo_world, died)


def test_a_copy_of_a_run_does_not_take_its_local_ones(gloo_world, died):
    (died / "copy").mkdir()
    for name in ("shared", "local"):
        (died / name).rename(died / "copy" / name)
    text = run(gloo_world, died / "copy")
    assert "was copied or moved" in text and text.endswith("exit code 0"), text
    assert "taking the local checkpoint" not in text


# ---- from the local tier to --save ---------------------------------------------------------------


def test_background_saves_are_copies_of_local_ones(gloo_world, trained, tmp_path):
    text = run(gloo_world, tmp_path, "--async-save", "--save-rate-limit", 1)
    assert text.endswith("exit code 0"), text
    assert differing(saved(tmp_path / "shared", 6), saved(trained / "whole", 6)) == []
    local = {
        path.name: path.read_bytes() for path in tmp_path.glob("local/*/*/iter_0000006/shard-*")
    }
    assert (
        local
        == {path.name: path.read_bytes() for path in saved(tmp_path / "shared", 6).glob("shard-*")}
        and len(local) == 8
    )
