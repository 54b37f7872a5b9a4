"""Files that flags of other programs name: lists of data, and a tokenizer's vocabulary."""

from __future__ import annotations

import json

import pytest

from megatron.config.arguments import parse_arguments
from megatron.config.errors import ArgumentErrors
from megatron.config.groups import Config


def settings(*words: str) -> Config:
    return parse_arguments(list(words)).config


def faults(*words: str) -> str:
    with pytest.raises(ArgumentErrors) as caught:
        settings(*words)
    return "\n".join(caught.value.faults)


@pytest.mark.parametrize(
    "flag, text",
    [
        ("--data-args-path", "0.25 a\n0.75   b\n"),
        ("--data-file-list", "0.25 a web\n\n0.75 b books\n"),
        ("--data-file-list", "0.25 a\n0.75 b\n"),
    ],
)
def test_lists_of_data(tmp_path, flag, text):
    (tmp_path / "list").write_text(text)
    line = ["--data-path", "0.25", "a", "0.75", "b"]
    assert settings(flag, str(tmp_path / "list")) == settings(*line)
    assert "contradicts --data-path a" in faults("--data-path", "a", flag, str(tmp_path / "list"))


def test_a_list_for_each_split(tmp_path):
    path = tmp_path / "lists.json"
    path.write_text(json.dumps({"train": ["0.25", "a", 0.75, "b"], "valid": "c", "test": ["d"]}))
    line = "--train-data-path 0.25 a 0.75 b --valid-data-path c --test-data-path d"
    assert settings("--per-split-data-args-path", str(path)) == settings(*line.split())


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
    given = faults(flag, str(tmp_path / "list"))
    assert given.startswith(f"{flag} ") and fault in given
    assert "takes one file" in faults(flag) and "No such file" in faults(flag, "absent")


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
    assert "expected a whole number of 0 or more" in faults(*line, "-1")
    text = "which is not a tokenizer.json"
    (tmp_path / "tokenizer.json").write_text("{}")
    assert text in faults(*line, "421") and text in faults("--extra-vocab-size", "421")
