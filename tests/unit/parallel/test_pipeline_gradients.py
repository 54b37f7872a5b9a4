"""The executor on several processes: any valid list of actions gives the losses and gradients of
one process.
"""

from __future__ import annotations

import functools
import random

import pytest
import torch
import torch.distributed as dist
from megatron.tools._plan.schedule_check import check
from random_schedules import random_schedule
from unit.by_hand import KeptWeights, backward, filled, forward, loss_gradient

from megatron.config.groups import ModelConfig
from megatron.distributed.groups import Groups, Layout, one_process
from megatron.distributed.setup import make_groups
from megatron.model.gpt import GPTModel
from megatron.model.stages import Stage
from megatron.parallel.layer_runner import LayerRunner
from megatron.parallel.pipeline import Pipeline
from megatron.parallel.schedule import Kind, Schedule

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB, S, B, LAYERS = 30, 8, 2, 8
CONFIG = ModelConfig(
    num_layers=LAYERS,
    hidden_size=16,
    ffn_hidden_size=24,
    num_attention_heads=4,
    kv_channels=4,
    num_query_groups=2,
    # dropout 0.1
    max_position_embeddings=S,
    activation="swiglu",
    untie_embeddings_and_output_weights=True,
)


def pipeline_of(placement: tuple[int, ...], groups: Groups) -> tuple[Pipeline, list]:
    """This rank's stages with their initial weights, and their blocks."""
    count = len(placement)
    ends = [LAYERS * stage // count for stage in range(count + 1)]
    stages = [Stage(k == 0, range(ends[k], ends[k + 1]), k == count - 1) for k in range(count)]
    model = GPTModel(
        CONFIG,
        vocab_size=VOCAB,
        padded_vocab=VOCAB,
        dtype=torch.float64,
        seed=5,
        stages=tuple(stage for stage, rank in zip(stages, placement) if rank == groups.pp.rank),
    )
    blocks = filled(model)
    shape = S, B, CONFIG.hidden_size
    device = torch.device("cpu")
    return Pipeline(model, KeptWeights(), LayerRunner(), placement, shape, groups, device), blocks


def batch(model: GPTModel, index: int, training: bool = True):
    ids = torch.randint(0, VOCAB, (B, S + 1), generator=torch.Generator().manual_seed(index))
    mask = torch.rand(B, S, generator=torch.Generator().manual_seed(index)) < 0.8
    positions, samples = torch.arange(S).expand(B, S), torch.arange(B) + B * index
    return model.micro_batch(ids[:, :-1], ids[:, 1:], mask, positions, samples, training=training)


def gradients_of(blocks: list, training: bool) -> dict[str, torch.Tensor]:
    if not training:
        return {}
    return {entry.name: entry.view(each.grad).clone() for each in blocks for entry in each.entries}


def outcome(schedule: Schedule, groups: Groups) -> tuple[dict, dict]:
    """(losses by micro-batch, gradients by name) of one run on this rank."""
    pipeline, blocks = pipeline_of(schedule.placement, groups)
    training = pipeline.prepared(schedule).trains
    own = schedule.actions[pipeline.rank]
    with torch.set_grad_enabled(training):
        order = dict.fromkeys(action.micro for action in own if action.kind is Kind.FORWARD)
        micro_batches = (batch(pipeline.model, index, training) for index in order)
        sums = pipeline.run(schedule, micro_batches, 0.5).losses
    return {index: each.clone() for index, each in sums.items()}, gradients_of(blocks, training)


@functools.cache
def alone(micro_batches: int, training: bool = True) -> tuple[dict, dict]:
    """The same in one process, micro-batch after micro-batch, without the executor."""
    pipeline, blocks = pipeline_of((0,), one_process())
    sums = {}
    with torch.set_grad_enabled(training):
        for index in range(micro_batches):
            sums[index], saved = forward(
                pipeline.model, batch(pipeline.model, index, training), pipeline.runner
            )
            if training:
                backward(pipeline.model, saved, loss_gradient(sums[index], 0.5), pipeline.runner)
    return sums, gradients_of(blocks, training)


def walk(draw: random.Random, ranks: int, stages: int) -> tuple[int, ...]:
    """A placement where messages go to neighbours of the ring alone, and every rank has a stage."""
    places: list[int] = []
    while len(set(places)) < ranks:
        places = [draw.randrange(ranks)]
        while len(places) < stages:
            places.append((places[-1] + draw.choice([-1, 0, 1, 1])) % ranks)
    return tuple(places)


def drawn(seed: int, ranks: int) -> tuple[Schedule, bool]:
    """A random valid schedule, and whether each stage adds its gradients in the order of the
    micro-batches.
    """
    draw = random.Random(seed)
    training, ascending = draw.random() < 0.8, draw.random() < 0.5
    placement = walk(draw, ranks, draw.randint(ranks, LAYERS))
    return random_schedule(draw, placement, draw.randint(1, 6), ascending, training), ascending


def run_random(seeds: range) -> list[tuple[dict, dict]]:
    groups = make_groups(Layout(pp=dist.get_world_size()))
    return [outcome(drawn(seed, groups.pp.size)[0], groups) for seed in seeds]


def compare(results: list, micro_batches: int, bitwise: bool, training: bool = True) -> None:
    """The ranks' outcomes, put together, against one process."""
    sums, gradients = alone(micro_batches, training)
    found_sums = {index: each for rank_sums, _ in results for index, each in rank_sums.items()}
    found = {name: each for _, rank_gradients in results for name, each in rank_gradients.items()}
    assert found.keys() == gradients.keys() and found_sums.keys() == sums.keys()
    assert sum(len(each) for _, each in results) == len(gradients)
    for name, want in (gradients | sums).items():
        got = (found | found_sums)[name]
        if bitwise:
            assert torch.equal(got, want), name
        else:
            # another order of at most six summands: a few roundings of 1.1e-16 each of values up to
            # the largest summand
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("ranks", [2, 4])
def test_random_schedules_train_as_one_process(gloo_world, ranks):
    seeds = range(12)
    ranked = gloo_world(ranks).run(run_random, seeds)
    kinds = set()
    for index, seed in enumerate(seeds):
        schedule, ascending = drawn(seed, ranks)
        bounds = check(schedule)
        assert bounds.ascending or not ascending
        found = {action.kind.value for actions in schedule.actions for action in actions}
        training = not found.isdisjoint("BI")
        kinds |= {*found, training}
        outcomes = [rank[index] for rank in ranked]
        compare(outcomes, schedule.micro_batches, bounds.ascending, training)
    assert kinds == {"F", "B", "I", "W", True, False}
