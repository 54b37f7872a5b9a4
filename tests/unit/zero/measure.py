"""What one rank measures: a whole real run through pretrain.py with the tracker open, and the same
with a leak brought about.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist
from own_run import exit_code, replaced
from torch import Tensor
from unit.zero.tracker import LiveBytes, Span

from megatron.distributed import collectives
from megatron.model import embedding, linear
from megatron.model import loss as loss_module
from megatron.optimizer import optimizer, update
from megatron.parallel import blocks, zero
from megatron.parallel.blocks import Block
from megatron.training import loop, pretrain, step


@contextlib.contextmanager
def pieces_of(size: int | None, head: int | None = None) -> Iterator[None]:
    """Temporaries are formed, sent and widened in pieces of `size` bytes: in a small model the
    real ones would hold everything at once; logits in pieces of `head` where the flags ask for it.
    """
    with contextlib.ExitStack() as stack:
        if head is not None:
            stack.enter_context(mock.patch.dict(loss_module.HEAD_CHUNK_BYTES, cpu=head))
        if size is not None:
            changes = [(module, "SCRATCH_BYTES", size) for module in (linear, embedding, zero)]
            changes += [(collectives, "ROUND_BYTES", size)]
            changes += [(optimizer, "PIECE", size // 8), (update, "PIECE", size // 16)]
            stack.enter_context(replaced(*changes))
        yield


@contextlib.contextmanager
def launches_of_nothing() -> Iterator[None]:
    """Our operators allocate as they do, their kernels compute nothing: the interpreter takes
    minutes, and bytes do not depend on values.
    """
    from triton.runtime.interpreter import GridExecutor

    with mock.patch.object(GridExecutor, "__call__", lambda self, *args, **kwargs: None):
        yield


def measure(
    flags: tuple[str, ...],
    pieces: int | None = None,
    leak: str | None = None,
    head: int | None = None,
) -> tuple[int, dict[str, list[Span]]]:
    """(pipeline rank, spans by name): `between` two steps (nothing but its end counts), the passes
    of a `step`, its `update`, `evaluation`, in the order of the run.
    """
    names = "start between step update evaluation"
    spans: dict[str, list[Span]] = {name: [] for name in names.split()}
    kept: list[loop.Run] = []
    hosted: list[Tensor] = []
    live = LiveBytes()

    def mark(span: str | None) -> None:
        if span is not None:
            spans[span].append(live.mark())

    def marking(real: Callable, before: str | None, after: str | None = None) -> Callable:
        """A function that ends one span when it begins, and another when it has ended."""

        def call(*args: Any, **kwargs: Any) -> Any:
            mark(before)
            result = real(*args, **kwargs)
            mark(after)
            return result

        return call

    def host_memory(*args: Any, **kwargs: Any) -> Tensor:
        hosted.append(real_host_memory(*args, **kwargs))
        return hosted[-1]

    def train(run: loop.Run):
        kept.append(run)
        stack.enter_context(live)
        states, in_host = [], [*hosted]
        for block in run.optimizer.trained:
            tensors = run.optimizer.states[block]
            states += [tensor for kind, tensor in tensors.items() if kind != "master"]
            in_host += tensors.values() if block.on_host else ()
        live.own(run.zero.blocks, states, slots=run.zero.zero_stage >= 2, host=in_host)
        mark("start")
        if leak is not None:  # not before: the plan runs the same code
            stack.enter_context(LEAKS[leak]())
        try:
            return real_train(run)
        finally:
            mark("between")

    real_host_memory, real_train = blocks.host_memory, loop.train
    changes = [
        (pretrain, "train", train),
        (blocks, "host_memory", host_memory),
        (step, "forward_backward", marking(step.forward_backward, "between")),
        (step, "update", marking(step.update, "step", "update")),
        (loop, "evaluate", marking(loop.evaluate, "between", "evaluation")),
    ]
    with contextlib.ExitStack() as stack:
        for each in (replaced(*changes), pieces_of(pieces, head), launches_of_nothing()):
            stack.enter_context(each)
        code = exit_code(flags)
    assert code == 0 and dist.get_world_size() == kept[0].groups.world.size
    return kept[0].groups.pp.rank, spans


# ---------------------------------------------------------------- faults that the checks must see


@contextlib.contextmanager
def leaked_block() -> Iterator[None]:
    """In training one release of one gathered layer is forgotten."""
    release, left = Block.release, []

    def forgetful(block: Block) -> None:
        if block.name == "layers.1":
            left.append(block)
        if len(left) != 5 or block.name != "layers.1":
            release(block)

    with mock.patch.object(Block, "release", forgetful):
        yield
    assert len(left) > 5


@contextlib.contextmanager
def leaked_slot() -> Iterator[None]:
    """Somebody keeps the gradient buffer of one layer."""
    close, kept = Block.close, []

    def keeping(block: Block):
        grad = close(block)
        if block.name == "layers.1" and not kept:
            kept.append(grad)
        return grad

    with mock.patch.object(Block, "close", keeping):
        yield
    assert kept


LEAKS: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    "block": leaked_block,
    "slot": leaked_slot,
}
