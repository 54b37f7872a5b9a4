"""What one rank of a golden run does: the real program, with its bytes counted.

Nothing of the program is imported but `pretrain_gpt.main` and the functions that `STEP` names, so
that the same file measures the program before and after its inside has changed.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import io
import os
import sys
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# (module, function) of the program that a step consists of, in any version of it.
STEP = (
    ("megatron.training.loop", "forward_backward"),
    ("megatron.training.loop", "update"),
    ("megatron.training.step", "forward_backward"),
    ("megatron.training.step", "update"),
)
# Functions of torch.distributed that send, and which argument holds what a rank gives.
SENDERS = {
    "isend": 0,
    "send": 0,
    "all_reduce": 0,
    "broadcast": 0,
    "reduce": 0,
    "all_gather": 1,
    "all_gather_into_tensor": 1,
    "all_gather_single": 1,
    "reduce_scatter": 1,
    "reduce_scatter_tensor": 1,
    "reduce_scatter_single": 1,
    "all_to_all_single": 1,
}


class LivePeak(TorchDispatchMode):
    """The most bytes of tensor storages that were alive at once, taken after every operator.

    `peak` is that of the whole run, `step_peak` that inside `step()`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}  # and its bytes
        self.alive = 0
        self.peak = 0
        self.step_peak = 0
        self.inside = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for leaf in (*args, out):
            self._see(leaf)
        self.sample()
        return out

    def _see(self, value: Any) -> None:
        """Know the storages of a tensor, or of those in a list."""
        if isinstance(value, (list, tuple)):
            for each in value:
                self._see(each)
        elif isinstance(value, Tensor) and value.layout == torch.strided:
            self.note(value.untyped_storage())

    def note(self, storage: torch.UntypedStorage) -> None:
        """A storage has the size that it has now."""
        if storage.device.type == "meta":
            return
        key, size = id(storage), storage.nbytes()
        if key not in self.known:
            self.known[key] = weakref.ref(storage, functools.partial(self._forget, key)), 0
        ref, before = self.known[key]
        self.known[key] = ref, size
        self.alive += size - before

    def _forget(self, key: int, _: Any) -> None:
        self.alive -= self.known.pop(key)[1]

    def sample(self) -> None:
        """Compare what is alive now with the most so far."""
        self.peak = max(self.peak, self.alive)
        if self.inside:
            self.step_peak = max(self.step_peak, self.alive)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """What happens inside belongs to a step."""
        before, self.inside = self.inside, True
        self.sample()
        try:
            yield
        finally:
            self.inside = before


def _resizing(live: LivePeak) -> Any:
    """UntypedStorage.resize_, which is no operator, noted."""
    real = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        done = real(storage, size)
        live.note(storage)
        live.sample()
        return done

    return resize


class Sent:
    """Calls of torch.distributed, by function and size of the group: their number and bytes.

    Only floating-point tensors count: messages about the run are integers and pickled text.
    """

    def __init__(self) -> None:
        self.totals: dict[str, list[int]] = {}

    def counting(self, name: str, position: int) -> Any:
        """The function `name` of torch.distributed, counted."""
        real = getattr(dist, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            given = args[position] if len(args) > position else None
            tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
            size = sum(tensor.nbytes for tensor in tensors if tensor.is_floating_point())
            if size:
                group = kwargs.get("group") or next(filter(_is_group, args), None)
                total = self.totals.setdefault(f"{name} {dist.get_world_size(group)}", [0, 0])
                total[0] += 1
                total[1] += size
            return real(*args, **kwargs)

        return counted


def _is_group(value: Any) -> bool:
    return isinstance(value, dist.ProcessGroup)


def run_rank(tree: str, argv: list[str], rank: int, size: int, port: int, answers: Any) -> None:
    """Run `pretrain_gpt.py argv` of the checkout `tree` as this rank; put what was counted into
    `answers` as (rank, measured or None, text).
    """
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    sys.path.insert(0, tree)
    torch.set_num_threads(1)
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            measured = _measured(tree, argv)
    except BaseException as error:
        import traceback

        text.write("".join(traceback.format_exception(error)))
        measured = None
    answers.put((rank, measured, text.getvalue()))


def _measured(tree: str, argv: list[str]) -> dict[str, Any]:
    program = importlib.import_module("pretrain_gpt")
    if not program.__file__.startswith(f"{tree}/"):
        raise RuntimeError(f"{program.__file__} was imported, not the one of {tree}")
    gc.collect()
    gc.disable()  # when cycles are found must not depend on how many objects were made
    live, sent = LivePeak(), Sent()
    with contextlib.ExitStack() as stack:
        for name, position in SENDERS.items():
            if hasattr(dist, name):
                counted = sent.counting(name, position)
                for module in (dist, distributed_c10d):  # P2POp compares with the second
                    if hasattr(module, name):
                        stack.enter_context(mock.patch.object(module, name, counted))
        for module, name in STEP:
            stack.enter_context(_inside_steps(live, module, name))
        stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", _resizing(live)))
        stack.enter_context(live)
        code = program.main(argv)
    if code != 0:
        raise RuntimeError(f"exit code {code}")
    return {"peak": live.peak, "step_peak": live.step_peak, "sent": sent.totals}


def _inside_steps(live: LivePeak, module: str, name: str) -> contextlib.AbstractContextManager:
    """The function's calls belong to steps, where this version of the program has it."""
    try:
        real = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return contextlib.nullcontext()

    def inside(*args: Any, **kwargs: Any) -> Any:
        with live.step():
            return real(*args, **kwargs)

    return mock.patch.object(sys.modules[module], name, inside)
