"""How evenly tokens go to experts, as metrics and as a warning."""

import logging

import pytest

from megatron.observe.expert_load import StarvingExperts, load_metrics

COUNTS = {
    "layers.0.expert-tokens": [10.0, 20.0, 30.0, 20.0, 0.0],  # the last: choices not taken
    "layers.3.expert-tokens": [20.0, 20.0, 40.0, 0.0, 8.0],
}


def test_the_worst_expert_of_any_layer():
    assert load_metrics(COUNTS, by_layer=False) == {
        "expert-load-max": 2.0,
        "expert-load-min": 0.0,
        "expert-dropped": 8 / 160,
    }


def test_every_layer_by_itself():
    found = load_metrics(COUNTS, by_layer=True)
    assert found["expert-load-max/layers.0"] == 1.5
    assert found["expert-load-min/layers.0"] == 0.5
    assert found["expert-dropped/layers.0"] == 0
    assert found["expert-dropped/layers.3"] == 8 / 80
    assert len(found) == 3 + 6


@pytest.mark.parametrize("counts", [{}, {"layers.0.expert-tokens": [0.0, 0.0, 0.0]}])
def test_nothing_without_tokens(counts):
    assert load_metrics(counts, by_layer=True) == {}


def warnings_of(caplog, *steps: tuple[dict[str, list[float]], int]) -> list[str]:
    """What one watch reports of these counts at these iterations."""
    watch = StarvingExperts()
    with caplog.at_level(logging.WARNING):
        for counts, iteration in steps:
            watch.look(counts, iteration)
    return [record.getMessage() for record in caplog.records]


def test_a_starving_expert_is_named_once(caplog):
    later = {"layers.3.expert-tokens": [0.0, 1.0, 1.0, 0.0, 0.0]}
    first, second = warnings_of(caplog, (COUNTS, 7), (COUNTS, 8), (later, 9))
    assert first.startswith("iteration 7: no token went to 1 of the 8 experts of all layers;")
    assert "in 1 of 2 layers with experts (layers.3), most in layers.3: 1 of 4 (3);" in first
    assert "the busiest is 2 of layers.3, with 2.0 times the mean;" in first
    assert "--moe-aux-loss-coeff" in first
    assert second.startswith("iteration 9: no token went to 2 of the 4 experts of all layers;")
    assert "layers.3: 2 of 4 (0, 3);" in second


def test_one_line_names_the_starving_experts_of_all_layers(caplog):
    counts = {f"layers.{i}.expert-tokens": [5.0, 0.0, 1.0, 0.0] for i in range(9)}
    counts["layers.4.expert-tokens"] = [0.0, 0.0, 6.0, 0.0]
    counts["layers.9.expert-tokens"] = [2.0, 2.0, 2.0, 0.0]
    counts["layers.10.expert-tokens"] = [0.0, 0.0, 0.0, 0.0]  # no token came to this layer
    [line] = warnings_of(caplog, (counts, 20))
    assert line.startswith("iteration 20: no token went to 10 of the 30 experts of all layers;")
    listed = ", ".join(f"layers.{i}" for i in range(8))
    assert (
        f"in 9 of 10 layers with experts ({listed} and 1 more), most in layers.4: 2 of 3 (0, 1);"
        in line
    )
    assert "the busiest is 2 of layers.4, with 3.0 times the mean;" in line


def test_balanced_experts_are_no_warning(caplog):
    full = {"layers.0.expert-tokens": [1.0, 9.0, 4.0], "layers.0.other": [0.0, 0.0, 0.0]}
    assert warnings_of(caplog, (full, 1)) == []
