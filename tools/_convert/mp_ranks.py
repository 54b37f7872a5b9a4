"""Megatron-LM's older folders, one file a model-parallel rank
(mp_rank_TT[_PPP]/model_optim_rng.pt), as whole tensors made of the ranks' parts.

Facts of Megatron-LM (core models): each file numbers its stage's layers from 0; virtual stages are
`model0`, `model1`, ..., in the order of the forward pass virtual stage by virtual stage; the last
stage of a tied model keeps a copy of the embedding.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.tools._convert.models import Part, Whole, whole_part
from megatron.tools._convert.pickles import Record, read_torch_file, state_of
from torch import Tensor

from megatron.checkpoint.boxes import Dims, intersect
from megatron.checkpoint.manifest import CheckpointError

FILE = "model_optim_rng.pt"
ROWS = re.compile(
    r"(embedding\.word_embeddings|output_layer|.*\.linear_(qkv|fc1|q_proj|q_up_proj|kv_up_proj))"
    r"\.(weight|bias)"
)
COLUMNS = re.compile(r".*\.(linear_proj|linear_fc2)\.weight")


class MpRanks:
    """The files of a folder, opened. Raises CheckpointError when ranks are missing or hold
    different things.
    """

    def __init__(self, folder: Path) -> None:
        found: dict[tuple[int, int], Path] = {}
        for path in sorted(folder.glob(f"mp_rank_*/{FILE}")):
            match = re.fullmatch(r"mp_rank_(\d\d)(?:_(\d{3}))?", path.parent.name)
            if match is None:
                raise CheckpointError(f"{path.parent}: ranks of experts have no counterpart here")
            found[int(match[2] or 0), int(match[1])] = path
        self.folder = folder
        self.pp, self.tp = (1 + max((key[i] for key in found), default=-1) for i in (0, 1))
        if len(found) != self.pp * self.tp or not found:
            ranks = f"{self.pp * self.tp} ranks (tp {self.tp}, pp {self.pp}) are numbered"
            raise CheckpointError(f"{folder}: has {len(found)} files mp_rank_*/{FILE}; {ranks}")
        self.files = {key: read_torch_file(path) for key, path in found.items()}
        # Without pipeline stages, a second number in the folder name is the expert rank.
        args = state_of(self.files[0, 0].get("args"))
        if args.get("expert_model_parallel_size") not in (None, 1):
            raise CheckpointError(f"{folder}: ranks of experts have no counterpart here")

    @property
    def args(self) -> Record:
        """The run's arguments. Raises CheckpointError."""
        args = self.files[0, 0].get("args")
        if not isinstance(args, Record):
            raise CheckpointError(
                f"{self.folder}: its files hold no arguments: give the model's flags with "
                "--config FILE"
            )
        return args

    def tensors(self, *, gated: bool, tied: bool) -> list[Whole]:
        """Whole tensors (name with global layer numbers, shape, parts of the ranks)."""
        whole: dict[str, list[Tensor]] = {}
        layers = 0
        chunks = {
            key
            for content in self.files.values()
            for key in content
            if re.fullmatch(r"model\d*", key)
        }
        for chunk in sorted(chunks, key=lambda key: (len(key), key)):
            for stage in range(self.pp):
                layers += self._add(whole, stage, chunk, layers)
        word = whole.get("embedding.word_embeddings.weight")
        head = whole.get("output_layer.weight")
        if tied and word and head:
            if not all(torch.equal(a, b) for a, b in zip(word, head, strict=True)):
                raise CheckpointError(
                    f"{self.folder}: output_layer.weight is not the embedding: the model is "
                    "not tied, against its flags"
                )
            del whole["output_layer.weight"]
        return [self._joined(name, parts, gated) for name, parts in whole.items()]

    def _add(self, whole: dict[str, list[Tensor]], stage: int, chunk: str, first: int) -> int:
        """Collect one stage's tensors of all tp ranks, its layers numbered from `first` on; returns
        how many layers it has.
        """
        states: list[dict[str, Any]] = [
            self.files[stage, rank].get(chunk, {}) for rank in range(self.tp)
        ]
        numbers = set()
        for name, value in states[0].items():
            if not isinstance(value, Tensor) or "_extra_state" in name:
                continue
            layer = re.fullmatch(r"(.*\.layers\.)(\d+)(\..*)", name)
            if layer:
                numbers.add(int(layer[2]))
            parts = [state.get(name) for state in states]
            if not all(isinstance(part, Tensor) and part.ndim == value.ndim for part in parts):
                raise CheckpointError(
                    f"{self.folder}: {name} of stage {stage} is not in the file of every "
                    "tensor-parallel rank"
                )
            whole[f"{layer[1]}{int(layer[2]) + first}{layer[3]}" if layer else name] = parts
        return len(numbers)

    def _joined(self, name: str, parts: list[Tensor], gated: bool) -> Whole:
        if len({part.shape for part in parts}) > 1:
            raise CheckpointError(
                f"{self.folder}: {name} has another shape on other tensor-parallel ranks"
            )
        if self.tp > 1 and ".mlp.experts." in name:
            raise CheckpointError(
                f"{self.folder}: experts of {self.tp} tensor-parallel ranks in files of ranks are "
                "not supported; save the checkpoint as torch_dist"
            )
        folds = 2 if gated and ".linear_fc1." in name else 1
        return join_ranks(
            name, tuple(parts[0].shape), [[whole_part(part)] for part in parts], folds
        )


def join_ranks(name: str, shape: Dims, ranks: list[list[Part]], folds: int = 1) -> Whole:
    """The tensor of which each tensor-parallel rank holds `shape` in parts. With `folds` every rank
    has that many equal pieces on top of each other, each cut among the ranks by itself: its gate on
    top of its up.
    """
    if not ROWS.fullmatch(name) and not COLUMNS.fullmatch(name):
        return name, shape, ranks[0]  # the same on all
    cut = 1 if COLUMNS.fullmatch(name) else 0
    own = shape[cut] // folds
    joined: list[Part] = []
    for rank, parts in enumerate(ranks):
        for offset, extent, elements in parts:
            for fold in range(folds):
                common = intersect((fold * own,), (own,), (offset[cut],), (extent[cut],))
                if common is None:
                    continue
                (low,), (high,) = common
                place = (fold * (len(ranks) - 1) + rank) * own + low
                take = partial(_narrowed, elements, cut, low - offset[cut], high - low)
                where = _with_size(offset, cut, place), _with_size(extent, cut, high - low)
                joined.append((*where, take))
    return name, _with_size(shape, cut, len(ranks) * shape[cut]), joined


def _with_size(sizes: Dims, dimension: int, size: int) -> Dims:
    """The same with another number at one dimension."""
    return (*sizes[:dimension], size, *sizes[dimension + 1 :])


def _narrowed(elements: Callable[[], Tensor], dimension: int, start: int, length: int) -> Tensor:
    return elements().narrow(dimension, start, length)
