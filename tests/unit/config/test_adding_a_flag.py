"""Adding a flag is one edit, and a line for its name in other programs: a copy of the program gets
a field, and nothing else is missing.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BEFORE = "    sgd_momentum: float = "
FIELD = '''    nesterov_share: float = flag(
        0.5, "--nesterov", bound=SHARE, idle_without="--optimizer sgd", change=STEPS
    )
    """Share of Nesterov's correction in a step of SGD."""
'''
FLAGS = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32
    --micro-batch-size 2 --train-iters 2 --lr 0.1 --mock-data --tokenizer-type NullTokenizer
    --vocab-size 49 --save new""".split()
# Prints the faults or the notes of a command line.
READ = """
import sys
from megatron.config.arguments import parse_arguments
from megatron.config.errors import ArgumentErrors
from megatron.config.validate import resolve

for words in sys.argv[1].splitlines():
    try:
        print("valid", *resolve(parse_arguments(words.split()).config, 1, 50).notes, sep="\\n")
    except ArgumentErrors as error:
        print(*error.faults, sep="\\n")
"""
CHANGES = """
import sys
from megatron.config.arguments import parse_arguments
from megatron.training.resume import said_changes

old, new = (parse_arguments([*sys.argv[1:], *more]).config for more in ([], ["--nesterov", "0.9"]))
print(said_changes({"config": old.to_dict()}, new))
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """The program with one more field."""
    root = tmp_path_factory.mktemp("program")
    for part in ("megatron", "kernels", "tools"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / part, root / part, symlinks=True, ignore=ignored)
    for file in ("pretrain_gpt.py", "setup.py", "pyproject.toml"):
        shutil.copy(ROOT / file, root)
    (root / "docs").mkdir()
    groups = root / "megatron/config/groups.py"
    text = groups.read_text()
    assert text.count(BEFORE) == 1
    groups.write_text(text.replace(BEFORE, FIELD + BEFORE))
    names = root / "megatron/config/compatibility.toml"
    section = "[deepspeed.same]\n"
    key = '"optimizer.params.nesterov_share" = "--nesterov-share"\n'
    names.write_text(names.read_text().replace(section, section + key))
    return root


def run(copy: Path, *command: str) -> tuple[int, str]:
    """Exit code and output of a Python command in the copy."""
    done = subprocess.run(
        [sys.executable, *command], cwd=copy, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout + done.stderr


def read(copy: Path, *words: str) -> str:
    """What the command line FLAGS and `words` of the copy gives."""
    code, text = run(copy, "-c", READ, " ".join([*FLAGS, *words]))
    assert code == 0, text
    return text


def test_it_is_parsed_bounded_and_remarked_on(copy):
    wrong = "--optimizer sgd --nesterov 2", "--optimizer sgd --nesterov-shar 0.25"
    lines = "\n".join(" ".join([*FLAGS, words]) for words in (*wrong, "--nesterov-share 0.25"))
    code, text = run(copy, "-c", READ, lines)
    assert code == 0, text
    assert "--nesterov-share 2.0: must be above 0 and at most 1" in text
    assert "--nesterov-shar 0.25: unknown flag; did you mean --nesterov-share?" in text
    assert "valid\n" in text and "--nesterov-share 0.25: has no effect without --opt" in text


def test_a_deepspeed_file_and_a_resume_know_it(copy):
    (copy / "ds.json").write_text('{"optimizer": {"params": {"nesterov_share": 0.9}}}')
    words = "--optimizer sgd --deepspeed_config ds.json --nesterov-share 0.5".split()
    assert "contradicts --nesterov-share 0.5" in read(copy, *words)
    code, text = run(copy, "-c", CHANGES, *FLAGS)
    assert code == 0 and "--nesterov-share: checkpoint 0.5, command line 0.9" in text


def test_the_page_of_flags_is_made_anew(copy):
    code, text = run(copy, "tools/document_flags.py")
    page = (copy / "docs/flags.md").read_text()
    assert code == 0, text
    assert "`--nesterov-share`, `--nesterov`" in page and "Share of Nesterov's correction" in page
