"""NVIDIA's apex, where it is installed: found by the functions that are used of it, since PyPI has
another package `apex` and a build may lack some.

Nothing of this has run yet: no machine with apex was available. Each function does what PyTorch's
own, or a kernel here, does too.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

SYMBOLS: dict[str, dict[str, str]] = {  # feature -> function -> module
    "adam": {"multi_tensor_adam": "amp_C", "multi_tensor_applier": "apex.multi_tensor_apply"},
    "norm": dict.fromkeys(
        ("forward_affine", "backward_affine", "rms_forward_affine", "rms_backward_affine"),
        "fused_layer_norm_cuda",
    ),
    "grad-norm": {
        "multi_tensor_l2norm": "amp_C",
        "multi_tensor_applier": "apex.multi_tensor_apply",
    },
    "weight-grad": {"wgrad_gemm_accum_fp32": "fused_weight_gradient_mlp_cuda"},
}


def symbols(feature: str) -> list[Callable]:
    """The functions of a feature. Raises ImportError or AttributeError where apex does not have
    them.
    """
    modules = SYMBOLS[feature].items()
    return [getattr(importlib.import_module(module), name) for name, module in modules]


@functools.cache
def missing(feature: str) -> str | None:
    """None when apex has all that a feature needs, else what is missing."""
    try:
        symbols(feature)
    except ModuleNotFoundError as error:
        return f"module {error.name} is missing (NVIDIA's apex, built with its CUDA extensions)"
    except (ImportError, AttributeError) as error:
        return f"not NVIDIA's apex: {error}"
    return None


def norm(x: Tensor, parameters: Sequence[Tensor], eps: float) -> tuple[Tensor, ...]:
    """(y, rstd) of RMSNorm with a weight, (y, mean, rstd) of LayerNorm with weight and bias."""
    layer, _, rms, _ = symbols("norm")
    forward = rms if len(parameters) == 1 else layer
    return forward(x.contiguous(), x.shape[-1:], *parameters, eps)


def norm_backward(
    dy: Tensor, x: Tensor, statistics: Sequence[Tensor], parameters: Sequence[Tensor], eps: float
) -> tuple[Tensor, ...]:
    """(dx, the gradient of each parameter)."""
    _, layer, _, rms = symbols("norm")
    backward = rms if len(parameters) == 1 else layer
    shape, dy, x = x.shape[-1:], dy.contiguous(), x.contiguous()
    return backward(dy, *statistics, x, shape, *parameters, eps, False)


def l2_norm(buffers: Iterable[Tensor]) -> Tensor:
    """The norm [1] of at least one buffer, all of one dtype, accumulated in fp32: infinite where a
    sum of squares passes 3.4e38.
    """
    l2norm, applier = symbols("grad-norm")
    buffers = list(buffers)
    overflow = torch.zeros(1, dtype=torch.int, device=buffers[0].device)
    return applier(l2norm, overflow, [buffers], False)[0]


def accumulate_weight_grad(dy: Tensor, x: Tensor, main_grad: Tensor) -> None:
    """main_grad [o, i] (fp32) += dy^T x, with dy [tokens, o] and x [tokens, i] in half
    precision.
    """
    (add,) = symbols("weight-grad")
    add(x, dy, main_grad)
    # apex writes past torch, and who looks for lost gradients asks for it
    torch.autograd.graph.increment_version(main_grad)
