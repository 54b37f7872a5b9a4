"""The benchmark of whole training runs: all sides do the same work."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from megatron.benchmarks import convergence as tool

from megatron.config.arguments import parse_arguments
from megatron.config.validate import resolve
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


def test_the_recorded_rows_are_those_of_the_recorded_runs():
    document = json.loads((ROOT / "docs/results/convergence.json").read_text())
    assert document["rows"] == json.loads(json.dumps(tool.summary(document["runs"])))
