"""What ZeRO does around the passes of a step, as data: complete, and without anything that is not
needed.
"""

from __future__ import annotations

import pytest
import torch
from megatron.tools._plan.silent import SilentGroup

from megatron.config.arguments import parse_arguments
from megatron.config.validate import resolve
from megatron.distributed.groups import build_groups, group_options, layout_of
from megatron.model.build import build_model, hidden_shape
from megatron.parallel.blocks import build_run_blocks
from megatron.parallel.layer_runner import LayerRunner
from megatron.parallel.pipeline import Pipeline
from megatron.parallel.schedule import Kind, build_schedule
from megatron.parallel.zero import Zero
from megatron.parallel.zero_plan import After, Before

MICRO_BATCHES, VOCAB = 3, 100
FLAGS = (
    "--num-layers 3 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --mock-data "
    "--max-position-embeddings 32 --micro-batch-size 1 --tokenizer-type NullTokenizer "
    f"--vocab-size {VOCAB} --lr 1e-3 --train-iters 4"
)


def pipeline_of(dp: int, flags: str) -> Pipeline:
    """An executor on rank 0 of `dp`, with tensors that have no memory."""
    words = f"{FLAGS} --global-batch-size {MICRO_BATCHES * dp} {flags}".split()
    config = resolve(parse_arguments(words).config, dp, VOCAB).config
    groups = build_groups(
        layout_of(config, dp),
        0,
        lambda ranks, group_desc: SilentGroup(gloo=True),
        **group_options(config),
    )
    meta = torch.device("meta")
    model = build_model(config, VOCAB, groups, meta)
    blocks = build_run_blocks(config, model, meta, groups)
    zero = Zero(model, blocks, groups, config.distributed)
    return Pipeline(model, zero, LayerRunner(), (0,), hidden_shape(config), groups, meta)


def steps_of(pipeline: Pipeline) -> list[tuple[Kind, Before | None, After | None]]:
    schedule = build_schedule("1f1b", 1, 1, MICRO_BATCHES)
    tasks = pipeline.prepare(schedule).tasks
    return [(each.kind, each.before, each.after) for task in tasks for each in task.passes]


def test_one_rank_has_something_to_do_at_the_first_and_the_last_backward_pass_alone():
    pipeline = pipeline_of(1, "")
    steps = steps_of(pipeline)
    forward = [(before, after) for kind, before, after in steps if kind is Kind.FORWARD]
    assert forward and set(forward) == {(None, None)}
    opened = [block for _, before, _ in steps if before for block in before.opens]
    complete = [block for _, _, after in steps if after for block in after.completes]
    assert sorted(map(id, opened)) == sorted(map(id, pipeline.zero.trained))
    assert sorted(map(id, complete)) == sorted(map(id, pipeline.zero.trained))


@pytest.mark.parametrize("stage, times", [(0, 1), (1, 1), (2, MICRO_BATCHES), (3, MICRO_BATCHES)])
def test_every_gradient_buffer_is_opened_and_reduced_as_often(stage, times):
    pipeline = pipeline_of(2, f"--zero-stage {stage}")
    is_open, reduced = set(), []
    for _, before, after in steps_of(pipeline):
        is_open.update(before.opens if before else ())
        for block in after.completes if after else ():
            assert block in is_open
            reduced.append(block)
            if stage >= 2:
                is_open.remove(block)
    assert all(reduced.count(block) == times for block in pipeline.zero.trained)


@pytest.mark.parametrize("flags", ["", "--no-overlap-param-gather", "--zero3-keep-gathered"])
def test_weights_are_whole_when_a_pass_reads_them_and_freed_afterwards(flags):
    pipeline = pipeline_of(2, f"--zero-stage 3 {flags} --untie-embeddings-and-output-weights")
    plan = pipeline.prepare(build_schedule("1f1b", 1, 1, MICRO_BATCHES)).zero_plan
    whole, most = set(plan.first), 0
    of_layers = pipeline.zero.planner.transformer_blocks
    for before, after in plan.passes:
        if before is not None:
            whole.update(before.gathers)
            whole.update(before.prefetches)
            most = max(most, len(whole))
            # never two matrices of the vocabulary's size, unless they are kept
            assert "keep" in flags or len(whole - of_layers) <= 1
        if after is not None:
            whole.update(after.prefetches)
            assert set(after.frees) <= whole
            whole -= set(after.frees)
    assert not whole
    expected = {"": 2, "--no-overlap-param-gather": 2, "--zero3-keep-gathered": 5}
    assert most <= expected[flags]


def test_passes_of_a_turn_begin_before_any_of_them_ends():
    """What the second pass of a turn reads is whole already when the first ends; of passes that run
    one by one it is fetched then.
    """
    pipeline = pipeline_of(2, "--zero-stage 3")
    buffers_of = pipeline.zero.planner.buffers_of
    first, second = [
        layer for name, layer in pipeline.model.layers_by_stage[0] if name.startswith("layers.")
    ][:2]
    backward, forward = (second, Kind.BACKWARD, 0), (first, Kind.FORWARD, 1)
    (_, after), (before, _) = pipeline.zero.planner.plan([[backward, forward]]).passes
    assert before.gathers == buffers_of[first] and after.prefetches == ()
    (_, after), _ = pipeline.zero.planner.plan([[backward], [forward]]).passes
    assert after.prefetches == buffers_of[first]


def test_pairs_need_the_pipeline_that_runs_them():
    with pytest.raises(ValueError, match="pairs=False, or run it by a PairedPipeline"):
        pipeline_of(1, "").prepare(build_schedule("1f1b", 1, 1, MICRO_BATCHES, pairs=True))
