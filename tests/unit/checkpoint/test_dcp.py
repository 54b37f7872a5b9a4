"""torch.distributed.checkpoint.load on our checkpoints: whole tensors and DTensors of one and two
ranks, and damage.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_cases import deal, example, flip, same_bits, save_in_shards
from megatron.tools._convert.dcp import CheckpointReader
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megatron.checkpoint import reader as reader_module
from megatron.checkpoint.reader import Checkpoint


def saved(root: Path) -> Path:
    """`example()` cut at random into three shards."""
    shards = deal(random.Random(1), example(), range(3))
    return save_in_shards(root, 1, list(shards.values()), {})


def test_whole_tensors(tmp_path):
    folder = saved(tmp_path)
    wanted = example()
    state = {name: torch.full_like(tensor, 7) for name, tensor in wanted.items()}
    dcp.load(state, storage_reader=CheckpointReader(folder))
    assert all(same_bits(state[name], wanted[name]) for name in wanted)
    # names joined by dots, values converted
    nested = {"layers": {"3": {"float32": {"weight": torch.zeros(64, 33, dtype=torch.float64)}}}}
    dcp.load(nested, checkpoint_id=folder, storage_reader=CheckpointReader("elsewhere"))
    assert torch.equal(
        nested["layers"]["3"]["float32"]["weight"], wanted["layers.3.float32.weight"].double()
    )
    with pytest.raises(
        dcp.api.CheckpointException, match="Missing key in checkpoint state_dict: layers.9"
    ):
        dcp.load({"layers.9": torch.zeros(1)}, storage_reader=CheckpointReader(folder))
    assert CheckpointReader.validate_checkpoint_id(folder)
    assert not CheckpointReader.validate_checkpoint_id(tmp_path)
    flip(folder / "shard-00001.safetensors")
    with pytest.raises(dcp.api.CheckpointException, match="shard-00001.safetensors: damaged: byte"):
        dcp.load(state, storage_reader=CheckpointReader(folder))


def load_sharded(folder: Path) -> tuple[list[str], int]:
    """On this rank: the DTensors that were filled wrongly, and the bytes read."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    wanted, faults, read = example(), [], [0]
    placements = {
        name: [Shard(0), Shard(tensor.ndim - 1), Replicate()][i % 3]
        for i, (name, tensor) in enumerate(wanted.items())
    }
    state = {
        name: distribute_tensor(
            torch.zeros_like(tensor), mesh, [placements[name]], src_data_rank=None
        )
        for name, tensor in wanted.items()
    }
    close = Checkpoint.close

    def closed(self: Checkpoint) -> None:
        read[0] += self.fetcher.bytes_read
        close(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reader_module.Checkpoint, "close", closed)
        dcp.load(state, storage_reader=CheckpointReader(folder))
    for name, tensor in state.items():
        assert isinstance(tensor, DTensor)
        own = distribute_tensor(wanted[name], mesh, [placements[name]], src_data_rank=None)
        if not same_bits(tensor.to_local(), own.to_local()):
            faults.append(name)
    return faults, read[0]


def test_dtensors_of_two_ranks(tmp_path, gloo_world, monkeypatch):
    from megatron.checkpoint import manifest

    monkeypatch.setattr(manifest, "CHUNK", 256)
    folder = saved(tmp_path)
    results = gloo_world(2).run(load_sharded, folder)
    assert [faults for faults, _ in results] == [[], []]
    with Checkpoint(folder) as checkpoint:
        stored = sum(shard.data_bytes for shard in checkpoint.shards)
    # each reads what it holds
    assert all(0.3 * stored < read < 0.9 * stored for _, read in results)
