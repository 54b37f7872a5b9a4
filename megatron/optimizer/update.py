"""Update rules on flat segments: AdamW (torch's fused kernel, torch's plain loop, NVIDIA apex,
Triton) and SGD with momentum.

Called from optimizer/optimizer.py, segment by segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megatron.config.groups import OptimizerConfig
from megatron.kernels import apex
from megatron.kernels.adamw import adamw_

# elements updated at once on a CPU, a multiple of blocks.ALIGNMENT: 2 MB of scratch for each narrow
# buffer
PIECE = 1 << 19
PIECE_CUDA = 1 << 23


@dataclass(frozen=True)
class UpdateRule:
    """How one step changes parameters; `state_names` are the buffers it keeps beside each
    segment.
    """

    config: OptimizerConfig
    implementation: str  # torch-fused, torch, apex, triton

    @cached_property
    def state_names(self) -> tuple[str, ...]:
        return (
            ("exp_avg", "exp_avg_sq") if self.config.optimizer == "adam" else ("momentum_buffer",)
        )

    def state_dtype(self, name: str, wide: torch.dtype) -> torch.dtype:
        """What a buffer is stored in; `wide` is the precision of master weights.

        A bf16 exp_avg_sq is rounded to nearest: it cannot decay while 1 - beta2 is under half a
        spacing of bf16 (2^-9 to 2^-8).
        """
        narrow = {"exp_avg": self.config.exp_avg_dtype, "exp_avg_sq": self.config.exp_avg_sq_dtype}
        return torch.bfloat16 if narrow.get(name) == "bf16" else wide

    @cached_property
    def skips_on_device(self) -> bool:
        """Whether a found_inf word on the device suppresses the step, without the host having to
        look.
        """
        return self.implementation in ("torch-fused", "triton")

    def apply(
        self,
        master: Tensor,
        grad: Tensor,
        states: dict[str, Tensor],
        step: Tensor,
        *,
        lr: float,
        weight_decay: float,
        coefficient: Tensor,
        found_inf: Tensor,
        out: Tensor | None = None,
        eps_multiplier: float = 1.0,
    ) -> None:
        """One step in place on a flat segment, and its rounded master weights into `out`, in one
        pass over pieces that stay in cache.

        The gradient, times `coefficient` (scalar in the master's precision), and the states may be
        narrower than `master`: a piece of them is widened, used, and of the states rounded back.
        What `grad` holds afterwards is undefined. `step` (fp32 scalar) counts the steps taken
        before and is advanced by the caller; `eps_multiplier` is of Adam's epsilon; found_inf 1
        leaves everything as it is when skips_on_device.
        """
        eps = self.config.adam_eps * eps_multiplier
        # one pass over everything, narrow or not; never run on a GPU yet
        if self.implementation == "triton":
            scalars = step, coefficient, found_inf, lr
            self._by_kernel(master, grad, states, out, *scalars, eps, weight_decay)
            return
        size = PIECE_CUDA if master.is_cuda else PIECE
        update, folds = self._chosen(coefficient)
        settings = {
            "count": step + 1,
            "divisor": 1 / coefficient if folds else None,
            "found_inf": found_inf,
            "lr": lr,
            "weight_decay": weight_decay,
            "eps": eps,
        }
        stored = [grad, *(states[name] for name in self.state_names)]
        weights = pieces_of(master, size)
        rounded = [None] * len(weights) if out is None else pieces_of(out, size)
        for wide, weight, result in zip(
            _widened(stored, master, size), weights, rounded, strict=True
        ):
            if not folds:
                wide[0].mul_(coefficient)
            update(weight, *wide, **settings)
            if result is not None:
                result.copy_(weight)

    def _chosen(self, coefficient: Tensor) -> tuple[Callable[..., None], bool]:
        """What updates a piece, and whether it multiplies the gradient by the coefficient."""
        if self.config.optimizer == "sgd":
            return self._sgd, False
        if self.implementation == "torch-fused":
            return self._fused, coefficient.dtype == torch.float32  # the kernel reads an fp32 word
        return (self._apex if self.implementation == "apex" else self._loop), False

    def _by_kernel(
        self, master, grad, states, out, step, coefficient, found_inf, lr, eps, weight_decay
    ) -> None:
        moments = states["exp_avg"], states["exp_avg_sq"]
        betas = self.config.adam_beta1, self.config.adam_beta2
        scalars = step, coefficient, found_inf, lr
        adamw_(master, grad, *moments, out, *scalars, *betas, eps, weight_decay)

    def _fused(
        self, weight, grad, exp_avg, exp_avg_sq, *, count, divisor, found_inf, lr, weight_decay, eps
    ) -> None:
        # what torch.optim.adamw.adamw calls, without its 30 us of bookkeeping for each piece
        torch._fused_adamw_(
            [weight],
            [grad],
            [exp_avg],
            [exp_avg_sq],
            [],
            [count],
            lr=lr,
            beta1=self.config.adam_beta1,
            beta2=self.config.adam_beta2,
            weight_decay=weight_decay,
            eps=eps,
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
            found_inf=found_inf,
        )

    def _loop(
        self, weight, grad, exp_avg, exp_avg_sq, *, count, divisor, found_inf, lr, weight_decay, eps
    ) -> None:
        adamw(
            [weight],
            [grad],
            [exp_avg],
            [exp_avg_sq],
            [],
            [count - 1],
            foreach=False,
            amsgrad=False,
            beta1=self.config.adam_beta1,
            beta2=self.config.adam_beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=eps,
            maximize=False,
        )

    def _apex(
        self, weight, grad, exp_avg, exp_avg_sq, *, count, divisor, found_inf, lr, weight_decay, eps
    ) -> None:
        # never run: no machine with apex was at hand
        multi_tensor_adam, applier = apex.symbols("adam")
        overflow = torch.zeros(1, dtype=torch.int, device=weight.device)
        applier(
            multi_tensor_adam,
            overflow,
            [[grad], [weight], [exp_avg], [exp_avg_sq]],
            lr,
            self.config.adam_beta1,
            self.config.adam_beta2,
            eps,
            int(count.item()),
            1,
            True,
            weight_decay,
        )

    def _sgd(
        self, weight, grad, momentum_buffer, *, count, divisor, found_inf, lr, weight_decay, eps
    ) -> None:
        sgd(
            [weight],
            [grad],
            [momentum_buffer],
            fused=True,
            weight_decay=weight_decay,
            momentum=self.config.sgd_momentum,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            found_inf=found_inf,
        )


def pieces_of(buffer: Tensor, size: int) -> Sequence[Tensor]:
    """Views of a flat buffer, of at most `size` elements each."""
    return (buffer,) if buffer.numel() <= size else buffer.split(size)


def _widened(stored: list[Tensor], master: Tensor, size: int) -> Iterator[list[Tensor]]:
    """Pieces of `size` elements of a gradient and states in the precision of `master`. What has
    been done to those of states is stored, rounded, before the next ones come.
    """
    narrow = [buffer.dtype != master.dtype for buffer in stored]
    cut = zip(*(pieces_of(buffer, size) for buffer in stored), strict=True)
    if not any(narrow):
        yield from map(list, cut)
        return
    # one allocation: the C library would trim several, step by step
    rooms = iter(master.new_empty(sum(narrow), min(size, master.numel())))
    scratch = [next(rooms) if each else None for each in narrow]
    for pieces in cut:
        wide = [
            piece if room is None else room[: piece.numel()].copy_(piece)
            for piece, room in zip(pieces, scratch)
        ]
        yield wide
        for piece, value in zip(pieces[1:], wide[1:]):
            if value is not piece:
                piece.copy_(value)
