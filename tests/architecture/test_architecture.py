"""The checkout keeps its rules, and the checker finds each kind of breach."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from aliases import NEVER_TRACED, aliased_outputs
from rules import LONGEST_FILE, MAY_IMPORT, breaches
from selection import LONG_FILES

ROOT = Path(__file__).resolve().parents[2]


def test_the_checkout_keeps_the_rules():
    found = breaches(ROOT)
    assert not found, "\n" + "\n".join(found)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small checkout in which every package imports what it may."""
    for package, allowed in MAY_IMPORT.items():
        folder = tmp_path / ("kernels" if package == "kernels" else f"megatron/{package}")
        folder.mkdir(parents=True)
        if package != "kernels":
            (folder / "__init__.py").write_text("")
        imports = [
            f"import megatron.{other}" for other in sorted({*allowed, "config"} - {"", package})
        ]
        (folder / "good.py").write_text("\n".join(["import torch", *imports, ""]))
    (tmp_path / "megatron/__init__.py").write_text('__version__ = "0"\n')
    for folder in ("tools", "benchmarks", "kernels/tools"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tool.py").write_text(
            "from megatron.data import good\nfrom megatron.training import good as also\n"
        )
    assert breaches(tmp_path) == []
    return tmp_path


# A file and its text, with \n for the end of a line, and below it what is reported.
BREACHES = r"""
megatron/model/bad.py: def f():\n    from megatron.parallel import zero
    model may not import megatron.parallel.zero
megatron/model/bad.py: from megatron import optimizer
    model may not import megatron.optimizer
megatron/model/bad.py: from ..training import loop
    model may not import megatron.training.loop
megatron/config/bad.py: import megatron.model.arithmetic
    config may not import megatron.model.arithmetic
megatron/data/bad.py: import importlib\nimportlib.import_module('megatron.training.loop')
    data may not import megatron.training.loop
megatron/data/bad.py: import importlib\nimportlib.import_module('megatron.' + 'observe')
    imports a computed name
megatron/data/bad.py: from megatron import __version__
    data may not import megatron.__version__
kernels/bad.py: from megatron.model import linear
    kernels may not import megatron.model.linear
kernels/__init__.py:
    must not exist
tools/bad.py: import kernels.philox
    imports `kernels`
kernels/bad.py: import megatron.kernels.tools.tune
    a program that
megatron/training/bad.py: from megatron import benchmarks
    a program that
tools/bad.py: import sys\nsys.path.append('x')
    edits sys.path
megatron/__init__.py: from megatron.model import gpt
    the package itself imports nothing
megatron/data/extra/bad.py:
    has no __init__.py
megatron/novelty/__init__.py:
    is a package without a rule
tools/bad.py: import torch\ntorch.load('x', weights_only=True)
    calls torch.load
tools/_convert/pickles.py: import torch\ntorch.load('x', weights_only=False)
    calls torch.load without weights_only=True
tools/_convert/pickles.py: import pickle\npickle.loads(b'')
    calls pickle.loads
tools/_convert/other.py: import pickle
    imports pickle
megatron/distributed/bad.py: def f():\n    global state
    global statement
megatron/training/bad.py: import os\nos.environ['DEBUG']
    reads an environment variable
megatron/training/bad.py: import os\nos.environ.get('DEBUG')
    reads an environment variable
megatron/data/bad.py: class Same:\n    pass\n\n\nclass Same:\n    pass
    there is a class Same in megatron/data/bad.py:1 already
tools/bad.py: PATH = '/home/somebody/data'
    a path of one machine
scripts/bad.sh: cd /work/here
    a path of one machine
""".strip().splitlines()
LARGE = [
    ("megatron/data/bad.py: def f():\n" + "    a = 1 + 2\n" * 60, "f has 422 syntax nodes"),
    ("megatron/data/bad.py: " + "x = 1\n" * (LONGEST_FILE + 1), "the most is 850"),
]


@pytest.mark.parametrize("given, message", [*zip(BREACHES[::2], BREACHES[1::2]), *LARGE])
def test_each_breach_is_found(tree: Path, given: str, message: str):
    file, _, text = given.partition(":")
    (tree / file).parent.mkdir(exist_ok=True)
    (tree / file).write_text(text.strip().replace("\\n", "\n"))
    (found,) = breaches(tree)
    assert message.strip() in found and found.startswith(file.rsplit("/", 1)[0])


# autograd.Function whose forward returns `{}`; `old_rotation` is how rotary embedding once was
FUNCTION = """
import torch

def old_rotation(x, cos, sin, direction):
    width = cos.shape[-1]
    turning = x if width == x.shape[-1] else x[..., :width]
    first, second = turning.chunk(2, dim=-1)
    swapped = torch.cat((second, first), dim=-1)
    y = (turning * cos).addcmul_(swapped, sin, value=direction).to(x.dtype)
    return y if turning is x else torch.cat((y, x[..., width:]), dim=-1)

def converted(y, x):
    return y.to(x.dtype)

def converted_to_another(y, x):
    turned = y * 2
    return turned if turned.dtype == x.dtype else turned.to(x.dtype)

class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sin):
        y = torch.mul(x, sin)
        z = x + y
        z += 1
        saved = (y * 2).add_(1)
        w = x - y
        wide = w.to(torch.float32)
        ctx.save_for_backward(saved.to(x.dtype), wide)
        return {}

    @staticmethod
    def backward(ctx, dy):
        return dy.mul_(2).to(dy.dtype), None
"""


@pytest.mark.parametrize(
    "output, where",
    [
        ("old_rotation(x, x, sin, 1)", "y = (turning"),
        ("x, old_rotation(x, x, sin, 1)[0]", "return x, old"),
        ("(y, z)", "z += 1"),
        ("w", "wide = "),
        ("y.add_(1)", "return y.add_"),
        ("y.contiguous()", "return y.contiguous"),
        ("converted(y, x)", "return y.to"),
        ("y if sin is None else sin", "return y if"),
        ("torch.mul(y, y, out=z)", "return torch.mul"),
        ("converted_to_another(y, x)", ""),
        ("y, x.view_as(x), y.view(-1).clone(), z * 2, saved + wide", ""),
    ],
)
def test_an_output_that_is_an_intermediate_result_is_found(tree: Path, output: str, where: str):
    text = FUNCTION.replace("{}", output)
    (tree / "megatron/model/bad.py").write_text(text)
    lines = text.splitlines()
    found = {lines[int(each.split(":")[1]) - 1].strip() for each in breaches(tree)}
    assert len(found) == bool(where) and all(line.startswith(where) for line in found), found


def test_functions_that_are_never_traced_need_their_exemption():
    found = {
        name
        for file in (ROOT / "megatron").rglob("*.py")
        for name, _ in aliased_outputs(ast.parse(file.read_text()))
    }
    assert found == set(NEVER_TRACED)


def test_modules_name_modules_that_exist():
    """In the first docstring of each module of the packages that make a step."""
    for package in ("model", "parallel", "optimizer", "training"):
        for file in sorted((ROOT / "megatron" / package).rglob("[!_]*.py")):
            text = ast.get_docstring(ast.parse(file.read_text())) or ""
            named = re.findall(r"[a-z_]+(?:/[a-z_]+)*\.py", text)
            places = (ROOT, ROOT / "megatron", file.parent)
            gone = [name for name in named if not any((at / name).exists() for at in places)]
            assert not gone, f"{file} names {gone}"


@pytest.mark.parametrize(
    "command",
    [
        "ruff check --output-format concise",
        "ruff format --check",
        pytest.param("mypy", marks=pytest.mark.full),
    ],
)
def test_a_tool_finds_nothing(command: str):
    """With the settings of pyproject.toml."""
    if command == "mypy":
        pytest.importorskip("mypy")
    words = [sys.executable, "-m", *command.split()]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_line_is_wider_than_100_columns():
    """A formatter leaves strings and comments alone."""
    folders = "benchmarks campaigns examples kernels megatron scripts tests tools".split()
    files = [*ROOT.glob("*.py"), *(f for name in folders for f in (ROOT / name).rglob("*.py"))]
    lines = {f"{f}:{n}": s for f in files for n, s in enumerate(f.read_text().splitlines(), 1)}
    assert not [place for place, line in lines.items() if len(line) > 100]


def test_the_long_files_that_are_started_first_exist():
    assert not [name for name in LONG_FILES if not (ROOT / name).is_file()]
