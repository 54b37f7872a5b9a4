"""What ZeRO does before and after each pass of a step, as data.

The schedule fixes which pass comes when, so all decisions are made once for a schedule: when a
layer's weights are gathered and freed (stage 3), when a gradient buffer is opened, and after which
pass a block's gradients are complete and can be reduced. The plan lists the calls that carry this
out (zero.py, blocks.py), in their order; the executor makes them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from megatron.config.groups import DistributedConfig
from megatron.model.gpt import GPTModel
from megatron.model.layer import Layer
from megatron.parallel.blocks import Block
from megatron.parallel.layer_runner import Pass
from megatron.parallel.schedule import COMPUTATIONS, Kind

if TYPE_CHECKING:
    from megatron.parallel.zero import Zero

Blocks = tuple[Block, ...]  # of one layer
Calls = list[Callable[[], object]]

BACKWARDS = COMPUTATIONS - {Kind.FORWARD}
# after these passes the gradients of a micro-batch are complete
COMPLETING = Kind.BACKWARD, Kind.BACKWARD_WEIGHT


class ZeroPlan(NamedTuple):
    """A step's actions on weights and gradients."""

    first: Calls  # before the first pass
    passes: list[tuple[Calls, Calls]]  # before each, after each


class ZeroPlanner:
    """Makes the plan of a schedule. `blocks_of`: the blocks in which each layer has parameters;
    `transformer_blocks`: those of transformer layers, not of the vocabulary.
    """

    def __init__(self, zero: Zero, model: GPTModel, config: DistributedConfig):
        blocks = zero.blocks
        self.zero, self.zero_stage = zero, zero.zero_stage
        self.keep, self.overlap_gather = config.zero3_keep_gathered, config.overlap_param_gather
        self.single_pipeline = zero.groups.pp.size == 1
        # one rank alone that keeps whole gradients has nothing to reduce
        self.reduces = self.zero_stage >= 2 or any(block.groups.shard.size > 1 for block in blocks)
        owner = {parameter: block for block in blocks for parameter in block.parameters}
        self.blocks_of: dict[Layer, Blocks] = {}
        self.transformer_blocks: set[Block] = set()
        for _, layer in model.named_layers():
            owners = [owner[parameter] for parameter in layer.parameters()]
            self.blocks_of[layer] = tuple(dict.fromkeys(owners))
            if not layer.of_vocabulary:
                self.transformer_blocks.update(owners)
        self.users = Counter(block for each in self.blocks_of.values() for block in each)
        self.last = {named[-1][1] for named in model.layers_by_stage}

    def plan(self, turns: Sequence[Sequence[Pass]]) -> ZeroPlan:
        """The plan of passes in their order; those of a turn run at the same time."""
        walk = _Walk(self, [each for turn in turns for each in turn])
        first = walk.needs[0] if walk.needs and self.overlap_gather else ()
        passes: list[tuple[Calls, Calls]] = []
        for turn in turns:
            # the passes of a turn all begin before any of them ends
            before = [walk.before(*each) for each in turn]
            after = [walk.after(*each) for each in turn]
            passes += zip(before, after)
        return ZeroPlan([partial(self.zero.start_gathers, first)] if first else [], passes)

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
        self.planner, self.zero, self.zero_stage = planner, planner.zero, planner.zero_stage
        # stage 3: what the passes to come read, in order, and how often
        self.needs = deque(
            planner.blocks_of[layer]
            for layer, kind, _ in passes
            if planner.reads_gathered(layer, kind)
        )
        self.remaining = Counter(self.needs)
        # passes of a block's layers from one reduction to the next
        self.period = self._periods(passes)
        self.due = dict(self.period)
        self.open: set[Block] = set()  # these have a gradient buffer
        self.arrived: set[Block] = set()  # these have the weights of this step

    def _periods(self, passes: Sequence[Pass]) -> dict[Block, int]:
        """How many passes of a block's layers come between two reductions:

        stages 0 and 1                                 all of a step
        stages 2 and 3                                 one, of each micro-batch
        the same, embedding and head in one block      two, of each micro-batch
        the same, on a rank of a pipeline              all of a step: ends of other micro-batches
                                                       may come between those of one
        """
        blocks_of, users = self.planner.blocks_of, self.planner.users
        counts = Counter(
            block for layer, kind, _ in passes if kind in COMPLETING for block in blocks_of[layer]
        )
        period = {}
        for block, count in counts.items():
            often = self.zero_stage >= 2 and (users[block] == 1 or self.planner.single_pipeline)
            period[block] = users[block] if often else count
        return period

    def before(self, layer: Layer, kind: Kind, micro: int) -> Calls:
        """What is done before this pass."""
        calls: Calls = []
        # Before the forward pass of the last layer, where most activations live: the gradient of
        # the micro-batch before has had the other layers' passes to be reduced, and is freed.
        if kind is Kind.FORWARD and layer in self.planner.last and self.planner.reduces:
            calls.append(self.zero.free_reduced)
        trained = [block for block in self.planner.blocks_of[layer] if block.trained]
        calls += self._room_for_gradients(trained, kind, (layer, micro))
        return calls + self._whole_weights(layer, kind)

    def _room_for_gradients(
        self, trained: list[Block], kind: Kind, key: tuple[Layer, int]
    ) -> Calls:
        """Gradient buffers for a pass: a small one for what the first half of a split backward
        pass completes, which the second half adds.
        """
        if self.zero_stage >= 2 and kind is Kind.BACKWARD_INPUT:
            return [partial(block.open_early, key) for block in trained]
        calls: Calls = []
        if kind in BACKWARDS:
            for block in trained:
                if block not in self.open:  # where nothing is reduced there is always room
                    room = partial(self.zero.open, block) if self.planner.reduces else block.open
                    calls.append(room)
            self.open.update(trained)
        if self.zero_stage >= 2 and kind is Kind.BACKWARD_WEIGHT:
            calls += [partial(block.add_early, key) for block in trained]
        return calls

    def _whole_weights(self, layer: Layer, kind: Kind) -> Calls:
        """Gathers before a pass (stage 3), or before the first pass of a step that reads a block
        one wait for its all-gather (stages 1 and 2) and its step on the host, if it has one.
        """
        zero, blocks = self.zero, self.planner.blocks_of[layer]
        if self.planner.reads_gathered(layer, kind):
            assert self.needs.popleft() == blocks
            self.remaining[blocks] -= 1
            return [partial(zero.gather, blocks), *self._prefetch(blocks, zero.prefetch)]
        if self.zero_stage == 3 or kind is Kind.BACKWARD_WEIGHT:
            return []
        updated = [block for block in blocks if self.zero_stage > 0 or block.on_host]
        calls: Calls = [
            partial(zero.wait_for_block, block) for block in updated if block not in self.arrived
        ]
        self.arrived.update(updated)
        return calls

    def after(self, layer: Layer, kind: Kind, micro: int) -> Calls:
        """What is done after this pass, which is queued."""
        planner, zero, blocks = self.planner, self.zero, self.planner.blocks_of[layer]
        calls: Calls = []
        if planner.reads_gathered(layer, kind):
            # again: `prefetch` leaves out a block whose step on the host is due
            calls += self._prefetch(blocks, zero.start_gathers)
            if not self._is_needed(blocks, kind):
                # what is kept with the weights and not trained is always whole
                calls += [block.release for block in blocks if block.zero_stage == 3]
        if self.zero_stage >= 2 and kind is Kind.BACKWARD_INPUT:
            calls += [block.close_early for block in blocks if block.trained]
        if kind in COMPLETING:
            for block in blocks:
                self.due[block] -= 1
                if self.due[block] == 0 and block.trained:
                    self.due[block] = self.period[block]
                    calls.append(partial(zero.complete, block))
                    if self.zero_stage >= 2:  # the buffer is closed: the next pass opens another
                        self.open.discard(block)
        return calls

    # ---- stage 3: which weights are whole when

    def _is_needed(self, blocks: Blocks, kind: Kind) -> bool:
        """Whether a layer stays gathered after a pass: it is one of the two that are read next, or
        with --zero3-keep-gathered read again in this step. A layer that has been rebuilt keeps its
        weights for its backward pass.
        """
        if kind is Kind.REBUILD:
            return True
        if self.planner.keep:
            return self.remaining[blocks] > 0
        return bool(self.needs) and blocks in (self.needs[0], self._next_to(self.needs[0]))

    def _prefetch(self, blocks: Blocks, start: Callable[[Blocks], None]) -> Calls:
        """The call that gathers the next layer while a pass that reads these computes, if any."""
        other = self._next_to(blocks) if self.planner.overlap_gather else ()
        return [partial(start, other)] if other else []

    def _next_to(self, blocks: Blocks) -> Blocks:
        """The next other layer that is read, if it may be gathered while this one is: never two of
        the vocabulary's size; () for none.
        """
        other = next((other for other in self.needs if other != blocks), ())
        return () if self.planner.transformer_blocks.isdisjoint((*blocks, *other)) else other
