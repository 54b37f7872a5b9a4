"""What our run begins with, for the peers, so that every side computes the same losses. Needs our
package, which peers do not have.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch
from megatron.benchmarks.peers.common import Work

from megatron.config.arguments import parse_arguments
from megatron.config.groups import ModelConfig
from megatron.data.loader import build_data
from megatron.data.tokenizer import build_tokenizer
from megatron.model.build import declared
from megatron.model.init import fill_initial
from megatron.model.spec import TensorSpec, whole


def matrices(work: Work, model: ModelConfig) -> list[TensorSpec]:
    """The matrices of the model; its other weights are those of norms and begin as ones."""
    sizes = {
        "kv_channels": work.hidden // work.heads,
        "num_query_groups": work.key_heads,
        "max_position_embeddings": work.seq,
    }
    parameters = declared(dataclasses.replace(model, **sizes), work.vocab).values()
    return [tensor for spec in parameters for tensor in spec.tensors if len(tensor.shape) == 2]


def write_start(folder: Path, work: Work, flags: list[str]) -> None:
    """The initial weights of the run with these flags by their logical names, and its `tokens`
    [samples, seq + 1], in new files of `folder`:
    tensors.bin holds them one after the other, index.json their {name: [dtype, shape]} in this
    order.
    """
    config = parse_arguments(flags).config
    tensors = {}
    for tensor in matrices(work, config.model):
        weight = torch.empty(tensor.shape, device=work.device)
        fill_initial(whole(tensor), weight, config.training.seed)
        tensors[tensor.name] = weight.cpu()
    batch = build_data(config, build_tokenizer(config.data), None, 0).train.batch(
        0, work.steps * work.step_samples
    )
    tensors["tokens"] = torch.cat((batch.tokens, batch.labels[:, -1:]), 1)
    if work.device == "cuda":
        torch.cuda.empty_cache()  # the runs need it
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    folder.mkdir(exist_ok=True)
    (folder / "index.json").write_text(
        json.dumps({name: [str(array.dtype), array.shape] for name, array in arrays.items()})
    )
    with open(folder / "tensors.bin", "wb") as file:
        for array in arrays.values():
            array.tofile(file)
