"""Folders of ZeRO partitions in the structure that DeepSpeed 0.19.8 writes.

campaigns/peer_checkpoints/deepspeed_checkpoint.py runs DeepSpeed itself, imports what it wrote, and
compares its structure with that of these folders.
"""

from __future__ import annotations

import argparse
import sys
import types
from collections import OrderedDict
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.tools._convert.pickles import CLASSES
from torch import Tensor

# of the optimizer: names and whole fp32 tensors in the order in which they are flattened
Groups = list[dict[str, Tensor]]
COMMON = "loss_scaler dynamic_loss_scale overflow"
FLAT = """clip_grad base_optimizer_state single_partition_of_fp32_groups group_paddings
partition_count ds_version param_slice_mappings"""
KEYS = {  # kind -> what an optimizer file's state holds
    "1": f"{COMMON} {FLAT} zero_stage param_alignment_paddings",
    "3": f"{COMMON} zero_stage partition_count optimizer_state_dict fp32_flat_groups",
    "bf16": FLAT,
}


@contextmanager
def deepspeed_classes():
    """DeepSpeed's classes that its pickles name, as empty ones, while a file is written."""
    modules = {}
    for full in CLASSES:
        module, _, name = full.rpartition(".")
        if module.startswith("deepspeed."):
            modules.setdefault(module, types.ModuleType(module))
            members = {
                "__module__": module,
                "__init__": lambda self, *args: setattr(self, "args", args),
                "__reduce__": lambda self: (type(self), self.args),
            }
            setattr(modules[module], name, type(name, (), members))
    parts = {
        ".".join(name.split(".")[:i]) for name in modules for i in range(1, name.count(".") + 1)
    }
    with mock.patch.dict(
        sys.modules,
        {**{part: types.ModuleType(part) for part in parts - modules.keys()}, **modules},
    ):
        yield {
            name: getattr(module, name)
            for module in modules.values()
            for name in vars(module)
            if not name.startswith("__")
        }


def cut(groups: Groups, kind: str, ranks: int) -> list[list[Tensor]]:
    """Each rank's partitions."""

    def padded(value: Tensor, multiple: int, fill: float = 0.0) -> Tensor:
        flat = value.reshape(-1)
        return torch.nn.functional.pad(flat, (0, -len(flat) % multiple), value=fill)

    if kind == "3":  # an equal part of every parameter; the last one padded
        parts = [[padded(v, ranks).chunk(ranks) for v in group.values()] for group in groups]
        return [[torch.cat([v[rank] for v in group]) for group in parts] for rank in range(ranks)]
    found: list[list[Tensor]] = [[] for _ in range(ranks)]
    for group in groups:
        flat = torch.cat([value.reshape(-1) for value in group.values()])
        for rank, part in enumerate(padded(flat, 2 * ranks, 7.0).chunk(ranks)):
            padding = -len(flat) % (2 * ranks) if rank == ranks - 1 and kind != "bf16" else 0
            found[rank].append(part[: len(part) - padding])
    return found


def write_rank(
    folder: Path,
    groups: Groups,
    kind: str,
    ranks: int,
    model_rank: int = 0,
    shared: dict[str, str] | None = None,
    buffers: dict[str, Tensor] | None = None,
    args: argparse.Namespace | None = None,
    **extra: Any,
) -> None:
    """The files of one model-parallel rank. kind: 1, 2, 3 or bf16 (BF16_Optimizer)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder.parent / "latest").write_text(folder.name)
    shapes = [OrderedDict((name, value.shape) for name, value in group.items()) for group in groups]
    with deepspeed_classes() as classes:
        stage = classes["ZeroStageEnum"](1 if kind == "bf16" else int(kind))
        for rank, flats in enumerate(cut(groups, kind, ranks)):
            flats = [flat.clone() for flat in flats]
            for flat in flats if kind == "3" else ():
                flat.made_by = "an attribute, so that torch.save writes its class"
            moments = {
                i: {
                    "step": torch.tensor(3.0),
                    "exp_avg": torch.ones_like(flat),
                    "exp_avg_sq": flat * flat,
                }
                for i, flat in enumerate(flats)
            }
            held = {
                "loss_scaler": classes["LossScaler"](),
                "dynamic_loss_scale": False,
                "overflow": False,
                "clip_grad": 1.0,
                "zero_stage": stage,
                "base_optimizer_state": {"state": moments},
                "optimizer_state_dict": {"state": moments},
                "fp32_flat_groups": flats,
                "single_partition_of_fp32_groups": flats,
                "group_paddings": [0] * len(groups),
                "ds_version": "0.19.8",
                "param_alignment_paddings": [[0] * len(group) for group in groups],
                "partition_count": ranks if kind == "3" else [ranks] * len(groups),
                "param_slice_mappings": [OrderedDict(first=classes["fragment_address"]())],
            }
            content = {
                "optimizer_state_dict": {
                    key: held[key] for key in KEYS["1" if kind == "2" else kind].split()
                },
                "ds_config": {"bf16": {"enabled": True}},
                "ds_version": "0.19.8",
            }
            name = f"bf16_zero_pp_rank_{rank}_mp_rank_{model_rank:02d}_optim_states.pt"
            torch.save(content, folder / name)
        for rank in range(ranks if kind == "3" else 1):
            name = f"zero_pp_rank_{rank}_" * (kind == "3") + f"mp_rank_{model_rank:02d}"
            state = {
                "module": OrderedDict(
                    (key, torch.empty(0) if kind == "3" else value.bfloat16())
                    for group in groups
                    for key, value in group.items()
                )
                | (buffers or {}),
                "buffer_names": list(buffers or {}),
                "optimizer": None,
                "param_shapes": shapes,
                "frozen_param_shapes": OrderedDict(),
                "shared_params": shared or {},
                "frozen_param_fragments": OrderedDict(),
                **dict.fromkeys(("lr_scheduler", "data_sampler", "random_ltd")),
                **{"skipped_steps": 0, "global_steps": 3, "global_samples": 12},
                "dp_world_size": ranks,
                "mp_world_size": 1,
                "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
                "ds_config": {},
                "ds_version": "0.19.8",
            }
            torch.save(
                state | extra | ({"args": args, "iteration": 3} if args else {}),
                folder / f"{name}_model_states.pt",
            )


def in_groups(tensors: dict[str, Tensor]) -> Groups:
    """With and without weight decay, as most runs have them."""
    return [
        {name: value for name, value in tensors.items() if (value.ndim > 1) == matrices}
        for matrices in (True, False)
    ]
