"""The trainer without the planner and the exporters of tools/."""

from __future__ import annotations

import pytest

from megatron.config.arguments import parse_arguments
from megatron.config.errors import UserError
from megatron.training.pretrain import pretrain

FLAGS = """--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --lr 1e-3
--micro-batch-size 1 --global-batch-size 1 --train-iters 1 --mock-data --vocab-size 15""".split()


def test_without_an_advisor_nothing_is_chosen_or_predicted(tmp_path, capsys):
    config = parse_arguments([*FLAGS, "--save", str(tmp_path / "run")]).config
    assert pretrain(config, dry_run=True) == 0 and not (tmp_path / "run").exists()
    assert "everything is in order; nothing was trained" in capsys.readouterr().out
    asked = parse_arguments([*FLAGS, "--recompute", "auto", "--memory-budget", "10"]).config
    with pytest.raises(UserError, match="--memory-budget .* set --recompute-layers"):
        pretrain(asked, dry_run=True)
