"""Kernels run where the tensors are: compiled on a GPU where there is one, else in the interpreter, whose bf16 is mended first."""

import interpreter
import pytest
import torch

from megatron.kernels import lang

if lang.interpreted():
    interpreter.mend()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
