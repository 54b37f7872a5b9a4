"""Hugging Face Trainer on transformers' Llama, or with experts on its Mixtral. Run by
benchmarks/training.py. No shims: settings only.

Mixtral's experts are torch's `grouped_mm` in fp32, and its own loop over them ("eager") in bf16:
the faster one of these two each time. autocast leaves `grouped_mm` in fp32, and makes the loop's
products bf16.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping

import numpy as np
import torch
import transformers
from common import StepClock, Work, parse_work, report, tensor_of
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)


class Tokens(torch.utils.data.Dataset):
    """Samples as the Trainer's default collator takes them: each token with the one after it."""

    def __init__(self, tokens: torch.Tensor):
        self.rows = tokens

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.rows[index]
        # the loss is that of shift_labels, and there is none without labels
        return {"input_ids": row[:-1], "labels": row[:-1], "shift_labels": row[1:]}


def build(work: Work) -> PreTrainedModel:
    shape = {
        "vocab_size": work.vocab,
        "hidden_size": work.hidden,
        "intermediate_size": work.expert_ffn if work.experts else work.ffn,
        "num_hidden_layers": work.layers,
        "num_attention_heads": work.heads,
        "num_key_value_heads": work.key_heads,
        "max_position_embeddings": work.seq,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "use_cache": False,
        "attn_implementation": "sdpa",
    }
    if not work.experts:
        return LlamaForCausalLM(LlamaConfig(**shape))
    config = MixtralConfig(**shape, num_local_experts=work.experts, num_experts_per_tok=work.topk)
    model = MixtralForCausalLM(config)
    model.set_experts_implementation("eager" if work.precision == "bf16" else "grouped_mm")
    return model


@torch.no_grad()
def load(model: PreTrainedModel, start: Mapping[str, np.ndarray], work: Work) -> None:
    """Take the initial weights; those of the norms are ones already."""
    model.model.embed_tokens.weight.copy_(tensor_of(start, "embedding.word.weight"))
    model.lm_head.weight.copy_(tensor_of(start, "head.weight"))
    for i, layer in enumerate(model.model.layers):
        attention, mlp = f"layers.{i}.attention", f"layers.{i}.mlp"
        for theirs, ours in {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "proj"}.items():
            weight = getattr(layer.self_attn, theirs).weight
            weight.copy_(tensor_of(start, f"{attention}.{ours}.weight"))
        if not work.experts:
            for part in ("gate", "up", "down"):
                weight = getattr(layer.mlp, f"{part}_proj").weight
                weight.copy_(tensor_of(start, f"{mlp}.{part}.weight"))
            continue
        layer.mlp.gate.weight.copy_(tensor_of(start, f"{mlp}.router.weight"))
        for expert in range(work.experts):
            name = f"{mlp}.experts.{expert}"
            gate_up = tensor_of(start, f"{name}.gate.weight", f"{name}.up.weight")
            layer.mlp.experts.gate_up_proj[expert].copy_(gate_up)
            layer.mlp.experts.down_proj[expert].copy_(tensor_of(start, f"{name}.down.weight"))


class RatesOfTheWork(Trainer):
    """Takes step i at the rate of the work; transformers' own schedule begins with a rate of 0."""

    def __init__(self, work: Work, *args: object, **settings: object):
        super().__init__(*args, **settings)
        self.work = work

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> LambdaLR:
        work = self.work
        self.lr_scheduler = LambdaLR(
            optimizer or self.optimizer, lambda step: work.learning_rate(step) / work.lr
        )
        return self.lr_scheduler


class Losses:
    """The loss of each step, from what the model returns for each micro-batch."""

    def __init__(self, model: PreTrainedModel, work: Work):
        self.accumulation, self.found = work.accumulation, []
        model.register_forward_hook(self.note)

    def note(self, model: PreTrainedModel, inputs: object, output: object) -> None:
        self.found.append(output.loss.detach())

    def of_steps(self) -> list[float]:
        # a micro-batch's is a sum by the tokens of all of its step
        return torch.stack(self.found).view(-1, self.accumulation).sum(1).tolist()


def settings(work: Work, folder: str) -> TrainingArguments:
    return TrainingArguments(
        output_dir=folder,
        use_cpu=work.device == "cpu",
        bf16=work.precision == "bf16",
        optim="adamw_torch_fused",
        learning_rate=work.lr,
        adam_beta2=0.95,
        weight_decay=0.1,
        max_grad_norm=1.0,
        max_steps=work.steps,
        per_device_train_batch_size=work.micro_batch,
        gradient_accumulation_steps=work.accumulation,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        logging_steps=work.steps,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def main() -> None:
    work, start = parse_work()
    assert work.dropout == 0, "these models have no dropout on the residual stream"
    torch.set_num_threads(work.threads)
    with torch.device(work.device):
        model = build(work)
    load(model, start, work)
    losses = Losses(model, work)
    with tempfile.TemporaryDirectory() as folder:
        tokens = Tokens(tensor_of(start, "tokens"))
        trainer = RatesOfTheWork(work, model, settings(work, folder), train_dataset=tokens)
        clock = StepClock()
        trainer.train()
    parameters = sum(p.numel() for p in model.parameters())
    versions = {"transformers": transformers.__version__}
    report(work, clock, losses.of_steps(), parameters, versions)


if __name__ == "__main__":
    main()
