"""The check at start: what it compares, that it notices a wrong kernel and one that does not run,
what it remembers, and that one rank's fault is every rank's.
"""

import dataclasses
import logging

import pytest
import torch
import torch.distributed as dist
from megatron.kernels import cases, dispatch, lang, self_check
from megatron.kernels.configurations import find

from megatron.checkpoint.ranks import Ranks
from megatron.config.groups import Config, ModelConfig, OptimizerConfig, PrecisionConfig
from megatron.distributed.groups import Axis
from megatron.training import prepare

BF16 = torch.bfloat16
ROTARY = find("rotary", 90)
GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def nothing_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr(lang.triton.knobs.cache, "dir", str(tmp_path))
    self_check._versions.cache_clear()
    monkeypatch.setattr(prepare, "FAULTY", dispatch.FAULTY)
    yield
    self_check._versions.cache_clear()
    dispatch.FAULTY.clear()


def broken(monkeypatch, operator: str, call) -> list[int]:
    """Let an operator's cases give what `call` makes of the right result; counts the calls."""
    right, calls = cases.CASES[operator], []

    def wrapped(draw, key, rest):
        case = right(draw, key, rest)

        def counted():
            calls.append(1)
            return call(case.call())

        return dataclasses.replace(case, call=counted)

    monkeypatch.setitem(cases.CASES, operator, wrapped)
    return calls


@pytest.mark.parametrize("capability", dispatch.CHECKED_ON)
@pytest.mark.parametrize("operator", dispatch.CHECKED)
def test_every_operator_that_auto_takes_has_rows_to_check(operator, capability):
    for dtype in (BF16, torch.float16, torch.float32):
        rows = self_check.rows_of(operator, capability, dtype)
        assert rows and all(row.arch <= capability for row in rows)


def test_rows_are_those_that_this_gpu_and_precision_take():
    kinds = [dict(row.key) for row in self_check.rows_of("norm", 90, BF16)]
    assert {"kind": "whole", "bytes": 2} in kinds and {"kind": "whole", "bytes": 4} not in kinds
    (row,) = self_check.rows_of("adam", 90, BF16)
    assert row is find("adamw", 90)
    rows = self_check.rows_of("attention", 90, BF16, {"d": 128, "kind": "causal"})
    assert {row.operator for row in rows} == {"attention forward", "attention dq"}


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("operator", [*dispatch.CHECKED, "attention"])
def test_every_kernel_passes(operator, dtype, device):
    if dtype != torch.float32 or operator != "attention":
        rows = self_check.rows_of(operator, 90, dtype, {"d": 64, "kind": "causal"})
        rows = [row for row in rows if row.key.get("kind") != "wide"]  # slow in the interpreter
        assert self_check.faults(rows, device, dtype) == ""


def test_a_wrong_result_and_one_that_does_not_run_are_named(device, monkeypatch):
    broken(monkeypatch, "rotary", lambda results: tuple(1.1 * each for each in results))
    assert self_check.faults([ROTARY], device, BF16) == "rotary: off by 0.1 of the norm"

    def fails(results):
        raise RuntimeError("PTXAS failed\nmany lines")

    broken(monkeypatch, "norm", fails)
    (row, *_) = self_check.rows_of("norm", 90, BF16)
    assert "RuntimeError: PTXAS failed" in self_check.faults([row], device, BF16)


def test_what_passed_is_not_computed_again_until_something_changes(device, monkeypatch, tmp_path):
    calls = broken(monkeypatch, "rotary", lambda results: results)
    for _ in range(2):
        assert self_check.faults([ROTARY], device, BF16) == ""
    assert len(calls) == 1
    self_check.faults([ROTARY], device, torch.float16)
    assert len(calls) == 2
    for file in ("rotary.py", "configurations.json"):
        (tmp_path / file).write_text("another text")
    self_check._versions.cache_clear()
    monkeypatch.setattr(self_check, "HERE", tmp_path)
    self_check.faults([ROTARY], device, BF16)
    assert len(calls) == 3


def test_what_failed_is_not_remembered(device, monkeypatch):
    calls = broken(monkeypatch, "rotary", lambda results: tuple(1.1 * each for each in results))
    for _ in range(2):
        self_check.faults([ROTARY], device, BF16)
    assert len(calls) == 2


def test_only_what_a_run_takes_is_checked(monkeypatch):
    asked = []
    monkeypatch.setattr(self_check, "faults", lambda rows, device, dtype: asked.extend(rows) or "")
    quiet = ModelConfig(hidden_dropout=0.0, attention_dropout=0.0, kv_channels=64)
    config = Config(
        model=dataclasses.replace(quiet, norm_backend="torch"),
        optimizer=OptimizerConfig(optimizer="sgd"),
        precision=PrecisionConfig(bf16=True),
    )
    assert prepare.faulty_kernels(config, GPU) == {}
    names = {row.operator.partition(" ")[0] for row in asked}
    others = {"rotary", "activation", "dropout", "cross_entropy", "grad_norm"}
    assert names == {"attention", *others}


def test_what_fails_is_left_out_with_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(
        prepare, "faulty_kernels", lambda config, device: {"norm": "norm forward: off by 1"}
    )
    with caplog.at_level(logging.WARNING):
        prepare.check_kernels(Config(), GPU, Ranks())
    assert dispatch.FAULTY == {
        "norm": "the check at start failed on rank 0: norm forward: off by 1"
    }
    assert "norm: Triton's kernels are not taken. the check at start failed" in caplog.text
    prepare.check_kernels(Config(), torch.device("cpu"), Ranks())
    assert dispatch.FAULTY == {}


def checked_where_one_rank_is_faulty() -> dict[str, str]:
    """What this rank leaves out, when the norm is wrong on rank 1 alone."""
    rank = dist.get_rank()
    world = Axis("world", rank, tuple(range(dist.get_world_size())), dist.group.WORLD)
    before = prepare.faulty_kernels
    prepare.faulty_kernels = lambda config, device: {"norm": "off"} if rank == 1 else {}
    try:
        prepare.check_kernels(Config(), GPU, Ranks(world))
        return dict(dispatch.FAULTY)
    finally:
        prepare.faulty_kernels = before
        dispatch.FAULTY.clear()


def test_one_ranks_fault_is_every_ranks(gloo_world):
    found = gloo_world(2).run(checked_where_one_rank_is_faulty)
    assert found == [{"norm": "the check at start failed on rank 1: off"}] * 2
