"""The trainer without the planner and the exporters of tools/."""

from __future__ import annotations

import pytest
import torch

from megatron.config.errors import UserError
from megatron.config.groups import Config
from megatron.training.advisor import Advisor
from megatron.training.pretrain import end_of_dry_run


def test_without_an_advisor_nothing_is_chosen_or_predicted():
    config = Config()
    assert Advisor().choose_recompute(config, 100, 1, "cuda") == (config, [])
    asked = config.with_fields("training", recompute="auto", memory_budget=10.0)
    with pytest.raises(UserError, match="--memory-budget .* set --recompute-layers"):
        Advisor().choose_recompute(asked, 100, 1, "cuda")
    forecast = Advisor().forecast(config, 100, 1, torch.device("cpu"), None, None)
    assert forecast.step_seconds is None and end_of_dry_run(forecast.verdict)[1] == 0
