"""Attention of context-parallel ranks, forward and backward: ours against torch's ring attention.

    python benchmarks/context_parallel.py --out docs/results/context_parallel.json

Ours are the types of --cp-comm-type. Torch's is `_templated_ring_attention` of
torch.distributed.tensor.experimental, in zig-zag order, with both of its ways to rotate keys and
values. Both compute blocks by the same kernel of torch for CPUs: that operator is handed to torch's
ring, which knows those of GPUs alone (the one shim). All ranks are processes of one thread over
Gloo. megatron-core's context parallelism is Transformer Engine's and runs on GPUs alone.

A turn is one forward and backward pass of one system in fp32, timed from a barrier to the last
rank's end, after it was checked once against attention of one process in float64. Systems take
turns; a pair is one turn of each, its ratio torch's seconds by ours, where the faster of torch's
two ways in the median represents torch. Passed by ratio_rule.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:  # run as a file: this folder's `kernels` and `data` must hide no package
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.benchmarks import ratio_rule
from megatron.benchmarks.training import machine
from megatron.kernels.attention import attention_reference
from megatron.kernels.attention_masks import AttentionMask
from torch import Tensor

from megatron.config.groups import DistributedConfig, ModelConfig
from megatron.distributed.groups import Layout, build_groups
from megatron.model.attention.attention import SelfAttention, seen_by_queries
from megatron.model.attention.context_parallel import Places, places_of_ranks
from megatron.model.model_parallel import ModelParallel

SHAPES = {  # name: positions, query heads, key/value heads
    "4096 positions, 8 heads": (4096, 8, 8),
    "4096 positions, 8 heads, 2 of keys": (4096, 8, 2),
}
HEAD_DIM, SAMPLES = 64, 1
SIZES = (2, 4)
OURS = {  # of --cp-comm-type, and the groups of that number of ranks
    "p2p": lambda size: {"cp_ring": size},
    "allgather": lambda size: {},
    "a2a": lambda size: {"cp_heads": size},
    "a2a+p2p": lambda size: {"cp_heads": 2, "cp_ring": size // 2},
}
TORCHS = {"torch, all-to-all": "ALL_TO_ALL", "torch, all-gather": "ALL_GATHER"}
TOLERANCE = 1e-5  # of fp32 against float64, by norms


class System(NamedTuple):
    """One way to compute: the positions of this rank, and a turn, which gives out, dq, dk, dv."""

    own: Tensor
    turn: Callable[[], list[Tensor]]


def whole_tensors(shape: tuple[int, int, int]) -> list[Tensor]:
    """q, k, v and the gradient of the output [s, b, heads, d], in float64."""
    length, heads, groups = shape
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(length, SAMPLES, n, HEAD_DIM, generator=generator, dtype=torch.float64)
        for n in (heads, groups, groups, heads)
    ]


def expected(tensors: list[Tensor]) -> list[Tensor]:
    """out, dq, dk, dv of attention of one process."""
    *qkv, dout = tensors
    qkv = [x.clone().requires_grad_() for x in qkv]
    out, _ = attention_reference(*qkv, scale=HEAD_DIM**-0.5, mask=AttentionMask())
    out.backward(dout)
    return [out.detach(), *(x.grad for x in qkv)]


def ours(kind: str, shape: tuple[int, int, int], tensors: list[Tensor]) -> System:
    """The attention of our layer, behind its projections."""
    length, heads, groups = shape
    size, rank = dist.get_world_size(), dist.get_rank()
    groups_of_rank = build_groups(Layout(cp=size), rank, dist.new_group, **OURS[kind](size))
    cp = ModelParallel.of(groups_of_rank, DistributedConfig(cp_comm_type=kind)).cp
    config = ModelConfig(
        num_layers=1,
        hidden_size=heads * HEAD_DIM,
        ffn_hidden_size=HEAD_DIM,
        num_attention_heads=heads,
        kv_channels=HEAD_DIM,
        num_query_groups=groups,
        max_position_embeddings=length,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    places = torch.from_numpy(places_of_ranks(length, cp))
    held = Places.of(places, cp)
    layer = SelfAttention(config, 0, 0, ModelParallel(cp=cp))
    seen = seen_by_queries(config, None, length, None, cp, held)
    *qkv, dout = (x[held.own].float() for x in tensors)

    def turn() -> list[Tensor]:
        parts = [x.detach().requires_grad_() for x in qkv]
        out = layer.core(*parts, seen=seen, dropout_state=None)
        out.backward(dout.flatten(2))
        return [out.detach().unflatten(2, (heads, -1)), *(x.grad for x in parts)]

    return System(held.own, turn)


def torchs(way: str, shape: tuple[int, int, int], tensors: list[Tensor]) -> System:
    """Torch's ring attention, whose tensors are [b, heads, s, d]."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    length, (size, rank) = shape[0], (dist.get_world_size(), dist.get_rank())
    chunks = torch.arange(length).view(2 * size, -1)
    own = torch.cat((chunks[rank], chunks[2 * size - 1 - rank]))
    *qkv, dout = (x[own].float().permute(1, 2, 0, 3).contiguous() for x in tensors)

    def forward(
        query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, **_: Any
    ) -> tuple[Tensor, Tensor]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal
        )

    def backward(
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, query, key, value, out, logsumexp, 0.0, is_causal
        )

    def turn() -> list[Tensor]:
        ring._cp_options.enable_load_balance = True
        ring._cp_options.rotate_method = getattr(ring._RotateMethod, TORCHS[way])
        world = dist.group.WORLD
        out, lse = ring._templated_ring_attention(world, 2, forward, *qkv, is_causal=True)
        gradients = ring._templated_ring_attention_backward(
            world, 2, backward, dout, "grad_out", *qkv, out, lse, True
        )
        return [x.permute(2, 0, 1, 3) for x in (out, *gradients)]

    return System(own, turn)


def seconds(system: System) -> float:
    """Of a turn, to the last rank's end."""
    dist.barrier()
    begin = time.perf_counter()
    system.turn()
    dist.barrier()
    return time.perf_counter() - begin


def work(rank: int, size: int, rounds: int, port: int, out: Path) -> None:
    """What each rank does: measure all systems of all shapes."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    rows = []
    for name, shape in SHAPES.items():
        tensors = whole_tensors(shape)
        right = expected(tensors)
        makers = {
            **{kind: ours for kind in OURS if kind != "a2a+p2p" or size > 2},
            **dict.fromkeys(TORCHS, torchs),
        }
        systems = {kind: make(kind, shape, tensors) for kind, make in makers.items()}
        errors = {}
        for kind, system in systems.items():
            pairs = zip(system.turn(), right, strict=True)
            errors[kind] = max(
                float((got - want[system.own]).norm() / want[system.own].norm())
                for got, want in pairs
            )
            assert errors[kind] < TOLERANCE, (kind, errors[kind])
        turns = [{kind: seconds(system) for kind, system in systems.items()} for _ in range(rounds)]
        rows.append({"shape": name, "ranks": size, "errors": errors, "turns": turns})
    if rank == 0:
        out.write_text(json.dumps(rows))
    dist.destroy_process_group()


def judged(rows: list[dict]) -> list[dict]:
    """Each of our types next to torch's faster way."""
    found = []
    for row in rows:
        medians = {
            kind: statistics.median(turn[kind] for turn in row["turns"]) for kind in row["errors"]
        }
        peer = min(TORCHS, key=medians.__getitem__)
        for kind in (kind for kind in OURS if kind in medians):
            ratios = [turn[peer] / turn[kind] for turn in row["turns"]]
            found.append(
                {
                    "shape": row["shape"],
                    "ranks": row["ranks"],
                    "type": kind,
                    "peer": peer,
                    "ours_ms": round(1e3 * medians[kind], 1),
                    "peer_ms": round(1e3 * medians[peer], 1),
                    **asdict(ratio_rule.verdict(ratios, 1.0)),
                }
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15, help="turns of each system")
    parser.add_argument("--out", type=Path, required=True, help="JSON")
    args = parser.parse_args()
    started, rows = datetime.now().isoformat(timespec="seconds"), []
    for size in SIZES:
        listener = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
        port = listener.port
        del listener
        mp.spawn(work, (size, args.rounds, port, args.out), size)
        rows += json.loads(args.out.read_text())
    verdicts = judged(rows)
    document = {"started": started, "machine": machine(), "rows": verdicts, "measured": rows}
    args.out.write_text(json.dumps(document) + "\n")
    for row in verdicts:
        print(
            f"{row['ranks']} ranks, {row['shape']}: {row['type']} {row['ours_ms']} ms, "
            f"{row['peer']} {row['peer_ms']} ms, ratio {row['median']:.3f} "
            f"[{row['low']:.3f}, {row['high']:.3f}] {'passed' if row['passed'] else 'lost'}"
        )


if __name__ == "__main__":
    main()
