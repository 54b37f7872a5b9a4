"""--profile in real runs: a trace a rank with named passes and collectives, parts that add up, and
the same run as without; and the message when memory runs out.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from logged import logged
from megatron.tools._advisor import PlanningAdvisor
from megatron.tools._plan import out_of_memory
from megatron.tools._plan.out_of_memory import live_tensors
from megatron.tools._report.metrics_file import read_metrics
from megatron.tools._report.step_parts import step_table
from own_run import exit_code, replaced
from torch.autograd import profiler
from torch.autograd.graph import get_gradient_edge

from megatron.config.arguments import parse_arguments
from megatron.config.groups import Config
from megatron.config.validate import resolve
from megatron.distributed.groups import Groups, one_process
from megatron.model.build import build_model
from megatron.optimizer.optimizer import Optimizer
from megatron.parallel.blocks import build_run_blocks
from megatron.parallel.layer_runner import Graph
from megatron.parallel.zero import Zero
from megatron.training import pretrain, profile
from pretrain_gpt import main

ROOT = Path(__file__).resolve().parents[3]
TINY = """--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8
--micro-batch-size 1 --global-batch-size 4 --train-iters 5 --mock-data
--tokenizer-type NullTokenizer --vocab-size 31 --lr 1e-2 --log-interval 1 --eval-iters 0""".split()
PROFILE = "--profile --profile-step-start 2 --profile-step-end 4 --profile-ranks 0 1".split()
LAYOUTS = {
    "pp2": "--pipeline-model-parallel-size 2",
    "tp2": "--tensor-model-parallel-size 2 --sequence-parallel",
    "dp2": "--zero-stage 3",
}
RANGES = {  # of both ranks, in addition to those of every layout
    "pp2": {"forward stage 0 micro-batch 2", "backward stage 1 micro-batch 3", "send pp"},
    "tp2": {"all-gather tp", "reduce-scatter tp", "forward stage 0 micro-batch 0"},
    "dp2": {"all-gather dp", "reduce-scatter dp"},
}
EXPOSED = {"pp2": "pipeline idle", "tp2": "exposed tp", "dp2": "exposed dp"}


def trained(words: list[str]) -> int:
    """`pretrain_gpt.py words...` on a rank of a world that lives on."""
    with replaced():
        return exit_code(words)


def results(folder: Path) -> list[tuple[str, str]]:
    """Losses and gradient norms as text, which is equal exactly where the floats are."""
    rows = read_metrics(folder / "metrics.jsonl")
    return [(repr(row["lm loss"]), repr(row["grad-norm"])) for row in rows]


def annotations(folder: Path, rank: int) -> dict[str, list[float]]:
    """Seconds of the ranges of a rank's trace, by name."""
    events = json.loads((folder / f"profile/rank-{rank}.trace.json").read_text())["traceEvents"]
    found: dict[str, list[float]] = {}
    for event in events:
        if event.get("cat") == "user_annotation":
            found.setdefault(event["name"], []).append(event["dur"] / 1e6)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.default("dp2")
def test_traces_of_two_ranks(gloo_world, tmp_path, layout):
    world, words = gloo_world(2), [*TINY, *LAYOUTS[layout].split()]
    plain, profiled = tmp_path / "plain", tmp_path / "profiled"
    assert world.run(trained, [*words, "--save", str(plain)]) == [0, 0]
    assert world.run(trained, [*words, "--save", str(profiled), *PROFILE]) == [0, 0]
    assert results(plain) == results(profiled) and len(results(plain)) == 5
    assert not (plain / "profile").exists()
    # 1. The ranges of both ranks.
    both = [annotations(profiled, rank) for rank in range(2)]
    names = {name for found in both for name in found}
    layers = {
        f"{kind} {layer} micro-batch 1"
        for kind in ("forward", "backward")
        for layer in ("embedding", "layers.0", "layers.1", "head")
    }
    common = {"data", "optimizer", "all-reduce world"}
    assert names >= common | layers | RANGES[layout], names
    # 2. The parts of the steps.
    steps = step_table(profiled / "profile")
    assert [(step.rank, step.iteration) for step in steps] == [(0, 3), (0, 4), (1, 3), (1, 4)]
    logged_times = {row["iteration"]: row for row in read_metrics(profiled / "metrics.jsonl")}
    for step in steps:
        ranges, parts = both[step.rank], step.parts
        whole = ranges[f"iteration {step.iteration}"]
        assert [sum(parts.values())] == pytest.approx(whole, rel=0.01) and min(parts.values()) > 0
        assert {"compute", "optimizer", "host", "data"} <= parts.keys()
        assert parts["data"] <= sum(ranges["data"])
        assert parts["exposed world"] <= sum(ranges["all-reduce world"])
        assert {EXPOSED[layout]} == {*EXPOSED.values()} & parts.keys()
        if step.rank == 0:
            # Without the time to log it, but from the last line on, which is before the range
            # begins: the host may lose its core there for a scheduler's slice or two.
            logged_time = logged_times[step.iteration]["iteration-time"]
            assert logged_time <= 1.01 * step.seconds + 0.01


def run(folder: Path, *flags: object) -> tuple[list[str], dict[str, list[float]] | None]:
    """A run of one process that is saved in `folder`: what it logs, and the ranges of its trace."""
    with logged() as lines:
        assert main([*TINY, "--save", str(folder), *map(str, flags)]) == 0
    there = (folder / "profile/rank-0.trace.json").exists()
    return lines, annotations(folder, 0) if there else None


def between(start: int, end: int) -> tuple[object, ...]:
    return "--profile", "--profile-step-start", start, "--profile-step-end", end


@pytest.mark.full
def test_a_run_that_is_continued_between_the_steps_records_what_it_makes(tmp_path):
    chosen = between(1, 4)
    lines, found = run(tmp_path, *chosen, "--save-interval", 2, "--exit-interval", 2)
    assert [name for name in found if name.startswith("iteration")] == ["iteration 2"]
    assert "save-checkpoint" in found
    assert f" profile: {tmp_path / 'profile/rank-0.trace.json'}" in lines
    _, found = run(tmp_path, "--load", tmp_path, *chosen)
    assert {name for name in found if name.startswith("it")} == {"iteration 3", "iteration 4"}
    (tmp_path / "profile/rank-0.trace.json").unlink()
    lines, found = run(tmp_path, "--load", tmp_path, *chosen, "--train-iters", 5)
    assert found is None
    for shown in (lines, run(tmp_path / "late", *between(5, 6))[0]):
        assert any("warning: --profile: no step was recorded" in line for line in shown), shown
    assert not profiler._is_profiler_enabled


def test_a_trace_that_cannot_be_written_does_not_end_the_run(tmp_path):
    full = OSError(28, "No space left on device")
    with mock.patch.object(profile.profile, "export_chrome_trace", side_effect=full):
        with logged() as lines:
            assert main([*TINY, "--save", str(tmp_path), *map(str, between(1, 2))]) == 0
    assert any("warning: --profile: not written: " in line for line in lines), lines


def test_the_time_of_a_queued_step_is_not_the_profilers(tmp_path):
    """On a GPU the host waits for it before the pause."""
    order: list[str] = []

    class Traces:
        def __getattr__(self, name: str):
            return lambda *_: order.append(name)

    @contextlib.contextmanager
    def paused():
        order.append("(")
        yield
        order.append(")")

    settings = SimpleNamespace(
        profile_step_start=1,
        profile_step_end=2,
        pytorch_profiler_collect_shapes=True,
        pytorch_profiler_collect_callstack=True,
    )
    overlap = SimpleNamespace(overlap_moe_expert_parallel_comm=False)
    config = SimpleNamespace(logging=settings, distributed=overlap)
    with (
        mock.patch.object(profile, "profile", return_value=Traces()) as profiler_of,
        mock.patch.object(torch.cuda, "synchronize", lambda _: order.append("wait")),
        mock.patch.object(profile.StepProfiler, "_write", lambda _: order.append("write")),
    ):
        of_gpu = profile.StepProfiler(config, tmp_path, 0, torch.device("cuda"))
        for iterations in range(4):
            of_gpu.next_step(iterations, paused)
    expected = "( prepare_trace ) wait ( start_trace ) wait ( stop_trace write )"
    assert " ".join(order) == expected
    asked = profiler_of.call_args.kwargs
    assert asked["record_shapes"] and asked["with_stack"]


def test_memory_history_acts_on_cuda_alone(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("of a CPU")
    lines, _ = run(tmp_path, "--record-memory-history", "--train-iters", 1)
    assert "warning: --record-memory-history has no effect without CUDA" in lines


# ---- memory runs out


def explained(config: Config, groups: Groups):
    """As the trainer explains an error in the block."""
    prepared = SimpleNamespace(
        config=config, tokenizer=SimpleNamespace(vocab_size=31), advisor=PlanningAdvisor()
    )
    return pretrain._explained_out_of_memory(prepared, groups, torch.device("cpu"))


def test_what_is_known_of_live_tensors(tmp_path):
    """When a real allocation fails next to a model and its optimizer."""
    config = resolve(parse_arguments(TINY).config, 1, 31).config
    config = config.with_fields("logging", profile_dir=str(tmp_path))
    groups, cpu = one_process(), torch.device("cpu")
    model = build_model(config, 31, groups, cpu)
    blocks = build_run_blocks(config, model, cpu, groups)
    zero = Zero(model, blocks, groups, config.distributed)
    optimizer = Optimizer(blocks, config, groups, zero)
    leaf = torch.ones(3, 1 << 18, requires_grad=True)
    product = leaf * leaf.detach().exp()
    graph = Graph(leaf, [get_gradient_edge(product)], [])
    del product
    with (
        # other tests of this process may have left larger tensors
        mock.patch.object(out_of_memory, "SHOWN", 100_000),
        pytest.raises(RuntimeError) as raised,
        explained(config, groups),
    ):
        torch.empty(1 << 46)
    (note,) = raised.value.__notes__
    assert note.startswith("memory ran out on rank 0\n") and "advice: by the plan the run" in note
    text = (tmp_path / "rank-0.out-of-memory.txt").read_text()
    found = {(each.label, each.shape): each for each in live_tensors(cpu)}
    size = optimizer.blocks[0].size
    for label in ("weights", "exp_avg", "exp_avg_sq"):
        assert found[f"{label} of embedding", (size,)].size == 4 * size
    kept = found["activation that MulBackward0 keeps", (3, 1 << 18)]
    assert kept.number == 1 and kept.size == 12 << 18
    assert "0.00293 GiB: activation that MulBackward0 keeps, [3, 262144] float32" in text
    del graph, kept
    assert ("activation that MulBackward0 keeps", (3, 1 << 18)) not in {
        (each.label, each.shape) for each in live_tensors(cpu)
    }


def test_the_advice_is_of_the_plan_and_of_the_allocator_setting(monkeypatch):
    config, names = resolve(parse_arguments(TINY).config, 1, 31).config, "PYTORCH_{}ALLOC_CONF"
    advised = lambda gib: out_of_memory._advice(config, 31, 1, "cuda", 0, gib)[-1]
    for name in ("", "CUDA_"):
        monkeypatch.delenv(names.format(name), raising=False)
    assert "or set PYTORCH_ALLOC_CONF=expandable_segments:True" in advised(80.0)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert advised(80.0).endswith("or lower --micro-batch-size")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    assert "or set PYTORCH_ALLOC_CONF=expandable_segments:True" in advised(80.0)
    assert "by the plan the run fits" not in advised(0.001)


def test_the_memory_of_a_host_is_at_most_its_limit_of_addresses(monkeypatch):
    monkeypatch.setattr(out_of_memory.resource, "getrlimit", lambda _: (1 << 30, 1 << 30))
    line, _ = out_of_memory._memory(torch.device("cpu"), 0)
    assert line.startswith("host: 1 GiB of addresses (ulimit -v), ")


def test_an_optimizer_that_ran_out_of_memory_has_the_states_of_finished_blocks():
    config = resolve(parse_arguments(TINY).config, 1, 31).config
    groups, cpu = one_process(), torch.device("cpu")
    model = build_model(config, 31, groups, cpu)
    blocks = build_run_blocks(config, model, cpu, groups)
    zero = Zero(model, blocks, groups, config.distributed)
    states = [{"finished": torch.ones(5)}, MemoryError]
    with (
        mock.patch("megatron.optimizer.optimizer.state_in_memory", side_effect=states),
        pytest.raises(MemoryError) as raised,
    ):
        Optimizer(blocks, config, groups, zero)
    assert f"finished of {blocks[0].name}" in {each.label for each in live_tensors(cpu)}
    del raised


def test_an_error_is_not_hidden_by_its_explanation():
    config = resolve(parse_arguments(TINY).config, 1, 31).config
    with (
        mock.patch.object(out_of_memory, "live_tensors", side_effect=MemoryError("again")),
        pytest.raises(MemoryError, match="first") as raised,
        explained(config, one_process()),
    ):
        raise MemoryError("first")
    assert raised.value.__notes__ == ["memory ran out; MemoryError in explaining it: again"]
