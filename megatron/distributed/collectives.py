"""Collectives and messages over an `Axis`, each started now and awaited later, or both at once.
Collectives split and concatenate along dimension 0.

On NCCL they are NCCL's. On Gloo, reduce-scatter and all-gather are made of sends and receives:
Gloo's reduce-scatter sends as much as an all-reduce, and allocates hidden buffers of the tensor's
size. Sums run in rank order, in fp32 for narrower tensors, so that every chunk size and alignment
gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import profiler

from megatron.distributed.groups import Axis, Groups
from megatron.distributed.peers import waiting
from megatron.distributed.rendezvous import name_ranks

# torch 2.13 has new names and warns of the old ones; 2.11 has only the old ones
ALL_GATHER, REDUCE_SCATTER = (
    ("all_gather_single", "reduce_scatter_single")
    if hasattr(dist, "all_gather_single")
    else ("all_gather_into_tensor", "reduce_scatter_tensor")
)
NATIVE = {
    "all-gather": ALL_GATHER,
    "reduce-scatter": REDUCE_SCATTER,
    "all-to-all": "all_to_all_single",
}
# bytes that a reduce-scatter takes on Gloo for what is received, cast and summed: half of what is
# reduced, or this where that is less; ZeRO allows it half the largest layer's gradient where that
# is more
ROUND_BYTES = 8 << 20
UNRECORDED: AbstractContextManager[Any] = nullcontext()


def profiler_range(*words: object) -> AbstractContextManager[Any]:
    """A range of this name in the traces of torch's profiler, for collectives, passes of layers and
    the parts of a step (read by tools/_report/step_parts.py). While it does not record, one
    attribute is read.
    """
    if not profiler._is_profiler_enabled:
        return UNRECORDED
    return profiler.record_function(" ".join(map(str, words)))


def _waiting(operation: str, axis: Axis) -> AbstractContextManager[None]:
    """While this rank waits for the others of an axis in a collective."""

    def text(seconds: float) -> str:
        rank = axis.ranks[axis.rank]
        others = [other for other in axis.ranks if other != rank]
        article = "an" if operation[0] in "aeiou" else "a"
        who = "That rank" if len(others) == 1 else "One of them, or one that it waits for,"
        return (
            f"rank {rank} waited {seconds:.1f} s in {article} {operation} over {axis.name} for "
            f"{name_ranks(others)}. {who}"
        )

    return waiting(text, profiler_range(operation, axis.dimension))


@dataclass(eq=False)
class Handle:
    """A collective in flight, or a message; its input may not be written before `wait`. `works` are
    torch's handles, which are waited for in `waits()`; `held` lives until they are complete.
    """

    works: list[Any]
    result: Tensor
    waits: Callable[[], AbstractContextManager[Any]] = nullcontext
    held: Any = None

    def wait(self) -> Tensor:
        """The result. On a GPU the current stream waits, not the host."""
        if self.works:
            with self.waits():
                for work in self.works:
                    work.wait()
        self.works, self.held = [], None
        return self.result


class Copied(Handle):
    """A collective whose result is copied to `out`: from the host, or from the dtype of its sum."""

    def __init__(self, handle: Handle, out: Tensor):
        self.handle: Handle | None = handle
        self.out = out

    def wait(self) -> Tensor:
        if self.handle is not None:
            self.out.copy_(self.handle.wait())
            self.handle = None
        return self.out


class _ToDevice(Handle):
    """A message received in host memory. Its device memory is allocated in `wait`, for messages are
    posted long before.
    """

    def __init__(self, receiving: Handle, device: torch.device):
        self.receiving, self.device = receiving, device

    def wait(self) -> Tensor:
        return self.receiving.wait().to(self.device)


class Backend:
    """Starts the collectives of an axis of two or more ranks: NCCL's. The planner's process groups
    are backends that send nothing (tools/_plan/engine.py).
    """

    on_host = False  # moves CPU memory alone

    def all_reduce(self, x: Tensor, axis: Axis, op: Any) -> Handle:
        with profiler_range("all-reduce", axis.dimension):
            work = dist.all_reduce(x, op=op, group=axis.group, async_op=True)
        return Handle([work], x, partial(_waiting, "all-reduce", axis))

    def exchange(
        self, x: Tensor, out: Tensor, axis: Axis, operation: str, *splits: list[int]
    ) -> Handle:
        """An all-gather, an all-to-all of rows or a reduce-scatter of x into `out`. `splits`: the
        numbers of rows that are received from each rank, and sent to it.
        """
        with profiler_range(operation, axis.dimension):
            work = getattr(dist, NATIVE[operation])(
                out, x.contiguous(), *splits, group=axis.group, async_op=True
            )
        return Handle([work], out, partial(_waiting, operation, axis))

    def ring_hop(self, x: Tensor, out: Tensor, axis: Axis) -> Handle:
        x = x.contiguous()
        to, source = (axis.ranks[(axis.rank + step) % axis.size] for step in (1, -1))
        # in one batch: otherwise NCCL would start one when the other has ended, on every rank
        hop = [
            dist.P2POp(dist.isend, x, to, axis.group),
            dist.P2POp(dist.irecv, out, source, axis.group),
        ]
        with _waiting("hop", axis):
            works = dist.batch_isend_irecv(hop)
        return Handle(works, out, partial(_waiting, "hop", axis), held=x)

    def reduce_scatter(
        self, x: Tensor, out: Tensor, axis: Axis, reduce_dtype: torch.dtype, workspace: int
    ) -> Handle:
        if reduce_dtype == x.dtype:
            return self.exchange(x, out, axis, "reduce-scatter")
        total = torch.empty_like(out, dtype=reduce_dtype)  # NCCL adds in the dtype that it sends
        return Copied(self.exchange(x.to(reduce_dtype), total, axis, "reduce-scatter"), out)

    def isend(self, x: Tensor, to: int, axis: Axis, tag: int) -> Handle:
        with profiler_range("send", axis.dimension):
            work = dist.isend(x, dst=axis.ranks[to], group=axis.group, tag=tag)
        return Handle([work], x, partial(profiler_range, "send", axis.dimension))

    def irecv(self, x: Tensor, source: int, axis: Axis, tag: int) -> Handle:
        with profiler_range("receive", axis.dimension):
            work = dist.irecv(x, src=axis.ranks[source], group=axis.group, tag=tag)
        return Handle([work], x, partial(profiler_range, "receive", axis.dimension))


class Gloo(Backend):
    """Sends and receives between pairs of ranks."""

    on_host = True

    def exchange(
        self, x: Tensor, out: Tensor, axis: Axis, operation: str, *splits: list[int]
    ) -> Handle:
        x = x.contiguous()
        if splits:
            received, sent = out.split(splits[0]), x.split(splits[1])
        else:
            received, sent = out.chunk(axis.size), (x,) * axis.size
        works = _swap(operation, sent, received, axis)
        return Handle(works, out, partial(_waiting, operation, axis))

    def reduce_scatter(
        self, x: Tensor, out: Tensor, axis: Axis, reduce_dtype: torch.dtype, workspace: int
    ) -> Handle:
        return _GlooReduceScatter(x, out, axis, reduce_dtype, workspace)


NCCL, GLOO = Backend(), Gloo()


def is_gloo(axis: Axis) -> bool:
    """Whether the axis communicates over Gloo, which moves CPU memory."""
    return dist.get_backend(axis.group) == "gloo"


def backend_of(axis: Axis) -> Backend:
    """What starts the collectives of an axis of two or more ranks."""
    if isinstance(axis.group, Backend):
        return axis.group
    return GLOO if is_gloo(axis) else NCCL


def _swap(
    operation: str, sent: Sequence[Tensor], received: Sequence[Tensor], axis: Axis
) -> list[Any]:
    """Send part i to rank i, and receive the part of rank i for this one: torch's handles. Empty
    parts are not sent; this rank's part is copied where it is not in place.
    """
    works = []
    with _waiting(operation, axis):  # a connection that was lost is found here
        # each rank begins with its neighbour, so that they do not all begin with the same one
        for step in range(1, axis.size):
            to, source = (axis.rank + step) % axis.size, (axis.rank - step) % axis.size
            if received[source].numel():
                src = axis.ranks[source]
                works.append(dist.irecv(received[source], src=src, group=axis.group))
            if sent[to].numel():
                works.append(dist.isend(sent[to], dst=axis.ranks[to], group=axis.group))
    ours, here = sent[axis.rank], received[axis.rank]
    if here.data_ptr() != ours.data_ptr():
        here.copy_(ours)
    return works


class _GlooReduceScatter(Handle):
    """Rounds of irecv and isend of views of x; this rank's part is read in place. At most two
    rounds are in flight, of `workspace` bytes in all.
    """

    def __init__(
        self, x: Tensor, out: Tensor, axis: Axis, reduce_dtype: torch.dtype, workspace: int
    ):
        self.axis, self.out, self.reduce_dtype = axis, out, reduce_dtype
        self.parts = [part.reshape(-1) for part in x.contiguous().chunk(axis.size)]
        self.others = [rank for rank in range(axis.size) if rank != axis.rank]
        elements = self.parts[0].numel()
        step = round_elements(elements, axis.size, x.dtype, reduce_dtype, workspace)
        self.rounds = [slice(start, start + step) for start in range(0, elements, step)]
        self.in_flight: list[tuple[slice, list[Tensor], list[Tensor], list[Any]]] = []
        self._start_round()
        self._start_round()

    def _start_round(self) -> None:
        if not self.rounds:
            return
        rows = self.rounds.pop(0)
        sent, received = ([part[rows] for part in self.parts] for _ in range(2))
        for rank in self.others:
            sent[rank] = sent[rank].to(self.reduce_dtype)
            received[rank] = torch.empty_like(sent[rank])
        works = _swap("reduce-scatter", sent, received, self.axis)
        self.in_flight.append((rows, received, sent, works))

    def wait(self) -> Tensor:
        with _waiting("reduce-scatter", self.axis):
            while self.in_flight:
                self._finish_round()  # frees its tensors for the next
                self._start_round()
        return self.out

    def _finish_round(self) -> None:
        rows, received, _, works = self.in_flight.pop(0)
        for work in works:
            work.wait()
        own = self.axis.rank
        received[own] = received[own].to(self.reduce_dtype)
        _add_in_rank_order(received, self.axis, self.out.view(-1)[rows])


def _add_in_rank_order(parts: list[Tensor], axis: Axis, out: Tensor) -> None:
    """The sum of one part from each rank into `out`, in fp32 or wider. `out` may be this rank's
    part; the others are overwritten.
    """
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    in_place = out.data_ptr() == parts[axis.rank].data_ptr()
    # this rank's part is read before it is overwritten
    if out.dtype == wide == parts[0].dtype and (axis.rank < 2 or not in_place):
        total, rest = out, parts[2:]
        torch.add(parts[0], parts[1], out=out)
    else:
        total, rest = parts[0].to(wide, copy=axis.rank == 0), parts[1:]
    for part in rest:
        total.add_(part)
    if total is not out:
        out.copy_(total)


def round_elements(
    elements: int, ranks: int, dtype: torch.dtype, reduce_dtype: torch.dtype, workspace: int
) -> int:
    """Elements of each round of a Gloo reduce-scatter whose part has `elements`: two rounds take
    `workspace` bytes, or ROUND_BYTES.
    """
    wide = torch.promote_types(reduce_dtype, torch.float32)
    # bytes for each element of a part: received; cast, to be sent and added; summed
    each = reduce_dtype.itemsize * (ranks - 1)
    each += reduce_dtype.itemsize * ranks * (reduce_dtype != dtype)
    each += wide.itemsize * (reduce_dtype != wide)
    limit = max(ROUND_BYTES, workspace)
    return elements if elements * each <= limit else max(1, limit // 2 // each)


# ---- collectives that are awaited later


def _start(method: str, x: Tensor, out: Tensor, axis: Axis, *settings: Any) -> Handle:
    """Start the backend's collective of x into `out`, on Gloo with copies on the host of tensors of
    a GPU.
    """
    backend = backend_of(axis)
    start = getattr(backend, method)
    if x.is_cuda and backend.on_host:
        return Copied(start(x.cpu(), torch.empty_like(out, device="cpu"), axis, *settings), out)
    return start(x, out, axis, *settings)


def start_all_reduce(x: Tensor, axis: Axis, op: Any = dist.ReduceOp.SUM) -> Handle:
    """The sum of x over the axis, or what `op` makes of it, in place."""
    return Handle([], x) if axis.size == 1 else backend_of(axis).all_reduce(x, axis, op)


def start_all_gather(x: Tensor, axis: Axis, out: Tensor | None = None) -> Handle:
    """Every rank's x [n, ...] -> [size * n, ...] in axis order. `x` may be this rank's part of
    `out`, which is then not copied.
    """
    if axis.size == 1:
        return Handle([], x if out is None else out)
    out = x.new_empty((axis.size * x.shape[0], *x.shape[1:])) if out is None else out
    return _start("exchange", x, out, axis, "all-gather")


def start_all_to_all_rows(x: Tensor, send: list[int], receive: list[int], axis: Axis) -> Handle:
    """Rows of x [n, ...], the first send[0] of which go to rank 0, the next send[1] to rank 1 and
    so on -> [sum of `receive`, ...], the first receive[0] of which came from rank 0 and so on.
    """
    if axis.size == 1:
        return Handle([], x)
    out = x.new_empty((sum(receive), *x.shape[1:]))
    return _start("exchange", x, out, axis, "all-to-all", receive, send)


def start_ring_hop(x: Tensor, axis: Axis) -> Handle:
    """Send x to the next rank of the axis, and receive as much from the one before."""
    return _start("ring_hop", x, x.new_empty(x.shape), axis)


def start_reduce_scatter(
    x: Tensor,
    axis: Axis,
    out: Tensor | None = None,
    reduce_dtype: torch.dtype | None = None,
    workspace: int | None = None,
) -> Handle:
    """The sum over the axis of x [size * n, ...], of which each rank gets n rows. `out` may be this
    rank's part of a contiguous x.

    `reduce_dtype`: the dtype in which parts are sent (default: that of x); they are rounded to it,
    and over NCCL so is the sum. `workspace`: bytes that it may take on Gloo in addition to x and
    out, ROUND_BYTES or more (default: half of what is reduced).
    """
    if axis.size == 1:
        return Handle([], x if out is None else out)
    out = x.new_empty((x.shape[0] // axis.size, *x.shape[1:])) if out is None else out
    reduce_dtype = reduce_dtype or x.dtype
    workspace = x.numel() * reduce_dtype.itemsize // 2 if workspace is None else workspace
    return _start("reduce_scatter", x, out, axis, reduce_dtype, workspace)


def gather_parts(x: Tensor, axis: Axis, out: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """An all-gather of x [n, ...] into out [size * n, ...] that yields rows as they arrive, as
    (which rows of out, the rows): this rank's at once, then those before and those behind.
    """
    gathering = start_all_gather(x, axis, out)
    first, behind = axis.rank * x.shape[0], (axis.rank + 1) * x.shape[0]
    yield slice(first, behind), x
    gathering.wait()
    for rows in (slice(0, first), slice(behind, out.shape[0])):
        if rows.start < rows.stop:
            yield rows, out[rows]


# ---- messages: those between two ranks arrive in the order in which they are sent; Gloo checks the
# tag in addition, NCCL ignores it


def start_send(x: Tensor, to: int, axis: Axis, tag: int = 0) -> Handle:
    """Send x to rank `to` of an axis; the handle keeps its tensor alive."""
    backend = backend_of(axis)
    x = x.cpu() if x.is_cuda and backend.on_host else x.contiguous()
    return backend.isend(x, to, axis, tag)


def start_receive(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    source: int,
    axis: Axis,
    tag: int = 0,
) -> Handle:
    """Receive a tensor of a known shape and dtype from rank `source` of an axis."""
    backend = backend_of(axis)
    on_host = backend.on_host and device.type == "cuda"
    x = torch.empty(shape, dtype=dtype, device="cpu" if on_host else device)
    receiving = backend.irecv(x, source, axis, tag)
    return _ToDevice(receiving, device) if on_host else receiving


def connect_channels(groups: Groups, device: torch.device) -> None:
    """Send a word over every link between pipeline ranks. NCCL connects two ranks at their first
    message, and blocks the hosts of both until each has posted it: a receive that is posted before
    the pass whose result its sender needs would deadlock. Never run over NCCL.
    """
    here, size = groups.pp.rank, groups.pp.size
    links = {(rank, (rank + step) % size) for rank in range(size) for step in (1, -1)}
    word = torch.zeros(1, device=device)
    # In one order on all ranks: both ends of the first link that is not connected have reached it.
    for source, to in sorted(links):
        if here in (source, to):
            axis = groups.channel(source, to)
            with _waiting("first message", axis):
                if here == source:
                    start_send(word, to, axis).wait()
                else:
                    start_receive((1,), word.dtype, device, source, axis).wait()


# ---- the same, awaited at once


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """The sum of x over the axis, in place; x."""
    return x if axis.size == 1 else start_all_reduce(x, axis).wait()


def all_reduce_max(x: Tensor, axis: Axis) -> Tensor:
    """The maximum of each element over the axis, in place; x."""
    return start_all_reduce(x, axis, dist.ReduceOp.MAX).wait()


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """Every rank's x [n, ...] -> [size * n, ...]."""
    return start_all_gather(x, axis).wait()


def all_to_all(x: Tensor, axis: Axis) -> Tensor:
    """Part i of x [size, ...] to rank i -> [size, ...], part i from rank i."""
    one_each = [1] * axis.size
    return start_all_to_all_rows(x, one_each, one_each, axis).wait()


def all_to_all_rows(x: Tensor, send: list[int], receive: list[int], axis: Axis) -> Tensor:
    """Rows of x to the ranks of an axis, send[i] of them to rank i -> receive[i] rows from each."""
    return start_all_to_all_rows(x, send, receive, axis).wait()


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """The sum over the axis of x [size * n, ...] -> this rank's [n, ...]."""
    return start_reduce_scatter(x, axis).wait()


def gather_objects(value: Any, axis: Axis) -> list[Any]:
    """Every rank's value (anything that pickle takes), in axis order."""
    values = [value] * axis.size
    if axis.size > 1:
        # NCCL sends them through the current GPU, which `choose_device` has set
        with _waiting("exchange of messages", axis):
            dist.all_gather_object(values, value, group=axis.group)
    return values


def broadcast_object(value: Any, axis: Axis) -> Any:
    """The first rank's value, on every rank of the axis."""
    values = [value]
    if axis.size > 1:
        with _waiting("broadcast", axis):
            dist.broadcast_object_list(values, src=axis.ranks[0], group=axis.group)
    return values[0]
