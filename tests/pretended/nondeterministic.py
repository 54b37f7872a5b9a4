"""Operators of a CUDA device that raise under torch.use_deterministic_algorithms(True): those that
its documentation lists.

    python tests/pretended/nondeterministic.py --out FILE

tries each on the pretended device, in a separate call, and next to them the ones that the
documentation names as deterministic in this mode. FILE gets the names of those that raised.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    HERE = Path(__file__).resolve().parent
    sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]
    from pretended import libraries

    libraries.load_device_guard()  # before torch is imported

import torch
import torch.nn.functional as F
from torch import Tensor

Arguments = dict[str, Any]


def _is_wide(given: Arguments) -> bool:
    """Whether a cumulative sum is one of floating-point or complex numbers."""
    dtype = given.get("dtype") or given["self"].dtype
    return dtype.is_floating_point or dtype.is_complex


def _always(given: Arguments) -> bool:
    return True


# operator (without its trailing underscore) -> whether it raises with these arguments, by name
RAISES: dict[str, Callable[[Arguments], bool]] = {
    "_adaptive_avg_pool2d_backward": _always,
    "_adaptive_avg_pool3d_backward": _always,
    "_ctc_loss_backward": _always,
    "_embedding_bag_backward": lambda given: given["mode"] == 2,
    "_embedding_bag_dense_backward": lambda given: given["mode"] == 2,  # max
    "adaptive_max_pool2d_backward": _always,
    "avg_pool3d_backward": _always,
    "bincount": lambda given: given.get("weights") is not None,
    "cumsum": _is_wide,
    "fractional_max_pool2d_backward": _always,
    "fractional_max_pool3d_backward": _always,
    "grid_sampler_2d_backward": _always,
    "grid_sampler_3d_backward": _always,
    "histc": _always,
    "max_pool3d_with_indices_backward": _always,  # before torch 2.13
    "max_unpool2d": _always,
    "max_unpool3d": _always,
    "median": lambda given: "dim" in given,  # else it returns no indices
    "nanmedian": lambda given: "dim" in given,
    "nll_loss_forward": _always,
    "nll_loss2d_forward": _always,
    "put": _always,
    "reflection_pad1d_backward": _always,
    "reflection_pad2d_backward": _always,
    "reflection_pad3d_backward": _always,
    "resize": lambda given: given["self"].is_quantized,
    "scatter_reduce": lambda given: given["reduce"] == "prod",
    "upsample_bicubic2d_backward": _always,
    "upsample_bilinear2d_backward": _always,
    "upsample_linear1d_backward": _always,
    "upsample_trilinear3d_backward": _always,
}


def raises(function: Any, args: tuple, kwargs: Arguments) -> bool:
    """Whether this call of an operator on the device raises in deterministic mode."""
    found = RAISES.get(function.overloadpacket.__name__.removesuffix("_"))
    if found is None or function.namespace != "aten":
        return False
    names = (argument.name for argument in function._schema.arguments)
    return found(dict(zip(names, args, strict=False)) | kwargs)


# ---- calls of everything that is documented


def _numbers(*shape: int) -> Tensor:
    return torch.ones(shape, device="cuda", requires_grad=True)


def _indices(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64, device="cuda")


def _pool(function: Callable, dims: int, *rest: Any, **options: Any) -> None:
    result = function(_numbers(1, 2, *[8] * dims), *rest, **options)
    _differentiate(result[0] if isinstance(result, tuple) else result)


def _differentiate(result: Tensor) -> None:
    result.sum().backward()


def _unpool(function: Callable, dims: int) -> None:
    function(_numbers(1, 2, *[4] * dims), _indices(1, 2, *[4] * dims), 2)


def _resize(mode: str, dims: int) -> None:
    """By the operator: torch.nn.functional takes a deterministic one in its place where it can."""
    operator = getattr(torch.ops.aten, f"upsample_{mode}{dims}d").default
    corners = () if mode == "nearest" else (False,)
    _differentiate(operator(_numbers(1, 2, *[4] * dims), [8] * dims, *corners))


def _ctc() -> None:
    """The backward pass alone: the forward pass has no fake one."""
    scores, lengths = _numbers(5, 1, 4).detach(), ([5], [3])
    alpha = _numbers(1, 5, 7).detach()
    torch.ops.aten._ctc_loss_backward.default(
        _numbers(1).detach(), scores, _indices(1, 3), *lengths, _numbers(1).detach(), alpha, 0
    )


def _bag(mode: str) -> None:
    _differentiate(F.embedding_bag(_indices(2, 3), _numbers(5, 4), mode=mode))


def _grid(dims: int) -> None:
    grid = _numbers(1, *[4] * dims, dims)
    _differentiate(F.grid_sample(_numbers(1, 2, *[4] * dims), grid, align_corners=False))


def _reduce(how: str) -> None:
    _numbers(4).detach().scatter_reduce_(0, _indices(4), _numbers(4).detach(), how)


def _put(accumulate: bool) -> None:
    _numbers(4).detach().put_(_indices(2), _numbers(2).detach(), accumulate=accumulate)


def _loss(dims: int) -> None:
    F.nll_loss(_numbers(3, 4, *[2] * dims), _indices(3, *[2] * dims))


Calls = tuple[Callable[[], object], ...]
# as the documentation names them; calls that raise
DOCUMENTED: dict[str, Calls] = {
    "AvgPool3d": (lambda: _pool(F.avg_pool3d, 3, 2),),
    "AdaptiveAvgPool2d": (lambda: _pool(F.adaptive_avg_pool2d, 2, 3),),
    "AdaptiveAvgPool3d": (lambda: _pool(F.adaptive_avg_pool3d, 3, 3),),
    "AdaptiveMaxPool2d": (lambda: _pool(F.adaptive_max_pool2d, 2, 3),),
    "FractionalMaxPool2d": (lambda: _pool(F.fractional_max_pool2d, 2, 2, output_size=3),),
    "FractionalMaxPool3d": (lambda: _pool(F.fractional_max_pool3d, 3, 2, output_size=3),),
    "MaxPool3d": (lambda: _pool(F.max_pool3d, 3, 2),),
    "MaxUnpool1d": (lambda: _unpool(F.max_unpool1d, 1),),
    "MaxUnpool2d": (lambda: _unpool(F.max_unpool2d, 2),),
    "MaxUnpool3d": (lambda: _unpool(F.max_unpool3d, 3),),
    "interpolate": (
        lambda: _resize("linear", 1),
        lambda: _resize("bilinear", 2),
        lambda: _resize("bicubic", 2),
        lambda: _resize("trilinear", 3),
    ),
    "ReflectionPad1d": (lambda: _pool(F.pad, 1, (1, 1), mode="reflect"),),
    "ReflectionPad2d": (lambda: _pool(F.pad, 2, (1, 1) * 2, mode="reflect"),),
    "ReflectionPad3d": (lambda: _pool(F.pad, 3, (1, 1) * 3, mode="reflect"),),
    "NLLLoss": (lambda: _loss(0), lambda: _loss(2)),
    "CTCLoss": (_ctc,),
    "EmbeddingBag": (lambda: _bag("max"),),
    "put_": (lambda: _put(False), lambda: _put(True)),
    "histc": (lambda: _numbers(4).detach().histc(3),),
    "bincount": (lambda: torch.bincount(_indices(4), _numbers(4).detach(), 3),),
    "median": (lambda: _numbers(3, 4).median(0), lambda: _numbers(3, 4).nanmedian(0)),
    "grid_sample": (lambda: _grid(2), lambda: _grid(3)),
    "cumsum": (
        lambda: _numbers(4).cumsum(0),
        lambda: _indices(4).cumsum(0, dtype=torch.float64),
        lambda: _numbers(4).detach().cumsum_(0),
    ),
    "scatter_reduce": (lambda: _reduce("prod"),),
    "resize_": (),  # of quantized tensors, which have no fake ones
}
# calls that are deterministic in this mode, or always
ALLOWED: dict[str, Callable[[], object]] = {
    "cumsum of integers": lambda: _indices(4).cumsum(0),
    "cumsum on a CPU": lambda: torch.ones(4).cumsum(0),
    "median without indices": lambda: _numbers(3, 4).median(),
    "median on a CPU": lambda: torch.ones(3, 4).median(0),
    "scatter_reduce sum": lambda: _reduce("sum"),
    "scatter_reduce mean": lambda: _reduce("mean"),
    "embedding bag, mean": lambda: _bag("mean"),
    "index_add": lambda: _numbers(4).detach().index_add_(0, _indices(2), torch.ones(2).cuda()),
    "index_copy": lambda: _numbers(4).detach().index_copy_(0, _indices(2), torch.ones(2).cuda()),
    "scatter_add": lambda: _numbers(4).detach().scatter_add_(0, _indices(4), _numbers(4).detach()),
    "index_select": lambda: _differentiate(_numbers(4).index_select(0, _indices(2))),
    "gather": lambda: _differentiate(_numbers(4).gather(0, _indices(2))),
    "repeat_interleave": lambda: _differentiate(
        _numbers(4).repeat_interleave(_indices(4), output_size=8)
    ),
    "index_put": lambda: (
        _numbers(4).detach().index_put_((_indices(2),), _numbers(2).detach(), accumulate=True)
    ),
    "upsample nearest": lambda: _resize("nearest", 2),
    "average pool": lambda: _pool(F.avg_pool2d, 2, 2),
    "sort": lambda: _numbers(4).sort(stable=True),
}


def outcome(call: Callable[[], object]) -> str:
    """`raised` for the error of deterministic mode, `` for none, another error's text."""
    try:
        call()
    except Exception as error:  # a test shows it
        return (
            "raised"
            if "does not have a deterministic implementation" in str(error)
            else (f"{type(error).__name__}: {error}")
        )
    return ""


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description="try operators in deterministic mode")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(words)
    from pretended.device import pretended_device

    found: dict[str, dict[str, Any]] = {}
    with pretended_device():
        for mode in (True, False):
            torch.use_deterministic_algorithms(mode)
            found[str(mode)] = {
                "documented": {
                    name: [outcome(call) for call in calls] for name, calls in DOCUMENTED.items()
                },
                "allowed": {name: outcome(call) for name, call in ALLOWED.items()},
            }
    arguments.out.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
