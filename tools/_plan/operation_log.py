"""The work of a pass, from the operators that the layer's code calls: GEMMs by their dimensions,
attention by visible pairs, bytes of memory-bound kernels, collectives and kernel launches.

`layer_run.py` runs the real layer on tensors of the meta device and logs each operator here. An
operator that no table below names is a memory-bound kernel that reads and writes its tensors once,
so a new layer or kernel is counted without a formula.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from megatron.kernels.attention_launch import by_key_head
from megatron.tools._plan.work import Core, Exchange, Product
from torch import Tensor

COLLECTIVE_LAUNCHES = 5  # a collective takes the host as long as that many kernels
# kernels that an operator launches, where that is not one
LAUNCHES = {"megatron::flash_attention_backward": 3}
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
NO_WORK = ALLOCATIONS | {"_unsafe_view", "lift_fresh", "set_", "resize_"}
# their first argument is not read: it is written, or gives a shape
OVERWRITES = {"copy_", "fill_", "zero_", "zeros_like", "ones_like", "full_like"}
GATHERS = {"embedding", "index_select", "index", "gather"}  # read as many elements as they write
# read and write as many elements of their first argument as the last one has
SCATTERS = {"index_put_", "index_add_", "index_copy_", "scatter_", "scatter_add_"}
# the positions of the factors of a GEMM
GEMMS = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "addmm": (1, 2),
    "addmm_": (1, 2),
    "baddbmm": (1, 2),
    "baddbmm_": (1, 2),
    "_scaled_mm": (0, 1),
}
# methods that log our operators other than memory-bound kernels
OURS = {
    "flash_attention": "_our_core",
    "flash_attention_backward": "_our_core",
    "grouped_gemm": "_our_grouped_gemm",
    "grouped_weight_grad_": "_our_grouped_wgrad",
}
# the positions of queries and keys in torch's fused attention
CORES = {
    "_scaled_dot_product_flash_attention": 0,
    "_scaled_dot_product_flash_attention_backward": 1,
    "_scaled_dot_product_flash_attention_for_cpu": 0,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 1,
    "_scaled_dot_product_efficient_attention": 0,
    "_scaled_dot_product_efficient_attention_backward": 1,
}
BACKWARD = 2.5  # GEMMs of a backward pass of fused attention, of those of its forward pass


class PendingExchange:
    """An exchange in flight. `end` finds what ran alongside it."""

    def __init__(self, log: OperationLog, exchange: Exchange):
        self.log, self.exchange = log, exchange
        self.at, self.started = len(log.exchanges), (len(log.products), len(log.cores))
        log.exchanges.append(exchange)

    def end(self) -> None:
        """Called when its result is waited for."""
        products, cores = self.started
        hidden_by = "products" if len(self.log.products) > products else ""
        if len(self.log.cores) > cores:
            hidden_by = hidden_by or "cores"
        ours = self.at < len(self.log.exchanges) and self.log.exchanges[self.at] is self.exchange
        if hidden_by and ours:
            self.log.exchanges[self.at] = replace(self.exchange, hidden_by=hidden_by)


class OperationLog:
    """Collects the work of one pass. `hidden`: the shape of the hidden states on this rank;
    `length`: tokens of a whole sequence; `wide`: bytes of an element above which a GEMM is wide.
    """

    def __init__(self, hidden: torch.Size, length: int, compute: torch.dtype):
        self.hidden_shape, self.length, self.compute = hidden, length, compute
        self.clear()

    def clear(self) -> None:
        """Begin a pass."""
        self.products: list[Product] = []
        self.cores: list[Core] = []
        self.streams: list[int] = []  # bytes of each tensor that a kernel reads or writes
        self.hidden: list[int] = []  # likewise of kernels over the residual stream
        self.exchanges: list[Exchange] = []
        self.launches: list[int] = []  # of each operator
        self.calls: list[Any] = []  # operators

    @contextmanager
    def repeated(self, times: int) -> Iterator[None]:
        """What runs inside, which exchanges nothing, counts that many times."""
        products = len(self.products)
        added = [(each, len(each)) for each in (self.streams, self.hidden, self.launches)]
        yield
        for place in range(products, len(self.products)):
            each = self.products[place]
            self.products[place] = replace(each, count=each.count * times)
        for numbers, begin in added:
            numbers[begin:] = [times * number for number in numbers[begin:]]

    def exchange(self, operation: str, axis: str, size: int) -> PendingExchange:
        """A collective or message that starts; `size`: bytes of the whole tensor."""
        return PendingExchange(self, Exchange(operation, axis, size))

    def operator(self, function: Any, args: tuple, kwargs: dict, out: Any) -> None:
        """An operator that has been called."""
        self.calls.append(function)
        name, add, launches = _kind(function)
        if add:
            self.launches.append(launches)
            getattr(self, add)(name, function, args, kwargs, out)

    # ---- GEMMs

    def product(self, product: Product) -> None:
        """A GEMM, or some of the same size."""
        self.products.append(product)

    def grouped(self, rows: Tensor, n: int, k: int, experts: int) -> None:
        """A GEMM for each of some experts that share these rows evenly."""
        count = min(experts, rows.shape[0])
        if count:
            self.product(Product(rows.shape[0] / count, n, k, count))

    def _gemm(self, name: str, function: Any, args: tuple, kwargs: dict, out: Tensor) -> None:
        a, b = (args[place] for place in GEMMS[name])
        m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
        wide = a.dtype.itemsize > max(2, self.compute.itemsize)
        fp8 = name == "_scaled_mm"
        self.product(Product(m, n, k, a.shape[:-2].numel(), fp8=fp8, wide=wide))
        if GEMMS[name][0] == 1 and args[0].dim() > 1 and kwargs.get("beta", 1):
            self.streams.append(2 * out.nbytes)  # accumulates into what it read

    def _our_grouped_gemm(
        self, name: str, function: Any, args: tuple, kwargs: dict, out: Tensor
    ) -> None:
        x, weight = args[:2]
        self.grouped(x, out.shape[1], x.shape[1], weight.shape[0])

    def _our_grouped_wgrad(
        self, name: str, function: Any, args: tuple, kwargs: dict, out: Any
    ) -> None:
        grad, dy, x = args[:3]
        count = min(grad.shape[0], x.shape[0])
        if count:
            self.product(Product(grad.shape[2], grad.shape[1], x.shape[0] / count, count))
        self.streams.append(2 * grad.nbytes)

    # ---- attention

    def core(self, keys: int, heads: int, widths: int, pairs: float, backward: bool) -> None:
        """Fused attention of `heads` heads (of all samples) over `pairs` visible pairs each."""
        flops = 2.0 * widths * heads * pairs * (BACKWARD if backward else 1)
        self.cores.append(Core(flops, keys, heads, widths // 2, backward))

    def _our_core(self, name: str, function: Any, args: tuple, kwargs: dict, out: Any) -> None:
        backward = name.endswith("backward")
        first = 4 if backward else 0
        given = {
            each.name: value
            for each, value in zip(function._schema.arguments[first:], args[first:])
        } | kwargs
        q, k, v = by_key_head(given["qkv"])
        s, t, width = q.shape[0], k.shape[0], q.shape[-1] + v.shape[-1]
        visible = float(t)
        if given["q_positions"] is not None:
            # a part of the pairs of the whole sequence, which has the share t / length of its keys
            visible = self._visible(self.length, given["window"]) * t / self.length
        elif given["causal"]:
            visible = self._visible(t, given["window"])
        self.core(t, q.shape[1:4].numel(), width, s * visible, backward)

    @staticmethod
    def _visible(keys: int, window: int | None) -> float:
        """Keys that a query of a causal sequence sees, in the mean."""
        return keys / 2 if window is None else min(keys / 2, float(window))

    def _torch_core(self, name: str, function: Any, args: tuple, kwargs: dict, out: Any) -> None:
        given = {each.name: value for each, value in zip(function._schema.arguments, args)} | kwargs
        q, k, v = args[CORES[name] : CORES[name] + 3]
        s, t = q.shape[2], k.shape[2]
        visible = t / 2 if given.get("is_causal", False) else t
        width = q.shape[3] + v.shape[3]
        self.core(t, q.shape[0] * q.shape[1], width, s * visible, name.endswith("backward"))

    # ---- memory-bound kernels

    def _stream(self, name: str, function: Any, args: tuple, kwargs: dict, out: Any) -> None:
        """Bytes read and written; of kernels over the residual stream apart from the others."""
        read = [*_tensors(args)]
        if kwargs:
            outputs = _outputs(function)
            read += _tensors([value for key, value in kwargs.items() if key not in outputs])
        written = [*_tensors((out,))]
        if function.namespace == "megatron" and not written:  # mutates its arguments
            named = zip(function._schema.arguments, args)
            written = [
                value for each, value in named if each.alias_info and each.alias_info.is_write
            ]
        sizes = _moved(name, read, written)
        widest = max([*read, *written], key=Tensor.numel, default=None)
        if widest is None or not widest.is_meta:
            self.launches.pop()  # a number of the host
        elif widest.shape == self.hidden_shape:
            self.hidden += sizes
        else:
            self.streams += sizes


@cache
def _kind(function: Any) -> tuple[str, str, int]:
    """An operator's name, the method that logs its calls (none where a device has nothing to do
    for it), and its launches.
    """
    name, add = function.overloadpacket.__name__, "_stream"
    if function.namespace == "megatron":
        add = OURS.get(name, add)
    elif function.namespace != "aten" or name in NO_WORK or _is_view(function):
        add = ""
    elif name in GEMMS:
        add = "_gemm"
    elif name in CORES:
        add = "_torch_core"
    return name, add, LAUNCHES.get(function.name(), 1)


@cache
def _outputs(function: Any) -> set[str]:
    """Names of the arguments that an operator writes its results into."""
    return {each.name for each in function._schema.arguments if each.is_out}


def _is_view(function: Any) -> bool:
    """Whether it returns another view of its argument."""
    return any(
        each.alias_info is not None and not each.alias_info.is_write
        for each in function._schema.returns
    )


def _moved(name: str, read: list[Tensor], written: list[Tensor]) -> list[int]:
    """Bytes that a kernel reads and writes, of each tensor."""
    if name in SCATTERS:
        return [*map(_bytes, read[1:]), 2 * read[-1].numel() * read[0].element_size()]
    if name in GATHERS:
        return [*map(_bytes, read[1:]), *(2 * _bytes(each) for each in written)]
    return [*map(_bytes, read[name in OVERWRITES :]), *map(_bytes, written)]


def _tensors(values: Any) -> Iterator[Tensor]:
    """The tensors among arguments, in their order."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _bytes(tensor: Tensor) -> int:
    """What a kernel moves of it: an expanded tensor is as large as its storage."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
