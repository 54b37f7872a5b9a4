"""How evenly tokens go to experts, as metrics."""

import pytest

from megatron.observe.metrics import expert_load_metrics

COUNTS = {
    "layers.0.expert-tokens": [10.0, 20.0, 30.0, 20.0, 0.0],  # the last: choices not taken
    "layers.3.expert-tokens": [20.0, 20.0, 40.0, 0.0, 8.0],
}


def test_the_worst_expert_of_any_layer():
    assert expert_load_metrics(COUNTS, by_layer=False) == {
        "expert-load-max": 2.0,
        "expert-load-min": 0.0,
        "expert-dropped": 8 / 160,
    }


def test_every_layer_by_itself():
    found = expert_load_metrics(COUNTS, by_layer=True)
    assert found["expert-load-max/layers.0"] == 1.5
    assert found["expert-load-min/layers.0"] == 0.5
    assert found["expert-dropped/layers.0"] == 0
    assert found["expert-dropped/layers.3"] == 8 / 80
    assert len(found) == 3 + 6


@pytest.mark.parametrize("counts", [{}, {"layers.0.expert-tokens": [0.0, 0.0, 0.0]}])
def test_nothing_without_tokens(counts):
    assert expert_load_metrics(counts, by_layer=True) == {}
