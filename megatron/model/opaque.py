"""What torch.compile calls as it is, instead of tracing it: all that adds to a parameter's
`main_grad`.

A compiled backward pass is a graph of tensors, fixed when the forward pass was traced. main_grad is
not among them: it is opened after the forward pass, moves from step to step, and is overwritten or
added to, at once or later, as attributes of the parameter specify. The operators here take the
parameter, and read that when they run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from megatron.kernels.lang import operator


def accumulate_gradients(
    parameters: Iterable[nn.Parameter], gradients: Iterable[Tensor], dx: Tensor
) -> None:
    """main_grad += gradient of each parameter, in a backward pass that returns dx."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if torch.compiler.is_compiling():
            torch.ops.megatron.add_gradient_(dx, parameter, gradient)
        else:
            parameter.main_grad.add_(gradient)


# dx is not written: who reads it later keeps the operator in the graph
@operator("add_gradient_", mutates_args=("dx",))
def _add_gradient(dx: Tensor, parameter: Tensor, gradient: Tensor) -> None:
    parameter.main_grad.add_(gradient)


@_add_gradient.register_fake
def _(dx: Tensor, parameter: Tensor, gradient: Tensor) -> None:
    pass


class Context:
    """Replaces autograd's context where an operator calls an autograd function's passes."""

    def __init__(self, needs_input_grad: tuple[bool, ...], **attributes: Any):
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Tensor, ...] = ()
        self.__dict__.update(attributes)

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors
