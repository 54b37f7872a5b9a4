"""Whole runs that are compared (of layouts, of experts) train the same samples, at equal active
FLOPs where models differ, and the pictures show what the files hold.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from megatron.benchmarks import convergence, expert_curves, layout_curves

from megatron.config.arguments import parse_arguments
from megatron.config.groups import Config

ROOT = Path(__file__).resolve().parents[3]
FILES = Path("d"), Path("t")
WORK = convergence.WORK
MIXTURES = [kind for kind in expert_curves.KINDS if kind != expert_curves.DENSE]


def recorded(name: str) -> dict:
    return json.loads((ROOT / "docs/results" / name).with_suffix(".json").read_text())


@pytest.mark.parametrize("tool", [expert_curves, layout_curves], ids=lambda tool: tool.__name__)
def test_the_recorded_picture_is_drawn_again(tool):
    name = tool.__name__.rpartition(".")[2]
    picture = (ROOT / "docs/images" / name).with_suffix(".svg")
    assert tool.draw(recorded(name)) == picture.read_text()


# ---- layouts


def config_of_layout(name: str) -> Config:
    command = layout_curves.command_of(layout_curves.LAYOUTS[name], WORK, *FILES)
    flags = command[command.index(str(ROOT / "pretrain_gpt.py")) + 1 :]
    return parse_arguments(flags).config


@pytest.mark.parametrize("name", layout_curves.LAYOUTS)
def test_a_layout_trains_the_same_run_in_its_processes(name):
    layout, config = layout_curves.LAYOUTS[name], config_of_layout(name)
    base = config_of_layout(layout_curves.BASE)
    assert config.model == base.model and config.optimizer == base.optimizer
    assert config.training.global_batch_size == 8 and config.training.seed == base.training.seed
    assert config.training.micro_batch_size == layout.micro_batch
    distributed = config.distributed
    shared = distributed.tensor_model_parallel_size * distributed.pipeline_model_parallel_size
    assert shared * layout.data_parallel == layout.processes
    command = layout_curves.command_of(layout, WORK, *FILES)
    assert ("--nproc-per-node" in command) == (layout.processes > 1)


# ---- experts


def config_of_kind(kind: str) -> Config:
    return parse_arguments(expert_curves.flags_of(kind, WORK, *FILES)).config


@pytest.mark.parametrize("kind", MIXTURES)
def test_every_kind_trains_the_same_run(kind):
    ours, dense = config_of_kind(kind), config_of_kind(expert_curves.DENSE)
    assert ours.training == dense.training and ours.optimizer == dense.optimizer
    assert ours.data == dense.data
    assert ours.model.num_experts == 8 and ours.model.moe_router_topk == 2
    assert ours.model.moe_router_enable_expert_bias == (kind == "bias")
    coefficient = 0.01 if kind == "auxiliary loss" else 0.0
    assert ours.model.moe_aux_loss_coeff == (coefficient,)


def test_the_active_flops_are_those_of_the_dense_model_and_the_router(tmp_path):
    for name in ("d.idx", "d.bin", "t"):  # must be there, and are not read
        (tmp_path / name).touch()
    sizes = {
        kind: expert_curves.sizes(kind, WORK, tmp_path / "d", tmp_path / "t")
        for kind in expert_curves.KINDS
    }
    assert recorded("expert_curves")["sizes"] == sizes
    dense, mixture = sizes[expert_curves.DENSE], sizes["bias"]
    router = WORK.layers * WORK.hidden * expert_curves.EXPERTS
    assert dense["active_parameters"] == mixture["active_parameters"] - router
    # forward 2 for each element of a matrix, backward twice as many
    assert mixture["flops_per_token"] - dense["flops_per_token"] == 6 * router
