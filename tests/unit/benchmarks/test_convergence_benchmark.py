"""The benchmark of whole training runs: all sides do the same work, and the common evaluation is
ours.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.benchmarks import convergence as tool
from megatron.benchmarks.peers.common import validation_loss
from megatron.tools.generate import load_model

from megatron.checkpoint.reader import open_checkpoint
from megatron.config.arguments import parse_arguments
from megatron.config.validate import resolve
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.loader import build_data
from megatron.data.tokenizer import build_tokenizer
from megatron.optimizer.lr_schedule import ParamSchedule

ROOT = Path(__file__).resolve().parents[3]
TINY = replace(
    tool.shortened(20), layers=1, hidden=16, heads=2, seq=8, vocab=300, micro_batch=2, warmup=5
)


def test_the_llama_shape_is_the_quickstarts(corpus):
    """Every flag that the quickstart gives to pretrain_gpt.py, with the same value; paths, how long
    it trains, and how often something is logged, evaluated and saved aside.
    """
    script = (ROOT / "scripts/quickstart.sh").read_text()
    flags = re.search(r"pretrain_gpt.py \\\n(.*?)\"\$@\"", script, re.S)[1].replace("\\\n", " ")
    # the benchmark trains for longer
    flags = flags.replace('"${tokenizer[@]}"', "")
    flags = flags.replace("$((iterations * 3 / 10))", "60")
    flags = re.sub(r"\$iterations|\$half|\$\(\(half.*?\)\)", str(tool.WORK.steps), flags)
    flags = flags.replace("quickstart/shakespeare_text_document", str(corpus[0]))
    given = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(corpus[1])]
    its = parse_arguments([*flags.split(), *given]).config
    ours = parse_arguments(tool.our_flags(tool.WORK, "Llama", *corpus)).config
    its, ours = (resolve(config, 1, 2048).config for config in (its, ours))
    assert ours.model == its.model and ours.optimizer == its.optimizer
    assert ours.data.split == its.data.split and ours.data.seq_length == its.data.seq_length
    for name in ("micro_batch_size", "global_batch_size"):
        assert getattr(ours.training, name) == getattr(its.training, name)
    assert ours.evaluation.eval_iters == its.evaluation.eval_iters == tool.EVALUATED


def test_the_learning_rate_is_that_of_our_schedule(corpus):
    config = parse_arguments(tool.our_flags(tool.WORK, "Llama", *corpus)).config
    schedule = ParamSchedule.of(resolve(config, 1, 2048).config)
    for step in range(tool.WORK.steps):
        wanted = schedule.learning_rate((step + 1) * tool.WORK.step_samples)
        assert tool.WORK.learning_rate(step) == pytest.approx(wanted, rel=1e-12)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A token file of made-up words and its tokenizer."""
    folder, draw = tmp_path_factory.mktemp("corpus"), random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=4)) for _ in range(60)]
    lines = [json.dumps({"text": " ".join(draw.choices(words, k=300))}) + "\n" for _ in range(100)]
    (folder / "text.jsonl").write_text("".join(lines))
    tokenizer = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", "t.model"]
    for command in (
        ["train_tokenizer.py", "--input", "text.jsonl", "--vocab-size", "300"]
        + ["--output-prefix", "t"],
        ["preprocess_data.py", "--input", "text.jsonl", "--output-prefix", "text", *tokenizer]
        + ["--append-eod"],
    ):
        path = str(ROOT / "tools" / command[0])
        subprocess.run([sys.executable, path, *command[1:]], cwd=folder, check=True)
    return folder / "text_text_document", folder / "t.model"


@pytest.mark.full
def test_peers_get_our_tokens_and_the_common_evaluation_is_ours(corpus, tmp_path):
    """A tiny run of ours through the benchmark; its checkpoint, evaluated as a peer's model is,
    has the loss that pretrain_gpt.py printed.
    """
    flags = tool.our_flags(TINY, "GPT-2", *corpus)
    sizes = tool.write_tokens(tmp_path, flags)
    train = np.fromfile(tmp_path / "train.bin", np.uint16)
    held_out = np.fromfile(tmp_path / "val.bin", np.uint16).reshape(-1, TINY.seq + 1)
    assert len(train) == sizes["train"] and int(train.max()) < TINY.vocab
    assert len(held_out) == tool.EVALUATED * TINY.step_samples
    dataset = IndexedDataset(str(corpus[0]))
    documents = [dataset.sequence(i).tolist() for i in range(100)]
    assert train.tolist() == sum(documents[:92], [])
    stream = sum(documents[92:96], [])
    stream += stream[: TINY.seq]  # the last window of an epoch continues at the beginning
    cuts = {tuple(stream[i : i + TINY.seq + 1]) for i in range(len(stream) - TINY.seq)}
    assert {tuple(row) for row in held_out.tolist()} <= cuts

    places = {"peers": tmp_path, "nanogpt": tmp_path}
    save = ["--save", str(tmp_path / "run")]
    found = tool.run("ours, GPT-2 shape", TINY, [*flags, *save], tmp_path, places)
    assert found["exit_code"] == 0 and len(found["losses"]) == 4 and found["seed"] == TINY.seed
    model = load_model(open_checkpoint(tmp_path / "run", None), torch.device("cpu"))
    rows = torch.from_numpy(held_out.astype(np.int64))
    loss = validation_loss(model.logits, rows)
    # seven digits of the console, and means of fp32 losses near 4
    assert loss == pytest.approx(found["validation_loss"], abs=5e-6)
    assert validation_loss(model.logits, rows.flip(0)) == pytest.approx(loss, abs=1e-9)
    assert abs(validation_loss(model.logits, rows.flip(1)) - loss) > 1e-4


def test_a_peer_gets_our_start(corpus, tmp_path):
    """Places at which our samples begin, and our initial matrices."""
    flags = tool.our_flags(TINY, "GPT-2", *corpus)
    tool.write_start(tmp_path, TINY, flags)
    index = json.loads((tmp_path / "index.json").read_text())
    with open(tmp_path / "tensors.bin", "rb") as file:
        start = {
            name: np.fromfile(file, dtype, int(np.prod(shape))).reshape(shape)
            for name, (dtype, shape) in index.items()
        }
        assert not file.read()
    config = resolve(parse_arguments(flags).config, 1, 300).config
    batch = build_data(config, build_tokenizer(config.data)).train.batch(0, TINY.step_samples)
    for place, row in zip(start["places"], batch.tokens.tolist()):
        assert start["train"][place : place + TINY.seq].tolist() == row
    assert start["embedding.word.weight"].shape == (300, TINY.hidden)
    assert start["layers.0.mlp.down.weight"].std() == pytest.approx(0.02 / 2**0.5, rel=0.1)
    assert start["embedding.word.weight"].std() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize(("apart", "fine"), [(3e-7, True), (3e-3, False)])
def test_a_peer_that_does_other_work_is_refused(apart, fine, corpus, monkeypatch, tmp_path):
    def run(who, work, flags, tokens, places):
        assert work.same_start and (tokens / "tensors.bin").exists()
        return {"validation_loss": 7.0 + apart * (tool.SIDES[who].script is not None)}

    monkeypatch.setattr(tool, "run", run)
    if fine:
        found = tool.same_start(*corpus, {})
        assert found == pytest.approx({"litgpt": apart, "nanoGPT, each window once": apart})
    else:
        with pytest.raises(RuntimeError, match="litgpt does other work than ours: 0.003 apart"):
            tool.same_start(*corpus, {})


def test_another_commit_or_a_changed_file_of_nanogpt_is_refused(tmp_path, monkeypatch):
    def git(*words: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", "-C", str(tmp_path), *identity, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "train.py").write_text("pass\n")
    git("add", ".")
    git("commit", "-qm", "x")
    with pytest.raises(SystemExit, match="check out 3adf61e"):
        tool.check_nanogpt(tmp_path)
    monkeypatch.setattr(tool, "NANOGPT", git("rev-parse", "HEAD"))
    tool.check_nanogpt(tmp_path)
    (tmp_path / "train.py").write_text("other\n")
    with pytest.raises(SystemExit, match="has changes, undo them"):
        tool.check_nanogpt(tmp_path)


def test_the_recorded_rows_are_those_of_the_recorded_runs():
    document = json.loads((ROOT / "docs/results/convergence.json").read_text())
    assert document["rows"] == json.loads(json.dumps(tool.summary(document["runs"])))
