"""What ZeRO does before and after each pass of a step, as data.

The schedule fixes which pass comes when, so all decisions are made once for a schedule: when a
layer's weights are gathered and freed (stage 3), when a gradient buffer is opened, and after which
pass a block's gradients are complete and can be reduced. zero.py carries the list out. A pass for
which nothing is to be done has None, and the executor calls nothing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from megatron.config.groups import DistributedConfig
from megatron.distributed.groups import Groups
from megatron.model.gpt import GPTModel
from megatron.model.layer import Layer
from megatron.parallel.blocks import Block
from megatron.parallel.layer_runner import Pass
from megatron.parallel.schedule import COMPUTATIONS, Kind

Buffers = tuple[Block, ...]  # of one layer

BACKWARDS = COMPUTATIONS - {Kind.FORWARD}
# after these passes the gradients of a micro-batch are complete
COMPLETING = Kind.BACKWARD, Kind.BACKWARD_WEIGHT


class Before(NamedTuple):
    """What is done before a pass, in this order."""

    # most activations live during this pass, so free reduced gradient buffers first
    frees_reduced: bool
    opens: Buffers  # give these a gradient buffer
    opens_early: Buffers  # or one for what a split backward pass completes in its first half
    adds_early: Buffers  # which its second half adds
    gathers: Buffers  # the pass reads these weights: make them whole, or wait for their update
    prefetches: Buffers  # stage 3: the next pass reads these
    key: tuple[Layer, int]  # of the early gradients: layer and micro-batch


class After(NamedTuple):
    """What is done after a pass, in this order."""

    # stage 3, again: `before_pass` leaves out a block whose step on the host is due
    prefetches: Buffers
    frees: Buffers  # stage 3: weights that are not read again soon
    updates: Buffers  # whose step on the host runs while the device computes the pass
    closes_early: Buffers
    completes: Buffers  # their gradients have had all passes of a period


class ZeroPlan(NamedTuple):
    """A step's actions on weights and gradients."""

    first: Buffers  # stage 3: gathered before the first pass
    passes: list[tuple[Before | None, After | None]]


class ZeroPlanner:
    """Makes the plan of a schedule. `buffers_of`: the buffers in which each layer has parameters;
    `transformer_blocks`: those of transformer layers, not of the vocabulary.
    """

    def __init__(
        self, model: GPTModel, blocks: list[Block], groups: Groups, config: DistributedConfig
    ):
        self.zero_stage, self.keep = blocks[0].zero_stage, config.zero3_keep_gathered
        self.overlap_gather = config.overlap_param_gather
        self.single_pipeline = groups.pp.size == 1
        # one rank alone that keeps whole gradients has nothing to reduce
        self.reduces = self.zero_stage >= 2 or any(block.groups.shard.size > 1 for block in blocks)
        owner = {parameter: block for block in blocks for parameter in block.parameters}
        self.buffers_of: dict[Layer, Buffers] = {}
        self.transformer_blocks: set[Block] = set()
        for _, layer in model.named_layers():
            owners = [owner[parameter] for parameter in layer.parameters()]
            self.buffers_of[layer] = tuple(dict.fromkeys(owners))
            if not layer.of_vocabulary:
                self.transformer_blocks.update(owners)
        self.users = Counter(block for buffers in self.buffers_of.values() for block in buffers)
        self.following = dict(pairwise(blocks))
        self.last = {named[-1][1] for named in model.layers_by_stage}

    def plan(self, turns: Sequence[Sequence[Pass]]) -> ZeroPlan:
        """The plan of passes in their order; those of a turn run at the same time."""
        walk = _Walk(self, [each for turn in turns for each in turn])
        first = walk.needs[0] if walk.needs and self.overlap_gather else ()
        passes: list[tuple[Before | None, After | None]] = []
        for turn in turns:
            # the passes of a turn all begin before any of them ends
            before = [walk.before(*each) for each in turn]
            after = [walk.after(*each) for each in turn]
            passes += zip(before, after)
        return ZeroPlan(first, passes)

    def reads_gathered(self, layer: Layer, kind: Kind) -> bool:
        """Whether a pass needs the layer's weights gathered: a weight gradient does not, nor does
        the embedding's backward pass.
        """
        return self.zero_stage == 3 and (
            kind is Kind.FORWARD
            or (kind is not Kind.BACKWARD_WEIGHT and layer.reads_weight_backward)
        )


class _Walk:
    """The state of a step at one of its passes, while its plan is made."""

    def __init__(self, planner: ZeroPlanner, passes: Sequence[Pass]):
        self.planner, self.zero_stage = planner, planner.zero_stage
        # stage 3: what the passes to come read, in order, and how often
        self.needs = deque(
            planner.buffers_of[layer]
            for layer, kind, _ in passes
            if planner.reads_gathered(layer, kind)
        )
        self.remaining = Counter(self.needs)
        # passes of a block's layers from one reduction to the next
        self.period = self._periods(passes)
        self.due = dict(self.period)
        self.open: set[Block] = set()  # these have a gradient buffer
        self.arrived: set[Block] = set()  # these have the weights of this step
        self.updated: set[Block] = set()

    def _periods(self, passes: Sequence[Pass]) -> dict[Block, int]:
        """How many passes of a block's layers come between two reductions:

        stages 0 and 1                                 all of a step
        stages 2 and 3                                 one, of each micro-batch
        the same, embedding and head in one block      two, of each micro-batch
        the same, on a rank of a pipeline              all of a step: ends of other micro-batches
                                                       may come between those of one
        """
        buffers_of, users = self.planner.buffers_of, self.planner.users
        counts = Counter(
            block for layer, kind, _ in passes if kind in COMPLETING for block in buffers_of[layer]
        )
        period = {}
        for block, count in counts.items():
            often = self.zero_stage >= 2 and (users[block] == 1 or self.planner.single_pipeline)
            period[block] = users[block] if often else count
        return period

    def before(self, layer: Layer, kind: Kind, micro: int) -> Before | None:
        """What is done before this pass; None for nothing."""
        planner, buffers = self.planner, self.planner.buffers_of[layer]
        trained = tuple(block for block in buffers if block.trained)
        early, late = self._halves(kind)
        gathers: Buffers = ()
        prefetches: Buffers = ()
        if planner.reads_gathered(layer, kind):
            assert self.needs.popleft() == buffers
            self.remaining[buffers] -= 1
            gathers, prefetches = buffers, self._prefetched(buffers)
        elif self.zero_stage < 3 and kind is not Kind.BACKWARD_WEIGHT:
            # The weights of this step may be on their way when their first pass comes.
            sent = [block for block in buffers if self.zero_stage > 0 or block.on_host]
            gathers = _add_new(sent, self.arrived)
        todo = Before(
            # Before the forward pass of the last layer, where most activations live: the gradient
            # of the micro-batch before has had the other layers' passes to be reduced.
            kind is Kind.FORWARD and layer in planner.last and planner.reduces,
            _add_new(trained, self.open) if kind in BACKWARDS and not early else (),
            trained if early else (),
            trained if late else (),
            gathers,
            prefetches,
            (layer, micro),
        )
        return todo if any(todo[:-1]) else None

    def after(self, layer: Layer, kind: Kind, micro: int) -> After | None:
        """What is done after this pass; None for nothing."""
        planner, buffers = self.planner, self.planner.buffers_of[layer]
        prefetches: Buffers = ()
        frees: Buffers = ()
        updates: Buffers = ()
        if planner.reads_gathered(layer, kind):
            prefetches = self._prefetched(buffers)
            if not self._is_needed(buffers, kind):
                # what is kept with the weights and not trained is always whole
                frees = tuple(block for block in buffers if block.zero_stage == 3)
        elif self.zero_stage < 3 and kind is not Kind.BACKWARD_WEIGHT:
            following = planner.following.get(buffers[-1])
            if following is not None and following.on_host:
                updates = _add_new([following], self.updated)
        early, _ = self._halves(kind)
        closes_early = tuple(block for block in buffers if block.trained and early)
        completes = self._completed(buffers) if kind in COMPLETING else ()
        todo = After(prefetches, frees, updates, closes_early, completes)
        return todo if any(todo) else None

    def _halves(self, kind: Kind) -> tuple[bool, bool]:
        """Whether a pass is the first, or the second, half of a split one that has separate
        gradient buffers.
        """
        splits = self.zero_stage >= 2
        return splits and kind is Kind.BACKWARD_INPUT, splits and kind is Kind.BACKWARD_WEIGHT

    def _completed(self, buffers: Buffers) -> Buffers:
        """The blocks that have had all passes of their period."""
        found = []
        for block in buffers:
            self.due[block] -= 1
            if self.due[block] == 0 and block.trained:
                self.due[block] = self.period[block]
                found.append(block)
        if self.zero_stage >= 2:  # the buffers are closed: the next pass opens others
            self.open.difference_update(found)
        return tuple(found)

    # ---- stage 3: which weights are whole when

    def _is_needed(self, buffers: Buffers, kind: Kind) -> bool:
        """Whether a layer stays gathered after a pass: it is one of the two that are read next, or
        with --zero3-keep-gathered read again in this step. A layer that has been rebuilt keeps its
        weights for its backward pass.
        """
        if kind is Kind.REBUILD:
            return True
        if self.planner.keep:
            return self.remaining[buffers] > 0
        return bool(self.needs) and buffers in (self.needs[0], self._next_to(self.needs[0]))

    def _prefetched(self, buffers: Buffers) -> Buffers:
        """What is gathered while a pass that reads these computes."""
        return self._next_to(buffers) if self.planner.overlap_gather else ()

    def _next_to(self, buffers: Buffers) -> Buffers:
        """The next other layer that is read, if it may be gathered while this one is: never two of
        the vocabulary's size; () for none.
        """
        other = next((other for other in self.needs if other != buffers), ())
        return () if self.planner.transformer_blocks.isdisjoint((*buffers, *other)) else other


def _add_new(blocks: Iterable[Block], known: set[Block]) -> Buffers:
    """Those that are not known yet, which they are from now on."""
    found = tuple(block for block in blocks if block not in known)
    known.update(found)
    return found
