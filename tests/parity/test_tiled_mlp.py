"""Runs whose MLP is computed in pieces of the sequence against the same run in one process that
computes it whole, by the gates of the table of parity; and what a piece may get wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock

import pytest
import torch
from parity.compare import faults_of
from parity.layouts import Row
from parity.test_fp8_layouts import BLOCKS, Fp8Row
from parity.worker import Outcome, run_case

from megatron.model import main_grad
from megatron.model.mlp import MLP, TiledMLP, _TakePiece

ROWS = (  # and pieces
    (Row("tp2", "gpt"), 16),
    (Row("tp2 sp", "llama"), 8),
    (Row("tp2 sp serial", "documents"), 2),
    (Row("tp4 sp", "gqa2-qknorm"), 4),
    (Row("tp2 sp", "recompute"), 4),
    (Row("tp2", "uneven"), 2),
    (Row("cp2", "dropout"), 4),
    (Row("cp2 a2a", "documents-rope"), 8),
    (Row("cp2 tp2 sp", "llama"), 4),
    (Row("cp2 zero3", "llama"), 2),
    (Row("dp2 zero1", "dropout"), 4),
    (Row("dp2 zero2", "gpt"), 4),
    (Row("dp2 zero3", "llama"), 4),
    (Row("dp2 zero3 kept", "recompute"), 2),
    (Row("pp2 1f1b", "recompute"), 4),
    (Row("pp2 interleaved v2", "llama"), 2),
    (Row("pp2 zero-bubble tp2 sp", "gpt"), 4),
    (Row("pp2 zero-bubble-v dp2 zero2", "dropout"), 8),
    (Row("pp2 zero-bubble dp2 zero3", "recompute"), 2),
    (Row("tp2 sp", "gqa2-qknorm", "bf16"), 4),
    (Row("dp2 zero2", "gpt", "wire"), 4),
    # pieces of 128 tokens, which are blocks of the whole as well
    (Fp8Row("tp2", "llama", fp8=f"{BLOCKS} --seq-length 256"), 2),
)


def in_pieces(row: Row, count: int) -> tuple[str, ...]:
    return (*row.flags(layout=True), "--tiled-mlp", str(count))


@pytest.mark.parametrize("row, count", ROWS, ids=str)
def test_the_run_in_pieces_is_the_same(gloo_world, row, count):
    flags = in_pieces(row, count)
    outcomes = gloo_world(row.world).run(run_case, flags, row.patches)
    assert not faults_of(row, outcomes)


# ---- mutants


def _forward(change: Callable) -> contextlib.AbstractContextManager:
    """Another order or choice of pieces: `change` of (their inputs, the MLP of one)."""

    def forward(mlp: TiledMLP, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(change(x.chunk(mlp.pieces), partial(MLP.forward, mlp)))

    return mock.patch.object(TiledMLP, "forward", forward)


def piece_twice() -> contextlib.AbstractContextManager:
    """The first piece takes the second's place, too."""
    return _forward(lambda x, run: [run(each) for each in (x[0], x[0], *x[2:])])


def order_of_pieces() -> contextlib.AbstractContextManager:
    """Results in the order in which they are differentiated."""
    return _forward(lambda x, run: [run(each) for each in x][::-1])


def pieces_of_the_whole_sequence() -> contextlib.AbstractContextManager:
    """Under sequence parallelism each rank is given rows of a piece of the whole sequence."""

    def change(x, run):
        ranks = 2
        rows = torch.cat(x).unflatten(0, (ranks, -1)).transpose(0, 1).flatten(0, 1)
        return [run(each) for each in rows.chunk(len(x))]

    return _forward(change)


@contextlib.contextmanager
def lost_weight_gradient() -> Iterator[None]:
    """The second of each weight's pieces adds nothing to its gradient."""
    real, calls = main_grad.wgrad_gemm, []

    def adds(dy, x, into, *args):
        calls.append(into.data_ptr())
        if calls.count(into.data_ptr()) != 2:
            real(dy, x, into, *args)

    with mock.patch.object(main_grad, "wgrad_gemm", adds):
        yield


def gradient_of_one_piece() -> contextlib.AbstractContextManager:
    """The input's gradient is begun anew with each piece: the others' parts are lost."""

    def backward(ctx, drows, dx):
        dx = drows.new_zeros(ctx.shape)
        dx[ctx.rows] = drows
        return dx, None

    return mock.patch.object(_TakePiece, "backward", staticmethod(backward))


MUTANTS: dict[str, tuple[Callable, Row]] = {
    "a piece twice": (piece_twice, Row("tp2", "gpt")),
    "order of pieces": (order_of_pieces, Row("tp2 sp", "llama")),
    "pieces of the whole sequence": (pieces_of_the_whole_sequence, Row("tp2 sp", "llama")),
    "lost weight gradient": (lost_weight_gradient, Row("dp2 zero1", "llama")),
    "gradient of one piece": (gradient_of_one_piece, Row("tp2", "llama")),
}


def mutated(name: str, flags: tuple[str, ...], patches: tuple[str, ...]) -> Outcome:
    with MUTANTS[name][0]():
        return run_case(flags, patches)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(gloo_world, name):
    row = MUTANTS[name][1]
    outcomes = gloo_world(row.world).run(mutated, name, in_pieces(row, 4), row.patches)
    assert faults_of(row, outcomes)
