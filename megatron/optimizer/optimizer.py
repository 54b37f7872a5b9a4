"""Mixed-precision optimizer over flat blocks: fp32 master weights and moments, one norm, one fused pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.config.groups import Config
from megatron.dist.groups import Groups, one_process
from megatron.model.init import fill_initial
from megatron.model.layout import Box, owns
from megatron.optimizer.blocks import Block, accumulation_dtype
from megatron.optimizer.clip import clip_coefficient, sum_of_squares
from megatron.optimizer.update import UpdateRule, choose_adam


@dataclass(frozen=True)
class StepOutcome:
    """Scalars of one step, still on the device: gradient norm before clipping (float64), and 1.0 where the step was skipped."""

    grad_norm: Tensor
    skipped: Tensor


class Optimizer:
    """Owns what a step needs beside weights and gradients: master weights (when weights are narrow), moments, the step count."""

    def __init__(self, blocks: list[Block], config: Config, groups: Groups = one_process()):
        self.blocks, self.config, self.groups = blocks, config.optimizer, groups
        device, dtype = blocks[0].weight.device, blocks[0].weight.dtype
        self.wide = accumulation_dtype(dtype)
        implementation = choose_adam(config.optimizer, device) if config.optimizer.optimizer == "adam" else "torch-fused"
        self.rule = UpdateRule(config.optimizer, implementation)
        self.masters = [block.weight if dtype == self.wide else torch.zeros_like(block.weight, dtype=self.wide) for block in blocks]
        self.states = {name: [torch.zeros_like(master) for master in self.masters] for name in self.rule.state_names}
        self.steps = torch.zeros((), dtype=torch.float32, device=device)

    def initialise(self, config: Config) -> None:
        """Fill the master weights from the seed and publish them."""
        for box, master in self.weight_boxes():
            fill_initial(box, master, config.model, config.training.seed)
        self.publish_weights()

    def publish_weights(self) -> None:
        """Round the master weights into the weights the model computes with."""
        for block, master in zip(self.blocks, self.masters):
            if master is not block.weight:
                block.weight.copy_(master)

    def zero_grad(self) -> None:
        """Clear the gradient buffers."""
        for block in self.blocks:
            block.grad.zero_()

    def counted(self, buffers: list[Tensor]) -> Iterator[Tensor]:
        """This rank's pieces of one flat buffer a block, such that over all ranks every element of the model comes exactly once.

        Of the ranks that hold the same parameters each takes its slice of every block; what tensor-parallel ranks share, the first takes.
        """
        replicas = self.groups.replicas
        for block, buffer in zip(self.blocks, buffers):
            size = buffer.numel() // replicas.size
            low, high = replicas.rank * size, (replicas.rank + 1) * size
            for start, stop in block.counted(self.groups):
                if max(start, low) < min(stop, high):
                    yield buffer[max(start, low) : min(stop, high)]

    def squares(self) -> Tensor:
        """This rank's share of the gradient's sum of squares (float64)."""
        return sum_of_squares(self.counted([block.grad for block in self.blocks]), self.steps.device)

    @torch.no_grad()
    def step(self, *, lr: float, weight_decay: float, squares: Tensor, grad_factor: Tensor | float) -> StepOutcome:
        """Update the weights from the gradient buffers, whose sum of squares over all ranks is `squares`.

        `grad_factor` (float64 scalar or number) turns the accumulated gradient into that of the mean loss per valid token: nominal
        tokens / (valid tokens x loss scale). A non-finite gradient or factor leaves weights, moments and step count as they are.
        """
        norm = squares.sqrt() * grad_factor
        found_inf = (~torch.isfinite(norm)).to(torch.float32)
        coefficient = (clip_coefficient(norm, self.config.clip_grad) * grad_factor).to(self.wide)
        if self.rule.skips_on_device and norm.is_cuda or not found_inf.item():
            for decays in (True, False):
                pieces = [[piece for block, buffer in zip(self.blocks, buffers) for piece, decay in block.segments(buffer) if decay == decays]
                          for buffers in (self.masters, [block.grad for block in self.blocks], *self.states.values())]
                if pieces[0]:  # a rank with the embedding or the head alone has nothing that does not decay
                    self.rule.apply(pieces[0], pieces[1], dict(zip(self.states, pieces[2:])), self.steps, lr=lr,
                                    weight_decay=weight_decay if decays else 0.0, coefficient=coefficient, found_inf=found_inf)
            self.publish_weights()
        self.steps += 1 - found_inf
        return StepOutcome(norm, found_inf)

    def weight_boxes(self) -> Iterator[tuple[Box, Tensor]]:
        """Each logical weight with the view of the master buffer that holds it."""
        yield from self._boxes(self.masters)

    def state_boxes(self) -> Iterator[tuple[Box, Tensor]]:
        """Each logical optimizer tensor, named `optimizer.<state>.<weight>`."""
        for state, buffers in self.states.items():
            for box, buffer in self._boxes(buffers):
                yield replace(box, name=f"optimizer.{state}.{box.name}"), buffer

    def _boxes(self, buffers: list[Tensor]) -> Iterator[tuple[Box, Tensor]]:
        for block, buffer in zip(self.blocks, buffers):
            for entry in block.entries:
                for box in entry.boxes:
                    yield box, entry.view(buffer)

    def squared_weight_norm(self) -> Tensor:
        """This rank's share of the sum of squares of the master weights (padding is zero)."""
        return sum_of_squares(self.counted(self.masters), self.steps.device)

    def zero_gradients(self) -> Tensor:
        """How many of this rank's real gradient elements are exactly zero, padding left out; every element counts on one rank."""
        count = torch.zeros((), dtype=torch.float64, device=self.steps.device)
        for block in self.blocks:
            for entry in block.entries:
                for box in entry.boxes:
                    if owns(box, self.groups):
                        count += (box.view(entry.view(block.grad)) == 0).sum()
        return count
