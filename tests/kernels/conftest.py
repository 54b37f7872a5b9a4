"""Kernels run where the tensors are: compiled on a GPU where there is one, else in the interpreter,
whose bf16 is fixed first.
"""

import interpreter
import pytest
import torch
from megatron.kernels import lang

if lang.interpreted():
    interpreter.patch()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """A bound on the worst of many roundings holds or not by the numbers: they are the same in
    every run.
    """
    torch.manual_seed(0)
