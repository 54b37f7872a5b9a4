"""DeepSpeed's PipelineModule, 1F1B, on the plain loop's layers, over Gloo. Run by
benchmarks/training.py.

No shims: settings only. Parameters carry the mark model_parallel, without which the norm for
clipping would be that of the first stage alone.
"""

from __future__ import annotations

import deepspeed
import torch
import torch.nn.functional as F
from common import StepClock, parse_work, rank_samples, report, tensor_of
from deepspeed.pipe import PipelineModule
from plain_loop import GPT, Layer, groups
from torch import Tensor, nn


class Block(nn.Module):
    """A layer that knows the rotary tables: a pipeline hands on x [b, s, h] alone."""

    def __init__(self, layer: Layer, model: GPT):
        super().__init__()
        self.layer, self.cos, self.sin = layer, model.cos, model.sin

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, self.cos, self.sin)


def main() -> None:
    work, start = parse_work()
    assert (
        work.processes == work.pipeline_parallel == 2
        and work.precision == "fp32"
        and work.dropout == 0
    )
    torch.set_num_threads(work.threads)
    model = GPT(work, torch.float32)
    model.load(start)
    parameters, tokens = sum(p.numel() for p in model.parameters()), tensor_of(start, "tokens")
    for parameter in model.parameters():
        parameter.model_parallel = True
    deepspeed.init_distributed("gloo")
    layers = [
        model.embedding,
        *(Block(layer, model) for layer in model.layers),
        model.norm,
        model.head,
    ]
    stages = PipelineModule(
        layers,
        num_stages=2,
        partition_method="uniform",
        loss_fn=lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten()),
    )
    assert stages.parts[1] == 1 + work.first_stage_layers, stages.parts
    optimizer = torch.optim.AdamW(
        groups(stages), lr=work.lr, betas=(0.9, 0.95), eps=1e-8, fused=True
    )
    settings = {
        "train_micro_batch_size_per_gpu": work.micro_batch,
        "gradient_accumulation_steps": work.accumulation,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 0},
        "steps_per_print": 10**9,
    }
    engine, optimizer, _, _ = deepspeed.initialize(
        model=stages, optimizer=optimizer, config=settings
    )
    clock, losses = StepClock(), []
    for step in range(work.steps):
        for group in optimizer.param_groups:
            group["lr"] = work.learning_rate(step)
        batches = iter(
            [(batch[:, :-1], batch[:, 1:]) for batch in rank_samples(tokens, step, work, 0)]
        )
        # every stage gets it
        losses.append(engine.train_batch(batches).item() * engine.is_last_stage())
    report(work, clock, losses, parameters, {"deepspeed": deepspeed.__version__})


if __name__ == "__main__":
    main()
