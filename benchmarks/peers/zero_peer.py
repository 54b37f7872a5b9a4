"""DeepSpeed's ZeRO, torch's FSDP2 and DistributedDataParallel with ZeroRedundancyOptimizer on the
plain loop's model, over Gloo.

    # with the variables of torchrun; steps are taken as turns.py prescribes
    python zero_peer.py SYSTEM START --layers 8 ...

Run by benchmarks/zero.py. No shims: settings only. Everything computes in bf16, keeps fp32
master weights and moments, and sums gradients over micro-batches and over ranks in fp32, but:
- deepspeed-0 accumulates in bf16, for it refuses the other (`unsupported mix of model_dtype and
  grad_accum_dtype`);
- ddp-* compute under autocast: parameters are fp32, and their bf16 copies live as long as a forward
  pass. Gradients are dropped after the step where a library lets them go. DeepSpeed's buckets and
  limits are those of a model this small: a bucket of the largest block, one more prefetched,
  nothing kept gathered. They hold its memory down and cost it messages; `deepspeed-N-default`
  leaves all of them as DeepSpeed comes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from common import Work, parse_work, rank_samples, tensor_of
from plain_loop import GPT, groups
from torch import Tensor, nn
from turns import Turns

# micro-batches [b, s + 1] and a learning rate -> mean loss
Step = Callable[[Iterator[Tensor], float], float]


def adamw(model: nn.Module, work: Work) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(model), lr=work.lr, betas=(0.9, 0.95), eps=1e-8, fused=True)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def zero_settings(stage: int, largest: int | None) -> dict[str, int]:
    """DeepSpeed's `zero_optimization`: buckets and limits of `largest` elements, or all of its
    defaults with None.
    """
    if largest is None:
        return {"stage": stage}
    buckets = dict.fromkeys(
        ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size"), largest
    )
    return {
        "stage": stage,
        **buckets,
        "stage3_max_live_parameters": 2 * largest,
        "stage3_max_reuse_distance": 0,
        "stage3_param_persistence_threshold": 0,
    }


def deepspeed_steps(
    model: GPT, work: Work, turns: Turns, stage: int, default: bool = False
) -> Step:
    import deepspeed

    largest = max(
        sum(p.numel() for p in part.parameters()) for part in (model.embedding, model.layers[0])
    )
    settings = {
        "train_micro_batch_size_per_gpu": work.micro_batch,
        "gradient_accumulation_steps": work.accumulation,
        "gradient_clipping": 1.0,
        "zero_optimization": zero_settings(stage, None if default else largest),
        "bf16": {"enabled": True},
        "communication_data_type": "fp32",
        "steps_per_print": 10**9,
        **({"data_types": {"grad_accum_dtype": "fp32"}} if stage > 0 else {}),
    }
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, optimizer=adamw(model, work), config=settings
    )

    def step(batches: Iterator[Tensor], rate: float) -> float:
        set_rate(optimizer, rate)
        total = 0.0
        for index, batch in enumerate(batches):
            turns.begin_micro_batch(index)
            loss = engine(batch[:, :-1], batch[:, 1:])
            total += loss.item() / work.accumulation
            turns.begin_backward()
            engine.backward(loss)
            del loss
            if index == work.accumulation - 1:
                turns.begin_update()
            engine.step()
        return total

    return step


def torch_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    work: Work,
    turns: Turns,
    last: Callable[[bool], object],
    autocast: bool,
) -> Step:
    """Plain PyTorch: last(True) is called before the last micro-batch of a step, last(False) before
    the others.
    """

    def step(batches: Iterator[Tensor], rate: float) -> float:
        set_rate(optimizer, rate)
        total = 0.0
        for index, batch in enumerate(batches):
            turns.begin_micro_batch(index)
            last(index == work.accumulation - 1)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(batch[:, :-1], batch[:, 1:])
            total += loss.item() / work.accumulation
            turns.begin_backward()
            (loss / work.accumulation).backward()
            del loss
        turns.begin_update()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def fsdp_steps(model: GPT, work: Work, turns: Turns, keep: bool) -> Step:
    """A unit is the embedding, a layer, and the head with the last norm. With `keep` a unit stays
    gathered from its first forward pass of the step to its last backward pass, as stage 2 would
    have it; gradients are reduce-scattered in every micro-batch.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in (model.embedding, *model.layers, [model.norm, model.head]):
        fully_shard(unit, mp_policy=policy, reshard_after_forward=not keep)
    fully_shard(model, mp_policy=policy, reshard_after_forward=not keep)
    last = model.set_reshard_after_backward if keep else lambda _: None
    return torch_step(model, adamw(model, work), work, turns, last, autocast=False)


def ddp_steps(model: GPT, work: Work, turns: Turns, stage: int) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    whole = DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)
    if stage == 0:
        optimizer = adamw(whole, work)
    else:
        first, *rest = groups(whole)
        optimizer = ZeroRedundancyOptimizer(
            first["params"],
            torch.optim.AdamW,
            lr=work.lr,
            betas=(0.9, 0.95),
            eps=1e-8,
            fused=True,
            weight_decay=first["weight_decay"],
        )
        for group in rest:
            optimizer.add_param_group(group)

    def last(is_last: bool) -> None:
        whole.require_backward_grad_sync = is_last  # what no_sync() sets

    return torch_step(whole, optimizer, work, turns, last, autocast=True)


SYSTEMS: dict[str, Callable[[GPT, Work, Turns], Step]] = {
    **{
        f"deepspeed-{stage}": lambda model, work, turns, stage=stage: deepspeed_steps(
            model, work, turns, stage
        )
        for stage in range(4)
    },
    **{
        f"deepspeed-{stage}-default": lambda model, work, turns, stage=stage: deepspeed_steps(
            model, work, turns, stage, default=True
        )
        for stage in range(4)
    },
    "fsdp2-keep": lambda model, work, turns: fsdp_steps(model, work, turns, keep=True),
    "fsdp2": lambda model, work, turns: fsdp_steps(model, work, turns, keep=False),
    "ddp-0": lambda model, work, turns: ddp_steps(model, work, turns, 0),
    "ddp-1": lambda model, work, turns: ddp_steps(model, work, turns, 1),
}


def main() -> None:
    system = sys.argv.pop(1)
    work, start = parse_work()
    torch.set_num_threads(work.threads)
    torch.manual_seed(1234)
    dist.init_process_group("gloo")
    model = GPT(work, torch.bfloat16)
    model.load(start)
    tokens, rank = start["tokens"], dist.get_rank()
    start = {"tokens": tokens}
    turns = Turns()
    step = SYSTEMS[system](model, work, turns)
    for index in turns:
        own = tokens[index * work.step_samples : (index + 1) * work.step_samples]
        turns.note(
            step(
                iter(rank_samples(tensor_of({"tokens": own}, "tokens"), 0, work, rank)),
                work.learning_rate(index),
            )
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
