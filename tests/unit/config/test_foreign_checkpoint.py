"""--load of another program's checkpoint names the converter, and folders that cannot be made the
cause.
"""

from __future__ import annotations

import pytest
from rule_rows import check_fields

from megatron.config.arguments import parse_arguments
from megatron.config.derive import OFF_AT_ZERO
from megatron.config.errors import ArgumentErrors
from megatron.config.foreign_checkpoint import foreign_checkpoint
from megatron.config.validate import resolve

LINE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 "
    "--train-iters 20 --lr 1e-3 --mock-data --vocab-size 100"
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def faults(flags: str) -> list[str]:
    try:
        resolve(parse_arguments(f"{LINE} {flags}".split()).config, 1, 101)
    except ArgumentErrors as error:
        return error.faults
    return []


@pytest.mark.parametrize(
    "files, flag",
    [
        ("config.json model.safetensors", "--from-huggingface"),
        ("config.json model.safetensors.index.json", "--from-huggingface"),
        ("latest_checkpointed_iteration.txt iter_0000010/common.pt", "--from-megatron"),
        ("iter_0000010/.metadata iter_0000010/__0_0.distcp", "--from-megatron"),
        ("iter_0000010/mp_rank_00/model_optim_rng.pt", "--from-megatron"),
        (".metadata __0_0.distcp", "--from-megatron"),
        ("latest global_step10/mp_rank_00_model_states.pt", "--from-deepspeed"),
    ],
)
def test_the_converter_is_named(folder, files, flag):
    for name in files.split():
        (folder / "other" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "other" / name).write_bytes(b"")
    command = f"`python tools/convert_checkpoint.py {flag} other --save RUN`"
    for line in ("--load other", "--load other --save other", "--load other --finetune"):
        (fault,) = faults(line)
        assert fault.startswith("--load other: holds ") and command in fault


@pytest.mark.parametrize("files", ["", "metrics.jsonl", "iter_0000010/MANIFEST.json common.pt"])
def test_what_is_ours_or_nothing_is_not(folder, files):
    (folder / "run").mkdir()
    for name in files.split():
        (folder / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "run" / name).write_bytes(b"")
    assert foreign_checkpoint("run") == "" and foreign_checkpoint("absent") == ""


def test_a_dangling_link_is_named(folder):
    (folder / "run").symlink_to("gone")
    (fault,) = faults("--save run/deeper")
    assert "run is a link to gone, which does not exist; make that" in fault
    (folder / "gone").mkdir()
    assert faults("--save run/deeper") == []
    (folder / "loop").symlink_to("loop")
    assert "is a link to loop, which does not exist" in faults("--tensorboard-dir loop")[0]


@pytest.mark.parametrize(
    "flags",
    ["--lr-decay-iters 5 --lr-warmup-iters 10", "--min-lr 1", "--decoupled-lr 1e-4 --min-lr 1e-3"],
)
def test_a_constant_rate_reads_no_decay(flags):
    assert faults(f"--lr-decay-style constant {flags}") == []
    assert faults(f"--lr-decay-style linear {flags}") != []


def test_zero_means_never():
    """As in Megatron-LM, where such an interval is not looked at."""
    off = "--exit-interval 0 --exit-duration-in-mins 0 --save-interval 0 --eval-interval 0 --save x"
    config = resolve(parse_arguments(f"{LINE} {off}".split()).config, 1, 101).config
    check_fields(config, [f"{field} = None" for field in OFF_AT_ZERO])


@pytest.mark.parametrize(
    "flags, expected",
    [
        ("--profile", "profile"),
        ("--profile --tensorboard-dir tb", "tb"),
        ("--profile --save run", None),  # <save>/profile
        ("--profile --profile-dir here", "here"),
        ("", None),
    ],
)
def test_profiles_have_a_default_folder(flags, expected):
    config = resolve(parse_arguments(f"{LINE} {flags}".split()).config, 1, 101).config
    assert config.logging.profile_dir == expected
