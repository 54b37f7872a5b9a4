"""What a unit of the model keeps, takes and computes, measured: the real layer runs its passes on
tensors of the meta device. The bytes of their storages are counted while it does, and the operators
that it calls are logged (operation_log.py).

The layer's code sees tensors of the device that is planned for (`PlannedDevice`), so that it takes
the kernels of that device. Nothing is computed and nothing is sent. An operator's own function
runs, without its launches, so that what it allocates is counted (kernels/lang.py).
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from megatron.kernels.lang import FAKES
from megatron.tools._plan import meta_results
from megatron.tools._plan.measured_pass import MeasuredPass
from megatron.tools._plan.operation_log import COLLECTIVE_LAUNCHES, OperationLog, PendingExchange
from megatron.tools._plan.silent import SilentGroup
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.config.derive import attention_ranks, expert_ranks
from megatron.config.groups import Config
from megatron.distributed.groups import ALONE, Axis, Layout, build_groups
from megatron.model.build import build_stages, hidden_shape
from megatron.model.experts import experts
from megatron.model.experts.router import AUX_LOSS
from megatron.model.gpt import GPTModel
from megatron.model.kernels import choose_kernels, compute_dtype
from megatron.model.layer import MicroBatch
from megatron.model.recompute import LayerRecompute
from megatron.model.stages import Stage
from megatron.parallel.layer_runner import LayerRunner
from megatron.parallel.offload import OffloadingRunner, storages_of, tensors_of
from megatron.parallel.schedule import Kind

META = torch.device("meta")
SPLIT = "zero-bubble"  # represents all schedules whose backward passes come in two halves
ROW_SLICES = experts.row_slices
_ATEN = torch.ops.aten
_PROPERTIES: Any = Tensor


class PlannedDevice(TorchFunctionMode):
    """Tensors of the meta device are on `device` for all Python code that asks. `rows`: of this
    rank's tokens that an expert has, in place of what routing counts.
    """

    def __init__(self, device: str, rows: float = 0.0, log: OperationLog | None = None):
        super().__init__()
        self.device, self.rows, self.log = torch.device(device), rows, log
        self.answers: dict[Any, Callable[..., Any]] = {
            _PROPERTIES.is_cuda.__get__: lambda _: self.device.type == "cuda",
            _PROPERTIES.device.__get__: lambda _: self.device,
            Tensor.tolist: self._counts,
            torch.nn.functional.scaled_dot_product_attention: self._fused_attention,
            torch._grouped_mm: self._grouped_gemm,
        }

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        answer = self.answers.get(function)
        if answer is not None:
            return answer(*args, **kwargs)
        if kwargs.get("device") == self.device:
            kwargs = {**kwargs, "device": META}
        if len(args) > 1 and isinstance(args[1], torch.device):  # x.to(device)
            args = (args[0], META, *args[2:])
        return function(*args, **kwargs)

    def _counts(self, counts: Tensor) -> list[int]:
        """Whole numbers whose mean is `rows`."""
        ends = [math.floor(index * self.rows + 1e-9) for index in range(counts.numel() + 1)]
        return [end - start for start, end in zip(ends, ends[1:])]

    def _fused_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        scale: float,
        enable_gqa: bool,
    ) -> Tensor:
        """By the kernel that torch takes on this device."""
        if mask is not None:  # turned into what is added to the scores
            mask = torch.empty_like(mask, dtype=q.dtype)
        if self.device.type == "cpu":
            cpu = _ATEN._scaled_dot_product_flash_attention_for_cpu
            return cpu(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)[0]
        if mask is None and q.element_size() == 2:
            return _ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)[
                0
            ]
        if mask is not None:
            mask = mask.expand(*q.shape[:2], *mask.shape[-2:])
        efficient = _ATEN._scaled_dot_product_efficient_attention
        return efficient(q, k, v, mask, True, 0.0, is_causal, scale=scale)[0]

    def _grouped_gemm(
        self, rows: Tensor, matrices: Tensor, offs: Tensor, bias: None, out_dtype: None
    ) -> Tensor:
        """[N, i] times [E, i, o] -> [N, o]. torch's own meta kernel takes bf16 only."""
        if self.log is not None:
            self.log.launches.append(1)
            self.log.grouped(rows, matrices.shape[2], matrices.shape[1], matrices.shape[0])
        return rows.new_empty((rows.shape[0], matrices.shape[-1]))


# in-place operators that change neither shape nor type
IN_PLACE = {
    *("add_", "addmm_", "baddbmm_", "copy_", "div_", "fill_", "index_add_", "index_put_"),
    *("masked_fill_", "mul_", "square_", "sub_", "zero_"),
}


@cache
def _written(function: Any) -> str | None:
    """The argument that an operator only writes into: `self`, or the name of its output. torch's
    meta kernels check shapes there, which takes longer than all else.
    """
    if function.namespace != "aten":
        return None
    outputs = [each.name for each in function._schema.arguments if each.is_out]
    if len(outputs) == 1:
        return outputs[0]
    return "self" if function.overloadpacket.__name__ in IN_PLACE else None


@cache
def _fake(function: Any) -> Any:
    """What allocates in place of one of our operators."""
    return FAKES.get(function.name()) if function.namespace == "megatron" else None


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages of meta tensors that were made while it is open and are alive, without
    those that were `given`. Operators that are called go to `log`.
    """

    def __init__(self, given: Iterable[Tensor] = (), log: OperationLog | None = None) -> None:
        super().__init__()
        self.log = log
        self.given = storages_of(given)
        self.now = 0
        self.changes: list[int] = []  # bytes of each storage made, or with a minus freed
        # By identity of torch's storage, which lives as long as the memory: its bytes, and the
        # shape of the tensor that it was made for.
        self.known: dict[int, tuple[Any, int, torch.Size]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here: torch need not import its compiler, which takes 2 s."""
        return False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if (fake := _fake(function)) is not None:
            super().__enter__()
            log, self.log = self.log, None
            try:
                out = fake(*args, **kwargs)
            finally:
                self.log = log
                super().__exit__(None, None, None)
        with torch._C.DisableTorchFunction():
            if (written := _written(function)) is not None:
                out = args[0] if written == "self" else kwargs[written]
            elif fake is None:
                out = meta_results.call(function, args, kwargs)
            if self.log is not None:
                self.log.operator(function, args, kwargs, out)
            for tensor in (out,) if isinstance(out, Tensor) else tree_leaves(out):
                if isinstance(tensor, Tensor):
                    self._see(tensor)
        return out

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.known or key in self.given or not tensor.is_meta:
            return
        size = storage.nbytes()
        self.known[key] = weakref.ref(storage, lambda _: self._forget(key)), size, tensor.shape
        self.add(size)

    def _forget(self, key: int) -> None:
        self.add(-self.known.pop(key)[1])

    def add(self, size: int) -> None:
        self.now += size
        self.changes.append(size)

    def of_matrix(self, rows: int, columns: int) -> int:
        """Bytes of tensors with this last dimension and number of elements."""
        return sum(
            size
            for _, size, shape in self.known.values()
            if shape.numel() == rows * columns and shape[-1:] == (columns,)
        )


class _Room:
    """Bytes that are counted as long as this object lives, which is until an exchange ends."""

    def __init__(self, live: LiveBytes, size: int, pending: PendingExchange | None):
        self.live, self.size, self.pending = live, size, pending
        live.add(size)

    def __del__(self) -> None:
        self.live.add(-self.size)
        if self.pending is not None:
            self.pending.end()


class MeasuredGroup(SilentGroup):
    """Counts what collectives take. `sent`: the number of changes before each all-to-all."""

    live: LiveBytes

    def __init__(self, gloo: bool):
        super().__init__(gloo)
        self.sent: list[int] = []

    def hold(self, what: str, axis: Axis, size: int, result: Tensor, extra: int) -> _Room:
        if what == "all-to-all":
            self.sent.append(len(self.live.changes))
        log = self.live.log
        return _Room(self.live, extra, log and log.exchange(what, axis.name, size))


class LayerRun:
    """One unit of a model on one rank, the only one of `stage`, and its passes: a backward pass is
    that of what the last forward pass kept.
    """

    def __init__(self, config: Config, vocab_size: int, device: str, stage: Stage):
        self.config = config
        self.log = OperationLog(
            hidden_shape(config), config.data.seq_length, compute_dtype(config.precision)
        )
        self.mode = PlannedDevice(device, _rows_of_expert(config), self.log)
        # the model is that of any number of samples, once these have chosen the kernels
        chosen, _ = choose_kernels(config, torch.device(device))
        of_one = chosen.with_fields("training", micro_batch_size=1)
        self.model, self.group = _on_meta(of_one, vocab_size, device, stage)
        ((_, self.layer),) = self.model.layers_by_stage[0]
        weights: list[Any] = [*self.model.parameters()]
        self.micro, _ = micro_batch_of(without_experts(config), device)
        given = [*weights, *(each.main_grad for each in weights), *tensors_of(self.micro)]
        self.live = LiveBytes(given, self.log)
        shares = config.training.distribute_saved_activations
        self.runner = OffloadingRunner(
            META,
            config.training.min_offloaded_tensor_size,
            self.model.tp.axis if shares else ALONE,
            [AUX_LOSS],
        )
        self.output: tuple[torch.Size, torch.dtype] = torch.Size(), self.model.dtype
        self.kept: list[Any] = []  # by the last pass

    def passes(self, choice: LayerRecompute) -> list[MeasuredPass]:
        """The forward pass; the backward pass, except of a layer that is recomputed in a group with
        others; and where backward passes come in two halves, both halves.
        """
        found = [self.forward(choice)]
        if choice.whole and not (choice.first and choice.last):
            return found
        found.append(self.backward(Kind.BACKWARD))
        if self.config.distributed.pipeline_schedule == SPLIT and self.layer.splits_backward:
            self.forward(choice)
            found += map(self.backward, (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT))
        return found

    @contextmanager
    def running(self) -> Iterator[None]:
        """While layers' code runs. Of a rank's experts, those with the same number of rows are run
        once.
        """
        self.group.live = self.live
        with patch.object(experts, "row_slices", self._unequal_experts), self.mode, self.live:
            yield

    def _unequal_experts(self, counts: experts.RowCounts) -> Iterator[tuple[int, slice]]:
        """In place of `experts.row_slices`: of experts with the same number of rows the first one,
        which is logged for all of them. Nothing stays alive from one expert to the next.
        """
        slices = [*ROW_SLICES(counts)]
        end = slices[-1][1].stop if slices else 0
        # on a CPU those near the end have fewer rows behind theirs, by which a GEMM may be larger
        most = experts.ROWS if self.mode.device.type == "cpu" else 0
        kinds = [(rows.stop - rows.start, min(end - rows.stop, most)) for _, rows in slices]
        for kind, times in Counter(kinds).items():
            with self.log.repeated(times):
                yield slices[kinds.index(kind)]

    def _input(self) -> Tensor | None:
        """[s, b, h]; the embedding has none."""
        if self.model.embedding is not None:
            return None
        return torch.empty(hidden_shape(self.config), dtype=self.model.dtype, device=META)

    def forward(self, choice: LayerRecompute) -> MeasuredPass:
        """A forward pass."""
        self._forget()
        with self.running():
            self.layer.choose_recompute(choice)
            self._begin()
            x = self._input()
            y, kept = LayerRunner.forward(self.runner, self.layer, x, self.micro, {})
            self.kept, self.output = [kept], (y.shape, y.dtype)
            del x, y, kept
        return self._measured(0)

    def backward(self, kind: Kind) -> MeasuredPass:
        """A backward pass, or one half of one."""
        with self.running():
            shape, dtype = self.output
            halved = kind is Kind.BACKWARD_WEIGHT
            dy = None if halved else torch.empty(shape, dtype=dtype, device=META)
            size = 0 if dy is None else dy.nbytes
            self._begin()
            dx, left = LayerRunner.backward(self.runner, kind, self.layer, dy, self.kept.pop(), 1.0)
            self.kept = [left]
            del dx, dy, left
        return self._measured(size)

    def leaving(
        self, choice: LayerRecompute, modules: frozenset[str]
    ) -> tuple[list[int], bool, bool]:
        """(bytes of the storages that go to the host where the inputs of `modules` do, whether the
        layer's input is one of them, whether nothing reads it).
        """
        self._forget()
        runner, layer = self.runner, self.layer
        layer.choose_recompute(choice)
        layer.offloaded = modules
        with self.running():
            x = self._input()
            assert x is not None
            own = x.untyped_storage()._cdata
            y, kept, parked = runner._forward_parking(layer, x, self.micro, {})
            runner.one = None
            del x, y
            is_unread = own not in self.live.known and not choice.whole
            going = runner._going(layer, self.micro, parked)
            leaves = any(each.tensor.untyped_storage()._cdata == own for each in going)
            return [each.size for each in going], leaves, is_unread

    def _forget(self) -> None:
        """What earlier passes have left: other runs have the same micro-batch."""
        self.kept = []
        self.micro.routings.clear()

    def _begin(self) -> None:
        self.begin = np.array([size for _, size, _ in self.live.known.values()], np.int64)
        self.live.changes, self.group.sent = [], []
        self.log.clear()

    def _measured(self, output: int) -> MeasuredPass:
        """The pass that has ended; `output`: bytes of the gradient of its output."""
        head, log = self.model.head, self.log
        return MeasuredPass(
            self.begin,
            np.array(self.live.changes, np.int64),
            tuple(self.group.sent),
            output,
            0
            if head is None
            else self.live.of_matrix(self.micro.labels.numel(), head.weight.shape[0]),
            tuple(log.products),
            tuple(log.cores),
            np.array(log.streams, np.int64),
            np.array(log.hidden, np.int64),
            tuple(log.exchanges),
            np.array([*log.launches, *[COLLECTIVE_LAUNCHES] * len(log.exchanges)], np.int64),
            tuple(log.calls),
        )


def _rows_of_expert(config: Config) -> float:
    """Rows of one rank's tokens that an expert has where all have as many."""
    if config.model.num_experts is None:
        return 0.0
    s, b, _ = hidden_shape(config)
    return s * b * config.model.moe_router_topk / config.model.num_experts


@lru_cache(maxsize=128)
def _on_meta(
    config: Config, vocab_size: int, device: str, stage: Stage
) -> tuple[GPTModel, MeasuredGroup]:
    """A stage of the first rank, with gradient buffers, and what replaces its groups."""
    group = MeasuredGroup(device != "cuda")
    distributed = config.distributed
    tp, cp = distributed.tensor_model_parallel_size, distributed.context_parallel_size
    etp, ep = expert_ranks(config)
    ranks = math.lcm(tp * cp, etp * ep)
    layout = Layout(tp=tp, cp=cp, dp=ranks // (tp * cp), ep=ep, etp=etp)
    heads, ring = attention_ranks(distributed)
    groups = build_groups(
        layout,
        0,
        lambda ranks, group_desc: group,
        config.model.num_query_groups,
        cp_heads=heads,
        cp_ring=ring,
        experts=config.model.num_experts is not None,
        own_only=True,
    )
    model = build_stages(config, vocab_size, groups, torch.device(device), (stage,))
    narrow = config.optimizer.main_grads_dtype == "bf16"
    wide = torch.promote_types(model.dtype, torch.float32)
    for module in model.modules():
        for name, declared in module._parameters.items():
            if declared is None:
                continue
            weight: Any = nn.Parameter(
                torch.empty(declared.shape, dtype=model.dtype, device=META), declared.requires_grad
            )
            vars(weight).update(vars(declared))
            weight.main_grad = torch.empty(
                declared.shape, dtype=torch.bfloat16 if narrow else wide, device=META
            )
            module._parameters[name] = weight
    return model, group


@lru_cache(maxsize=4096)
def without_experts(config: Config) -> Config:
    """That of units without experts, which those of other layers do not concern."""
    if config.model.num_experts is None:
        return config
    config = config.with_fields("model", num_experts=None)
    return config.with_fields(
        "distributed", expert_model_parallel_size=1, expert_tensor_parallel_size=None
    )


@lru_cache(maxsize=64)
def micro_batch_of(config: Config, device: str) -> tuple[MicroBatch, int]:
    """What layers read of a micro-batch, and its bytes; `config` is that of units without experts,
    which the others share.
    """
    model, group = _on_meta(config, 1, device, Stage(False, range(0), False))
    live = group.live = LiveBytes()
    with PlannedDevice(device), live:
        micro = _micro_batch(model, config)
    return micro, live.now


def forget_models() -> None:
    """Build all models anew."""
    _on_meta.cache_clear()
    micro_batch_of.cache_clear()


def _micro_batch(model: GPTModel, config: Config) -> MicroBatch:
    """As the loader's tensors become it."""
    data, cp = config.data, config.distributed.context_parallel_size
    samples, length = config.training.micro_batch_size, data.seq_length

    def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    own = samples, length // cp
    return model.micro_batch(
        numbers(*own),
        numbers(*own),
        numbers(*own, dtype=torch.float32),
        numbers(*own),
        numbers(samples),
        numbers(samples, length) if data.reset_attention_mask else None,
        numbers(cp, length // cp) if cp > 1 else None,
        training=True,
    )
