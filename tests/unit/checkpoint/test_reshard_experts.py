"""Real runs with experts: a checkpoint of any number of expert-parallel ranks loads on any other,
with what routers keep; runs go on from it, are fine-tuned, and generate text.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from reshard_cases import ALL_LAYOUTS, flags, saved, saving, start
from reshard_table import EXPERT_TABLE, Runs, faults

from megatron.checkpoint.reader import Checkpoint
from megatron.training.checkpointing import finalize, save
from megatron.training.exit import Exit
from megatron.training.loop import COMPLETE

TOOLS = Path(__file__).resolve().parents[3] / "tools"
sys.path.insert(0, str(TOOLS))
import generate  # noqa: E402
import inspect_checkpoint  # noqa: E402


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
def table(on, tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("table"), on)


@pytest.mark.parametrize("row", EXPERT_TABLE, ids=lambda row: f"{row.source}>{row.target}")
def test_a_run_goes_on_on_other_ranks(table, tmp_path, row):
    assert faults(table.measure(row, tmp_path)) == []


def test_what_routers_keep_is_in_checkpoints(table):
    """Each layer has its bias and its shares, which training has changed."""
    with Checkpoint(saved(table("moe-fp64", "dp4ep4"))) as checkpoint:
        for layer in (0, 1):
            bias, share = (
                checkpoint.read_tensor(f"layers.{layer}.mlp.router.expert_{name}")
                for name in ("bias", "share")
            )
            assert bias.abs().max() >= 1.9e-2 and bias.shape == (8,)
            assert share.std() > 0 and abs(share.sum() - 1) < 1e-12
        assert not [
            name
            for name in checkpoint.names
            if name.startswith("optimizer.") and "router.expert" in name
        ]


def diverge(run) -> None:
    """One value of an expert changes on rank 3 alone."""
    if dist.get_rank() == 3:
        (name, parameter), *_ = [
            (name, parameter)
            for name, parameter, spec in run.model.declared()
            if spec.group == "expert"
        ]
        parameter.data.view(-1)[5] += 1e-9
        assert name == "layers.0.mlp.experts.fc1"


def save_diverged(run) -> Exit:
    diverge(run)
    save(run)
    return Exit(COMPLETE, 0 if finalize(run) else 1)


def test_a_copy_of_an_expert_that_differs_is_named(on, table, tmp_path):
    """Of 4 ranks 1 and 3 hold the same experts."""
    root = table("moe-fp64", "one")
    arguments = flags("moe-fp64", "dp4ep2zero1", "--load", root, *saving(tmp_path))
    text = on("dp4ep2zero1", start, arguments, None, save_diverged)[0]
    assert "replicas have diverged: layers.0.mlp.experts.fc1 (weights) differs between " in text
    assert "between rank 1 and rank 3" in text


def test_fine_tuning_from_other_ranks(on, table, tmp_path):
    """It begins with the weights, the biases and the shares, at iteration 0."""
    root = table("moe-fp64", "dp4ep4")
    arguments = flags("moe-fp64", "dp2ep2", "--load", root, "--finetune", "--lr", "0")
    arguments += ("--moe-router-bias-update-rate", "0", "--train-iters", "3", *saving(tmp_path))
    assert on("dp2ep2", start, arguments)[0].endswith("exit code 0")
    with Checkpoint(saved(root, 6)) as before, Checkpoint(saved(tmp_path)) as after:
        for name in after.names:
            if not name.startswith("optimizer.") and not name.endswith("expert_share"):
                assert torch.equal(before.read_tensor(name), after.read_tensor(name)), name


def test_fine_tuning_without_what_routers_keep(on, table, tmp_path):
    """As after an import: the weights alone are there, shares begin even."""
    plain = [*flags("moe-fp64", "one", *saving(tmp_path / "plain"))]
    at = plain.index("--moe-router-load-balancing-type")
    plain[at : at + 6] = []
    assert start(tuple(plain)).endswith("exit code 0")
    arguments = flags("moe-fp64", "dp2ep2", "--load", tmp_path / "plain", "--finetune")
    texts = on("dp2ep2", start, (*arguments, *saving(tmp_path / "more")))
    assert texts[0].endswith("exit code 0"), texts[0]
    with Checkpoint(saved(tmp_path / "more")) as checkpoint:
        assert abs(checkpoint.read_tensor("layers.0.mlp.router.expert_share").sum() - 1) < 1e-12


def test_text_comes_from_a_checkpoint_of_expert_parallel_ranks(table, capsys):
    root = str(table("moe-fp64", "dp4ep4"))
    assert generate.main(["--load", root, "--prompt", "1 2 3", "--num-tokens", "4"]) == 0
    assert len(capsys.readouterr().out.split()) > 3
    assert inspect_checkpoint.main([root]) == 0
    assert "layers.1.mlp.experts.7.down.weight" in capsys.readouterr().out
