"""Draw who computes what in context parallelism: of each pair of a chunk of queries and a chunk of
keys the rank and, in a ring, the step; and the positions that ranks hold of one document and of
many.

    python tools/plot_context_parallel.py --ranks 4 --out docs/images/context_parallel.svg
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if not __package__:  # run as a file of a checkout
    import _checkout  # noqa: F401

import numpy as np
import torch

from megatron.config.streams import escape_unencodable  # noqa: E402
from megatron.model.attention.context_parallel import places_of  # noqa: E402
from megatron.model.attention.ring_attention import ring_steps  # noqa: E402

COLOURS = ("#4f86c6", "#dd8a3d", "#3f9c6d", "#b5557a", "#8a6fc0", "#7c8a3f", "#3a9ba8", "#a3704a")
CELL, LEFT, TOP, STRIP = 34, 90, 40, 22  # pixels
LENGTH = 4096  # positions of the strips


def pairs(ranks: int) -> list[tuple[int, int, int, int]]:
    """(chunk of queries, chunk of keys, rank, step) of all pairs that are seen, of 2C chunks."""
    places = torch.from_numpy(places_of(2 * ranks, ranks))
    found = []
    for rank in range(ranks):
        for index, step in enumerate(ring_steps(places, rank, None, None, by_positions=False)):
            queries = places[rank][step.queries]
            keys = places[(rank - index) % ranks][step.keys]
            seen = step.mask.dense(len(queries), len(keys), places.device)[0, 0]
            found += [
                (int(queries[row]), int(keys[column]), rank, index)
                for row, column in seen.nonzero().tolist()
            ]
    return sorted(found)


def documents(length: int) -> np.ndarray:
    """Starts [1, length] of documents of unequal lengths, the same every time."""
    draw, starts, at = np.random.default_rng(1), np.zeros((1, length), np.int32), 0
    while at < length:
        starts[:, at:] = at
        at += 64 + int(draw.lognormal(6.0, 1.0))
    return starts


def _text(x: float, y: float, words: object, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{words}</text>'


def _box(x: float, y: float, width: float, height: float, rank: int) -> str:
    colour = COLOURS[rank % len(COLOURS)]
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{colour}" '
        'stroke="white" stroke-width="0.5"/>'
    )


def _strip(y: float, width: float, title: str, places: np.ndarray) -> list[str]:
    """Positions from left to right, each in the colour of the rank that holds it."""
    holder = np.empty(places.size, np.int64)
    for rank, own in enumerate(places):
        holder[own] = rank
    edges = [0, *(np.flatnonzero(np.diff(holder)) + 1).tolist(), len(holder)]
    scale = width / len(holder)
    boxes = [
        _box(LEFT + begin * scale, y, (end - begin) * scale, STRIP, int(holder[begin]))
        for begin, end in zip(edges, edges[1:])
    ]
    return [_text(LEFT, y - 6, title), *boxes]


def draw(ranks: int) -> str:
    """The picture, as SVG."""
    side = 2 * ranks * CELL
    width = max(side, 420)
    lines = [_text(LEFT, 16, "keys: 2C chunks of the sequence; numbers: steps of a ring")]
    for chunk, own in enumerate([*range(ranks), *reversed(range(ranks))]):
        at = TOP + (chunk + 0.65) * CELL
        lines.append(_text(LEFT - 8, at, f"rank {own}", "end"))
        lines.append(_text(LEFT + (chunk + 0.5) * CELL, TOP - 6, chunk, "middle"))
    for query, key, rank, step in pairs(ranks):
        x, y = LEFT + key * CELL, TOP + query * CELL
        lines += [_box(x, y, CELL, CELL, rank), _text(x + CELL / 2, y + 22, step, "middle")]
    y = TOP + side + 40
    starts = documents(LENGTH)
    lines += _strip(y, width, "one document: who holds which positions", places_of(LENGTH, ranks))
    balanced = places_of(LENGTH, ranks, starts)
    lines += _strip(
        y + 54, width, "documents that attention does not leave (white lines)", balanced
    )
    for start in np.unique(starts)[1:].tolist():
        x = LEFT + start * width / LENGTH
        lines.append(
            f'<rect x="{x:g}" y="{y + 50:g}" width="2" height="{STRIP + 8}" fill="white"/>'
        )
    height = y + 54 + STRIP + 14
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + width + 20}" height="{height:g}" '
        'font-family="sans-serif" font-size="12">'
        '<rect width="100%" height="100%" fill="#f4f4f2"/>' + "\n".join(lines) + "</svg>\n"
    )


def main(argv: list[str] | None = None) -> int:
    escape_unencodable()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4, metavar="C", help="2 or more")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.svg")
    args = parser.parse_args(argv)
    if args.ranks < 2 or LENGTH % (2 * args.ranks):
        print(f"--ranks {args.ranks}: give 2, 4, 8, ... up to {LENGTH // 2}", file=sys.stderr)
        return 2
    args.out.write_text(draw(args.ranks))
    return 0


if __name__ == "__main__":
    sys.exit(main())
