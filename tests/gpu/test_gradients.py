"""Every parameter's gradient of one backward pass on a GPU, with the kernels that `auto` takes and
under --torch-compile, against float64 on the host; and on any machine, that the comparison accepts
torch's operators and finds mistakes. `python -m pytest -m gpu tests/gpu/test_gradients.py`
"""

from functools import cache

import pytest
import torch
from gpu.gradients import BY_TORCH, MODELS, faults, gradients

CPU = torch.device("cpu")


@cache
def exact(model: str) -> dict[str, torch.Tensor]:
    return gradients(f"{MODELS[model]} {BY_TORCH}", torch.float64, CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_those_of_float64(model, compiled, dtype):
    if compiled and model in ("experts", "latent"):
        pytest.skip("layers of these are compiled in tests/parity")
    device = torch.device("cuda", torch.cuda.current_device())
    flags = f"{MODELS[model]} --torch-compile" if compiled else MODELS[model]
    found = gradients(flags, dtype, device, compiled=compiled)
    torchs = gradients(f"{MODELS[model]} {BY_TORCH}", dtype, device)
    assert faults(found, torchs, exact(model), dtype) == {}


@pytest.mark.parametrize("model", MODELS)
def test_the_comparison_accepts_torch_and_finds_mistakes(model):
    """A lost gradient, a factor, a sign, rows in another order and NaN, one parameter at a
    time.
    """
    flags = f"{MODELS[model]} {BY_TORCH}"
    for dtype in (torch.float32, torch.bfloat16):
        found = gradients(flags, dtype, CPU)
        assert faults(found, found, exact(model), dtype) == {}, dtype
    for index, (name, gradient) in enumerate(found.items()):
        mistakes = (
            torch.zeros_like(gradient),
            1.2 * gradient,
            -gradient,
            gradient.flip(0),
            torch.full_like(gradient, torch.nan),
        )
        wrong = found | {name: mistakes[index % len(mistakes)]}
        assert faults(wrong, found, exact(model), torch.bfloat16).keys() == {name}
