"""How tokens come to the ranks of their experts, and back.

An assignment is one choice of a token: T tokens have T k assignments. They are sorted by expert, so
that what goes to one rank lies together, and what comes is put in the order of the experts here.
Each assignment's row goes to the rank of its expert, and its output comes back: a rank sends
T k h (ep - 1) / ep elements each way (balanced).

Ranks that share the matrices of an expert (etp) first have each other's rows, and at the end the
sum of their parts. Additions have a fixed order: a token's outputs are gathered and added up choice
by choice, and so are the gradients of its row. Which assignment goes where is a plan of integers,
which a recomputation is given again. The host waits once, for the numbers of rows; not at all where
every assignment stays on this rank and the experts' GEMMs read the numbers on the device. T tokens
of this rank, h hidden, N rows of this rank's experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron.distributed.collectives import (
    all_gather,
    all_to_all,
    all_to_all_rows,
    start_all_to_all_rows,
)
from megatron.distributed.groups import Axis
from megatron.distributed.interleaver import yield_turn
from megatron.model.experts.experts import TRITON, RowCounts
from megatron.model.linear_map import linear_map
from megatron.model.model_parallel import TensorParallel


class Assignments(NamedTuple):
    """Which rows are taken of tokens with k assignments each."""

    order: Tensor  # [n] assignments, in the order of the rows
    place: Tensor  # [T, k] the row of each assignment; 0 where it has none
    taken: Tensor | None  # [T, k] whether it has one; None: all have


class RowExchange(NamedTuple):
    """Rows to and from the ranks of an axis: how many to each, and from each."""

    axis: Axis
    send: list[int]
    receive: list[int]

    @classmethod
    def of(cls, axis: Axis, send: np.ndarray, receive: np.ndarray) -> RowExchange | None:
        """None where there are no other ranks."""
        return cls(axis, send.tolist(), receive.tolist()) if axis.size > 1 else None


class DispatchPlan(NamedTuple):
    """Which assignment goes where."""

    assignments: Assignments
    counts: RowCounts
    exchange: RowExchange | None = None  # with ranks that hold other experts
    spread: RowExchange | None = None  # with ranks that hold other parts of the same experts
    order: Tensor | None = None  # [N] of the rows that came, in the order of the experts here
    place: Tensor | None = None  # its inverse


def assignments_by_expert(
    experts: Tensor, keep: Tensor | None, count: int
) -> tuple[Tensor, Assignments]:
    """(counts of `count` experts, assignments [T, k] in their order, those not kept last)."""
    # Choices that no expert takes count as of an expert behind the last, so they sort to the end.
    if keep is not None:
        experts = torch.where(keep, experts, count)
    ordered, order = experts.flatten().sort(stable=True)
    place = inverse_of(order).view(experts.shape)
    if keep is not None:
        place.masked_fill_(~keep, 0)
    counts = torch.searchsorted(ordered, torch.arange(count + 1, device=ordered.device)).diff()
    return counts, Assignments(order, place, keep)


def inverse_of(order: Tensor) -> Tensor:
    """The place of each number in a permutation."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def transposed_order(counts: Tensor, total: int) -> Tensor:
    """Rows lie source by source [sources, experts]: their order [total] expert by expert."""
    sources, experts = counts.shape
    expert = torch.arange(experts, device=counts.device).repeat(sources)
    expert = expert.repeat_interleave(counts.flatten(), output_size=total)
    return expert.argsort(stable=True)


def _take_rows(x: Tensor, assignments: Assignments) -> Tensor:
    """x [T, h] -> the rows [n, h] of assignments."""
    return x.index_select(0, assignments.order // assignments.place.shape[1])


def _add_up(rows: Tensor, assignments: Assignments) -> Tensor:
    """The rows [n, h] of each token's assignments -> their sum [T, h], in fp32 or wider."""
    tokens, k = assignments.place.shape
    if len(rows) == 0:
        return rows.new_zeros(tokens, rows.shape[1])
    wide = torch.promote_types(rows.dtype, torch.float32)
    total = None
    for choice in range(k):
        # In the order of the choices: the sum has the same bits in every layout.
        part = rows.index_select(0, assignments.place[:, choice])
        if assignments.taken is not None:
            part.masked_fill_(~assignments.taken[:, choice, None], 0)
        total = part.to(wide) if total is None else total.add_(part)
    return total.to(rows.dtype)


def _take_weights(weights: Tensor, assignments: Assignments) -> Tensor:
    """The weights [T, k] of assignments -> [n] of the rows."""
    return weights.flatten().index_select(0, assignments.order)


def _put_weights(of_rows: Tensor, assignments: Assignments) -> Tensor:
    """Numbers [n] of the rows -> [T, k] of assignments; 0 of those without a row."""
    shape = assignments.place.shape
    return of_rows.new_zeros(shape.numel()).scatter_(0, assignments.order, of_rows).view(shape)


def _reorder(rows: Tensor, order: Tensor, place: Tensor) -> Tensor:
    """Rows in another order; `place` is its inverse."""
    return rows.index_select(0, order)


def _restore(rows: Tensor, order: Tensor, place: Tensor) -> Tensor:
    """The inverse of `_reorder`, which is its adjoint."""
    return rows.index_select(0, place)


class _Exchange(torch.autograd.Function):
    """Rows to the ranks of their experts, or `back`; each is the other's adjoint."""

    @staticmethod
    def forward(
        ctx: Any, exchange: RowExchange, back: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.back = exchange, back
        return _exchanged(tensors, exchange, back)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        # What needs no gradient, as the weights of a frozen router, is not sent back.
        needed = ctx.needs_input_grad[2:]
        sent = [dy for dy, is_needed in zip(dys, needed) if is_needed]
        found = iter(_exchanged(sent, ctx.exchange, not ctx.back))
        return None, None, *(next(found) if is_needed else None for is_needed in needed)


def _exchanged(tensors: Sequence[Tensor], exchange: RowExchange, back: bool) -> tuple[Tensor, ...]:
    """What comes for these; all are on their way while another pass may run."""
    axis, there, here = exchange
    if back:
        there, here = here, there
    # Under a pair of micro-batches the other's pass computes while these are on their way.
    coming = [start_all_to_all_rows(rows, there, here, axis) for rows in tensors]
    yield_turn()
    return tuple(rows.wait() for rows in coming)


def _spread(rows: Tensor, spread: RowExchange) -> Tensor:
    """The rows of all ranks; numbers differ, so that each sends its own to all."""
    axis, _, receive = spread
    # An all-gather with different sizes is an all-to-all of copies.
    return all_to_all_rows(torch.cat([rows] * axis.size), [len(rows)] * axis.size, receive, axis)


def _summed(rows: Tensor, spread: RowExchange) -> Tensor:
    """The sum of the ranks' parts of this rank's rows, in the order of the ranks."""
    axis, own, receive = spread
    parts = all_to_all_rows(rows, receive, own, axis).unflatten(0, (axis.size, own[0]))
    wide = torch.promote_types(rows.dtype, torch.float32)
    return parts.sum(0, dtype=wide).to(rows.dtype)


class Dispatcher:
    """Brings rows to their experts and back. `grid`: the ranks that share each expert's matrices
    and those that hold other experts; `count`: experts of a layer; `backend`: of their GEMMs.
    """

    def __init__(self, grid: TensorParallel, count: int, backend: str):
        self.grid, self.count, self.backend = grid, count, backend
        self.held = count // grid.experts.size  # experts here

    @torch.no_grad()
    def plan(self, experts: Tensor, keep: Tensor | None) -> DispatchPlan:
        """Where assignments [T, k] go whose experts these are; `keep`: those that go anywhere."""
        ep, etp = self.grid.experts, self.grid.axis
        # How many rows go to each expert, sorted by expert: what goes to a rank lies together.
        chosen, assignments = assignments_by_expert(experts, keep, self.count)
        is_alone = ep.size == etp.size == 1
        if is_alone and keep is None and self.backend == TRITON:
            # the GEMMs need no numbers on the host
            return DispatchPlan(assignments, RowCounts.of(TRITON, chosen))
        # Every rank learns how many rows come from whom: all-to-all over ep of the counts [E], then
        # all-gather over etp of what its ranks will receive.
        coming = all_gather(all_to_all(chosen.view(ep.size, self.held), ep), etp)
        numbers = np.array(torch.cat([chosen, coming.flatten()]).tolist())  # the host waits here
        numbers = numbers.reshape(-1, ep.size, self.held)
        sent, arriving = numbers[0], numbers[1:]
        assignments = assignments._replace(order=assignments.order[: sent.sum()])
        counts = RowCounts.of(self.backend, coming, arriving.sum((0, 1)).tolist())
        if is_alone:
            return DispatchPlan(assignments, counts)
        # Rows arrive source by source, and within a source expert by expert; the GEMMs need them
        # expert by expert.
        order = transposed_order(coming, int(arriving.sum()))
        from_ranks = arriving.sum(2)  # rows from each rank of ep, of each rank of etp
        own = from_ranks[etp.rank]
        return DispatchPlan(
            assignments,
            counts,
            RowExchange.of(ep, sent.sum(1), own),
            RowExchange.of(etp, own.sum().repeat(etp.size), from_ranks.sum(1)),
            order,
            inverse_of(order),
        )

    def rows(self, x: Tensor, weights: Tensor, plan: DispatchPlan) -> tuple[Tensor, Tensor]:
        """x [T, h], weights [T, k] -> those of the experts here, [N, h] and [N]."""
        # permute, all-to-all over ep, all-gather over etp, permute
        rows = linear_map(x, _take_rows, _add_up, plan.assignments)
        of_rows = linear_map(weights, _take_weights, _put_weights, plan.assignments)
        if plan.exchange is not None:
            rows, of_rows = _Exchange.apply(plan.exchange, False, rows, of_rows)
        return self._ordered(rows, plan), self._ordered(of_rows, plan)

    def _ordered(self, rows: Tensor, plan: DispatchPlan) -> Tensor:
        """What has come from ranks with other experts, in the order of the experts here."""
        if plan.spread is not None:
            rows = linear_map(rows, _spread, _summed, plan.spread)
        if plan.order is not None:
            rows = linear_map(rows, _reorder, _restore, plan.order, plan.place)
        return rows

    def combine(self, rows: Tensor, plan: DispatchPlan) -> Tensor:
        """What the experts made of the rows [N, h] -> the sum for each token [T, h]."""
        # The way back: the same steps in the opposite order, each the adjoint of its counterpart.
        if plan.order is not None:
            rows = linear_map(rows, _restore, _reorder, plan.order, plan.place)
        if plan.spread is not None:
            rows = linear_map(rows, _summed, _spread, plan.spread)
        if plan.exchange is not None:
            (rows,) = _Exchange.apply(plan.exchange, True, rows)
        return linear_map(rows, _add_up, _take_rows, plan.assignments)
