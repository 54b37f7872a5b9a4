"""Which logical tensors each of Hugging Face's tensors is made of, derived from a family's entry
and the model's own list of tensors.

Experts have separate tensors in files, and one tensor a layer in models that transformers 5 holds
in memory (and in what other programs save of these). Mixtral's names differ between the two.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from megatron.tools._convert.families import QKV, Family

from megatron.config.errors import UserError
from megatron.config.groups import ModelConfig
from megatron.model.build import logical_tensors

_LAYER = re.compile(r"layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(\w+)")
_GLU = ("gate", "up", "down")
_NAMES = {  # Llama's, and what most other families call the same
    "embedding.word": "model.embed_tokens",
    "layers": "model.layers",
    "input_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.proj": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    **{f"mlp.{part}": f"mlp.{part}_proj" for part in _GLU},
    "final_norm": "model.norm",
    "head": "lm_head",
}
_LATENT_NAMES = {
    "attention.q_down": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.q_up": "self_attn.q_b_proj",
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.kv_up": "self_attn.kv_b_proj",
}
_EXPERT_NAMES = {
    "mlp.router": "mlp.gate",
    **{f"mlp.experts.{part}": f"mlp.experts.{{}}.{part}_proj" for part in _GLU},
}
_EXPERT_NAMES_OF = {
    "mixtral": {
        "mlp.router": "block_sparse_moe.gate",
        "mlp.experts.gate": "block_sparse_moe.experts.{}.w1",
        "mlp.experts.up": "block_sparse_moe.experts.{}.w3",
        "mlp.experts.down": "block_sparse_moe.experts.{}.w2",
    },
    "qwen": {
        **{f"mlp.shared_expert.{part}": f"mlp.shared_expert.{part}_proj" for part in _GLU},
        "mlp.shared_expert_gate": "mlp.shared_expert_gate",
    },
    "deepseek": {f"mlp.shared_expert.{part}": f"mlp.shared_experts.{part}_proj" for part in _GLU},
    "granite": {"mlp.router": "block_sparse_moe.router.layer"},
}
EXPERT_BIAS = "e_score_correction_bias"
# Tensors that hold all experts of a layer, by the first of the parts of each expert in them.
_FUSED = {"gate": ("gate", "up"), "down": ("down",)}
_FUSED_NAMES = {"gate": "experts.gate_up_proj", "down": "experts.down_proj"}
_GRANITE_NAMES = {
    "gate": "block_sparse_moe.input_linear.weight",
    "down": "block_sparse_moe.output_linear.weight",
}


class Rule(NamedTuple):
    """A Hugging Face tensor is the logical ones `ours` stacked along their rows.

    `heights`: rows of each, equal where not given; `groups`: the tensor is that many stacks of
    equal parts of each (queries, keys and values of a head together); `pairs`: rows of a head,
    whose rotary pairs are neighbours there and half a head apart here; `transposed`: rows here are
    columns there; `matrices`: it is [matrices, rows, columns]; `offset`: ours is theirs + offset.
    """

    theirs: str
    ours: tuple[str, ...]
    heights: tuple[int, ...] | None = None
    groups: int = 1
    pairs: int | None = None
    transposed: bool = False
    matrices: int | None = None
    offset: float = 0.0


class RowRun(NamedTuple):
    """Rows [start, start + rows) of a logical tensor: rows first, first + stride, ... of
    theirs.
    """

    name: str
    start: int
    rows: int
    first: int
    stride: int = 1

    def within(self, row: int, rows: int) -> tuple[int, int]:
        """Which of the run's rows [low, high) lie in rows [row, row + rows) of theirs."""
        low = -((self.first - row) // self.stride)
        high = -((self.first - row - rows) // self.stride)
        return max(low, 0), min(max(high, 0), self.rows)


def row_runs(rule: Rule, rows: int) -> list[RowRun]:
    """Where the `rows` rows of their tensor come from. Raises UserError where it cannot be cut as
    the rule specifies.
    """
    heights = rule.heights or (rows // (len(rule.ours) * rule.groups),) * len(rule.ours)
    if sum(heights) * rule.groups != rows or rows % (rule.pairs or 1):
        raise UserError(f"{rule.theirs}: {rows} rows do not hold {' and '.join(rule.ours)}")
    found: list[RowRun] = []
    at = 0
    for group in range(rule.groups):
        for name, height in zip(rule.ours, heights, strict=True):
            found.append(RowRun(name, group * height, height, at))
            at += height
    if rule.pairs is None:
        return found
    half = rule.pairs // 2
    return [
        RowRun(part.name, part.start + head + odd * half, half, part.first + head + odd, 2)
        for part in found
        for head in range(0, part.rows, rule.pairs)
        for odd in (0, 1)
    ]


def is_fused(name: str) -> bool:
    """Whether a tensor of this name holds all experts of a layer."""
    return name.endswith((".mlp.experts.gate_up_proj", ".block_sparse_moe.experts.gate_up_proj"))


def tensor_rules(family: Family, model: ModelConfig, *, fused: bool = False) -> list[Rule]:
    """Every tensor of a resolved `model` in a family, in the order of the forward pass; with
    `fused` the experts of a layer are one tensor.
    """
    names, matrices = _names(family, fused), _matrices(family, fused)
    first_of = {parts[0]: parts for parts in family.fused.values()}
    rest_of = {part for parts in family.fused.values() for part in parts[1:]}
    found = []
    for name, tensor in logical_tensors(model, 1).items():
        layer, inside = _split(name)
        module, _, kind = inside.rpartition(".")
        expert = _EXPERT.fullmatch(module)
        if module in rest_of:
            continue
        if expert is not None and matrices:
            if expert[1] == "0" and expert[2] != "up":
                theirs = f"{names['layers']}{layer.removeprefix('layers')}{matrices[expert[2]]}"
                found.append(_fused_rule(theirs, layer, expert[2], model.num_experts or 0))
            continue
        parts = first_of.get(module, (module,))
        rule = Rule(
            _their_name(names, layer, module, kind),
            tuple(f"{layer}{part}.{kind}" for part in parts),
        )
        found.append(_shaped(rule, family, model, module, parts, len(tensor.shape)))
    return found


def _split(name: str) -> tuple[str, str]:
    """`layers.3.` and the rest of a logical name; the first is empty outside of the layers."""
    match = _LAYER.fullmatch(name)
    return (f"layers.{match[1]}.", match[2]) if match else ("", name)


def _names(family: Family, fused: bool) -> dict[str, str]:
    """Their names of our modules."""
    names = _NAMES | (_LATENT_NAMES if family.latent else {}) | _EXPERT_NAMES
    if family.experts == "granite" and fused:
        names |= {"mlp.router": "block_sparse_moe.router"}
    elif not (family.experts == "mixtral" and fused):
        names |= _EXPERT_NAMES_OF.get(family.experts or "", {})
    names |= dict(family.names) | {parts[0]: theirs for theirs, parts in family.fused.items()}
    return names | ({"head": _NAMES["head"]} if fused else {})


def _matrices(family: Family, fused: bool) -> dict[str, str]:
    """Names of the tensors that hold all experts of a layer; none where each expert has its own."""
    granite = family.experts == "granite"
    if fused:
        module = "block_sparse_moe" if granite else "mlp"
        return {part: f"{module}.{name}" for part, name in _FUSED_NAMES.items()}
    return _GRANITE_NAMES if granite else {}


def _their_name(names: Mapping[str, str], layer: str, module: str, kind: str) -> str:
    own = module
    expert = _EXPERT.fullmatch(module)
    if expert is not None:
        own = f"mlp.experts.{expert[2]}"
    theirs = names[own].format(expert[1] if expert else "")
    if layer:
        theirs = f"{names['layers']}{layer.removeprefix('layers').removesuffix('.')}.{theirs}"
    return f"{theirs}.{EXPERT_BIAS if kind == 'expert_bias' else kind}"


def _shaped(
    rule: Rule, family: Family, model: ModelConfig, module: str, parts: tuple[str, ...], ndim: int
) -> Rule:
    """The rule of a tensor with how its rows lie there."""
    inside = module.startswith(("attention.", "mlp."))
    norm = module.endswith("norm")
    rule = rule._replace(
        transposed=family.transposed and inside and ndim == 2,
        offset=1.0 if family.unit_offset and norm and rule.theirs.endswith(".weight") else 0.0,
    )
    width = model.kv_channels or 0
    if parts == QKV and family.by_head:
        return rule._replace(heights=(width,) * 3, groups=model.num_attention_heads or 1)
    if parts == QKV:
        heads = (model.num_attention_heads, model.num_query_groups, model.num_query_groups)
        return rule._replace(heights=tuple(width * (count or 0) for count in heads))
    if family.interleaved and module in ("attention.q", "attention.k"):
        return rule._replace(pairs=width)
    return rule


def _fused_rule(theirs: str, layer: str, part: str, count: int) -> Rule:
    """Gates and ups [E, 2f, h] or downs [E, h, f] of E experts."""
    held = (f"{layer}mlp.experts.{e}.{own}.weight" for e in range(count) for own in _FUSED[part])
    return Rule(theirs, tuple(held), matrices=count)
