"""One side of benchmarks/adam.py: an optimizer step on a CPU, from bf16 gradients to bf16
weights, taken on request (turns.py).

    python adam_step.py SIDE THREADS SEGMENTS SIZE

Every side holds SEGMENTS flat tensors of SIZE elements: fp32 master weights and moments (`ours,
bf16 moments`: those in bf16), bf16 weights, and bf16 gradients that are the same in every step; the
coefficient unscales and clips. Only our side needs our package.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from turns import Turns

LR, BETAS, EPS, DECAY, COEFFICIENT = 1e-4, (0.9, 0.95), 1e-8, 0.1, 0.5


class Segments:
    """The tensors of a side."""

    def __init__(self, count: int, size: int):
        draw = torch.Generator().manual_seed(1)
        self.masters = [torch.empty(size).normal_(std=0.02, generator=draw) for _ in range(count)]
        self.weights = [master.bfloat16() for master in self.masters]
        self.gradients = [
            torch.empty(size).normal_(std=0.01, generator=draw).bfloat16() for _ in range(count)
        ]
        self.coefficient = torch.tensor(COEFFICIENT)


def ours(segments: Segments, moments: str) -> Callable[[], None]:
    """Our pass over one segment after the other."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from megatron.config.groups import OptimizerConfig
    from megatron.optimizer.update import StepScalars, UpdateRule

    config = OptimizerConfig(
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_eps=EPS,
        exp_avg_dtype=moments,
        exp_avg_sq_dtype=moments,
    )
    rule, steps, found_inf = UpdateRule(config, "torch-fused"), torch.tensor(0.0), torch.tensor(0.0)
    dtypes = {name: rule.state_dtype(name, torch.float32) for name in rule.state_names}
    states = [
        {name: torch.zeros_like(master, dtype=dtype) for name, dtype in dtypes.items()}
        for master in segments.masters
    ]

    def step() -> None:
        coefficient = segments.coefficient
        gradient_scalars = coefficient, 1 / coefficient, found_inf
        scalars = StepScalars(LR, DECAY, EPS, steps, steps + 1, *gradient_scalars)
        for master, grad, state, out in zip(
            segments.masters, segments.gradients, states, segments.weights
        ):
            rule.apply(master, grad, state, scalars, out)
        steps.add_(1)

    return step


def chain(
    segments: Segments, make: Callable[[list[Tensor]], torch.optim.Optimizer]
) -> Callable[[], None]:
    """The usual passes, as ZeRO-Offload makes them: widen the gradients, scale them, an optimizer's
    step, round the weights.
    """
    parameters = [torch.nn.Parameter(master) for master in segments.masters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = make(parameters)

    def step() -> None:
        for parameter, grad in zip(parameters, segments.gradients):
            parameter.grad.copy_(grad)
            parameter.grad.mul_(segments.coefficient)
        optimizer.step()
        for parameter, out in zip(parameters, segments.weights):
            out.copy_(parameter)

    return step


def adamw(**choice: bool) -> Callable[[list[Tensor]], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(
        parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, **choice
    )


def deepspeed_adam(parameters: list[Tensor]) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(
        parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, adamw_mode=True
    )


SIDES: dict[str, Callable[[Segments], Callable[[], None]]] = {
    "ours": lambda segments: ours(segments, "fp32"),
    "ours, bf16 moments": lambda segments: ours(segments, "bf16"),
    "torch loop": lambda segments: chain(segments, adamw(foreach=False)),
    "torch foreach": lambda segments: chain(segments, adamw(foreach=True)),
    "torch fused": lambda segments: chain(segments, adamw(fused=True)),
    "DeepSpeedCPUAdam": lambda segments: chain(segments, deepspeed_adam),
}


@torch.no_grad()
def main() -> None:
    side, threads, count, size = sys.argv[1], *map(int, sys.argv[2:])
    torch.set_num_threads(threads)
    segments = Segments(count, size)
    initial = segments.masters[-1].clone()
    step = SIDES[side](segments)
    for _ in Turns():
        step()
    moved = (segments.masters[-1] - initial).double().norm().item()
    rounded = all(
        torch.equal(master.bfloat16(), weight)
        for master, weight in zip(segments.masters, segments.weights)
    )
    print(
        "TURN " + json.dumps({"moved": moved, "rounded": rounded, "torch": torch.__version__}),
        flush=True,
    )


if __name__ == "__main__":
    main()
