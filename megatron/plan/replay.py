"""One rank's step, replayed in bytes: what lives beside its resident state at every moment, and the moment at which that is most.

The maxima of activations, gradient slots and gathered weights do not fall together: at the start of a backward pass, where activations are most, no
gradient exists. So the actions of the schedule are gone through unit by unit, as the executor and optimizer/zero.py do.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron.parallel.schedule import Action, Kind
from megatron.plan.activations import UnitBytes
from megatron.plan.state import Sizes

TRANSIENT = ("slots", "gathered", "scratch", "activations", "logits", "temporaries")
ROUND_BYTES = 8 << 20  # that a reduce-scatter may take on Gloo, or half the largest layer's gradient where that is more: dist/collectives.py


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

    def open(self, block: Sizes) -> None:
        assert self.needs.popleft() == block
        self.left[block] -= 1
        coming = self._next_to(block)
        self._gather(block)
        if coming is not None and self.sharing.overlap_gather:
            self._gather(coming)

    def close(self, block: Sizes) -> None:
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
    """Stages 2 and 3: the slots. One is filled while the one before it is reduced, and never do two of the vocabulary's size live."""

    def __init__(self, live: _Live, sharing: Sharing, periods: Mapping[Sizes, int]):
        self.live, self.sharing, self.periods = live, sharing, periods
        self.due, self.slots, self.reducing = Counter(periods), set[Sizes](), None
        self.layer = max((block.elements for block in periods if block.is_layer), default=0)

    def open(self, block: Sizes) -> None:
        if self.sharing.stage < 2 or block in self.slots:
            return
        if self.reducing is not None and not (block.is_layer or self.reducing.is_layer):
            self.finish()
        self.slots.add(block)
        self.live.now["slots"] += block.elements * self.sharing.gradient

    def passed(self, block: Sizes, when: str) -> None:
        self.due[block] -= 1
        if self.due[block]:
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
            self.live.now["slots"] -= block.elements * self.sharing.gradient
        elif self.sharing.stage == 0 and self.sharing.wire != self.sharing.gradient:
            self.live.now["scratch"] += block.elements * self.sharing.wire  # the sum on its way back


def calls(actions: Sequence[Action], rank: RankUnits) -> Iterator[tuple[Action, list[tuple[int, UnitBytes]]]]:
    """Each action with the units it runs, in its order."""
    for action in actions:
        units = list(rank.units.get(action.stage, ()))
        yield action, units if action.kind is Kind.FORWARD else units[::-1]


def replay(actions: Sequence[Action], rank: RankUnits, sharing: Sharing) -> Peak:
    """The worst moment of one step."""
    live, last = _Live(), len(rank.placement) - 1
    reads, passes = [], Counter()
    for action, units in calls(actions, rank):
        for unit, sizes in units:
            reads += [rank.blocks[unit]] if _reads_weight(action.kind, unit) else []
            passes[rank.blocks[unit]] += _completes(action.kind, sizes)
    micro_batches = len({action.micro for action in actions})
    users = Counter(rank.blocks.values())
    often = {block: sharing.stage >= 2 and (users[block] == 1 or max(rank.placement) == 0) for block in passes}
    weights = _Weights(live, sharing, reads if sharing.stage == 3 else [])
    gradients = _Gradients(live, sharing, {block: count // micro_batches if often[block] else count for block, count in passes.items()})
    final = {action.micro: index for index, action in enumerate(actions)}
    begun: set[int] = set()
    unproven: Counter[int] = Counter()  # gradients sent to a rank that may still be on their way

    def arrived(peer: int) -> int:
        """How many gradients a message from a rank proves to have arrived: as a rule all but the last."""
        count = max(unproven[peer] - 1, 0)
        unproven[peer] -= count
        return count

    for index, (action, units) in enumerate(calls(actions, rank)):
        kind, stage, micro = action
        if kind in (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD):
            live.now["activations"] += rank.hidden
            live.look("as a message arrives")
        elif kind is Kind.FORWARD:
            if micro not in begun:
                begun.add(micro)
                live.now["activations"] += rank.inputs + (rank.losses if rank.placement[last] == rank.placement[stage] else 0)
            live.now["activations"] -= rank.hidden * (stage > 0)  # its input, which is counted as saved from here on
            live.now["activations"] -= rank.hidden * arrived(rank.placement[stage - 1] if stage else -1)
            for unit, sizes in units:
                block = rank.blocks[unit]
                if sharing.stage == 3:
                    weights.open(block)
                live.now["activations"] += sizes.saved
                live.now["logits"] += sizes.logits
                live.look(f"forward pass of {_name(unit, sizes, block)}", sizes.forward)
                if sharing.stage == 3:
                    weights.close(block)
            live.now["activations"] += rank.hidden * (stage < last)  # the output: on its way to the next stage or waiting for it here
        elif kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            away = stage < last and rank.placement[stage + 1] != rank.placement[stage]
            live.now["activations"] -= rank.hidden * away  # the output: what comes back proves its arrival
            live.now["activations"] -= rank.hidden * arrived(rank.placement[stage + 1] if stage < last else -1)
            dy = 0  # the gradient of the stage's output has been counted since it came
            for unit, sizes in units:
                block, when = rank.blocks[unit], f"backward pass of {_name(unit, sizes, rank.blocks[unit])}"
                split = kind is Kind.BACKWARD_INPUT and sizes.stashed > 0
                if sharing.stage == 3 and _reads_weight(kind, unit):
                    weights.open(block)
                if not split:
                    gradients.open(block)
                early = block.early * sharing.gradient if split and sharing.stage >= 2 else 0
                live.now["temporaries"] += dy
                live.look(when, sizes.split + early if split else sizes.backward)
                if not split:
                    live.look(when, sizes.forming, sizes.scratch)
                live.now["activations"] += (sizes.stashed + early if split else 0) - sizes.saved
                live.now["logits"] -= sizes.logits
                live.look(when, rank.hidden)
                live.now["temporaries"] -= dy
                if sharing.stage == 3 and _reads_weight(kind, unit):
                    weights.close(block)
                if not split:
                    gradients.passed(block, when)
                dy = rank.hidden
            live.now["activations"] += rank.hidden * ((stage > 0) - (stage < last))  # the gradient that goes on, the one that came
        elif kind is Kind.BACKWARD_WEIGHT:
            for unit, sizes in units:
                if sizes.stashed:
                    block, when = rank.blocks[unit], f"weight gradients of {_name(unit, sizes, rank.blocks[unit])}"
                    gradients.open(block)
                    live.look(when, sizes.weight, sizes.scratch)
                    live.now["activations"] -= sizes.stashed + (block.early * sharing.gradient if sharing.stage >= 2 else 0)
                    gradients.passed(block, when)
        elif kind is Kind.SEND_BACKWARD:
            unproven[rank.placement[stage - 1]] += 1
        if final[micro] == index:
            live.now["activations"] -= rank.inputs + (rank.losses if last in rank.units else 0)
    if sharing.stage < 2 and not sharing.overlap_reduce:
        for block in dict.fromkeys(rank.blocks.values()):
            gradients.reduce(block, "reduction of the gradients")
    live.now["activations"] -= rank.hidden * sum(unproven.values())
    gradients.finish()
    live.look("end of the step")
    assert not any(size for name, size in live.now.items() if name != "scratch"), live.now
    _, at, when = live.peak
    return Peak(at, when, dict(live.most))


def _name(unit: int, sizes: UnitBytes, block: Sizes) -> str:
    return "head" if sizes.logits else block.name


def _completes(kind: Kind, sizes: UnitBytes) -> bool:
    """Whether a unit's gradients of one micro-batch are complete after this pass."""
    return kind is Kind.BACKWARD or kind is (Kind.BACKWARD_WEIGHT if sizes.stashed else Kind.BACKWARD_INPUT)


def _reads_weight(kind: Kind, unit: int) -> bool:
    """Whether a pass reads the unit's weights: a weight gradient does not, nor does the embedding's backward pass."""
    return kind is Kind.FORWARD or unit > 0 and kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)
