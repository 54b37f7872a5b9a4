"""Layers compiled by torch.compile: a graph for each kind of layer, in each mode.

Called from training/pretrain.py.
"""

from __future__ import annotations

import torch
from torch import nn

from megatron.config.errors import UserError
from megatron.model.block import LayerBlock
from megatron.model.dropout import Dropout
from megatron.model.linear import Linear

# graphs of one rank at most: the first, a middle and the last layer, each in training, in the
# forward pass that full recomputation repeats, and in evaluation
GRAPHS = 9
# of torch.compile
BACKEND = "inductor"


def compile_layers(model: nn.Module, device: torch.device) -> None:
    """Let torch.compile fuse what is between the GEMMs of each transformer layer.

    Layers of one kind share a graph, which is made at the first forward pass. A layer that cannot
    be traced whole, or that would need more than GRAPHS graphs, is an error of torch.compile's
    there. Raises UserError where there is no compiler.
    """
    _find_compiler(device)
    torch._dynamo.reset()  # graphs of another model in this process would count, too
    torch._dynamo.config.recompile_limit = GRAPHS
    for layer in model.modules():
        if isinstance(layer, LayerBlock):
            _leave_constants_out(layer, device)
            compiled = torch.compile(
                layer.transform, backend=BACKEND, fullgraph=True, dynamic=False
            )
            layer.transform = compiled  # type: ignore[method-assign]


def _find_compiler(device: torch.device) -> None:
    """Raises UserError where a CPU's graphs could not be compiled."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    if device.type != "cpu":
        return  # Triton's compiler, which its kernels need as well
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise UserError(
            "--torch-compile: torch.compile needs a C++ compiler on a CPU and finds none; install "
            "g++, name another compiler in the environment variable CXX, or drop the flag"
        ) from error


def _leave_constants_out(layer: LayerBlock, device: torch.device) -> None:
    """Keep what differs from layer to layer, or exists once a rank, where a graph does not take it
    for a constant.
    """
    for module in layer.modules():
        if isinstance(module, Linear):
            module.weight.tensor_parallel = module.tp
        for site in vars(module).values():
            if isinstance(site, Dropout):
                site.keep_words_on(device)
