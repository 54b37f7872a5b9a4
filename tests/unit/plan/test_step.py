"""The time of a step: operations that follow from the flags, and what they are priced at."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from megatron.tools._plan import step as module
from megatron.tools._plan.fit import Sample, SteadyStep, fit
from megatron.tools._plan.hardware import (
    FOLDER,
    Hardware,
    known_hardware,
    load_hardware,
    names,
    write_hardware,
)
from megatron.tools._plan.memory import MemoryPlan
from megatron.tools._plan.search import NEAR, RECOMPUTE, Search, explain, layouts
from megatron.tools._plan.step import StepModel
from megatron.tools._plan.step_table import estimate, explain_report, search_report

from megatron.config.arguments import parse_arguments
from megatron.config.errors import UserError
from megatron.config.groups import Config
from megatron.config.validate import resolve
from megatron.model.arithmetic import unit_flops
from megatron.model.recompute import NO_RECOMPUTE, WHOLE
from tools.plan import run

MODEL = (
    "--num-layers 8 --hidden-size 2048 --num-attention-heads 16 --ffn-hidden-size 5632 --swiglu "
    "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--seq-length 4096 --attention-dropout 0 --hidden-dropout 0 --bf16 --mock-data "
    "--tokenizer-type NullTokenizer "
    "--train-iters 10 --lr 1e-4 --vocab-size 31999 --micro-batch-size 1 --global-batch-size 64 "
)
VOCABULARY = 32000


def asked(flags: str = "") -> Config:
    """As parsed."""
    return parse_arguments((MODEL + flags).split()).config


def step(flags: str = "", world: int = 8) -> StepModel:
    """The steps of a run."""
    return StepModel(resolve(asked(flags), world, VOCABULARY).config, VOCABULARY, world)


@pytest.fixture(scope="module")
def h100() -> Hardware:
    return load_hardware("h100")


def test_a_layer_computes_what_the_arithmetic_counts():
    """Products, and attention of the causal half; the backward pass of fused attention computes
    its scores again, which the model's FLOPs do not count.
    """
    run = step()
    layer = run.operations.layer(0, NO_RECOMPUTE)
    counted = unit_flops(run.config.model, 4096, 0)[1] * run.operations.tokens
    assert layer.forward.flops == pytest.approx(counted)
    core = sum(each.flops for each in layer.forward.cores)
    back = layer.backward.flops
    assert back == pytest.approx(2 * counted + core / 2)
    whole = run.operations.layer(0, WHOLE)
    assert whole.backward_input.flops == pytest.approx(layer.backward_input.flops + counted)


@pytest.mark.parametrize("flags", ["", "--sequence-parallel "])
def test_tensor_parallel_ranks_send_the_same_bytes(flags):
    """A gather and a reduce-scatter move what an all-reduce moves; one gather more is in addition
    to products.
    """
    size = 4096 * 2048 * 2
    layer = step("--tensor-model-parallel-size 4 " + flags).operations.layer(0, NO_RECOMPUTE)
    factors = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}
    assert sum(factors[each.operation] * each.size for each in layer.forward.exchanges) == 4 * size
    sent = [each for each in layer.backward_input.exchanges if each.axis == "tp"]
    backward = sum(factors[each.operation] * each.size for each in sent)
    assert backward == (4 + 2 * bool(flags)) * size


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--zero-stage 3 ",
        "--tensor-model-parallel-size 2 --sequence-parallel --zero-stage 1 ",
        "--pipeline-model-parallel-size 4 ",
        "--context-parallel-size 2 --cp-comm-type p2p --zero-stage 2 ",
    ],
)
def test_parts_of_a_step_are_all_of_it(flags, h100):
    time = step(flags).time(h100)
    assert sum(time.spent.values()) == pytest.approx(time.seconds)
    assert all(value >= 0 for value in time.spent.values())
    assert time.tokens_per_second == pytest.approx(64 * 4096 / time.seconds / 8)


def test_the_steady_part_of_a_pipeline_is_not_simulated(h100, monkeypatch):
    """What is added for the micro-batches beyond is what simulating them gives."""
    flags = "--pipeline-model-parallel-size 4 --global-batch-size 128 "
    run = step(flags, world=4)
    assert run.micro_batches > module.SIMULATED * 4
    pricing = run.pricing(h100)
    stages = [module._stage_seconds(pricing, units) for units in run.units]
    shortened = run.passes_seconds(stages, pricing)
    monkeypatch.setattr(module, "SIMULATED", 1000)
    assert shortened == pytest.approx(run.passes_seconds(stages, pricing), rel=1e-6)


def test_collectives_cost_more_over_the_network_and_with_more_ranks(h100):
    size = 1 << 26
    within = h100.exchange_seconds("all-gather", size, 8, 1)
    across = h100.exchange_seconds("all-gather", size, 64, 8)
    alone = h100.exchange_seconds("all-gather", size, 8, 8)  # one rank on each node
    assert within < across < alone
    assert h100.exchange_seconds("all-reduce", size, 1, 1) == 0
    # of eight, the switch adds up
    few, many = (h100.exchange_seconds("all-reduce", size, ranks, 1) for ranks in (4, 8))
    assert few > 0.9 * many


def test_devices_are_whole_and_name_their_sources():
    for name in names():
        written = json.loads((FOLDER / f"{name}.json").read_text())
        assert all(each["source"] for each in written["constants"].values())
        assert load_hardware(name).peak_tflops > 100
    assert known_hardware("NVIDIA H100 80GB HBM3") == load_hardware("h100")
    assert known_hardware("NVIDIA A100-SXM4-80GB") == load_hardware("a100-80")
    assert known_hardware("Tesla V100") is None


def test_a_device_that_is_none_is_refused(tmp_path):
    with pytest.raises(UserError, match="neither a file nor one of a100-40"):
        load_hardware("h1000")
    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"name": "x", "constants": {"speed": {"value": 1}}}')
    with pytest.raises(UserError, match="unknown constants speed"):
        load_hardware(str(wrong))


def test_a_device_written_is_the_device_read(tmp_path, h100):
    write_hardware(tmp_path / "again.json", h100, {})
    assert load_hardware(str(tmp_path / "again.json")) == h100


def test_the_fit_finds_constants_that_steps_were_made_with(h100):
    """Steps of a device with slower products and a slower network, made by the model itself."""
    true = dataclasses.replace(h100, product_efficiency=0.55, network_efficiency=0.6)
    layouts = ("", "--zero-stage 3 ", "--tensor-model-parallel-size 2 --zero-stage 1 ")
    samples = []
    for flags in layouts:
        for world in (8, 32):
            config = resolve(asked(flags), world, VOCABULARY).config
            model = SteadyStep(config, VOCABULARY, world)
            samples.append(Sample(model, model.time(true).seconds, flags))
    found = fit(samples, h100, rounds=4)
    before = max(abs(sample.error(h100)) for sample in samples)
    assert before > 0.1
    assert max(abs(sample.error(found)) for sample in samples) < before / 4


def test_a_search_ranks_what_fits(h100):
    small = dataclasses.replace(h100, memory_gib=14.0)
    found = Search(asked(), VOCABULARY, 8, small).run()
    best = [each.seconds for each in found.best]
    assert best == sorted(best) and all(each.fits == "fits" for each in found.best)
    assert found.larger and all(each.seconds <= best[0] for each in found.larger)
    assert all(each.peak_gib <= NEAR * 14.0 for each in found.larger)
    report = search_report(found, small)
    assert any("slower" in line for line in report) and "--micro-batch-size" in report[1]


def test_a_search_needs_no_layout_that_divides_the_batch():
    """64 samples a step of 128 GPUs: with the sizes that the flags have by default, no layout."""
    flags = MODEL.replace("--micro-batch-size 1 ", "") + "--world-size 128"
    lines = run("search", [*flags.split()])
    assert "--micro-batch-size" in lines[1]
    with pytest.raises(UserError, match="128: no layout can run --global-batch-size 65"):
        run("search", [*flags.replace("size 64", "size 65").split()])
    with pytest.raises(UserError, match="--num-layers is required"):
        run("search", [*flags.replace("--num-layers 8 ", "").split()])
    with pytest.raises(UserError, match="--num-attention-heads 7") as raised:
        run("search", [*flags.replace("128", "8").split(), "--num-attention-heads", "7"])
    assert "batch" not in str(raised.value)


@pytest.mark.full
def test_a_bound_is_below_what_is_simulated_and_planned(h100):
    """The search leaves out nothing by its bounds of time and memory."""
    search = Search(asked("--global-batch-size 32 "), VOCABULARY, 8, h100)
    resolved = resolve(search.config, 8, VOCABULARY).config
    changes = list(layouts(resolved, VOCABULARY, 8, 8))
    tried = 0
    for change in changes[:: len(changes) // 24]:
        for level in (0, 3, 4):
            each = search.candidate(change, level)
            if each is None:
                continue
            bound, least = each.seconds, search.least_gib(each)
            search.simulate(each)
            search.plan(each)
            assert bound <= each.seconds * (1 + 1e-9) and least <= each.peak_gib, each.flags
            tried += 1
    assert tried > 20


def test_a_search_varies_what_context_parallel_ranks_send_and_uneven_stages(h100):
    config = resolve(asked("--seq-length 32768 --num-layers 9 "), 16, VOCABULARY).config
    changes = list(layouts(config, VOCABULARY, 16, 8))

    def values(field: str) -> set:
        return {change.get(("distributed", field)) for change in changes}

    assert values("cp_comm_type") == {None, "allgather", "a2a", "p2p", "a2a+p2p"}
    assert values("pipeline_model_parallel_layout") == {None, "auto"}
    fractions = {rung.get(("training", "activation_offload_fraction")) for rung in RECOMPUTE}
    assert fractions == {None, 0.5}


def test_copies_to_the_host_cost_what_passes_do_not_hide(h100):
    """A link of a tenth is seen; all of the copies, and half of them, each way."""
    flags = "--recompute-granularity full --activation-offload "
    slow = dataclasses.replace(h100, host_gbps=0.5)
    whole = step(flags).time(slow).spent["copies to the host"]
    half = step(flags + "--activation-offload-fraction 0.5 ").time(slow).spent["copies to the host"]
    assert whole == pytest.approx(2 * half) and whole > 0
    # 8 micro-batches of 8 layers' inputs in bf16, out and back
    assert whole < 8 * 8 * 2 * 4096 * 2048 * 2 / 0.5e9
    assert step(flags).time(h100).spent["copies to the host"] == 0


def test_the_tool_prints_a_step_as_text_and_as_json():
    flags = [*MODEL.split(), "--world-size", "8", "--hardware", "h100"]
    text = run("step", [*flags, "--gpu-hour-price", "2"])
    assert "a step of 262,144 tokens takes" in text[0] and "dollars at 2 each" in text[-2]
    found = json.loads(run("step", [*flags, "--json"])[0])
    assert found["low_s"] < found["high_s"] and found["fits"] == "fits"
    assert found["step_s"] == pytest.approx(64 * 4096 / found["tokens_per_s_per_gpu"] / 8)
    with pytest.raises(UserError, match="--world-size is missing"):
        run("step", MODEL.split())
    with pytest.raises(UserError, match="--gpu-hour-price none: expected a number"):
        run("step", [*flags, "--gpu-hour-price", "none"])


def test_explain_report_says_gains_and_losses(h100):
    config = resolve(asked(), 8, VOCABULARY).config
    found = estimate(MemoryPlan(config, VOCABULARY, 8), h100)
    search = Search(asked(), VOCABULARY, 8, h100)
    lines = explain_report(found, explain(search, config))
    assert len(lines) > 3 and all(math.isfinite(float(line.split("%")[0])) for line in lines[1:])
