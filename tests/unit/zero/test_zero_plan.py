"""What ZeRO gathers ahead of a pass, and the passes around which it does nothing."""

from __future__ import annotations

import pytest
from unit.meta_rank import META, build_rank

from megatron.config.arguments import parse_arguments
from megatron.config.validate import resolve
from megatron.model.build import hidden_shape
from megatron.parallel.blocks import Block
from megatron.parallel.layer_runner import LayerRunner
from megatron.parallel.pipeline import Pipeline
from megatron.parallel.schedule import Kind, build_schedule
from megatron.parallel.zero import Zero
from megatron.parallel.zero_plan import Calls

VOCAB = 100
FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --mock-data "
    "--micro-batch-size 1 --global-batch-size 6 --tokenizer-type NullTokenizer "
    f"--vocab-size {VOCAB} --lr 1e-3 --train-iters 4"
)


def pipeline_of(ranks: int, flags: str) -> Pipeline:
    """The executor of data-parallel rank 0, with tensors that have no memory."""
    config = resolve(parse_arguments(f"{FLAGS} {flags}".split()).config, ranks, VOCAB).config
    groups, model, blocks = build_rank(config, VOCAB, ranks)
    zero = Zero(model, blocks, groups, config.distributed)
    return Pipeline(model, zero, LayerRunner(), (0,), hidden_shape(config), groups, META)


def gathered(zero: Zero, calls: Calls) -> list[tuple[Block, ...]]:
    """The blocks that calls gather or start to, in their order."""
    starts = zero.gather, zero.prefetch, zero.start_gathers
    return [call.args[0] for call in calls if getattr(call, "func", None) in starts]


@pytest.mark.parametrize("flags, overlaps", [("", True), ("--no-overlap-param-gather", False)])
def test_the_next_layer_is_gathered_while_a_pass_computes(flags, overlaps):
    pipeline = pipeline_of(2, f"--zero-stage 3 {flags}")
    zero, plan = pipeline.zero, pipeline.zero.planner.plan
    layers = [layer for _, layer in pipeline.model.named_layers() if not layer.of_vocabulary]
    first, second = (zero.planner.blocks_of[layer] for layer in layers)
    forward, backward = (layers[0], Kind.FORWARD, 1), (layers[1], Kind.BACKWARD, 0)
    ahead = [first] if overlaps else []

    (before, after), _ = plan([[backward], [forward]]).passes
    assert gathered(zero, before) == [second, *ahead] and gathered(zero, after) == ahead

    # The passes of a turn all begin before any of them ends: then nothing is left to gather.
    (before, after), (next_before, _) = plan([[backward, forward]]).passes
    assert gathered(zero, before) == [second, *ahead] and gathered(zero, after) == []
    assert gathered(zero, next_before) == [first]


def test_a_pass_without_work_for_zero_has_no_calls():
    tasks = pipeline_of(1, "").prepare(build_schedule("1f1b", 1, 1, 6)).tasks
    forwards = [each for task in tasks for each in task.passes if each.kind is Kind.FORWARD]
    assert forwards and not any(each.before or each.after for each in forwards)
