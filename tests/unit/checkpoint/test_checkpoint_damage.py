"""Damage of any kind gives one CheckpointError that names the file (and the tensor), and an older
checkpoint stays loadable.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil

import pytest
from checkpoint_cases import example, flip, loads, pairs, same_bits, save_in_shards
from logged import silently

from megatron.checkpoint import manifest
from megatron.checkpoint.manifest import (
    CheckpointError,
    decode_header,
    decode_manifest,
    encode_header,
)
from megatron.checkpoint.reader import Checkpoint, open_checkpoint
from megatron.checkpoint.writer import save_checkpoint
from megatron.config.groups import Config

STATE = {"iteration": 2, "consumed_samples": 16}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(manifest, "CHUNK", 256)


@pytest.fixture
def two(tmp_path):
    """Iteration 1, and iteration 2 in two shards."""
    items = pairs(example())
    save_checkpoint(tmp_path, 1, pairs(example(1)), STATE)
    return save_in_shards(tmp_path, 2, [items[::2], items[1::2]], STATE)


def load_all(root) -> None:
    with open_checkpoint(root) as checkpoint:
        for name in checkpoint.names:
            checkpoint.read_tensor(name)


def campaign(root, path, flips: int) -> list[str]:
    """Flip one random bit at a time; list the flips that were not refused with the damaged file
    (and tensor) named.
    """
    rng, missed = random.Random(1), []
    files = sorted(path.iterdir())
    for number in range(flips):
        file = files[number % len(files)]
        raw = file.read_bytes()
        at, low, tensor = 0, 0, ""
        # half of a shard's flips in its data; the header takes more bytes here
        if file.suffix == ".safetensors" and number % 2:
            low = 8 + int.from_bytes(raw[:8], "little")
        at = rng.randrange(low, len(raw))
        if low:
            entries = decode_header(raw[:low], len(raw) - low, file)
            starts = {entry.start: entry.name for entry in entries}
            tensor = starts[max(start for start in starts if start <= at - low)]
        flipped = bytearray(raw)
        flipped[at] ^= 1 << rng.randrange(8)
        file.write_bytes(flipped)
        try:
            load_all(root)
            missed.append(f"{file.name} byte {at}: not noticed")
        except CheckpointError as error:
            if file.name not in str(error) or tensor not in str(error):
                missed.append(f"{file.name} byte {at} {tensor}: not named in {error}")
        file.write_bytes(raw)
    load_all(root)
    return missed


def test_every_bit_flip_is_refused(tmp_path, two):
    assert campaign(tmp_path, two, 120) == []


def test_truncated_at_any_length(tmp_path, two):
    rng = random.Random(2)
    for file in sorted(two.iterdir()):
        raw = file.read_bytes()
        for size in {0, 1, 7, 8, len(raw) - 1, *(rng.randrange(len(raw)) for _ in range(12))}:
            file.write_bytes(raw[:size])
            with pytest.raises(CheckpointError, match=file.name):
                load_all(tmp_path)
        file.write_bytes(raw + b"\0")
        with pytest.raises(CheckpointError, match=file.name):
            load_all(tmp_path)
        file.write_bytes(raw)


def harm(two, root, how: str) -> str:
    """Damage the newer checkpoint; the name of the file that a message must hold."""
    shard, table, manifest_file = (
        two / name for name in ("shard-00001.safetensors", "shard-00000.digests", "MANIFEST.json")
    )
    if how == "missing":
        shard.unlink()
    elif how == "torn manifest":
        manifest_file.write_bytes(manifest_file.read_bytes()[:-40])
    elif how == "foreign":
        other = save_checkpoint(root / "other", 2, pairs(example(5)), STATE)
        shutil.copy(other / table.name, table)
    else:
        flip(shard, -300)
    return {"torn manifest": manifest_file, "foreign": table}.get(how, shard).name


@pytest.mark.parametrize("how", ["missing", "torn manifest", "foreign", "data"])
def test_an_older_whole_checkpoint_is_taken_when_allowed_and_that_is_logged(
    tmp_path, two, how, log_lines
):
    """Damaged data too, which opening does not see; and when the older one is damaged as well, one
    error.
    """
    name = harm(two, tmp_path, how)
    instead = "iter_0000002 cannot be loaded; load the older whole one with --ckpt-step 1"
    with pytest.raises(CheckpointError, match=f"{name}.*{instead}"):
        load_all(tmp_path)
    with open_checkpoint(tmp_path, older=True) as checkpoint:
        assert checkpoint.iteration == 1
        assert all(same_bits(checkpoint[key], tensor) for key, tensor in example(1).items())
    (line,) = log_lines
    assert line.startswith("warning: ") and name in line
    end = "iter_0000002 CANNOT BE LOADED; an older checkpoint is taken instead"
    assert line.endswith(f"{end} (--allow-older-checkpoint)")
    with silently(open_checkpoint, tmp_path, step=1, older=True) as checkpoint:
        assert checkpoint.iteration == 1
    (tmp_path / "iter_0000001" / "MANIFEST.json").unlink()
    with pytest.raises(CheckpointError, match="iter_0000001.*no older whole checkpoint is there"):
        open_checkpoint(tmp_path, older=True)


def test_a_disk_that_cannot_read_is_damage_too(tmp_path, two, monkeypatch):
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(CheckpointError, match="cannot be read: Input/output error.*--ckpt-step 1"):
        load_all(tmp_path)


def test_foreign_and_swapped_shards(tmp_path, two):
    """Of the same names and sizes: of another run, another iteration, another rank."""
    items = pairs({name: tensor + 1 for name, tensor in example().items()})
    other_run, other_iteration = (
        save_in_shards(tmp_path / name, iteration, [items[::2], items[1::2]], STATE)
        for name, iteration in (("other", 2), ("third", 3))
    )
    shard, table, first = (f"shard-0000{name}" for name in ("1.safetensors", "1.digests", "0"))
    for sources, text in (
        ({shard: other_run}, f"{shard}: damaged: bytes .*in tensor layers"),
        ({shard: other_run, table: other_run}, f"{table}: .*of another checkpoint"),
        ({shard: other_iteration}, f"{shard}: damaged: the header"),
        ({shard: two / f"{first}.safetensors"}, shard),
        ({table: two / f"{first}.digests"}, table),
    ):
        kept = {name: (two / name).read_bytes() for name in sources}
        for name, source in sources.items():
            shutil.copy(source / name if source.is_dir() else source, two / name)
        with pytest.raises(CheckpointError, match=text):
            load_all(tmp_path)
        for name, raw in kept.items():
            (two / name).write_bytes(raw)
    load_all(tmp_path)


def forge(path, change) -> None:
    """Rewrite a manifest as an attacker would: changed, with a right digest."""
    content = decode_manifest((path / "MANIFEST.json").read_bytes(), path)
    change(content)
    (path / "MANIFEST.json").write_bytes(manifest.encode_manifest(content))


def header(change, data: int = 8) -> bytes:
    raw = encode_header(
        [("a@0", "F32", (1,)), ("b@0", "F32", (1,))], {"shapes": '{"a": [1], "b": [1]}'}
    )
    content = json.loads(raw[8:])
    change(content)
    return raw[:8] + json.dumps(content).encode()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda h: h["a@0"].update(dtype="OBJ"), "a@0: dtype 'OBJ' is not one of F64"),
        (
            lambda h: h["a@0"].update(shape=[10**12]),
            "lies at bytes 0 to 4, not at 0 to 4000000000000",
        ),
        (lambda h: h["a@0"].update(shape=[-1], data_offsets=[0, -4]), "natural number"),
        (lambda h: h["a@0"].update(data_offsets=[4, 8]), "lies at bytes 4 to 8, not at 0 to 4"),
        (lambda h: h.pop("b@0"), "end at byte 4"),
        (lambda h: h["a@0"].pop("shape"), "KeyError: 'shape'"),
        (lambda h: h.update({"a@-1": h.pop("a@0")}), "'a@-1' is not of the form name@offsets"),
        (
            lambda h: h.update({"a@0,0": h.pop("a@0")}),
            r"dimensions: offset \[0, 0\], extent \[1\], shape \[1\]",
        ),
        (
            lambda h: (
                h["a@0"].update(dtype="BF16", data_offsets=[0, 2]),
                h["b@0"].update(data_offsets=[2, 6]),
            ),
            "b@0: byte 2 is not a multiple of 4",
        ),
    ],
)
def test_malformed_headers(tmp_path, change, text):
    with pytest.raises(CheckpointError, match=text):
        decode_header(header(change), 8, tmp_path)
    entries = decode_header(header(lambda h: None), 8, tmp_path)
    assert [(entry.name, entry.offset, entry.start) for entry in entries] == [
        ("a", (0,), 0),
        ("b", (0,), 4),
    ]


def test_json_that_is_nested_deeply_is_an_error_and_no_crash(tmp_path):
    deep = b"[" * 100_000
    for decode in (
        lambda: decode_manifest(manifest._frame(deep), tmp_path),
        lambda: decode_header(bytes(8) + deep, 8, tmp_path),
    ):
        with pytest.raises(CheckpointError, match="nested deeper"):
            decode()


def test_a_file_that_is_truncated_while_it_is_open(two):
    with Checkpoint(two) as checkpoint:
        file = two / "shard-00001.safetensors"
        os.truncate(file, file.stat().st_size - 300)
        with pytest.raises(CheckpointError, match="shard-00001.safetensors.*truncated"):
            checkpoint.verify()


def test_a_wrong_tracker_is_ignored_with_a_warning(tmp_path, two, log_lines):
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    for content in (b"1\n", b"", b"release\n", b"\xff\xfe" * 500):
        tracker.write_bytes(content)
        log_lines.clear()
        assert open_checkpoint(tmp_path).path == two
        (line,) = log_lines
        assert line.startswith("warning: ")
        assert "ignored: the newest whole checkpoint is iter_0000002" in line
    tracker.unlink()
    assert open_checkpoint(tmp_path).path == two and "is missing" in log_lines[-1]
    tracker.write_text("2\n")
    assert silently(open_checkpoint, tmp_path).path == two


def test_choosing_an_iteration(tmp_path, two):
    loads(open_checkpoint(tmp_path, step=1).path, example(1))
    with pytest.raises(
        CheckpointError, match=r"no checkpoint of iteration 7 \(--ckpt-step\); there: 2, 1"
    ):
        open_checkpoint(tmp_path, step=7)
    with pytest.raises(CheckpointError, match="itself a checkpoint: give its parent folder"):
        open_checkpoint(two)
    assert open_checkpoint(tmp_path / "nothing") is None
    with pytest.raises(CheckpointError, match="cannot be listed: Not a directory"):
        open_checkpoint(tmp_path / "latest_checkpointed_iteration.txt")
    for name in ("iter_0000009.bak", ".tmp-iter-9-0123456789abcdef", "iter_9", "iter_00000009"):
        (tmp_path / name).mkdir()
    assert silently(open_checkpoint, tmp_path).path == two
    two.rename(tmp_path / "iter_0000005")
    with pytest.raises(CheckpointError, match=r"manifest is of iteration 2.*--ckpt-step 1\."):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["MANIFEST.json", "shard-00001.safetensors"])
def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path, two, name):
    (two / name).unlink()
    os.mkfifo(two / name)
    with pytest.raises(
        CheckpointError,
        match=rf"{name}: is a named pipe \(FIFO\), not a regular file|{name}: has 0 bytes",
    ):
        open_checkpoint(tmp_path)


RUN_STATE = {
    "config": Config().to_dict(),
    "vocab_size": 10,
    "iteration": 2,
    "consumed_samples": 4,
    "evaluation_due": False,
    "tokenizer": "a",
    "optimizer_steps": 2.0,
    "scaler": {"scale": 1.0, "clean_steps": 0, "hysteresis": 2},
    "schedule": {"max_lr": 1.0, "style": "linear"},
    "ledger": {
        "segments": [
            {
                "first_sample": 0,
                "sources": [{"id": "a", "name": "a", "share": 65536, "first_index": 0}],
            }
        ]
    },
    "versions": {"torch": "2"},
    "tensors": {},
}


def state(change):
    """The change of a manifest that changes its state."""
    return lambda content: change(content["state"])


FORGED = [
    *(
        (lambda c, n=name: c["shards"][0].update(file=n), "the name, size or digest of shard 0 is")
        for name in ("../../x", "/etc/y", 7)
    ),
    (lambda c: c.update(version=2), "format 'sharded-safetensors' version 2"),
    (lambda c: c.update(shards=[]), ""),
    (lambda c: c.pop("state"), ""),
    (lambda c: c["shards"][1].update(table_digest="00"), "digest of shard 1 is"),
    (lambda c: c.update(left={"2": "0" * 16}), "left is not of later iterations"),
    (lambda c: c.update(left={"9": 7}), ""),
    (lambda c: c["shards"][1].update(bytes=None), ""),
    (state(lambda s: s.update(consumed_samples=-1)), "state.consumed_samples is not"),
    (state(lambda s: s.update(iteration=True)), "state.iteration is not"),
    (
        state(lambda s: s.update(scaler={"scale": 1e308, "clean_steps": 0, "hysteresis": 2})),
        "state.scaler is not",
    ),
    (state(lambda s: s["schedule"].update(style="odd")), "state.schedule is not"),
    (
        state(lambda s: s["ledger"]["segments"][0]["sources"][0].update(share=1)),
        "state.ledger is not",
    ),
    (state(lambda s: s.update(versions={"torch": 2})), "state.versions is not"),
    (
        state(lambda s: s["config"]["model"].update(num_layers="2")),
        "state.config.model.num_layers is not",
    ),
    (
        state(lambda s: s.update(tensors={"a": [1.5]})),
        "the shape of a is not a list of natural numbers",
    ),
]


def test_a_forged_manifest_is_refused(two):
    """With the right digest; no name in it can point outside of its folder."""
    forge(two, lambda content: content.update(state=RUN_STATE))
    Checkpoint(two)  # the control
    raw = (two / manifest.MANIFEST).read_bytes()
    for change, fault in FORGED:
        forge(two, change)
        text = f"MANIFEST.json: not a manifest of this format: .*{fault}"
        with pytest.raises(CheckpointError, match=text):
            Checkpoint(two)
        (two / manifest.MANIFEST).write_bytes(raw)
