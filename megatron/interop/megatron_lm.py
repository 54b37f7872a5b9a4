"""Megatron-LM's GPT tensors and arguments <-> ours: which of our parameters a name means, and the
logical tensors in it.

Facts of Megatron-LM (core 0.5 to 0.16): layers are stacked along a first dimension (or numbered in
the name); the fused QKV has for each query group the rows of its queries, then of its key and its
value; fc1 of a gated MLP has the gate's rows, then the others (`_w` and `_v` apart on request); a
normalisation before a linear layer may carry that layer's name; the vocabulary is padded. All as
ours but for names.
"""

from __future__ import annotations

import dataclasses
import re
import reprlib
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch

from megatron.checkpoint.boxes import intersect
from megatron.checkpoint.shapes import Dims
from megatron.config.errors import UserError
from megatron.config.groups import ModelConfig
from megatron.config.metadata import flag_name
from megatron.interop.models import Pair, Part, Whole
from megatron.interop.pickles import Record, state_of
from megatron.layers.spec import Box, ParameterSpec
from megatron.model.build import declared

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
    "pre_mlp_layernorm": "mlp_norm",
    "mlp.linear_fc1.layer_norm": "mlp_norm",
    "mlp.linear_fc1": "mlp.fc1",
    "mlp.linear_fc2": "mlp.fc2",
}
BESIDE = re.compile(
    r"optimizer\.|rng_state|.*_extra_state|rerun_state|opt_param_scheduler|chained_\d+\."
    r"|param_groups|args\.|common_step|iteration"
)


def our_parameter(name: str) -> tuple[str, int] | None:
    """(our parameter's name with {} for the layer's number, or -1 for the last layer's; the half of
    fc1: 0 or 1, -1 for all) of one of theirs; None when there is none.
    """
    name = re.sub(r"^(?:model\d*\.|module\.)+", "", name)
    half = {"_w": 0, "_v": 1}.get(name[-2:], -1)
    name = name[:-2] if half >= 0 else name
    layer = re.fullmatch(r"decoder\.layers\.(?:(\d+)\.)?(.+?)[._](weight|bias)", name)
    if layer:
        ours = INNER.get(layer[2])
        return (
            (f"layers.{layer[1] or '{}'}.{ours}.{layer[3]}", half)
            if ours and (half < 0 or ours == "mlp.fc1")
            else None
        )
    outer = re.fullmatch(r"(.+?)(\.weight|\.bias)", name)
    if name in OUTER:
        return OUTER[name], half
    return (OUTER[outer[1]] + outer[2], half) if outer and outer[1] in OUTER else None


def map_tensors(model: ModelConfig, vocab_size: int, tensors: Iterable[Whole]) -> list[Pair]:
    """The logical tensors in theirs (name, shape, parts). Raises UserError listing all names that
    have no counterpart here.
    """
    unknown = []
    wrong = []
    pairs: list[Pair] = []
    for name, shape, parts in tensors:
        if BESIDE.match(name):
            continue
        found = our_parameter(name)
        if found is None:
            unknown.append(name)
            continue
        ours = found[0].replace("layers.-1.", f"layers.{model.num_layers - 1}.")
        half = found[1]
        if "{}" in ours and shape[0] != model.num_layers:
            wrong.append(f"{name} holds {shape[0]} layers, --num-layers is {model.num_layers}")
            continue
        for layer, part in _layers(ours, shape, parts):
            try:
                pairs += _boxes(
                    model, vocab_size, ours.format(layer), shape["{}" in ours :], half, part
                )
            except UserError as error:
                wrong.append(f"{name}: {error}")
                break
    if unknown or wrong:
        raise UserError("\n".join([*_without_counterpart(unknown), *wrong]))
    return pairs


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


def _boxes(
    model: ModelConfig,
    vocab_size: int,
    parameter: str,
    shape: Dims,
    half: int,
    part: Part,
) -> Iterator[Pair]:
    """The logical tensors' parts in a box of a whole parameter of this `shape`."""
    offset, extent, elements = part
    if half >= 0:
        shape, offset = (2 * shape[0], *shape[1:]), (half * shape[0] + offset[0], *offset[1:])
    spec = _require_shape(model, vocab_size, parameter, shape)
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


# ---- arguments -----------------------------------------------------------------------------------

SAME = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_channels",
    "group_query_attention",
    "max_position_embeddings",
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
    "rope_scaling_factor",
    "normalization",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "untie_embeddings_and_output_weights",
    "hidden_dropout",
    "attention_dropout",
    "init_method_std",
    "make_vocab_size_divisible_by",
)
REFUSED = {  # what our models do not have -> the values under which it is not there
    "apply_layernorm_1p": (None, False),
    "num_experts": (None, 0),
    "multi_latent_attention": (None, False),
    "rotary_interleaved": (None, False),
    "apply_residual_connection_post_layernorm": (None, False),
    "window_size": (None,),
    "mtp_num_layers": (None, 0),
    "hybrid_layer_pattern": (None,),
    "add_position_embedding": (None, True),
}


def model_fields(args: Record) -> dict[str, Any]:
    """Fields of ModelConfig that the arguments kept in a Megatron-LM checkpoint mean. Raises
    UserError naming what has no counterpart.
    """
    given = state_of(args)
    _require_known(given)
    fields = {name: given[name] for name in SAME if given.get(name) is not None}
    heads = fields["num_attention_heads"]
    hidden = fields["hidden_size"]
    grouped = given.get("group_query_attention")
    fields.setdefault("kv_channels", hidden // heads)
    fields.setdefault("ffn_hidden_size", 4 * hidden)
    fields["num_query_groups"] = given["num_query_groups"] if grouped else heads
    fields["norm_epsilon"] = given.get("norm_epsilon") or given.get("layernorm_epsilon") or 1e-5
    fields["activation"] = _activation(given)
    kinds = {field.name: field.type for field in dataclasses.fields(ModelConfig)}
    for name, value in fields.items():
        if kinds[name].startswith("float"):
            fields[name] = float(value)
        elif isinstance(value, Record):
            raise UserError(
                "the arguments in the checkpoint cannot be taken over: "
                f"{flag_name(name)} is a {value.kind}"
            )
    return fields


def _require_known(given: dict[str, Any]) -> None:
    """Raises UserError naming every argument that our models do not have, or that is missing."""
    faults = [
        f"{flag_name(name)} {reprlib.repr(given[name])}"
        for name, absent in REFUSED.items()
        if given.get(name) not in absent
    ]
    needed = "num_layers", "hidden_size", "num_attention_heads"
    faults += [f"no {name}" for name in needed if type(given.get(name)) is not int]
    if faults:
        raise UserError(
            "the arguments in the checkpoint cannot be taken over: " + "; ".join(faults)
        )


def _activation(given: dict[str, Any]) -> str:
    if given.get("swiglu"):
        return "swiglu"
    if given.get("squared_relu"):
        return "squared-relu"
    # Megatron's fused kernel is the tanh form.
    biases = given.get("add_bias_linear")
    fused = given.get("bias_gelu_fusion") and (biases is None or biases)
    return "gelu-tanh" if given.get("openai_gelu") or fused else "gelu"
