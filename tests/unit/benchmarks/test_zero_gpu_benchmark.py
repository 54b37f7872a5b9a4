"""The measurement of ZeRO on one GPU, tried on a CPU in small shapes: real steps, bytes that are
the plan's, failures that end no other case.
"""

from __future__ import annotations

import json
import sys

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
        tool.Case("stages", "1.3B", 0, 2, 4),
        tool.Case("stages", "1.3B", 2, 2, 4),
        tool.Case("stages", "1.3B", 3, 2, 4),
        tool.Case("users", "340M", 1, 2, 1, ranks=4),
        tool.Case("offload", "1.3B", 2, 2, 2, offload=True),
        tool.Case("params", "1.3B", 3, 2, 2, ranks=2, offload=True, params=True),
    ],
    ids=lambda case: f"{case.model}-stage{case.stage}",
)
def test_a_case_takes_real_steps_and_holds_what_is_planned(case, monkeypatch):
    # In a separate process, as the tool does it: a case puts functions into torch.distributed,
    # and the counter adds up all tensors of its process after every operator.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = tool.run_case(case, tiny=True)
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


def test_cases_run_in_processes_of_their_own_and_failures_are_recorded(
    monkeypatch, tmp_path, capsys
):
    good, bad = tool.Case("stages", "1.3B", 2, 2, 1), tool.Case("stages", "1.3B", 3, 2, 1)
    real = tool.run_case
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", "false")
        failed = real(bad, True, 120.0)
    assert real(bad, True, 0.01) == {"failed": "not done after 0.01 s"}
    monkeypatch.setattr(tool, "cases", lambda parts: [bad, good])
    monkeypatch.setattr(
        tool, "run_case", lambda case, *rest: failed if case == bad else real(case, *rest)
    )
    assert tool.main(["--out", str(tmp_path), "--tiny"]) == 0
    rows = json.loads((tmp_path / "zero_gpu.json").read_text())["rows"]
    assert rows[0]["failed"].startswith("exit code 1") and rows[1]["peak"] > rows[1]["between"] > 0
    table = (tmp_path / "zero_gpu.md").read_text()
    assert table in capsys.readouterr().out and "| 1.3B, 8 ranks, 1 x 2 | 2 |" in table
    memory = rows[0] | {"failed": "out of memory"}
    assert "| 1.3B, 8 ranks, 1 x 2 | 3 | out of memory | - |" in tool.tables([memory])
    assert tool.main(["--out", str(tmp_path), "--tiny", "--minutes", "0"]) == 1
    assert all(
        "not run" in row["failed"]
        for row in json.loads((tmp_path / "zero_gpu.json").read_text())["rows"]
    )
