"""Campaigns on checkpoints: damaged files, and pickles of other programs."""

from __future__ import annotations

import pickle
import random
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from megatron.tools._convert.pickles import read_metadata, read_torch_file
from torch import Tensor

from campaigns.odd_input.cases import Verdicts, Wrong, damage
from campaigns.odd_input.settings_files import clear, not_a_file
from megatron.checkpoint import manifest
from megatron.checkpoint.reader import open_checkpoint
from megatron.checkpoint.writer import save_checkpoint
from megatron.config.errors import UserError
from megatron.model.spec import Box

ITERATION = 4


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


def checkpoint_damages(count: int, seed: int, folder: Path) -> Verdicts:
    """Any byte of any file, and whole files: refused, with the file's name."""
    rng, verdicts, tensors = random.Random(seed), Verdicts(), example()
    before, manifest.CHUNK = manifest.CHUNK, 256
    try:
        base = save_checkpoint(
            folder / "base",
            ITERATION,
            [(whole(name, tensor), tensor) for name, tensor in tensors.items()],
            {"iteration": ITERATION},
        )
        for number in range(count):
            root = folder / "run"
            shutil.rmtree(root, ignore_errors=True)
            shutil.copytree(folder / "base", root)
            path = root / base.name / rng.choice(sorted(path.name for path in base.iterdir()))
            if rng.random() < 0.8:
                what, raw = damage(rng, path.read_bytes())
                path.write_bytes(raw)
            else:
                what = not_a_file(path, rng)
            verdicts.case(
                f"{number} {path.name} {what}", lambda: _read(root, path.name), must_refuse=True
            )
            clear(path)
    finally:
        manifest.CHUNK = before
    return verdicts


def _read(root: Path, damaged: str) -> str:
    try:
        with open_checkpoint(root) as checkpoint:
            for name in checkpoint.names:
                checkpoint.read_tensor(name)
    except UserError as error:
        if damaged not in str(error):
            raise Wrong(f"{damaged} is not named in {error}") from error
        raise
    return "read"


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
