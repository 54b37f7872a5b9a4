"""Flags of Megatron-DeepSpeed and its forks that are read together or with a file: lengths in
tokens, experts, lists of data, rows in addition to a vocabulary.
"""

from __future__ import annotations

import json
import re

import pytest
from config_lines import LINE, check_fields, faults_of, rows, without

from megatron.config.arguments import Parsed, parse_arguments
from megatron.config.errors import ArgumentErrors
from megatron.config.groups import Config
from megatron.config.layers import expert_pattern
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


# The flags of that program and ours, which win over its defaults.
EXPERTS = """
--create-moe-param-group
    moe_router_topk = 1
    moe_router_pre_softmax = True
    moe_aux_loss_coeff = (0.1,)
    moe_expert_capacity_factor = 1.0
    moe_layer_freq = ([0]*1+[1])*3
--deepspeed
    moe_router_topk = 1
    moe_layer_freq = ([0]*1+[1])*3
--topk 1 --expert-interval 4 --moe-train-capacity-factor 2 --moe-eval-capacity-factor 2
    moe_expert_capacity_factor = 2.0
    moe_layer_freq = ([0]*3+[1])*1+[0]*2
--topk 2 --disable-moe-top2-2nd-expert-sampling --disable-moe-token-dropping --expert-interval 1
    moe_router_topk = 2
    moe_router_pre_softmax = False
    moe_expert_capacity_factor = None
    moe_layer_freq = 1
--create-moe-param-group --moe-router-topk 3 --moe-layer-freq 3
    moe_router_topk = 3
    moe_layer_freq = 3
--moe-router-topk 2
    moe_aux_loss_coeff = (0.0,)
    moe_layer_freq = 1
--topk 1 --tensor-model-parallel-size 2 --sequence-parallel
    expert_tensor_parallel_size = 1
--topk 1 --tensor-model-parallel-size 2 --sequence-parallel --enable-expert-tensor-parallelism
    expert_tensor_parallel_size = 2
"""


def test_a_deepspeed_file_alone_selects_its_defaults(tmp_path):
    (tmp_path / "ds.json").write_text("{}")
    given = parsed(f"--num-experts 4 --deepspeed_config {tmp_path}/ds.json").config
    assert given.model.moe_router_topk == 1


@pytest.mark.parametrize("flags, wanted", rows(EXPERTS))
def test_experts(flags, wanted):
    given = parsed(f"--num-experts 4 {flags}").config
    check_fields(resolve(given, 2, 101).config, wanted[""])


@pytest.mark.parametrize("interval, layers", [(1, 7), (2, 7), (5, 8)])
def test_experts_end_each_group_of_layers(interval, layers):
    flags = f"--num-experts 4 --num-layers {layers} --expert-interval {interval}"
    frequency = parsed(flags).config.model.moe_layer_freq
    expected = tuple((layer + 1) % interval == 0 for layer in range(layers))
    assert expert_pattern(frequency, layers) == expected


def test_a_dense_model_ignores_them():
    flags = "--num-experts 1 1 --moe-loss-coeff 0.01 --topk 2 --moe-expert-parallel-size 1"
    read = parsed(flags)
    assert resolve(read.config, 1, 101).config == resolve(parsed("").config, 1, 101).config
    assert any("has no effect without --num-experts" in note for note in read.notes)


@pytest.mark.parametrize(
    "flags, fault",
    [
        ("--num-experts 4 --topk 2", "add --disable-moe-top2-2nd-expert-sampling"),
        ("--num-experts 4 --mlp-type residual", "use --moe-shared-expert"),
        ("--num-experts 4 8", "must be the same in every layer that has experts"),
        ("--num-experts 4 --topk 1 --moe-router-topk 2", "contradicts --moe-router-topk 2"),
        ("--num-experts 4 --expert-interval 9", "must be at most --num-layers 6"),
        ("--num-experts 64 --moe-min-capacity 4", "give --moe-train-capacity-factor 2 or more"),
        (
            "--num-experts 4 --moe-eval-capacity-factor 2",
            "evaluation takes the capacity of training; give both as 1",
        ),
    ],
)
def test_what_has_no_equal_is_refused_with_what_to_give(flags, fault):
    (found,) = [line for line in faults(flags) if fault in line]
    assert "drop it" not in found


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


@pytest.mark.parametrize(
    "flag, text",
    [
        ("--data-args-path", "0.25 a\n0.75   b\n"),
        ("--data-file-list", "0.25 a web\n\n0.75 b books\n"),
    ],
)
def test_lists_of_data(tmp_path, flag, text):
    (tmp_path / "list").write_text(text)
    line = ["--data-path", "0.25", "a", "0.75", "b"]
    assert settings(flag, str(tmp_path / "list")) == settings(*line)
    assert "contradicts --data-path a" in refusal("--data-path", "a", flag, str(tmp_path / "list"))


def test_the_command_line_wins_over_the_list_of_a_file(tmp_path):
    (tmp_path / "list").write_text("0.25 a 0.75 b")
    (tmp_path / "file").write_text(f"data_args_path: {tmp_path}/list")
    (tmp_path / "bad").write_text("data_args_path: x")
    words = ["--config", str(tmp_path / "file")]
    assert settings(*words).data.data_path == ("0.25", "a", "0.75", "b")
    assert settings(*words, "--data-path", "c").data.data_path == ("c",)
    fault = refusal("--config", str(tmp_path / "bad"))
    assert fault.startswith(f"--config {tmp_path}/bad: --data-args-path x: No such file")


def test_a_list_for_each_split(tmp_path):
    path = tmp_path / "lists.json"
    path.write_text(json.dumps({"train": ["0.25", "a", 0.75, "b"], "valid": "c", "test": ["d"]}))
    line = "--train-data-path 0.25 a 0.75 b --valid-data-path c --test-data-path d"
    assert settings("--per-split-data-args-path", str(path)) == settings(*line.split())
    path.write_text(json.dumps({"train": "a", "valid": [], "test": None}))
    assert settings("--per-split-data-args-path", str(path)) == settings("--train-data-path", "a")


@pytest.mark.parametrize(
    "flag, text, fault",
    [
        ("--data-args-path", "", "no value follows it"),
        ("--data-file-list", "0.5 a web more\n", "line 1: expected a weight, a prefix and"),
        ("--per-split-data-args-path", "0.5 a", "not JSON"),
        ("--per-split-data-args-path", '{"dev": ["a"]}', "under train, valid, test, found 'dev'"),
    ],
)
def test_lists_that_cannot_be_read(tmp_path, flag, text, fault):
    (tmp_path / "list").write_text(text)
    given = refusal(flag, str(tmp_path / "list"))
    assert given.startswith(f"{flag} ") and fault in given
    assert "takes one file" in refusal(flag) and "No such file" in refusal(flag, "absent")


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
