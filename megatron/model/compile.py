"""Layers compiled by torch.compile, a graph for each kind of layer and mode.

Called from training/pretrain.py.
"""

from __future__ import annotations

import torch
from torch import nn

from megatron.layers.dropout import Dropout
from megatron.model.block import LayerBlock

# graphs of one rank at most: the first, a middle and the last layer, each in training, in the
# forward pass that full recomputation repeats, and in evaluation
GRAPHS = 9
# of torch.compile
BACKEND = "inductor"


def compile_layers(model: nn.Module, device: torch.device) -> None:
    """Let torch.compile fuse what stands between the matrix products of each transformer layer.

    Layers of one kind share a graph. A layer that cannot be traced whole, or that would be compiled
    more than GRAPHS times, is an error of torch.compile's at its first forward pass.
    """
    torch._dynamo.reset()  # graphs of another model in this process would count, too
    torch._dynamo.config.recompile_limit = GRAPHS
    for layer in model.modules():
        if not isinstance(layer, LayerBlock):
            continue
        for owner in layer.modules():
            for site in vars(owner).values():
                if isinstance(site, Dropout):
                    site.keep_words_on(device)
        layer.transform = torch.compile(
            layer.transform, backend=BACKEND, fullgraph=True, dynamic=False
        )
