"""Recognizes checkpoints of other programs, and names the command that imports them."""

from __future__ import annotations

import contextlib
import os
import re

CONVERT = "python tools/convert_checkpoint.py"
# What a folder holds, the converter's flag, and the files that it has, all of them; a name with a
# slash is one of a file in a folder.
HUGGING_FACE = (
    r"config\.json",
    r"(model|pytorch_model|consolidated)[\w.-]*\.(safetensors|bin|json)",
)
MEGATRON = r"((iter_\d+|release)/)?(common\.pt|mp_rank_.*|\.metadata)|.*\.distcp"
FOREIGN = (
    ("a Hugging Face model", "--from-huggingface", HUGGING_FACE),
    ("a DeepSpeed checkpoint", "--from-deepspeed", (r"global_step\d+|.*zero_pp_rank_.*",)),
    ("a checkpoint of Megatron-LM or torch.distributed", "--from-megatron", (MEGATRON,)),
)


def foreign_checkpoint(folder: str) -> str:
    """The foreign checkpoint in a folder, and what imports it; empty if none, or ours is too."""
    try:
        names = set(os.listdir(folder))
    except OSError:
        return ""
    for place in [name for name in names if re.fullmatch(r"iter_\d+|release", name)]:
        with contextlib.suppress(OSError):  # a file, not readable, or deleted since
            names |= {f"{place}/{name}" for name in os.listdir(os.path.join(folder, place))}
    if any(re.fullmatch(r"iter_.*/MANIFEST\.json", name) for name in names):
        return ""
    for what, flag, patterns in FOREIGN:
        if all(any(re.fullmatch(each, name) for name in names) for each in patterns):
            return (
                f"holds {what}; import it with `{CONVERT} {flag} {folder} --save RUN`, then give "
                "--config RUN/model.json --load RUN --finetune"
            )
    return ""
