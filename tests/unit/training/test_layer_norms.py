"""--log-layer-norms: norms of gradient and weights by layer, the same in every layout."""

from __future__ import annotations

import math
from unittest import mock

import pytest
from parity.layouts import BASE, FEATURES, NO_DROPOUT, Row
from parity.worker import Outcome, one_thread, run_case

from megatron.training import step

FLAGS = (
    *BASE,
    *NO_DROPOUT.split(),
    *"--fp64 --train-iters 3 --lr-warmup-iters 1 --micro-batch-size 2".split(),
    *"--num-layers 4 --log-layer-norms --eod-mask-loss".split(),
)
UNTIED = "--untie-embeddings-and-output-weights --normalization RMSNorm"
ONE_KEY = f"{UNTIED} --group-query-attention --num-query-groups 1"
FROZEN = f"{UNTIED} --freeze embedding,layers.1"
EXPERTS = FEATURES["moe"].flags
RUNS = [
    ("tp2 sp", ONE_KEY),
    ("pp2 zero-bubble", FROZEN),
    ("dp2 zero1", UNTIED),
    ("cp2", ""),
    ("tp2 sp etp1 ep2", EXPERTS),
]
NAMES = ("embedding", "layers.0", "layers.1", "layers.2", "layers.3")


@pytest.fixture(scope="module")
def alone() -> dict[str, Outcome]:
    """The one-process runs, by their flags."""
    with one_thread():
        return {
            flags: run_case((*FLAGS, *flags.split()))
            for flags in ("", UNTIED, ONE_KEY, FROZEN, EXPERTS)
        }


def norms(outcome: Outcome) -> list[dict[str, float]]:
    """The norms of each row of training."""
    return [
        {name: value for name, value in row.items() if "-norm/" in name}
        for row in outcome.metrics
        if "lm loss" in row
    ]


def differing(one: Outcome, other: Outcome) -> set[str]:
    """The norms that are not the same to 1e-10."""
    found = set()
    for expected, row in zip(norms(one), norms(other), strict=True):
        assert set(row) == set(expected)
        found |= {
            name for name in row if not math.isclose(row[name], expected[name], rel_tol=1e-10)
        }
    return found


@pytest.mark.parametrize(("layout", "flags"), RUNS, ids=str)
def test_every_layout_logs_the_norms_of_one_process(gloo_world, alone, layout, flags):
    words = Row(layout, "gpt").words
    outcomes = gloo_world(words.ranks).run(run_case, (*FLAGS, *flags.split(), *words.flags))
    assert differing(alone[flags], outcomes[0]) == set()


@pytest.mark.parametrize("flags", ["", UNTIED, FROZEN])
def test_their_squares_add_up(alone, flags):
    """A frozen layer has no gradient, a tied head no separate weights."""
    for row in alone[flags].metrics:
        if "lm loss" not in row:
            continue
        for kind in ("grad-norm", "params-norm"):
            parts = {name: value for name, value in row.items() if name.startswith(f"{kind}/")}
            present = {*NAMES} if flags == "" else {*NAMES, "head"}
            if flags == FROZEN and kind == "grad-norm":
                present -= {"embedding", "layers.1"}
            assert set(parts) == {f"{kind}/{name}" for name in present}
            total = math.sqrt(sum(value * value for value in parts.values()))
            assert total == pytest.approx(row[kind], rel=1e-13) and min(parts.values()) > 0


def test_only_steps_that_are_logged_take_them():
    taken = []

    def update(*arguments, **settings):
        pending = real(*arguments, **settings)
        taken.append(pending.layer_grad_sq_sums is not None)
        return pending

    real = step.update
    flags = (*FLAGS, "--num-layers", "1", "--train-iters", "5", "--log-interval", "2")
    with mock.patch.object(step, "update", update), one_thread():
        outcome = run_case(flags)
        without = run_case(tuple(flag for flag in flags if flag != "--log-layer-norms"))
    assert taken == [False, True, False, True, True, *[False] * 5]
    rows = [row for row in outcome.metrics if "lm loss" in row]
    plain = [{name: row[name] for name in row if "-norm/" not in name} for row in rows]
    assert plain == [row for row in without.metrics if "lm loss" in row]  # bit for bit
    assert len(norms(outcome)[0]) == 4
