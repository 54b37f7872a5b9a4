"""litgpt's own pretrain command on its own GPT. Run by benchmarks/training.py.

Shims: on CPUs torch.compile is the identity (compilation is off on both sides); AdamW is given as a
class of ours, because litgpt asks for the fused kernel on CUDA alone; nothing is saved after the
last step, which is after the clock (the saver reads litgpt's command line).
"""

from __future__ import annotations

import tempfile
from importlib.metadata import version
from pathlib import Path

import litgpt.pretrain
import torch
from common import StepClock, Work, parse_work, report, tensor_of
from litgpt.args import EvalArgs, TrainArgs
from litgpt.config import Config
from litgpt.data import DataModule
from torch.utils.data import DataLoader


class FusedAdamW(torch.optim.AdamW):
    def __init__(self, params, lr: float, weight_decay: float, betas: tuple[float, float]):
        super().__init__(params, lr=lr, weight_decay=weight_decay, betas=tuple(betas), fused=True)


class Tokens(DataModule):
    def __init__(self, work: Work, tokens: torch.Tensor):
        super().__init__()
        self.work, self.rows = work, tokens

    def connect(
        self, tokenizer=None, batch_size: int = 1, max_seq_length: int | None = None
    ) -> None:
        pass

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.rows, batch_size=self.work.micro_batch)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.rows[: self.work.micro_batch], batch_size=self.work.micro_batch)


def model_config(work: Work) -> Config:
    """The model of the work in litgpt's terms."""
    return Config(
        name="benchmark",
        block_size=work.seq,
        vocab_size=work.vocab,
        padded_vocab_size=work.vocab,
        n_layer=work.layers,
        n_head=work.heads,
        n_query_groups=work.key_heads,
        n_embd=work.hidden,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        intermediate_size=work.ffn,
        norm_eps=1e-5,
    )


def main() -> None:
    work, start = parse_work()
    assert work.dropout == 0, "litgpt has no dropout"
    torch.set_num_threads(work.threads)
    if work.device == "cpu":
        torch.compile = lambda model: model
    litgpt.pretrain.save_checkpoint = lambda *_: None
    models, original = [], litgpt.pretrain.GPT
    # only to count the parameters afterwards
    litgpt.pretrain.GPT = lambda config: models.append(original(config)) or models[-1]
    clock = StepClock()
    with tempfile.TemporaryDirectory() as folder:
        litgpt.pretrain.setup(
            "benchmark",
            model_config=model_config(work),
            out_dir=Path(folder),
            precision="bf16-mixed" if work.precision == "bf16" else "32-true",
            data=Tokens(work, tensor_of(start, "tokens")),
            devices=1,
            logger_name="csv",
            seed=1234,
            optimizer={
                "class_path": f"{__name__}.FusedAdamW",
                "init_args": {"lr": work.lr, "weight_decay": 0.1, "betas": (0.9, 0.95)},
            },
            train=TrainArgs(
                save_interval=None,
                log_interval=work.steps,
                global_batch_size=work.micro_batch * work.accumulation,
                micro_batch_size=work.micro_batch,
                max_tokens=work.steps * work.step_tokens,
                max_norm=1.0,
                min_lr=0.0,
                lr_warmup_steps=work.lr_warmup,
                tie_embeddings=False,
            ),
            eval=EvalArgs(interval=work.steps + 1, max_iters=2, final_validation=False),
        )
    report(
        work,
        clock,
        [],
        sum(p.numel() for p in models[0].parameters()),
        {"litgpt": version("litgpt")},
    )


if __name__ == "__main__":
    main()
