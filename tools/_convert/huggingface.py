"""Models of ours <-> Hugging Face's config.json and tensor names, both ways, as pure functions; no
tensor is touched here.

`families.py` has one entry per family. Import reads config.json by the entry. Export writes
config.json by it, reads that back as an import would, and takes the family only if the model comes
back unchanged: whatever an entry does not map, and any field added to ModelConfig later, is refused
by the name of its flag.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from megatron.tools._convert.families import (
    ALIASES,
    DEFAULTS,
    FAMILIES,
    NO_COUNTERPART,
    SIZES,
    Family,
)
from megatron.tools._convert.huggingface_experts import our_experts, their_experts
from megatron.tools._convert.huggingface_rotary import our_rotary, their_rotary
from megatron.tools._convert.huggingface_rules import Rule, is_fused, tensor_rules

from megatron.config.derive import RunView
from megatron.config.errors import UserError
from megatron.config.groups import Config, ModelConfig
from megatron.config.input_files import JsonObject
from megatron.config.layers import rotary_layers, windowed_layers
from megatron.config.metadata import KERNEL, ROUNDING, flag_name
from megatron.config.options import FIELDS

_PLAIN_ACTIVATIONS = {
    "gelu_new": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "gelu": "gelu",
    "relu2": "squared-relu",
}
_GATED_ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu"}
_PLAIN_NAMES = {"gelu-tanh": "gelu_pytorch_tanh", "gelu": "gelu", "squared-relu": "relu2"}
_GATED_NAMES = {"swiglu": "silu", "geglu": "gelu"}
# in older files; computed, not learned
BUFFERS = (
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
    ".rotary_emb.inv_freq",
    ".position_ids",
)
_INSIDE = re.compile(r"(?:model\.)?(?:language_model|text_model)\.(?:model\.)?(.*)")
_NUMBERED = re.compile(r"model\.layers\.(\d+)\.")
# fields that make a family a distant one
_LARGE = ("num_experts", "multi_latent_attention")
# Settings of a training run or of its padding: a trained model is the same function without them,
# but for the capacity of experts, of which export_notes warns.
TRAINING_ONLY = frozenset(
    """z_loss_coeff hidden_dropout attention_dropout init_method_std make_vocab_size_divisible_by
    moe_router_bias_update_rate moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff
    moe_input_jitter_eps moe_expert_capacity_factor moe_token_drop_policy
    padded_vocab_size""".split()
)


# ---- ours -> theirs ------------------------------------------------------------------------------


def family_of(model: ModelConfig, kind: str | None = None) -> str:
    """The first model type that expresses a resolved `model`, or `kind` if that does. Raises
    UserError naming the flags that stand in the way.
    """
    if kind is not None and kind not in FAMILIES:
        raise UserError(f"model type {kind!r} is not known; known: {', '.join(FAMILIES)}")
    found = {}
    for each in [kind] if kind is not None else FAMILIES:
        found[each] = _differences(each, model)
        if not found[each]:
            return each
    nearest = min(found, key=lambda each: sum(100 if n in _LARGE else 1 for n in found[each]))
    only = "no Hugging Face family computes this model; the nearest, " if kind is None else ""
    flags = "; ".join(found[nearest].values())
    raise UserError(f"{only}{FAMILIES[nearest].architecture}, cannot express: {flags}")


def _differences(kind: str, model: ModelConfig) -> dict[str, str]:
    """What does not come back of a model that is exported as a family and imported again: a text
    for each field, or for each field of config.json that an import refuses.
    """
    family = FAMILIES[kind]
    if family.experts in ("mixtral", "granite", "qwen") and model.num_experts is None:
        return {"num_experts": "a model without --num-experts"}
    faults: list[str] = []
    try:
        fields = _our_fields(kind, their_config(kind, model, 1), faults)
    except KeyError as error:
        return {"num_experts": f"a model without {error}"}
    wanted, got = _meaning(model), _meaning(type(model)(**fields))
    # a field that does not act there follows from another that differs
    different = [name for name in wanted if name in got and wanted[name] != got[name]]
    shown = {name: _shown(name, wanted[name]) for name in different}
    return shown or dict(zip(faults, faults, strict=True))


def _meaning(model: ModelConfig) -> dict[str, Any]:
    """The fields that decide what a model computes, equal where it computes the same."""
    run = RunView(Config(model=model), world=1, vocabulary=None)
    held = {
        name: getattr(model, name)
        for name, option in FIELDS.items()
        if option.group == "model"
        and name not in TRAINING_ONLY
        and option.change not in (KERNEL, ROUNDING)
        and all(map(run.holds, (*option.needs, *option.idle_without)))
    }
    del held["group_query_attention"]
    if model.add_bias_linear:
        del held["add_qkv_bias"]
    if "rope_scaling_factor" in held:
        held["rope_scaling_factor"] = model.rope_factor
        held["rope_original_max_position_embeddings"] = model.rope_original_length
    if model.multi_latent_attention:
        held["latent_norm_epsilon"] = model.latent_norm_epsilon or model.norm_epsilon
    if "window_attn_skip_freq" in held:
        held["window_attn_skip_freq"] = windowed_layers(model)
    if "no_rope_freq" in held:
        held["no_rope_freq"] = rotary_layers(model)
    if model.num_experts is not None:
        held["moe_layer_freq"] = model.expert_layers()
        held["moe_router_topk_scaling_factor"] = model.moe_router_topk_scaling_factor or 1.0
        if (model.moe_router_num_groups or 1) == 1:
            held |= {"moe_router_num_groups": None, "moe_router_group_topk": None}
        if all(model.expert_layers()):
            del held["ffn_hidden_size"]
    return held


def _shown(name: str, value: Any) -> str:
    """`--window-size 5`, `--qk-layernorm`, `--disable-bias-linear`: a flag that is in the
    way.
    """
    if not isinstance(value, bool):
        shown = ",".join(str(int(each)) for each in value) if isinstance(value, tuple) else value
        return f"{flag_name(name)} {shown}"
    if name == "add_bias_linear":
        return "biases in all linear layers" if value else "--disable-bias-linear"
    return flag_name(name) if value else f"a model without {flag_name(name)}"


def to_huggingface(
    model: ModelConfig, vocab_size: int, *, kind: str | None = None, fused: bool = False
) -> tuple[JsonObject, list[Rule]]:
    """config.json of a resolved `model` with the real vocabulary, and how each of its tensors is
    made of ours. Tensors are those of files, where each expert is separate; with `fused` those of a
    model in memory of transformers 5, where the experts of a layer are one tensor.

    Raises UserError naming every flag that Hugging Face's models cannot express. Training settings
    without a place there (hidden dropout of the Llama families, losses of routers, the capacity of
    experts) are left out, as is what routers keep for them.
    """
    kind = family_of(model, kind)
    rules = tensor_rules(FAMILIES[kind], model, fused=fused)
    return their_config(kind, model, vocab_size), rules


def export_notes(model: ModelConfig) -> list[str]:
    """Lines about an export that transformers, or some versions of it, compute otherwise."""
    notes = []
    if model.moe_expert_capacity_factor is not None:
        notes.append(
            "note: experts of the export have no capacity; evaluation here drops the tokens beyond "
            f"--moe-expert-capacity-factor {model.moe_expert_capacity_factor:g}"
        )
    original, longest = model.rope_original_length, model.max_position_embeddings
    is_yarn = model.position_embedding_type == "yarn" and longest is not None
    if is_yarn and model.rope_factor * original != longest:
        notes.append(
            "note: transformers before 4.56 compute another model: they take "
            "max_position_embeddings / original_max_position_embeddings = "
            f"{longest / original:g} as YaRN's factor, which is {model.rope_factor:g}; later "
            "versions take the factor"
        )
    return notes


def their_config(kind: str, model: ModelConfig, vocab_size: int) -> JsonObject:
    """config.json of a model in a family, whether or not that expresses it."""
    family = FAMILIES[kind]
    config: JsonObject = {
        "model_type": kind,
        "architectures": [family.architecture],
        "vocab_size": vocab_size,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **family.theirs,
    }
    for ours, theirs in _same(family).items():
        config |= dict.fromkeys(theirs.split(), getattr(model, ours))
    names = _GATED_NAMES if family.gated else _PLAIN_NAMES
    config[family.activation] = names.get(model.activation, model.activation)
    has_bias = (model.add_bias_linear or model.add_qkv_bias, *(model.add_bias_linear,) * 2)
    for field, value in zip((*family.biases, family.qk_norm), (*has_bias, model.qk_layernorm)):
        if isinstance(field, str):
            config[field] = value
    config |= _their_heads(family, model)
    if family.window is not None:
        config |= _their_window(family, model)
    if family.rotary:
        config |= their_rotary(family, model)
    if family.experts is not None:
        config |= their_experts(family, model)
    return config


def _their_heads(family: Family, model: ModelConfig) -> JsonObject:
    """Numbers and widths of heads."""
    if family.latent:
        heads = model.num_attention_heads
        return {"q_lora_rank": model.q_lora_rank, "num_key_value_heads": heads}
    config: JsonObject = {}
    if family.key_value_heads is not None:
        config[family.key_value_heads] = model.num_query_groups
    if family.head_dim:
        config["head_dim"] = model.kv_channels
    if family.scores is not None:
        config[family.scores] = (model.kv_channels or 1) ** -0.5
    return config


def _same(family: Family) -> dict[str, str]:
    return SIZES | {"norm_epsilon": family.epsilon} | dict(family.same)


def _their_window(family: Family, model: ModelConfig) -> JsonObject:
    config: JsonObject = {"sliding_window": model.window_size}
    if family.window == "all":
        return config
    slides = windowed_layers(model)
    return config | {
        "use_sliding_window": any(slides),
        "max_window_layers": 0 if any(slides) else model.num_layers,
        "layer_types": ["sliding_attention" if each else "full_attention" for each in slides],
    }


# ---- theirs -> ours ------------------------------------------------------------------------------


class LanguageModel(NamedTuple):
    """The language model of a config.json and its tensors: the name in a plain model -> the name
    in the files. `outside`: tensors of a multimodal wrapper's other parts.
    """

    config: JsonObject
    present: dict[str, str]
    outside: list[str]
    repeated: list[str]


def language_model(config: JsonObject, names: Iterable[str]) -> LanguageModel:
    """That of a multimodal wrapper (`text_config`), or the whole model. Raises UserError for a
    model type without a counterpart.
    """
    inner = config.get("text_config")
    wrapped = isinstance(inner, dict)
    text = dict(inner) if wrapped else dict(config)
    if wrapped and "tie_word_embeddings" in config:
        text.setdefault("tie_word_embeddings", config["tie_word_embeddings"])
    kind = text.get("model_type")
    kind = ALIASES.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in FAMILIES:
        reason = f" ({NO_COUNTERPART[kind]})" if kind in NO_COUNTERPART else ""
        raise UserError(
            f"config.json: {'text_config: ' if wrapped else ''}model_type {kind!r} has no "
            f"counterpart here{reason}; known: {', '.join((*FAMILIES, *ALIASES))}"
        )
    word, head = _ends(FAMILIES[kind])
    prefix = word.partition(".")[0] + "."
    present: dict[str, str] = {}
    outside, repeated = [], []
    for name in names:
        plain = _plain_name(name, prefix, head, wrapped)
        if plain is None:
            outside.append(name)
            continue
        if plain in present:
            repeated.append(f"{present[plain]} and {name}")
        present[plain] = name
    return LanguageModel(text | {"model_type": kind}, present, outside, repeated)


def _ends(family: Family) -> tuple[str, str]:
    """The names of the embedding's and the head's weight."""
    names = {"embedding.word": "model.embed_tokens", "head": "lm_head"} | dict(family.names)
    return f"{names['embedding.word']}.weight", f"{names['head']}.weight"


def _plain_name(name: str, prefix: str, head: str, wrapped: bool) -> str | None:
    """A tensor's name in a model with its head: files of a model without one lack the prefix, those
    of a multimodal wrapper have another. None for a tensor outside of the language model.
    """
    if wrapped:
        match = _INSIDE.fullmatch(name)
        if match is None and name not in (head, "lm_head.weight"):
            return None
        name = match[1] if match else name
    if name in (head, "lm_head.weight"):
        return head
    return name if name.startswith(prefix) else prefix + name


def from_huggingface(config: JsonObject, names: Iterable[str]) -> tuple[JsonObject, list[Rule]]:
    """Fields of a resolved ModelConfig, and what each of the tensors called `names` holds, of a
    model with this config.json. A head in the files is taken, even if config.json specifies that
    the embedding serves as the head: so does transformers.

    Raises UserError for a model type, config field or tensor that has no counterpart here, naming
    all of them.
    """
    found = language_model(config, names)
    config, present = found.config, found.present
    kind = config["model_type"]
    family = FAMILIES[kind]
    faults: list[str] = []
    if config.get("quantization_config"):
        faults.append("quantization_config: the weights must be plain floating-point numbers")
    try:
        fields = _our_fields(kind, config, faults)
        fields["untie_embeddings_and_output_weights"] |= _ends(family)[1] in present
        rules = tensor_rules(family, ModelConfig(**fields), fused=any(map(is_fused, present)))
    except KeyError as error:
        raise UserError(f"config.json lacks {error}") from None
    except UserError:
        raise
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UserError(f"config.json: a field is not of its type: {error}") from None
    held = set(present) - set(_predicting(config, present))
    faults += some_names("two tensors of one name", found.repeated)
    faults += name_faults({rule.theirs for rule in rules}, held)
    if faults:
        raise UserError(
            "this Hugging Face model cannot be taken over:\n"
            + "\n".join(f"  {fault}" for fault in faults)
        )
    return fields, [rule._replace(theirs=present[rule.theirs]) for rule in rules]


def left_out(config: JsonObject, names: Iterable[str]) -> tuple[str, ...]:
    """Lines about tensors of a model that `from_huggingface` takes without them."""
    found = language_model(config, names)
    return (
        *some_names(
            "note: tensors of multi-token prediction, which are not taken over",
            _predicting(found.config, found.present),
        ),
        *some_names(
            "note: tensors outside of the language model, which are not taken over", found.outside
        ),
    )


def head_names(config: JsonObject, names: Iterable[str]) -> tuple[str, str] | None:
    """The tensors of the embedding and of the head in the files, of a model whose config.json
    specifies that they are the same; None for other models and where the files have no head.
    """
    found = language_model(config, names)
    family = FAMILIES[found.config["model_type"]]
    word, head = _ends(family)
    if not _value(family, found.config, "tie_word_embeddings") or head not in found.present:
        return None
    return found.present.get(word, ""), found.present[head]


def _predicting(config: JsonObject, names: Iterable[str]) -> list[str]:
    """The tensors of multi-token prediction: of layers behind the last one."""
    if not FAMILIES[config["model_type"]].predicts:
        return []
    found = ((name, _NUMBERED.match(name)) for name in names)
    layers = config["num_hidden_layers"]
    return [name for name, match in found if match and int(match[1]) >= layers]


def name_faults(wanted: set[str], present: set[str]) -> list[str]:
    """What is missing among the tensors that are there, and what has no counterpart."""
    extra = [name for name in sorted(present - wanted) if not name.endswith(BUFFERS)]
    return [
        *some_names("tensors missing", sorted(wanted - present)),
        *some_names("tensors without a counterpart here", extra),
    ]


def some_names(what: str, names: list[str]) -> list[str]:
    """A line about tensors; none where there are none."""
    return [f"{what}: {', '.join(names[:5])} ({len(names)} in all)"] if names else []


def _value(family: Family, config: JsonObject, name: str) -> Any:
    """A field of config.json, or what the family takes where it is absent or null. Raises
    KeyError.
    """
    value = config.get(name)
    if value is not None:
        return value
    return family.defaults[name] if name in family.defaults else DEFAULTS[name]


def _our_fields(kind: str, config: JsonObject, faults: list[str]) -> JsonObject:
    """Fields of ModelConfig that config.json gives. Raises KeyError for what it lacks."""
    family = FAMILIES[kind]
    faults += _other_values(family, config)
    fields: JsonObject = {"hidden_dropout": 0.0}
    for ours, theirs in _same(family).items():
        values = [_value(family, config, name) for name in theirs.split()]
        if len(set(values)) > 1:
            faults.append(f"{' and '.join(theirs.split())} differ (one --{ours} serves both)")
        fields[ours] = values[0]
    if fields["ffn_hidden_size"] is None:
        fields["ffn_hidden_size"] = 4 * fields["hidden_size"]
    fields |= _our_heads(family, config, fields, faults)
    fields |= {
        "normalization": family.normalization,
        "activation": _our_activation(family, config, faults),
        "qk_layernorm": bool(_flag(family, config, family.qk_norm)),
        **_our_window(family, config, faults),
        "position_embedding_type": "learned_absolute",
        "multi_latent_attention": family.latent,
        "untie_embeddings_and_output_weights": not _value(family, config, "tie_word_embeddings"),
        **_our_biases(family, config, faults),
    }
    if family.rotary:
        fields |= our_rotary(family, config, faults)
    if family.experts is not None:
        fields |= our_experts(family, config, faults)
    has_experts = fields.get("num_experts") is not None
    return fields | {
        name: value
        for name, value in family.ours.items()
        if has_experts or not name.startswith("moe_")
    }


def _other_values(family: Family, config: JsonObject) -> list[str]:
    """Fields that do not have the one value that the family's models here have."""
    faults = []
    for name, value in family.theirs.items():
        given = config.get(name)
        given = family.defaults.get(name) if given is None else given
        if given not in (value, None):
            faults.append(f"{name} {given!r} (only {value!r} has a counterpart)")
    return faults


def _flag(family: Family, config: JsonObject, field: bool | str) -> bool:
    """A setting that the family fixes, or that a field of config.json gives; false by default."""
    if isinstance(field, bool):
        return field
    given = config.get(field)
    return bool(family.defaults.get(field, False) if given is None else given)


def _our_biases(family: Family, config: JsonObject, faults: list[str]) -> JsonObject:
    qkv, out, mlp = (_flag(family, config, field) for field in family.biases)
    if out != mlp or (out and not qkv):
        values = dict(zip(family.biases, (qkv, out, mlp), strict=True))
        shown = ", ".join(f"{n} {v}" for n, v in values.items() if isinstance(n, str))
        faults.append(f"{shown}: biases of some linear layers have no counterpart but those of QKV")
    return {"add_bias_linear": out, "add_qkv_bias": qkv and not out}


def _our_activation(family: Family, config: JsonObject, faults: list[str]) -> str:
    """Map to our activation name. An unknown one is added to `faults`, and a known one returned."""
    known = _GATED_ACTIVATIONS if family.gated else _PLAIN_ACTIVATIONS
    given = _value(family, config, family.activation)
    if given not in known:
        faults.append(f"{family.activation} {given!r} (known: {', '.join(known)})")
    return known.get(given, next(iter(known.values())))


def _our_heads(
    family: Family, config: JsonObject, sizes: JsonObject, faults: list[str]
) -> JsonObject:
    """Numbers and widths of heads."""
    heads, hidden = sizes["num_attention_heads"], sizes["hidden_size"]
    if family.latent:
        groups = config.get("num_key_value_heads", family.defaults.get("num_key_value_heads"))
        groups = groups or heads
        if groups != heads:
            faults.append(f"num_key_value_heads {groups} (only {heads} has a counterpart)")
        width = sizes["qk_head_dim"] + sizes["qk_pos_emb_head_dim"]
        extra = {"q_lora_rank": config.get("q_lora_rank", family.defaults.get("q_lora_rank"))}
        return extra | {
            "kv_channels": width,
            "group_query_attention": False,
            "num_query_groups": heads,
        }
    if family.even_heads and hidden % heads:
        faults.append(f"num_attention_heads {heads} does not divide hidden_size {hidden}")
    groups = heads
    if family.key_value_heads is not None:
        default = family.defaults.get(family.key_value_heads)
        groups = config.get(family.key_value_heads, default) or heads
    width = (config.get("head_dim") or family.defaults.get("head_dim")) if family.head_dim else None
    width = width or hidden // heads
    scale = None if family.scores is None else _value(family, config, family.scores)
    if scale is not None and not math.isclose(scale, width**-0.5, rel_tol=1e-6):
        faults.append(f"{family.scores} {scale!r} (only 1 / sqrt({width}) has a counterpart)")
    return {
        "kv_channels": width,
        "group_query_attention": groups != heads,
        "num_query_groups": groups,
    }


def _our_window(family: Family, config: JsonObject, faults: list[str]) -> JsonObject:
    """The window, and which layers have it where not all do."""
    kinds = config.get("layer_types")
    if family.window == "all":
        return {"window_size": config.get("sliding_window", family.defaults.get("sliding_window"))}
    if family.window is None:
        if set(kinds or ()) - {"full_attention"}:
            faults.append("layer_types: layers with a sliding window have no counterpart")
        return {"window_size": None}
    default = family.defaults.get("sliding_window", 4096)
    window = config.get("sliding_window", default)
    if window is None or not config.get("use_sliding_window", "sliding_window" in family.defaults):
        return {"window_size": None}
    layers = config["num_hidden_layers"]
    if family.experts == "qwen" and not kinds and not family.qk_norm:
        faults.append("use_sliding_window without layer_types: versions differ in what slides")
    # all layers of Qwen3-MoE have the window
    first = config.get("max_window_layers", family.defaults.get("max_window_layers", 28))
    if family.experts == "qwen" and family.qk_norm:
        first = 0
    kinds = kinds or ["full_attention"] * first + ["sliding_attention"] * max(layers - first, 0)
    if len(kinds) < layers:
        faults.append(f"layer_types: {len(kinds)} entries for {layers} layers")
    return _window_of_kinds(kinds[:layers], window, faults, family)


def _window_of_kinds(
    kinds: list[str], window: int, faults: list[str], family: Family
) -> JsonObject:
    """The window of the layers that slide."""
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown:
        faults.append(f"layer_types: {', '.join(map(repr, sorted(unknown)))} has no counterpart")
    slides = [int(kind == "sliding_attention") for kind in kinds]
    if len(set(slides)) == 1:
        return {"window_size": window if slides[0] else None}
    if family.experts == "qwen" and family.qk_norm:
        faults.append("layer_types: in Qwen3-MoE all layers have the window, or none")
    return {"window_size": window, "window_attn_skip_freq": str(slides).replace(" ", "")}
