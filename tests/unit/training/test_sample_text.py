"""--log-sample-text: what the model writes at an evaluation is what its logits give, the same in
every layout, and reaches the log and wandb.
"""

from __future__ import annotations

import html
import io
import logging
import re
import sys
from pathlib import Path
from unittest import mock

import pytest
import tokenizers
import torch
from megatron.kernels import philox
from parity.layouts import BASE, FEATURES, NO_DROPOUT, Row
from parity.worker import one_thread, run_case
from unit.observe.wandb_files import history

from megatron.data.tokenizer import Tokenizer
from megatron.distributed import logs
from megatron.training import loop
from megatron.training.evaluate import END, LONGEST_PROMPT, readable, sample_page, write_sample
from megatron.training.run import Run
from pretrain_gpt import main
from tools.generate import choose

LENGTH = 16
FLAGS = (
    *BASE,
    *NO_DROPOUT.split(),
    *"--fp64 --train-iters 2 --lr-warmup-iters 1 --micro-batch-size 4 --num-layers 4".split(),
    *"--eval-interval 1 --log-sample-text 6".split(),
)
DOCUMENTS = "--reset-attention-mask --reset-position-ids"
CAPPED = "--untie-embeddings-and-output-weights --final-logit-softcapping 2 --window-size 4"
RUNS = [
    ("tp2 sp", CAPPED),
    ("pp2 zero-bubble", DOCUMENTS),
    ("dp2 zero1", ""),
    ("cp2", DOCUMENTS),
    ("dp2 ep2", f"{FEATURES['mla-moe'].flags} --num-layers 2"),
]


Ids = tuple[list[int], list[int]]  # of a prompt and of what follows it


def texts_of(flags: tuple[str, ...]) -> list[Ids]:
    """What a run has written, on this rank."""
    written = []

    def write(*arguments):
        written.append(write_sample(*arguments))
        return written[-1]

    with mock.patch.object(loop, "write_sample", write):
        run_case(flags)
    return written


def test_a_log_in_ascii_escapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Banner, prompt and text, a fault of the flags, and the log of a rank whose stream was not
    set up.
    """
    special = ["<|endoftext|>", "\u00e9\u2603"]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({t: k for k, t in enumerate(special)})
    )
    folder = tmp_path / "t\u00e9"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="ascii") for _ in range(2)]
    for name, stream in zip(("stdout", "stderr"), streams):
        monkeypatch.setattr(sys, name, stream)
    flags = """--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --lr 1e-2
    --micro-batch-size 1 --global-batch-size 1 --train-iters 2 --mock-data --eval-iters 1
    --eval-interval 1 --log-sample-text 3 --tokenizer-type HuggingFaceTokenizer""".split()
    assert main([*flags, "--tokenizer-model", str(folder), "--save", str(folder / "run")]) == 0
    assert main([*flags, "--tokenizer-model", str(folder / "missing")]) == 2
    out, err = (stream.buffer.getvalue().decode("ascii") for stream in streams)
    assert r"\xe9\u2603" in out.partition("sample text")[2] and r"t\xe9/run" in out
    assert r"t\xe9/missing" in err
    handler = logs.JobHandler()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    handler.emit(logging.LogRecord("megatron", logging.INFO, "", 0, "\u00e9", None, None))


@pytest.fixture(scope="module")
def alone() -> dict[str, list[Ids]]:
    """What one process writes, by its flags."""
    with one_thread():
        return {
            flags: texts_of((*FLAGS, *flags.split()))
            for flags in sorted({each for _, each in RUNS})
        }


@pytest.mark.parametrize(("layout", "flags"), RUNS, ids=str)
def test_every_layout_writes_what_one_process_writes(gloo_world, alone, layout, flags):
    words = Row(layout, "gpt").words
    found = gloo_world(words.ranks).run(texts_of, (*FLAGS, *flags.split(), *words.flags))
    assert found == [alone[flags]] * words.ranks
    assert len(alone[flags]) == 2 and all(len(written) == 6 for _, written in alone[flags])
    # an evaluation later the weights are others, and the random numbers the same
    (prompt, first), (again, second) = alone[flags]
    assert prompt == again and first != second


@pytest.mark.parametrize("flags", ["", "--untie-embeddings-and-output-weights --bf16"])
def test_it_is_what_the_logits_say(flags):
    """Against whole passes over the prefix alone, and the sampler of tools/generate.py."""
    compared = []

    def write(run: Run, source):
        prompt, written = write_sample(run, source)
        ids, key = list(prompt), philox.key(run.config.training.seed, "sample-text")
        assert ids == source.batch(0, 1).tokens[0, : len(ids)].tolist()
        for token in written:
            word = philox.philox4x32([torch.tensor([c]) for c in (len(ids), 0, 0, 0)], key)[0]
            logits = run.model.logits(torch.tensor([ids]))[0, -1].double()
            uniform = word.item() / 2**32
            expected = choose(logits, uniform, temperature=1.0, top_k=0, top_p=1.0)
            compared.append((token, expected))
            ids.append(token)
        return prompt, written

    kept = [flag for flag in FLAGS if flag != "--fp64" or "--bf16" not in flags]
    with mock.patch.object(loop, "write_sample", write), one_thread():
        run_case((*kept, *flags.split(), "--log-sample-text", "100"))
    found, expected = zip(*compared, strict=True)
    assert found == expected and len(found) == 2 * (LENGTH + 1 - min(LONGEST_PROMPT, 8))
    assert len(set(found)) > 4


def test_training_does_not_change():
    with one_thread():
        written = run_case(FLAGS)
        plain = run_case((*FLAGS, "--log-sample-text", "0"))
    assert written.metrics == plain.metrics and written.evaluations == plain.evaluations


def test_the_ends_of_documents_are_told():
    def decode(ids: list[int]) -> str:
        return "<" + "+".join(map(str, ids)) + ">"

    tokenizer = Tokenizer(9, 0, None, decode)
    prompt, written = (readable(ids, tokenizer) for ids in ([1, 0, 2], [3, 0, 0]))
    assert " ".join(f"{prompt} | {written}".split()) == f"<1> {END} <2> | <3> {END} {END}"
    assert "&lt;3&gt;" in sample_page(prompt, written) and "<3>" not in sample_page(prompt, written)


def test_the_log_and_wandb_have_it(tmp_path: Path, monkeypatch, capsys):
    """One text an evaluation, in wandb next to its iteration, read from its own files."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    flags = (*BASE, *"--train-iters 3 --eval-interval 1 --micro-batch-size 8".split())
    more = ("--log-sample-text", "5", "--wandb-project", "p", "--save", str(tmp_path))
    assert main([*flags, *more]) == 0
    lines = re.findall(r"sample text at iteration (\d+): (.*) \| (.*)", capsys.readouterr().out)
    assert [line[0] for line in lines] == ["1", "2", "3"]
    (folder,) = tmp_path.glob("wandb/offline-run-*/files")
    name = "train/sample-text/path"
    rows = [row for row in history(tmp_path) if name in row]
    found = [(row["iteration"], (folder / row[name]).read_text()) for row in rows]
    for (iteration, prompt, written), (at, page) in zip(lines, found, strict=True):
        assert at == int(iteration)
        text = html.unescape(re.sub("<.*?>", "|", page.split("<pre", 1)[1].split(">", 1)[1]))
        assert [" ".join(part.split()) for part in text.strip("|").split("|")] == [prompt, written]
        assert len(re.findall(r"\d+|" + END, written)) == 5
