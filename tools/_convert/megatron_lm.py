"""Megatron-LM's GPT tensors as ours: which of our parameters a name means, and the logical tensors
in it. The arguments are in `megatron_arguments.py`.

Facts of Megatron-LM (core 0.5 to 0.16): layers are stacked along a first dimension (or numbered in
the name); the fused QKV has for each query group the rows of its queries, then of its key and its
value; fc1 of a gated MLP has the gate's rows, then the others (`_w` and `_v` apart on request); a
normalisation before a linear layer may carry that layer's name; the vocabulary is padded; experts
are stacked behind the layers, or numbered in the name. All as ours but for names. With
--apply-layernorm-1p the weights of norms are stored minus one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from megatron.tools._convert.huggingface_files import take_parts
from megatron.tools._convert.huggingface_rules import Rule
from megatron.tools._convert.models import Pair, Part, Whole

from megatron.checkpoint.boxes import Dims
from megatron.config.errors import UserError
from megatron.config.model import GATED, ModelConfig
from megatron.model.build import declared
from megatron.model.spec import ParameterSpec, TensorSpec

WORD = "embedding.word.weight"
OUTER = {
    "embedding.word_embeddings.weight": WORD,
    "embedding.position_embeddings.weight": "layers.0.position.weight",
    "decoder.final_layernorm": "layers.-1.final_norm",
    "output_layer.weight": "head.weight",
}
INNER = {  # names in a layer, without weight or bias
    "input_layernorm": "input_norm",
    "self_attention.linear_qkv.layer_norm": "input_norm",
    "self_attention.linear_qkv": "attention.qkv",
    "self_attention.q_layernorm": "attention.q_norm",
    "self_attention.k_layernorm": "attention.k_norm",
    "self_attention.linear_proj": "attention.proj",
    "self_attention.linear_q_proj": "attention.q",
    "self_attention.linear_q_down_proj": "attention.q_down",
    "self_attention.linear_q_up_proj": "attention.q_up",
    "self_attention.linear_q_up_proj.layer_norm": "attention.q_norm",
    "self_attention.linear_kv_down_proj": "attention.kv_down",
    "self_attention.linear_kv_up_proj": "attention.kv_up",
    "self_attention.linear_kv_up_proj.layer_norm": "attention.kv_norm",
    "self_attention.kv_layernorm": "attention.kv_norm",
    "pre_mlp_layernorm": "mlp_norm",
    "mlp.linear_fc1.layer_norm": "mlp_norm",
    "mlp.linear_fc1": "mlp.fc1",
    "mlp.linear_fc2": "mlp.fc2",
    "mlp.router": "mlp.router",
    "mlp.shared_experts.linear_fc1": "mlp.shared_expert.fc1",
    "mlp.shared_experts.linear_fc2": "mlp.shared_expert.fc2",
}
WHOLE_NAMES = {
    "mlp.router.expert_bias": "mlp.router.expert_bias",
    "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
}
EXPERT = re.compile(
    r"mlp\.experts\.(?:experts\.|local_experts\.(\d+)\.)?linear_(fc[12])\.weight(\d*)"
)
GATED_HALVES = ("mlp.fc1", "mlp.shared_expert.fc1")
STACKED = -1  # the experts are a dimension of the tensor
NOT_WEIGHTS = re.compile(
    r"optimizer\.|rng_state|.*_extra_state|rerun_state|opt_param_scheduler|chained_\d+\."
    r"|param_groups|args\.|common_step|iteration|.*_tokens_per_expert"
)


class ParameterPlace(NamedTuple):
    """Where a tensor of theirs belongs: our parameter with {} for the number of the layer (-1 for
    that of the last one), the half of fc1 (0 or 1, -1 for both), and the expert.
    """

    parameter: str
    half: int = -1
    expert: int | None = None


def our_parameter(name: str) -> ParameterPlace | None:
    """The place of one of their tensors; None when there is none."""
    name = re.sub(r"^(?:model\d*\.|module\.)+", "", name)
    half = {"_w": 0, "_v": 1}.get(name[-2:], -1)
    name = name[:-2] if half >= 0 else name
    layer = re.fullmatch(r"decoder\.layers\.(?:(\d+)\.)?(.+)", name)
    if layer:
        inner = _inner_place(layer[2], half)
        number = layer[1] or "{}"
        return inner and inner._replace(parameter=f"layers.{number}.{inner.parameter}")
    outer = re.fullmatch(r"(.+?)(\.weight|\.bias)", name)
    if name in OUTER:
        return ParameterPlace(OUTER[name], half)
    return ParameterPlace(OUTER[outer[1]] + outer[2], half) if outer and outer[1] in OUTER else None


def _inner_place(name: str, half: int) -> ParameterPlace | None:
    """The same of a name in a layer, and of the parameter in it."""
    if name in WHOLE_NAMES:
        return ParameterPlace(WHOLE_NAMES[name])
    expert = EXPERT.fullmatch(name)
    if expert:
        number = expert[1] or expert[3]
        return ParameterPlace(f"mlp.experts.{expert[2]}", half, int(number) if number else STACKED)
    match = re.fullmatch(r"(.+?)[._](weight|bias)", name)
    ours = INNER.get(match[1]) if match else None
    if match is None or ours is None or (half >= 0 and ours not in GATED_HALVES):
        return None
    return ParameterPlace(f"{ours}.{match[2]}", half)


def embedding_rows(folder: Path, tensors: Iterable[Whole], vocab_size: int | None) -> int:
    """Rows of the word embedding. Raises UserError where they are fewer than `vocab_size`."""
    places = ((our_parameter(name), shape) for name, shape, _ in tensors)
    rows = [shape[0] for place, shape in places if place and place.parameter == WORD]
    if not rows or rows[0] < (vocab_size or 1):
        raise UserError(
            f"{folder}: the word embedding has {rows[0] if rows else 'no'} rows; "
            f"--vocab-size is {vocab_size or 'not given'}"
        )
    return rows[0]


def map_tensors(
    model: ModelConfig,
    vocab_size: int,
    tensors: Iterable[Whole],
    *,
    norms_minus_one: bool = False,
) -> list[Pair]:
    """The logical tensors in theirs (name, shape, parts). Raises UserError listing all names that
    have no counterpart here.
    """
    unknown = []
    wrong = []
    pairs: list[Pair] = []
    for name, shape, parts in tensors:
        if NOT_WEIGHTS.match(name):
            continue
        place = our_parameter(name)
        if place is None:
            unknown.append(name)
            continue
        try:
            for parameter, inner, own in _layers(model, place.parameter, shape, parts):
                rule = _rule(name, model, vocab_size, place._replace(parameter=parameter), inner)
                if norms_minus_one and parameter.endswith("norm.weight"):
                    rule = rule._replace(offset=1.0)
                rows = sum(rule.heights or ()) * rule.groups  # without padding
                whole = inner if rule.matrices else (rows, *inner[1:])
                pairs += take_parts([rule], {name: (whole, own)})
        except UserError as error:
            wrong.append(f"{name}: {error}")
    if unknown or wrong:
        lines = _first(wrong)
        if unknown:
            names = [f"  {name}" for name in unknown]
            lines = ["tensors without a counterpart here:", *_first(names), *lines]
        raise UserError("\n".join(lines))
    return pairs


def _first(lines: list[str]) -> list[str]:
    """The first lines, and the number of those that are left out."""
    more = [f"  and {len(lines) - 40} more"] if len(lines) > 40 else []
    return [*lines[:40], *more]


def _layers(
    model: ModelConfig, parameter: str, shape: Dims, parts: list[Part]
) -> Iterator[tuple[str, Dims, list[Part]]]:
    """Each layer's parameter, shape and parts of stacked tensors; others as they are."""
    if "{}" not in parameter:
        yield parameter.replace("layers.-1.", f"layers.{model.num_layers - 1}."), shape, parts
        return
    if shape[0] != model.num_layers:
        raise UserError(f"holds {shape[0]} layers, --num-layers is {model.num_layers}")
    for offset, extent, elements in parts:
        value = elements()
        for index in range(extent[0]):
            part = offset[1:], extent[1:], partial(torch.select, value, 0, index)
            yield parameter.format(offset[0] + index), shape[1:], [part]


def _rule(
    name: str, model: ModelConfig, vocab_size: int, place: ParameterPlace, shape: Dims
) -> Rule:
    """How a tensor of theirs with this `shape` is made of ours. Raises UserError unless the model
    has such a tensor.
    """
    spec = declared(model, vocab_size).get(place.parameter)
    tensors = () if spec is None else _tensors_there(spec, model, place)
    if spec is None or not tensors:
        raise UserError("a model with these flags has no such tensor")
    count = (model.num_experts or 1) if place.expert == STACKED else 1
    needed = (sum(each.shape[0] for each in tensors) // count, *tensors[0].shape[1:])
    if place.expert == STACKED:
        needed = (count, *needed)
    rows = shape[0] if shape else 0
    padding = rows - needed[0]
    is_padded = tensors[0].stored is not None  # to any number of rows
    if shape[1:] != needed[1:] or padding < 0 or (padding > 0 and not is_padded):
        raise UserError(
            f"shape {list(shape)}, but the model's flags need {list(needed)} for "
            f"{', '.join(each.name for each in tensors)}"
        )
    heights = tuple(each.shape[0] // spec.interleave for each in tensors)
    matrices = count if place.expert == STACKED else None
    ours = tuple(each.name for each in tensors)
    return Rule(name, ours, heights, groups=spec.interleave, matrices=matrices)


def _tensors_there(
    spec: ParameterSpec, model: ModelConfig, place: ParameterPlace
) -> tuple[TensorSpec, ...]:
    """The tensors of a parameter that are at a place; the experts of a layer are one parameter."""
    tensors = spec.tensors
    if place.expert not in (None, STACKED):
        tensors = tuple(each for each in tensors if each.expert and each.expert[0] == place.expert)
    if place.half < 0:
        return tensors
    if model.activation not in GATED:
        raise UserError(
            "is a half of a gated fc1, but --swiglu (or another gated activation) is not set"
        )
    return tensors[place.half :: 2]
