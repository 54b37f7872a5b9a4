"""A run that saves a model without an export to Hugging Face has a note in its banner."""

from __future__ import annotations

import pytest

import pretrain_gpt

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
