"""No exporter drops a setting of the model: each field is written, refused by flag, or acts in
training only.
"""

from __future__ import annotations

import dataclasses

import pytest
from huggingface_models import MODELS, family
from megatron.tools._convert.huggingface import TRAINING_ONLY, to_huggingface
from test_huggingface import VOCAB

import pretrain_gpt
from megatron.config.derive import RunView
from megatron.config.errors import UserError
from megatron.config.groups import Config, ModelConfig
from megatron.config.metadata import KERNEL, ROUNDING
from megatron.config.options import FIELDS

# Follow from other fields in a resolved model.
IMPLIED = ("group_query_attention", "num_query_groups", "kv_channels")


def has_no_effect(model: ModelConfig, field: str) -> bool:
    """Whether no value of the field changes this model."""
    return (field == "add_qkv_bias" and model.add_bias_linear) or (
        field == "ffn_hidden_size" and all(model.expert_layers())
    )


# The first of each family.
FIRST = list({family(name): name for name in reversed(MODELS)}.values())


def other_values(name: str, value) -> list:
    """Values that a field could have instead."""
    option = FIELDS[name]
    if option.choices:
        return [choice for choice in option.choices if choice != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, str):
        return ["3"]
    return [option.kind(2)] if value is None else [value * 2]


def changed_models(model: ModelConfig):
    """The model with one field changed, for every field and value that acts."""
    for field in dataclasses.fields(model):
        exempt = field.name in (*TRAINING_ONLY, *IMPLIED) or has_no_effect(model, field.name)
        kernel = field.metadata.get("change") in (KERNEL, ROUNDING)
        for value in (
            [] if exempt or kernel else other_values(field.name, getattr(model, field.name))
        ):
            changed = dataclasses.replace(model, **{field.name: value})
            run = RunView(Config(model=changed), 1, None)
            conditions = (*field.metadata["needs"], *field.metadata["idle_without"])
            if all(map(run.holds, conditions)):
                yield field.name, changed


@pytest.mark.parametrize("name", [*FIRST, "deepseek_v3 whole queries"])
def test_every_field_changes_the_export_or_is_refused(name):
    model, kind = MODELS[name], family(name)
    written = to_huggingface(model, VOCAB, kind=kind)
    dropped = []
    count = 0
    for field, changed in changed_models(model):
        count += 1
        try:
            same = to_huggingface(changed, VOCAB, kind=kind) == written
        except UserError:
            continue
        dropped += [(field, getattr(changed, field))] if same else []
    assert not dropped
    assert count > 20


# ---- a run without an export has a note in its banner --------------------------------------------


LLAMA = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1
    --train-iters 1 --lr 1e-3 --mock-data --vocab-size 99 --normalization RMSNorm --swiglu
    --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights
"""


@pytest.mark.parametrize(
    "flags, reason",
    [
        ("--save run", ""),
        ("--attn-logit-softcapping 30", ""),  # nothing is saved
        ("--save run --attn-logit-softcapping 30", "cannot express: --attn-logit-softcapping 30"),
    ],
)
def test_the_banner_says_that_there_will_be_no_export(tmp_path, monkeypatch, capsys, flags, reason):
    monkeypatch.chdir(tmp_path)
    assert pretrain_gpt.main([*LLAMA.split(), *flags.split(), "--dry-run"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert ("no export of this run's checkpoints: no Hugging Face family" in shown) == bool(reason)
    assert reason in shown
