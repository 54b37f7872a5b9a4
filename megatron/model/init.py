"""Initial weights: each element of a logical tensor is a function of (seed, name, row, column), whatever the layout."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.config.groups import ModelConfig
from megatron.kernels import lang, philox
from megatron.kernels.initialise import normal_
from megatron.model.layout import Box


def fill_initial(box: Box, local: Tensor, config: ModelConfig, seed: int) -> None:
    """Write the initial values of one box into the local tensor that holds it (fp32 or fp64; padding is left alone).

    `config` is what choose_kernels made of the flags. normal(0, init-method-std) for matrices, with std / sqrt(2 x layers) for residual outputs (GPT-2); ones for the vectors that norms multiply by; zero biases.
    """
    target = box.view(local)
    if box.name.endswith(".bias"):
        target.zero_()
    elif len(box.shape) == 1:
        target.fill_(1)
    else:
        residual_output = box.name.endswith(("attention.proj.weight", "mlp.down.weight"))
        std = config.init_method_std / (2 * config.num_layers) ** 0.5 if residual_output else config.init_method_std
        key = philox.key(seed, box.name)
        by_kernel = config.init_backend == "triton" and lang.unfit(local.device, torch.float32) is None
        rows = box.extent[0] // box.groups
        for group in range(box.groups):
            part = torch.empty(target.shape[1:], dtype=torch.float32, device=local.device)
            corner = box.offset[0] + group * rows, box.offset[1]
            normal_(part, *key, *corner, std) if by_kernel else philox.normal(part, key, *corner, std)
            target[group].copy_(part)
