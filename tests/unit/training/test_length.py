"""How many epochs of each source a run reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from unit.data.written_data import write

from megatron.config.arguments import parse_arguments
from megatron.config.validate import resolve
from megatron.data.loader import build_data
from megatron.data.tokenizer import build_tokenizer
from megatron.training.banner import epoch_lines

BASE = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 10 "
    "--micro-batch-size 2 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 100 --eval-iters 0"
)


def configure(extra: str):
    config = parse_arguments(f"{BASE} {extra}".split()).config
    return resolve(config, 1, 101).config


def make(prefix: Path, tokens: int) -> str:
    return write(prefix, [np.arange(tokens) % 100], 100)


def test_epochs_of_each_source(tmp_path):
    """101 tokens are 10 samples of 10 tokens and a label; half of 60 samples are 3 epochs of them,
    half 1.5 of 20.
    """

    def lines(flags: str) -> list[str]:
        config = configure(flags)
        return epoch_lines(config, build_data(config, build_tokenizer(config.data)))

    one, two = make(tmp_path / "one", 101), make(tmp_path / "two", 201)
    assert lines(f"--train-data-path 1 {one} 1 {two} --global-batch-size 6 --train-iters 10") == [
        f"train: {one}: read 3 times in this run (3 epochs)",
        f"train: {two}: read 1.5 times in this run (1.5 epochs)",
    ]
    alone = f"--train-data-path {one} --global-batch-size 2 --train-iters"
    assert lines(f"{alone} 20")[0].startswith("train: ")
    assert lines(f"{alone} 21") == [
        f"warning: train: {one}: read 4.2 times in this run (4.2 epochs); "
        "more than 4 epochs teach little more"
    ]
    assert lines("--mock-data --train-iters 5") == []
