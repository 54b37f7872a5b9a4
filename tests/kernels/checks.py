"""How a kernel's result is judged: against the definition in float64, and next to what PyTorch
itself makes of the low precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from megatron.kernels.cases import case_of
from megatron.kernels.self_check import Variant
from torch import Tensor

# relative: two roundings of a result, some of what goes into it
FROBENIUS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}
MARGIN = 64  # elements on either side of a canary-padded buffer
CANARY = 12345.0


def canary(dtype: torch.dtype) -> Tensor:
    """CANARY, or what 8 bits have in its place."""
    return torch.tensor(CANARY if torch.finfo(dtype).max > CANARY else 208.0, dtype=dtype)


def error(actual: Tensor, exact: Tensor) -> float:
    """Relative error in the Frobenius norm."""
    return float((actual.double() - exact).norm() / exact.norm().clamp_min(1e-300))


def assert_as_good(
    actual: Tensor, exact: Tensor, torchs: Tensor, dtype: torch.dtype | None = None
) -> None:
    """`actual` is near `exact` (float64), and its worst element is at most twice as far off as the
    worst of `torchs`, the same computed by plain PyTorch in the low precision (plus two roundings
    of the largest element, where PyTorch happens to be exact).
    """
    dtype = dtype or actual.dtype
    assert exact.dtype == torch.float64 and actual.shape == exact.shape
    assert torch.equal(actual.isfinite(), exact.isfinite())
    fine = exact.isfinite()
    actual, exact, torchs = actual[fine].double(), exact[fine], torchs[fine].double()
    assert error(actual, exact) < FROBENIUS[dtype], error(actual, exact)
    worst, allowed = (
        (actual - exact).abs().max(),
        2 * (torchs - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max(),
    )
    assert worst <= allowed, (float(worst), float(allowed))


@contextmanager
def canaries() -> Iterator[list[tuple[Tensor, int]]]:
    """While open, every `torch.empty`, `empty_like` and `new_empty` lies between margins that hold
    `canary`; on leaving, they still do.
    """
    made: list[tuple[Tensor, int]] = []
    empty = torch.empty

    def padded(*size, dtype=None, device=None, **other) -> Tensor:
        shape = (
            tuple(size[0])
            if len(size) == 1 and isinstance(size[0], tuple | list | torch.Size)
            else size
        )
        dtype = dtype or torch.get_default_dtype()
        if (
            not dtype.is_floating_point
            or other.get("out") is not None
            or torch.device(device or "cpu").type == "meta"
        ):
            return empty(*size, dtype=dtype, device=device, **other)
        count = torch.Size(shape).numel()
        whole = canary(dtype).to(device or "cpu").repeat(count + 2 * MARGIN)
        made.append((whole, count))
        return whole[MARGIN : MARGIN + count].view(shape)

    def like(x: Tensor, dtype=None, device=None, **_) -> Tensor:
        return padded(x.shape, dtype=dtype or x.dtype, device=device or x.device)

    def new(x: Tensor, *size, dtype=None, device=None, **_) -> Tensor:
        return padded(*size, dtype=dtype or x.dtype, device=device or x.device)

    like_before, new_before = torch.empty_like, Tensor.new_empty
    torch.empty, torch.empty_like, Tensor.new_empty = padded, like, new
    try:
        yield made
    finally:
        torch.empty, torch.empty_like, Tensor.new_empty = empty, like_before, new_before
    assert made, "nothing was allocated"
    for whole, count in made:
        edge = torch.cat([whole[:MARGIN], whole[MARGIN + count :]]).float()
        assert (edge == canary(whole.dtype).float().item()).all(), (
            f"written outside a buffer of {count} elements"
        )


def check_case(
    kernel: str, settings: dict, dtype: torch.dtype, device: torch.device, allocates: bool = True
) -> None:
    """A call of kernels/cases.py in a precision is as good as PyTorch's, and writes nothing next to
    what it allocates.
    """
    case = case_of(Variant(kernel, str(dtype).removeprefix("torch."), settings), device)
    with canaries() if allocates else nullcontext():
        actual = case.call()
    expected = case.expected(torch.float64), case.expected(dtype)
    for mine, exact, torchs in zip(actual, *expected, strict=True):
        assert_as_good(mine, exact, torchs)


def check_passes(kernel: str, settings: dict, dtype: torch.dtype, device: torch.device) -> None:
    """`check_case` of a kernel's forward and backward pass."""
    for direction in ("forward", "backward"):
        check_case(f"{kernel} {direction}", settings, dtype, device)
