"""The executor on several processes: any valid list of actions gives the losses and gradients of
one process.
"""

from __future__ import annotations

import pipeline_cases as cases
import pytest
import torch
from megatron.tools._plan.schedule_check import check

pytestmark = pytest.mark.usefixtures("one_thread")


def compare(results: list, micro_batches: int, bitwise: bool, training: bool = True) -> None:
    """The ranks' outcomes, put together, against one process."""
    sums, gradients = cases.alone(micro_batches, training)
    found_sums = {index: each for rank_sums, _ in results for index, each in rank_sums.items()}
    found = {name: each for _, rank_gradients in results for name, each in rank_gradients.items()}
    assert (
        found.keys() == gradients.keys()
        and found_sums.keys() == sums.keys()
        and sum(len(each) for _, each in results) == len(gradients)
    )
    for name, want in [*gradients.items(), *sums.items()]:
        got = found[name] if name in found else found_sums[name]
        if bitwise:
            assert torch.equal(got, want), name
        else:
            # another order of at most six summands: a few roundings of 1.1e-16 each of values up to
            # the largest summand
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("ranks", [2, 4])
def test_random_schedules_train_as_one_process(gloo_world, ranks):
    seeds = range(12)
    ranked = gloo_world(ranks).run(cases.run_random, seeds)
    kinds = set()
    for index, seed in enumerate(seeds):
        schedule, ascending = cases.drawn(seed, ranks)
        bounds = check(schedule)
        assert bounds.ascending or not ascending
        found = {action.kind.value for actions in schedule.actions for action in actions}
        training = not found.isdisjoint("BI")
        kinds |= {*found, training}
        outcomes = [rank[index] for rank in ranked]
        compare(outcomes, schedule.micro_batches, bounds.ascending, training)
    assert kinds == {"F", "B", "I", "W", True, False}
