"""One rank's step, replayed in bytes: what lives beside its resident state at every moment, and the moment at which that is most.

The maxima of activations, gradient slots and gathered weights do not fall together: at the start of a backward pass, where activations are most, no
gradient exists. So the actions of the schedule are gone through unit by unit, as the executor and optimizer/zero.py do.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron.config.workspace import ROUND_BYTES
from megatron.parallel.schedule import COMPUTATIONS, Action, Kind, Message, makes, needs
from megatron.plan.activations import UnitBytes
from megatron.plan.state import Sizes

TRANSIENT = ("gradients", "slots", "gathered", "scratch", "activations", "logits", "temporaries")


@dataclass(frozen=True)
class Sharing:
    """How the ranks that hold the same blocks share them: the stage of ZeRO and what goes with it; sizes in bytes an element."""

    stage: int
    shard: int  # ranks that share a block
    copies: int  # ranks that hold the same slice
    gradient: int
    compute: int
    wire: int
    keep_gathered: bool = False
    overlap_reduce: bool = True
    overlap_gather: bool = True
    device: str = "cuda"

    def received(self, elements: int, layer: int) -> int:
        """Bytes beside a block's gradient while it is reduced: on Gloo rounds of what the others send, no more of them than half the largest `layer`
        takes; on GPUs what another precision on the wire takes."""
        ranks = self.shard if self.stage else self.shard * self.copies
        if ranks == 1:
            return 0
        narrow, wide = self.wire != self.gradient, max(self.wire, 4)
        if self.device == "cuda":
            return elements * self.wire * (ranks + 1) // ranks if narrow else 0
        each = self.wire * (ranks - 1) + (self.wire * ranks if narrow else 0) + (wide if self.wire != wide else 0)
        room = max(ROUND_BYTES, layer * self.wire // 2)
        held = each - (self.wire if narrow else 0) - (wide if self.wire != wide else 0)  # casts of the own part and the sum come as each round ends
        return min(elements // ranks * held, room * held // each)


@dataclass(frozen=True)
class RankUnits:
    """What a rank runs: the bytes of each unit by stage, the block that each unit's number belongs to, and what travels."""

    units: Mapping[int, Sequence[tuple[int, UnitBytes]]]  # stage -> (number of the unit, its bytes) in the order of the forward pass
    blocks: Mapping[int, Sizes]  # number of the unit -> its block; a tied head on the embedding's rank shares one
    placement: Sequence[int]
    hidden: int  # bytes of what travels between stages
    receipts: Mapping[Message, tuple[int, int]] = field(default_factory=dict)  # of this rank: parallel/schedule.py
    inputs: int = 0  # bytes of a micro-batch
    losses: int = 0  # bytes that the loss keeps of one


@dataclass(frozen=True)
class Peak:
    """The bytes alive at the worst moment by kind, when that is, and the most of each kind at any moment."""

    bytes: dict[str, int]
    when: str
    most: dict[str, int]


class _Live:
    """What is alive now, and the most that was."""

    def __init__(self) -> None:
        self.now, self.most = Counter(dict.fromkeys(TRANSIENT, 0)), Counter(dict.fromkeys(TRANSIENT, 0))
        self.peak: tuple[int, dict[str, int], str] = (-1, {}, "")

    def look(self, when: str, temporaries: int = 0, scratch: int = 0) -> None:
        """A moment at which so much more lives than what is kept."""
        now, most = self.now, self.most
        now["temporaries"] += temporaries
        now["scratch"] += scratch
        for name in TRANSIENT:
            if now[name] > most[name]:
                most[name] = now[name]
        total = sum(now.values())
        if total > self.peak[0]:
            self.peak = total, dict(now), when
        now["temporaries"] -= temporaries
        now["scratch"] -= scratch


class _Weights:
    """Stage 3: which blocks are gathered. Two at most, the one that is read and the next; or with --zero3-keep-gathered each until its last use."""

    def __init__(self, live: _Live, sharing: Sharing, needs: Sequence[Sizes]):
        self.live, self.sharing, self.needs = live, sharing, deque(needs)
        self.left, self.held = Counter(needs), set()

    @contextlib.contextmanager
    def open(self, block: Sizes, kind: Kind, unit: int) -> Iterator[None]:
        """While a pass runs that may read a unit's weights."""
        if self.sharing.stage < 3 or not _reads_weight(kind, unit):
            yield
            return
        assert self.needs.popleft() == block
        self.left[block] -= 1
        coming = self._next_to(block)
        self._gather(block)
        if coming is not None and self.sharing.overlap_gather:
            self._gather(coming)
        yield
        first = self.needs[0] if self.needs else None
        soon = block == first or first is not None and block == self._next_to(first)
        if not (self.left[block] > 0 if self.sharing.keep_gathered else soon):
            self.held.remove(block)
            self.live.now["gathered"] -= block.elements * self.sharing.compute

    def _next_to(self, block: Sizes) -> Sizes | None:
        other = next((other for other in self.needs if other != block), None)
        return other if other is not None and (block.is_layer or other.is_layer) else None

    def _gather(self, block: Sizes) -> None:
        if block not in self.held:
            self.held.add(block)
            self.live.now["gathered"] += block.elements * self.sharing.compute


class _Gradients:
    """What is accumulated, from a block's first pass on; and at stages 2 and 3 the slots: one is filled while the one before it is reduced, and
    never do two of the vocabulary's size live."""

    def __init__(self, live: _Live, sharing: Sharing, periods: Mapping[Sizes, int]):
        self.live, self.sharing, self.periods = live, sharing, periods
        self.due, self.slots, self.reducing = Counter(periods), set[Sizes](), None
        self.begun: set[Sizes] = set()
        self.layer = max((block.elements for block in periods if block.is_layer), default=0)

    def open(self, block: Sizes) -> None:
        if not block.trained:
            return
        if self.sharing.stage < 2:
            self._accumulate(block, block.elements)
        if self.sharing.stage < 2 or block in self.slots:
            return
        if self.reducing is not None and not (block.is_layer or self.reducing.is_layer):
            self.finish()
        self.slots.add(block)
        self.live.now["slots"] += block.elements * self.sharing.gradient

    def _accumulate(self, block: Sizes, elements: int) -> None:
        if block not in self.begun:
            self.begun.add(block)
            self.live.now["gradients"] += elements * self.sharing.gradient
            self.live.look(f"first gradient of {block.name}")

    def passed(self, block: Sizes, when: str) -> None:
        self.due[block] -= 1
        if self.due[block] or not block.trained:
            return
        self.due[block] = self.periods[block]
        if self.sharing.stage >= 2 or self.sharing.overlap_reduce:
            self.reduce(block, when)
            if not self.sharing.overlap_reduce:
                self.finish()

    def reduce(self, block: Sizes, when: str) -> None:
        self.finish()
        self.slots.discard(block)
        self.reducing = block
        self.live.now["scratch"] += self.sharing.received(block.elements, self.layer)
        self.live.look(when)

    def finish(self) -> None:
        if self.reducing is None:
            return
        block, self.reducing = self.reducing, None
        self.live.now["scratch"] -= self.sharing.received(block.elements, self.layer)
        if self.sharing.stage >= 2:
            slot = block.elements * self.sharing.gradient
            becomes = slot if self.sharing.shard == 1 else 0  # what is accumulated into, where nobody else has a part of it
            self.live.now["slots"] -= becomes
            self._accumulate(block, block.elements // self.sharing.shard)
            self.live.now["slots"] -= slot - becomes
        elif self.sharing.stage == 0 and self.sharing.wire != self.sharing.gradient:
            self.live.now["scratch"] += block.elements * self.sharing.wire  # the sum on its way back


class _Step:
    """What is alive during one step of a rank."""

    def __init__(self, actions: Sequence[Action], rank: RankUnits, sharing: Sharing):
        self.actions, self.rank, self.sharing, self.live = actions, rank, sharing, _Live()
        self.last = len(rank.placement) - 1
        self.inputs = rank.inputs + (rank.losses if self.last in rank.units else 0)  # bytes of a micro-batch
        self.final = {action.micro: action for action in actions if action.kind in COMPUTATIONS}
        self.begun: set[int] = set()
        self.sent, self.arrived = Counter[int](), Counter[int]()  # messages to each rank, and those that are known to have arrived
        reads, passes, users = [], Counter[Sizes](), Counter(rank.blocks.values())
        for action in actions:
            for unit, sizes in self.units(action):
                reads += [rank.blocks[unit]] if sharing.stage == 3 and _reads_weight(action.kind, unit) else []
                passes[rank.blocks[unit]] += _completes(action.kind, sizes)
        often = {block: sharing.stage >= 2 and (users[block] == 1 or max(rank.placement) == 0) for block in passes}
        self.weights = _Weights(self.live, sharing, reads)
        periods = {block: count // len(self.final) if often[block] else count for block, count in passes.items()}
        self.gradients = _Gradients(self.live, sharing, periods)

    def units(self, action: Action) -> Sequence[tuple[int, UnitBytes]]:
        """The units that an action runs, in its order; none of a message's."""
        units = self.rank.units[action.stage] if action.kind in COMPUTATIONS else ()
        return units if action.kind is Kind.FORWARD else units[::-1]

    def hold(self, messages: int) -> None:
        """So many messages more, or fewer."""
        self.live.now["activations"] += messages * self.rank.hidden

    def run(self) -> Peak:
        """Carry out all actions; the worst moment."""
        for action in self.actions:
            if action.kind in COMPUTATIONS:
                self.compute(action)
            elif action.kind in (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD):
                self.hold(1)
                self.live.look("arrival of a message")
        self.hold(-(self.sent.total() - self.arrived.total()))
        if self.sharing.stage < 2 and not self.sharing.overlap_reduce:
            for block in dict.fromkeys(block for block in self.rank.blocks.values() if block.trained):
                self.gradients.reduce(block, "reduction of the gradients")
        self.gradients.finish()
        self.live.look("end of the step")
        assert not any(size for name, size in self.live.now.items() if name not in ("scratch", "gradients")), self.live.now
        _, at, when = self.live.peak
        return Peak(at, when, dict(self.live.most))

    def compute(self, action: Action) -> None:
        kind, stage, micro = action
        to, count = self.rank.receipts.get(needs(action, self.rank.placement), (-1, 0))
        self.hold(-max(count - self.arrived[to], 0))
        self.arrived[to] = max(count, self.arrived[to])
        if micro not in self.begun:
            self.begun.add(micro)
            self.live.now["activations"] += self.inputs
        if kind is Kind.FORWARD:
            self.hold(-(stage > 0))  # its input, which is counted as saved from here on
            self.forward(action)
            self.hold(stage < self.last)
        elif kind is Kind.BACKWARD_WEIGHT:
            self.weight(action)
        else:
            self.backward(action)
            self.hold((stage > 0) - (stage < self.last))  # the gradient that goes on, and the one that came
        if (message := makes(action, self.rank.placement)) is not None:
            self.sent[self.rank.placement[message.stage]] += 1
        if self.final[micro] == action:
            self.live.now["activations"] -= self.inputs

    def forward(self, action: Action) -> None:
        now, units = self.live.now, self.units(action)
        for unit, sizes in units:
            block = self.rank.blocks[unit]
            if unit == units[-1][0]:
                self.gradients.finish()
            with self.weights.open(block, action.kind, unit):
                now["activations"] += sizes.saved
                now["logits"] += sizes.logits
                self.live.look(f"forward pass of {_name(sizes, block)}", sizes.forward)

    def backward(self, action: Action) -> None:
        now, dy = self.live.now, 0  # the gradient of the stage's output has been counted since it came
        for unit, sizes in self.units(action):
            block = self.rank.blocks[unit]
            when, split = f"backward pass of {_name(sizes, block)}", action.kind is Kind.BACKWARD_INPUT and sizes.stashed > 0
            if not split or self.sharing.stage < 2:
                self.gradients.open(block)
            now["temporaries"] += dy
            with self.weights.open(block, action.kind, unit):
                if split:
                    self.live.look(when, sizes.split + self.early(block))
                    now["activations"] += sizes.stashed + self.early(block)
                else:
                    self.live.look(when, sizes.backward)
                    self.live.look(when, sizes.forming, sizes.scratch)
                now["activations"] -= sizes.saved
                now["logits"] -= sizes.logits
                self.live.look(when, self.rank.hidden)
            now["temporaries"] -= dy
            if not split:
                self.gradients.passed(block, when)
            dy = self.rank.hidden

    def weight(self, action: Action) -> None:
        for unit, sizes in self.units(action):
            if sizes.stashed:
                block = self.rank.blocks[unit]
                when = f"weight gradients of {_name(sizes, block)}"
                self.gradients.open(block)
                self.live.look(when, sizes.weight, sizes.scratch)
                self.live.now["activations"] -= sizes.stashed + self.early(block)
                self.gradients.passed(block, when)

    def early(self, block: Sizes) -> int:
        """Bytes of the gradients that wait for those of a layer's matrices."""
        return block.early * self.sharing.gradient if self.sharing.stage >= 2 and block.trained else 0


def replay(actions: Sequence[Action], rank: RankUnits, sharing: Sharing) -> Peak:
    """The worst moment of one step."""
    return _Step(actions, rank, sharing).run()


def _name(sizes: UnitBytes, block: Sizes) -> str:
    return "head" if sizes.head else block.name


def _completes(kind: Kind, sizes: UnitBytes) -> bool:
    """Whether a unit's gradients of one micro-batch are complete after this pass."""
    return kind is Kind.BACKWARD or kind is (Kind.BACKWARD_WEIGHT if sizes.stashed else Kind.BACKWARD_INPUT)


def _reads_weight(kind: Kind, unit: int) -> bool:
    """Whether a pass reads the unit's weights: a weight gradient does not, nor does the embedding's backward pass."""
    return kind is Kind.FORWARD or unit > 0 and kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)
