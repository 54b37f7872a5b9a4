"""A stage of a model run without the executor: its layers one after another, each pass by
LayerRunner. For tests that compare with it.

x: input or output of a stage [s, b, h], or the gradient of it; `saved`, `left`: what LayerRunner
gave for each layer.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron.config.groups import TrainingConfig
from megatron.model.gpt import GPTModel
from megatron.model.init import fill_initial
from megatron.model.layer import OBJECTIVE_SUM, MicroBatch
from megatron.parallel.blocks import Block, build_blocks
from megatron.parallel.layer_runner import LayerRunner
from megatron.parallel.schedule import Kind
from megatron.parallel.zero_plan import ZeroPlan


def recomputing(*modules: str, **full: Any) -> TrainingConfig:
    """Flags that recompute these modules, or whole layers."""
    if modules:
        return TrainingConfig(recompute_granularity="selective", recompute_modules=modules)
    return TrainingConfig(recompute_granularity="full", **full)


NO_RECOMPUTE, FULL_RECOMPUTE = TrainingConfig(), recomputing()


class KeptWeights:
    """Weights and gradients that are always there: what the executor asks for when nothing is
    sharded.
    """

    reducing = None
    planner = SimpleNamespace(
        plan=lambda turns: ZeroPlan([], [([], []) for turn in turns for _ in turn])
    )


def filled(model: GPTModel) -> list[Block]:
    """The blocks of a model in one process, with the initial values of seed 5 and open for
    gradients.
    """
    blocks = build_blocks(model, torch.device("cpu"))
    for block in blocks:
        for entry in block.entries:
            for box in entry.boxes:
                fill_initial(box, entry.view(block.weight), 5)
        block.open()
    return blocks


def loss_gradient(sums: Tensor, scale: float) -> Tensor:
    """dy of a head's output [objective sum, reported loss sum], for the gradient of scale x
    objective.
    """
    dy = torch.zeros_like(sums)
    dy[OBJECTIVE_SUM] = scale
    return dy


def forward(
    model: GPTModel,
    micro: MicroBatch,
    passes: LayerRunner | None = None,
    x: Tensor | None = None,
    stage: int = 0,
    scalars: dict[str, Tensor] | None = None,
) -> tuple[Tensor, list[Any]]:
    """A stage's output, and what each layer saved for its backward pass."""
    passes, saved = passes or LayerRunner(), []
    scalars = {} if scalars is None else scalars
    for _, layer in model.layers_by_stage[stage]:
        x, kept = passes.forward(layer, x, micro, scalars)
        saved.append(kept)
    return x, saved


def backward(
    model: GPTModel,
    saved: list[Any],
    dy: Tensor,
    passes: LayerRunner,
    stage: int = 0,
    aux_scale: float = 0.0,
) -> Tensor | None:
    """Add all gradients; the gradient of the stage's input. `saved` is consumed."""
    for _, layer in reversed(model.layers_by_stage[stage]):
        dy, _ = passes.backward(Kind.BACKWARD, layer, dy, saved.pop(), aux_scale)
    return dy


def backward_input(
    model: GPTModel,
    saved: list[Any],
    dy: Tensor,
    passes: LayerRunner,
    stage: int = 0,
    aux_scale: float = 0.0,
) -> tuple[Tensor | None, list[Any]]:
    """The gradient of the stage's input, and what `backward_weight` needs. `saved` is consumed."""
    left = []
    for _, layer in reversed(model.layers_by_stage[stage]):
        if layer.splits_backward:
            dy, kept = passes.backward(Kind.BACKWARD_INPUT, layer, dy, saved.pop(), aux_scale)
            left.append((layer, kept))
        else:
            dy, _ = passes.backward(Kind.BACKWARD, layer, dy, saved.pop(), aux_scale)
    return dy, left


def backward_weight(left: list[Any], passes: LayerRunner) -> None:
    """Add the weight gradients that `backward_input` has left out; `left` is consumed."""
    while left:
        layer, kept = left.pop(0)
        passes.backward(Kind.BACKWARD_WEIGHT, layer, None, kept)
