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

import dataclasses
import re
from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from megatron.tools._convert.models import Pair, Part, Whole

from megatron.checkpoint.boxes import Dims, intersect
from megatron.config.errors import UserError
from megatron.config.groups import ModelConfig
from megatron.model.build import declared
from megatron.model.spec import Box, ParameterSpec

OUTER = {
    "embedding.word_embeddings.weight": "embedding.word.weight",
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
        found = our_parameter(name)
        if found is None:
            unknown.append(name)
            continue
        ours = found.parameter.replace("layers.-1.", f"layers.{model.num_layers - 1}.")
        if "{}" in ours and shape[0] != model.num_layers:
            wrong.append(f"{name} holds {shape[0]} layers, --num-layers is {model.num_layers}")
            continue
        for layer, part in _layers(ours, shape, parts):
            try:
                place = found._replace(parameter=ours.format(layer))
                inner = shape["{}" in ours :]
                for each, extent, share in _experts(model, place, inner, part):
                    pairs += _boxes(model, vocab_size, each, extent, share)
            except UserError as error:
                wrong.append(f"{name}: {error}")
                break
    if unknown or wrong:
        raise UserError("\n".join([*_without_counterpart(unknown), *wrong]))
    return [_plus_one(pair) for pair in pairs] if norms_minus_one else pairs


def _plus_one(pair: Pair) -> Pair:
    """The weight of a norm that is stored minus one, in fp32 as it is computed; others as they
    are.
    """
    box, value = pair
    is_norm = box.name.endswith("norm.weight")
    return box, value.to(torch.promote_types(value.dtype, torch.float32)) + 1 if is_norm else value


def _without_counterpart(names: list[str]) -> list[str]:
    """Lines that list tensors which are not ours; none for none."""
    if not names:
        return []
    lines = ["tensors without a counterpart here:", *(f"  {name}" for name in names[:40])]
    if len(names) > 40:
        lines.append(f"  and {len(names) - 40} more")
    return lines


def _layers(ours: str, shape: Dims, parts: list[Part]) -> Iterator[tuple[int, Part]]:
    """Each layer's part of stacked tensors."""
    for offset, extent, elements in parts:
        if "{}" not in ours:
            yield 0, (offset, extent, elements)
            continue
        value = elements()
        for index in range(extent[0]):
            yield (
                offset[0] + index,
                (offset[1:], extent[1:], partial(torch.select, value, 0, index)),
            )


def _experts(
    model: ModelConfig, place: ParameterPlace, shape: Dims, part: Part
) -> Iterator[tuple[ParameterPlace, Dims, Part]]:
    """Each expert's part of stacked tensors, with its place and shape; others as they are."""
    if place.expert != STACKED:
        yield place, shape, part
        return
    offset, extent, elements = part
    if len(shape) != 3 or shape[0] != model.num_experts:
        raise UserError(f"shape {list(shape)}, --num-experts is {model.num_experts}")
    value = elements()
    for index in range(extent[0]):
        select = partial(torch.select, value, 0, index)
        expert = place._replace(expert=offset[0] + index)
        yield expert, shape[1:], (offset[1:], extent[1:], select)


def _boxes(
    model: ModelConfig, vocab_size: int, place: ParameterPlace, shape: Dims, part: Part
) -> Iterator[Pair]:
    """The logical tensors' parts in a box of a whole parameter of this `shape`, or of an expert's
    part of it: the experts of a layer are one parameter.
    """
    offset, extent, elements = part
    shape, offset = _in_parameter(model, place, shape, offset)
    spec = _require_shape(model, vocab_size, place.parameter, shape)
    value = elements()
    for box in spec.boxes():
        stride = shape[0] // box.groups
        for first, last, whole in _runs(offset[0], offset[0] + extent[0], stride):
            cut = _whole_groups if whole and box.groups > 1 else _in_one_group
            found = cut(box, first, last, stride)
            if found is not None:
                rows, low, high = found
                where = dataclasses.replace(
                    rows,
                    offset=(rows.offset[0], *offset[1:]),
                    extent=(rows.extent[0], *extent[1:]),
                )
                yield where, value[low - offset[0] : high - offset[0]]


def _in_parameter(
    model: ModelConfig, place: ParameterPlace, shape: Dims, offset: Dims
) -> tuple[Dims, Dims]:
    """Shape of the whole parameter, and the offset in it, for an offset in a tensor of theirs that
    is a half of it or an expert's part.
    """
    parts = [(place.half, 2)] if place.half >= 0 else []
    parts += [(place.expert, model.num_experts or 1)] if place.expert is not None else []
    for index, count in parts:
        offset = (index * shape[0] + offset[0], *offset[1:])
        shape = (count * shape[0], *shape[1:])
    return shape, offset


def _require_shape(
    model: ModelConfig, vocab_size: int, parameter: str, shape: Dims
) -> ParameterSpec:
    """What the model declares of a parameter; raises UserError unless it can have this shape."""
    spec = declared(model, vocab_size).get(parameter)
    if spec is None:
        raise UserError("a model with these flags has no such tensor")
    needed = spec.local_shape(1)
    padded = spec.tensors[0].stored is not None  # to any number of rows
    fits = shape[0] >= vocab_size if padded else shape[0] == needed[0]
    if not fits or shape[1:] != needed[1:]:
        raise UserError(
            f"shape {list(shape)}, but the model's flags need {list(needed)} for "
            f"{', '.join(tensor.name for tensor in spec.tensors)}"
        )
    return spec


def _whole_groups(box: Box, first: int, last: int, stride: int) -> tuple[Box, int, int]:
    """Rows [first, last) of a fused parameter, whole groups of `stride` rows: the rows of `box`
    that are in them, and [first, last) themselves, of which the box is a strided view.
    """
    rows = box.extent[0] // box.groups
    group = first // stride
    groups = (last - first) // stride
    return _take_rows(box, group * rows, groups * rows, groups, box.start), first, last


def _in_one_group(box: Box, first: int, last: int, stride: int) -> tuple[Box, int, int] | None:
    """Rows [first, last) of one group: the rows of `box` that are among them, and which of the
    parameter they are; None when there are none.
    """
    rows = box.extent[0] // box.groups
    group = first // stride
    begin = group * stride + box.start  # of the group's rows of this box
    common = intersect((begin,), (rows,), (first,), (last - first,))
    if common is None:
        return None
    (low,), (high,) = common
    return _take_rows(box, group * rows + low - begin, high - low, groups=1, start=0), low, high


def _take_rows(box: Box, first: int, count: int, groups: int, start: int) -> Box:
    return dataclasses.replace(
        box,
        offset=(first, *box.offset[1:]),
        extent=(count, *box.extent[1:]),
        groups=groups,
        start=start,
    )


def _runs(first: int, last: int, stride: int) -> Iterator[tuple[int, int, bool]]:
    """Rows [first, last) as runs (first, last, whether it is of whole groups of `stride` rows): a
    run that is not lies within one group.
    """
    begin = -(-first // stride) * stride
    end = last // stride * stride
    if begin > end:
        yield first, last, False
        return
    for low, high, whole in ((first, begin, False), (begin, end, True), (end, last, False)):
        if low < high:
            yield low, high, whole
