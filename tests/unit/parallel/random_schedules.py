"""Valid schedules that no one would write."""

from __future__ import annotations

import random
from collections.abc import Sequence

from megatron.parallel.schedule import Action, Kind, Schedule


def random_placement(draw: random.Random, ranks: int, stages: int) -> tuple[int, ...]:
    """Stage -> rank, any; every rank has a stage."""
    places = [*range(ranks), *(draw.randrange(ranks) for _ in range(stages - ranks))]
    draw.shuffle(places)
    return tuple(places)


def _before(action: Action, last: int, split: bool, ascending: bool) -> list[Action]:
    """What must be done before an action; `split` is how this stage goes backward, and so does
    whether it is itself in two parts.
    """
    kind, stage, micro = action
    found = [Action(kind, stage, micro - 1)] if ascending and micro else []
    if kind is Kind.FORWARD:
        return found + ([Action(kind, stage - 1, micro)] if stage else [])
    if kind is Kind.BACKWARD_WEIGHT:
        return [*found, Action(Kind.BACKWARD_INPUT, stage, micro)]
    return [
        *found,
        Action(Kind.BACKWARD_INPUT if split else Kind.BACKWARD, stage + 1, micro)
        if stage < last
        else Action(Kind.FORWARD, stage, micro),
    ]


def random_schedule(
    draw: random.Random,
    placement: Sequence[int],
    micro_batches: int,
    ascending: bool = False,
    training: bool = True,
) -> Schedule:
    """A random topological order of all computations, backward passes split on some stages;
    `ascending`: each stage's by micro-batch.
    """
    last = len(placement) - 1
    split = [draw.random() < 0.5 for _ in placement]
    left = []
    for stage in range(len(placement)):
        backward = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT) if split[stage] else (Kind.BACKWARD,)
        left += [
            Action(kind, stage, micro)
            for kind in (Kind.FORWARD, *(backward if training else ()))
            for micro in range(micro_batches)
        ]
    orders: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    done: set[Action] = set()
    haste = draw.choice([None, Kind.FORWARD, Kind.BACKWARD])
    while left:
        ready = [
            a
            for a in left
            if done.issuperset(_before(a, last, a.stage < last and split[a.stage + 1], ascending))
        ]
        favoured = [a for a in ready if a.kind is haste]
        action = draw.choice(favoured if favoured and draw.random() < 0.7 else ready)
        left.remove(action)
        done.add(action)
        orders[placement[action.stage]].append(action)
    return Schedule("random", tuple(placement), micro_batches, tuple(map(tuple, orders)))
