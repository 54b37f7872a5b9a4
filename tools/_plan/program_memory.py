"""The memory of a run of another program, which keeps more than this one."""

from __future__ import annotations

from dataclasses import replace

from megatron.tools._plan.activations import Shape, UnitBytes
from megatron.tools._plan.engine import Ledger
from megatron.tools._plan.memory import PlannedSteps
from megatron.tools._plan.program import Program

from megatron.config.groups import Config
from megatron.model.arithmetic import padded_vocab_size
from megatron.model.stages import Stage

# Bytes of a logit, where torch's operators compute the loss of bf16 logits. From the forward pass
# on: the logit, its fp32 log-probability, and the logit of the micro-batch before, which a buffer
# of outputs still holds. In the backward pass alongside them: fp32 gradients of the last two steps.
KEPT_LOGIT = 2 + 4 + 2
LOGIT_GRADIENTS = 4 + 4


def peak_of(program: Program, config: Config, vocab_size: int, world_size: int) -> int:
    """Bytes of the fullest pipeline rank of a program's run, on a GPU."""
    steps = PlannedSteps(config, vocab_size, world_size, "cuda")
    peaks = []
    for rank in range(steps.schedule.ranks):
        parts = zip(steps.units_of(rank), steps.stages_of(rank), strict=True)
        units = [_stage(program, steps.shape, stage, of_stage) for of_stage, stage in parts]
        peaks.append(steps.of_rank(rank, Ledger(), units).total)
    return max(peaks)


def _stage(program: Program, shape: Shape, stage: Stage, units: list[UnitBytes]) -> list[UnitBytes]:
    first = 1 if stage.embedding else 0
    last = len(units) - (1 if stage.head else 0)
    more = _kept_of_layer(program, shape)
    return [
        *units[:first],
        *(_keeping(unit, more) for unit in units[first:last]),
        *(_head(program, shape, unit) for unit in units[last:]),
    ]


def _kept_of_layer(program: Program, shape: Shape) -> int:
    """Bytes that a layer keeps alongside ours of a micro-batch: in front of the attention and in
    front of the MLP are one norm and one projection each.
    """
    gathered = 2 * (shape.whole - shape.hidden) if program.gathered_inputs else 0
    gate = _activated(shape) if program.activated_gate else 0
    return gathered + gate + (2 * shape.hidden if program.normed else 0)


def _activated(shape: Shape) -> int:
    """Bytes of fc2's input."""
    return shape.tokens * shape.model.ffn_hidden_size * shape.compute


def _keeping(unit: UnitBytes, more: int) -> UnitBytes:
    """A layer that keeps more bytes, of one that is computed again while its graph is there."""
    if unit.rebuilt is None:
        return replace(unit, saved=unit.saved + more)
    return replace(unit, rebuilt=_keeping(unit.rebuilt, more))


def _head(program: Program, shape: Shape, unit: UnitBytes) -> UnitBytes:
    if not program.whole_logits:
        return unit
    padded = padded_vocab_size(
        shape.vocab_size,
        shape.config.model,
        shape.config.distributed.tensor_model_parallel_size,
    )
    logits = shape.tokens * padded
    gradients = LOGIT_GRADIENTS * logits
    return replace(
        unit,
        logits=KEPT_LOGIT * logits,
        backward=max(unit.backward, gradients),
        split=max(unit.split, gradients),
    )
