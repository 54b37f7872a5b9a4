"""The names of Hugging Face's tensors, and of which of our logical tensors each is made.

Experts have names of their own in files, and are one tensor a layer in models that transformers 5
holds in memory (and in what other programs save of these). Mixtral's names differ between the two.
"""

from __future__ import annotations

from typing import NamedTuple

_PARTS = ("gate", "up", "down")
_WITH_QK_NORMS = ("qwen3", "qwen3_moe")
_FUSED = ".mlp.experts.gate_up_proj"


class Rule(NamedTuple):
    """A Hugging Face tensor is the logical ones on top of each other, transposed for GPT-2's linear
    weights; with `matrices` cut into so many of equal height, one behind the other: [matrices,
    rows, columns].
    """

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False
    matrices: int | None = None


class ExpertNames(NamedTuple):
    """How many experts, which layers have them, and whether those of a layer are one tensor."""

    number: int
    layers: tuple[bool, ...]
    fused: bool


def is_fused(name: str) -> bool:
    """Whether a tensor of this name holds all experts of a layer."""
    return name.endswith(_FUSED)


def rules(
    kind: str,
    layers: int,
    *,
    tied: bool,
    linear_bias: bool,
    qkv_bias: bool,
    experts: ExpertNames | None = None,
) -> list[Rule]:
    """Every tensor of a model of family `kind`, in the order of the forward pass."""
    if kind == "gpt2":
        table = _gpt2_rules(layers)
    else:
        table = _llama_rules(kind, layers, linear_bias, qkv_bias, experts)
    if not tied:
        table += _rules("lm_head", "head", bias=False)
    return table


def _rules(theirs: str, *ours: str, bias: bool = True, transposed: bool = False) -> list[Rule]:
    """Of the weight and, with `bias`, the bias of one of their modules."""
    weight = Rule(f"{theirs}.weight", tuple(f"{name}.weight" for name in ours), transposed)
    if not bias:
        return [weight]
    return [weight, Rule(f"{theirs}.bias", tuple(f"{name}.bias" for name in ours))]


def _gpt2_rules(layers: int) -> list[Rule]:
    table = _rules("transformer.wte", "embedding.word", bias=False)
    table += _rules("transformer.wpe", "embedding.position", bias=False)
    for i in range(layers):
        theirs = f"transformer.h.{i}"
        ours = f"layers.{i}"
        attention = [f"{ours}.attention.{part}" for part in "qkv"]
        table += _rules(f"{theirs}.ln_1", f"{ours}.input_norm")
        table += _rules(f"{theirs}.attn.c_attn", *attention, transposed=True)
        table += _rules(f"{theirs}.attn.c_proj", f"{ours}.attention.proj", transposed=True)
        table += _rules(f"{theirs}.ln_2", f"{ours}.mlp_norm")
        table += _rules(f"{theirs}.mlp.c_fc", f"{ours}.mlp.up", transposed=True)
        table += _rules(f"{theirs}.mlp.c_proj", f"{ours}.mlp.down", transposed=True)
    return table + _rules("transformer.ln_f", "final_norm")


def _llama_rules(
    kind: str, layers: int, linear_bias: bool, qkv_bias: bool, experts: ExpertNames | None
) -> list[Rule]:
    table = _rules("model.embed_tokens", "embedding.word", bias=False)
    for i in range(layers):
        theirs = f"model.layers.{i}"
        ours = f"layers.{i}"
        attention = f"{theirs}.self_attn"
        table += _rules(f"{theirs}.input_layernorm", f"{ours}.input_norm", bias=False)
        for part in "qkv":
            table += _rules(f"{attention}.{part}_proj", f"{ours}.attention.{part}", bias=qkv_bias)
        for part in ("q_norm", "k_norm") if kind in _WITH_QK_NORMS else ():
            table += _rules(f"{attention}.{part}", f"{ours}.attention.{part}", bias=False)
        table += _rules(f"{attention}.o_proj", f"{ours}.attention.proj", bias=linear_bias)
        table += _rules(f"{theirs}.post_attention_layernorm", f"{ours}.mlp_norm", bias=False)
        if experts is not None and experts.layers[i]:
            table += _expert_rules(kind, theirs, f"{ours}.mlp", experts)
        else:
            table += _mlp_rules(f"{theirs}.mlp", f"{ours}.mlp", bias=linear_bias)
    return table + _rules("model.norm", "final_norm", bias=False)


def _mlp_rules(theirs: str, ours: str, *, bias: bool) -> list[Rule]:
    return [
        rule
        for part in _PARTS
        for rule in _rules(f"{theirs}.{part}_proj", f"{ours}.{part}", bias=bias)
    ]


def _expert_rules(kind: str, layer: str, ours: str, experts: ExpertNames) -> list[Rule]:
    """Router, experts, and the shared expert with its gate of a family that has one."""
    in_files = kind == "mixtral" and not experts.fused
    theirs = f"{layer}.block_sparse_moe" if in_files else f"{layer}.mlp"
    table = _rules(f"{theirs}.gate", f"{ours}.router", bias=False)
    if experts.fused:
        table += _fused_rules(f"{theirs}.experts", f"{ours}.experts", experts.number)
    else:
        parts = ("w1", "w3", "w2") if kind == "mixtral" else [f"{part}_proj" for part in _PARTS]
        for expert in range(experts.number):
            for their_part, part in zip(parts, _PARTS, strict=True):
                name = f"{theirs}.experts.{expert}.{their_part}"
                table += _rules(name, f"{ours}.experts.{expert}.{part}", bias=False)
    if kind == "qwen2_moe":
        table += _mlp_rules(f"{theirs}.shared_expert", f"{ours}.shared_expert", bias=False)
        gate = "shared_expert_gate"
        table += _rules(f"{theirs}.{gate}", f"{ours}.{gate}", bias=False)
    return table


def _fused_rules(theirs: str, ours: str, count: int) -> list[Rule]:
    """gate_up_proj [E, 2f, h] and down_proj [E, h, f] of E experts."""

    def rule(name: str, *parts: str) -> Rule:
        held = tuple(f"{ours}.{e}.{part}.weight" for e in range(count) for part in parts)
        return Rule(f"{theirs}.{name}", held, matrices=count)

    return [rule("gate_up_proj", "gate", "up"), rule("down_proj", "down")]
