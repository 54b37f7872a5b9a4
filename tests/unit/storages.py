"""Which storages live: all that operators make, by their weak references."""

import contextlib
import gc
import time

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Storages(TorchDispatchMode):
    """Every storage that an operator made, without keeping it alive."""

    def __init__(self):
        super().__init__()
        self.made = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = of(*(x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and not of(x) <= given | self.made.keys():
                self.made[x.untyped_storage()._cdata] = (
                    StorageWeakRef(x.untyped_storage()),
                    x.untyped_storage().nbytes(),
                )
        return out

    def alive(self):
        return {
            key: size for key, (reference, size) in self.made.items() if not reference.expired()
        }

    def settle(self, done):
        """Whether `done` of the living storages comes true: Gloo's thread drops a sent tensor a
        moment after the message is over.
        """
        end = time.monotonic() + 60
        while not (came := done(self.alive())) and time.monotonic() < end:
            time.sleep(0.001)
        return came


def of(*tensors):
    return {x.untyped_storage()._cdata for x in tensors}


@contextlib.contextmanager
def no_collector():
    """Storages must go by their references alone."""
    with Storages():
        # the first use of such a mode imports much, and leaves this function's frame in a cycle
        torch.zeros(1)
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
