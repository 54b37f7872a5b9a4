"""NVIDIA's apex, where it is installed: found by the functions that are used of it, since PyPI has
another package `apex` and a build may lack some.

Nothing of this has run yet: no machine with apex was available. Each function does what PyTorch's
own, or a kernel here, does too.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

SYMBOLS: dict[str, tuple[tuple[str, str], ...]] = {  # feature -> (module, function)
    "adam": (("amp_C", "multi_tensor_adam"), ("apex.multi_tensor_apply", "multi_tensor_applier")),
    "norm": tuple(
        ("fused_layer_norm_cuda", name)
        for name in (
            "forward_affine",
            "backward_affine",
            "rms_forward_affine",
            "rms_backward_affine",
        )
    ),
    "grad-norm": (
        ("amp_C", "multi_tensor_l2norm"),
        ("apex.multi_tensor_apply", "multi_tensor_applier"),
    ),
    "weight-grad": (("fused_weight_gradient_mlp_cuda", "wgrad_gemm_accum_fp32"),),
}


def symbols(feature: str) -> list[Callable]:
    """The functions of a feature. Raises ImportError or AttributeError where apex does not have
    them.
    """
    return [getattr(importlib.import_module(module), name) for module, name in SYMBOLS[feature]]


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


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, rstd) of `torch.native_layer_norm` over the last dimension."""
    forward, *_ = symbols("norm")
    return forward(x.contiguous(), x.shape[-1:], weight, bias, eps)


def layer_norm_backward(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias)."""
    _, backward, *_ = symbols("norm")
    return backward(
        dy.contiguous(), mean, rstd, x.contiguous(), x.shape[-1:], weight, bias, eps, False
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(y, rstd)."""
    *_, forward, _ = symbols("norm")
    return forward(x.contiguous(), x.shape[-1:], weight, eps)


def rms_norm_backward(
    dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(dx, dweight)."""
    *_, backward = symbols("norm")
    return backward(dy.contiguous(), rstd, x.contiguous(), x.shape[-1:], weight, eps, False)


def l2_norm(buffers: Iterable[Tensor]) -> Tensor:
    """The norm [1] of at least one buffer, all of one dtype, accumulated in fp32: infinite where a
    sum of squares passes 3.4e38.
    """
    l2norm, applier = symbols("grad-norm")
    buffers = list(buffers)
    norm, _ = applier(
        l2norm, torch.zeros(1, dtype=torch.int, device=buffers[0].device), [buffers], False
    )
    return norm


def accumulate_weight_grad(dy: Tensor, x: Tensor, main_grad: Tensor) -> None:
    """main_grad [o, i] (fp32) += dy^T x, with dy [tokens, o] and x [tokens, i] in half
    precision.
    """
    (add,) = symbols("weight-grad")
    add(x, dy, main_grad)
    # apex writes past torch, and who looks for lost gradients asks for it
    torch.autograd.graph.increment_version(main_grad)
