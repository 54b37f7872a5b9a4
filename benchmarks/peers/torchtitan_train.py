"""torchtitan's Trainer with its Llama 3 in one process; with the option `compile` under its
torch.compile. Run by benchmarks/training.py on a GPU; 0.2.2 is the last version for torch 2.11.

The data loader and the learning rate schedule, which torchtitan lets a model replace, are those of
the work. Activation checkpointing, logging and saving are off. torchtitan hands over a loss only
by its logging, so it waits for the GPU after every step. Shims: what is logged is kept instead of
printed; without a GPU, torchtitan is given the CPU as its device, which rehearses it:

    PYTHONPATH=FOLDER python torchtitan_train.py START --steps 6 --warmup 2 --lr_warmup 2

with torchtitan 0.2.2 in FOLDER and START written by start.py.
"""

from __future__ import annotations

import os
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version

import numpy as np
import torch
import torch._utils
from common import (
    StepClock,
    Work,
    interleaved_rotary,
    parse_work,
    report,
    tensor_of,
    token_batches,
)
from torch import Tensor

SINGLE_RANK = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}


def cpu_shims() -> None:
    """Before torchtitan is imported."""
    memory = types.SimpleNamespace(total_memory=1)
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda device: types.SimpleNamespace(
        current_device=lambda: 0,
        device_count=lambda: 1,
        empty_cache=lambda: None,
        get_device_name=lambda device: "cpu",
        get_device_properties=lambda device: memory,
        memory_stats=lambda device: {},
        reset_peak_memory_stats=lambda: None,
        set_device=lambda device: None,
        synchronize=lambda: None,
    )


if not torch.cuda.is_available():
    cpu_shims()

from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.lr_scheduler import LRSchedulersContainer
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import JobConfig
from torchtitan.models import llama3
from torchtitan.models.llama3.model.args import RoPEScalingArgs
from torchtitan.protocols.train_spec import register_train_spec
from torchtitan.train import Trainer


class Batches(BaseDataLoader):
    """The micro-batches of the start, in order."""

    def __init__(self, tokens: Tensor, work: Work):
        self.tokens, self.work = tokens, work

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        return token_batches(self.tokens, self.work)

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass


def register(work: Work, tokens: Tensor) -> None:
    """Register torchtitan's Llama 3 with the sizes of the work as the model `work`."""
    spec = llama3.get_train_spec()
    sizes = llama3.TransformerModelArgs(
        dim=work.hidden,
        n_layers=work.layers,
        n_heads=work.heads,
        n_kv_heads=work.key_heads,
        vocab_size=work.vocab,
        # torchtitan rounds the MLP's width up to a multiple of this
        multiple_of=work.ffn,
        ffn_dim_multiplier=0.01,
        rope_theta=10000.0,
        rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0),
    )
    spec.model_args = {"work": sizes}
    spec.build_tokenizer_fn = spec.build_validator_fn = None
    spec.build_dataloader_fn = lambda **_: Batches(tokens, work)
    spec.build_lr_schedulers_fn = rates_of(work)
    register_train_spec("work", spec)


def rates_of(work: Work) -> Callable[..., LRSchedulersContainer]:
    """A builder of the work's learning rate schedule, as torchtitan calls it."""

    def build(optimizers: OptimizersContainer, *_: object) -> LRSchedulersContainer:
        def share(step: int) -> float:
            # The scheduler steps once more after the last step.
            return work.learning_rate(min(step, work.steps - 1)) / work.lr

        return LRSchedulersContainer(optimizers, share)

    return build


def config_of(work: Work, folder: str) -> JobConfig:
    """The work in torchtitan's terms; what it writes goes into the folder."""
    config = JobConfig()
    config.job.dump_folder = folder
    config.model.name = config.model.flavor = "work"
    config.optimizer.lr, config.optimizer.beta2, config.optimizer.weight_decay = work.lr, 0.95, 0.1
    config.training.local_batch_size = work.micro_batch
    config.training.global_batch_size = work.step_samples
    config.training.seq_len = work.seq
    config.training.steps = work.steps
    config.training.max_norm = 1.0
    precision = {"bf16": "bfloat16", "fp32": "float32"}[work.precision]
    config.training.mixed_precision_param = precision
    config.metrics.log_freq = 1
    config.activation_checkpoint.mode = "none"
    config.compile.enable = "compile" in work.options
    return config


@torch.no_grad()
def load(model: torch.nn.Module, start: Mapping[str, np.ndarray], work: Work) -> None:
    """Take the initial weights; those of the norms are ones already."""
    model.tok_embeddings.weight.copy_(tensor_of(start, "embedding.word.weight"))
    model.output.weight.copy_(tensor_of(start, "head.weight"))
    for index, layer in model.layers.items():
        attention, mlp = f"layers.{index}.attention", f"layers.{index}.mlp"
        for name in "qkv":
            weight = tensor_of(start, f"{attention}.{name}.weight")
            if name != "v":
                weight = interleaved_rotary(weight, work)
            getattr(layer.attention, f"w{name}").weight.copy_(weight)
        layer.attention.wo.weight.copy_(tensor_of(start, f"{attention}.proj.weight"))
        for own, logical in (("w1", "gate"), ("w3", "up"), ("w2", "down")):
            weight = tensor_of(start, f"{mlp}.{logical}.weight")
            getattr(layer.feed_forward, own).weight.copy_(weight)


def main() -> None:
    work, start = parse_work()
    torch.set_num_threads(work.threads)
    os.environ |= SINGLE_RANK
    register(work, tensor_of(start, "tokens"))
    losses: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config_of(work, folder))
        load(trainer.model_parts[0], start, work)
        trainer.metrics_processor.log = lambda step, loss, *_, **__: losses.append(loss)
        # OptimizersContainer is itself counted as an optimizer
        clock = StepClock(optimizers=2)
        trainer.train()
        parameters = sum(p.numel() for p in trainer.model_parts[0].parameters())
        trainer.close()
    report(work, clock, losses, parameters, {"torchtitan": version("torchtitan")})


if __name__ == "__main__":
    main()
