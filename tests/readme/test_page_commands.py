"""Commands of pretrain_gpt.py in the README and on the pages of docs/: their flags are read and
resolved, on computed tokens, since data and tokenizers are the reader's.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from programs import output_of

from megatron.config.arguments import parse_arguments
from megatron.config.validate import resolve

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DATA = {
    *("--data-path", "--train-data-path", "--valid-data-path"),
    *("--tokenizer-type", "--tokenizer-model", "--vocab-file", "--merge-file"),
}
# what a reader puts in, and settings that a checkpoint gives
INCOMPLETE = re.compile(r"<|\.\.\.|FLAGS|--use-checkpoint-args|--config ")


@cache
def preset(name: str) -> dict[str, list[str]]:
    """The flags that `preset NAME` sets, by the name of their variable."""
    script = f'source scripts/presets.sh && preset {name} && printf "%s\\n" "${{{{}}[@]}}"'
    return {
        variable: output_of(script.replace("{}", variable), ROOT).split()
        for variable in ("model", "fits")
    }


def commands() -> Iterator[tuple[str, str, str]]:
    """(page, preset named before it, command) of every complete command in a block."""
    for page in [README, *sorted((ROOT / "docs").glob("*/*.md"))]:
        text, named = page.read_text().replace("\\\n", " "), ""
        for line in text.splitlines():
            named = (re.findall(r"preset ([\w.-]+)", line) or [named])[-1]
            if line.startswith(("    ", "source ")) and "pretrain_gpt.py" in line:
                if not INCOMPLETE.search(line):
                    command = line.split("  #")[0].replace("$((vocabulary - 1))", "128255")
                    yield page.stem, named, " ".join(command.split())


CASES = list(commands())


def words_of(command: str, named: str) -> list[str]:
    """The flags, with those of the preset and computed tokens."""
    words: list[str] = []
    for word in shlex.split(command):
        variable = re.fullmatch(r"\$\{(model|fits)\[@\]\}", word)
        words += preset(named)[variable[1]] if variable else [word]
    kept, dropping = [], False
    for word in words:
        if word.startswith("--"):
            dropping = word in DATA
        kept += [] if dropping else [word]
    return kept if "--mock-data" in kept else [*kept, "--mock-data", "--vocab-size", "128255"]


def test_there_are_commands():
    assert len(CASES) >= 6 and len({page for page, _, _ in CASES}) >= 5, CASES


@pytest.mark.parametrize(
    "page, named, command", CASES, ids=[f"{page}-{i}" for i, (page, _, _) in enumerate(CASES)]
)
def test_the_flags_of_a_command_are_valid(page: str, named: str, command: str):
    words = words_of(command.partition("pretrain_gpt.py")[2], named)
    ranks = re.search(r"--world-size (\d+)|--nproc-per-node (\d+)", command)
    read = parse_arguments(words)
    resolve(read.config, int(ranks[1] or ranks[2]) if ranks else 1, None)
    assert read.not_done == [], read.not_done


def test_the_readmes_job_is_valid():
    """On 16 nodes of 8 GPUs."""
    [block] = re.findall(r"^```text\n(PRESET=.*?)^```", README.read_text(), re.S | re.M)
    given = shlex.split(block.replace("\\\n", " "))
    values = dict(word.split("=", 1) for word in given if re.match(r"[A-Z]+=", word))
    assert given[-2:] == ["--nodes=16", "scripts/train.sbatch"] and int(values["TOKENS"]) > 0
    command = f"${{model[@]}} ${{fits[@]}} {values['DATA']} --train-samples 1000000"
    config = parse_arguments(words_of(command, values["PRESET"])).config
    config = resolve(config, 128, None).config
    sizes = config.distributed
    assert (sizes.tensor_model_parallel_size, sizes.pipeline_model_parallel_size) == (8, 4)
