"""The benchmark of host time: its four numbers are those of a step that is made of them, and our
command line asks for the peers' work.
"""

from __future__ import annotations

import pytest
from megatron.benchmarks import host_time as tool
from megatron.benchmarks.training import our_flags

from megatron.config.arguments import parse_arguments

STEP = tool.StepTime(step=7.0, layer=0.5, micro_batch=2.0, layer_and_micro_batch=0.25)


def seconds(of: tool.StepTime, layers: int, count: int) -> float:
    both = of.layer_and_micro_batch * layers * count
    return of.step + of.layer * layers + of.micro_batch * count + both


def runs_of(who: str, factors: list[float], of: tool.StepTime = STEP) -> list[dict]:
    """A warm-up and one round for each factor."""
    return [
        {
            "round": index - 1,
            "who": who,
            "layers": layers,
            "micro_batches": count,
            "seconds": factor * seconds(of, layers, count),
            "parts": {"forward": factor},
            "losses": [5.5, 5.25],
        }
        for index, factor in enumerate([100.0, *factors])
        for layers, count in tool.SIZES
    ]


def test_ratios_are_the_peers_time_by_ours_in_the_same_round():
    factors = [1.0, 1.5, 2.0, 1.0, 1.25, 3.0, 1.0]
    slower = STEP._replace(layer_and_micro_batch=2 * STEP.layer_and_micro_batch)
    runs = runs_of("ours", factors) + runs_of("megatron-core", factors, slower)
    found = tool.summary(runs)
    slope, whole = found["rows"]
    assert (slope["what"], slope["median"], slope["passed"]) == (
        "layer and micro-batch",
        pytest.approx(2.0),
        True,
    )
    expected = seconds(slower, *tool.LARGEST) / seconds(STEP, *tool.LARGEST)
    assert (whole["what"], whole["median"]) == ("whole step", pytest.approx(expected))
    # the median factor is 1.25; the warm-up counts nowhere
    assert found["programs"]["ours"]["layer_and_micro_batch"] == pytest.approx(1.25 * 0.25)
    assert found["programs"]["ours"]["parts"] == {"forward": 1.25}
    slow = tool.summary(runs_of("ours", factors, slower) + runs_of("megatron-core", factors))
    assert [row["passed"] for row in slow["rows"]] == [False, False]


def test_our_command_line_asks_for_the_same_work():
    work = tool.work_of(*tool.LARGEST, rounds=7)
    config = parse_arguments(our_flags(work)).config
    assert (config.model.num_layers, config.model.num_query_groups) == (work.layers, 2)
    training = config.training
    assert training.global_batch_size == work.accumulation * training.micro_batch_size
    # a step is left for the turn that ends the run
    assert training.train_iters > tool.WARMUP + 7 * tool.TURN
    assert config.logging.log_interval == training.train_iters
