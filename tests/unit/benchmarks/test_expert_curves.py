"""The benchmark of a dense model and mixtures of experts: all train the same run at equal active
FLOPs, the arithmetic of its table, and the picture.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from megatron.benchmarks import convergence
from megatron.benchmarks import expert_curves as tool

from megatron.config.arguments import parse_arguments

ROOT = Path(__file__).resolve().parents[3]
MIXTURES = [kind for kind in tool.KINDS if kind != tool.DENSE]
FILES = Path("d"), Path("t")


def config_of(kind: str):
    return parse_arguments(tool.flags_of(kind, convergence.WORK, *FILES)).config


@pytest.mark.parametrize("kind", MIXTURES)
def test_every_kind_trains_the_same_run(kind):
    ours, dense = config_of(kind), config_of(tool.DENSE)
    assert ours.training == dense.training and ours.optimizer == dense.optimizer
    assert ours.data == dense.data
    assert ours.model.num_experts == 8 and ours.model.moe_router_topk == 2


@pytest.fixture
def sizes(tmp_path: Path) -> dict[str, dict[str, float]]:
    """Of all kinds; the files must be there, and are not read."""
    for name in ("d.idx", "d.bin", "t"):
        (tmp_path / name).touch()
    files = tmp_path / "d", tmp_path / "t"
    return {kind: tool.sizes(kind, convergence.WORK, *files) for kind in tool.KINDS}


def test_what_balances_the_experts():
    models = {kind: config_of(kind).model for kind in MIXTURES}
    coefficients = {kind: model.moe_aux_loss_coeff for kind, model in models.items()}
    assert coefficients == {"auxiliary loss": (0.01,), "bias": (0.0,), "nothing": (0.0,)}
    biased = [kind for kind, model in models.items() if model.moe_router_enable_expert_bias]
    assert biased == ["bias"]


def test_the_active_flops_are_those_of_the_dense_model_and_the_router(sizes):
    work, dense, mixture = convergence.WORK, sizes[tool.DENSE], sizes["bias"]
    router = work.layers * work.hidden * tool.EXPERTS
    assert (
        dense["active_parameters"] == dense["parameters"] == mixture["active_parameters"] - router
    )
    # forward 2 for each element of a matrix, backward twice as many
    assert mixture["flops_per_token"] - dense["flops_per_token"] == 6 * router
    mlp = 3 * work.hidden * work.ffn * work.layers  # gate, up and down
    more = mixture["parameters"] - mixture["active_parameters"]
    assert more == mlp * (tool.EXPERTS // tool.TOPK - 1)


def test_losses_and_loads_are_taken_from_the_metrics():
    rows = [
        {
            "iteration": 10,
            "lm loss": 6.1234567,
            "expert-load-max": 9.0,
            "expert-load-max/layers.10": 2.0,
            "expert-load-max/layers.9": 3.00049,
            "expert-load-min/layers.10": 0.25,
            "expert-load-min/layers.9": 0.5,
        },
        {"iteration": 20, "lm loss": 5.0, "lm loss validation": 5.5, "lm loss test": 1.0},
    ]
    assert tool.kept(rows) == {
        "training": [[10, 6.12346], [20, 5.0]],
        "validation": [[20, 5.5]],
        "loads": [[10, [3.0, 2.0], [0.5, 0.25]]],  # layers in the order of their numbers
    }


def run(kind: str, seed: int, loss: float, most: float = 0.0) -> dict:
    """A made-up run of 200 steps whose busiest layer has `most`, one more after step 100."""
    loads = [[step, [1.0, most + (step > 100)], [0.5, 0.75]] for step in range(10, 201, 10)]
    return {
        "kind": kind,
        "seed": seed,
        "validation": [[100, loss + 1], [200, loss]],
        "loads": loads if kind != tool.DENSE else [],
    }


def test_seeds_are_compared_with_the_dense_run_of_the_same_seed():
    runs = [run(tool.DENSE, 1, 4.0), run("bias", 2, 4.25, 2), run("bias", 3, 4.0, 2)]
    assert tool.final_losses(runs, tool.DENSE) == {1: 4.0}
    assert tool.less(runs, "bias", {1: 4.0, 2: 4.5}) == [-0.25]
    assert tool.less(runs, "nothing", {1: 4.0}) == []


def test_the_recorded_picture_is_drawn_again():
    document = json.loads((ROOT / "docs/results/expert_curves.json").read_text())
    assert tool.draw(document) == (ROOT / "docs/images/expert_curves.svg").read_text()


def test_the_recorded_sizes_are_those_of_the_program(sizes):
    document = json.loads((ROOT / "docs/results/expert_curves.json").read_text())
    assert document["sizes"] == sizes
