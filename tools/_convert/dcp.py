"""torch.distributed.checkpoint reads our checkpoints: whole tensors, DTensors and other sharded
requests, verified chunk by chunk.

    dcp.load(state_dict, storage_reader=CheckpointReader("run/iter_0000100"))

Keys are the logical names (docs/checkpoint.md); nested dictionaries count by dotted name. The run's
JSON state is not offered: dcp would unpickle it; read it with Checkpoint(folder).state.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, Metadata, StorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.futures import Future

from megatron.checkpoint.manifest import MANIFEST
from megatron.checkpoint.reader import TORCH_DTYPES, Checkpoint
from megatron.model.spec import Box

StrPath = str | os.PathLike[str]


class CheckpointReader(StorageReader):
    """Reads one checkpoint folder (iter_*); each rank reads the chunks that hold what it asks for.
    Values are converted to the asked dtype.
    """

    def __init__(self, folder: StrPath) -> None:
        self.folder = Path(folder)

    def reset(self, checkpoint_id: StrPath | None = None) -> None:
        self.folder = self.folder if checkpoint_id is None else Path(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:
        return (Path(checkpoint_id) / MANIFEST).is_file()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Every tensor as one chunk: how it is cut into shards is Checkpoint's affair. Raises
        CheckpointError.
        """
        with Checkpoint(self.folder) as checkpoint:
            tensors: dict[str, Any] = {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=TORCH_DTYPES[stored.dtype]),
                    torch.Size(stored.shape),
                    [
                        ChunkStorageMetadata(
                            torch.Size([0] * len(stored.shape)), torch.Size(stored.shape)
                        )
                    ],
                )
                for name, stored in checkpoint.tensors.items()
            }
        return Metadata(tensors)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the plan asks for. Raises CheckpointError for damaged data, naming file and
        tensor.
        """
        with Checkpoint(self.folder) as checkpoint:
            for item in plan.items:
                name = item.storage_index.fqn
                target = planner.resolve_tensor(item).detach()
                checkpoint.read(
                    Box(
                        name,
                        checkpoint.tensors[name].shape,
                        tuple(item.storage_offsets),
                        tuple(item.lengths),
                    ),
                    target,
                )
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done
