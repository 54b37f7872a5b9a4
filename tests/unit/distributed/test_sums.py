"""Collectives over an axis: values bit for bit in rank order, every size of a round, in place and
not, and nothing touched that is not theirs.
"""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.config.errors import UserError
from megatron.distributed import collectives as c
from megatron.distributed.groups import Axis, Layout, build_groups
from megatron.distributed.rank_errors import RankError, raise_on_all_ranks

CPU = torch.device("cpu")


def axis_of(size):
    return build_groups(Layout(tp=size), dist.get_rank(), dist.new_group).tp


def inputs(size, shape, dtype):
    """Every rank's input, known to all."""
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(size)
    ]


def in_rank_order(parts):
    total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32))
    for part in parts[1:]:
        total = total + part
    return total


def check_sums(size, dtype, wire, round_bytes):
    with mock.patch.object(c, "ROUND_BYTES", round_bytes):
        check_sums_in_rounds(axis_of(size), size, dtype, wire)


def check_sums_in_rounds(axis, size, dtype, wire):
    rank = axis.rank
    all_x = inputs(size, (size * 1001, 3), dtype)
    x = all_x[rank].clone()
    expected = in_rank_order([part.to(wire or dtype) for part in all_x]).to(dtype).chunk(size)[rank]
    assert torch.equal(c.start_reduce_scatter(x, axis, reduce_dtype=wire).wait(), expected)
    assert torch.equal(x, all_x[rank])
    own = x.chunk(size)[rank]
    c.start_reduce_scatter(x, axis, out=own, reduce_dtype=wire).wait()
    assert torch.equal(own, expected)
    others = [i for i in range(size) if i != rank]
    assert all(torch.equal(x.chunk(size)[i], all_x[rank].chunk(size)[i]) for i in others)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "dtype, wire",
    [
        (torch.float64, None),
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.float32, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("round_bytes", [1, 1 << 10, 8 << 20])
def test_reduce_scatter_is_the_sum_in_rank_order(gloo_world, size, dtype, wire, round_bytes):
    gloo_world(size).run(check_sums, size, dtype, wire, round_bytes)


def check_gathers(size):
    axis = axis_of(size)
    all_x = inputs(size, (5, 2, 3), torch.float32)
    whole = torch.cat(all_x)
    assert torch.equal(c.all_gather(all_x[axis.rank], axis), whole)
    assert torch.equal(
        c.all_gather(all_x[axis.rank].transpose(0, 1).contiguous().transpose(0, 1), axis), whole
    )
    out = torch.full_like(whole, 9)
    own = out.chunk(size)[axis.rank].copy_(all_x[axis.rank])
    assert c.start_all_gather(own, axis, out).wait() is out and torch.equal(out, whole)
    out = torch.full_like(whole, 9)
    seen = [(rows, part.clone()) for rows, part in c.gather_parts(all_x[axis.rank], axis, out)]
    first, behind = 5 * axis.rank, 5 * axis.rank + 5
    due = [slice(first, behind), slice(0, first), slice(behind, 5 * size)]
    assert [rows for rows, _ in seen] == [rows for rows in due if rows.start < rows.stop]
    assert all(torch.equal(part, whole[rows]) for rows, part in seen) and torch.equal(out, whole)
    x = all_x[axis.rank].clone()
    assert c.all_reduce(x, axis) is x and torch.allclose(x, sum(all_x))
    return c.gather_objects(b"x" * (1000 * axis.rank), axis)


@pytest.mark.parametrize("size", [2, 4])
def test_gathers(gloo_world, size):
    assert (
        gloo_world(size).run(check_gathers, size)
        == [[b"x" * (1000 * rank) for rank in range(size)]] * size
    )


def fail_on(size, failing):
    axis = axis_of(size)
    try:
        with raise_on_all_ranks(axis):
            if axis.rank in failing:
                raise UserError(
                    "no such file: x" if failing[axis.rank] is None else failing[axis.rank]
                )
    except RankError as error:
        return str(error), error.rank
    return None


def test_together_ends_all_ranks_with_one_message(gloo_world):
    run = gloo_world(4).run
    assert run(fail_on, 4, {}) == [None] * 4
    assert run(fail_on, 4, {2: None}) == [("rank 2: no such file: x", rank) for rank in range(4)]
    assert run(fail_on, 4, {1: None, 3: None}) == [
        ("ranks 1, 3: no such file: x", rank) for rank in range(4)
    ]
    assert run(fail_on, 4, {1: "a", 3: "b"}) == [("rank 1: a", rank) for rank in range(4)]
    assert run(fail_on, 4, dict.fromkeys(range(4))) == [
        ("no such file: x", rank) for rank in range(4)
    ]


def test_a_message_over_gloo_takes_device_memory_when_it_has_arrived(monkeypatch):
    monkeypatch.setattr(c, "is_gloo", lambda _: True)
    monkeypatch.setattr(c.Gloo, "irecv", lambda _, x, *__: c.Handle([], x))
    before = torch.cuda.memory_allocated()
    # without a GPU an allocation is an error
    message = c.start_receive((256,), torch.uint8, torch.device("cuda"), 1, Axis("pp", 0, (0, 1)))
    assert torch.cuda.memory_allocated() == before
    if torch.cuda.is_available():
        assert message.wait().is_cuda
