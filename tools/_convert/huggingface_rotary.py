"""Rotary positions in Hugging Face's config.json, both ways.

transformers 5 reads `rope_parameters`, 4 reads `rope_theta` and `rope_scaling`; exports have both.
An import takes `rope_scaling` where both are there, as transformers 5 does.
"""

from __future__ import annotations

from typing import Any

from megatron.tools._convert.families import DEFAULTS, Family

from megatron.config.groups import ModelConfig
from megatron.config.input_files import JsonObject

# Kinds of scaling that no rotary table here has.
REASONS = {
    "longrope": "a factor for each channel, by two lists for short and for long sequences, has no "
    "counterpart; ",
    "dynamic": "a base that follows the length of each sequence has no counterpart; ",
}


# By kind of scaling: a field of theirs -> ours, and what an import takes where theirs is missing.
_STRETCH: dict[str, tuple[str, float | None]] = {
    "factor": ("rope_scaling_factor", None),
    "original_max_position_embeddings": ("rope_original_max_position_embeddings", None),
}
SCALINGS: dict[str, dict[str, tuple[str, float | None]]] = {
    "default": {},
    "linear": {"factor": ("rotary_seq_len_interpolation_factor", None)},
    "llama3": _STRETCH
    | {
        "low_freq_factor": ("rope_low_freq_factor", None),
        "high_freq_factor": ("rope_high_freq_factor", None),
    },
    "yarn": _STRETCH
    | {"beta_fast": ("yarn_beta_fast", 32.0), "beta_slow": ("yarn_beta_slow", 1.0)},
}
# what ModelConfig derives of a field that may be None
_DERIVED = {
    "rope_scaling_factor": "rope_factor",
    "rope_original_max_position_embeddings": "rope_original_length",
}


def their_rotary(family: Family, model: ModelConfig) -> JsonObject:
    """`rope_parameters` and the older fields of a resolved `model`."""
    kind = "default"
    if model.rotary_seq_len_interpolation_factor is not None:
        kind = "linear"
    elif model.use_rope_scaling:
        kind = "llama3"
    elif model.position_embedding_type == "yarn":
        kind = "yarn"
    scaling: JsonObject = {"rope_type": kind} | {
        theirs: getattr(model, _DERIVED.get(ours, ours))
        for theirs, (ours, _) in SCALINGS[kind].items()
    }
    if kind == "yarn" and family.latent:
        scaling |= {"mscale": model.mscale, "mscale_all_dim": model.mscale_all_dim}
    share = {} if family.partial is None else {"partial_rotary_factor": model.rotary_percent}
    config: JsonObject = {
        "rope_parameters": scaling | {"rope_theta": model.rotary_base} | share,
        family.base: model.rotary_base,
    }
    if family.partial is not None:
        config[family.partial] = model.rotary_percent
    if kind != "default":
        config["rope_scaling"] = scaling | share
    return config


def our_rotary(family: Family, config: JsonObject, faults: list[str]) -> JsonObject:
    """Fields of ModelConfig. Raises KeyError for what config.json lacks."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    scaling = {name: value for name, value in given.items() if value is not None}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in (known := ("default", *family.scalings)):
        reason = REASONS.get(kind, "")
        faults.append(f"rope_type {kind!r} ({reason}known: {', '.join(known)})")
    base = scaling.get("rope_theta", _first(config.get(family.base), _default(family, family.base)))
    fields: JsonObject = {
        "position_embedding_type": "yarn" if kind == "yarn" else "rope",
        "rotary_base": float(base),
        "rotary_percent": _our_share(family, config, scaling, faults),
    }
    scaling.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    for theirs, (ours, default) in SCALINGS.get(kind, {}).items():
        value = scaling[theirs] if default is None else scaling.get(theirs, default)
        fields[ours] = value if theirs.startswith("original") else float(value)
    if kind == "llama3":
        fields["use_rope_scaling"] = True
    elif kind == "yarn":
        fields |= _our_mscale(family, scaling, faults)
    return fields


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _default(family: Family, name: str) -> Any:
    return family.defaults.get(name, DEFAULTS.get(name))


def _our_share(family: Family, config: JsonObject, scaling: JsonObject, faults: list[str]) -> float:
    """Share of a head's channels that rotates."""
    inside = scaling.get("partial_rotary_factor")
    if family.partial is not None:
        return float(_first(inside, config.get(family.partial), _default(family, family.partial)))
    given = _first(inside, config.get("partial_rotary_factor"))
    if given not in (None, 1.0):
        faults.append(f"partial_rotary_factor {given!r} (only 1.0 has a counterpart)")
    return 1.0


def _our_mscale(family: Family, scaling: JsonObject, faults: list[str]) -> JsonObject:
    """YaRN's factors of the rotary table and of the scores."""
    fixed: JsonObject = {"truncate": True, "attention_factor": None}
    if not family.latent:
        fixed |= {"mscale": None, "mscale_all_dim": None}
    for name, value in fixed.items():
        if scaling.get(name, value) not in (value, None):
            faults.append(f"{name} {scaling[name]!r} (only {value!r} has a counterpart)")
    if not family.latent:
        return {}
    mscale, all_dim = scaling.get("mscale") or 0, scaling.get("mscale_all_dim") or 0
    if all_dim and not mscale:
        faults.append("mscale_all_dim without mscale")
    # without both the table has YaRN's own factor
    return {"mscale": float(mscale) if all_dim else 1.0, "mscale_all_dim": float(all_dim)}
