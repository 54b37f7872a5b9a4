"""docs/recipe.md: its command lines are valid, do what the page promises, and train a small
model.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from programs import output_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/recipe.md").read_text()
BLOCKS = [
    block.replace("\\\n", " ") for block in re.findall(r"^```text\n(.*?)^```", PAGE, re.S | re.M)
]
PREPARE = "source scripts/presets.sh && preset speedrun-124m"


def run_flags() -> str:
    """What follows the preset's flags in the command for one machine."""
    [block] = [block for block in BLOCKS if "torchrun" in block]
    command = " ".join(block.split())
    start = (
        f'{PREPARE} && torchrun --nproc-per-node 8 pretrain_gpt.py "${{model[@]}}" "${{fits[@]}}" '
    )
    assert command.startswith(start)
    return command.removeprefix(start)


def settings(flags: list[str]) -> dict[str, list[str]]:
    """{flag: [flag, its values]} of a command line."""
    found: dict[str, list[str]] = {}
    for word in flags:
        if word.startswith("--"):
            found[word] = []
            name = word
        found[name].append(word)
    return found


def without_data(flags: str) -> str:
    """The flags on computed tokens."""
    ours = re.sub(
        r"--(train-data-path|valid-data-path|tokenizer-type|vocab-file|merge-file) \S+", "", flags
    )
    return f"{ours} --mock-data --vocab-size 50256"


@pytest.mark.parametrize(("ranks", "batch"), [(1, "8 micro-batches"), (8, "1 micro-batches")])
@pytest.mark.full
def test_the_run_is_what_the_page_says(ranks, batch, clone, environment):
    flags = f'"${{model[@]}}" "${{fits[@]}}" {without_data(run_flags())} --world-size {ranks}'
    shown = output_of(f"{PREPARE} && python pretrain_gpt.py {flags} --dry-run", clone, environment)
    parameters = re.search(r"([\d,]+) parameters \(", shown)[1]
    iterations = re.search(r"([\d,]+) iterations, ([\d,]+) samples", shown)
    assert f"there are {parameters} parameters" in " ".join(PAGE.split())
    assert f"{iterations[1]} steps of 524,288 tokens" in " ".join(PAGE.split())
    assert f"x {batch} x dp {ranks} = global batch 512; sequence 1024; 524,288 tokens" in shown
    peak = re.search(r"the plan needs ([\d.]+) GiB", shown)[1]
    assert re.search(rf"^\| {ranks} H100 \| 64, {batch.split()[0]} \| {peak} GiB \|", PAGE, re.M)


def test_the_job_asks_for_the_same_run():
    [block] = [block for block in BLOCKS if "sbatch" in block]
    given = shlex.split(block)
    values = dict(word.split("=", 1) for word in given if re.match(r"[A-Z]+=", word))
    behind = given[given.index("scripts/train.sbatch") + 1 :]
    script = (ROOT / "scripts/train.sbatch").read_text()
    saves = re.search(r"--save \"\$save\" --load \"\$save\" --save-interval 1000", script)
    samples = str(int(values["TOKENS"]) // 1024)
    job = [*values["DATA"].split(), *behind, "--train-samples", samples]
    job += ["--save", values["SAVE"], "--load", values["SAVE"], "--save-interval", "1000"]
    assert saves and values["PRESET"] == "speedrun-124m"
    assert settings(job) == settings(shlex.split(run_flags()))


@pytest.mark.full
@pytest.mark.slow
def test_a_small_corpus_is_tokenised_and_trained_by_the_pages_commands(
    clone: Path, environment: dict[str, str]
):
    """Shapes and lengths are overridden, everything else is the recipe's."""
    data = clone / "data"
    data.mkdir()
    letters = [chr(code) for code in range(33, 127)] + ["\u0120", "\u010a"]  # space, line end
    vocabulary = {piece: i for i, piece in enumerate([*letters, "th", "the", "<|endoftext|>"])}
    (data / "vocab.json").write_text(json.dumps(vocabulary))
    (data / "merges.txt").write_text("#version: 0.2\nt h\nth e\n")
    text = "the cat sat on the mat and the dog on the log"
    lines = [json.dumps({"text": " ".join([text] * (1 + i % 5))}) + "\n" for i in range(200)]
    (data / "fineweb-valid.jsonl").write_text("".join(lines[:40]))
    (data / "fineweb-train.jsonl").write_text("".join(lines))
    [block] = [block for block in BLOCKS if "preprocess_data" in block]
    for command in block.strip().splitlines():
        output_of(command.replace("--workers 8", "--workers 1"), clone, environment)
    small = """--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 32
        --micro-batch-size 4 --global-batch-size 8 --train-samples 480 --lr-wsd-decay-samples 320
        --lr-warmup-samples 80 --eval-interval 60 --eval-iters 2 --log-interval 20""".split()
    command = (
        f'python pretrain_gpt.py "${{model[@]}}" "${{fits[@]}}" {run_flags()} {" ".join(small)}'
    )
    shown = output_of(f"{PREPARE} && {command}", clone, environment)
    rates = re.findall(r"learning rate: (\S+)", shown)
    assert [float(rate) for rate in rates] == pytest.approx([1.5e-3, 0.75e-3, 0.0])
    losses = [float(loss) for loss in re.findall(r"lm loss: (\S+)", shown)]
    assert losses[-1] < losses[0] - 0.5
    found = re.search(r"validation loss at iteration 60 \| lm loss value: (\S+)", shown)
    assert float(found[1]) < losses[0] - 0.5
