"""Pretrain with Lion (Chen et al. 2023, arXiv 2302.06675): `--optimizer lion` and other flags."""

import sys

import torch
from torch import Tensor

from megatron.config.groups import OPTIMIZERS, OptimizerConfig, OptimizerKind
from megatron.optimizer.update import RULES, Implementation, StepScalars, check_tables

BETA1, BETA2 = 0.9, 0.99


def lion(
    config: OptimizerConfig, weight: Tensor, grad: Tensor, exp_avg: Tensor, at: StepScalars
) -> None:
    """One step on slices of the flat buffers, in place; `grad` may be overwritten."""
    step = torch.lerp(grad, exp_avg, BETA1).sign_()
    weight.mul_(1 - at.lr * at.weight_decay).add_(step, alpha=-at.lr)
    exp_avg.lerp_(grad, 1 - BETA2)


# The names of the buffers are those of the function's arguments. None: in the precision of the
# master weights; no flag chooses among implementations.
OPTIMIZERS["lion"] = OptimizerKind(states={"exp_avg": None}, implementation=None)
RULES["lion"] = {"torch": Implementation(lion)}
check_tables()

if __name__ == "__main__":
    import pretrain_gpt  # whose flags are made of OPTIMIZERS when it is imported

    sys.exit(pretrain_gpt.main())
