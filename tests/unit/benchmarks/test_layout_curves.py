"""The benchmark of whole runs in several layouts: every layout trains the same samples, and the
picture shows what the file holds.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from megatron.benchmarks import convergence
from megatron.benchmarks import layout_curves as tool

from megatron.config.arguments import parse_arguments

ROOT = Path(__file__).resolve().parents[3]


def flags_of(name: str) -> list[str]:
    command = tool.command_of(tool.LAYOUTS[name], convergence.WORK, Path("d"), Path("t"))
    return command[command.index(str(ROOT / "pretrain_gpt.py")) + 1 :]


@pytest.mark.parametrize("name", tool.LAYOUTS)
def test_a_layout_trains_the_same_run_in_its_processes(name):
    layout, config = tool.LAYOUTS[name], parse_arguments(flags_of(name)).config
    base = parse_arguments(flags_of(tool.BASE)).config
    assert config.model == base.model and config.optimizer == base.optimizer
    assert config.training.global_batch_size == 8 and config.training.seed == base.training.seed
    assert config.training.micro_batch_size == layout.micro_batch
    distributed = config.distributed
    shared = distributed.tensor_model_parallel_size * distributed.pipeline_model_parallel_size
    assert shared * layout.data_parallel == layout.processes
    command = tool.command_of(layout, convergence.WORK, Path("d"), Path("t"))
    assert ("--nproc-per-node" in command) == (layout.processes > 1)


def made_up(steps: int = 60) -> dict:
    """Two runs of equal losses, one apart by 0.5 at one step."""
    losses = [7 - 3 * step / steps for step in range(steps)]
    other = [*losses]
    other[40] += 0.5
    names = [*tool.LAYOUTS][:3]
    runs = [
        {"layout": name, "validation_loss": 4.0, "losses": values}
        for name, values in zip(names, (losses, losses, other))
    ]
    return {"runs": runs}


def test_distances_are_taken_from_one_process():
    found = tool.differences(made_up()["runs"])
    assert tool.BASE not in found and len(found) == 2
    same, other = found.values()
    assert max(same) == 0 and other.index(max(other)) == 40 and max(other) == pytest.approx(0.5)


def test_the_recorded_picture_is_drawn_again():
    document = json.loads((ROOT / "docs/results/layout_curves.json").read_text())
    assert tool.draw(document) == (ROOT / "docs/images/layout_curves.svg").read_text()
