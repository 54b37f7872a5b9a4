"""The examples do what their pages promise, started by the commands on these pages."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from programs import output_of, run_script
from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = sorted(path for path in (ROOT / "examples").iterdir() if path.is_dir())
RECIPES = ROOT / "examples/containers"


def commands(example: str) -> list[str]:
    """The commands of a page that start the example's Python script."""
    page = (ROOT / "examples" / example / "README.md").read_text().replace("\\\n", " ")
    lines = [line.split("  #")[0].strip() for line in page.splitlines() if line.startswith("    ")]
    return [line for line in lines if f"examples/{example}/" in line and ".py" in line]


def start(command: str, folder: Path, *more: str) -> str:
    """The output of an example's command, started in `folder` with the checkout on the path."""
    words = [*shlex.split(command), *more]
    script = next(i for i, word in enumerate(words) if word.startswith("examples/"))
    words = [str(ROOT / word) if (ROOT / word).is_file() else word for word in words]
    if words[0] == "torchrun":
        words[:1] = [sys.executable, "-m", "torch.distributed.run"]
    elif "custom_optimizer" in command:  # it has to come before the flags are known
        words[:script] = [sys.executable]
    else:
        return run_script(words[script:], folder)
    return output_of(words, folder, {**os.environ, "PYTHONPATH": str(ROOT)})


def losses(shown: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"lm loss: (\S+)", shown)]


def tensors(folder: Path) -> set[str]:
    """What the run's only checkpoint holds: names of weights and of their optimizer states."""
    found = set()
    for shard in folder.glob("iter_*/*.safetensors"):
        with safe_open(shard, "pt") as opened:
            found |= {key.split("@")[0] for key in opened.keys()}
    return found


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_an_example_is_a_script_and_a_short_page(folder: Path):
    files = [path for path in folder.iterdir() if path.is_file()]
    page = folder / "README.md"
    assert page in files and len(files) == (3 if folder == RECIPES else 2)
    assert 8 <= len(page.read_text().splitlines()) <= 16
    assert f"`examples/{folder.name}/`" in (ROOT / "docs/README.md").read_text()


def test_pretraining_in_forty_lines(tmp_path: Path):
    assert len((ROOT / "examples/pretrain/pretrain.py").read_text().splitlines()) <= 40
    shown = start(commands("pretrain")[0], tmp_path)
    found = losses(shown)
    assert len(found) == 4 and found[-1] < found[0]
    assert "training is complete: 160 samples consumed" in shown


@pytest.mark.full
def test_pretraining_continues_in_another_layout(tmp_path: Path):
    """A second start loads what the first has saved."""
    for command in commands("pretrain"):
        shown = start(command, tmp_path)
    assert "loaded checkpoint runs/example/iter_0000020 at iteration 20" in shown
    assert "rank 1 of 2 holds" in shown


@pytest.mark.parametrize(
    "ranks, more",
    [
        (1, ""),
        pytest.param(1, "--num-experts 4 --disable-bias-linear", marks=pytest.mark.full),
        pytest.param(2, "", marks=pytest.mark.full),
    ],
)
def test_a_custom_layer(tmp_path: Path, ranks: int, more: str):
    """It trains, with experts and on two tensor-parallel ranks too, and its weights are in the
    checkpoint.
    """
    (command,) = commands("custom_layer")
    if ranks == 1:
        command = re.sub("torchrun --nproc-per-node 2", "python", command)
        command = re.sub("--tensor-model-parallel-size 2 --sequence-parallel", "", command)
    found = losses(start(command, tmp_path, *more.split(), "--save", str(tmp_path / "run")))
    assert len(found) == 4 and found[-1] < found[0]
    names = tensors(tmp_path / "run")
    assert {"layers.0.adapter.down.weight", "layers.1.adapter.up.weight"} <= names


def test_a_custom_optimizer(tmp_path: Path):
    """Its only state is in the checkpoint."""
    (command,) = commands("custom_optimizer")
    found = losses(start(command, tmp_path, "--save", str(tmp_path / "run")))
    assert len(found) == 4 and found[-1] < found[0]
    states = {name.split(".")[1] for name in tensors(tmp_path / "run") if "optimizer." in name}
    assert states == {"exp_avg"}


@pytest.mark.full
def test_a_custom_optimizer_under_zero_3(tmp_path: Path):
    (command,) = commands("custom_optimizer")
    more = ["--fp64", "--global-batch-size", "8"]
    on_two = command.replace("python ", "torchrun --nproc-per-node 2 ")
    sharded = losses(start(on_two, tmp_path, *more, "--zero-stage", "3"))
    assert sharded == losses(start(command, tmp_path, *more))


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_custom_data_source(tmp_path: Path, number: int):
    """On one rank and on two. Bytes of English text have less entropy than 256 ids at random: 5.55
    nats.
    """
    found = losses(start(commands("custom_data")[number], tmp_path))
    assert len(found) == 5 and found[-1] < 4


def test_the_recipes_of_containers_copy_what_an_installation_needs():
    """Both copy the same files, which are those that the wheel is built from."""
    docker = (RECIPES / "Dockerfile").read_text()
    apptainer = (RECIPES / "apptainer.def").read_text()
    copied = {
        word for line in re.findall(r"^COPY (.+) \S+$", docker, re.M) for word in line.split()
    }
    section = re.search(r"%files\n(.*?)\n\n", apptainer, re.S)[1]
    assert copied == {line.split()[0] for line in section.splitlines()}
    needed = {"pyproject.toml", "setup.py", "README.md", "LICENSE", "megatron", "kernels", "tools"}
    assert copied == needed | {path.name for path in ROOT.glob("*.py")}
    assert all((ROOT / name).exists() for name in copied)
