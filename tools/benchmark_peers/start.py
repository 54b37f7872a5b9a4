"""What our run begins with, for the peers, so that every side computes the same losses. Needs our package, which peers do not have."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from common import Work

from megatron.config.arguments import parse_arguments
from megatron.data.loader import build_data
from megatron.data.tokenizer import build_tokenizer
from megatron.model.init import fill_initial
from megatron.model.layout import Box


def shapes(work: Work) -> dict[str, tuple[int, int]]:
    """The matrices of the model as logical tensors; its other weights are those of norms and begin as ones."""
    h, f = work.hidden, work.ffn
    of_layer = {f"attention.{part}": (h, h) for part in ("q", "k", "v", "proj")} | {"mlp.gate": (f, h), "mlp.up": (f, h), "mlp.down": (h, f)}
    layers = {f"layers.{i}.{name}.weight": shape for i in range(work.layers) for name, shape in of_layer.items()}
    return {"embedding.word.weight": (work.vocab, h), **layers, "head.weight": (work.vocab, h)}


def write_start(folder: Path, work: Work, flags: list[str]) -> None:
    """The initial weights of the run with these flags by their logical names, and its `tokens` [samples, seq + 1], in new files of `folder`:
    tensors.bin holds them one after the other, index.json their {name: [dtype, shape]} in this order.
    """
    config = parse_arguments(flags).config
    tensors = {}
    for name, shape in shapes(work).items():
        tensors[name] = torch.empty(shape)
        fill_initial(Box(name, shape, (0, 0), shape), tensors[name], config.model, config.training.seed)
    batch = build_data(config, build_tokenizer(config.data), None, 0).train.batch(0, work.steps * work.step_samples)
    tensors["tokens"] = torch.cat((batch.tokens, batch.labels[:, -1:]), 1)
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    folder.mkdir(exist_ok=True)
    (folder / "index.json").write_text(json.dumps({name: [str(array.dtype), array.shape] for name, array in arrays.items()}))
    (folder / "tensors.bin").write_bytes(b"".join(array.tobytes() for array in arrays.values()))
