"""What one rank does in a parity case: a whole real run through pretrain.py, with everything that
the comparison needs kept on the way.

Runs in a process of a Gloo world, or (for the one-process reference) in any process without
torch.distributed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from megatron.tools._advisor import PlanningAdvisor
from mutation import Mutant
from own_run import exit_code, replaced
from torch import Tensor, nn
from unit.parallel.recorded import RecordedGraph

from megatron.config.arguments import parse_arguments
from megatron.data.loader import Batch, Source
from megatron.model import compile
from megatron.model import loss as loss_module
from megatron.model.layer import TransformerLayer, WithScalars
from megatron.model.linear import WeightGrad, add_weight_grads
from megatron.model.mlp import MLP
from megatron.observe.metrics import is_measured
from megatron.observe.tracking import Tracker
from megatron.optimizer import nvme
from megatron.parallel.blocks import Block
from megatron.parallel.graphs import GraphedRunner
from megatron.training import banner, loop, pretrain, step


@dataclass(frozen=True)
class Piece:
    """One box of a logical tensor as one rank holds it. `owner`: this rank is the one that counts
    it and writes it to a checkpoint.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: Tensor  # of the box's extent
    owner: bool


@dataclass(frozen=True)
class Step:
    """What every rank knows of one optimizer step."""

    loss: float
    grad_norm: float
    skipped: bool
    loss_scale: float
    batch_size: int


@dataclass(frozen=True)
class Outcome:
    """One rank's part of a run."""

    steps: list[Step]
    evaluations: list[float]
    gradients: list[Piece]  # of step 1, of the mean loss over valid tokens, clipped
    weights: list[Piece]  # at the end
    # what is tracked, on rank 0, without what depends on the machine
    metrics: list[dict[str, float]]


def run_case(
    flags: tuple[str, ...],
    patches: tuple[str, ...] = (),
    device: str = "cpu",
    mutant: Mutant | None = None,
    *,
    planned: bool = False,
) -> Outcome:
    """The run of `pretrain_gpt.py flags...` on this rank, under the named PATCHES and with the
    mistake of a mutant. On `cuda` all ranks share the GPUs that there are. `planned`: with the
    banner's plan, which takes longer than the run.
    """
    kept: list[loop.Run] = []
    pendings, evaluations, gradients, metrics = [], [], [], []

    def train(run: loop.Run):
        kept.append(run)
        return loop_train(run)

    def update(*args, **kwargs):
        pendings.append(real_update(*args, **kwargs))
        if len(pendings) == 1:
            if kept[0].optimizer.waiting:
                kept[0].zero.wait_for_weights()
            gradients.extend(first_gradients(kept[0]))
        return pendings[-1]

    def evaluate(*args, **kwargs):
        evaluations.append(real_evaluate(*args, **kwargs))
        return evaluations[-1]

    def track(tracker: Tracker, iteration: int, row: dict[str, float]):
        metrics.append({name: value for name, value in row.items() if not is_measured(name)})
        return real_track(tracker, iteration, row)

    real_track = Tracker.log
    loop_train, real_update, real_evaluate = loop.train, step.update, loop.evaluate
    changes: list[tuple[Any, str, Any]] = [
        (pretrain, "train", train),
        (banner, "git_state", lambda root: None),
        (step, "update", update),
        (loop, "evaluate", evaluate),
        (Tracker, "log", track),
    ]
    if device == "cpu" and torch.cuda.is_available():
        cpu = torch.device("cpu"), "gloo"
        changes.append((pretrain, "choose_device", lambda launch, config: cpu))
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(*changes))
        for name in patches:
            stack.enter_context(PATCHES[name]())
        if mutant is not None:
            stack.enter_context(mutant.put_in())
        parsed = parse_arguments(list(flags)).config
        planned = planned or parsed.training.memory_budget is not None
        advisor = PlanningAdvisor() if planned else pretrain.NO_ADVISOR
        code = exit_code(flags, advisor=advisor)
    assert code == 0, f"the run ended with exit code {code}"
    (run,) = kept
    assert run.device.type == device
    published_weights_are_the_masters(run)
    steps = [
        Step(each.loss, each.grad_norm, each.skipped, each.batch.loss_scale, each.batch.size)
        for each in (pending.read() for pending in pendings)
    ]
    return Outcome(
        steps, evaluations, gradients, pieces(run, run.optimizer.weight_boxes()), metrics
    )


def first_gradients(run: loop.Run) -> list[Piece]:
    """The gradients of step 1, from what they left in the first optimizer state that they were
    added to.
    """
    config = run.config.optimizer
    state, share = (
        ("exp_avg", 1 - config.adam_beta1)
        if config.optimizer == "adam"
        else ("momentum_buffer", 1.0)
    )
    prefix = f"optimizer.{state}."
    return [
        replace(piece, name=piece.name.removeprefix(prefix), values=piece.values / share)
        for piece in pieces(run, run.optimizer.state_boxes())
        if piece.name.startswith(prefix)
    ]


def pieces(run: loop.Run, boxes) -> list[Piece]:
    """Copies of a rank's boxes on the CPU."""
    found = []
    for box, buffer in boxes:
        values = box.view(buffer.detach()).reshape(box.extent).cpu().clone()
        found.append(
            Piece(box.name, tuple(box.shape), tuple(box.offset), values, run.optimizer.owns(box))
        )
    return found


def published_weights_are_the_masters(run: loop.Run) -> None:
    """What the model computes with is the masters, rounded."""
    for block in run.optimizer.blocks:
        for piece, held in (
            run.optimizer.pieces(block, ("master",), "read") if block.zero_stage < 3 else ()
        ):
            assert torch.equal(
                block.weight[block.own_slice][piece], held["master"].to(block.weight)
            ), f"{block.name}: not the rounded masters"


# ---------------------------------------------------------------- patches: what flags alone cannot
# bring about


@contextlib.contextmanager
def uneven() -> Iterator[None]:
    """Few valid tokens in some samples, none in others, by the sample's number."""
    original = Source.batch

    def batch(self: Source, first: int, count: int) -> Batch:
        out = original(self, first, count)
        length = out.loss_mask.shape[1]
        valid = (out.sample_ids * 5 + 3) % (length + 1)
        out.loss_mask[torch.arange(length) >= valid[:, None]] = 0
        return out

    with mock.patch.object(Source, "batch", batch):
        yield


class _Explode(torch.autograd.Function):
    """The identity; its backward pass adds infinities to the first row of a weight's gradient: at
    once, or where a split backward pass adds it.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: nn.Parameter) -> Tensor:
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy: Tensor):
        weight = ctx.weight
        left = WeightGrad(
            weight, dy.new_zeros(1, 1, weight.shape[0]), dy.new_ones(1, 1, weight.shape[1])
        )
        left.dy[..., 0] = float("inf")
        if hasattr(weight, "deferred_grads"):
            weight.deferred_grads.append(left)
        else:
            add_weight_grads([left])
        return dy, None


OVERFLOWING_SAMPLES = (13, 24, 25, 26, 33, 62, 63, 64)  # of training; of a run of 8 samples a step


@contextlib.contextmanager
def overflow() -> Iterator[None]:
    """Gradients overflow in some samples: each in the layer of its number, counted round, on the
    last tensor-parallel rank alone.
    """
    original, numbers = TransformerLayer.forward, {}

    def forward(self: TransformerLayer, x: Tensor, micro) -> Tensor:
        y, *sums = original(self, x, micro), None
        if isinstance(y, WithScalars):
            y, *sums = y
        if micro.training and self in numbers:
            number, layers = numbers[self]
            if any(
                sample % layers == number
                for sample in micro.dropout.sample_ids.tolist()
                if sample in OVERFLOWING_SAMPLES
            ):
                dense = isinstance(self.mlp, MLP)
                y = _Explode.apply(y, self.mlp.fc1.weight if dense else self.mlp.experts.fc1)
        return WithScalars(y, *sums) if sums[0] else y

    train = pretrain.train

    def remember(run: loop.Run):
        if run.groups.tp.rank == run.groups.tp.size - 1:
            numbers.update(
                {
                    layer: (int(number), run.config.model.num_layers)
                    for number, layer in run.model.layers.items()
                }
            )
        return train(run)

    with (
        mock.patch.object(TransformerLayer, "forward", forward),
        mock.patch.object(pretrain, "train", remember),
    ):
        yield


def few_tokens() -> contextlib.AbstractContextManager:
    """The logits of five to ten tokens at once, where they are made in chunks."""
    return mock.patch.dict(loss_module.HEAD_CHUNK_BYTES, cpu=2000)


@contextlib.contextmanager
def unwritten() -> Iterator[None]:
    """Memory that nothing has written yet holds NaN: torch's own, and weights that are gathered."""
    original, fills = Block.allocate, torch.utils.deterministic.fill_uninitialized_memory

    def allocate(self: Block) -> None:
        original(self)
        self.untracked.fill_(float("nan"))

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        with mock.patch.object(Block, "allocate", allocate):
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills


def small_parts() -> contextlib.AbstractContextManager:
    """Files of optimizer state of many parts, which begin and end within tensors."""
    return mock.patch.object(nvme, "PART", 1024)


def traced() -> contextlib.AbstractContextManager:
    """torch.compile traces, differentiates and divides graphs, and leaves out the generation of
    code, which takes most of its time.
    """
    return mock.patch.object(compile, "BACKEND", "aot_eager_decomp_partition")


def recorded() -> contextlib.AbstractContextManager:
    """--cuda-graphs on a CPU."""
    made = functools.partial(GraphedRunner, graph=RecordedGraph)
    return mock.patch.object(pretrain, "GraphedRunner", made)


PATCHES: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    patch.__name__: patch
    for patch in (uneven, overflow, few_tokens, unwritten, small_parts, traced, recorded)
}


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """torch with one thread, as ranks have: sums over two have other bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@functools.cache
def reference(
    flags: tuple[str, ...], patches: tuple[str, ...] = (), device: str = "cpu"
) -> Outcome:
    """The same run in this process alone, once a session."""
    with one_thread():
        return run_case(flags, patches, device)
