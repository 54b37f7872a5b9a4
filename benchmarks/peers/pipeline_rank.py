r"""What one pipeline rank measures for benchmarks/pipeline.py: live memory, time with sleeps
for compute, overhead, speed against torch.

    torchrun --nproc-per-node 4 pipeline_rank.py \
        '[{"what": "memory", "names": ["1f1b"], "micro_batches": [4]}, ...]'

Rank 0 prints, as JSON on one line, a list by rank of what each found, one answer for each
measurement. Clocks are those of one host.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import weakref
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.benchmarks.training import busy_seconds  # noqa: E402

from megatron.config.groups import ModelConfig  # noqa: E402
from megatron.config.schedules import SCHEDULES  # noqa: E402
from megatron.distributed.collectives import (  # noqa: E402
    all_reduce,
    gather_objects,
    start_receive,
    start_send,
)
from megatron.distributed.groups import Groups, Layout  # noqa: E402
from megatron.distributed.setup import (
    connect,
    disconnect,
    keep_freed_memory,
    make_groups,
    read_launch,
)  # noqa: E402
from megatron.model.gpt import GPTModel  # noqa: E402
from megatron.model.init import fill_initial  # noqa: E402
from megatron.model.layer import Layer, MicroBatch  # noqa: E402
from megatron.model.stages import Stage  # noqa: E402
from megatron.parallel.blocks import build_blocks  # noqa: E402
from megatron.parallel.layer_runner import LayerRunner  # noqa: E402
from megatron.parallel.messages import StageMessages  # noqa: E402
from megatron.parallel.pipeline import (  # noqa: E402
    LayerPass,
    Pipeline,
    StepState,
    StepSums,
    Task,
)
from megatron.parallel.schedule import (
    Action,
    Kind,
    Message,
    Schedule,
    acknowledgements,
    build_schedule,
    forward_only,
    message_made,
    message_needed,
)  # noqa: E402
from megatron.parallel.timeline import Recording  # noqa: E402
from megatron.parallel.zero_plan import ZeroPlan  # noqa: E402

CPU = torch.device("cpu")
VIRTUAL = {"interleaved": 2, "zero-bubble-v": 2}
TINY = {"layers": 8, "hidden": 32, "heads": 4, "ffn": 48, "seq": 16, "batch": 2, "vocab": 64}


class KeptWeights:
    """Weights and gradients that are always there."""

    reducing = None
    planner = SimpleNamespace(
        plan=lambda turns: ZeroPlan([], [([], []) for turn in turns for _ in turn])
    )


class Job:
    """A Llama-style GPT's stages on this rank, and micro-batches of random tokens. `shape`: the
    model's sizes, as TINY has them.
    """

    def __init__(
        self,
        name: str,
        groups: Groups,
        shape: dict[str, int],
        passes: LayerRunner | None = None,
        dtype: torch.dtype = torch.float32,
    ):
        virtual = VIRTUAL.get(name, 1)
        self.name, self.groups, self.shape, self.virtual = name, groups, shape, virtual
        self.placement = SCHEDULES[name].place(groups.pp.size, virtual)
        count, layers = len(self.placement), shape["layers"]
        ends = [layers * stage // count for stage in range(count + 1)]
        stages = [Stage(k == 0, range(ends[k], ends[k + 1]), k == count - 1) for k in range(count)]
        config = ModelConfig(
            num_layers=layers,
            hidden_size=shape["hidden"],
            ffn_hidden_size=shape["ffn"],
            num_attention_heads=shape["heads"],
            kv_channels=shape["hidden"] // shape["heads"],
            num_query_groups=shape["heads"],
            max_position_embeddings=shape["seq"],
            activation="swiglu",
            untie_embeddings_and_output_weights=True,
            position_embedding_type="rope",
            normalization="RMSNorm",
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )
        self.model = GPTModel(
            config,
            vocab_size=shape["vocab"],
            padded_vocab=shape["vocab"],
            dtype=dtype,
            seed=5,
            stages=tuple(
                stage for stage, rank in zip(stages, self.placement) if rank == groups.pp.rank
            ),
        )
        self.blocks = build_blocks(self.model, CPU)
        for block in self.blocks:
            for entry in block.entries:
                for box in entry.boxes:
                    fill_initial(box, entry.view(block.weight), 5)
            block.open()
        size = shape["seq"], shape["batch"], shape["hidden"]
        self.pipeline = Pipeline(
            self.model, KeptWeights(), passes or LayerRunner(), self.placement, size, groups, CPU
        )

    def tokens(self, index: int) -> Tensor:
        """[b, s + 1]."""
        generator = torch.Generator().manual_seed(index)
        return torch.randint(
            0,
            self.shape["vocab"],
            (self.shape["batch"], self.shape["seq"] + 1),
            generator=generator,
        )

    def micro_batch(self, ids: Tensor) -> MicroBatch:
        b, s = ids.shape[0], ids.shape[1] - 1
        return self.model.micro_batch(
            ids[:, :-1],
            ids[:, 1:],
            torch.ones(b, s),
            torch.arange(s).expand(b, s),
            torch.arange(b),
            training=True,
        )

    def halves(self, stage: int, moment: Callable[[], Any]) -> list[Any]:
        """A stage's forward pass, input gradient and weight gradient for one micro-batch: what
        `moment` gave before them and after each.
        """
        last = stage + 1 == len(self.placement)
        found = [moment()]
        micro = self.micro_batch(self.tokens(0))  # alive until the end, as in a step
        messages = self.pipeline.messages
        step = StepState(messages, 1.0, 1.0)
        step.micro_batches[0] = micro
        if stage > 0:
            messages.inbox[Message(Kind.FORWARD, stage, 0)] = torch.zeros(
                self.pipeline.messages.shape
            )
        self._compute(step, Action(Kind.FORWARD, stage, 0))
        if not last:
            y = _made(messages, Message(Kind.FORWARD, stage + 1, 0))
            messages.inbox[Message(Kind.BACKWARD, stage, 0)] = torch.ones_like(y)
            del y
        found.append(moment())
        self._compute(step, Action(Kind.BACKWARD_INPUT, stage, 0))
        if stage > 0:
            _made(messages, Message(Kind.BACKWARD, stage - 1, 0))
        found.append(moment())  # the remaining references may hold dy
        self._compute(step, Action(Kind.BACKWARD_WEIGHT, stage, 0))
        return [*found, moment()]

    def _compute(self, step: StepState, action: Action) -> None:
        """One computation, outside of a schedule."""
        passes = tuple(
            LayerPass(layer, kind, action.micro, "", (), ())
            for layer, kind in self.pipeline.passes[action.kind, action.stage]
        )
        run = self.pipeline.forward if action.kind is Kind.FORWARD else self.pipeline.backward
        run(step, Task((action,), "", passes, [], [], []))

    def step(self, schedule: Schedule, scale: float = 1.0) -> StepSums:
        """One run of a schedule."""
        count = range(schedule.micro_batches)
        micro_batches = (self.micro_batch(self.tokens(index)) for index in count)
        return self.pipeline.run(schedule, micro_batches, scale)


def _made(messages: StageMessages, message: Message) -> Tensor:
    """The result of a computation, taken away from the next stage."""
    return (messages.inbox if message in messages.inbox else messages.outbox).pop(message)


class LiveBytes(TorchDispatchMode):
    """While open, counts the bytes of all tensors that operations make, from then until their
    memory is freed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: weakref.WeakSet = weakref.WeakSet()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if (
                isinstance(tensor, Tensor)
                and (storage := tensor.untyped_storage()) not in self.seen
            ):
                self.seen.add(storage)
                size = storage.nbytes()
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._freed, size)
        return out

    def _freed(self, size: int) -> None:
        self.now -= size


class Watched:
    """A pipeline's computations, with a look at the live bytes after each."""

    def __init__(self, pipeline: Pipeline, live: LiveBytes):
        self.live, self.peak = live, 0
        pipeline.forward = self.watched(pipeline.forward)
        pipeline.backward = self.watched(pipeline.backward)

    def watched(self, compute: Callable[..., None]) -> Callable[..., None]:
        def call(*computation: Any) -> None:
            compute(*computation)
            self.peak = max(self.peak, self.live.now)

        return call


def memory(
    groups: Groups, names: list[str], micro_batches: list[int], shape: dict[str, int] = TINY
) -> list[dict[str, Any]]:
    """For each schedule and number of micro-batches the bytes alive on this rank beyond those
    between two steps: `held` at the ends of computations, `bound` by the schedule for that, `peak`
    within computations; `evaluation` is `held` of forward passes alone.
    """
    rows = []
    for name in names:
        with LiveBytes() as live:
            job = Job(name, groups, shape)
            held, deferred, message = _costs(job, live)
            for count in micro_batches:
                schedule = build_schedule(name, groups.pp.size, job.virtual, count)
                row = {
                    "schedule": name,
                    "micro_batches": count,
                    "bound": _bound(schedule, groups.pp.rank, held, deferred, message),
                }
                watched = Watched(job.pipeline, live)
                base = live.peak = live.now
                job.step(schedule)
                row |= {
                    "held": watched.peak - base,
                    "peak": live.peak - base,
                    "left": live.now - base,
                }
                watched.peak, base = 0, live.now
                with torch.no_grad():
                    job.step(forward_only(job.placement, count))
                rows.append(row | {"evaluation": watched.peak - base, "message": message})
    return rows


def _costs(job: Job, live: LiveBytes) -> tuple[list[int], list[int], int]:
    """Bytes that each own stage holds of one micro-batch from forward to backward, and from input
    gradient to weight gradient; bytes of a message.
    """
    held, deferred = [], []
    shape = job.pipeline.messages.shape
    message = job.model.dtype.itemsize * shape[0] * shape[1] * shape[2]
    for stage in job.pipeline.layers:
        base, forward, left, _ = job.halves(stage, lambda: live.now)
        # of a loss: two numbers
        dy = 2 * job.model.dtype.itemsize if stage + 1 == len(job.placement) else message
        held.append(forward - base - dy)
        deferred.append(left - base)  # of which dy may be a part
    return held, deferred, message


def _bound(
    schedule: Schedule, rank: int, held: list[int], deferred: list[int], message: int
) -> int:
    """The most bytes that the list of a rank can hold at the end of a computation: what its
    micro-batches hold; messages, from the posted receive to the computation, and from the
    computation until a receipt proves the arrival; input and output of the computation itself; the
    losses.
    """
    own = [stage for stage, where in enumerate(schedule.placement) if where == rank]
    proven, now, most, travelling = acknowledgements(schedule, rank), 0, 0, 0
    known: dict[int, int] = {}
    sent: dict[int, int] = {}
    # without pairs a task is one action
    for action, posted in zip(schedule.actions[rank], schedule.receives[rank], strict=True):
        kind, stage, _ = action
        travelling += len(posted)
        chunk, need, made = (
            own.index(stage),
            message_needed(action, schedule.placement),
            message_made(action, schedule.placement),
        )
        if need is not None:
            travelling -= 1
            peer, count = proven[need]
            known[peer] = max(known.get(peer, 0), count)
        now += {
            Kind.FORWARD: held[chunk],
            Kind.BACKWARD: -held[chunk],
            Kind.BACKWARD_INPUT: deferred[chunk] - held[chunk],
            Kind.BACKWARD_WEIGHT: -deferred[chunk],
        }[kind]
        unproven = sum(count - known.get(peer, 0) for peer, count in sent.items())
        most = max(most, now + (travelling + unproven + 2) * message)
        if made is not None:
            peer = schedule.placement[made.stage]
            sent[peer] = sent.get(peer, 0) + 1
    return most + 16 * schedule.micro_batches


class Sleeper(Layer):
    """All of a stage."""

    splits_backward = True

    def __init__(self, stage: int):
        super().__init__()
        self.stage = stage


class SleepingPasses:
    """Passes that only sleep. `costs`: seconds by kind, then by stage."""

    def __init__(self, costs: dict[str, list[float]], shape: tuple[int, int, int]):
        self.costs, self.out = costs, torch.zeros(shape)

    def forward(
        self, layer: Sleeper, x: Tensor | None, micro: Any, scalars: Any
    ) -> tuple[Tensor, None]:
        return self._sleep("F", layer)

    def backward(
        self, kind: Kind, layer: Sleeper, dy: Tensor | None, saved: Any, aux_scale: float
    ) -> tuple[Tensor, None]:
        parts = {
            Kind.BACKWARD: "IW",
            Kind.BACKWARD_INPUT: "I",
            Kind.BACKWARD_WEIGHT: "W",
        }
        return self._sleep(parts[kind], layer)

    def _sleep(self, parts: str, layer: Sleeper) -> tuple[Tensor, None]:
        for part in parts:
            if seconds := self.costs[part][layer.stage]:
                time.sleep(seconds)
        return self.out, None


def sleeps(
    groups: Groups,
    name: str,
    micro_batches: int,
    costs: dict[str, list[float]],
    shape: tuple[int, int, int],
    tries: int,
) -> list[dict[str, Any]]:
    """`tries` steps of a schedule with sleeps: the spans of this rank's computations on the host's
    clock, and the CPU seconds of its thread.
    """
    schedule = build_schedule(name, groups.pp.size, VIRTUAL.get(name, 1), micro_batches)
    own = [stage for stage, rank in enumerate(schedule.placement) if rank == groups.pp.rank]
    model = SimpleNamespace(
        layers_by_stage=[[("sleeper", Sleeper(stage))] for stage in own],
        scalars=(),
        dtype=torch.float32,
    )
    pipeline = Pipeline(
        model, KeptWeights(), SleepingPasses(costs, shape), schedule.placement, shape, groups, CPU
    )
    found = []
    for _ in range(tries + 1):
        all_reduce(torch.zeros(1), groups.pp)
        recording = Recording(CPU)
        cpu, begin = time.thread_time(), time.perf_counter()
        pipeline.run(schedule, repeat(None), 1.0, recording)
        cpu, wall = time.thread_time() - cpu, time.perf_counter() - begin
        spans = [
            [
                span.kind.value,
                span.stage,
                span.micro,
                span.begin + recording.start,
                span.end + recording.start,
            ]
            for span in recording.spans()
        ]
        found.append(
            {
                "spans": spans,
                "cpu": cpu,
                "wall": wall,
                "actions": _with_messages(schedule, groups.pp.rank),
            }
        )
    return found[1:]  # the first one makes the connections


def _with_messages(schedule: Schedule, rank: int) -> int:
    """Computations, sends and receives of a rank."""
    own = schedule.actions[rank]
    made = [message_made(action, schedule.placement) for action in own]
    return len(own) + sum(map(len, schedule.receives[rank])) + len(made) - made.count(None)


def latency(groups: Groups, shape: tuple[int, int, int], rounds: int = 50) -> float:
    """Seconds from a send to its arrival at a neighbour that waits: half a round trip between ranks
    0 and 1, which the others sit out.
    """
    rank, times = groups.pp.rank, []
    x = torch.zeros(shape)
    if rank < 2:
        there, back = groups.channel(rank, 1 - rank), groups.channel(1 - rank, rank)
        for tag in range(rounds):
            coming = start_receive(shape, x.dtype, CPU, 1 - rank, back, tag)
            begin = time.perf_counter()
            if rank == 0:
                sending = start_send(x, 1, there, tag)
            coming.wait()
            if rank == 1:
                sending = start_send(x, 0, there, tag)
            times.append(time.perf_counter() - begin)
            sending.wait()
    all_reduce(torch.zeros(1), groups.pp)
    return statistics.median(times) / 2 if rank == 0 else 0.0


def calibrate(
    groups: Groups, name: str, shape: dict[str, int], repeats: int = 5
) -> dict[str, list[float]]:
    """Seconds that computations of the real stages take on this rank, the median of `repeats`: by
    kind, then by own stage. Ranks take turns.
    """
    costs: dict[str, list[float]] = {"F": [], "I": [], "W": []}
    job = Job(name, groups, shape)
    for turn in range(groups.pp.size):
        all_reduce(torch.zeros(1), groups.pp)
        if turn != groups.pp.rank:
            continue
        for stage in job.pipeline.layers:
            times: list[list[float]] = []
            for _ in range(repeats + 1):
                stamps = job.halves(stage, time.perf_counter)
                times.append([after - before for before, after in zip(stamps, stamps[1:])])
            for kind, values in zip(costs, zip(*times[1:])):
                costs[kind].append(statistics.median(values))
    all_reduce(torch.zeros(1), groups.pp)
    return costs


def against_torch(
    groups: Groups, name: str, micro_batches: int, shape: dict[str, int], steps: int, pairs: int
) -> dict[str, Any]:
    """Steps of forward and backward passes by our executor and by torch's, on the same stages and
    micro-batches, turn and turn about.
    """
    from megatron.benchmarks.peers.torch_pipelining import TorchPipeline

    job = Job(name, groups, shape)
    schedule = build_schedule(name, groups.pp.size, job.virtual, micro_batches)
    theirs = TorchPipeline(job, micro_batches)
    batch = torch.cat([job.tokens(index) for index in range(micro_batches)])
    parts = batch.chunk(micro_batches)

    def ours() -> float:
        sums = job.pipeline.run(schedule, map(job.micro_batch, parts), 1.0).losses
        return float(sum(each[0] for each in sums.values())) if sums else 0.0

    sides: dict[str, Callable[[], float]] = {"ours": ours, "torch": lambda: theirs.step(batch)}
    answer: dict[str, Any] = {"rounds": []}
    for side, step in sides.items():
        step()  # torch runs its stages once more in the first step, to learn the shapes
        for block in job.blocks:
            block.drop()
            block.open()
        loss = step()
        squares = sum(block.grad.double().square().sum() for block in job.blocks)
        answer[side] = {"loss": loss, "gradient": float(squares) ** 0.5}
    # the same fp32 products; a loss is a sum of a few thousand terms
    for value, other in zip(answer["ours"].values(), answer["torch"].values()):
        assert abs(value - other) <= 1e-5 * abs(value), (
            f"{name}: ours {answer['ours']}, torch's {answer['torch']}"
        )
    for index in range(pairs):
        row = {}
        for side in list(sides)[:: 1 if index % 2 else -1]:
            row[side] = _timed(sides[side], steps, groups)
        answer["rounds"].append(row)
    return answer


def _timed(step: Callable[[], float], steps: int, groups: Groups) -> dict[str, float]:
    """Of a step: elapsed seconds, those of this process, and those in which the machine's cores are
    busy. All ranks begin and end together.
    """

    def clocks() -> tuple[float, float, float]:
        all_reduce(torch.zeros(1), groups.pp)
        return time.perf_counter(), time.process_time(), busy_seconds()

    before = clocks()
    for _ in range(steps):
        step()
    spent = [(after - start) / steps for start, after in zip(before, clocks())]
    return dict(zip(("seconds", "cpu", "busy"), spent))


MEASUREMENTS = {
    function.__name__: function for function in (memory, sleeps, latency, calibrate, against_torch)
}


def main() -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    launch = read_launch()
    connect(launch, "gloo", 5, {})
    groups = make_groups(Layout(pp=launch.world_size))
    measured = [MEASUREMENTS[call.pop("what")](groups, **call) for call in json.loads(sys.argv[1])]
    answers = gather_objects(measured, groups.world)
    if launch.rank == 0:
        print("\nRESULT " + json.dumps(answers), flush=True)
    disconnect()


if __name__ == "__main__":
    main()
