"""The device of the scripts of this folder: a GPU, or to try them a CPU with Triton's interpreter.
Import it before anything that imports Triton.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
IS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_CUDA else "cpu")
HALF = torch.bfloat16 if IS_CUDA else torch.float32  # the interpreter's bf16 is wrong

sys.path.insert(0, str(ROOT))
if not IS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path.append(str(ROOT / "tests" / "kernels"))
    import interpreter

    interpreter.patch()


def message(error: Exception) -> str:
    """The type and the first line of an error."""
    return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:300]}"
