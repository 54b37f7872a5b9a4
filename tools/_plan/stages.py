"""What each stage of a pipeline holds and computes, as text: what the banner prints."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.tools._plan.memory import MemoryPlan, schedule_of, stage_parameters
from megatron.tools._plan.simulate import Costs, simulate

from megatron.config.groups import Config, ModelConfig
from megatron.model.arithmetic import core_flops, elements, padded_vocab_size, unit_flops
from megatron.model.attention.latent_attention import parameters_of_attention
from megatron.model.mlp import always_rebuilt, saved_widths
from megatron.model.recompute import LayerRecompute, stage_recompute
from megatron.model.stages import Stage, pipeline_stages
from megatron.parallel.schedule import Kind, Schedule


def stage_lines(plan: MemoryPlan) -> list[str]:
    """A line about the schedule, one about each stage (parameters are those of one of its ranks),
    one about memory; none without a pipeline.
    """
    config = plan.config
    if config.distributed.pipeline_model_parallel_size == 1:
        return []
    padded = padded_vocab_size(
        plan.vocab_size, config.model, config.distributed.tensor_model_parallel_size
    )
    stages = pipeline_stages(config, padded)
    schedule = schedule_of(config, plan.world_size)
    stored = stage_parameters(config, stages, schedule.placement, padded)
    flops = unit_flops(config.model, config.data.seq_length, padded)
    peaks = in_flight(schedule)
    bubble = simulate(schedule, stage_costs(config, stages, padded)).bubble
    lines = [
        f"{schedule.name}: {schedule.ranks} pipeline ranks x "
        f"{schedule.stages // schedule.ranks} stage(s), {schedule.micro_batches} "
        f"micro-batches; {bubble:.1%} idle, by FLOPs alone"
    ]
    for k, stage in enumerate(stages):
        share = sum(flops[i] for i in stage.units) / sum(flops)
        lines.append(
            f"stage {k} on rank {schedule.placement[k]}: {units_of(stage)}; "
            f"{stored[k]:,} parameters; {share:.1%} of the FLOPs; {peaks[k]} in flight"
        )
    totals = [f"{rank.total / 2**30:.3g}" for rank in plan.ranks]
    return [*lines, f"GiB by pipeline rank: {', '.join(totals)}"]


def stage_costs(config: Config, stages: Sequence[Stage], padded_vocab: int) -> Costs:
    """FLOPs per token of each stage's passes. A product of matrices costs the same forward, for the
    input gradient and for the weight gradient; the attention core has no weights, and the head
    computes its weight gradient with its input gradient.
    """
    model = config.model
    flops = unit_flops(model, config.data.seq_length, padded_vocab)
    core = core_flops(model, config.data.seq_length)
    forward = [sum(flops[i] for i in stage.units) for stage in stages]
    layers = [sum(flops[i + 1] for i in stage.layers) for stage in stages]
    weight = [own - core * len(stage.layers) for own, stage in zip(layers, stages, strict=True)]
    again = [
        sum(
            flops_again(model, config.data.seq_length, choice, index)
            for index, choice in zip(
                stage.layers, stage_recompute(config.training, stage.layers), strict=True
            )
        )
        for stage in stages
    ]
    back = [2 * f - w + own for f, w, own in zip(forward, weight, again, strict=True)]
    return Costs(tuple(forward), tuple(back), tuple(weight))


def flops_again(model: ModelConfig, seq: int, choice: LayerRecompute, index: int = 0) -> int:
    """FLOPs per token of what the backward pass of the `index`-th layer computes again: forward
    passes of its matrix products, and the causal half of attention.
    """
    rebuilt = always_rebuilt(model)
    products = {
        **_attention_again(model),
        "core_attn": core_flops(model, seq),
        "mlp": 2 * model.hidden_size * saved_widths(model)[0],
    }
    if model.expert_layers()[index]:
        products |= _experts_again(model)
    modules = rebuilt if choice.whole else choice.modules | rebuilt
    if "qkv" in modules:
        modules = modules - {"mla_up_proj"}  # which is a part of it
    again = sum(flops for module, flops in products.items() if module in modules)
    return again + (unit_flops(model, seq, 0)[index + 1] if choice.whole else 0)


def _attention_again(model: ModelConfig) -> dict[str, int]:
    """All projections in front of the attention core, and the up-projections among them."""
    parameters = parameters_of_attention(model, "attention")
    products = {name: spec for name, spec in parameters.items() if spec.is_gemm}
    del products["proj.weight"]
    up = [spec for name, spec in products.items() if "down" not in name]
    found = {"qkv": 2 * elements(products.values())}
    return found | ({"mla_up_proj": 2 * elements(up)} if model.multi_latent_attention else {})


def _experts_again(model: ModelConfig) -> dict[str, int]:
    """Of a layer with experts: fc1 of the shared one, and both products of the others."""
    inner, outer = saved_widths(model)
    gated = inner // outer
    chosen = model.moe_router_topk * (model.moe_ffn_hidden_size or 0)
    shared = model.moe_shared_expert_intermediate_size or 0
    return {
        "mlp": 2 * model.hidden_size * gated * shared,
        "moe": 2 * model.hidden_size * (gated + 1) * chosen,
    }


def units_of(stage: Stage) -> str:
    """`embedding, layers 0-3`."""
    first = stage.layers.start
    last = stage.layers.stop - 1
    layers = (
        [f"layer {first}" if first == last else f"layers {first}-{last}"] if stage.layers else []
    )
    return ", ".join(
        [*(["embedding"] if stage.embedding else []), *layers, *(["head"] if stage.head else [])]
    )


def in_flight(schedule: Schedule) -> list[int]:
    """The most micro-batches of which each stage has run the forward pass and not the whole
    backward pass.
    """
    now = [0] * schedule.stages
    most = [0] * schedule.stages
    for rank in range(schedule.ranks):
        for kind, stage, _ in schedule.in_memory(rank):
            if kind is Kind.FORWARD:
                now[stage] += 1
                most[stage] = max(most[stage], now[stage])
            elif kind is Kind.BACKWARD or kind is Kind.BACKWARD_WEIGHT:  # one of them ends it
                now[stage] -= 1
    return most
