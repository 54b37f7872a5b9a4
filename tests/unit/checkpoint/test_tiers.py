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
    shared, local = root / "shared", root / "local"
    return "--save", shared, "--load", shared, "--local-checkpoint-dir", local


def run(gloo_world, root: Path, *more: object) -> str:
    """What rank 0 printed, or the error of all."""
    words = flags(FEATURE, LAYOUT, *folders(root), *EVERY, *more)
    return gloo_world(LAYOUTS[LAYOUT][0]).run(on_nodes, 2, start, words)[0]


@pytest.fixture(scope="module")
def trained(gloo_world, tmp_path_factory):
    """A run of 6 iterations with partners and background saves, which died before the save of
    iteration 6 to --save was over; `whole` has that one.
    """
    root = tmp_path_factory.mktemp("tiers")
    text = run(gloo_world, root, "--local-redundancy", "partner", "--async-save")
    assert text.endswith("exit code 0"), text
    shutil.move(saved(root / "shared", 6), saved(root / "whole", 6))
    return root


@pytest.fixture
def died(trained, tmp_path):
    """The same, to be spoilt; it takes the copy for itself."""
    root = tmp_path / "run"
    shutil.copytree(trained, root)
    run_file = root / "shared" / RUN_FILE
    run_file.write_text(f"{run_file.read_text().split()[0]}\n{(root / 'shared').resolve()}\n")
    return root


def die_before(root: Path, iteration: int) -> None:
    """Forget what was saved locally from `iteration` on."""
    for path in (root / "local").glob("*/*/iter_*"):
        if int(path.name[5:]) >= iteration:
            shutil.rmtree(path)


def test_background_saves_are_copies_of_local_ones(trained):
    def shards(folders) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for f in folders for path in f.glob("shard-*")}

    local = shards(trained.glob("local/*/*/iter_0000006"))
    whole = shards([saved(trained / "whole", 6)])
    assert len(whole) == 8 and whole.items() <= local.items()


def test_a_lost_node_is_rebuilt_and_the_run_resumes(gloo_world, died):
    die_before(died, 6)
    shutil.rmtree(died / "local" / "1")
    text = run(gloo_world, died, "--local-redundancy", "partner")
    assert text.endswith("exit code 0"), text
    for part in (
        "taking the local checkpoint of iteration 4 (",
        "/shared has iteration 3\n",
        "rebuilt from their XOR groups: node 1 (",
        "at iteration 4; resumes bit for bit\n",
    ):
        assert part in text
    assert differing(saved(died / "shared", 6), saved(died / "whole", 6)) == []


def test_the_shared_one_is_taken_when_it_is_newer_or_alone(gloo_world, died):
    shutil.copytree(saved(died / "whole", 6), saved(died / "shared", 6))
    die_before(died, 6)
    text = run(gloo_world, died)
    assert "taking the local" not in text
    assert f"loaded checkpoint {saved(died / 'shared', 6)} at iteration 6" in text
    shutil.rmtree(saved(died / "shared", 6))
    shutil.rmtree(died / "local")
    text = run(gloo_world, died, "--exit-interval", 4)
    assert "taking the local" not in text and "at iteration 3; resumes bit for bit\n" in text


def test_what_nodes_hold_of_an_abandoned_pass_is_not_taken(gloo_world, died):
    """A run that goes back may be on other nodes."""
    elsewhere = shutil.copytree(died / "local", died / "elsewhere")
    text = run(gloo_world, died, "--ckpt-step", 3, "--exit-interval", 5)
    assert text.endswith("exit code 0") and saved(died / "shared", 5).exists(), text
    shutil.rmtree(died / "local")
    elsewhere.rename(died / "local")
    text = run(gloo_world, died)
    assert "taking the local" not in text and "at iteration 5;" in text


def test_a_save_without_the_local_tier_makes_it_stale(gloo_world, died):
    plain = flags(FEATURE, LAYOUT, *folders(died)[:4], "--exit-interval", 4)
    assert gloo_world(4).run(start_and_die, plain)[0].endswith("exit code 0")
    text = run(gloo_world, died)
    assert "taking the local checkpoint of iteration 6 (" in text, "nothing has been saved"
    changed = "--seed", "5", "--accept-changed", "seed"
    assert gloo_world(4).run(start, (*plain, *changed))[0].endswith("exit code 0")
    text = run(gloo_world, died, *changed)
    assert "taking the local" not in text and "at iteration 4;" in text


def test_an_older_local_one_is_taken_when_that_is_allowed(gloo_world, died):
    """The newest of --load is damaged, and the local one is newer than the one before."""
    shutil.copytree(saved(died / "whole", 6), saved(died / "shared", 6))
    (saved(died / "shared", 6) / "shard-00001.digests").unlink()
    die_before(died, 6)
    refused = "iter_0000006 cannot be loaded; load the older whole one with --ckpt-step 3"
    assert refused in run(gloo_world, died)
    text = run(gloo_world, died, "--allow-older-checkpoint", "--exit-interval", 5)
    assert "taking the local checkpoint of iteration 4 (" in text
    assert "has iteration 6, which is not whole" in text
    assert "at iteration 4; resumes bit for bit" in text


@pytest.mark.parametrize(("layout", "each"), [("one", 1), ("dp4zero3shard2", 1)])
def test_any_layout_on_any_nodes(gloo_world, died, layout, each):
    """Where folder 1 is no node any more, the partners' blocks serve."""
    arguments = flags(FEATURE, layout, *folders(died), "--local-save-interval", 2)
    size, work = LAYOUTS[layout][0], (load_and_compare, arguments, saved(died / "whole", 6))
    if size == 1:
        assert on_nodes(each, *work) == []
        return
    assert gloo_world(size).run(on_nodes, each, *work) == [[]] * size


def test_a_new_run_and_a_copy_do_not_take_the_old_ones(gloo_world, died, tmp_path):
    """Run 1 died before its first save to --save. Run 2 begins anew there and dies at once: its
    restart must not go on with run 1. Nor does a run that was copied.
    """
    for name in ("shared", "local"):
        shutil.copytree(died / name, tmp_path / "copy" / name)
    text = run(gloo_world, tmp_path / "copy", "--exit-interval", 4)
    assert text.endswith("exit code 0"), text
    assert "taking the local checkpoint" not in text

    shutil.rmtree(saved(died / "shared", 3))
    save, shared, _, _, *local = folders(died)
    anew = flags(FEATURE, LAYOUT, save, shared, *local, *EVERY)
    assert gloo_world(4).run(on_nodes, 2, start_and_die, anew)[0].endswith("exit code 0")
    text = run(gloo_world, died, "--exit-interval", 1)
    assert text.endswith("exit code 0") and "taking the local checkpoint" not in text
