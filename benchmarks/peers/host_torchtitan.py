"""torchtitan's side of benchmarks/host_time.py: its Trainer with its Llama 3 in one process, which
takes its steps as turns.py defines.

    python host_torchtitan.py [fsdp|bare] START ...

`fsdp` is what torchtitan's parallelize_llama makes of the model, whose every layer FSDP wraps in
one process, too; `bare` leaves the model as it is, as torchtitan 0.2 did in one process. CUDA
graphs, torch.compile, activation checkpointing, logging and saving are off. Shims: torchtitan knows
no CPU (cpu_shims), and its attention is its own module over torch's scaled_dot_product_attention,
which it keeps for other models: the default, FlexAttention, needs torch.compile.
"""

from __future__ import annotations

import math
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from common import Work, interleaved_rotary, parse_work, tensor_of, token_batches
from torch import Tensor
from torchtitan.tools import utils
from turns import Turns


def cpu_shims() -> None:
    """Before the rest of torchtitan is imported."""
    memory = types.SimpleNamespace(total_memory=1)
    utils.device_type = "cpu"
    utils.device_module = types.SimpleNamespace(
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
    utils.get_local_device = lambda: torch.device("cpu")


cpu_shims()

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.models import llama3
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer


class Numbers(BaseTokenizer):
    """Tokens are numbers already: its base class wants these methods, and nothing calls them."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: object):
        super().__init__()

    def encode(self, *_: object, **__: object) -> list[int]:
        raise NotImplementedError

    def decode(self, *_: object, **__: object) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        raise NotImplementedError


class Batches(BaseDataLoader):
    """The micro-batches of the start, in order."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    tokens: Tensor
    work: Work

    def __init__(self, config: Config, **_: object):
        pass

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        return token_batches(self.tokens, self.work)

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass


def model_of(work: Work, kind: str) -> ModelSpec:
    """torchtitan's Llama 3 in the sizes of the work."""
    with_attention = llama3.get_attention_config
    llama3.get_attention_config = lambda backend: ScaledDotProductAttention.Config()
    layers = llama3._build_llama3_layers(
        n_layers=work.layers,
        dim=work.hidden,
        n_heads=work.heads,
        n_kv_heads=work.key_heads,
        hidden_dim=work.ffn,
        rope=ComplexRoPE.Config(
            dim=work.hidden // work.heads, max_seq_len=work.seq, theta=10000.0, scaling="none"
        ),
        attn_backend="sdpa",
    )
    llama3.get_attention_config = with_attention
    config = llama3.Llama3Model.Config(
        dim=work.hidden,
        vocab_size=work.vocab,
        tok_embeddings=Embedding.Config(
            num_embeddings=work.vocab,
            embedding_dim=work.hidden,
            param_init=llama3._EMBEDDING_INIT,
        ),
        norm=RMSNorm.Config(normalized_shape=work.hidden, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(
            in_features=work.hidden,
            out_features=work.vocab,
            param_init=llama3._output_linear_init(work.hidden),
        ),
        layers=layers,
    )
    return ModelSpec(
        name="llama3",
        flavor="tiny",
        model=config,
        parallelize_fn=llama3.parallelize_llama if kind == "fsdp" else lambda model, **_: model,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )


def config_of(work: Work, kind: str) -> Trainer.Config:
    adam = {"lr": work.lr, "betas": (0.9, 0.95), "eps": 1e-8}
    groups = [
        ParamGroupConfig(
            pattern=pattern, optimizer_name="AdamW", optimizer_kwargs={**adam, "weight_decay": wd}
        )
        for pattern, wd in ((r"norm", 0.0), (r".*", 0.1))
    ]
    return Trainer.Config(
        model_spec=model_of(work, kind),
        dump_folder=tempfile.mkdtemp(),
        loss=CrossEntropyLoss.Config(global_vocab_size=work.vocab),
        tokenizer=Numbers.Config(),
        dataloader=Batches.Config(),
        optimizer=OptimizersContainer.Config(param_groups=groups),
        lr_scheduler=LRSchedulersContainer.Config(
            warmup_steps=work.lr_warmup,
            total_steps=work.steps,
            decay_ratio=None,
            decay_type="cosine",
            min_lr_factor=0.0,
        ),
        training=TrainingConfig(
            local_batch_size=work.micro_batch,
            global_batch_size=work.step_samples,
            seq_len=work.seq,
            max_norm=1.0,
            steps=work.steps,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        metrics=MetricsProcessor.Config(log_freq=10**9),
        parallelism=ParallelismConfig(),
        checkpoint=CheckpointManager.Config(enable=False),
        activation_checkpoint=None,
    )


@torch.no_grad()
def load(model: torch.nn.Module, start: Mapping[str, np.ndarray], work: Work) -> None:
    """Take the initial weights; those of the norms are ones already."""
    put(model.tok_embeddings.weight, tensor_of(start, "embedding.word.weight"))
    put(model.lm_head.weight, tensor_of(start, "head.weight"))
    for index, layer in model.layers.items():
        attention, mlp = f"layers.{index}.attention", f"layers.{index}.mlp"
        heads = []
        for name in "qkv":
            weight = tensor_of(start, f"{attention}.{name}.weight")
            if name != "v":
                weight = interleaved_rotary(weight, work)
            heads.append(weight.view(work.key_heads, -1, work.hidden))
        put(layer.attention.qkv_linear.wqkv.weight, torch.cat(heads, 1).flatten(0, 1))
        put(layer.attention.wo.weight, tensor_of(start, f"{attention}.proj.weight"))
        for own, logical in (("w1", "gate"), ("w3", "up"), ("w2", "down")):
            put(
                getattr(layer.feed_forward, own).weight, tensor_of(start, f"{mlp}.{logical}.weight")
            )


def put(weight: Tensor, value: Tensor) -> None:
    """Overwrite a parameter, of which FSDP has made a DTensor that one process holds whole."""
    getattr(weight, "_local_tensor", weight).copy_(value)


def main() -> None:
    kind = sys.argv.pop(1)
    work, start = parse_work()
    torch.set_num_threads(work.threads)
    Batches.tokens, Batches.work = tensor_of(start, "tokens"), work
    trainer, turns = Trainer(config_of(work, kind)), Turns()
    load(trainer.model_parts[0], start, work)
    forward_backward, losses = trainer.forward_backward_step, []

    def noted(**settings: object) -> Tensor:
        loss = forward_backward(**settings)
        losses.append(loss.item())
        return loss

    trainer.forward_backward_step = noted
    trainer.model_parts[0].forward = turns.timed("forward", trainer.model_parts[0].forward)
    Tensor.backward = turns.timed("backward", Tensor.backward)
    trainer.optimizers.step = turns.timed("optimizer", trainer.optimizers.step)
    # the body of Trainer.train, whose other parts are off
    batches = trainer.batch_generator(trainer.dataloader)
    for step in turns:
        trainer.step = step + 1
        trainer.gc_handler.run(trainer.step)
        trainer.train_step(batches)
        turns.note(math.fsum(losses))
        losses.clear()


if __name__ == "__main__":
    main()
