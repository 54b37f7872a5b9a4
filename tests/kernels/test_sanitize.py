"""What compute-sanitizer is given runs every operator of kernels/, forward and backward."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from megatron.kernels.lang import CALLED
from torch.utils._python_dispatch import TorchDispatchMode
from unit.zero.measure import launches_of_nothing

ROOT = Path(__file__).resolve().parents[2]


class Called(TorchDispatchMode):
    """The names of our operators that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "megatron":
            self.names.add(function.name())
        return function(*args, **(kwargs or {}))


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="there it runs for real: scripts/gpu.sh settle memcheck"
)
def test_every_operator_is_called(capsys):
    from megatron.kernels.tools import sanitize as tool

    for file in (ROOT / "kernels").glob("*.py"):
        importlib.import_module(f"megatron.kernels.{file.stem}")
    # the tool by itself takes a minute in the interpreter
    with Called() as called, launches_of_nothing():
        assert tool.main([]) == tool.main(["gluon"]) == 0
    # maxima_fp8 is called within quantise_fp8
    assert called.names | {"megatron::maxima_fp8"} == {
        name
        for name, function in CALLED.items()
        if function.__module__.startswith("megatron.kernels")
    }
    assert capsys.readouterr().out.endswith(" calls on cpu\n")
