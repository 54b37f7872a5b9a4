"""FLOPs of what a layer recomputes, by hand: tests compare the log of real passes with them."""

from __future__ import annotations

from megatron.config.model import GATED, ModelConfig
from megatron.model.arithmetic import elements, unit_flops
from megatron.model.layer import layer_parameters
from megatron.model.recompute import LayerRecompute, always_rebuilt


def flops_again(model: ModelConfig, seq: int, choice: LayerRecompute, index: int = 0) -> int:
    """FLOPs per token of what the backward pass of the `index`-th layer computes again: forward
    passes of its matrix products, and the causal half of attention.
    """
    gated = 2 if model.activation in GATED else 1
    heads = (model.kv_channels + model.value_channels) * model.num_attention_heads
    rebuilt = always_rebuilt(model)
    products = {
        **_attention_again(model),
        "core_attn": heads * seq,
        "mlp": 2 * model.hidden_size * gated * model.ffn_hidden_size,
    }
    if model.expert_layers()[index]:
        products |= _experts_again(model, gated)
    modules = rebuilt if choice.whole else choice.modules | rebuilt
    if "qkv" in modules:
        modules = modules - {"mla_up_proj"}  # which is a part of it
    again = sum(flops for module, flops in products.items() if module in modules)
    return again + (unit_flops(model, seq, 0)[index + 1] if choice.whole else 0)


def _attention_again(model: ModelConfig) -> dict[str, int]:
    """All projections in front of the attention core, and the up-projections among them."""
    parameters = layer_parameters(model, 0).items()
    products = {n: spec for n, spec in parameters if n.startswith("attention.") and spec.is_gemm}
    del products["attention.proj.weight"]
    up = [spec for name, spec in products.items() if "down" not in name]
    found = {"qkv": 2 * elements(products.values())}
    return found | ({"mla_up_proj": 2 * elements(up)} if model.multi_latent_attention else {})


def _experts_again(model: ModelConfig, gated: int) -> dict[str, int]:
    """Of a layer with experts: fc1 of the shared one, and both products of the others."""
    chosen = model.moe_router_topk * (model.moe_ffn_hidden_size or 0)
    shared = model.moe_shared_expert_intermediate_size or 0
    return {
        "mlp": 2 * model.hidden_size * gated * shared,
        "moe": 2 * model.hidden_size * (gated + 1) * chosen,
    }
