"""Megatron-DeepSpeed's GPT tensors and arguments as those of Megatron-LM.

Facts of Megatron-DeepSpeed (2022 to July 2025): layers are numbered over all pipeline stages; its
pipeline module names every layer by its place in a list (embedding, layers, last norm, head, with
functions between them), and tied ends `tied_modules.embed`. Model-parallel ranks count tensor
parallelism fastest. Until its change #441 (4 December 2024) query_key_value has the rows of each
head (or query group) together, as Megatron-LM's; since then each tensor-parallel rank has all its q
rows, then k, then v, which only works without grouped queries. Names, shapes and checkpoint_version
are the same.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from megatron.tools._convert.huggingface_files import take_parts
from megatron.tools._convert.huggingface_rules import Rule
from megatron.tools._convert.megatron_lm import embedding_rows, map_tensors
from megatron.tools._convert.models import Held, Pair, Whole
from megatron.tools._convert.mp_ranks import join_ranks
from megatron.tools._convert.pickles import Record, namespace, state_of

from megatron.checkpoint.manifest import CheckpointError
from megatron.config.model import GATED, ModelConfig

INNER = {
    "input_layernorm": "input_layernorm",
    "self_attention.query_key_value": "self_attention.linear_qkv",
    "self_attention.dense": "self_attention.linear_proj",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
}
OUTER = {
    "embedding.word_embeddings.weight": "embedding.word_embeddings.weight",
    "embedding.position_embeddings.weight": "embedding.position_embeddings.weight",
    "output_layer.weight": "output_layer.weight",
    "encoder.final_layernorm.weight": "decoder.final_layernorm.weight",
    "encoder.final_layernorm.bias": "decoder.final_layernorm.bias",
}
PIPE_OUTER = {
    "word_embeddings.weight": "embedding.word_embeddings.weight",
    "position_embeddings.weight": "embedding.position_embeddings.weight",
    "lm_head.weight": "output_layer.weight",
    "weight": "decoder.final_layernorm.weight",
    "bias": "decoder.final_layernorm.bias",
}
FUSED = re.compile(r"decoder\.layers\.(\d+)\.self_attention\.linear_qkv\.(weight|bias)")


def is_megatron(names: set[str]) -> bool:
    """Whether these are names of Megatron-DeepSpeed."""
    # GPT-NeoX of Hugging Face has attention.query_key_value, too
    return any("self_attention.query_key_value" in name for name in names)


def _core_names(names: set[str]) -> dict[str, str]:
    """Their names -> Megatron-LM's; those without a counterpart stay as they are."""
    places = sorted(
        {
            int(match[1])
            for name in names
            if (match := re.fullmatch(r"(\d+)\.input_layernorm\.weight", name))
        }
    )
    # of the pipeline module's list -> layer
    number = {place: layer for layer, place in enumerate(places)}
    found = {}
    for name in names:
        plain = re.sub(r"^(?:module\.)?(?:language_model\.)?", "", name).replace(
            "transformer.", "encoder.", 1
        )
        layer = re.fullmatch(r"(?:encoder\.layers\.)?(\d+)\.(.+)\.(weight|bias)", plain)
        listed = re.fullmatch(r"(?:tied_modules\.embed|\d+)\.(.+)", plain)
        if layer and layer[2] in INNER:
            index = int(layer[1]) if plain.startswith("encoder.") else number.get(int(layer[1]), -1)
            found[name] = f"decoder.layers.{index}.{INNER[layer[2]]}.{layer[3]}"
        else:
            found[name] = OUTER.get(plain) or (PIPE_OUTER.get(listed[1], name) if listed else name)
    return found


def megatron_arguments(args: Any) -> Record:
    """Their arguments in the words of Megatron-LM's."""
    state = state_of(args)
    heads = state.get("num_attention_heads")
    groups = state.pop("num_key_value_heads", None)
    placed = state.pop("add_position_embedding", True)
    positions = "learned_absolute" if placed else "none"
    if state.get("use_rotary_position_embeddings"):
        positions = "rope"
    state.setdefault("position_embedding_type", positions)
    state["group_query_attention"] = groups not in (None, heads)
    state["num_query_groups"] = groups or heads
    base = state.pop("rope_theta", None)
    if base:
        state["rotary_base"] = base
    norm = state.get("normalization")
    norms: dict[Any, Any] = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm", None: "LayerNorm"}
    state["normalization"] = norms.get(norm, norm)
    # unlike the core, its MLP obeys the flag
    state["gelu_tanh"] = state.pop("openai_gelu", False)
    if state.get("num_experts") in ([1], [0]):
        state["num_experts"] = None
    return namespace(state)


def tensor_parallel_size(folder: Path, states: list[dict[str, Any]]) -> int:
    """Of the run that wrote these model-states files, one for each model-parallel rank. Raises
    CheckpointError when some are missing.
    """
    given = state_of(states[0].get("args"))
    dimensions = states[0].get("checkpoint_parallel_dimensions") or {}
    tp = given.get("tensor_model_parallel_size", dimensions.get("tp_degree", 1))
    pp = given.get("pipeline_model_parallel_size", dimensions.get("pp_degree", 1))
    if tp * pp != len(states):
        raise CheckpointError(
            f"{folder}: has partitions of {len(states)} model-parallel ranks, the run had "
            f"{tp * pp} (tp {tp}, pp {pp}): bring the files of all of them into the folder"
        )
    return tp


def map_ranks(
    folder: Path,
    ranks: list[Held],
    tp: int,
    model: ModelConfig,
    vocab_size: int | None,
    stacked: bool,
    norms_minus_one: bool = False,
) -> tuple[list[Pair], int]:
    """The logical tensors in those of all ranks, and how many rows the word embedding has; None
    keeps all of them. Raises UserError.
    """
    wholes = _join_stages(folder, ranks, tp, model, stacked)
    fused = [whole for whole in wholes if stacked and FUSED.fullmatch(whole[0])]
    rest = [whole for whole in wholes if not (stacked and FUSED.fullmatch(whole[0]))]
    rows = embedding_rows(folder, rest, vocab_size)
    if fused and model.num_query_groups != model.num_attention_heads:
        raise CheckpointError(
            f"{folder}: --qkv-order stacked cannot hold grouped queries (no version wrote "
            "that): give --qkv-order grouped"
        )
    pairs = take_parts(
        [_stacked_rule(name) for name, _, _ in fused],
        {name: (shape, parts) for name, shape, parts in fused},
    )
    rest_pairs = map_tensors(model, vocab_size or rows, rest, norms_minus_one=norms_minus_one)
    return [*pairs, *rest_pairs], rows


def _join_stages(
    folder: Path, ranks: list[Held], tp: int, model: ModelConfig, stacked: bool
) -> list[Whole]:
    """All tensors of all pipeline stages, each joined over its tensor-parallel ranks."""
    core = _core_names({name for rank in ranks for name in rank})
    wholes = []
    for stage in range(0, len(ranks), tp):
        for name in ranks[stage]:
            if stage and name.startswith("tied_modules."):  # the first stage's copy
                continue
            own = ranks[stage : stage + tp]
            wholes.append(_join(folder, name, core[name], own, model, stacked))
    return wholes


def _stacked_rule(name: str) -> Rule:
    """Of a query_key_value that has all rows of q, then of k, then of v."""
    layer, kind = FUSED.fullmatch(name).groups()
    return Rule(name, tuple(f"layers.{layer}.attention.{part}.{kind}" for part in "qkv"))


def _join(
    folder: Path, name: str, core: str, ranks: list[Held], model: ModelConfig, stacked: bool
) -> Whole:
    held = [rank.get(name, (None, [])) for rank in ranks]
    shapes = {shape for shape, _ in held}
    if len(shapes) > 1:
        raise CheckpointError(
            f"{folder}: {name} is not in the same shape on every tensor-parallel rank"
        )
    gated = ".linear_fc1." in core and model.activation in GATED
    folds = 2 if gated else 3 if stacked and FUSED.fullmatch(core) else 1
    return join_ranks(core, shapes.pop(), [parts for _, parts in held], folds)
