"""The time of a step: how its operations are priced, and what devices are."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from megatron.tools._plan import step as module
from megatron.tools._plan.fit import Sample, SteadyStep, fit, fit_files
from megatron.tools._plan.hardware import (
    FOLDER,
    known_hardware,
    load_hardware,
    names,
    write_hardware,
)
from megatron.tools._plan.rows import read_rows
from megatron.tools._plan.step import StepModel, group_shapes
from megatron.tools._plan.validate import predict_row
from step_models import DENSE, EXPERTS, H100, HIDDEN, TOKENS, TP2, VOCABULARY, resolved, step

from megatron.config.errors import UserError
from megatron.distributed.groups import build_groups, group_options, layout_of
from megatron.observe.tracking import config_file

RESULTS = Path(__file__).resolve().parents[3] / "docs/results"


LAYOUTS = """--zero-stage 3
--tensor-model-parallel-size 2 --sequence-parallel --zero-stage 1
--pipeline-model-parallel-size 4
--context-parallel-size 2 --cp-comm-type p2p --zero-stage 2""".splitlines()


@pytest.mark.parametrize("flags", LAYOUTS)
def test_parts_of_a_step_are_all_of_it(flags):
    time = step(DENSE + flags).time(H100)
    assert sum(time.spent.values()) == pytest.approx(time.seconds)
    assert all(value >= 0 for value in time.spent.values())
    assert time.tokens_per_second == pytest.approx(64 * TOKENS / time.seconds / 8)


@pytest.mark.parametrize(
    "flags",
    [
        TP2 + "--expert-model-parallel-size 4 --zero-stage 2 ",
        "--use-tp-pp-dp-mapping --pipeline-model-parallel-size 2 --zero-stage 1 " + TP2,
    ],
)
def test_groups_are_those_of_the_run(flags):
    """As many ranks on as many nodes as the groups that rank 0 would be in."""
    config = resolved(EXPERTS + flags, 16)
    shapes = group_shapes(config, 16, 8)
    layout = layout_of(config, 16)
    groups = build_groups(layout, 0, lambda *_, **__: object(), **group_options(config))
    experts = groups.buffers["expert"]
    own = {"ep": groups.ep, "etp": groups.etp, "expert_replicas": experts.replicas}
    own |= {"expert_shard": experts.shard, "expert_same_shard": experts.same_shard}
    for axis, group in own.items():
        nodes = {rank // 8 for rank in group.ranks}
        assert shapes[axis] == (len(group.ranks), len(nodes)), axis


def test_groups_lie_on_nodes_as_ranks_are_numbered():
    flags = "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --zero-stage 1 "
    shapes = group_shapes(resolved(DENSE + flags, 64), 64, 8)
    assert shapes["tp"] == (4, 1) and shapes["shard"] == (8, 4) and shapes["pp"] == (2, 2)


def test_the_steady_part_of_a_pipeline_is_not_simulated(monkeypatch):
    """What is added for the micro-batches beyond is what simulating them gives."""
    run = step(f"{DENSE} --pipeline-model-parallel-size 4 --global-batch-size 128", world=4)
    assert run.micro_batches > module.SIMULATED * 4
    pricing = run.pricing(H100)
    stages = [module._stage_seconds(pricing, units) for units in run.units]
    shortened = run.passes_seconds(stages, pricing)
    monkeypatch.setattr(module, "SIMULATED", 1000)
    assert shortened == pytest.approx(run.passes_seconds(stages, pricing), rel=1e-6)


def test_pairs_hide_what_is_sent_to_experts():
    """All but the first forward and the last backward passes, at the price of what is slowed."""
    wide = EXPERTS + "--expert-model-parallel-size 16 --zero-stage 1 "
    pairs = "--overlap-moe-expert-parallel-comm "
    before, after = (step(wide + flags, 32).time(H100) for flags in ("", pairs))
    assert after.seconds < before.seconds
    sent, left = (each.spent["expert parallel"] for each in (before, after))
    assert H100.slowdown * sent * (1 - 1e-6) < left < 0.75 * sent
    for name in ("matrix products", "attention", "memory-bound kernels"):
        assert after.spent[name] == pytest.approx(before.spent[name])
    assert min(after.spent.values()) >= 0


def test_a_single_pair_by_hand():
    """Two micro-batches: one forward pass, a pair, one backward pass."""
    flags = "--expert-model-parallel-size 16 --zero-stage 1 --global-batch-size 64 "
    model = step(EXPERTS + flags + "--overlap-moe-expert-parallel-comm ", 32)
    assert model.micro_batches == 2
    pricing = model.pricing(H100)
    stages = [module._stage_seconds(pricing, units) for units in model.units]
    ((forward, inputs, weights),) = stages
    ahead, back = forward["ep"], inputs["ep"]
    alone = forward.total + inputs.total + weights.total
    computed = forward.total - ahead, alone - forward.total - back
    hidden = min(ahead, computed[1]) + min(back, computed[0])
    expected = 2 * alone - hidden * (1 - H100.slowdown)
    assert model.passes_seconds(stages, pricing) == pytest.approx(expected)


def test_copies_to_the_host_cost_what_passes_do_not_hide():
    """A link of a tenth is seen; all of the copies, and half of them, each way."""
    flags = f"{DENSE} --recompute-granularity full --activation-offload "
    slow = dataclasses.replace(H100, host_gbps=0.5)
    whole, half = (
        step(flags + more).time(slow).spent["copies to the host"]
        for more in ("", "--activation-offload-fraction 0.5")
    )
    assert whole == pytest.approx(2 * half) and whole > 0
    # 8 micro-batches of 8 layers' inputs in bf16, out and back
    assert whole < 8 * 8 * 2 * TOKENS * HIDDEN * 2 / 0.5e9
    assert step(flags).time(H100).spent["copies to the host"] == 0


@pytest.mark.parametrize("number", [0, 1])
def test_published_runs_are_predicted_as_the_documents_say(number):
    """Of the same kind as ours, and no constant was fitted to them."""
    found = predict_row(read_rows(RESULTS / "expert_rows.csv")[number])
    recorded = json.loads((RESULTS / "plan_experts.json").read_text())["rows"][number]
    assert found.step_s == pytest.approx(recorded["step_s"])
    # The second row's windows and biases are left out, and its program reads and writes rows of
    # experts once more to weigh them, which makes it 30% too fast.
    assert abs(found.error) < (0.25 if number == 0 else 0.31)


# ---- devices


def test_collectives_cost_more_over_the_network_and_with_more_ranks():
    size = 1 << 26
    within = H100.exchange_seconds("all-gather", size, 8, 1)
    across = H100.exchange_seconds("all-gather", size, 64, 8)
    alone = H100.exchange_seconds("all-gather", size, 8, 8)  # one rank on each node
    assert within < across < alone
    assert H100.exchange_seconds("all-reduce", size, 1, 1) == 0
    # of eight, the switch adds up
    few, many = (H100.exchange_seconds("all-reduce", size, ranks, 1) for ranks in (4, 8))
    assert few > 0.9 * many


def test_devices_are_whole_and_name_their_sources(tmp_path):
    for name in names():
        written = json.loads((FOLDER / f"{name}.json").read_text())
        assert all(each["source"] for each in written["constants"].values())
        assert load_hardware(name).peak_tflops > 100
    assert known_hardware("NVIDIA H100 80GB HBM3") == H100
    assert known_hardware("NVIDIA A100-SXM4-80GB") == load_hardware("a100-80")
    assert known_hardware("Tesla V100") is None
    write_hardware(tmp_path / "again.json", H100, {})
    assert load_hardware(str(tmp_path / "again.json")) == H100


def test_a_device_that_is_none_is_refused(tmp_path):
    with pytest.raises(UserError, match="neither a file nor one of a100-40"):
        load_hardware("h1000")
    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"name": "x", "constants": {"speed": {"value": 1}}}')
    with pytest.raises(UserError, match="unknown constants speed"):
        load_hardware(str(wrong))


def test_the_fit_finds_constants_that_steps_were_made_with():
    """Steps of a device with slower products and a slower network, made by the model itself."""
    true = dataclasses.replace(H100, product_efficiency=0.55, network_efficiency=0.6)
    samples = []
    for flags in ("", "--zero-stage 3 ", "--tensor-model-parallel-size 2 --zero-stage 1 "):
        for world in (8, 32):
            model = SteadyStep(resolved(DENSE + flags, world), VOCABULARY, world)
            samples.append(Sample(model, model.time(true).seconds, flags))
    found = fit(samples, H100, rounds=4)
    before = max(abs(sample.error(H100)) for sample in samples)
    assert before > 0.1
    assert max(abs(sample.error(found)) for sample in samples) < before / 4


def test_a_run_of_a_cpu_is_fitted_to_with_the_kernels_of_a_cpu(tmp_path):
    """A step that takes what the prior predicts moves no constant."""
    config, metrics = resolved(DENSE), tmp_path / "metrics.jsonl"
    prior = dataclasses.replace(H100, cores=8)
    seconds = StepModel(config, VOCABULARY, 8, device="cpu").time(prior).seconds
    rows = ({"iteration": i, "iteration-time": seconds, "world-size": 8} for i in (1, 2))
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    written = {"config": config.to_dict(), "vocab_size": VOCABULARY}
    config_file(metrics).write_text(json.dumps(written))
    _, moved = fit_files([str(metrics)], prior)
    assert not moved
