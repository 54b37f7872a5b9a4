"""Real runs: a checkpoint of any layout loads on any other with the same bits, and runs go on from
it.

What a layout saves are logical tensors. That each layout reads those of one process and writes the
same ones again is all there is to show of loading: then each reads what any other writes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from checkpoint_cases import flip
from megatron.tools import generate
from megatron.tools._preprocess.writer import IndexedDatasetWriter
from megatron.tools._report.metrics_file import read_metrics
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

from megatron.checkpoint import manifest
from megatron.checkpoint.reader import Checkpoint, open_checkpoint
from megatron.model.spec import Box, Holder
from megatron.optimizer.optimizer import Optimizer
from megatron.training.checkpointing import finalize, save
from megatron.training.exit import Exit
from megatron.training.loop import COMPLETE

# ---- the table: what one layout saves another loads, and continues from --------------------------

BOUNDS = {"fp64": 1e-10, "fp16": 2.0**-11 * 16, "bf16": 2.0**-8 * 16}  # of losses


class Row(NamedTuple):
    """A run of `feature` on layout `source` is loaded on `target`."""

    feature: str
    source: str
    target: str


def _rows(feature: str, pairs: str) -> list[Row]:
    return [Row(feature, *pair.split(">")) for pair in pairs.split()]


TABLE = [
    *_rows("mqa-fp64", "one>tp2 tp2sp>dp2 dp2>tp4sp pp2>tp2 dp2>pp4 pp2v2>one pp2zbv>tp2sppp2"),
    *_rows("mqa-fp64", "one>cp2 cp2>tp2sp dp2zero2>cp2dp2zero2 dp2>dp2zero3 pp2zbv>dp4zero3shard2"),
    *_rows("untied-fp64", "tp2sp>pp2zbv tp2sppp2>pp4 dp4zero3shard2>tp2 pp2dp2zero2>dp2zero1"),
    # the same layout
    *_rows("mqa-fp64", "tp4sp>tp4sp pp4>pp4 pp2v2>pp2v2 pp2zbv>pp2zbv dp2zero3>dp2zero3"),
    *_rows("untied-fp64", "tp2sppp2>tp2sppp2 pp2dp2zero2>pp2dp2zero2"),
    *_rows("gqa-fp16", "tp2>dp2zero2 dp4zero3shard2>pp2v2 dp2zero3>dp2zero3 tp2sppp2>tp2sppp2"),
    *_rows("ramp-fp64", "pp2v2>dp2zero2 dp2zero1>tp2sp dp4zero3shard2>dp4zero3shard2"),
    *_rows("ledger-fp64", "dp2>tp2sp tp4sp>dp2zero3 pp4>one dp2zero2>dp2zero2"),
    *_rows("moe-fp64", "dp4ep4>dp4ep4 dp4ep2zero3>dp4ep2zero3 dp4ep4>tp2spep2"),
    *_rows("moe-fp64", "dp4ep4>pp2dp2ep2zero2 dp4ep2zero3>tp2spdp2ep2 one>dp4ep2zero1"),
    *_rows("moe-bf16", "dp4ep2zero3>dp4ep2zero3 dp4ep2zero3>tp2spep2 tp2spep2>pp2dp2ep2zero2"),
    *_rows("untied-fp64", "tp2sppp2dp2zero2>dp2zero3 dp4zero3shard2>tp2sppp2dp2zero2"),
]


def write_data(folder: Path) -> list[str]:
    """Prefixes of three sources of some thousand random tokens."""
    prefixes = []
    for number in range(3):
        rng, prefix = np.random.default_rng(number), str(folder / f"source{number}")
        writer = IndexedDatasetWriter(prefix, np.dtype("u2"))
        for _ in range(40):
            tokens = rng.integers(0, 49, rng.integers(20, 120)).astype("u2")
            writer.add(tokens, np.array([len(tokens)]), np.array([1]))
        tokenizer = {"name": "none", "fingerprint": "0", "eod": 49}
        writer.complete({"max_id": 48, "eod_count": 0, "tokenizer": tokenizer})
        writer.publish()
        prefixes.append(prefix)
    return prefixes


class Runs:
    """Source runs of 6 iterations, saved at 3 and 6; each is trained once. `on(layout, function,
    *args)` gives the results by rank.
    """

    def __init__(self, folder: Path, on: Callable) -> None:
        self.folder, self.on, self.prefixes, self.done = folder, on, write_data(folder), set()

    def data(self, feature: str, later: bool = True) -> list[str]:
        """Flags of the training data; the blend of a ledger's run is another one `later`."""
        if not feature.startswith("ledger"):
            return []
        blend = "1 {1} 3 {2}" if later else "2 {0} 1 {1}"
        return ["--train-data-path", *blend.format(*self.prefixes).split()]

    def __call__(self, feature: str, layout: str) -> Path:
        root = self.folder / f"{feature}-{layout}"
        if root not in self.done:
            starts: list[tuple] = [()]
            if self.data(feature):
                first = (*self.data(feature, later=False), "--exit-interval", 2)
                starts = [first, (*self.data(feature), "--load", root, "--accept-changed", "data")]
            for more in starts:
                texts = self.on(layout, start, flags(feature, layout, *saving(root), *more))
                assert all(text.endswith("exit code 0") for text in texts), texts[0]
            self.done.add(root)
        return root

    def faults(self, row: Row, folder: Path) -> list[str]:
        """What is not as promised in one row; `folder` is for the run that resumes."""
        root = self(row.feature, row.source)
        arguments = flags(
            row.feature, row.target, *self.data(row.feature), "--load", root, "--ckpt-step", 3
        )
        loaded = self.on(row.target, load_and_compare, arguments, saved(root))
        found = [f"rank holds {text}" for text in sum(loaded, [])]
        text = self.on(row.target, start, (*arguments, *saving(folder)))[0]
        same = row.source == row.target
        if ("resumes bit for bit" in text) != same:
            found.append("the log is wrong about bits")

        whole, resumed = (
            [line["lm loss"] for line in read_metrics(where / "metrics.jsonl")][-3:]
            for where in (root, folder)
        )
        bound = 0.0 if same else BOUNDS[row.feature.partition("-")[2]]
        losses = max(abs(a - b) / abs(a) for a, b in zip(whole, resumed, strict=True))
        if not losses <= bound:
            found.append(f"losses differ by {losses:.3g}")

        after = saved(root, 6), saved(folder, 6)
        if same and differing(*after):
            found.append("tensors differ 3 iterations later")
        if not same and bound == BOUNDS["fp64"] and not distance(*after) < bound:
            found.append(f"weights differ by {distance(*after):.3g}")
        return found


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


# The others are run by `-m "not campaign"`: on the same layout, on another, and what is saved with
# the tensors.
OFTEN = (
    Row("mqa-fp64", "one", "tp2"),
    Row("gqa-fp16", "dp2zero3", "dp2zero3"),
    Row("ledger-fp64", "dp2", "tp2sp"),
    Row("moe-fp64", "dp4ep4", "dp4ep4"),
)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=">".join(row), marks=() if row in OFTEN else pytest.mark.full)
        for row in TABLE
    ],
)
def test_a_run_continues_bit_for_bit_or_within_the_bound(runs, tmp_path, row):
    """Every tensor that each rank holds after loading (weights, masters, moments) and the rest of
    the state, bit by bit against what was saved; then the next 3 losses and all tensors after them,
    against those of the run that was not interrupted: bit for bit on the same layout, in fp64
    within 1e-10 on another, in fp16 and bf16 (where only state and scale must be exact) within
    their rounding times the root of a few hundred operations.
    """
    assert runs.faults(row, tmp_path) == []


def test_a_run_logs_what_keeps_it_from_the_same_bits(on, tmp_path):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    on("dp4zero3shard2", start, flags("tied-bf16", "dp4zero3shard2", *saving(whole)))
    loading = ("--load", whole, "--ckpt-step", 3, *saving(resumed))
    text = on("dp2zero3", start, flags("tied-bf16", "dp2zero3", *loading))[0]
    assert (
        "iteration 3; resumes from the same state, not bit for bit: layout tp1 cp1 pp1 dp4 -> tp1 "
        "cp1 pp1 dp2, --zero-shard-size 2 -> None\n"
    ) in text


# ---- one outcome for all ranks -------------------------------------------------------------------


def test_a_tensor_that_no_rank_owns_is_not_saved(tmp_path):
    """The run continues and logs it."""

    def holder(optimizer: Optimizer, box: Box) -> Holder | None:
        return None if box.name == "layers.1.mlp.up.weight" else Holder(0, 1)

    with mock.patch.object(Optimizer, "holder", holder):
        shown = start(flags("gqa-untied", "one", *saving(tmp_path), "--train-iters", 3))
    missing = "the shards do not hold layers.1.mlp.up.weight [64, 32], which the run has"
    assert "iteration 3 was NOT saved" in shown and missing in shown
    assert shown.endswith("exit code 1") and open_checkpoint(tmp_path) is None


def start_with_small_chunks(arguments: tuple) -> str:
    with mock.patch.object(manifest, "CHUNK", 64):
        return start(arguments)


@pytest.mark.parametrize(
    ("layout", "more"), [("tp2", []), ("dp2zero1", ["--no-overlap-param-gather"])]
)
def test_damage_that_one_rank_reads_ends_all_with_one_error_or_all_take_the_older_one(
    gloo_world, tmp_path, layout, more
):
    """The flipped bit is in data that rank 1 alone reads, long after all have opened the
    checkpoint. The other rank waits in no collective for it.
    """
    arguments = flags("gqa-untied", layout, *more)
    gloo_world(2).run(start_with_small_chunks, (*arguments, *saving(tmp_path)))
    with Checkpoint(saved(tmp_path, 6)) as checkpoint:
        piece = checkpoint.tensors["layers.1.mlp.up.weight"].pieces[-1]
    shard = piece.shard.path
    assert shard.name == "shard-00001.safetensors"
    flip(shard, piece.shard.data_start + piece.start + 500)
    first, second = gloo_world(2).run(start, (*arguments, "--load", str(tmp_path)))
    assert first == second and first.startswith(f"rank 1: {shard}: damaged: bytes ")
    assert "iter_0000006 cannot be loaded; load the older whole one with --ckpt-step 3" in first
    first, second = gloo_world(2).run(
        start,
        (*arguments, "--load", str(tmp_path), "--allow-older-checkpoint", "--exit-interval", "4"),
    )
    assert f"warning: rank 1: {shard}: damaged: bytes " in first
    assert "iter_0000006 CANNOT BE LOADED" in first
    assert "iteration 3; resumes bit for bit" in first and first.endswith("exit code 0")
    assert "warning" not in second
    (saved(tmp_path) / "MANIFEST.json").unlink()
    first, second = gloo_world(2).run(
        start, (*arguments, "--load", str(tmp_path), "--allow-older-checkpoint")
    )
    assert first == second
    assert "iter_0000003 cannot be loaded; no older whole checkpoint is there." in first


# ---- experts: what routers keep is saved with the weights ----------------------------------------


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
    run.zero.wait_for_weights()  # a gather that is still under way would undo it
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
    text = on("dp4ep2zero1", start, arguments, save_diverged)[0]
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
