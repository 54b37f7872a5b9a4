"""Real runs: a checkpoint of any layout loads on any other with the same bits, and runs go on from
it.

What a layout saves are logical tensors. That each layout reads those of one process and writes the
same ones again is all there is to show of loading: then each reads what any other writes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from checkpoint_cases import flip
from reshard_cases import (
    ALL_LAYOUTS,
    LAYOUTS,
    differing,
    distance,
    flags,
    load_and_compare,
    saved,
    saving,
    start,
)
from reshard_table import EXPERT_TABLE, TABLE, Row, Runs, faults

from megatron.checkpoint.reader import Checkpoint, find_checkpoint
from megatron.training.checkpointing import finalize, save
from megatron.training.exit import Exit
from megatron.training.loop import COMPLETE

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
import generate  # noqa: E402


@pytest.fixture(scope="module")
def on(gloo_world):
    """on(layout, function, *args): the results by rank."""

    def run(layout: str, function, *args):
        ranks = ALL_LAYOUTS[layout][0]
        return gloo_world(ranks).run(function, *args) if ranks > 1 else [function(*args)]

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield run
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def runs(on, tmp_path_factory):
    """runs(feature, layout): the --save folder of a run of 6 iterations, saved at 3 and 6; each is
    trained once.
    """
    return Runs(tmp_path_factory.mktemp("runs"), on)


CASES = [("tied-bf16", layout) for layout in LAYOUTS] + [
    ("gqa-untied", layout) for layout in LAYOUTS if "zero" not in layout
]


@pytest.mark.parametrize(("feature", "layout"), CASES)
def test_every_layout_reads_and_writes_the_tensors_of_one_process(
    on, runs, tmp_path, feature, layout
):
    """What each rank holds after loading, optimizer included, is the checkpoint's; it is saved
    again, as it was.
    """
    root = runs(feature, "one")
    arguments = flags(feature, layout, "--load", root, "--ckpt-step", 3, *saving(tmp_path))
    assert on(layout, load_and_compare, arguments, saved(root)) == [[]] * LAYOUTS[layout][0]
    assert differing(saved(root), saved(tmp_path)) == []
    # every rank writes a shard, but for a last stage that is a tied head
    writers = LAYOUTS[layout][0] - ((feature, layout) == ("tied-bf16", "pp4"))
    assert len(list(saved(tmp_path).glob("*.safetensors"))) == writers


def test_a_run_without_the_optimizers_state_is_outside_the_bound(on, runs, tmp_path):
    root = runs("mqa-fp64", "one")
    arguments = flags("mqa-fp64", "tp2", "--load", root, "--ckpt-step", 3, "--no-load-optim")
    on("tp2", start, (*arguments, *saving(tmp_path)))
    assert distance(saved(root, 6), saved(tmp_path, 6)) > 1e-4
    # the control of equal bits: training changes every tensor
    assert differing(saved(root, 3), saved(root, 6))


# of the table, which reshard_table.py measures: on the same layout, on another, and what is saved
# with the tensors
FULL = pytest.mark.full
ROWS = [
    Row("mqa-fp64", "one", "tp2"),
    pytest.param(Row("mqa-fp64", "tp2", "tp2sp"), marks=FULL),
    pytest.param(Row("mqa-fp64", "pp2", "tp2"), marks=FULL),
    Row("mqa-fp64", "pp2v2", "pp2v2"),
    pytest.param(Row("mqa-fp64", "dp2zero3", "dp2zero3"), marks=FULL),
    pytest.param(Row("mqa-fp64", "pp2zbv", "dp4zero3shard2"), marks=FULL),
    pytest.param(Row("untied-fp64", "pp2dp2zero2", "pp2dp2zero2"), marks=FULL),
    Row("gqa-fp16", "dp2zero3", "dp2zero3"),
    pytest.param(Row("ramp-fp64", "pp2v2", "dp2zero2"), marks=FULL),
    Row("ledger-fp64", "dp2", "tp2sp"),
]


@pytest.mark.parametrize("row", ROWS)
def test_a_run_goes_on_bit_for_bit_or_within_the_bound(runs, tmp_path, row):
    assert row in TABLE and faults(runs.measure(row, tmp_path)) == []


def test_a_broken_resume_is_seen_in_the_table(runs, tmp_path):
    row = Row("gqa-fp16", "dp2zero3", "dp2zero3")
    found = faults(runs.measure(row, tmp_path, "the loss scale begins anew"))
    assert any("scaler: " in fault for fault in found)
    assert "tensors differ 3 iterations later" in found


@pytest.mark.parametrize(
    ("source", "target", "more", "said"),
    [
        ("dp2zero1", "dp2zero3", "--micro-batch-size 2", "resumes bit for bit"),
        (
            "dp4zero3shard2",
            "dp2zero3",
            "",
            "resumes from the same state, not bit for bit: layout tp1 cp1 pp1 dp4 -> tp1 cp1 pp1 "
            "dp2, --zero-shard-size 2 -> None",
        ),
    ],
)
def test_a_run_says_what_another_stage_does_to_its_bits(on, tmp_path, source, target, more, said):
    """Bit for bit means it; where it is not promised nothing is tested but the words."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    common = more.split()
    on(source, start, flags("tied-bf16", source, *common, *saving(whole)))
    loading = ("--load", whole, "--ckpt-step", 3, *saving(resumed))
    text = on(target, start, flags("tied-bf16", target, *common, *loading))[0]
    assert f"iteration 3; {said}\n" in text
    assert said != "resumes bit for bit" or differing(saved(whole, 6), saved(resumed, 6)) == []


@pytest.mark.parametrize(
    ("mutant", "feature", "layout"),
    [
        ("every holder of a key/value head owns it", "mqa-fp64", "tp2"),
        ("both ends of a pipeline own a tied matrix", "tied-bf16", "pp2"),
        ("every data-parallel copy owns", "tied-bf16", "dp2"),
        ("no rank owns a tensor", "gqa-untied", "tp2"),
    ],
)
def test_a_wrong_owner_saves_nothing(on, tmp_path, mutant, feature, layout):
    """The run continues and logs it, with one error, on rank 0."""
    arguments = flags(feature, layout, *saving(tmp_path), "--train-iters", 3)
    first, second = on(layout, start, arguments, mutant)
    missing = "the shards do not hold layers.1.mlp.up.weight [64, 32], which the run has"
    assert "iteration 3 was NOT saved" in first and first.endswith("exit code 1")
    assert (missing if mutant.startswith("no rank") else "exactly once") in first
    assert "NOT saved" not in second and second.endswith("exit code 1")
    assert find_checkpoint(tmp_path) is None


@pytest.mark.parametrize(
    ("mutant", "feature", "layout"),
    [
        ("read at the beginning", "gqa-untied", "tp2"),
        ("weights are not published", "tied-bf16", "dp2zero3"),
    ],
)
def test_a_wrong_reader_is_caught(on, runs, mutant, feature, layout):
    root = runs(feature, "one")
    arguments = flags(feature, layout, "--load", root, "--ckpt-step", 3)
    assert any(on(layout, load_and_compare, arguments, saved(root), mutant))


# ---- one outcome for all ranks -------------------------------------------------------------------


def test_damage_that_one_rank_reads_ends_all_with_one_error_or_all_take_the_older_one(
    gloo_world, tmp_path
):
    """The flipped bit is in data that rank 1 alone reads, long after all have opened the
    checkpoint.
    """
    arguments = flags("gqa-untied", "tp2")
    gloo_world(2).run(start, (*arguments, *saving(tmp_path), "--ckpt-parallel-write", "owner"))
    shard = saved(tmp_path, 6) / "shard-00001.safetensors"
    flip(shard, -5)
    first, second = gloo_world(2).run(start, (*arguments, "--load", str(tmp_path)))
    assert first == second and first.startswith(f"rank 1: {shard}: damaged: bytes ")
    assert "iter_0000006 cannot be loaded; load the older whole one with --ckpt-step 3" in first
    first, second = gloo_world(2).run(
        start,
        (*arguments, "--load", str(tmp_path), "--allow-older-checkpoint", "--exit-interval", "4"),
    )
    assert (
        f"warning: {shard}: damaged: bytes " in first and "iter_0000006 CANNOT BE LOADED" in first
    )
    assert (
        "iteration 3; resumes bit for bit" in first
        and first.endswith("exit code 0")
        and "warning" not in second
    )
    (saved(tmp_path) / "MANIFEST.json").unlink()
    first, second = gloo_world(2).run(
        start, (*arguments, "--load", str(tmp_path), "--allow-older-checkpoint")
    )
    assert (
        first == second
        and "iter_0000003 cannot be loaded; no older whole checkpoint is there." in first
    )


# ---- experts: what routers keep is saved with the weights ----------------------------------------


@pytest.mark.parametrize("row", EXPERT_TABLE, ids=lambda row: f"{row.source}>{row.target}")
def test_a_run_with_experts_continues_on_other_ranks(runs, tmp_path, row):
    assert faults(runs.measure(row, tmp_path)) == []


def test_what_routers_keep_is_in_checkpoints(runs, capsys):
    """Each layer has its bias and its shares, which training has changed; text comes of it."""
    root = runs("moe-fp64", "dp4ep4")
    with Checkpoint(saved(root)) as checkpoint:
        for layer in (0, 1):
            bias, share = (
                checkpoint.read_tensor(f"layers.{layer}.mlp.router.expert_{name}")
                for name in ("bias", "share")
            )
            assert bias.abs().max() >= 1.9e-2 and bias.shape == (8,)
            assert share.std() > 0 and abs(share.sum() - 1) < 1e-12
        states = [name for name in checkpoint.names if name.startswith("optimizer.")]
        assert not [name for name in states if "router.expert" in name]
    assert generate.main(["--load", str(root), "--prompt", "1 2 3", "--num-tokens", "4"]) == 0
    assert len(capsys.readouterr().out.split()) > 3


def save_diverged(run) -> Exit:
    """One value of an expert changes on the last rank alone."""
    if run.groups.rank == run.groups.world.size - 1:
        of_experts = (
            (name, parameter)
            for name, parameter, spec in run.model.declared()
            if spec.group == "expert"
        )
        name, parameter = next(of_experts)
        parameter.data.view(-1)[5] += 1e-9
        assert name == "layers.0.mlp.experts.fc1"
    save(run)
    return Exit(COMPLETE, 0 if finalize(run) else 1)


def test_a_copy_of_an_expert_that_differs_is_named(on, tmp_path):
    """Of 4 ranks 1 and 3 hold the same experts."""
    arguments = flags("moe-fp64", "dp4ep2zero1", *saving(tmp_path))
    text = on("dp4ep2zero1", start, arguments, None, save_diverged)[0]
    assert "replicas have diverged: layers.0.mlp.experts.fc1 (weights) differs between " in text
    assert "between rank 1 and rank 3" in text


def test_fine_tuning_from_other_ranks(on, runs, tmp_path):
    """It begins with the weights, the biases and the shares, at iteration 0."""
    root = runs("moe-fp64", "dp4ep4")
    arguments = flags("moe-fp64", "dp2ep2", "--load", root, "--finetune", "--lr", "0")
    arguments += ("--moe-router-bias-update-rate", "0", "--train-iters", "3", *saving(tmp_path))
    assert on("dp2ep2", start, arguments)[0].endswith("exit code 0")
    with Checkpoint(saved(root, 6)) as before, Checkpoint(saved(tmp_path)) as after:
        for name in after.names:
            if not name.startswith("optimizer.") and not name.endswith("expert_share"):
                assert torch.equal(before.read_tensor(name), after.read_tensor(name)), name


def test_fine_tuning_without_what_routers_keep(tmp_path):
    """As after an import: the weights alone are there, shares begin even."""
    plain = [*flags("moe-fp64", "one", *saving(tmp_path / "plain"), "--train-iters", 3)]
    at = plain.index("--moe-router-load-balancing-type")
    plain[at : at + 6] = []
    assert start(tuple(plain)).endswith("exit code 0")
    arguments = flags("moe-fp64", "one", "--load", tmp_path / "plain", "--finetune")
    text = start((*arguments, *saving(tmp_path / "more"), "--train-iters", "3"))
    assert text.endswith("exit code 0"), text
    with Checkpoint(saved(tmp_path / "more")) as checkpoint:
        assert abs(checkpoint.read_tensor("layers.0.mlp.router.expert_share").sum() - 1) < 1e-12
