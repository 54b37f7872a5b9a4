"""nanoGPT's own train.py on its own GPT, from a checkout of nanoGPT in the current folder (which is
on PYTHONPATH, too). Run by benchmarks/convergence.py.

Shims: the seed that train.py fixes becomes the run's; the model is made with the vocabulary of the
data (nanoGPT reads that from a pickle, which nothing here writes) and is kept to be evaluated after
the last step. With --each_once the places that train.py draws for its windows of training tokens
are those of a shuffled cut into windows that do not overlap; as it comes, it draws any place again
and again. With --same_start it begins with our weights and reads our windows.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path

import model as nanogpt  # of the checkout
import numpy as np
import torch
from common import StepClock, TrainedWork, parse_work, report, tensor_of, validation_loss


def settings(work: TrainedWork, data: Path, out: Path) -> list[str]:
    """train.py's command line."""
    return f"""--out_dir={out} --dataset={data} --device=cpu --dtype=float32 --compile=False
        --eval_interval={work.steps} --eval_iters=1 --log_interval={work.warmup}
        --n_layer={work.layers} --n_head={work.heads} --n_embd={work.hidden} --bias=True
        --block_size={work.seq} --dropout=0.0 --batch_size={work.micro_batch}
        --gradient_accumulation_steps={work.accumulation}
        --learning_rate={work.lr} --min_lr={work.min_lr} --warmup_iters={work.lr_warmup - 1}
        --lr_decay_iters={work.steps - 1} --max_iters={work.steps - 1}
        --weight_decay={work.weight_decay} --beta1=0.9 --beta2=0.95 --grad_clip=1.0""".split()


class WindowsOnce:
    """Replaces torch.randint: places of windows that do not overlap, each once an epoch; or
    the given ones, [n] places. The second draw of train.py is for its evaluation before the first
    step, and takes none of these.
    """

    def __init__(self, work: TrainedWork, tokens: int, places: torch.Tensor | None = None):
        self.work, self.tokens, self.original = work, tokens, torch.randint
        self.order = torch.Generator().manual_seed(work.seed)
        self.waiting = torch.empty(0, dtype=torch.int64)
        self.given, self.draws = places is not None, 0
        if places is not None:
            self.waiting = places

    def __call__(self, high: int, size: tuple[int]) -> torch.Tensor:
        if high != self.tokens - self.work.seq:  # not the training tokens
            return self.original(high, size)
        self.draws += 1
        if self.given and self.draws == 2:
            return self.original(high, size)
        if len(self.waiting) < size[0]:
            count = (self.tokens - 1) // self.work.seq
            self.waiting = torch.randperm(count, generator=self.order) * self.work.seq
        taken, self.waiting = self.waiting[: size[0]], self.waiting[size[0] :]
        return taken


@torch.no_grad()
def take_weights(model: torch.nn.Module, start: Mapping[str, np.ndarray]) -> None:
    """Our initial matrices; biases and norms begin as ours do."""
    model.transformer.wte.weight.copy_(tensor_of(start, "embedding.word.weight"))
    model.transformer.wpe.weight.copy_(tensor_of(start, "embedding.position.weight"))
    for i, block in enumerate(model.transformer.h):
        attention, mlp = f"layers.{i}.attention", f"layers.{i}.mlp"
        heads = tensor_of(start, *(f"{attention}.{part}.weight" for part in "qkv"))
        block.attn.c_attn.weight.copy_(heads)
        block.attn.c_proj.weight.copy_(tensor_of(start, f"{attention}.proj.weight"))
        block.mlp.c_fc.weight.copy_(tensor_of(start, f"{mlp}.up.weight"))
        block.mlp.c_proj.weight.copy_(tensor_of(start, f"{mlp}.down.weight"))


def main() -> None:
    work, start = parse_work(TrainedWork)
    folder = Path(sys.argv[1]).resolve()
    torch.set_num_threads(work.threads)
    seeded = torch.manual_seed
    torch.manual_seed = lambda _: seeded(work.seed)
    models, original = [], nanogpt.GPT

    def make(config: nanogpt.GPTConfig) -> nanogpt.GPT:
        config.vocab_size = work.vocab
        models.append(original(config))
        if work.same_start:
            take_weights(models[-1], start)
        return models[-1]

    nanogpt.GPT = make
    if work.same_start:
        torch.randint = WindowsOnce(work, len(start["train"]), tensor_of(start, "places"))
    elif work.each_once:
        torch.randint = WindowsOnce(work, len(start["train"]))
    checkout = Path(nanogpt.__file__).parent
    os.chdir(checkout)
    clock = StepClock()
    sys.argv = ["train.py", *settings(work, folder, folder / "out")]
    runpy.run_path(str(checkout / "train.py"), run_name="__main__")
    model, held_out = models[0].eval(), tensor_of(start, "validation")
    report(
        work,
        clock,
        [],
        sum(p.numel() for p in model.parameters()),
        {},
        # without targets its forward pass gives the logits of the last position alone
        rate_error=clock.rate_error(work),
        validation_loss=validation_loss(lambda tokens: model(tokens, tokens)[0], held_out),
    )


if __name__ == "__main__":
    main()
