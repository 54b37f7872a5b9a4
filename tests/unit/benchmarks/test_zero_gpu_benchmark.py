"""The measurement of ZeRO on one GPU, tried on a CPU in small shapes: real steps, and bytes that
are the plan's.
"""

from __future__ import annotations

import pytest
from megatron.benchmarks import zero_gpu as tool

from megatron.config.arguments import parse_arguments
from megatron.config.validate import resolve
from megatron.model.arithmetic import parameter_count

pytestmark = pytest.mark.full

ALL = tool.cases(["stages", "users", "offload", "params", "more"])


def test_the_models_have_the_sizes_of_their_names():
    for case in ALL:
        config = resolve(parse_arguments(case.flags(tiny=False)).config, case.ranks, None).config
        count = parameter_count(config.model, config.data.vocab_size + 1)["total"]
        size = float(case.model[:-1]) * {"M": 1e6, "B": 1e9}[case.model[-1]]
        assert count == pytest.approx(size, rel=0.04), case
        samples = case.micro_batch * case.accumulation * case.ranks
        assert config.training.global_batch_size == samples
        assert config.distributed.zero_stage == case.stage
        assert config.optimizer.optimizer_cpu_offload == case.offload
        assert config.optimizer.param_cpu_offload == case.params
    assert len(set(ALL)) == len(ALL)


@pytest.mark.parametrize(
    "case",
    [
        tool.Case("stages", "1.3B", 2, 2, 4),
        tool.Case("params", "1.3B", 3, 2, 2, ranks=2, offload=True, params=True),
    ],
    ids=lambda case: f"{case.model}-stage{case.stage}",
)
def test_a_case_takes_real_steps_and_holds_what_is_planned(case, monkeypatch):
    # In a separate process, as the tool does it: a case puts functions into torch.distributed,
    # and the counter adds up all tensors of its process after every operator.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = tool.run_case(case, tiny=True, patience=600.0)
    assert "failed" not in result, result["failed"]
    # log(128) = 4.85
    assert result["skipped"] == 0 and 4 < result["loss"] < 5.2
    assert len(result["times"]) == tool.STEPS
    slack = 4096  # scalars, and the micro-batch
    kinds, planned = result["between_kinds"], result["planned_kinds"]
    assert 0 <= result["between"] - result["planned_between"] <= slack
    assert 0 <= kinds["other"] <= slack
    if not case.offload:
        for kind in ("parameters", "optimizer"):
            assert kinds[kind] == planned[kind]
    # The plan of a CPU has the rounds that Gloo receives; nothing is received here.
    assert result["planned_peak"] - planned["scratch"] <= 1.03 * result["peak"]
    assert result["peak"] <= result["planned_peak"] + slack
