"""Whether a run fits: the words at their borders, what is proposed, and the exit code of a dry
run.
"""

from __future__ import annotations

import pytest
from megatron.tools._plan.memory import MemoryPlan
from megatron.tools._plan.verdict import check_host_memory, judge, memory_verdict

import pretrain_gpt
from megatron.config.arguments import parse_arguments
from megatron.config.errors import UserError
from megatron.config.validate import resolve
from tools.plan import run

LLAMA_405B = """--num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248
--num-attention-heads 128 --group-query-attention
    --num-query-groups 8 --seq-length 8192 --position-embedding-type rope --normalization RMSNorm
    --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --bf16"""
SMALL = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --bf16 "
    "--attention-dropout 0"
)
REST = "--micro-batch-size 1 --lr 1e-4 --train-iters 10 --mock-data --vocab-size 50256 --dry-run"


def words(model: str, extra: str = "") -> list[str]:
    return f"{model} {REST} {extra}".split()


@pytest.mark.parametrize(
    "needed, word",
    [(10, "fits"), (74, "fits"), (74.01, "tight"), (80, "tight"), (80.01, "does not fit")],
)
def test_the_borders(needed, word):
    """Usable is the nominal memory less 6 GiB."""
    assert judge(needed, 80) == word


def test_what_is_proposed_fits():
    config = resolve(parse_arguments(words(SMALL, "--world-size 8")).config, 8, 50257).config
    needed = MemoryPlan(config, 50257, 8).fullest.total / 2**30
    assert memory_verdict(MemoryPlan(config, 50257, 8), needed + 6.001).word == "fits"
    assert memory_verdict(MemoryPlan(config, 50257, 8), needed + 0.001).word == "tight"
    least = resolve(
        parse_arguments(
            words(SMALL, "--world-size 8 --zero-stage 3 --recompute-granularity full")
        ).config,
        8,
        50257,
    ).config
    memory = MemoryPlan(least, 50257, 8).fullest.total / 2**30 + 6.001
    verdict = memory_verdict(MemoryPlan(config, 50257, 8), memory)
    assert (
        verdict.word == ("tight" if needed <= memory else "does not fit")
        and f"the plan needs {needed:.3g} GiB on each device of" in verdict.line
    )
    flags, _, gib = verdict.line.rpartition("; ")[2].removesuffix(" GiB").partition(" needs ")
    proposed = resolve(
        parse_arguments(words(SMALL, f"--world-size 8 {flags}")).config, 8, 50257
    ).config
    found = MemoryPlan(proposed, 50257, 8).fullest.total / 2**30
    assert found == pytest.approx(float(gib), rel=0.005) and found <= memory - 6 < needed
    assert memory_verdict(MemoryPlan(config, 50257, 8), 1).line.endswith(
        "; more ranks, or a smaller --micro-batch-size, need less"
    )


def test_a_run_that_does_not_fit_is_not_in_order(capsys):
    assert pretrain_gpt.main(words(LLAMA_405B, "--world-size 8")) == 2
    out = capsys.readouterr().out
    assert "everything is in order" not in out
    assert out.splitlines()[1].startswith(" verdict        does not fit: the plan needs ")
    assert out.splitlines()[-1].startswith(
        "dry run: the settings are in order, but the run does not fit into memory"
    )


def test_device_memory_is_what_counts(capsys):
    assert pretrain_gpt.main(words(SMALL, "--world-size 8")) == 0
    out = capsys.readouterr().out
    assert (
        out.splitlines()[1].startswith(" verdict        fits: ")
        and out.splitlines()[-1] == "dry run: everything is in order; nothing was trained"
    )
    assert pretrain_gpt.main(words(SMALL, "--world-size 8 --device-memory 4")) == 2
    assert "each device of 4 GiB, of which 0 are usable" in capsys.readouterr().out


AWAY = "--world-size 8 --activation-offload --recompute-granularity full --host-memory"


def test_a_node_must_have_the_memory_that_its_ranks_take():
    """24 layers of which the last one's input stays, 2 MiB each, on 8 ranks: 368 MiB of a node."""
    config = resolve(parse_arguments(words(SMALL, f"{AWAY} 1")).config, 8, 50257).config
    plan = MemoryPlan(config, 50257, 8)
    assert [rank.static["host"] for rank in plan.ranks] == [23 * 1024 * 1024 * 2]
    check_host_memory(plan, None, 8)
    check_host_memory(plan, 368 / 1024, 8)
    with pytest.raises(UserError, match="give a smaller --activation-offload-fraction"):
        check_host_memory(plan, 367 / 1024, 8)
    check_host_memory(plan, 367 / 1024, 7)


def test_a_dry_run_and_the_plan_refuse_what_a_node_lacks(capsys):
    assert pretrain_gpt.main(words(SMALL, f"{AWAY} 0.3")) == 2
    assert "--activation-offload: each rank keeps 0.0449 GiB" in capsys.readouterr().err
    with pytest.raises(UserError, match="the 8 of a node 0.359 of the 0.3 GiB that it has"):
        run("memory", words(SMALL, f"{AWAY} 0.3"))
    assert any(
        "0.359 for the 8 of a node" in line for line in run("memory", words(SMALL, AWAY[:-14]))
    )


def test_whether_copies_to_the_host_hide():
    """A layer input of 2 MiB takes 42 us at 50 GB/s; 27.9 GFLOP of a forward pass 71."""
    for extra, found in (
        ("--recompute-granularity full", "hides: 0.00195 GiB take 0.0419 ms alongside 0.0706 ms"),
        ("", "does not hide: "),
    ):
        line = [
            line
            for line in run("memory", words(SMALL, f"--world-size 8 --activation-offload {extra}"))
            if line.startswith("copy of a layer's activations")
        ]
        assert len(line) == 1 and found in line[0], line
