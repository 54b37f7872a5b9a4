"""Hugging Face Trainer on transformers' Llama. Run by benchmarks/training.py. No shims:
settings only.
"""

from __future__ import annotations

import tempfile

import torch
import transformers
from common import StepClock, parse_work, report, tensor_of
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Tokens(torch.utils.data.Dataset):
    """Samples as the Trainer's default collator takes them; the model shifts the labels itself."""

    def __init__(self, tokens: torch.Tensor):
        self.rows = tokens[:, :-1]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main() -> None:
    work, start = parse_work()
    assert work.dropout == 0, "Llama in transformers has no dropout on the residual stream"
    torch.set_num_threads(work.threads)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=work.vocab,
            hidden_size=work.hidden,
            intermediate_size=work.ffn,
            num_hidden_layers=work.layers,
            num_attention_heads=work.heads,
            max_position_embeddings=work.seq,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(
                output_dir=folder,
                use_cpu=True,
                bf16=work.precision == "bf16",
                optim="adamw_torch_fused",
                learning_rate=work.lr,
                adam_beta2=0.95,
                weight_decay=0.1,
                max_grad_norm=1.0,
                lr_scheduler_type="cosine",
                warmup_steps=work.lr_warmup,
                max_steps=work.steps,
                per_device_train_batch_size=work.micro_batch,
                gradient_accumulation_steps=work.accumulation,
                logging_steps=work.steps,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                dataloader_pin_memory=False,
            ),
            train_dataset=Tokens(tensor_of(start, "tokens")),
        )
        clock = StepClock()
        result = trainer.train()
    parameters = sum(p.numel() for p in model.parameters())
    report(
        work, clock, [result.training_loss], parameters, {"transformers": transformers.__version__}
    )


if __name__ == "__main__":
    main()
