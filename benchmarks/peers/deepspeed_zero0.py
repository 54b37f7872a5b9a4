"""DeepSpeed, ZeRO stage 0, on the plain loop's model, over Gloo. Run by
benchmarks/training.py. No shims: settings only.

With bf16 DeepSpeed converts the whole model, keeps fp32 master weights, and sums gradients over
ranks in bf16: stage 0 offers nothing else. It also sets AdamW's state up by a step with zero
gradients, which counts in the bias correction: the first updates are up to a quarter smaller, and
its bf16 losses differ from the other sides' in the third decimal.
"""

from __future__ import annotations

import deepspeed
import torch
from common import StepClock, parse_work, rank_samples, report, tensor_of
from plain_loop import GPT, groups


def main() -> None:
    work, start = parse_work()
    assert work.processes == work.data_parallel
    torch.set_num_threads(work.threads)
    torch.manual_seed(1234)
    bf16 = work.precision == "bf16"
    model = GPT(work, torch.bfloat16 if bf16 else torch.float32)
    model.load(start)
    parameters, tokens = sum(p.numel() for p in model.parameters()), tensor_of(start, "tokens")
    deepspeed.init_distributed("gloo")
    optimizer = torch.optim.AdamW(
        groups(model), lr=work.lr, betas=(0.9, 0.95), eps=1e-8, fused=True
    )
    settings = {
        "train_micro_batch_size_per_gpu": work.micro_batch,
        "gradient_accumulation_steps": work.accumulation,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 0},
        "bf16": {"enabled": bf16},
        "steps_per_print": 10**9,
    }
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=settings
    )
    clock, losses = StepClock(), []
    for step in range(work.steps):
        for group in optimizer.param_groups:
            group["lr"] = work.learning_rate(step)
        total = 0.0
        for batch in rank_samples(tokens, step, work, engine.global_rank):
            loss = engine(batch[:, :-1], batch[:, 1:])
            engine.backward(loss)
            engine.step()
            total += loss.item() / work.accumulation
        losses.append(total)
    report(work, clock, losses, parameters, {"deepspeed": deepspeed.__version__})


if __name__ == "__main__":
    main()
