"""Flags of Megatron-DeepSpeed and its forks that are read together or with a file: lengths in
tokens, experts, rows in addition to a vocabulary.
"""

from __future__ import annotations

import json
import re

import pytest
from config_lines import LINE, faults_of, without

from megatron.config.arguments import Parsed, parse_arguments
from megatron.config.errors import ArgumentErrors
from megatron.config.groups import Config
from megatron.config.validate import resolve

BASE = " ".join(without(LINE.split(), "--train-iters"))
BASE += " --num-layers 6 --seq-length 64 --disable-bias-linear"


def parsed(flags: str, base: str = f"{BASE} --train-iters 2") -> Parsed:
    return parse_arguments(f"{base} {flags}".split())


def faults(flags: str, base: str = f"{BASE} --train-iters 2") -> list[str]:
    with pytest.raises(ArgumentErrors) as caught:
        resolve(parsed(flags, base).config, 1, 101)
    return caught.value.faults


def settings(*words: str) -> Config:
    return parse_arguments(list(words)).config


def refusal(*words: str) -> str:
    return "\n".join(faults_of(list(words)))


def test_a_dense_model_ignores_them():
    flags = "--num-experts 1 1 --moe-loss-coeff 0.01 --topk 2 --moe-expert-parallel-size 1"
    flags += " --create-moe-param-group --deepspeed"
    read = parsed(flags)
    assert resolve(read.config, 1, 101).config == resolve(parsed("").config, 1, 101).config
    assert any("has no effect without --num-experts" in note for note in read.notes)


@pytest.mark.parametrize(
    "flags, removed",
    [
        (
            "--topk 2 --moe-router-topk 2 --moe-min-capacity 4",
            "; remove --topk, --moe-min-capacity",
        ),
        ("--deepspeed", ""),
        ("--deepspeed_config ds.json", ""),
        ("--create-moe-param-group", ""),
    ],
)
def test_experts_are_refused_with_the_flags_to_give(tmp_path, monkeypatch, flags, removed):
    """The default of that program is top-1 in every second layer; ours must not be taken."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text("{}")
    (fault,) = faults(f"--num-experts 4 {flags}")
    assert fault.startswith("--num-experts 4: Megatron-DeepSpeed's experts are not converted")
    assert "--moe-router-topk 1 " in fault and fault.endswith(f"with your values{removed}")


def test_the_flags_to_give_are_taken_in_place_of_the_others():
    words = "--moe-router-topk 1 --moe-router-pre-softmax --moe-layer-freq ([0]+[1])*3 "
    words += "--moe-aux-loss-coeff 0.1 --moe-expert-capacity-factor 1"
    flags = "--num-experts 4 --deepspeed --create-moe-param-group --moe-expert-parallel-size 1"
    model = resolve(parsed(f"{flags} {words}").config, 1, 101).config.model
    assert model.moe_router_topk == 1 and model.expert_layers() == (False, True) * 3
    (fault,) = faults("--num-experts 4 --deepspeed")
    named = fault.replace("'", "").replace("*N (every second of 2N layers)", "*3")
    assert words in named


@pytest.mark.parametrize("words", ["4 8", "8 1"])
def test_numbers_of_experts_of_layers_must_be_equal(words):
    assert "must be the same in every layer that has experts" in faults(f"--num-experts {words}")[0]


SAMPLES = f"{BASE} --global-batch-size 8"


@pytest.mark.parametrize(
    "flags, train, decay, warmup",
    [
        ("--train-tokens 6400", 100, None, 0),
        ("--train-tokens 6400 --train-samples 300", 100, 300, 0),
        ("--train-tokens 6400 --train-iters 100", 100, 800, 0),
        ("--train-tokens 6400000 --train-iters 100 --lr-warmup-iters 3", 800, 800, 24),
        ("--train-tokens 0 --train-iters 100", 800, 800, 0),
        ("--train-iters 100 --lr-decay-tokens 3200 --lr-warmup-tokens 640", 800, 50, 10),
    ],
)
def test_lengths_in_tokens(flags, train, decay, warmup):
    read = parsed(flags, SAMPLES)
    optimizer, training = read.config.optimizer, read.config.training
    assert (training.train_samples, optimizer.lr_decay_samples) == (train, decay)
    assert optimizer.lr_warmup_samples == warmup
    assert training.train_iters is None and optimizer.lr_decay_iters is None
    resolve(read.config, 1, 101)
    (note,) = [note for note in read.notes if "in samples of --seq-length 64" in note]
    assert re.search(rf"--train-samples {train}\b", note)


def test_tokens_and_iterations_need_one_batch_size():
    flags = "--train-tokens 6400 --train-iters 9"
    (found,) = [line for line in faults(flags, BASE) if line.startswith("--train-tokens")]
    assert found.endswith("needs a --global-batch-size of one size")


# ---------------------------------------------------------------- files that such flags name


@pytest.mark.parametrize("where", ["tokenizer.json", "."])
def test_rows_in_addition_to_a_vocabulary(tmp_path, where):
    """The fork counts the model's own vocabulary, without added tokens: Qwen2.5 has 151,643 of
    these, and with 421 more its 152,064 rows.
    """
    vocabulary = {"model": {"vocab": {str(k): k for k in range(1003)}}, "added_tokens": [{}] * 22}
    (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary))
    line = ["--tokenizer-model", str(tmp_path / where), "--extra-vocab-size"]
    assert settings(*line, "421").model.padded_vocab_size == 1424
    assert settings(*line, "0").model.padded_vocab_size is None
    assert "expected a whole number of 0 or more" in refusal(*line, "-1")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "which is not a tokenizer.json" in refusal(*line, "421")
