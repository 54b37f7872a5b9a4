"""Show what checkpoints hold: content, sizes, state, integrity, differences.

    # FOLDER: what --save wrote to, or one iter_* folder in it
    python tools/inspect_checkpoint.py FOLDER [--ckpt-step N] [--verify]
    # configuration and other state of two checkpoints
    python tools/inspect_checkpoint.py --diff A B
    # every value too, whatever the layouts that saved them
    python tools/inspect_checkpoint.py --diff A B --tensors

Exit code: 0 in order (--diff: equal), 1 damaged (--diff: different), 2 not found or wrongly called.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

if not __package__:  # run as a file of a checkout
    import _checkout  # noqa: F401

from megatron.checkpoint.index import StoredTensor  # noqa: E402
from megatron.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    iteration_folder,
    list_iterations,
)  # noqa: E402
from megatron.checkpoint.reader import TORCH_DTYPES, Checkpoint, open_checkpoint  # noqa: E402
from megatron.config.streams import escape_unencodable  # noqa: E402
from megatron.distributed.logs import job_log  # noqa: E402
from megatron.model.spec import Box  # noqa: E402

PIECE = 16 << 20  # bytes of each tensor that --diff --tensors compares at a time


def locate(folder: str, step: int | None = None) -> Checkpoint:
    """Open `folder` if it is a checkpoint, else the newest one (or iteration `step`) in it."""
    if os.path.lexists(Path(folder) / MANIFEST):
        if step is not None:
            raise FileNotFoundError(f"{folder}: is itself a checkpoint; remove --ckpt-step")
        return Checkpoint(folder)
    iterations = list_iterations(Path(folder))
    if step is not None and step not in iterations:
        known = ", ".join(map(str, iterations)) or "none"
        raise FileNotFoundError(
            f"{folder}: no checkpoint of iteration {step} (--ckpt-step); there: {known}"
        )
    with job_log():
        checkpoint = open_checkpoint(folder, step)
    if checkpoint is None:
        raise FileNotFoundError(f"{folder}: no checkpoint there")
    return checkpoint


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested dictionaries by dotted name; lists are leaves."""
    if isinstance(value, dict) and value:
        for key, child in value.items():
            yield from flatten(child, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


def gib(size: int) -> str:
    return f"{size / 2**30:.3f} GiB" if size >= 1 << 30 else f"{size / 2**20:.3f} MiB"


def table(checkpoint: Checkpoint) -> list[str]:
    """One line a tensor: name, shape, dtype, bytes, boxes."""
    width = max(map(len, checkpoint.names), default=0)
    lines = []
    for name, stored in checkpoint.tensors.items():
        boxes = f"  in {len(stored.pieces)} boxes" if len(stored.pieces) > 1 else ""
        lines.append(
            f"  {name:{width}}  {stored.dtype:4}  {stored.bytes:>14,} bytes  "
            f"{list(stored.shape)}{boxes}"
        )
    return lines


def summary(checkpoint: Checkpoint) -> list[str]:
    """What the checkpoint is and holds; the configuration only where it differs from empty."""
    manifest, state = checkpoint.manifest, dict(checkpoint.state)
    config = state.pop("config", {})
    state.pop("tensors", None)  # they are listed below
    kinds = {"weights": [], "optimizer": []}
    for name, stored in checkpoint.tensors.items():
        kinds["optimizer" if name.startswith("optimizer.") else "weights"].append(stored.bytes)
    sizes = [record["bytes"] for record in manifest["shards"]]
    lines = [
        (
            f"{checkpoint.path}: iteration {checkpoint.iteration}, written "
            f"{manifest['created']} by attempt {manifest['attempt']}"
        ),
        (
            f"  {len(sizes)} shard(s), {gib(sum(sizes))}; largest / mean "
            f"{max(sizes) * len(sizes) / sum(sizes):.3f}"
        ),
        *(f"  {kind}: {len(found)} tensors, {gib(sum(found))}" for kind, found in kinds.items()),
        *shares(manifest["shards"]),
        "state:",
        *(f"  {name} = {json.dumps(value)}" for name, value in flatten(state)),
        "configuration:",
        *(
            f"  {name} = {json.dumps(value)}"
            for name, value in flatten(config)
            if value is not None
        ),
        "tensors:",
        *table(checkpoint),
    ]
    return lines


def shares(shards: list[dict[str, Any]]) -> list[str]:
    """Bytes by pipeline stage and by rank, where the manifest records who wrote what."""
    stages: dict[int, dict[int, list[dict[str, Any]]]] = {}
    for record in shards:
        if isinstance(record.get("rank"), int) and isinstance(record.get("pp"), int):
            stages.setdefault(record["pp"], {}).setdefault(record["rank"], []).append(record)
    lines = []
    for stage, ranks in sorted(stages.items()):
        sizes = {
            rank: sum(record["bytes"] for record in records)
            for rank, records in sorted(ranks.items())
        }
        ratio = max(sizes.values()) * len(sizes) / sum(sizes.values())
        lines.append(
            f"  pipeline stage {stage}: {len(sizes)} ranks wrote {gib(sum(sizes.values()))}; "
            f"largest / mean {ratio:.3f}"
        )
        lines += [
            f"    rank {rank}: {gib(size)} in {', '.join(record['file'] for record in ranks[rank])}"
            for rank, size in sizes.items()
        ]
    return lines


def verify(checkpoint: Checkpoint) -> str:
    """Read everything, a line every 5 seconds; raises CheckpointError at the first damage."""
    begin = time.monotonic()
    checkpoint.verify(reporter("verified"))
    seconds = time.monotonic() - begin
    size = checkpoint.fetcher.bytes_read
    rate = size / 1e9 / max(seconds, 1e-9)
    return f"verified: every byte matches its digest ({gib(size)} of tensors, {rate:.2f} GB/s)"


def reporter(verb: str) -> Callable[[int, int], None]:
    """Prints the progress every 5 seconds; called with (bytes done, in all)."""
    begin = last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > 5 and done:
            last = now
            print(
                (
                    f"{verb} {gib(done)} of {gib(total)}, "
                    f"{(now - begin) * (total / done - 1):.0f} s left"
                ),
                file=sys.stderr,
                flush=True,
            )

    return report


def pieces(stored: StoredTensor) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offset, extent) of boxes of at most PIECE bytes, or a row, that make up a tensor."""
    rest = stored.shape[1:]
    step = max(1, PIECE // max(1, math.prod(rest) * stored.item_bytes))
    for row in range(0, stored.shape[0], step):
        yield (row, *(0 for _ in rest)), (min(step, stored.shape[0] - row), *rest)


def tensor_differences(a: Checkpoint, b: Checkpoint) -> list[str]:
    """A line for each tensor that both have in one shape and whose values differ in any bit; a
    piece of it is in memory at a time.
    """
    common = [
        name
        for name, stored in a.tensors.items()
        if name in b.tensors and stored.shape == b.tensors[name].shape
    ]
    report, done, total = reporter("compared"), 0, sum(a.tensors[name].bytes for name in common)
    lines = []
    for name in common:
        count, largest, same = 0, 0.0, a.tensors[name].dtype == b.tensors[name].dtype
        for offset, extent in pieces(a.tensors[name]):
            x, y = (
                torch.empty(extent, dtype=TORCH_DTYPES[each.tensors[name].dtype]) for each in (a, b)
            )
            for each, into in ((a, x), (b, y)):
                each.read(Box(name, a.tensors[name].shape, offset, extent), into)
            done += x.nbytes
            if same and torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
                continue
            x, y = x.double(), y.double()
            bits = x.view(torch.int64) != y.view(torch.int64)
            count += int(bits.sum())
            gap = torch.where(bits & (x != y), (x - y).abs(), 0.0)
            largest = max(largest, math.inf if gap.isnan().any() else gap.max().item())
        report(done, total)
        if count:
            lines.append(
                f"  tensor {name}: {count} of {math.prod(a.tensors[name].shape)} values "
                f"differ; largest difference {largest:.6g}"
            )
    return lines


def differences(a: Checkpoint, b: Checkpoint) -> list[str]:
    """Lines for all state that differs, and for tensors that differ in name, shape or dtype (their
    values are not read).
    """

    def described(checkpoint: Checkpoint) -> dict[str, str]:
        state = {
            name: json.dumps(value)
            for name, value in flatten({**checkpoint.state, "tensors": None})
        }
        kinds = {
            f"tensor {name}": f"{list(t.shape)} {t.dtype}" for name, t in checkpoint.tensors.items()
        }
        return state | kinds

    left, right = described(a), described(b)
    names = [name for name in sorted({*left, *right}) if left.get(name) != right.get(name)]
    return [
        f"  {name}: {left.get(name, 'absent')} -> {right.get(name, 'absent')}" for name in names
    ]


def main(argv: list[str] | None = None) -> int:
    escape_unencodable()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", nargs="?", help="folder that --save wrote to, or one checkpoint in it"
    )
    parser.add_argument("--ckpt-step", type=int, help="iteration to look at; default: the newest")
    parser.add_argument(
        "--verify", action="store_true", help="read every byte and compare its digest"
    )
    parser.add_argument(
        "--diff", nargs=2, metavar=("A", "B"), help="compare the state of two checkpoints"
    )
    parser.add_argument(
        "--tensors", action="store_true", help="with --diff: compare all values too"
    )
    flags = parser.parse_args(argv)
    one = flags.verify or flags.ckpt_step is not None
    if (flags.folder is None) == (flags.diff is None) or (one if flags.diff else flags.tensors):
        parser.error("give FOLDER [--ckpt-step N] [--verify], or --diff A B [--tensors]")
    try:
        if flags.diff:
            with locate(flags.diff[0]) as a, locate(flags.diff[1]) as b:
                lines = differences(a, b) + (tensor_differences(a, b) if flags.tensors else [])
            equal = "  no difference in state, names, shapes and dtypes" + (
                ", and all values are equal bit for bit" if flags.tensors else ""
            )
            print("\n".join([f"{a.path} -> {b.path}", *(lines or [equal])]))
            return int(bool(lines))
        with locate(flags.folder, flags.ckpt_step) as checkpoint:
            path = checkpoint.path
            others = [i for i in list_iterations(path.parent) if iteration_folder(i) != path.name]
            print("\n".join(summary(checkpoint)))
            print(f"other iterations there: {', '.join(map(str, others)) or 'none'}")
            if flags.verify:
                print(verify(checkpoint))
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
