"""Recognizes checkpoints of other programs, and names the command that imports them."""

from __future__ import annotations

import os
import re
from pathlib import Path

CONVERT = "python tools/convert_checkpoint.py"


def foreign_checkpoint(folder: str) -> str:
    """What a folder holds, if it is a checkpoint of another program, with the command that makes
    it one of ours; an empty string where it is none, or holds one of ours as well.
    """
    try:
        names = set(os.listdir(folder))
    except OSError:
        return ""
    ours = any(
        os.path.exists(os.path.join(folder, name, "MANIFEST.json"))
        for name in names
        if name.startswith("iter_")
    )
    found = None if ours else _found(Path(folder), names)
    if found is None:
        return ""
    what, flag = found
    return (
        f"holds {what}; import it with `{CONVERT} {flag} {folder} --save RUN`, then give --config "
        "RUN/model.json --load RUN --finetune"
    )


def _found(folder: Path, names: set[str]) -> tuple[str, str] | None:
    """What other program's checkpoint it is, and the flag of the converter."""
    weights = [
        name
        for name in names
        if re.fullmatch(r"(model|pytorch_model|consolidated)[\w.-]*\.(safetensors|bin|json)", name)
    ]
    if "config.json" in names and weights:
        return "a Hugging Face model", "--from-huggingface"
    if _is_deepspeed(folder, names):
        return "a DeepSpeed checkpoint", "--from-deepspeed"
    if _is_megatron(folder, names):
        return "a checkpoint of Megatron-LM", "--from-megatron"
    if ".metadata" in names or any(name.endswith(".distcp") for name in names):
        return "a checkpoint of torch.distributed.checkpoint", "--from-megatron"
    return None


def _is_deepspeed(folder: Path, names: set[str]) -> bool:
    steps = [folder / name for name in names if re.fullmatch(r"global_step\d+", name)]
    return bool(steps) or any("zero_pp_rank_" in name for name in names)


def _is_megatron(folder: Path, names: set[str]) -> bool:
    """Its iterations are folders with common.pt, .metadata or mp_rank_* in them."""
    places = [folder, *(folder / name for name in names if re.fullmatch(r"iter_\d+|release", name))]
    for place in places:
        inside = set(os.listdir(place)) if place.is_dir() else set()
        if "common.pt" in inside or any(name.startswith("mp_rank_") for name in inside):
            return True
        if place != folder and ".metadata" in inside:
            return True
    return False
