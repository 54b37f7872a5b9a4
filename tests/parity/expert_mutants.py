"""What other programs got wrong with experts, put into this one: patches of worker.py, each of
which must be found by a comparison with one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from unittest import mock

import torch

from megatron.distributed.groups import ALONE
from megatron.model.experts import dispatch, experts, router
from megatron.model.experts.router import Router
from megatron.model.gpt import GPTModel
from megatron.model.spec import TensorSpec
from megatron.parallel.blocks import Block

Patch = contextlib.AbstractContextManager


def divided_by_copies() -> Patch:
    """Gradients of experts that are divided by the ranks that hold the same one."""
    real = experts.add_expert_weight_grads

    def add(dy, *rest):
        real(dy / 2, *rest)

    return mock.patch.object(experts, "add_expert_weight_grads", add)


def times_expert_ranks() -> Patch:
    """Gradients of experts that are added up over ranks that do not hold them."""
    real = experts.add_expert_weight_grads

    def add(dy, *rest):
        real(dy * 2, *rest)

    return mock.patch.object(experts, "add_expert_weight_grads", add)


def norm_without_experts() -> Patch:
    """A norm of the gradient that leaves experts out."""
    real = Block.counted

    def counted(self, groups, piece=None):
        return [] if self.plan.group == "expert" else real(self, groups, piece)

    return mock.patch.object(Block, "counted", counted)


def norm_counts_copies() -> Patch:
    """A norm of the gradient that counts an expert on each rank that holds it."""
    real = Block.counted

    def counted(self, groups, piece=None):
        if self.plan.group != "expert":
            return real(self, groups, piece)
        return [slice(0, self.own[1] - self.own[0])]

    return mock.patch.object(Block, "counted", counted)


def local_counts() -> Patch:
    """Auxiliary losses by the tokens of this rank alone."""
    return mock.patch.object(router, "all_reduce", lambda x, axis: x)


def loss_times_ranks() -> Patch:
    """Auxiliary losses that grow with the ranks that share a sample."""
    real = Router.losses

    def losses(self, *args):
        found = real(self, *args)
        return {name: value * self.samples.size for name, value in found.items()}

    return mock.patch.object(Router, "losses", losses)


def bias_in_weights() -> Patch:
    """Experts are weighted by scores with the bias."""
    real = Router.weights

    def weights(self, scores, chosen):
        return real(self, scores if self.expert_bias is None else scores + self.expert_bias, chosen)

    return mock.patch.object(Router, "weights", weights)


def bias_of_skipped_steps() -> Patch:
    """The bias changes in a step that was skipped."""
    real = GPTModel.update_routers

    def update(self, scalars, skipped):
        real(self, scalars, torch.zeros_like(skipped))

    return mock.patch.object(GPTModel, "update_routers", update)


def experts_of_the_next_rank() -> Patch:
    """A rank holds other experts than those whose tokens come."""
    real = TensorSpec.is_held
    return mock.patch.object(
        TensorSpec, "is_held", lambda self, rank, ranks: real(self, (rank + 1) % ranks, ranks)
    )


def weights_in_the_order_of_tokens() -> Patch:
    """Weights that are not sorted as the rows are."""

    def taken(weights, assignments):
        return weights.flatten()[: len(assignments.order)].clone()

    return mock.patch.object(dispatch, "_take_weights", taken)


def one_part_of_an_expert() -> Patch:
    """The outputs of an expert are those of one of the ranks that share its matrices."""
    real = dispatch._spread

    def summed(rows, spread):
        start = sum(spread.receive[: spread.axis.rank])
        assert real is not None
        return rows[start : start + spread.receive[spread.axis.rank]].clone()

    return mock.patch.object(dispatch, "_summed", summed)


def whole_router_gradients() -> Patch:
    """Under sequence parallelism the router's gradient is that of a rank's own tokens."""
    return mock.patch.object(router, "parts_under", lambda sequence: ())


def capacity_of_local_tokens() -> Patch:
    """An expert's capacity is that of each rank's tokens."""
    real = Router._within_capacity

    def within(self, *args):
        samples, self.samples = self.samples, ALONE
        try:
            return real(self, *args)
        finally:
            self.samples = samples

    return mock.patch.object(Router, "_within_capacity", within)


def rows_come_back_elsewhere() -> Patch:
    """Received rows are taken for sorted ones."""
    real = dispatch.transposed_order

    def order(counts, total):
        return torch.arange(len(real(counts, total)), device=counts.device)

    return mock.patch.object(dispatch, "transposed_order", order)


PATCHES: dict[str, Callable[[], Patch]] = {
    patch.__name__: patch
    for patch in (
        divided_by_copies,
        times_expert_ranks,
        norm_without_experts,
        norm_counts_copies,
        local_counts,
        loss_times_ranks,
        bias_in_weights,
        bias_of_skipped_steps,
        experts_of_the_next_rank,
        weights_in_the_order_of_tokens,
        one_part_of_an_expert,
        whole_router_gradients,
        capacity_of_local_tokens,
        rows_come_back_elsewhere,
    )
}
