"""Update rules on flat segments: AdamW (torch's fused kernel, NVIDIA apex, Triton) and SGD with
momentum.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from megatron.config.groups import OPTIMIZERS, OptimizerConfig
from megatron.kernels import apex
from megatron.kernels.adamw import adamw_

# elements updated at once on a CPU, a multiple of blocks.ALIGNMENT: 2 MB of scratch for each narrow
# buffer
PIECE = 1 << 19
PIECE_CUDA = 1 << 23


class StepScalars(NamedTuple):
    """The numbers of one step of a segment; tensors are on the device of the state."""

    lr: float
    weight_decay: float
    eps: float
    steps_before: Tensor  # fp32
    step: Tensor  # the number of this step: steps_before + 1
    coefficient: Tensor  # of the gradient, in the precision of the master weights
    # 1 / coefficient, for a kernel that scales the gradient itself; None in float64
    divisor: Tensor | None
    found_inf: Tensor  # 1 to leave everything as it is


@dataclass
class Implementation:
    """One way to compute an update rule.

    `step` takes the flags of the optimizer and the master weights of a piece, and by name the
    gradient `grad` and the states, all in the master's precision, and StepScalars `at`. With
    `takes_segments` it takes whole segments in their own precisions, and the rounded weights `out`.
    """

    step: Callable[..., None]
    takes_segments: bool = False
    scales_grad: bool = False  # divides the gradient by an fp32 divisor itself
    skips_on_device: bool = False  # reads found_inf, so that the host need not
    on_host: str | None = None  # the implementation for state in host memory, if it is another


class UpdateRule:
    """How one step changes parameters, by a named implementation of RULES; `state_names` are the
    buffers it keeps of each block.
    """

    def __init__(self, config: OptimizerConfig, implementation: str):
        self.config = config
        self.implementation = RULES[config.optimizer][implementation]
        self.state_names = tuple(OPTIMIZERS[config.optimizer].states)

    def state_dtype(self, name: str, wide: torch.dtype) -> torch.dtype:
        """What a buffer is stored in; `wide` is the precision of master weights.

        A bf16 exp_avg_sq is rounded to nearest: it cannot decay while 1 - beta2 is under half a
        spacing of bf16 (2^-9 to 2^-8).
        """
        # Which states can be narrow is declared with the optimizer's flags.
        field = OPTIMIZERS[self.config.optimizer].states[name]
        is_narrow = field is not None and getattr(self.config, field) == "bf16"
        return torch.bfloat16 if is_narrow else wide

    def apply(
        self,
        master: Tensor,
        grad: Tensor,
        states: dict[str, Tensor],
        at: StepScalars,
        out: Tensor | None = None,
    ) -> None:
        """One step in place on a flat segment, and its rounded master weights into `out`.

        Narrower tensors are widened piece by piece; `grad` is undefined afterwards. The caller
        advances the step count.
        """
        implementation = self.implementation
        if implementation.takes_segments:
            implementation.step(self.config, master, grad=grad, **states, out=out, at=at)
            return

        # A kernel that divides the gradient by a scalar saves one pass over it.
        is_scaled = implementation.scales_grad and at.divisor is not None

        # Update piece by piece, so that what is widened stays in cache.
        size = PIECE_CUDA if master.is_cuda else PIECE
        stored = {"grad": grad, **states}
        narrow = [name for name, buffer in stored.items() if buffer.dtype != master.dtype]
        # one allocation: the C library would trim several, step by step
        scratch = master.new_empty(len(narrow), min(size, master.numel()))
        for start in range(0, master.numel(), size):
            part = slice(start, start + size)
            weight = master[part]
            pieces = {name: buffer[part] for name, buffer in stored.items()}
            # in the master's precision, whatever the others are stored in
            wide = dict(pieces)
            for name, room in zip(narrow, scratch):
                wide[name] = room[: weight.numel()].copy_(pieces[name])
            if not is_scaled:
                wide["grad"].mul_(at.coefficient)
            implementation.step(self.config, weight, **wide, at=at)
            if out is not None:
                out[part].copy_(weight)
            # the states are rounded back; the gradient is of no use any more
            for name in narrow:
                if name != "grad":
                    pieces[name].copy_(wide[name])


# ---------------------------------------------------------------- rules


def _triton_adamw(config, master, grad, exp_avg, exp_avg_sq, out, at) -> None:
    # one pass over everything, narrow or not; never run on a GPU yet
    scalars = at.steps_before, at.coefficient, at.found_inf, at.lr
    betas = config.adam_beta1, config.adam_beta2
    adamw_(master, grad, exp_avg, exp_avg_sq, out, *scalars, *betas, at.eps, at.weight_decay)


def _fused_adamw(config, weight, grad, exp_avg, exp_avg_sq, at) -> None:
    # what torch.optim.adamw.adamw calls, without its 30 us of bookkeeping for each piece
    torch._fused_adamw_(
        [weight],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        [],
        [at.step],
        lr=at.lr,
        beta1=config.adam_beta1,
        beta2=config.adam_beta2,
        weight_decay=at.weight_decay,
        eps=at.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=at.divisor,
        found_inf=at.found_inf,
    )


def _apex_adamw(config, weight, grad, exp_avg, exp_avg_sq, at) -> None:
    # never run: apex was not installed on any machine of ours
    multi_tensor_adam, applier = apex.symbols("adam")
    overflow = torch.zeros(1, dtype=torch.int, device=weight.device)
    applier(
        multi_tensor_adam,
        overflow,
        [[grad], [weight], [exp_avg], [exp_avg_sq]],
        at.lr,
        config.adam_beta1,
        config.adam_beta2,
        at.eps,
        int(at.step.item()),
        1,
        True,
        at.weight_decay,
    )


def _sgd(config, weight, grad, momentum_buffer, at) -> None:
    sgd(
        [weight],
        [grad],
        [momentum_buffer],
        fused=True,
        weight_decay=at.weight_decay,
        momentum=config.sgd_momentum,
        lr=at.lr,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        found_inf=at.found_inf,
    )


# --optimizer -> its implementations by name; config/groups.py has what flags know of each rule
RULES: dict[str, dict[str, Implementation]] = {
    "adam": {
        "triton": Implementation(
            _triton_adamw, takes_segments=True, skips_on_device=True, on_host="torch-fused"
        ),
        "apex": Implementation(_apex_adamw, on_host="torch-fused"),
        "torch-fused": Implementation(_fused_adamw, scales_grad=True, skips_on_device=True),
    },
    "sgd": {"torch-fused": Implementation(_sgd, skips_on_device=True)},
}


def rules_of(config: OptimizerConfig) -> tuple[UpdateRule, UpdateRule]:
    """The update rule of the flags, and the same for state in the host's memory."""
    # The first implementation of the table where no flag chooses one.
    field = OPTIMIZERS[config.optimizer].implementation
    name = next(iter(RULES[config.optimizer])) if field is None else getattr(config, field)
    rule = UpdateRule(config, name)
    return rule, UpdateRule(config, rule.implementation.on_host or name)


def check_tables() -> None:
    """Raises KeyError for an entry of OPTIMIZERS or RULES that the other table lacks, and TypeError
    for an implementation that does not take the states of its rule.
    """
    # A flag's choice without a rule would fail in the first step, a rule without a choice never
    # run.
    for name in sorted(OPTIMIZERS.keys() | RULES.keys()):
        if name not in OPTIMIZERS or not RULES.get(name):
            raise KeyError(
                f"--optimizer {name}: needs an entry in config/groups.py and an implementation in "
                "optimizer/update.py"
            )
        for which, implementation in RULES[name].items():
            by_name = ["grad", *OPTIMIZERS[name].states, "at"]
            if implementation.takes_segments:
                by_name.append("out")
            step = inspect.signature(implementation.step)
            try:
                step.bind("config", "weights", **dict.fromkeys(by_name))
            except TypeError as error:
                raise TypeError(
                    f"--optimizer {name}: {which} must take the flags and the weights, and by name "
                    f"{', '.join(by_name)}: {error}"
                ) from None


check_tables()
