"""How long a run is: iterations, samples and tokens through the ramp-up, and epochs of each
source.
"""

from __future__ import annotations

import numpy as np
import pytest
from megatron.tools._preprocess.writer import IndexedDatasetWriter

from megatron.config.arguments import parse_arguments
from megatron.config.groups import DataConfig
from megatron.config.validate import resolve
from megatron.data.loader import build_data
from megatron.data.tokenizer import build_tokenizer
from megatron.training.banner import epoch_lines, length_line, run_length

BASE = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 10 "
    "--micro-batch-size 2 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 100 --eval-iters 0"
)


def configure(extra: str):
    config = parse_arguments(f"{BASE} {extra}".split()).config
    return resolve(config, 1, 101).config


def make(prefix: str, tokens: int) -> str:
    writer = IndexedDatasetWriter(prefix, np.dtype("u2"))
    ids = np.arange(tokens, dtype="u2") % 100
    writer.add(ids, np.array([tokens]), np.array([1]))
    tokenizer = build_tokenizer(DataConfig(tokenizer_type="NullTokenizer", vocab_size=100))
    made = {
        "name": "NullTokenizer",
        "fingerprint": tokenizer.fingerprint,
        "vocab_size": 101,
        "eod": 100,
    }
    writer.finish({"max_id": 99, "eod_count": 0, "tokenizer": made, "text_bytes": tokens})
    return prefix


@pytest.mark.parametrize(
    "extra, iterations, samples",
    [
        ("--train-iters 7 --global-batch-size 4", 7, 28),
        ("--train-samples 30 --global-batch-size 4", 8, 32),  # the last step is whole
        # steps of 2, 2 and 4 samples
        ("--train-iters 3 --global-batch-size 6 --rampup-batch-size 2 2 8", 3, 8),
    ],
)
def test_iterations_samples_and_tokens(extra, iterations, samples):
    config = configure(f"--mock-data {extra}")
    assert run_length(config) == (iterations, samples)
    assert (
        length_line(config)
        == f"{iterations} iterations, {samples} samples, {10 * samples} tokens in all"
    )


def test_epochs_of_each_source(tmp_path):
    """101 tokens are 10 samples of 10 tokens and a label; half of 60 samples are 3 epochs of them,
    half 1.5 of 20.
    """
    one, two = make(str(tmp_path / "one"), 101), make(str(tmp_path / "two"), 201)
    config = configure(f"--train-data-path 1 {one} 1 {two} --global-batch-size 6 --train-iters 10")
    data = build_data(config, build_tokenizer(config.data))
    assert epoch_lines(config, data) == [
        f"train: {one}: read 3 times in this run (3 epochs)",
        f"train: {two}: read 1.5 times in this run (1.5 epochs)",
    ]
    config = configure(f"--train-data-path {one} --global-batch-size 2 --train-iters 21")
    (line,) = epoch_lines(config, build_data(config, build_tokenizer(config.data)))
    assert line == (
        f"warning: train: {one}: read 4.2 times in this run (4.2 epochs); more than 4 "
        "epochs teach little more"
    )
    config = configure(f"--train-data-path {one} --global-batch-size 2 --train-iters 20")
    (line,) = epoch_lines(config, build_data(config, build_tokenizer(config.data)))
    assert line.startswith("train: ")
    config = configure("--mock-data --train-iters 5")
    assert epoch_lines(config, build_data(config, build_tokenizer(config.data))) == []
