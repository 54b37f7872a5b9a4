"""The tensors and arguments of our models as Megatron-LM names and keeps them."""

from __future__ import annotations

import argparse
import dataclasses
import signal

import torch
from huggingface_models import MODELS
from test_huggingface import build

from megatron.config.groups import ModelConfig

VOCAB, PADDED, LAYERS = 67, 72, 3
# modules of a layer; what comes behind is `weight` or `bias`
MODULES = {
    "attention.k_norm": "self_attention.k_layernorm.",
    "attention.q_down": "self_attention.linear_q_down_proj.",
    "attention.q_up": "self_attention.linear_q_up_proj.",
    "attention.kv_down": "self_attention.linear_kv_down_proj.",
    "attention.kv_norm": "self_attention.kv_layernorm.",
    "attention.kv_up": "self_attention.linear_kv_up_proj.",
    "attention.proj": "self_attention.linear_proj.",
    "mlp_norm": "pre_mlp_layernorm.",
    "mlp.down": "mlp.linear_fc2.",
    "mlp.router": "mlp.router.",
    "mlp.shared_expert.down": "mlp.shared_experts.linear_fc2.",
    "mlp.shared_expert_gate": "mlp.shared_experts.gate_",
}
OUTER = {
    "embedding.word": "embedding.word_embeddings.",
    "embedding.position": "embedding.position_embeddings.",
    "final_norm": "decoder.final_layernorm.",
    "head": "output_layer.",
}
# always kept, where others are if they differ from the defaults
KEPT = """kv_channels num_query_groups group_query_attention normalization position_embedding_type
untie_embeddings_and_output_weights""".split()


def layer_tensors(
    model: ModelConfig, held: dict, layer: int, spelling: str, fused_norm: bool
) -> dict[str, torch.Tensor]:
    """A layer; the experts by `spelling`, the first norm as a part of the product behind it."""
    own = {
        name.removeprefix(f"layers.{layer}."): value
        for name, value in held.items()
        if name.startswith(f"layers.{layer}.")
    }
    found = {}
    latent = model.multi_latent_attention
    names = MODULES | {
        "input_norm": "self_attention.linear_qkv.layer_norm_" if fused_norm else "input_layernorm.",
        "attention.q_norm": (
            "self_attention.linear_q_up_proj.layer_norm_"
            if latent
            else "self_attention.q_layernorm."
        ),
    }
    if latent:
        names["attention.q"] = "self_attention.linear_q_proj."

    def fc1(name: str, kind: str = "weight") -> torch.Tensor:
        parts = (f"{name}.{part}.{kind}" for part in ("gate", "up"))
        return torch.cat([own[part] for part in parts if part in own])

    for kind in ("weight", "bias"):
        for ours, theirs in names.items():
            if f"{ours}.{kind}" in own:
                found[theirs + kind] = own[f"{ours}.{kind}"]
        if not latent and f"attention.q.{kind}" in own:
            qkv = [own[f"attention.{part}.{kind}"] for part in "qkv"]
            parts = [x.reshape(model.num_query_groups, -1, *x.shape[1:]) for x in qkv]
            found[f"self_attention.linear_qkv.{kind}"] = torch.cat(parts, 1).flatten(0, 1)
        for name, theirs in (("mlp", "mlp"), ("mlp.shared_expert", "mlp.shared_experts")):
            if f"{name}.up.{kind}" in own:
                found[f"{theirs}.linear_fc1.{kind}"] = fc1(name, kind)
    if "mlp.router.expert_bias" in own:
        found["mlp.router.expert_bias"] = own["mlp.router.expert_bias"]
    if "mlp.router.weight" in own:
        numbers = range(model.num_experts)
        experts = {
            "fc1": [fc1(f"mlp.experts.{e}") for e in numbers],
            "fc2": [own[f"mlp.experts.{e}.down.weight"] for e in numbers],
        }
        for part, values in experts.items():
            if spelling == "stacked":
                found[f"mlp.experts.experts.linear_{part}.weight"] = torch.stack(values)
            else:
                for e, value in enumerate(values):
                    found[f"mlp.experts.{spelling.format(e, part)}"] = value
    return found


def their_tensors(
    model: ModelConfig,
    held: dict,
    spelling: str = "stacked",
    rows: int = VOCAB,
    fused_norm: bool = False,
) -> dict[str, torch.Tensor]:
    """All tensors; layers are stacked where they are alike, the vocabulary is padded to `rows`."""
    found = {}
    for ours, theirs in OUTER.items():
        for kind in ("weight", "bias"):
            if (value := held.get(f"{ours}.{kind}")) is not None:
                if ours in ("embedding.word", "head"):
                    padding = value.new_full((rows - VOCAB, value.shape[1]), 9.0)
                    value = torch.cat([value, padding])
                found[theirs + kind] = value
    numbers = range(model.num_layers)
    layers = [layer_tensors(model, held, i, spelling, fused_norm) for i in numbers]
    alike = len({tuple(layer) for layer in layers}) == 1
    for i, layer in enumerate(layers):
        for name, value in layer.items():
            if alike:
                found[f"decoder.layers.{name}"] = torch.stack([each[name] for each in layers])
            else:
                found[f"decoder.layers.{i}.{name}"] = value.clone()
    return found


def their_arguments(model: ModelConfig) -> argparse.Namespace:
    """The arguments of a model."""
    given = {
        field.name: getattr(model, field.name)
        for field in dataclasses.fields(model)
        if getattr(model, field.name) != field.default or field.name in KEPT
    }
    given["swiglu"] = given.pop("activation", "gelu") == "swiglu"
    given["moe_router_load_balancing_type"] = "aux_loss"
    given["moe_aux_loss_coeff"] = 0.0
    given.pop("latent_norm_epsilon", None)  # one epsilon for all norms there
    given["moe_layer_freq"] = [int(each) for each in model.expert_layers()]
    if model.position_embedding_type == "yarn":
        given["position_embedding_type"] = "rope"
        given["rotary_scaling_factor"] = given.pop("rope_scaling_factor")
        given["original_max_position_embeddings"] = given.pop(
            "rope_original_max_position_embeddings"
        )
    if model.window_size:
        given["window_size"] = (model.window_size - 1, 0)
    return argparse.Namespace(**given)


def megatron_names(case: str) -> tuple[argparse.Namespace, dict, dict, object]:
    """(arguments, tensors under Megatron-LM's names, our logical tensors, our model) of one of
    the models of Hugging Face's families.
    """
    config = MODELS[case]
    model, held = build(config)
    arguments = their_arguments(config)
    # of classes that a checkpoint may name
    arguments.exit_signal, arguments.params_dtype = signal.SIGTERM, torch.bfloat16
    return arguments, their_tensors(config, held, rows=PADDED, fused_norm=True), held, model


def tp_part(name: str, value: torch.Tensor, rank: int, tp: int, gated: bool) -> torch.Tensor:
    """What a tensor-parallel rank holds of a tensor of one layer, or of one outside of layers."""
    if "linear_fc1.weight" in name or "linear_fc1.bias" in name:
        return torch.cat([half.chunk(tp)[rank] for half in value.chunk(2 if gated else 1)])
    by_rows = ("linear_qkv.weight", "linear_qkv.bias", "word_embeddings", "output_layer")
    columns = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
    if columns or any(part in name for part in by_rows):
        return value.chunk(tp, int(columns))[rank]
    return value
