"""--load of another program's checkpoint names the converter, and folders that cannot be made the
cause.
"""

from __future__ import annotations

import os
import shutil

import pytest
from config_lines import faults

from megatron.config.foreign_checkpoint import foreign_checkpoint


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make(folder, files: str) -> None:
    for name in files.split():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")


@pytest.mark.parametrize(
    "files, flag",
    [
        ("config.json model.safetensors.index.json", "--from-huggingface"),
        ("latest_checkpointed_iteration.txt iter_0000010/common.pt", "--from-megatron"),
        ("iter_0000010/mp_rank_00/model_optim_rng.pt", "--from-megatron"),
        (".metadata __0_0.distcp", "--from-megatron"),
        ("latest global_step10/mp_rank_00_model_states.pt", "--from-deepspeed"),
    ],
)
def test_the_converter_is_named(folder, files, flag):
    make(folder / "other", files)
    command = f"`python tools/convert_checkpoint.py {flag} other --save RUN`"
    for line in ("--load other", "--load other --save other", "--load other --finetune"):
        (fault,) = faults(line)
        assert fault.startswith("--load other: holds ") and command in fault


@pytest.mark.parametrize("files", ["", "metrics.jsonl", "iter_0000010/MANIFEST.json common.pt"])
def test_what_is_ours_or_nothing_is_not(folder, files):
    (folder / "run").mkdir()
    make(folder / "run", files)
    assert foreign_checkpoint("run") == "" and foreign_checkpoint("absent") == ""


def test_a_folder_that_disappears_is_passed_over(folder, monkeypatch):
    """As a running job deletes its old checkpoints."""
    make(folder / "run", "iter_0000010/common.pt")
    read = os.listdir

    def listdir(path):
        if path != "run":
            shutil.rmtree(path)
        return read(path)

    monkeypatch.setattr(os, "listdir", listdir)
    assert foreign_checkpoint("run") == ""


def test_a_dangling_link_is_named(folder):
    (folder / "run").symlink_to("gone")
    (fault,) = faults("--save run/deeper")
    assert "run is a link to gone, which does not exist; make that" in fault
    (folder / "gone").mkdir()
    assert faults("--save run/deeper") == []
    (folder / "loop").symlink_to("loop")
    assert "is a link to loop, which does not exist" in faults("--tensorboard-dir loop")[0]
