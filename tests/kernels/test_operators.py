"""What holds for every operator: torch's own checks of its schema, its fake and its autograd, and
tensors without rows.
"""

import importlib
from pathlib import Path

import pytest
import torch
from megatron.kernels.cases import case_of
from megatron.kernels.fp8 import find_maxima
from megatron.kernels.lang import CALLED
from megatron.kernels.self_check import Variant
from megatron.kernels.tools import sanitize
from torch.utils._python_dispatch import TorchDispatchMode
from unit.zero.measure import launches_of_nothing

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
HEADS = {"s": 5, "b": 1, "g": 2, "m": 1, "d": 16, "rotary": 8}
ROWS = {"rows": 3, "width": 24, "bias": True, "centre": True, "add": True}
# rows of the table and settings (kernels/cases.py): every operator is called
CALLS = (
    ("attention dq", {"s": 40, "b": 1, "g": 1, "m": 2, "d": 16, "documents": True}),
    ("norm forward", ROWS),
    ("norm backward", ROWS),
    ("qk_norm backward", HEADS),
    ("rotary", HEADS),
    ("activation forward", ROWS),
    ("activation backward", ROWS),
    ("dropout", {"s": 3, "b": 2, "width": 24}),
    ("cross_entropy", {"tokens": 3, "width": 32, "columns": 20, "softcap": 3.0}),
    ("grouped_gemm rows", {"counts": (2, 0, 3), "o": 8, "i": 16}),
    ("grouped_gemm weight", {"counts": (2, 0, 3), "o": 8, "i": 16}),
    ("fp8 tiles", {"rows": 20, "width": 40}),
    ("adamw", {"size": 40}),
    ("grad_norm", {"size": 70, "pieces": 2}),
)
NO_ROWS = {"rows": 0, "s": 0, "tokens": 0, "counts": (0, 0)}
OF_ROWS = [
    (kernel, {name: NO_ROWS.get(name, value) for name, value in given.items()})
    for kernel, given in CALLS
    if not kernel.startswith(("attention", "fp8")) and given.keys() & NO_ROWS.keys()
]


class Recorder(TorchDispatchMode):
    """The first call of each of our operators: (overload, arguments)."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "megatron":
            self.calls.setdefault(function.name(), (function, args))
        return function(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def operators():
    """The names of all operators of kernels/."""
    for file in KERNELS.glob("*.py"):
        importlib.import_module(f"megatron.kernels.{file.stem}")
    return {n for n, each in CALLED.items() if each.__module__.startswith("megatron.kernels")}


def test_torchs_own_checks(device, operators):
    with Recorder() as recorder:
        for kernel, settings in CALLS:
            case_of(Variant(kernel, "float32", settings), device).call()
        find_maxima(torch.randn(4, 8, device=device), "row")
    assert recorder.calls.keys() == operators
    for name, (function, args) in recorder.calls.items():
        # the backward pass of attention is not differentiated
        is_backward = name == "megatron::flash_attention_backward"
        checks = {"test_utils": ("test_schema", "test_faketensor")} if is_backward else {}
        torch.library.opcheck(function, args, **checks)


@pytest.mark.parametrize("kernel, settings", OF_ROWS, ids=[kernel for kernel, _ in OF_ROWS])
def test_no_rows(device, kernel, settings):
    """Nothing is launched, and sums over rows are zero."""
    case = case_of(Variant(kernel, "float32", settings), device)
    for result, expected in zip(case.call(), case.expected(torch.float32), strict=True):
        assert result.shape == expected.shape and not result.any()


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="there it runs for real: scripts/gpu.sh settle memcheck"
)
def test_the_sanitizer_is_given_every_operator(capsys, operators):
    # the tool by itself takes a minute in the interpreter
    with Recorder() as recorder, launches_of_nothing():
        assert sanitize.main([]) == sanitize.main(["gluon"]) == 0
    # maxima_fp8 is called within quantise_fp8
    assert recorder.calls.keys() | {"megatron::maxima_fp8"} == operators
    assert capsys.readouterr().out.endswith(" calls on cpu\n")
