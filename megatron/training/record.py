"""What a run leaves of itself beside its metrics: wandb's configuration and metrics.config.json.

Called from training/pretrain.py.
"""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from megatron import __version__
from megatron.config.groups import Config
from megatron.distributed.groups import Layout
from megatron.training.advisor import Verdict

CHECKOUT = Path(__file__).resolve().parents[2]
GIT_SECONDS = 20  # then the state of the checkout is left out


def run_record(
    config: Config,
    layout: Layout,
    banner: dict[str, list[str]],
    verdict: Verdict | None,
    prediction: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The whole configuration by groups, the layout, versions, the checkout's git state, the
    verdict on memory, the `prediction` of the step's time, and the banner; what is not known is
    left out.
    """
    axes = {axis: getattr(layout, axis) for axis in ("tp", "cp", "pp", "dp")}
    versions = {
        "megatron": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
    }
    found = {
        "config": config.to_dict(),
        "layout": {**axes, "ranks": layout.world},
        "versions": versions,
        "git": git_state(CHECKOUT),
        "memory": {"verdict": verdict.word, "reason": verdict.line} if verdict else None,
        "prediction": prediction,
        "banner": banner,
    }
    return {name: value for name, value in found.items() if value is not None}


def git_state(root: Path) -> dict[str, Any] | None:
    """Commit and branch of the checkout at `root`, and whether a tracked file differs from the
    commit (`dirty`). None where `root` is no checkout, or git is missing or slow.
    """
    if not (root / ".git").exists():
        return None
    command = "git --no-optional-locks status --porcelain=v2 --branch --untracked-files=no".split()
    try:
        done = subprocess.run(
            command, cwd=root, capture_output=True, text=True, timeout=GIT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.splitlines()
    heads = dict(line.removeprefix("# branch.").split(" ", 1) for line in lines if line[0] == "#")
    return {
        "commit": heads["oid"],
        "branch": heads["head"],
        "dirty": not all(line[0] == "#" for line in lines),
    }
