"""Text from a checkpoint."""

import pytest
import torch
from megatron.tools import generate as tool

from pretrain_gpt import main

FLAGS = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32
--micro-batch-size 8 --train-iters 60 --mock-data
--tokenizer-type NullTokenizer --vocab-size 19 --lr 1e-2 --eval-iters 0 --hidden-dropout 0
--attention-dropout 0""".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generate")
    assert main([*FLAGS, "--save", str(folder)]) == 0
    return folder


def text(capsys, folder, *flags):
    assert tool.main(["--load", str(folder), *map(str, flags)]) == 0
    return capsys.readouterr().out


def test_the_model_has_learned_the_progressions(folder, capsys):
    """Mock documents count up in steps of 1 to 3; greedy continuation of 2 4 6 counts on by
    two for most tokens.
    """
    prompt = "--prompt", "2 4 6 8 10"
    shown = text(capsys, folder, *prompt, "--num-tokens", 8, "--temperature", 0)
    ids = [int(word) for word in shown.split()]
    assert ids[:5] == [2, 4, 6, 8, 10] and len(ids) >= 6
    steps = [(b - a) % 19 for a, b in zip(ids[4:], ids[5:])]
    assert steps.count(2) >= len(steps) / 2


def test_a_function_of_seed_and_flags(folder, capsys):
    flags = ("--prompt", "1 2", "--num-tokens", 20)
    first = text(capsys, folder, *flags, "--seed", 3)
    assert text(capsys, folder, *flags, "--seed", 3) == first
    assert text(capsys, folder, *flags, "--seed", 4) != first
    greedy = text(capsys, folder, *flags, "--temperature", 0)
    assert text(capsys, folder, *flags, "--top-k", 1) == greedy
    assert text(capsys, folder, *flags, "--top-p", 1e-9) == greedy
    # no prompt, and past the longest sequence
    assert text(capsys, folder, "--num-tokens", 40, "--seed", 1)


def test_choose():
    logits = torch.log(torch.tensor([0.1, 0.5, 0.15, 0.25]))
    free = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    assert [
        tool.choose(logits, u, **free) for u in (0.0, 0.49, 0.51, 0.74, 0.76, 0.91, 0.9999999)
    ] == [1, 1, 3, 3, 2, 0, 0]
    assert {tool.choose(logits, u / 100, **{**free, "top_k": 2}) for u in range(100)} == {1, 3}
    assert {tool.choose(logits, u / 100, **{**free, "top_p": 0.8}) for u in range(100)} == {1, 3, 2}
    draws = [
        tool.choose(logits, (u + 0.5) / 1000, **{**free, "temperature": 0.5}) for u in range(1000)
    ]
    assert draws.count(1) / 1000 == pytest.approx(0.25 / 0.345, abs=2e-3)  # squared probabilities


def test_errors_name_the_flag(folder, capsys):
    with pytest.raises(SystemExit):
        tool.main(["--load", str(folder), "--top-p", "0"])
    assert "--top-p 0.0: give a number above 0" in capsys.readouterr().err
