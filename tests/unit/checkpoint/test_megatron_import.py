"""Distributed checkpoints under Megatron-LM's names become ours; a poisoned pickle in any of their
files executes nothing.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import random
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_cases import loads
from huggingface_models import MODELS
from megatron.tools import generate
from megatron.tools._convert.models import MappedFile
from megatron.tools._convert.pickles import map_tensor, read_metadata, read_torch_file
from megatron_names import LAYERS, PADDED, VOCAB, megatron_names, tp_part
from test_convert_ranks import convert
from test_huggingface import tokens
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import Shard, distribute_tensor

from megatron.checkpoint.manifest import CheckpointError
from megatron.checkpoint.reader import open_checkpoint

EXTRA = {
    "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight": torch.ones(3),
    "rng_state": torch.zeros(2),
}


def write(folder: Path, case: str, dimension: int) -> None:
    """On one of two ranks: a real distributed checkpoint of DTensors cut along `dimension` of
    layers, or whole where that does not go.
    """
    arguments, theirs, _, _ = megatron_names(case)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"decoder.layers.self_attention.linear_qkv._extra_state/shard_0_3": io.BytesIO(b"x")}
    for name, value in (theirs | EXTRA).items():
        cut = Shard(dimension if name.startswith("decoder.layers") else 0)
        state[name] = distribute_tensor(value, mesh, [cut], src_data_rank=None)
    dcp.save(state, checkpoint_id=folder)
    if dist.get_rank() == 0:
        torch.save({"args": arguments, "iteration": 7}, folder / "common.pt")
        (folder.parent / "latest_checkpointed_iteration.txt").write_text("7")


@pytest.mark.parametrize("case, dimension", [("llama tied, gqa, eps", 0), ("gpt2", 1)])
def test_stacked_layers_of_two_ranks_become_ours(tmp_path, gloo_world, case, dimension):
    """The same logits bit for bit, by one importing rank and by two; padding, optimizer and extra
    state stay behind.
    """
    gloo_world(2).run(write, tmp_path / "theirs" / "iter_0000007", case, dimension)
    _, _, held, model = megatron_names(case)
    words = ("--from-megatron", tmp_path / "theirs", "--vocab-size", VOCAB, "--save")
    code, shown = convert(*words, tmp_path / "one")
    assert code == 0, shown
    assert all(code == 0 for code, _ in gloo_world(2).run(convert, *words, tmp_path / "two"))
    for run, shards in (("one", 1), ("two", 2)):
        with open_checkpoint(tmp_path / run) as checkpoint:
            assert len(checkpoint.shards) == shards
            loads(checkpoint.path, held)
            assert torch.equal(
                generate.load_model(checkpoint, torch.device("cpu")).logits(tokens()),
                model.logits(tokens()),
            )


def save_alone(folder: Path, state: dict) -> None:
    dcp.save(state, checkpoint_id=folder, no_dist=True)


def test_flags_from_a_file_and_layers_numbered_in_names(tmp_path):
    arguments, theirs, held, _ = megatron_names("qwen3")
    numbered = {
        name: value for name, value in theirs.items() if not name.startswith("decoder.layers")
    }
    for name, value in theirs.items():
        if name.startswith("decoder.layers."):
            numbered |= {
                f"model.decoder.layers.{i}.{name.removeprefix('decoder.layers.')}": value[i].clone()
                for i in range(LAYERS)
            }
    for i in range(LAYERS):  # gate and up apart
        name = f"model.decoder.layers.{i}.mlp.linear_fc1.weight"
        gate, up = numbered.pop(name).chunk(2)
        numbered |= {f"{name}_w": gate.clone(), f"{name}_v": up.clone()}
    save_alone(tmp_path / "theirs", numbered)
    words = ("--from-megatron", tmp_path / "theirs", "--save", tmp_path / "run")
    assert "has no common.pt: give the model's flags with --config" in convert(*words)[1]
    model = {**vars(MODELS["qwen3"]), "window_size": None}
    (tmp_path / "flags.json").write_text(json.dumps({"model": model}))
    (tmp_path / "part.json").write_text(json.dumps({"model": {"num_layers": LAYERS}}))
    shown = convert(*words, "--config", tmp_path / "part.json")[1]
    assert "lacks the model's --hidden-size, --num-attention-heads, --max-position-emb" in shown
    code, shown = convert(*words, "--config", tmp_path / "flags.json", "--vocab-size", VOCAB)
    assert code == 0, shown
    loads(tmp_path / "run" / "iter_0000000", held)


def test_what_cannot_be_mapped_is_one_error(tmp_path):
    arguments, theirs, _, _ = megatron_names("gpt2")

    def refused(name: str, tensors: dict) -> str:
        save_alone(tmp_path / name, tensors)
        torch.save({"args": arguments}, tmp_path / name / "common.pt")
        code, shown = convert("--from-megatron", tmp_path / name, "--save", tmp_path / "run")
        assert code == 2 and shown.count("error:") == 1 and not (tmp_path / "run").exists()
        return shown

    extra = ("decoder.layers.mlp.experts.linear_fc1.weight", "vision.weight")
    shown = refused("a", theirs | {name: torch.zeros(3, 2) for name in extra})
    assert all(name in shown for name in extra)
    partly = {name: value for name, value in theirs.items() if "linear_proj" not in name}
    assert "tensors missing: layers.0.attention.proj.bias" in refused("b", partly)
    half = {"decoder.layers.mlp.linear_fc1.weight_w": torch.zeros(LAYERS, 2, 2)}
    shown = refused("half", theirs | half)
    assert "linear_fc1.weight_w: is a half of a gated fc1, but --swiglu " in shown
    name = "decoder.layers.{}.mlp.linear_fc1.weight"
    shown = refused("many", theirs | {name.format(i): torch.zeros(2) for i in range(3, 53)})
    assert shown.count("has no such tensor") == 40 and "and 10 more" in shown
    arguments.num_layers = 4
    assert "holds 3 layers, --num-layers is 4" in refused("c", theirs)
    arguments.qk_l2_norm = True
    assert "--qk-l2-norm" in refused("d", theirs)


def write_mp_ranks(folder: Path, case: str, tp: int, pp: int) -> dict[str, torch.Tensor]:
    """One file a rank, as Megatron-LM wrote them; returns the logical tensors."""
    arguments, theirs, held, _ = megatron_names(case)
    gated, tied = arguments.swiglu, not arguments.untie_embeddings_and_output_weights

    stages = [range(LAYERS)] if pp == 1 else [range(2), range(2, LAYERS)]
    for stage, layers in enumerate(stages):
        for rank in range(tp):
            state = {}
            for name, value in theirs.items():
                if name.startswith("decoder.layers."):
                    for i, layer in enumerate(layers):
                        part = tp_part(name, value[layer], rank, tp, gated)
                        state[name.replace("layers.", f"layers.{i}.")] = part.clone()
                elif stage == (0 if name.startswith("embedding") else pp - 1):
                    state[name] = tp_part(name, value, rank, tp, gated).clone()
            if tied and pp > 1 and stage == pp - 1:
                word = theirs["embedding.word_embeddings.weight"]
                part = tp_part("output_layer", word, rank, tp, gated)
                state["output_layer.weight"] = part.clone()
            state["decoder.layers.0.self_attention.linear_qkv._extra_state"] = io.BytesIO(b"x")
            name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else "")
            states = {"random_rng_state": random.getstate(), "np_rng_state": np.random.get_state()}
            content = {
                "args": arguments,
                "checkpoint_version": 3.0,
                "iteration": 7,
                "model": state,
                "optimizer": {"step": 4, "m": torch.ones(5)},
                "rng_state": [states],
            }
            (folder / name).mkdir(parents=True)
            torch.save(content, folder / name / "model_optim_rng.pt")
    return held


@pytest.mark.parametrize(
    "case, tp, pp", [("llama tied, gqa, eps", 2, 2), ("gpt2", 1, 1), ("qwen3", 2, 1)]
)
def test_one_file_a_model_parallel_rank(tmp_path, case, tp, pp):
    held = write_mp_ranks(tmp_path / "theirs", case, tp, pp)
    code, shown = convert(
        "--from-megatron", tmp_path / "theirs", "--vocab-size", VOCAB, "--save", tmp_path / "run"
    )
    assert code == 0, shown
    loads(tmp_path / "run" / "iter_0000000", held)


def test_faults_of_model_parallel_files(tmp_path):
    held = write_mp_ranks(tmp_path / "theirs", "llama tied, gqa, eps", 2, 2)
    words = ("--from-megatron", tmp_path / "theirs", "--save", tmp_path / "run")
    file = tmp_path / "theirs" / "mp_rank_01_001" / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    content["model"]["output_layer.weight"][0, 0] += 1
    torch.save(content, file)
    assert "output_layer.weight is not the embedding" in convert(*words)[1]
    torch.save(content | {"more": Poison(tmp_path / "touched")}, file)
    assert "it names posix.system" in convert(*words)[1] and not (tmp_path / "touched").exists()
    file.unlink()
    assert "has 3 files" in convert(*words)[1] and held
    assert not (tmp_path / "run").exists()


def test_ranks_of_experts_are_refused_with_and_without_pipeline_stages(tmp_path):
    """Without, their numbers are where those of stages would be."""
    write_mp_ranks(tmp_path / "theirs", "gpt2", 1, 2)
    words = ("--from-megatron", tmp_path / "theirs", "--save", tmp_path / "run")
    file = tmp_path / "theirs" / "mp_rank_00_000" / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    content["args"].expert_model_parallel_size = 2
    torch.save(content, file)
    assert "ranks of experts have no counterpart" in convert(*words)[1]
    file.parent.rename(file.parent.with_name("mp_rank_00_000_000"))
    assert "ranks of experts have no counterpart" in convert(*words)[1]
    assert not (tmp_path / "run").exists()


# ---- poison --------------------------------------------------------------------------------------


class Poison:
    """Unpickling it makes a file."""

    def __init__(self, path: Path, way: int = 0) -> None:
        self.path, self.way = path, way

    def __reduce__(self):
        return [
            (os.system, (f"touch {self.path}",)),
            (exec, (f"open({str(self.path)!r}, 'w')",)),
            (open, (str(self.path), "w")),
            (io.FileIO, (str(self.path), "w")),
        ][self.way]


# Python 3.12 calls its io _io
NAMES = ["posix.system", "builtins.exec", f"{open.__module__}.open", "_io.FileIO"]


@pytest.fixture
def theirs(tmp_path):
    arguments, tensors, _, _ = megatron_names("gpt2")
    save_alone(tmp_path / "theirs", tensors)
    torch.save({"args": arguments}, tmp_path / "theirs" / "common.pt")
    return tmp_path / "theirs"


def poison(folder: Path, where: str, evil: Poison) -> bytes:
    """Put it into one of the folder's files; the pickle or file that holds it."""
    files = {"tensor": "__0_0.distcp", "arguments": "common.pt"}
    path = folder / files.get(where, ".metadata")
    if where == "metadata":
        path.write_bytes(pickle.dumps(evil))
    elif where == "planner":
        metadata = pickle.loads(path.read_bytes())
        metadata.planner_data = {"deep": [evil]}
        path.write_bytes(pickle.dumps(metadata))
    elif where == "arguments":
        torch.save({"args": argparse.Namespace(num_layers=evil)}, path)
    else:  # the first tensor of the file becomes the poison
        stream = io.BytesIO()
        torch.save({"weight": evil}, stream)
        path.write_bytes(stream.getvalue())
        name, size = "embedding.word_embeddings.weight", torch.Size((72, 32))
        tensor = TensorStorageMetadata(
            TensorProperties(), size, [ChunkStorageMetadata(torch.Size((0, 0)), size)]
        )
        info = _StorageInfo(path.name, 0, len(stream.getvalue()))
        (folder / ".metadata").write_bytes(
            pickle.dumps(Metadata({name: tensor}, storage_data={MetadataIndex(name, (0, 0)): info}))
        )
    return path.read_bytes()


@pytest.mark.parametrize(
    ("way", "where"), list(enumerate(["metadata", "planner", "tensor", "arguments"]))
)
def test_poison_is_refused_by_name_and_does_nothing(theirs, tmp_path, where, way):
    touched = tmp_path / "touched"
    raw = poison(theirs, where, Poison(touched, way))
    code, shown = convert("--from-megatron", theirs, "--save", tmp_path / "run")
    assert code == 2 and f"it names {NAMES[way]}, which has no place in a checkpoint" in shown, (
        shown
    )
    assert not touched.exists() and not (tmp_path / "run").exists()
    if where in ("metadata", "planner"):  # the poison works on those who unpickle
        pickle.loads(raw)
    else:
        torch.load(io.BytesIO(raw), weights_only=False)
    assert touched.exists()


HAND_MADE = [
    b"cos\nsystem\n(S'touch %s'\ntR.",
    b"\x80\x02cos\nsystem\n(X\x0b\x00\x00\x00touch /nonetR.",
    b"\x80\x02ctorch\nSize\n}X\x01\x00\x00\x00aK\x01sb.",  # the state of a class
    b"\x80\x02K\x01K\x02R.",
    b"\x80\x02Q.",
]


@pytest.mark.parametrize("raw", HAND_MADE)
def test_pickles_by_hand_are_refused(raw, tmp_path):
    """As the metadata of a distributed checkpoint, and in a file of torch.save."""
    path = tmp_path / "x"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match="the pickle in it is refused"):
        read_metadata(path)
    torch.save({}, path)
    with zipfile.ZipFile(path) as archive:
        entries = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, raw if name.endswith("data.pkl") else content)
    with pytest.raises(CheckpointError, match="the pickle in it is refused"):
        read_torch_file(path)


def test_tensors_are_what_the_metadata_says(theirs, tmp_path):
    path, name = theirs / ".metadata", "embedding.word_embeddings.weight"
    raw = path.read_bytes()
    metadata = pickle.loads(raw)
    metadata.state_dict_metadata[name].chunks[0].sizes = torch.Size((PADDED - 1, 32))
    path.write_bytes(pickle.dumps(metadata))
    words = ("--from-megatron", theirs, "--save", tmp_path / "run")
    assert f"a tensor of shape [{PADDED - 1}, 32] is expected" in convert(*words)[1]
    metadata = pickle.loads(raw)
    index = next(index for index in metadata.storage_data if index.fqn == name)
    metadata.storage_data[index].relative_path = "../theirs/__0_0.distcp"
    path.write_bytes(pickle.dumps(metadata))
    assert "is not a plain file name" in convert(*words)[1]
    path = tmp_path / "part"
    torch.save(torch.arange(6.0).view(2, 3).T[:, 1], path)  # not contiguous, not from the start
    raw = path.read_bytes()
    path.write_bytes(b"before" + raw + b"after")
    assert map_tensor(MappedFile(path), 6, len(raw)).tolist() == [3.0, 4.0, 5.0]
    path.write_bytes(raw.replace(b"K\x03\x85", b"K\x07\x85"))
    with pytest.raises(CheckpointError, match="out of bounds|holds no tensor"):
        map_tensor(MappedFile(path), 0, len(raw))
    with pytest.raises(CheckpointError, match="truncated"):
        map_tensor(MappedFile(path), 1, len(raw))
