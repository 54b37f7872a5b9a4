"""A field that config.json leaves out has transformers' own default, in every family: importing
without it gives the model of the file that transformers writes for it, or is refused.
"""

from __future__ import annotations

import pytest
from huggingface_models import MODELS
from huggingface_models import family as family_of
from megatron.tools._convert.families import FAMILIES, Family
from megatron.tools._convert.huggingface import _our_fields, their_config
from test_huggingface import VOCAB

transformers = pytest.importorskip("transformers")


def read(kind: str, config: dict) -> dict | None:
    """Our fields of a config.json; None where it is refused."""
    faults: list[str] = []
    try:
        fields = _our_fields(kind, config, faults)
    except KeyError:
        return None
    return None if faults else fields


def left_out(config: dict, family: Family) -> list[tuple[str, ...]]:
    """Which fields are left out: each one, and those of rotary positions together."""
    single = [(field,) for field in config if field not in ("model_type", "architectures")]
    rotary = ("rope_parameters", "rope_scaling", family.base)
    return [*single, rotary[::2], rotary, (*rotary, family.partial or "")]


@pytest.mark.parametrize("kind", FAMILIES)
def test_fields_that_are_left_out(kind):
    family = FAMILIES[kind]
    architecture = getattr(transformers, family.architecture)
    compared = 0
    wrong = []
    for model in (MODELS[name] for name in MODELS if family_of(name) == kind):
        whole = their_config(kind, model, VOCAB)
        for names in left_out(whole, family):
            short = {name: value for name, value in whole.items() if name not in names}
            ours = read(kind, short)
            if ours is None:
                continue
            compared += 1
            del short["architectures"]
            theirs = read(kind, architecture.config_class(**short).to_dict())
            if ours != theirs:
                differ = {n for n in ours if theirs is None or ours[n] != theirs.get(n)}
                wrong.append((names, differ))
    assert not wrong
    assert compared > 10
