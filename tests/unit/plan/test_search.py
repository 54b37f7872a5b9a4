"""The search for layouts, advice about one, and what the tool prints of steps."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from megatron.tools._plan import search as module
from megatron.tools._plan.memory import MemoryPlan
from megatron.tools._plan.recompute import choose_layers
from megatron.tools._plan.search import (
    NEAR,
    RECOMPUTE,
    RECOMPUTE_EXPERTS,
    Search,
    changed,
    explain,
    layouts,
    without_chosen,
)
from megatron.tools._plan.simulate import Costs, simulate
from megatron.tools._plan.step import Cost, least_pipeline_seconds
from megatron.tools._plan.step_table import estimate, explain_report, search_report
from megatron.tools._plan.tuning import tuning_lines
from megatron.tools._plan.verdict import RESERVE
from step_models import DENSE, EXPERTS, H100, TOKENS, VOCABULARY, asked, resolved, step

from megatron.config.errors import UserError
from megatron.config.groups import Config
from megatron.parallel.schedule import build_schedule
from tools import plan
from tools.plan import run

EP = "--expert-model-parallel-size"
PAIRS = "--overlap-moe-expert-parallel-comm"


def test_a_search_ranks_what_fits():
    small = dataclasses.replace(H100, memory_gib=14.0)
    found = Search(asked(DENSE), VOCABULARY, 8, small).run()
    best = [each.seconds for each in found.best]
    assert best == sorted(best) and all(each.fits == "fits" for each in found.best)
    assert found.larger and all(each.seconds <= best[0] for each in found.larger)
    assert all(each.peak_gib <= NEAR * 14.0 for each in found.larger)
    report = search_report(found, small)
    assert any("slower" in line for line in report) and "--micro-batch-size" in report[1]


def test_a_search_needs_no_layout_that_divides_the_batch():
    """64 samples a step of 128 GPUs: with the sizes that the flags have by default, no layout."""
    flags = DENSE.replace("--micro-batch-size 1 ", "") + "--world-size 128"
    lines = run("search", [*flags.split()])
    assert "--micro-batch-size" in lines[1]
    with pytest.raises(UserError, match="128: no layout can run --global-batch-size 65"):
        run("search", [*flags.replace("size 64", "size 65").split()])
    with pytest.raises(UserError, match="--num-layers is required"):
        run("search", [*flags.replace("--num-layers 8 ", "").split()])
    with pytest.raises(UserError, match="--num-attention-heads 7") as raised:
        run("search", [*flags.replace("128", "8").split(), "--num-attention-heads", "7"])
    assert "batch" not in str(raised.value)
    with pytest.raises(UserError, match="--attention-backend fa4: cannot compute --window-size"):
        run("search", f"{DENSE} --world-size 8 --window-size 1024 --attention-backend fa4".split())


CHOSEN = """--recompute-granularity full --distribute-saved-activations
--recompute-granularity selective --recompute-modules core_attn
--recompute auto --memory-budget 40
--recompute-layers full*8
--activation-offload --offload-modules mlp_fc1 --activation-offload-fraction 0.5
--num-layers-per-virtual-pipeline-stage 2 --hierarchical-context-parallel-sizes 2 2""".splitlines()


@pytest.mark.parametrize("flags", CHOSEN)
def test_a_search_chooses_whatever_the_flags_have_chosen(flags):
    config, replaced = without_chosen(asked(DENSE + flags))
    assert config == asked(DENSE)
    assert replaced and set(replaced) == {word for word in flags.split() if word[:2] == "--"}


def test_a_search_prints_what_its_layouts_replace_and_what_the_first_costs():
    flags = f"{DENSE} --num-layers 4 --world-size 4 --gpu-hour-price 2 --recompute-layers full*4"
    lines = run("search", flags.split())
    assert lines[0] == "chosen by the search, not as given: --recompute-layers"
    assert lines[2].startswith("1. ")
    assert lines[-1].startswith("the first: 10 iterations, ") and "dollars at 2 each" in lines[-1]


def test_a_search_for_a_cpu_has_the_kernels_of_a_cpu():
    cpu = dataclasses.replace(H100, cores=8)
    search = Search(asked(DENSE), VOCABULARY, 8, cpu)
    each = search.candidate({"zero_stage": 1})
    search.plan(each)
    plain, memory = (
        MemoryPlan(resolved(DENSE + more), VOCABULARY, 8, "cpu") for more in ("", "--zero-stage 1")
    )
    assert each.peak_gib == memory.fullest.total / 2**30
    assert search.model({}).time(cpu) == estimate(plain, cpu).time


def changes_of(flags: str, world: int) -> list[dict]:
    """The layouts that a search of a run tries."""
    return [layout for layout, _ in layouts(resolved(flags, world), world, 8)]


OF_LONG = {
    "cp_comm_type": {None, "allgather", "a2a", "p2p", "a2a+p2p"},
    "pipeline_model_parallel_layout": {None, "auto"},
}
OF_EXPERTS = {
    "overlap_moe_expert_parallel_comm": {True, False},
    "expert_model_parallel_size": {1, 2, 4, 8, 16},
    "expert_tensor_parallel_size": {None, 1, 2, 4, 8},
}


@pytest.mark.parametrize(
    "flags, tried",
    [
        (f"{DENSE} --seq-length 32768 --num-layers 9", OF_LONG),
        (f"{EXPERTS} {EP} 2 {PAIRS}", OF_EXPERTS),
    ],
    ids=["dense", "experts"],
)
def test_what_a_search_varies(flags, tried):
    found = {name: {None} if None in values else set() for name, values in tried.items()}
    for change in changes_of(flags, 16):
        for name in found.keys() & change.keys():
            found[name].add(change[name])
    assert found == tried
    fractions = {rung.get("activation_offload_fraction") for rung in RECOMPUTE}
    assert fractions == {None, 0.5}


def test_flags_of_a_search_are_the_run():
    """What is to be pasted gives the layout that was timed, at each level of recomputation."""
    search = Search(asked(EXPERTS), VOCABULARY, 4, H100)
    changes = changes_of(EXPERTS, 4)
    tried = set()
    for number, change in enumerate(changes[:: len(changes) // 20]):
        level = number % len(RECOMPUTE_EXPERTS)
        each = search.candidate(change, level)
        if each is not None:
            search.simulate(each)
            pasted = step(f"{EXPERTS} {each.flags}", 4)
            assert pasted.time(H100).seconds == pytest.approx(each.seconds), each.flags
            tried.add(level)
    assert len(tried) > 3


@pytest.mark.parametrize(
    "flags, world, count",
    [
        pytest.param(f"{DENSE} --global-batch-size 32", 8, 24, marks=pytest.mark.full),
        (f"{EXPERTS} --global-batch-size 16 --freeze embedding", 4, 5),
        (f"{EXPERTS} --global-batch-size 16 {EP} 2 {PAIRS}", 4, 5),
        (f"{DENSE} --global-batch-size 16 --pipeline-schedule zero-bubble", 8, 24),
    ],
    ids=["dense", "experts", "pairs", "zero-bubble"],
)
def test_a_bound_is_below_what_is_simulated_and_planned(flags, world, count):
    """The search leaves out nothing by its bounds of time and memory."""
    search, changes = Search(asked(flags), VOCABULARY, world, H100), changes_of(flags, world)
    gathers = next(each for each in changes if each["zero_stage"] == 3)
    tried = 0
    for number, change in enumerate([*changes[:: len(changes) // count], gathers]):
        each = search.candidate(change, (0, 3, 4)[number % 3])
        if each is None:
            continue
        bound, least = each.seconds, search.least_gib(each)
        assert (search.least_seconds(change, each.model.micro_batches) or 0.0) <= bound, each.flags
        search.simulate(each)
        search.plan(each)
        assert bound <= each.seconds * (1 + 1e-9) and 0 < least <= each.peak_gib, each.flags
        memory = each.peak_gib + RESERVE + 0.001
        search.hardware = dataclasses.replace(H100, memory_gib=memory)
        assert not search.is_too_large(each), each.flags
        search.hardware = H100
        tried += 1
    assert tried >= count / 2


@pytest.mark.parametrize(
    "flags", [DENSE, f"{EXPERTS} {EP} 2 {PAIRS} --use-tp-pp-dp-mapping"], ids=["dense", "pairs"]
)
def test_a_search_finds_what_it_finds_when_it_times_all_layouts(flags, monkeypatch):
    """Those whose passes take longer than the fifth best at least are not timed."""
    small = dataclasses.replace(H100, memory_gib=14.0, node_size=4)

    def search() -> tuple[list[str], int]:
        found = Search(asked(flags), VOCABULARY, 8, small).run()
        return search_report(found, small)[1:], found.timed

    lines, timed = search()
    monkeypatch.setattr(module, "least_pipeline_seconds", lambda *_: 0.0)
    all_lines, all_timed = search()
    assert lines == all_lines and timed < all_timed


@pytest.mark.parametrize(
    "name, virtual, seconds", [("1f1b", 1, 69), ("zero-bubble", 1, 55), ("zero-bubble-v", 2, 51.5)]
)
def test_the_bound_of_a_pipeline_of_even_stages_is_its_time(name, virtual, seconds):
    schedule = build_schedule(name, 8, virtual, 16)
    late = float(name != "1f1b")
    cost = Cost(*(part / virtual for part in (1.0, 3.0 - late, 3.0, late)))
    assert simulate(schedule, Costs.even(schedule)).end == seconds
    stages = [cost] * schedule.stages
    assert least_pipeline_seconds(stages, schedule.placement, 16) == seconds


# ---- advice


def advice(flags: str, world: int) -> str:
    """Lines about a run with experts."""
    plan = MemoryPlan(resolved(f"{EXPERTS} {flags}", world), VOCABULARY, world)
    return "\n".join(tuning_lines(plan, estimate(plan, H100)))


def test_advice_about_experts():
    balanced = "--moe-aux-loss-coeff 1e-2 --zero-stage 1"
    text = advice(f"{EP} 32 --zero-stage 1", 64)
    assert f"{EP} 32 spans nodes of 8 GPUs" in text
    assert f"{EP} 8 makes it" in text and "GiB" in text
    assert "nothing balances the experts' tokens" in text
    text = advice(f"{balanced} {EP} 8", 8)
    assert "nothing balances" not in text and "spans nodes" not in text
    assert f"{PAIRS} makes it" in advice(f"{balanced} {EP} 16", 16)
    assert "while tokens travel" not in advice(f"{balanced} {EP} 16 {PAIRS}", 16)


def test_explain_report_says_gains_and_losses():
    config = resolved(DENSE)
    found = estimate(MemoryPlan(config, VOCABULARY, 8), H100)
    tried = explain(Search(asked(DENSE), VOCABULARY, 8, H100), config)
    assert [each.seconds for each in tried] == sorted(each.seconds for each in tried)
    lines = explain_report(found, tried)
    assert len(lines) > 3 and all(math.isfinite(float(line.split("%")[0])) for line in lines[1:])


def test_explain_tries_no_value_that_the_run_has():
    """Also where the plan has chosen what is computed again."""
    flags = f"{DENSE} --recompute auto --memory-budget 20"
    config, _ = choose_layers(resolved(flags), VOCABULARY, 8, "cuda")
    tried = explain(Search(asked(flags), VOCABULARY, 8, H100), config)
    assert tried and all(changed(config, each.layout) != config for each in tried)


def test_explain_changes_the_run_that_the_plan_has_chosen(monkeypatch):
    """With --recompute auto: its layers are recomputed in every candidate, too."""
    found = []

    def tried(search: Search, config: Config) -> list:
        found.extend([search.config, config])
        return []

    monkeypatch.setattr(plan, "explain", tried)
    flags = f"{DENSE} --recompute auto --memory-budget 9 --world-size 8"
    plan.run("explain", flags.split())
    given, config = (each.training for each in found)
    assert given.recompute_layers == config.recompute_layers != None  # noqa: E711
    assert given.recompute is config.recompute is None


def test_the_tool_prints_a_step_as_text_and_as_json():
    flags = [*DENSE.split(), "--world-size", "8", "--hardware", "h100"]
    text = run("step", [*flags, "--gpu-hour-price", "2"])
    assert "a step of 262,144 tokens takes" in text[0] and "dollars at 2 each" in text[-2]
    found = json.loads(run("step", [*flags, "--json"])[0])
    assert found["low_s"] < found["high_s"] and found["fits"] == "fits"
    assert found["step_s"] == pytest.approx(64 * TOKENS / found["tokens_per_s_per_gpu"] / 8)
    with pytest.raises(UserError, match="--world-size is missing"):
        run("step", DENSE.split())
    with pytest.raises(UserError, match="--gpu-hour-price none: expected a number"):
        run("step", [*flags, "--gpu-hour-price", "none"])
