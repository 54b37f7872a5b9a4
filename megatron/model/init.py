"""Initial weights: each element of a logical tensor is a function of (seed, name, row, column),
whatever the layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.kernels import philox
from megatron.model.spec import Box


def fill_initial(box: Box, local: Tensor, seed: int) -> None:
    """Write the initial values that a box's tensor declares into the local tensor that holds it
    (fp32 or fp64), but for padding. Only matrices are drawn.
    """
    target, init = box.view(local), box.spec.init
    if init.std == 0:
        target.fill_(init.value)
        return
    key = philox.key(seed, box.name)
    # The counter is the element's place in the logical tensor: the same in any layout.
    row, column = box.offset
    for rows in target:
        drawn = torch.empty(rows.shape, dtype=torch.float32, device=local.device)
        philox.normal(drawn, key, row, column, init.std)
        rows.copy_(drawn)
        row += len(rows)
