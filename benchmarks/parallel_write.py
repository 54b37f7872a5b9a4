"""Who writes how much of a checkpoint, and what that costs: `--ckpt-parallel-write balanced`
against `owner`, on one machine.

    python benchmarks/parallel_write.py --out FILE.json --picture FILE.svg --table PAGE.md

The case is that of a published experiment, 8 layers, tensor-parallel 2, data-parallel 8, 16
processes, at a smaller hidden size (--hidden). Every process computes with this project's own code,
from flags and its rank alone, what it would write; nothing is trained. It makes those tensors, and
the processes save them together, `owner` and `balanced` in turn; a time is from the first process's
begin to the last one's end.

One machine has one memory and one disk, whichever rank writes: there balance can gain little but
the second core. On a cluster processes have links of their own to the storage, and a save takes as
long as the fullest one: shown by holding every writer to --link MB/s (`--save-rate-limit`), on
tmpfs, where nothing else limits them. Stages of ZeRO: 0, where all of a stage's data-parallel ranks
hold all state, and 1, where each holds a slice of it, which ours writes in place, so that there is
nothing left to balance but what tensor-parallel ranks share.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if not __package__:  # run as a file: this folder's `kernels` and `data` must hide no package
    sys.path[0] = str(ROOT)

import torch
import torch.distributed as dist
from megatron.benchmarks.checkpoint import put_section
from megatron.benchmarks.training import machine

from megatron.checkpoint.manager import CheckpointManager, staging_bytes
from megatron.checkpoint.ranks import Ranks
from megatron.checkpoint.writer import own_part
from megatron.config.arguments import parse_arguments
from megatron.config.groups import Config
from megatron.config.validate import resolve
from megatron.distributed.groups import Axis, Groups, build_groups, group_options, layout_of
from megatron.model.build import build_model
from megatron.model.spec import Box
from megatron.optimizer.optimizer import Optimizer
from megatron.parallel.blocks import build_run_blocks

Pairs = list[tuple[Box, torch.Tensor]]
MODES = ("owner", "balanced")
FLAGS = """--num-layers 8 --num-attention-heads 16 --seq-length 1024 --micro-batch-size 1
--train-iters 1 --mock-data --tokenizer-type NullTokenizer
    --vocab-size 50256 --lr 1e-3 --tensor-model-parallel-size 2 --bf16"""
RANKS = 16
BEGIN, END = "<!-- parallel_write: begin -->", "<!-- parallel_write: end -->"
COLOURS = {"owner": "#dd8a3d", "balanced": "#4f86c6"}


# ---- the plan ------------------------------------------------------------------------------------


def optimizers(config: Config, ranks: int) -> Iterator[tuple[Groups, Optimizer]]:
    """Every rank's, of a job of that number of ranks, on the meta device: what a rank computes at
    its start, without processes and without memory.
    """
    config = resolve(config, ranks, None).config
    for rank in range(ranks):
        groups = build_groups(
            layout_of(config, ranks),
            rank,
            lambda ranks, group_desc: object(),
            **group_options(config),
        )
        model = build_model(config, config.data.vocab_size + 1, groups, torch.device("cpu"))
        yield (
            groups,
            Optimizer(
                build_run_blocks(config, model, torch.device("meta"), groups), config, groups
            ),
        )


def written(optimizer: Optimizer, mode: str) -> Pairs:
    """What its rank writes of weights and optimizer state."""
    return own_part(
        [*optimizer.weight_boxes(), *optimizer.state_boxes()],
        optimizer.holder,
        balanced=mode == "balanced",
    )


def byte_count(pairs: Pairs) -> int:
    return sum(math.prod(box.extent) * tensor.element_size() for box, tensor in pairs)


def imbalance(sizes: list[int]) -> float:
    """The most by the mean."""
    return max(sizes) / statistics.fmean(sizes)


# ---- the processes -------------------------------------------------------------------------------


def serve(rank: int, ranks: int, store: str, plans: dict[str, Pairs], pipe: Connection) -> None:
    """One process: saves on request, (mode, folder, MB/s or None), and answers (begin,
    end).
    """
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    together = Ranks(Axis("world", rank, tuple(range(ranks)), dist.group.WORLD))
    while True:
        mode, folder, link = pipe.recv()
        pairs = [(box, torch.ones(tensor.shape, dtype=tensor.dtype)) for box, tensor in plans[mode]]
        saver = CheckpointManager(
            folder,
            together,
            None if link is None else staging_bytes(pairs, None),
            rate=link,
        )
        dist.barrier()
        begin = time.perf_counter()
        saver.save(1, pairs, {"iteration": 1})
        assert saver.finalize(), "the save failed"
        end = time.perf_counter()
        saver.close()
        del pairs, saver
        pipe.send((begin, end))


def start(config: Config, ranks: int, store: Path) -> tuple[list[Connection], list[BaseProcess]]:
    """Fork the processes of one layout; their ends of pipes, by rank, and they themselves."""
    context, pipes, children = get_context("fork"), [], []
    plans = [
        {mode: written(optimizer, mode) for mode in MODES}
        for _, optimizer in optimizers(config, ranks)
    ]
    for rank in range(ranks):
        mine, theirs = context.Pipe()
        children.append(
            context.Process(
                target=serve, args=(rank, ranks, str(store), plans[rank], theirs), daemon=True
            )
        )
        children[-1].start()
        theirs.close()
        pipes.append(mine)
    return pipes, children


def save(
    pipes: list[Connection], mode: str, folder: Path, link: float | None
) -> tuple[float, list[int]]:
    """(seconds, bytes of each rank) of one save into a folder that is deleted afterwards."""
    try:
        for pipe in pipes:
            pipe.send((mode, folder, link))
        times = [pipe.recv() for pipe in pipes]
        sizes = Counter()
        for entry in json.loads((folder / "iter_0000001" / "MANIFEST.json").read_bytes())[
            "manifest"
        ]["shards"]:
            sizes[entry["rank"]] += entry["bytes"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return max(end for _, end in times) - min(begin for begin, _ in times), [
        sizes[rank] for rank in range(len(pipes))
    ]


def measure(
    args: argparse.Namespace, stage: int, places: dict[str, tuple[Path, float | None]]
) -> list[dict[str, Any]]:
    """A run for each place, round and mode of one ZeRO stage; what --rounds does not count is the
    first.
    """
    parsed = parse_arguments(
        [
            *FLAGS.split(),
            "--hidden-size",
            str(args.hidden),
            "--global-batch-size",
            str(RANKS // 2),
            "--zero-stage",
            str(stage),
        ]
    )
    runs = []
    with tempfile.TemporaryDirectory() as own:
        pipes, children = start(parsed.config, RANKS, Path(own) / "store")
        try:
            for index in range(args.rounds + 1):
                for place, (folder, link) in places.items():
                    for mode in MODES[:: 1 if index % 2 else -1]:
                        seconds, sizes = save(pipes, mode, folder / "save", link)
                        run = {
                            "stage": stage,
                            "place": place,
                            "mode": mode,
                            "round": index,
                            "seconds": seconds,
                            "bytes": sizes,
                        }
                        runs += [run] if index > 0 else []
                        print(
                            (
                                f"ZeRO-{stage}, {place}, round {index}, {mode}: {seconds:.3f} "
                                f"s, most by mean {imbalance(sizes):.3f}"
                            ),
                            flush=True,
                        )
        finally:
            for child in children:
                child.kill()
                child.join()
    return runs


# ---- what comes of it ----------------------------------------------------------------------------


def table(runs: list[dict[str, Any]]) -> str:
    """Markdown."""
    places = list(dict.fromkeys(run["place"] for run in runs))
    lines = [
        (
            "| ZeRO | written | writers | most of a rank, MiB | least, MiB | most by mean | "
            f"{' | '.join(f'seconds, {place}' for place in places)} |"
        ),
        "|---|---|---|---|---|---|" + "---|" * len(places),
    ]
    for stage, mode in dict.fromkeys(
        (run["stage"], run["mode"])
        for run in sorted(runs, key=lambda run: (run["stage"], MODES.index(run["mode"])))
    ):
        here = [run for run in runs if (run["stage"], run["mode"]) == (stage, mode)]
        sizes = here[0]["bytes"]
        seconds = " | ".join(
            f"{statistics.median(run['seconds'] for run in here if run['place'] == place):.2f}"
            for place in places
        )
        lines.append(
            f"| {stage} | {mode} | {sum(map(bool, sizes))} of {len(sizes)} | "
            f"{max(sizes) / 2**20:.1f} | {min(sizes) / 2**20:.1f} "
            f"| {imbalance(sizes):.3f} | {seconds} |"
        )
    return "\n".join(lines)


def draw(runs: list[dict[str, Any]]) -> str:
    """An SVG: bytes of each rank, a panel for each stage of ZeRO; the dashed line is the mean."""
    width, left, right, height, gap = 860, 66, 12, 150, 58
    stages = list(dict.fromkeys(run["stage"] for run in runs))
    parts, top = [], 30
    for stage in stages:
        sizes = {
            mode: next(run["bytes"] for run in runs if (run["stage"], run["mode"]) == (stage, mode))
            for mode in MODES
        }
        ranks, most = len(sizes[MODES[0]]), max(map(max, sizes.values()))
        slot, mean = (width - left - right) / ranks, statistics.fmean(sizes["balanced"])
        said = ", ".join(f"{mode}: most by mean {imbalance(sizes[mode]):.3f}" for mode in MODES)
        parts.append(
            f'<text x="{left}" y="{top - 10}" font-size="13" font-weight="bold">ZeRO-{stage}</text>'
        )
        parts.append(f'<text x="{width - right}" y="{top - 10}" text-anchor="end">{said}</text>')
        for number, mode in enumerate(MODES):
            bars = (
                (
                    f"M{left + slot * (rank + 0.1 + 0.4 * number):.1f} "
                    f"{top + height}v-{height * size / most:.1f}h{0.38 * slot:.1f}V{top + height}z"
                )
                for rank, size in enumerate(sizes[mode])
                if size
            )
            parts.append(f'<path fill="{COLOURS[mode]}" d="{"".join(bars)}"/>')
        line = top + height * (1 - mean / most)
        parts.append(
            f'<path stroke="#333" stroke-dasharray="4 3" fill="none" d="M{left} '
            f'{line:.1f}H{width - right}"/>'
        )
        parts.append(
            f'<path stroke="#555" fill="none" d="M{left} {top}V{top + height}H{width - right}"/>'
        )
        for value, y in (
            (most, top + 4),
            *[(mean, line + 4)] * (line > top + 12),
            (0, top + height),
        ):
            parts.append(
                f'<text x="{left - 6}" y="{y:.1f}" text-anchor="end">{value / 2**20:.0f} MiB</text>'
            )
        parts += [
            (
                f'<text x="{left + slot * (rank + 0.5):.1f}" y="{top + height + 15}" '
                f'text-anchor="middle">{rank}</text>'
            )
            for rank in range(ranks)
        ]
        top += height + gap
    parts.append(
        f'<text x="{left}" y="{top - 12}">bytes that each rank writes; dashed: the mean.</text>'
    )
    for number, mode in enumerate(MODES):
        x = left + 320 + 110 * number
        parts.append(
            f'<rect x="{x}" y="{top - 22}" width="11" height="11" '
            f'fill="{COLOURS[mode]}"/><text x="{x + 16}" y="{top - 12}">{mode}</text>'
        )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top}" '
        f'width="{width}" height="{top}" font-family="sans-serif" font-size="11">'
    )
    return "\n".join(
        [head, f'<rect width="{width}" height="{top}" fill="#fff"/>', *parts, "</svg>", ""]
    )


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--zero-stages", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--link", type=float, default=100.0, help="MB/s of each process, in the last column"
    )
    parser.add_argument("--tmpfs", default="/dev/shm", help="a folder there")
    parser.add_argument("--disk", default=tempfile.gettempdir(), help="a folder there")
    parser.add_argument("--out", type=Path, help="JSON of every run")
    parser.add_argument("--picture", type=Path, help="SVG")
    parser.add_argument(
        "--table",
        type=Path,
        help=f"Markdown file that the table is written to, between {BEGIN} and {END}",
    )
    args = parser.parse_args(argv)
    started, runs = datetime.now().isoformat(timespec="seconds"), []
    with (
        tempfile.TemporaryDirectory(dir=args.tmpfs) as tmpfs,
        tempfile.TemporaryDirectory(dir=args.disk) as disk,
    ):
        for stage in args.zero_stages:
            places = {
                "tmpfs": (Path(tmpfs), None),
                "disk": (Path(disk), None),
                f"{args.link:g} MB/s each": (Path(tmpfs), args.link),
            }
            runs += measure(args, stage, places)
    about, text = machine(), table(runs)
    print("\n" + text, flush=True)
    if args.out:
        document = {
            "started": started,
            "command": argv,
            "machine": about,
            "hidden": args.hidden,
            "ranks": RANKS,
            "flags": FLAGS.split(),
            "runs": runs,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(document, indent=1) + "\n")
    if args.picture:
        args.picture.write_text(draw(runs))
    if args.table:
        put_section(
            args.table,
            f"{started[:10]}, {about['cores']} cores, torch {about['torch']}, hidden size "
            f"{args.hidden}, median of {args.rounds} rounds:\n\n"
            f"    python benchmarks/parallel_write.py {' '.join(argv)}\n\n{text}",
            BEGIN,
            END,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
