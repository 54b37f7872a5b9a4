"""Every preset of scripts/presets.sh: its flags are accepted, its parameters are the published
number, and it fits GPUs of 80 GB where it is listed so.
"""

import re
import subprocess
from pathlib import Path

import pytest

import pretrain_gpt

ROOT = Path(__file__).resolve().parents[2]
USABLE_GIB = 70  # of a GPU of 80 GB (74.5 GiB), less the CUDA context and the allocator's fragments
# name: (ranks, parameters). The GPT-3 figures are the paper's, rounded; those of Llama are what
# their checkpoints hold.
FITTING = {
    "gpt3-125m": (1, 125e6),
    "gpt3-350m": (8, 350e6),
    "gpt3-760m": (8, 760e6),
    "gpt3-1.3b": (8, 1.3e9),
    "gpt3-2.7b": (8, 2.7e9),
    "gpt3-6.7b": (16, 6.7e9),
    "gpt3-13b": (16, 13e9),
    "llama-1b": (8, 1_235_814_400),
    "llama-8b": (16, 8_030_261_248),
    "gpt3-175b": (512, 175e9),
    "llama-70b": (128, 70_553_706_496),
    "llama-405b": (1024, 405_853_388_800),
    # 124M without the head, which is untied; with biases, which track 3 counts, too
    "speedrun-124m": (1, 162_234_624),
}


def flags_of(name: str) -> list[str]:
    """What train.sbatch gives to pretrain_gpt.py for a preset without settings."""
    script = (
        'source scripts/presets.sh; preset "$1" && printf "%s\\n" "${model[@]}" "${fits[@]}" '
        "--mock-data --vocab-size $((vocabulary - 1))"
    )
    command = ["bash", "-uc", script, "bash", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def dry_run(name: str, ranks: int, capsys: pytest.CaptureFixture) -> tuple[int, float]:
    """(parameters, GiB a rank) of `--dry-run --world-size ranks`."""
    flags = flags_of(name)
    asked = f"--train-samples 3000000 --dry-run --world-size {ranks}".split()
    code = pretrain_gpt.main([*flags, *asked])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    batch = flags[flags.index("--global-batch-size") + 1]
    assert f"= global batch {batch};" in shown.out
    parameters = re.search(r"([\d,]+) parameters", shown.out)[1].replace(",", "")
    return int(parameters), float(re.search(r"total\s+([\d.e+]+)", shown.out)[1])


def check_parameters(found: int, published: float) -> None:
    assert found == published if isinstance(published, int) else abs(found / published - 1) < 0.04


@pytest.mark.parametrize("name", FITTING)
def test_published_shape_fits_80_gb(name, capsys):
    ranks, published = FITTING[name]
    found, gib = dry_run(name, ranks, capsys)
    check_parameters(found, published)
    assert gib < USABLE_GIB


def test_every_preset_is_tested_and_an_unknown_name_lists_them():
    named = re.findall(r"^ +(\w+-[\w.]+)\)", (ROOT / "scripts/presets.sh").read_text(), re.M)
    assert set(named) == FITTING.keys()
    command = ["bash", "-c", "source scripts/presets.sh; preset gpt4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "no preset gpt4: choose gpt3-125m" in done.stderr
