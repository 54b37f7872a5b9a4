"""litgpt's own pretrain command, trained to the end. Run by benchmarks/convergence.py.

Shims in addition to those of litgpt_pretrain.py, each where litgpt has no setting for what the
other side does: initial weights are drawn from the GPT-2 rule (litgpt's is GPT-NeoX's); AdamW
decays matrices alone (litgpt hands over all weights as one group); the learning rate of a step is
that of its last micro-batch, counted from 1 (litgpt counts from 0, half a step less). With
--same_start it begins with our weights and reads our windows.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path

import litgpt.pretrain
import numpy as np
import torch
from common import StepClock, TrainedWork, parse_work, report, tensor_of, validation_loss
from litgpt.args import EvalArgs, TrainArgs
from litgpt.data import DataModule
from litgpt_pretrain import model_config
from torch.utils.data import DataLoader


class MatrixDecayAdamW(torch.optim.AdamW):
    def __init__(self, params, lr: float, weight_decay: float, betas: tuple[float, float]):
        params = list(params)
        groups = [
            {"params": [p for p in params if p.dim() > 1], "weight_decay": weight_decay},
            {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0},
        ]
        super().__init__(groups, lr=lr, betas=tuple(betas), fused=True)


class Windows(DataModule):
    """Training tokens cut into windows that do not overlap, shuffled by the seed; or our windows
    in our order.
    """

    def __init__(self, work: TrainedWork, start: Mapping[str, np.ndarray]):
        super().__init__()
        self.work, self.held_out = work, tensor_of(start, "validation")
        tokens = tensor_of(start, "train").long()
        self.windows = tokens.unfold(0, work.seq + 1, work.seq)
        if work.same_start:
            self.windows = tokens.unfold(0, work.seq + 1, 1)[tensor_of(start, "places")]

    def connect(
        self, tokenizer=None, batch_size: int = 1, max_seq_length: int | None = None
    ) -> None:
        pass

    def train_dataloader(self) -> DataLoader:
        order = torch.Generator().manual_seed(self.work.seed)
        return DataLoader(
            self.windows,
            batch_size=self.work.micro_batch,
            shuffle=not self.work.same_start,
            generator=order,
        )

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.held_out, batch_size=self.work.micro_batch)


@torch.no_grad()
def draw_weights(work: TrainedWork, model: torch.nn.Module) -> None:
    """The GPT-2 rule: normal matrices, residual outputs scaled down by depth, norms of ones."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            residual = name.endswith(".proj.weight")
            parameter.normal_(
                0.0, work.initial_std / (math.sqrt(2 * work.layers) if residual else 1.0)
            )


@torch.no_grad()
def take_weights(
    work: TrainedWork, model: torch.nn.Module, start: Mapping[str, np.ndarray]
) -> None:
    """Our initial matrices; norms begin as ones."""
    draw_weights(work, model)
    model.lm_head.weight.copy_(tensor_of(start, "embedding.word.weight"))
    for i, block in enumerate(model.transformer.h):
        attention, mlp = f"layers.{i}.attention", f"layers.{i}.mlp"
        heads = tensor_of(start, *(f"{attention}.{part}.weight" for part in "qkv"))
        block.attn.qkv.weight.copy_(heads)
        block.attn.proj.weight.copy_(tensor_of(start, f"{attention}.proj.weight"))
        block.mlp.fc_1.weight.copy_(tensor_of(start, f"{mlp}.gate.weight"))
        block.mlp.fc_2.weight.copy_(tensor_of(start, f"{mlp}.up.weight"))
        block.mlp.proj.weight.copy_(tensor_of(start, f"{mlp}.down.weight"))


def main() -> None:
    work, start = parse_work(TrainedWork)
    torch.set_num_threads(work.threads)
    torch.compile = lambda model: model
    litgpt.pretrain.save_checkpoint = lambda *_: None
    initial = partial(take_weights, start=start) if work.same_start else draw_weights
    litgpt.pretrain.initialize_weights = lambda fabric, model, **_: initial(work, model)
    rate = litgpt.pretrain.get_lr
    litgpt.pretrain.get_lr = lambda lr, done, *rest: rate(lr, done + 1, *rest)
    models, original = [], litgpt.pretrain.GPT
    litgpt.pretrain.GPT = lambda config: models.append(original(config)) or models[-1]
    held_out, clock = tensor_of(start, "validation"), StepClock()
    with tempfile.TemporaryDirectory() as folder:
        litgpt.pretrain.setup(
            "benchmark",
            model_config=model_config(work),
            out_dir=Path(folder),
            precision="32-true",
            data=Windows(work, start),
            devices=1,
            logger_name="csv",
            seed=work.seed,
            optimizer={
                "class_path": f"{__name__}.MatrixDecayAdamW",
                "init_args": {
                    "lr": work.lr,
                    "weight_decay": work.weight_decay,
                    "betas": (0.9, 0.95),
                },
            },
            train=TrainArgs(
                save_interval=None,
                log_interval=work.warmup,
                global_batch_size=work.step_samples,
                micro_batch_size=work.micro_batch,
                max_tokens=work.steps * work.step_tokens,
                max_norm=1.0,
                min_lr=work.min_lr,
                lr_warmup_steps=work.lr_warmup,
                tie_embeddings=True,
            ),
            eval=EvalArgs(interval=work.steps + 1, max_iters=2, final_validation=False),
        )
    model = models[0].eval()
    report(
        work,
        clock,
        [],
        sum(p.numel() for p in model.parameters()),
        {"litgpt": version("litgpt")},
        rate_error=clock.rate_error(work),
        validation_loss=validation_loss(model, held_out),
    )


if __name__ == "__main__":
    main()
