"""Adding a flag is one edit, and a line for its name in other programs: a copy of the program gets
a field, and nothing else is missing.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
BEFORE = "    sgd_momentum: float = "
FIELD = '''    nesterov_share: float = flag(
        0.5, "--nesterov", bound=SHARE, idle_without="optimizer=sgd", change=STEPS
    )
    """Share of Nesterov's correction in a step of SGD."""
'''
# Prints the faults or notes of command lines, a change at a resume, and the page of flags.
PROGRAM = """
import sys
sys.path.insert(0, "tools")
from document_flags import document
from megatron.config.arguments import parse_arguments
from megatron.config.errors import ArgumentErrors
from megatron.config.validate import resolve
from megatron.training.resume import logged_changes

FLAGS = '''--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32
    --micro-batch-size 2 --train-iters 2 --lr 0.1 --mock-data --tokenizer-type NullTokenizer
    --vocab-size 49 --save new'''
for words in (
    "--optimizer sgd --nesterov 2",
    "--optimizer sgd --nesterov-shar 0.25",
    "--nesterov-share 0.25",
    "--optimizer sgd --deepspeed_config ds.json --nesterov-share 0.5",
):
    try:
        print(*resolve(parse_arguments(f"{FLAGS} {words}".split()).config, 1, 50).notes, sep="\\n")
    except ArgumentErrors as error:
        print(*error.faults, sep="\\n")
old, new = (parse_arguments(f"{FLAGS} {more}".split()).config for more in ("", "--nesterov 0.9"))
print(logged_changes({"config": old.to_dict()}, new), document())
"""


def test_a_field_is_all_that_a_flag_needs(tmp_path):
    for part in ("megatron", "kernels", "tools"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / part, tmp_path / part, symlinks=True, ignore=ignored)
    groups = tmp_path / "megatron/config/groups.py"
    assert groups.read_text().count(BEFORE) == 1
    groups.write_text(groups.read_text().replace(BEFORE, FIELD + BEFORE))
    names, section = tmp_path / "megatron/config/compatibility.toml", "[deepspeed.same]\n"
    key = '"optimizer.params.nesterov_share" = "--nesterov-share"\n'
    names.write_text(names.read_text().replace(section, section + key))
    (tmp_path / "ds.json").write_text('{"optimizer": {"params": {"nesterov_share": 0.9}}}')
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    for text in (
        "--nesterov-share 2: must be above 0 and at most 1",
        "--nesterov-shar 0.25: unknown flag; did you mean --nesterov-share?",
        "--nesterov-share 0.25: has no effect without --optimizer sgd",
        "contradicts --nesterov-share 0.5",
        "--nesterov-share: checkpoint 0.5, command line 0.9",
        "`--nesterov-share`, `--nesterov`",
        "Share of Nesterov's correction",
    ):
        assert text in done.stdout, text
