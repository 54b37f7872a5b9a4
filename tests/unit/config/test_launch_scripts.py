"""Launch scripts of Megatron-LM, Megatron-DeepSpeed, forks and others (launch_scripts.toml):
each runs, but for what does not exist.
"""

from __future__ import annotations

import json
import shlex
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from config_lines import check_fields, rows, without

from megatron.config.arguments import Parsed, parse_arguments
from megatron.config.errors import ArgumentErrors
from megatron.config.stages import layers_of_stages
from megatron.config.validate import resolve

FILES = (
    "gpt2-vocab.json",
    "gpt2-merges.txt",
    "tokenizer.model",
    "corpus_text_document.bin",
    "corpus_text_document.idx",
)
CONTENTS = {
    # a vocabulary of 1,003 tokens, without those that were added later
    "ckpt/tokenizer.json": json.dumps({"model": {"vocab": {str(k): k for k in range(1003)}}}),
}


@dataclass(frozen=True)
class Script:
    """One script: where it is, its flags, its DeepSpeed file (deepspeed.json) and the job that it
    starts. `refused` are the beginnings of the faults of the flags as they are; with the flags of
    `drop` taken out, and `add` added, the script runs, without the services `not_done`.
    """

    path: str
    flags: str
    ranks: int
    deepspeed: dict[str, Any] | None = None
    refused: tuple[str, ...] = ()
    drop: str = ""
    add: str = ""
    reason: str = ""
    not_done: tuple[str, ...] = ()
    vocabulary: int = 50257
    # sections of the DeepSpeed file as they must be; None: taken out
    edit: dict[str, Any] = field(default_factory=dict)

    def make(self, folder: Path, *, edited: bool) -> list[str]:
        """Its command line, and its files in a folder."""
        for name in FILES:
            (folder / name).write_bytes(b"")
        for name, text in CONTENTS.items():
            (folder / name).write_text(text)
        if self.deepspeed is not None:
            content = {**self.deepspeed, **self.edit} if edited else self.deepspeed
            content = {key: value for key, value in content.items() if value is not None}
            (folder / "deepspeed.json").write_text(json.dumps(content))
        words = shlex.split(self.flags)
        return [*without(words, *self.drop.split()), *self.add.split()] if edited else words


def scripts() -> tuple[Script, ...]:
    """Those of the data file."""
    text = Path(__file__).with_name("launch_scripts.toml").read_text("utf-8")
    found = tomllib.loads(text)["script"]
    for row in found:
        row |= {key: json.loads(row[key]) for key in ("deepspeed", "edit") if key in row}
    return tuple(Script(**row) for row in found)


ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = scripts()
IDS = [script.path for script in SCRIPTS]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A working folder with a checkpoint folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ckpt").mkdir()
    return tmp_path


def parsed(script: Script, folder: Path, *, edited: bool) -> Parsed:
    argv = script.make(folder, edited=edited)
    return parse_arguments([*argv, "--dry-run", "--world-size", str(script.ranks)])


def faults_of(script: Script, folder: Path) -> list[str]:
    try:
        resolve(parsed(script, folder, edited=False).config, script.ranks, script.vocabulary)
    except ArgumentErrors as error:
        return error.faults
    return []


@pytest.mark.parametrize("script", SCRIPTS, ids=IDS)
def test_what_does_not_exist_is_refused_and_nothing_else(folder, script):
    faults = faults_of(script, folder)
    assert len(faults) == len(script.refused), faults
    assert all(
        fault.startswith(text) for fault, text in zip(faults, script.refused, strict=True)
    ), faults
    assert bool(faults) == bool(script.reason)


@pytest.mark.parametrize("script", SCRIPTS, ids=IDS)
def test_the_rest_of_the_script_runs(folder, script):
    read = parsed(script, folder, edited=True)
    assert len(read.not_done) == len(script.not_done), read.not_done
    assert all(any(line.startswith(text) for line in read.not_done) for text in script.not_done), (
        read.not_done
    )
    config = resolve(read.config, script.ranks, script.vocabulary).config
    assert sum(layers_of_stages(config)) == config.model.num_layers


def test_the_readme_has_the_count():
    accepted = sum(not script.refused for script in SCRIPTS)
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"Of {len(SCRIPTS)} published launch scripts {accepted} are accepted" in text


# Values of flags that have other names or defaults here.
MEANING = """
train_gpt3_175b_distributed.sh
    tokenizer_type = GPT2BPETokenizer
DTYPE=bf16
    activation = swiglu
    split = 99,1,0
    zero_stage = 1
    grad_reduce_in_bf16 = True
    sequence_parallel = False
pretrain_llama2_distributed.sh
    num_query_groups = 4
    normalization = RMSNorm
    tokenizer_type = SentencePieceTokenizer
    recompute_num_layers = 1
rebase/ds_pretrain_gpt_125M.sh
    train_samples = 146484375
    lr_decay_samples = 146484375
    lr_warmup_samples = 1464844
    initial_loss_scale = 2048.0
zbh1_pretrain_gpt_1.3b.sh
    pipeline_schedule = zero-bubble
1.3B_rope.sh
    rotary_percent = 0.25
finetune_llama.sh
    tokenizer_type = HuggingFaceTokenizer
run_llama.sh
    tokenizer_type = TikTokenizer
qwen2_5/run_mcore_qwen.sh
    padded_vocab_size = 1424
"""


@pytest.mark.parametrize("path, wanted", rows(MEANING))
def test_the_meaning_of_some_scripts(folder, path, wanted):
    script = next(script for script in SCRIPTS if script.path.endswith(path))
    given = parsed(script, folder, edited=True).config
    check_fields(resolve(given, script.ranks, script.vocabulary).config, wanted[""])
