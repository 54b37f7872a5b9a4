"""How many models that the trainer accepts have an export to Hugging Face."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from megatron.tools._convert.huggingface import family_of

import pretrain_gpt
from megatron.config.arguments import parse_arguments
from megatron.config.errors import UserError
from megatron.config.groups import ModelConfig
from megatron.config.validate import resolve

LLAMA = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1
    --train-iters 1 --lr 1e-3 --mock-data --vocab-size 99 --normalization RMSNorm --swiglu
    --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights
"""
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 16"
SHARED = f"{EXPERTS} --moe-shared-expert-intermediate-size 32"
# Settings that a model may have instead of Llama's; a leading `-` takes a flag out.
DEVIATIONS = (
    "--position-embedding-type learned_absolute",
    "--position-embedding-type none",
    "--position-embedding-type yarn --rope-scaling-factor 4",
    "--use-rope-scaling",
    "--rotary-seq-len-interpolation-factor 2",
    "--rotary-percent 0.5",
    "--normalization LayerNorm",
    "--activation gelu",
    "--activation gelu-tanh",
    "--activation squared-relu",
    "--activation geglu",
    "- --disable-bias-linear",
    "--add-qkv-bias",
    "--qk-layernorm",
    "--group-query-attention --num-query-groups 2",
    "--kv-channels 16",
    "--window-size 8",
    "--attn-logit-softcapping 30",
    "--final-logit-softcapping 30",
    "- --untie-embeddings-and-output-weights",
    EXPERTS,
    f"{EXPERTS} --moe-router-topk 1",
    f"{EXPERTS} --moe-router-pre-softmax",
    f"{EXPERTS} --moe-layer-freq [0]*1+[1]*1",
    f"{EXPERTS} --moe-router-score-function sigmoid",
    SHARED,
    f"{SHARED} --moe-shared-expert-gate",
    f"{SHARED} --moe-router-score-function sigmoid --moe-router-enable-expert-bias",
    "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 "
    "--v-head-dim 8 --qk-layernorm --latent-norm-epsilon 1e-6",
)


def settings(line: str) -> dict[str, list[str]]:
    """Flags and the words after them."""
    found: dict[str, list[str]] = {}
    for word in line.split():
        if word.startswith("--"):
            found[word] = []
        else:
            found[list(found)[-1]].append(word)
    return found


def changed(chosen: tuple[str, ...]) -> list[str] | None:
    """Llama's command line with these deviations; None where two give a flag different values."""
    given: dict[str, list[str]] = {}
    taken_out: set[str] = set()
    for deviation in chosen:
        if deviation.startswith("- "):
            taken_out |= settings(deviation[2:]).keys()
            continue
        for flag, words in settings(deviation).items():
            if given.setdefault(flag, words) != words:
                return None
    base = {flag: words for flag, words in settings(LLAMA).items() if flag not in taken_out}
    if "--activation" in given:
        del base["--swiglu"]
    line = base | given
    return [word for flag, words in line.items() for word in (flag, *words)]


def accepted_models() -> list[ModelConfig]:
    """The models that differ from Llama's in at most two settings and that the trainer accepts."""
    found: dict[ModelConfig, None] = {}
    for count in range(3):
        for chosen in itertools.combinations(DEVIATIONS, count):
            line = changed(chosen)
            if line is None:
                continue
            try:
                found[resolve(parse_arguments(line).config, 1, 100).config.model] = None
            except UserError:
                continue
    return list(found)


def has_family(model: ModelConfig) -> bool:
    try:
        family_of(model)
    except UserError:
        return False
    return True


def test_the_page_has_the_count_of_exports():
    models = accepted_models()
    exports = sum(map(has_family, models))
    page = (Path(__file__).resolve().parents[3] / "docs/checkpoint.md").read_text()
    line = (
        f"Of {len(models)} models that differ from Llama's in at most two settings {exports} have"
    )
    assert line in " ".join(page.split())


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
