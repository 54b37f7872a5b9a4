"""Initial weights: each element of a logical tensor is a function of (seed, name, row, column),
whatever the layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.kernels import lang, philox
from megatron.kernels.initialise import normal_
from megatron.model.spec import Box


def fill_initial(box: Box, local: Tensor, seed: int, backend: str = "torch") -> None:
    """Write the initial values that a box's tensor declares into the local tensor that holds it
    (fp32 or fp64), but for padding. `backend`: of --init-backend, resolved. Only matrices are
    drawn.
    """
    target, init = box.view(local), box.spec.init
    if init.std == 0:
        target.fill_(init.value)
        return
    key = philox.key(seed, box.name)
    by_kernel = backend == "triton" and lang.unsupported_reason(local.device, torch.float32) is None
    # The counter is the element's place in the logical tensor: the same in any layout.
    row, column = box.offset
    for rows in target:
        drawn = torch.empty(rows.shape, dtype=torch.float32, device=local.device)
        if by_kernel:
            normal_(drawn, *key, row, column, init.std)
        else:
            philox.normal(drawn, key, row, column, init.std)
        rows.copy_(drawn)
        row += len(rows)
