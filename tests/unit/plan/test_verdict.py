"""Whether a run fits: the words at their borders, what is proposed, and the exit code of a dry
run.
"""

from __future__ import annotations

import pytest
from megatron.tools._plan.memory import MemoryPlan
from megatron.tools._plan.table import zero_lines
from megatron.tools._plan.verdict import check_host_memory, judge, memory_verdict
from step_models import resolved

import pretrain_gpt
from megatron.config.errors import UserError
from tools.plan import run

VOCABULARY = 50257
SMALL = f"""--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --bf16
--attention-dropout 0 --micro-batch-size 1 --lr 1e-4 --train-iters 10 --mock-data
--vocab-size {VOCABULARY - 1} --dry-run --world-size 8"""


def words(extra: str = "") -> list[str]:
    return f"{SMALL} {extra}".split()


def plan_of(extra: str = "") -> MemoryPlan:
    return MemoryPlan(resolved(f"{SMALL} {extra}", 8, VOCABULARY), VOCABULARY, 8)


def gib(plan: MemoryPlan) -> float:
    return plan.fullest.total / 2**30


@pytest.mark.parametrize(
    "needed, word",
    [(74, "fits"), (74.01, "tight"), (80, "tight"), (80.01, "does not fit")],
)
def test_the_borders(needed, word):
    """Usable is the nominal memory less 6 GiB."""
    assert judge(needed, 80) == word


def test_what_is_proposed_fits():
    plan = plan_of()
    needed = gib(plan)
    assert memory_verdict(plan, needed + 6.001).word == "fits"
    memory = gib(plan_of("--zero-stage 3 --recompute-granularity full")) + 6.001
    verdict = memory_verdict(plan, memory)
    assert verdict.word == ("tight" if needed <= memory else "does not fit")
    assert f"the plan needs {needed:.3g} GiB on each device of" in verdict.line
    proposal = verdict.line.rpartition("; ")[2].removesuffix(" GiB")
    flags, _, promised = proposal.partition(" needs ")
    found = gib(plan_of(flags))
    assert found == pytest.approx(float(promised), rel=0.005) and found <= memory - 6 < needed
    end = "; more ranks, or a smaller --micro-batch-size, need less"
    assert memory_verdict(plan, 1).line.endswith(end)


FULL = "--zero-stage 3 --recompute-granularity full"


@pytest.mark.parametrize(
    "flags, fitting",
    [
        ("--cuda-graphs --zero-stage 1", "--zero-stage 2"),
        ("--recompute-layers none*24 --zero-stage 3", FULL),
        ("--activation-offload --offload-modules mlp_fc1 --zero-stage 3", FULL),
    ],
)
def test_nothing_is_proposed_that_the_program_refuses(flags, fitting):
    plan = plan_of(flags)
    memory = gib(plan_of(fitting)) + 6.001
    assert gib(plan) > memory - 6
    proposal = memory_verdict(plan, memory).line.rpartition("; ")[2].partition(" needs ")[0]
    if proposal.startswith("--"):
        assert gib(plan_of(f"{flags} {proposal}")) <= memory - 6


def test_a_stage_that_the_program_refuses_fits_in_no_memory():
    plan = plan_of("--cuda-graphs --zero-stage 1")
    memory = gib(plan.with_stage(2)) + 6.001
    assert zero_lines(plan, memory)[-1].endswith(
        "fits with no stage; full recompute, more ranks or a smaller micro-batch need less"
    )
    assert zero_lines(plan_of("--zero-stage 1"), memory)[-1].endswith("fits with stage 2")


@pytest.mark.parametrize(
    "flags, code, verdict, end",
    [
        ("", 0, "fits: ", "everything is in order; nothing was trained"),
        ("--device-memory 4", 2, "does not fit: the plan needs ", "the settings are in order, but"),
    ],
)
def test_a_run_that_does_not_fit_is_not_in_order(capsys, flags, code, verdict, end):
    assert pretrain_gpt.main(words(flags)) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(f" verdict        {verdict}")
    assert lines[-1].startswith(f"dry run: {end}")


AWAY = "--activation-offload --recompute-granularity full"


def test_a_node_must_have_the_memory_that_its_ranks_take():
    """24 layers of which the last one's input stays, 2 MiB each, on 8 ranks: 368 MiB of a node."""
    plan = plan_of(AWAY)
    assert [rank.static["host"] for rank in plan.ranks] == [23 * 1024 * 1024 * 2]
    check_host_memory(plan, None, 8)
    check_host_memory(plan, 368 / 1024, 8)
    with pytest.raises(UserError, match="give a smaller --activation-offload-fraction"):
        check_host_memory(plan, 367 / 1024, 8)
    check_host_memory(plan, 367 / 1024, 7)


def test_a_dry_run_and_the_plan_refuse_what_a_node_lacks(capsys):
    assert pretrain_gpt.main(words(f"{AWAY} --host-memory 0.3")) == 2
    assert "--activation-offload: each rank keeps 0.0449 GiB" in capsys.readouterr().err
    with pytest.raises(UserError, match="the 8 of a node 0.359 of the 0.3 GiB that it has"):
        run("memory", words(f"{AWAY} --host-memory 0.3"))
    lines = run("memory", words(AWAY))
    assert any("0.359 for the 8 of a node" in line for line in lines)


@pytest.mark.parametrize(
    "flags, found",
    [
        ("--recompute-granularity full", "hides: 0.00195 GiB take 0.0419 ms alongside 0.0706 ms"),
        ("", "does not hide: "),
    ],
)
def test_whether_copies_to_the_host_hide(flags, found):
    """A layer input of 2 MiB takes 42 us at 50 GB/s; 27.9 GFLOP of a forward pass 71."""
    lines = run("memory", words(f"--activation-offload {flags}"))
    (line,) = [line for line in lines if line.startswith("copy of a layer's activations")]
    assert found in line
