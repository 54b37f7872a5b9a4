"""FlashAttention-4 under torch's scaled_dot_product_attention: the wheel `flash-attn-4`, which
torch registers in place of its own FLASH kernels. Never run.

Its backward pass follows torch.use_deterministic_algorithms.
"""

from __future__ import annotations

import importlib.util

import torch
from megatron.kernels import lang
from torch.nn.attention import activate_flash_attention_impl, list_flash_attention_impls

NAME = "FA4"  # torch's
ARCHITECTURES = (90, 100)


def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why it cannot run on tensors of this kind; None when it can."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{str(dtype).removeprefix('torch.')}, it computes bf16 and fp16"
    if device.type != "cuda":
        return "it needs a GPU"
    if not torch.cuda.is_available():
        return None  # a plan for another machine
    if lang.capability(device) not in ARCHITECTURES:
        return f"a GPU of architecture sm_{lang.capability(device)}, it takes sm_90 and sm_100"
    if NAME not in list_flash_attention_impls():
        return f"torch {torch.__version__} does not know it"
    if not is_installed():
        return "flash-attn-4 is not installed (pip install --pre flash-attn-4)"
    return None


def is_installed() -> bool:
    """FlashAttention-2 and -3 have the package's name, and not this module."""
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ModuleNotFoundError:
        return False


def activate() -> None:
    """Let scaled_dot_product_attention take it, and nothing else: a call that it cannot compute
    raises an error instead of going another way.
    """
    activate_flash_attention_impl(NAME)
    torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_math_sdp(False)
