"""Operators of a CUDA device that raise under torch.use_deterministic_algorithms(True): those that
its documentation lists.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Arguments = dict[str, Any]


def _is_wide(given: Arguments) -> bool:
    """Whether a cumulative sum is one of floating-point or complex numbers."""
    dtype = given.get("dtype") or given["self"].dtype
    return dtype.is_floating_point or dtype.is_complex


def _always(given: Arguments) -> bool:
    return True


# as the documentation names them -> operators (without their trailing underscore), and whether one
# raises with these arguments, by name
RAISES: dict[str, dict[str, Callable[[Arguments], bool]]] = {
    "AvgPool3d": {"avg_pool3d_backward": _always},
    "AdaptiveAvgPool2d": {"_adaptive_avg_pool2d_backward": _always},
    "AdaptiveAvgPool3d": {"_adaptive_avg_pool3d_backward": _always},
    "AdaptiveMaxPool2d": {"adaptive_max_pool2d_backward": _always},
    "FractionalMaxPool2d": {"fractional_max_pool2d_backward": _always},
    "FractionalMaxPool3d": {"fractional_max_pool3d_backward": _always},
    "MaxPool3d": {"max_pool3d_with_indices_backward": _always},  # before torch 2.13
    "MaxUnpool1d": {"max_unpool2d": _always},
    "MaxUnpool2d": {"max_unpool2d": _always},
    "MaxUnpool3d": {"max_unpool3d": _always},
    "interpolate": {
        "upsample_bicubic2d_backward": _always,
        "upsample_bilinear2d_backward": _always,
        "upsample_linear1d_backward": _always,
        "upsample_trilinear3d_backward": _always,
    },
    "ReflectionPad1d": {"reflection_pad1d_backward": _always},
    "ReflectionPad2d": {"reflection_pad2d_backward": _always},
    "ReflectionPad3d": {"reflection_pad3d_backward": _always},
    "NLLLoss": {"nll_loss_forward": _always, "nll_loss2d_forward": _always},
    "CTCLoss": {"_ctc_loss_backward": _always},
    "EmbeddingBag": {  # mode 2: max
        "_embedding_bag_backward": lambda given: given["mode"] == 2,
        "_embedding_bag_dense_backward": lambda given: given["mode"] == 2,
    },
    "put_": {"put": _always},
    "histc": {"histc": _always},
    "bincount": {"bincount": lambda given: given.get("weights") is not None},
    "median": {  # without a dimension it returns no indices
        "median": lambda given: "dim" in given,
        "nanmedian": lambda given: "dim" in given,
    },
    "grid_sample": {"grid_sampler_2d_backward": _always, "grid_sampler_3d_backward": _always},
    "cumsum": {"cumsum": _is_wide},
    "scatter_reduce": {"scatter_reduce": lambda given: given["reduce"] == "prod"},
    "resize_": {"resize": lambda given: given["self"].is_quantized},
}
OPERATORS = {name: rule for rules in RAISES.values() for name, rule in rules.items()}


def raises(function: Any, args: tuple, kwargs: Arguments) -> bool:
    """Whether this call of an operator on the device raises in deterministic mode."""
    found = OPERATORS.get(function.overloadpacket.__name__.removesuffix("_"))
    if found is None or function.namespace != "aten":
        return False
    names = (argument.name for argument in function._schema.arguments)
    return found(dict(zip(names, args, strict=False)) | kwargs)
