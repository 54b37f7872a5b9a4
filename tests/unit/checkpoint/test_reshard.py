"""Real runs: a checkpoint of any layout loads on any other with the same bits, and runs go on from
it.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from reshard_cases import (
    FEATURES,
    LAYOUTS,
    PP,
    SCHEDULE,
    TP,
    ZERO,
    differing,
    distance,
    flags,
    load_and_compare,
    saved,
    saving,
    start,
    start_apart,
)
from reshard_table import TABLE, Row, Runs, faults

from megatron.checkpoint.reader import find_checkpoint
from megatron.observe.tracking import read_metrics


@pytest.fixture
def on(gloo_world):
    """on(layout, function, *args): the results by rank."""

    def run(layout: str, function, *args):
        ranks = LAYOUTS[layout][0]
        return gloo_world(ranks).run(function, *args) if ranks > 1 else [function(*args)]

    return run


@pytest.fixture(scope="module")
def runs(gloo_world, tmp_path_factory):
    """runs(feature, layout): the --save folder of a run of 6 iterations, saved at 3 and 6; each is
    trained once.
    """
    folder, done = tmp_path_factory.mktemp("runs"), {}

    def run(feature: str, layout: str) -> Path:
        root = folder / f"{feature}-{layout}"
        if root not in done:
            ranks, arguments = LAYOUTS[layout][0], flags(feature, layout, *saving(root))
            done[root] = (
                gloo_world(ranks).run(start, arguments) if ranks > 1 else [start(arguments)]
            )
            assert all(text.endswith("exit code 0") for text in done[root])
        return root

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield run
    torch.set_num_threads(threads)


SHARDED = [layout for layout in LAYOUTS if "zero" in layout]
EARLIER = [layout for layout in LAYOUTS if "pp" not in layout and layout not in SHARDED]


MORE = {
    "tp2sp": "dp2zero1",
    "tp4sp": "dp2zero1",
    "pp4": "dp2zero1 dp4zero3shard2",
    "pp2v2": "dp2zero1 dp4zero3shard2",
    "pp2zbv": "dp2zero1 dp4zero3shard2",
    "pp2dp2": "dp2zero1 dp4zero3shard2",
    "dp2zero1": "tp2 pp4 pp2v2 pp2dp2",
    # so that every kind meets every other
    "dp2zero2": "tp2 pp4 pp2v2 pp2dp2",
    "dp4zero3shard2": "tp2 pp4 pp2v2 pp2dp2",
}


def targets(feature: str, source: str) -> list[str]:
    """Of pipelines among themselves the tied ones say more; slices are read, and read, row by row,
    whoever is on the other side.
    """
    more = MORE.get(source, "").split()
    if source in SHARDED:
        return ["one", "tp4sp", "pp2zbv", *SHARDED, *more]
    unsharded = [layout for layout in LAYOUTS if layout not in SHARDED]
    if feature == "tied-bf16":
        return [*unsharded, *(SHARDED if source == "one" else ["pp2dp2zero2", *more])]
    return [*unsharded, "dp4zero3shard2"] if source in EARLIER else EARLIER


CASES = [("tied-bf16", layout) for layout in LAYOUTS] + [
    ("gqa-untied", layout) for layout in LAYOUTS if layout not in SHARDED
]


# Every run loads what one process and every third other layout has saved; the rest is a campaign.
LOADS = [
    pytest.param(feature, source, target, marks=[pytest.mark.campaign] if index % 3 else [])
    for index, (feature, source) in enumerate(CASES)
    for target in targets(feature, source)
    if target != source  # the next test
]


@pytest.mark.parametrize(("feature", "source", "target"), LOADS)
def test_every_layout_loads_on_every_other(on, runs, tmp_path, feature, source, target):
    """What each rank holds after loading, optimizer included, is the checkpoint's; what came from
    one process is saved again, as it was.
    """
    root = runs(feature, source)
    again = saving(tmp_path) if source == "one" else ()
    arguments = flags(feature, target, "--load", root, "--ckpt-step", 3, *again)
    assert on(target, load_and_compare, arguments, saved(root)) == [[]] * LAYOUTS[target][0]
    assert not again or differing(saved(root), saved(tmp_path)) == []


@pytest.mark.parametrize(("feature", "layout"), CASES)
def test_on_the_same_layout_a_run_goes_on_bit_for_bit(on, runs, tmp_path, feature, layout):
    root = runs(feature, layout)
    # every rank writes a shard, but for a last stage that is a tied head
    writers = LAYOUTS[layout][0] - ((feature, layout) == ("tied-bf16", "pp4"))
    assert len(list(saved(root).glob("*.safetensors"))) == writers
    texts = on(
        layout, start, flags(feature, layout, "--load", root, "--ckpt-step", 3, *saving(tmp_path))
    )
    assert "iteration 3; resumes bit for bit\n" in texts[0]
    assert differing(saved(root, 6), saved(tmp_path, 6)) == []
    # the control: training changes every bit that matters
    assert differing(saved(root, 3), saved(tmp_path, 6))
    whole, resumed = (
        [(row["lm loss"], row["grad-norm"]) for row in read_metrics(folder / "metrics.jsonl")]
        for folder in (root, tmp_path)
    )
    assert whole[3:] == resumed and len(resumed) == 3


PAIRS = [row for row in TABLE if row.feature == "mqa-fp64" and row.source != row.target][::2]


@pytest.mark.parametrize(("feature", "source", "target"), PAIRS)
def test_on_another_layout_a_run_goes_on_within_the_bound(
    on, runs, tmp_path, feature, source, target
):
    """In fp64, to the parity harness's 1e-10."""
    root = runs(feature, source)
    arguments = flags(feature, target, "--load", root, "--ckpt-step", 3)
    texts = on(target, start, (*arguments, *saving(tmp_path)))
    assert "iteration 3; resumes from the same state, not bit for bit: " in texts[0]
    assert distance(saved(root, 6), saved(tmp_path, 6)) < 1e-10
    whole, resumed = (
        [row["lm loss"] for row in read_metrics(folder / "metrics.jsonl")]
        for folder in (root, tmp_path)
    )
    assert all(math.isclose(a, b, rel_tol=1e-10) for a, b in zip(whole[3:], resumed, strict=True))


def test_a_run_without_the_optimizers_state_is_outside_the_bound(on, runs, tmp_path):
    root = runs("mqa-fp64", "one")
    arguments = flags("mqa-fp64", "tp2", "--load", root, "--ckpt-step", 3, "--no-load-optim")
    on("tp2", start, (*arguments, *saving(tmp_path)))
    assert distance(saved(root, 6), saved(tmp_path, 6)) > 1e-4


def kinds(layout: str) -> set[str]:
    """What is cut in a layout, and how."""
    words = LAYOUTS[layout][1].split()
    found = {
        f"{word} {value}"
        for word, value in zip(words, [*words[1:], ""])
        if word in (TP, PP, ZERO, "--zero-shard-size", SCHEDULE)
    }
    found |= {word for word in words if word == "--sequence-parallel"} | {
        f"{LAYOUTS[layout][0]} ranks"
    }
    return found | ({"data-parallel copies"} if "dp" in layout else set())


def test_the_pairs_cover_every_kind_of_layout_against_every_other():
    """What tests load has every kind as source against every kind as target; so has the table every
    kind on both sides, and what only runs show.
    """
    every = set().union(*(kinds(layout) for layout in LAYOUTS))
    pairs = {
        (a, b)
        for feature, source in CASES
        for target in targets(feature, source)
        for a in kinds(source)
        for b in kinds(target)
    }
    pairs |= {(a, b) for layout in LAYOUTS for a in kinds(layout) for b in kinds(layout)}
    assert pairs == {(a, b) for a in every for b in every}
    assert len(set(TABLE)) == len(TABLE) >= 30
    for side in ("source", "target"):
        assert set().union(*(kinds(getattr(row, side)) for row in TABLE)) == every
    # which the tests above load in all layouts
    assert {row.feature for row in TABLE} == set(FEATURES) - {"tied-bf16", "gqa-untied"}


ROWS = [
    Row("gqa-fp16", "dp2zero3", "dp2zero3"),
    Row("ramp-fp64", "pp2v2", "dp2zero2"),
    Row("ledger-fp64", "dp2", "tp2sp"),
]


@pytest.fixture(scope="module")
def table(gloo_world, tmp_path_factory):
    def on(layout: str, function, *args):
        ranks = LAYOUTS[layout][0]
        return gloo_world(ranks).run(function, *args) if ranks > 1 else [function(*args)]

    return Runs(tmp_path_factory.mktemp("table"), on)


@pytest.mark.parametrize("row", ROWS)
def test_scaler_ramp_up_and_ledger_go_on_elsewhere(table, tmp_path, row):
    assert row in TABLE and faults(table.measure(row, tmp_path)) == []


def test_a_broken_resume_is_seen_in_the_table(table, tmp_path):
    found = faults(table.measure(ROWS[0], tmp_path, "the loss scale begins anew"))
    assert any("scaler: " in fault for fault in found)
    assert "tensors differ 3 iterations later" in found


@pytest.mark.parametrize(
    ("source", "target", "more", "said"),
    [
        ("dp2zero1", "dp2zero3", "--micro-batch-size 2", "resumes bit for bit"),
        (
            "dp2",
            "dp2zero1",
            "",
            "resumes from the same state, not bit for bit: --zero-stage 0 -> 1",
        ),
        (
            "dp4zero3shard2",
            "dp2zero3",
            "",
            (
                "resumes from the same state, not bit for bit: layout tp1 cp1 pp1 dp4 -> tp1 "
                "cp1 pp1 dp2, --zero-shard-size 2 -> None"
            ),
        ),
    ],
)
def test_a_run_says_what_another_stage_does_to_its_bits(on, tmp_path, source, target, more, said):
    """Bit for bit means it; where it is not promised nothing is tested but the words."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    on(source, start, flags("tied-bf16", source, *more.split(), *saving(whole)))
    text = on(
        target,
        start,
        flags(
            "tied-bf16", target, *more.split(), "--load", whole, "--ckpt-step", 3, *saving(resumed)
        ),
    )[0]
    assert f"iteration 3; {said}\n" in text
    assert said != "resumes bit for bit" or differing(saved(whole, 6), saved(resumed, 6)) == []


@pytest.mark.parametrize(
    ("mutant", "feature", "layout"),
    [
        ("tensor-parallel ranks other than the first own nothing", "tied-bf16", "tp2"),
        ("every holder of a key/value head owns it", "gqa-untied", "tp4sp"),
        ("both ends of a pipeline own a tied matrix", "tied-bf16", "pp2"),
        ("every data-parallel copy owns", "tied-bf16", "dp4zero3shard2"),
    ],
)
def test_a_wrong_owner_saves_nothing(on, tmp_path, mutant, feature, layout):
    """The run goes on and says so, with one error, on rank 0."""
    first, *others = on(layout, start, flags(feature, layout, *saving(tmp_path)), mutant)
    assert (
        "iteration 3 was NOT saved" in first
        and "exactly once" in first
        and first.endswith("exit code 1")
    )
    assert all("NOT saved" not in text and text.endswith("exit code 1") for text in others)
    assert find_checkpoint(tmp_path) is None


def test_a_tensor_that_nobody_owns_is_missed(on, tmp_path):
    text = on("one", start, flags("gqa-untied", "one", *saving(tmp_path)), "nobody owns a tensor")[
        0
    ]
    assert (
        "iteration 3 was NOT saved" in text
        and "the shards do not hold layers.1.mlp.up.weight [64, 32], which the run has" in text
    )
    assert find_checkpoint(tmp_path) is None


@pytest.mark.parametrize(
    ("mutant", "feature", "layout"),
    [
        ("read at the beginning", "gqa-untied", "tp2"),
        ("weights are not published", "tied-bf16", "pp4"),
        ("read at the beginning", "tied-bf16", "dp2zero3"),
        (None, "tied-bf16", "tp2"),
    ],
)
def test_a_wrong_reader_is_caught(on, runs, mutant, feature, layout):
    root = runs(feature, "one")
    forgetful = () if mutant else ("--no-load-optim",)
    faults = on(
        layout,
        load_and_compare,
        flags(feature, layout, "--load", root, "--ckpt-step", 3, *forgetful),
        saved(root),
        mutant,
    )
    assert any(faults)


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
    raw = bytearray(shard.read_bytes())
    raw[-5] ^= 2
    shard.write_bytes(raw)
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


def test_ranks_that_see_different_folders_do_not_start(gloo_world, runs, tmp_path):
    arguments, ours = flags("gqa-untied", "tp2"), runs("gqa-untied", "tp2")
    first, second = gloo_world(2).run(start_apart, arguments, [ours, tmp_path])
    assert first == second and first.startswith(f"rank 1: {tmp_path}/iter_0000006: ")
    assert first.endswith("that all nodes share?")
    told = gloo_world(2).run(start_apart, arguments, [ours, ours])
    assert all("exit code 0" in text for text in told)
