"""A wheel and `pip install -e .` give a working `megatron` and the commands `mgpt-*`, also next to
PyPI's `kernels` and megatron-core's namespace package."""

from __future__ import annotations

import json
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from programs import output_of

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
CHECK = """
import importlib.util, kernels, megatron.config.groups, pretrain_gpt
found = importlib.util.find_spec("megatron.kernels.philox").origin
print(kernels.theirs, found, megatron.__file__, pretrain_gpt.__file__)
"""
# Every command's --help in one process, which imports torch once. Loading them leaves sys.path
# alone.
HELP = """
import contextlib, io, json, sys
from importlib.metadata import entry_points
before, pages = list(sys.path), {}
for command in entry_points(group="console_scripts"):
    if command.name.startswith("mgpt-"):
        sys.argv, page = [command.name, "--help"], io.StringIO()
        with contextlib.redirect_stdout(page):
            try:
                code = command.load()()
            except SystemExit as ended:
                code = ended.code
        pages[command.name] = [code or 0, page.getvalue()]
print(json.dumps([before == sys.path, pages]))
"""
MODEL = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8".split()
TRAINING = "--micro-batch-size 1 --train-iters 2 --lr 1e-3 --eval-iters 0".split()
DATA = "--data-path mine_text_document --tokenizer-type NullTokenizer --vocab-size 99".split()


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A virtual environment that sees this one's packages behind its own and holds other projects'
    `kernels` and `megatron.core`."""
    output_of([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], tmp_path)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    site = tmp_path / f"venv/lib/{version}/site-packages"
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (site / "kernels").mkdir()
    (site / "kernels/__init__.py").write_text("theirs = True\n")
    (site / "megatron/core").mkdir(parents=True)
    (site / "megatron/core/__init__.py").write_text("")
    return tmp_path / "venv"


def pip(*arguments: str | Path, cwd: Path) -> None:
    """Run pip without a network and without touching dependencies."""
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    output_of([sys.executable, "-m", "pip", *arguments, *offline], cwd)


def check_imports(venv: Path, home: Path, folder: Path) -> None:
    """Our modules are found below `home`, and PyPI's `kernels` is still itself."""
    theirs, *paths = output_of([venv / "bin/python", "-c", CHECK], folder).split()
    assert theirs == "True" and all(path.startswith(str(home)) for path in paths), paths


def data_files() -> set[str]:
    """The names in a wheel of the files that are no modules, of every package in it. The list of
    compiled kernels is for kernels/tools/, which stays in the checkout.
    """
    tracked = output_of(["git", "ls-files", "megatron", "kernels", "tools"], ROOT).split()
    return {
        name if name.startswith("megatron/") else f"megatron/{name}"
        for name in tracked
        if not name.endswith(".py") and name != "kernels/manifest.json"
    }


def test_wheel(venv: Path, clone: Path, tmp_path: Path):
    """The wheel of the sdist is complete; two of its commands prepare data and train."""
    sdist = "from setuptools import build_meta; build_meta.build_sdist('dist')"
    output_of([sys.executable, "-c", sdist], clone)
    (archive,) = (clone / "dist").glob("*.tar.gz")
    pip("wheel", archive, "--wheel-dir", tmp_path / "wheels", cwd=tmp_path)
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    missing = data_files() - set(zipfile.ZipFile(wheel).namelist())
    assert len(data_files()) >= 6 and not missing, missing
    pip("--python", venv / "bin/python", "install", wheel, cwd=tmp_path)
    check_imports(venv, venv, tmp_path)

    path_is_untouched, pages = json.loads(output_of([venv / "bin/python", "-c", HELP], tmp_path))
    assert path_is_untouched and pages.keys() == COMMANDS.keys()
    assert [name for name, (code, page) in pages.items() if code or len(page) < 200] == []

    command = {name: venv / "bin" / name for name in COMMANDS}
    (tmp_path / "mine.jsonl").write_text(
        json.dumps({"text": "1 2 3 4 5 6 7 8 9 10 11 12 13"}) + "\n"
    )
    files = ["--input", "mine.jsonl", "--output-prefix", "mine", *DATA[2:], "--append-eod"]
    output_of([command["mgpt-preprocess"], *files], tmp_path)
    flags = [*MODEL, *TRAINING, *DATA, "--split", "100,0,0", "--save", "run", "--log-interval", "1"]
    output_of([command["mgpt-pretrain"], *flags], tmp_path)


@pytest.mark.full
def test_editable(venv: Path, clone: Path, tmp_path: Path):
    """An editable installation finds the checkout."""
    pip("--python", venv / "bin/python", "install", "-e", ".", cwd=clone)
    check_imports(venv, clone, tmp_path)
    flags = [*MODEL, *TRAINING, "--mock-data", "--vocab-size", "99", "--dry-run"]
    output_of([venv / "bin/mgpt-pretrain", *flags], tmp_path)
