"""Campaigns on checkpoints: damaged files, manifests with a right digest and wrong content, and
pickles of other programs.
"""

from __future__ import annotations

import copy
import json
import math
import pickle
import random
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from megatron.tools._convert.pickles import read_metadata, read_torch_file
from torch import Tensor

from campaigns.odd_input.cases import ODD, Verdicts, Wrong, damage, places, put
from campaigns.odd_input.settings_files import clear, not_a_file
from megatron.checkpoint import manifest
from megatron.checkpoint.reader import open_checkpoint
from megatron.checkpoint.writer import save_checkpoint
from megatron.config.arguments import parse_arguments
from megatron.config.groups import PrecisionConfig
from megatron.data.blend import extend_history
from megatron.model.spec import Box
from megatron.optimizer.lr_schedule import ParamSchedule
from megatron.optimizer.scaler import LossScaler
from megatron.training.resume import changed_data, changed_fields, check_complete
from megatron.training.run import Progress

FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 2 --global-batch-size 16 --lr 1e-3 "
    "--train-iters 10 --mock-data --vocab-size 100 --lr-decay-iters 10 --fp16"
).split()
ITERATION = 4
OPTIONAL = (
    "tensors",
    "layout",
    "device",
    "kernels",
    "open_loss",
    "open_steps",
    "open_skipped",
    "open_nan",
)  # older runs lack them
FREE = ("attempt", "created", "left")  # of a manifest: other texts are as good


def example() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "embedding.word.weight": (9, 7),
        "layers.0.mlp.up.weight": (31, 8),
        "layers.0.mlp.up.bias": (31,),
        "head.weight": (5, 5),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def whole(name: str, tensor: Tensor) -> Box:
    """The box of a whole tensor."""
    shape = tuple(tensor.shape)
    return Box(name, shape, (0,) * len(shape), shape)


def run_state(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """What a run writes there."""
    config = parse_arguments(FLAGS).config
    source = {"id": "a1", "content": "c1", "name": "books", "share": 65536, "first_index": 0}
    return {
        "iteration": ITERATION,
        "consumed_samples": 64,
        "scheduled_samples": 64,
        "skipped_samples": 0,
        "evaluation_due": False,
        "open_loss": 1.5,
        "open_steps": 2,
        "open_skipped": 0,
        "open_nan": 0,
        "optimizer_steps": 4.0,
        "scaler": LossScaler(config.precision).state(),
        "schedule": ParamSchedule.of(config).state(),
        "ledger": {"segments": [{"first_sample": 0, "sources": [source]}]},
        "config": config.to_dict(),
        "vocab_size": 101,
        "tokenizer": "f1",
        "tensors": {name: list(tensor.shape) for name, tensor in tensors.items()},
        "versions": {"torch": "2"},
        "layout": "1 rank",
        "device": "CPU",
        "kernels": {"attention": "plain"},
    }


def use(root: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Everything that a resume does with a checkpoint before it trains."""
    with open_checkpoint(root) as checkpoint:
        tensors = {name: checkpoint.read_tensor(name) for name in checkpoint.names}
        check_complete(checkpoint, weights_alone=False)
        state, config = checkpoint.state, parse_arguments(FLAGS).config
        progress = Progress(
            **{name: state[name] for name in Progress.__dataclass_fields__ if name in state}
        )
        torch.zeros((), dtype=torch.float32).fill_(state["optimizer_steps"])
        scaler = LossScaler(PrecisionConfig(fp16=True))
        scaler.load(state["scaler"])
        scaler.update(True)
        torch.ones(1).mul_(scaler.scale)
        ParamSchedule(**state["schedule"]).rates(progress.scheduled_samples + 16)
        changed_fields(state, config, 101, "f1")
        sources = [{"id": "a1", "content": "c1", "name": "books", "share": 65536}]
        history, blend, _ = extend_history(state["ledger"], progress.consumed_samples, sources)
        changed_data(state, config, history)
        checkpoint.path.joinpath(str(progress.iteration))
        return tensors, state


def plausible(old: Any, new: Any) -> bool:
    """Whether a value could stand in the place of another: of its type, and natural where it is."""
    if old is None or new is None or isinstance(old, (dict, list)) or isinstance(new, (dict, list)):
        return old is None or new is None or type(old) is type(new)
    if (
        isinstance(old, bool)
        or isinstance(new, bool)
        or isinstance(old, str)
        or isinstance(new, str)
    ):
        return type(old) is type(new) and new != "\ud800"
    if isinstance(old, int):
        return isinstance(new, int) and -1 <= new < 2**62
    return math.isfinite(new) if isinstance(new, float) else True


def resign(folder: Path, change) -> None:
    """A manifest with other content and a right digest."""
    raw = (folder / manifest.MANIFEST).read_bytes()
    content = json.loads(raw[manifest.MANIFEST_HEAD : -2])
    change(content)
    (folder / manifest.MANIFEST).write_bytes(manifest._frame(json.dumps(content).encode()))


def resign_shard(folder: Path, change) -> None:
    """A shard whose header was changed, with right digests all the way up."""
    shard, table_path = folder / manifest.shard_file(0), folder / manifest.table_file(0)
    raw, table = (
        shard.read_bytes(),
        manifest.DigestTable.decode(table_path.read_bytes(), table_path),
    )
    header = change(raw[8 : table.data_start].rstrip(b" "))
    header += b" " * (-(8 + len(header)) % manifest.ALIGN)
    header = len(header).to_bytes(8, "little") + header
    shard.write_bytes(header + raw[table.data_start :])
    made = manifest.DigestTable(
        table.chunk,
        len(header),
        len(header) + len(raw) - table.data_start,
        manifest.chunk_digest(header),
        table.chunks,
    )
    table_path.write_bytes(made.encode())
    digest = {"bytes": made.size, "table_digest": manifest.table_digest(made.encode())}
    resign(folder, lambda content: content["shards"][0].update(digest))


def checkpoint_damages(count: int, seed: int, folder: Path) -> Verdicts:
    """Any byte of any file, whole files, signed manifests and headers of other content: refused, or
    the same bits and a state of its types.
    """
    rng, verdicts, tensors = random.Random(seed), Verdicts(), example()
    before, manifest.CHUNK = manifest.CHUNK, 256
    try:
        state = run_state(tensors)
        base = save_checkpoint(
            folder / "base",
            ITERATION,
            [(whole(name, tensor), tensor) for name, tensor in tensors.items()],
            state,
        )
        for number in range(count):
            root = folder / "run"
            shutil.rmtree(root, ignore_errors=True)
            shutil.copytree(folder / "base", root)
            one = root / base.name
            label, refuse, kind = _harm(rng, one)
            verdicts.case(
                f"{number} {label}",
                lambda: _compare(root, tensors, state, kind),
                must_refuse=refuse,
            )
            for path in one.iterdir():
                clear(path)
    finally:
        manifest.CHUNK = before
    return verdicts


def _compare(root: Path, tensors: dict[str, Tensor], state: dict[str, Any], kind: str) -> str:
    found, other = use(root)
    if sorted(found) != sorted(tensors) or not all(
        torch.equal(found[name].view(torch.uint8), tensors[name].view(torch.uint8))
        for name in tensors
    ):
        raise Wrong("other tensors were read")
    if json.dumps(other) == json.dumps(state):
        return "the same"
    if kind == "signed":
        return "a state of the right types, signed"
    raise Wrong("another state was read")


def _harm(rng: random.Random, folder: Path) -> tuple[str, bool, str]:
    """(what was done, whether it must be refused, its kind)"""
    path = rng.choice(sorted(folder.iterdir()))
    kind = rng.choice(["bytes"] * 4 + ["no file", "signed", "signed", "signed", "gone", "header"])
    if kind == "bytes":
        what, raw = damage(rng, path.read_bytes())
        path.write_bytes(raw)
        return f"{path.name} {what}", True, kind
    if kind == "no file":
        return f"{path.name} {not_a_file(path, rng)}", True, kind
    if kind == "header":
        shapes = rng.choice(
            [
                "[" * 20_000,
                '{\\"a\\": ' * 100,
                "[]",
                "null",
                '{\\"head.weight\\": [5.0, 5]}',
                '{\\"head.weight\\": [-5, -5]}',
                '{\\"head.weight\\": [true, 25]}',
                '{\\"head.weight\\": 25}',
                '{\\"head.weight\\": [[5], 5]}',
            ]
        )
        resign_shard(
            folder,
            lambda header: (
                header[: header.index(b'"shapes":') + 10] + shapes.encode() + header[_end(header) :]
            ),
        )
        return f"header {shapes[:30]}", True, kind
    answers: list[tuple[str, bool]] = []

    def change(content: dict[str, Any]) -> None:
        place = rng.choice([place for place in places(content) if place[0] not in FREE])
        if kind == "gone":
            parent = content
            for key in place[:-1]:
                parent = parent[key]
            del parent[place[-1]]
            needed = place[0] != "state" or len(place) == 2 and place[1] not in OPTIONAL
            answers.append((f"without {place}", needed and place[-1] not in ("rank", "pp")))
            return
        odd = rng.choice(ODD)
        old = put(content, place, copy.deepcopy(odd))
        known = place[-1] not in ("rank", "pp")
        answers.append((f"{place} = {repr(odd)[:30]}", known and not plausible(old, odd)))

    resign(folder, change)
    return (*answers[0], "signed")


def _end(header: bytes) -> int:
    """Where the JSON text of the shapes ends in a header."""
    at = header.index(b'"shapes":') + 10
    while header[at : at + 1] != b'"' or header[at - 1 : at] == b"\\":
        at += 1
    return at


# ---- pickles -------------------------------------------------------------------------------------


def _value(rng: random.Random, depth: int = 0) -> Any:
    """A random value of what checkpoints hold."""
    kind = rng.choice(
        ["int", "float", "str", "bytes", "none", "bool"]
        + ["list", "tuple", "dict", "ordered", "set"] * (depth < 4)
    )
    several = (
        [_value(rng, depth + 1) for _ in range(rng.randrange(5))]
        if kind in ("list", "tuple", "dict", "ordered")
        else []
    )
    names = [rng.choice(["a", "weight", 3, ("x", 1)]) for _ in several]
    return {
        "int": rng.choice([0, -1, 255, 65536, 2**40, -(2**70)]),
        "float": rng.random(),
        "str": rng.choice(["", "abc", "é" * 300]),
        "bytes": rng.randbytes(rng.randrange(9)),
        "none": None,
        "bool": rng.random() < 0.5,
        "list": several,
        "tuple": tuple(several),
        "dict": dict(zip(names, several)),
        "ordered": OrderedDict(zip(names, several)),
        "set": {1, "a"},
    }[kind]


EVIL = (
    b"cos\nsystem\n(S'echo'\ntR.",
    b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x02id\x85R.",
    b"\x80\x02cbuiltins\neval\nX\x01\x00\x00\x001\x85R.",
    b"\x80\x04" + b"(" * 20_000,
    b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7fx.",
    b"\x80\x02\x8b\xff\xff\xff\x7f.",
    b"\x80\x02K\x01(\x86.",
    b".",
    b"",
)


def pickles(count: int, seed: int, folder: Path) -> Verdicts:
    """Damaged pickles, random instructions, poison, and damaged files of torch.save: refused, or
    read as some value.
    """
    rng, verdicts, path = random.Random(seed), Verdicts(), folder / "a.pt"
    torch.save(
        {
            "weight": torch.arange(12.0).view(3, 4),
            "step": torch.tensor(3),
            "name": OrderedDict(a=1),
        },
        path,
    )
    whole = path.read_bytes()
    right = read_torch_file(path)

    def read(raw: bytes) -> str:
        (folder / "metadata").write_bytes(raw)
        read_metadata(folder / "metadata")
        return "a value"

    def read_file(raw: bytes) -> str:
        (folder / "b.pt").write_bytes(raw)
        found = read_torch_file(folder / "b.pt")
        equal = (
            isinstance(found, dict)
            and list(found) == list(right)
            and isinstance(found["weight"], Tensor)
            and (torch.equal(found["weight"], right["weight"]))
        )
        return (
            "the same tensors"
            if equal
            else "other tensors (torch.save writes no digest that covers them)"
        )

    for number in range(count):
        kind = rng.choice(["damaged"] * 6 + ["random", "evil", "file"])
        if kind == "evil":
            raw = rng.choice(EVIL)
            verdicts.case(f"{number} evil", lambda raw=raw: read(raw), must_refuse=True)
        elif kind == "file":
            what, raw = damage(rng, whole)
            verdicts.case(f"{number} file {what}", lambda raw=raw: read_file(raw))
        elif kind == "random":
            raw = (
                b"\x80\x04"
                + bytes(
                    rng.choice(b"()].}teabNK\x01\x85\x86\x87\x88\x94h\x00q\x01us0\x8f\x90R\x81\x93")
                    for _ in range(rng.randrange(2, 60))
                )
                + b"."
            )
            verdicts.case(f"{number} random {raw.hex()}", lambda raw=raw: read(raw))
        else:
            what, raw = damage(rng, pickle.dumps(_value(rng), protocol=rng.choice([2, 3, 4, 5])))
            verdicts.case(f"{number} {what} {raw.hex()[:400]}", lambda raw=raw: read(raw))
    return verdicts
