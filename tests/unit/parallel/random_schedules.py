"""Valid schedules that no one would write, and a machine that runs lists of actions literally: the
oracle of the checker.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from megatron.parallel.schedule import COMPUTATIONS, Action, Kind, Schedule, communicate


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
    return Schedule("random", tuple(placement), micro_batches, communicate(orders, placement))


def runs(schedule: Schedule, draw: random.Random) -> bool:
    """Run the lists on ranks that take turns at random, with real values in the messages; whether
    all is computed once, from the right values.

    The n-th send from a rank to another fills the n-th receive, whatever they are called; both must
    be posted, as for all before them.
    """
    placement, last = schedule.placement, len(schedule.placement) - 1
    at = [0] * len(schedule.actions)
    # by rank: what it has made, and the numbers of its receives
    store: list[dict] = [{} for _ in schedule.actions]
    sent: dict[tuple[int, int], list] = {}
    posted: dict[tuple[int, int], int] = {}
    active = list(range(len(schedule.actions)))
    stuck = 0
    while active and stuck < 50 * len(at):
        rank = draw.choice(active)
        if at[rank] == len(schedule.actions[rank]):
            active.remove(rank)
            continue
        kind, stage, micro = schedule.actions[rank][at[rank]]
        mine = store[rank]
        if not 0 <= stage <= last or not 0 <= micro < schedule.micro_batches:
            return False
        if kind in COMPUTATIONS:
            state = _compute(kind, stage, micro, placement, last, mine, sent, posted, rank)
            if state == "wrong":
                return False
            if state == "waits":
                stuck += 1
                continue
        else:
            forward = kind in (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD)
            step = (1 if forward else -1) * (
                1 if kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD) else -1
            )
            if (
                not 0 <= stage + step <= last
                or placement[stage] != rank
                or placement[stage + step] == rank
            ):
                return False
            other = placement[stage + step]
            if kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
                value = mine.pop(("made", forward, stage, micro), None)
                if value is None:
                    return False
                sent.setdefault((rank, other), []).append(value)
            else:
                if ("number", forward, stage, micro) in mine:
                    return False
                mine["number", forward, stage, micro] = posted.get((other, rank), 0)
                posted[other, rank] = posted.get((other, rank), 0) + 1
        at[rank] += 1
        stuck = 0
    left = [key for mine in store for key in mine]
    finished = sorted(
        (stage, micro, kind.value) for what, kind, stage, micro in left if what == "finished"
    )
    training = any(kind != "F" for _, _, kind in finished)
    complete = all(
        "".join(sorted(kind for s, i, kind in finished if (s, i) == (stage, micro)))
        in (("BF", "FIW") if training else ("F",))
        for stage in range(last + 1)
        for micro in range(schedule.micro_batches)
    )
    unused = any(
        what in ("made", "number", "stash") or what == "kept" and training for what, *_ in left
    )
    return (
        not active
        and complete
        and not unused
        and {channel: len(values) for channel, values in sent.items()} == posted
    )


def _compute(kind, stage, micro, placement, last, mine, sent, posted, rank) -> str:
    """One computation: "done", "waits", or "wrong". Values hold what they were made from; a
    finished stage leaves nothing but its name.
    """
    forward = kind is Kind.FORWARD
    if placement[stage] != rank or ("finished", kind, stage, micro) in mine:
        return "wrong"
    if kind is Kind.BACKWARD_WEIGHT:
        wrong = mine.pop(("stash", True, stage, micro), None) is None
    else:
        source = stage - 1 if forward else stage + 1
        if not 0 <= source <= last:
            value = ("F" if forward else "B", source, micro)
        elif placement[source] == rank:
            value = mine.pop(("made", forward, source, micro), None)
        else:
            number = mine.get(("number", forward, stage, micro))
            if number is None:
                return "wrong"
            channel = (placement[source], rank)
            if len(sent.get(channel, ())) <= number or posted[channel] <= number:
                return "waits"
            value = sent[channel][number]
            del mine["number", forward, stage, micro]
        wrong = value != ("F" if forward else "B", source, micro)
        if forward:
            mine["kept", True, stage, micro] = True
        else:
            wrong |= mine.pop(("kept", True, stage, micro), None) is None
            if kind is Kind.BACKWARD_INPUT:
                mine["stash", True, stage, micro] = True
        if 0 <= (stage + 1 if forward else stage - 1) <= last:
            mine["made", forward, stage, micro] = ("F" if forward else "B", stage, micro)
    mine["finished", kind, stage, micro] = True
    return "wrong" if wrong else "done"
