"""--recompute auto: for the layers of each pipeline rank the cheapest recomputation whose planned
peak fits a budget.

An integer programme: how many layers get each of a few options, such that the time of what is
computed again is least and the planned peak is within the budget. Bytes that are saved would be
another objective, and a wrong one: a peak is what micro-batches in flight keep and the working set
of the layer that runs. So all candidates go through one planned step together, the ledger counts an
array of bytes, one number for each, and the cheapest that fits is taken: nothing is approximated
but the times.

Layers with more recomputation come first in a stage: their backward passes come last, when the
others are gone. Time: FLOPs at what training reaches, and bytes through the device's memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations_with_replacement, groupby
from math import comb, prod
from typing import Any

import numpy as np
from megatron.tools._plan.activations import Shape, UnitBytes, layer_bytes, unit_bytes
from megatron.tools._plan.advice import Machine
from megatron.tools._plan.engine import Ledger
from megatron.tools._plan.memory import PlannedSteps
from megatron.tools._plan.operations import Operations
from megatron.tools._plan.work import Work

from megatron.config.errors import UserError
from megatron.config.groups import Config
from megatron.config.recompute import FULL, NONE
from megatron.model.recompute import NO_RECOMPUTE, choice_of

OPTIONS = (
    NONE,
    "layernorm",
    "mlp_act",
    "layernorm+mlp_act",
    "layernorm+mlp_act+qkv",
    "layernorm+mlp",
    "layernorm+mlp+qkv",
    "layernorm+mlp+qkv+core_attn",
    FULL,
)
OF_EXPERTS = {"mlp_act": "moe_act", "mlp": "moe"}
MEMORY_BANDWIDTH = 3.35e12  # bytes/s, of an H100 by its data sheet
MOST_CANDIDATES = 20_000
FIELDS = [
    field.name
    for field in dataclasses.fields(UnitBytes)
    if field.name not in ("head", "rebuilt", "keeps_input", "leaving")
]


class CandidateLedger(Ledger):
    """A ledger of many steps at once: bytes are arrays, one number for each candidate."""

    def __init__(self, candidates: int):
        super().__init__()
        self.alive: Any = np.zeros(candidates, np.int64)
        self.highest = np.zeros(candidates, np.int64)

    def add(self, kind: str, size: Any) -> None:
        self.alive = self.alive + size

    def look(self, temporaries: Any = 0, scratch: Any = 0) -> None:
        np.maximum(self.highest, self.alive + temporaries + scratch, out=self.highest)


@dataclasses.dataclass(frozen=True)
class RankChoice:
    """What a pipeline rank recomputes: `layers` by their number in the model; bytes at the peak
    and seconds a micro-batch that it adds; and the same without recomputation, and of the cheaper
    candidate that needs the least.
    """

    layers: dict[int, str]
    needed: int
    seconds: float
    without: int
    cheaper: tuple[str, int] | None

    def line(self, rank: int, budget: float, share: float) -> str:
        """One sentence; `share`: the added time, of the time of the layers."""
        chosen = ", ".join(words_of(list(self.layers.values())))
        text = (
            f"recompute of pipeline rank {rank}: {chosen}; needs {_gib(self.needed)} of {budget:g} "
            f"GiB, {_gib(self.without)} without; adds {share:.1%} to its layers' time (reckoned)"
        )
        if self.cheaper is None:
            return text
        return (
            f"{text}; of all that add less the least is {_gib(self.cheaper[1])}: "
            + (self.cheaper[0])
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:.4g}"


def choose_layers(
    config: Config, vocab_size: int, world_size: int, device: str
) -> tuple[Config, list[str]]:
    """A resolved configuration with --recompute-layers in the place of --recompute auto, and the
    reasons; any other as it is. Raises UserError when nothing fits --memory-budget.
    """
    budget = config.training.memory_budget
    if config.training.recompute is None or budget is None:
        return config, []
    steps = PlannedSteps(config, vocab_size, world_size, device)
    chosen: dict[int, str] = {}
    lines = []
    for rank in range(steps.schedule.ranks):
        choice = choose_for_rank(steps, rank, int(budget * 2**30))
        if not choice.layers:  # embedding or head alone
            continue
        chosen |= choice.layers
        step = 3 * sum(seconds_again(steps.shape, FULL, layer) for layer in choice.layers)
        lines.append(choice.line(rank, budget, choice.seconds / step))
    words = words_of([chosen[layer] for layer in sorted(chosen)])
    return config.with_fields("training", recompute_layers=words), lines


def words_of(layers: Sequence[str]) -> tuple[str, ...]:
    """The words of --recompute-layers for WHAT of each layer."""
    runs = ((what, sum(1 for _ in same)) for what, same in groupby(layers))
    return tuple(f"{what}*{count}" for what, count in runs)


def words_of_layer(shape: Shape, layer: int, what: str) -> str:
    """An option in the words of a layer: experts have modules of their own in the place of the
    MLP's.
    """
    if what in (NONE, FULL) or not shape.config.model.expert_layers()[layer]:
        return what
    return "+".join(OF_EXPERTS.get(part, part) for part in what.split("+"))


def seconds_again(shape: Shape, what: str, layer: int = 0) -> float:
    """Of what a layer's backward pass recomputes of one micro-batch: its FLOPs, bytes between the
    device and its memory, and bytes between ranks.
    """
    machine, operations = Machine(), Operations(shape.config, shape.vocab_size, device=shape.device)
    kept, again = (
        operations.layer(layer, choice).backward
        for choice in (NO_RECOMPUTE, choice_of(words_of_layer(shape, layer, what)))
    )

    def more(size: Callable[[Work], float]) -> float:
        return size(again) - size(kept)

    return (
        more(lambda work: work.flops) / (machine.peak_tflops * 1e12 * machine.mfu)
        + more(lambda work: sum(work.streams) + work.hidden) / MEMORY_BANDWIDTH
        + more(lambda work: sum(each.size for each in work.exchanges)) / (machine.bandwidth * 1e9)
    )


def worthwhile(shape: Shape) -> list[str]:
    """The options, those that keep the least first, without such as keep no less than a cheaper
    one. Where layers have experts, they are judged by one of these.
    """
    experts = shape.config.model.expert_layers()
    layer = experts.index(True) if any(experts) else 1
    saved = {
        what: layer_bytes(shape, layer, choice_of(words_of_layer(shape, layer, what))).saved
        for what in OPTIONS
    }
    seconds = {what: seconds_again(shape, what, layer) for what in OPTIONS}
    found: list[str] = []
    for what in sorted(OPTIONS, key=lambda what: (seconds[what], saved[what])):
        if not found or saved[what] < saved[found[-1]]:
            found.append(what)
    return found[::-1]


def candidates(sizes: Sequence[int], options: int) -> np.ndarray:
    """Every way to give options to the layers of stages with that many each, ascending in each
    stage: [candidates, layers]. Where these are more than MOST_CANDIDATES options change at
    multiples of the least step that leaves that many; of many small stages, as if they were one.
    """
    steps = range(1, max(sizes, default=0) + 2)
    of_each = [(sizes, step) for step in steps]
    of_all = [((sum(sizes),), step) for step in range(1, sum(sizes) + 2)]
    parts, step = next(
        (parts, step)
        for parts, step in [*of_each, *of_all]
        if prod(_ways(-(-size // step), options) for size in parts) <= MOST_CANDIDATES
    )
    found = np.zeros((1, 0), np.int64)
    for size in parts:
        own = np.repeat(_ascending(-(-size // step), options), step, 1)[:, :size]
        before, after = np.repeat(found, len(own), 0), np.tile(own, (len(found), 1))
        found = np.concatenate((before, after), 1)
    return found


def _ways(units: int, options: int) -> int:
    return comb(units + options - 1, options - 1)


def _ascending(units: int, options: int) -> np.ndarray:
    """Every ascending row of that many options [rows, units]."""
    rows = list(combinations_with_replacement(range(options), units))
    return np.array(rows, np.int64).reshape(len(rows), units)


def choose_for_rank(steps: PlannedSteps, rank: int, budget: int) -> RankChoice:
    """The cheapest candidate whose planned peak is at most `budget` bytes. Raises UserError."""
    shape, stages = steps.shape, steps.stages_of(rank)
    options = worthwhile(shape)
    numbers = [layer for stage in stages for layer in stage.layers]
    chosen = candidates([len(stage.layers) for stage in stages], len(options))
    needed = needed_bytes(steps, rank, options, chosen)
    seconds = _seconds_of(shape, numbers, options, chosen)
    costs = np.round(seconds * 1e12)  # sums in any order are equal
    order = np.lexsort((needed, costs))
    fitting = order[needed[order] <= budget]
    if not len(fitting):
        raise _nothing_fits(rank, budget, int(needed.min()))
    best = fitting[0]
    kept = np.flatnonzero((chosen == options.index(NONE)).all(1))[0]
    words = partial(_words, shape, numbers, options)
    cheaper = _least_of(np.flatnonzero(costs < costs[best]), chosen, needed, words)
    layers = dict(zip(numbers, words(chosen[best]), strict=True))
    return RankChoice(layers, int(needed[best]), float(seconds[best]), int(needed[kept]), cheaper)


def _nothing_fits(rank: int, budget: int, least: int) -> UserError:
    return UserError(
        f"--memory-budget {_gib(budget)}: pipeline rank {rank} needs {_gib(least)} GiB even with "
        "the recomputation that needs the least; give more, or use more ranks, a higher "
        "--zero-stage or a smaller --micro-batch-size"
    )


def _least_of(
    rows: np.ndarray,
    chosen: np.ndarray,
    needed: np.ndarray,
    words: Callable[[np.ndarray], list[str]],
) -> tuple[str, int] | None:
    """Of these candidates the one that needs the least, as text, and its bytes."""
    if not len(rows):
        return None
    row = rows[np.argmin(needed[rows])]
    return ", ".join(words_of(words(chosen[row]))), int(needed[row])


def _seconds_of(
    shape: Shape, numbers: Sequence[int], options: Sequence[str], chosen: np.ndarray
) -> np.ndarray:
    """What each candidate adds to a micro-batch [candidates], of layers with these numbers."""
    of_kind: dict[int, np.ndarray] = {}
    seconds = np.zeros(len(chosen))
    for column, layer in enumerate(numbers):
        kind = shape.like(layer, final_norm=False)
        if kind not in of_kind:
            of_kind[kind] = np.array([seconds_again(shape, what, layer) for what in options])
        seconds += of_kind[kind][chosen[:, column]]
    return seconds


def _words(
    shape: Shape, numbers: Sequence[int], options: Sequence[str], row: np.ndarray
) -> list[str]:
    """A candidate in the words of each layer."""
    given = zip(numbers, row, strict=True)
    return [words_of_layer(shape, layer, options[index]) for layer, index in given]


def needed_bytes(
    steps: PlannedSteps, rank: int, options: Sequence[str], chosen: np.ndarray
) -> np.ndarray:
    """Bytes at the worst moment of a rank's step [candidates], for each row of `chosen`."""
    ledger = CandidateLedger(len(chosen))
    units: list[list[UnitBytes]] = []
    column = 0
    for stage in steps.stages_of(rank):
        own = unit_bytes(steps.shape, stage)
        first = int(stage.embedding)
        for place, layer in enumerate(stage.layers):
            table = [_flat(steps.shape, layer, what) for what in options]
            own[first + place] = _selected(table, chosen[:, column])
            column += 1
        units.append(own)
    memory = steps.of_rank(rank, ledger, units)
    return ledger.highest + memory.resident - memory.static["gradients"]


def _flat(shape: Shape, layer: int, what: str) -> UnitBytes:
    """A layer's bytes; the rebuilt graph of a whole layer is part of its backward pass."""
    unit = layer_bytes(shape, layer, choice_of(words_of_layer(shape, layer, what)))
    graph = unit.rebuilt
    if graph is None:
        return unit
    again = graph.saved - unit.saved
    return dataclasses.replace(
        unit,
        backward=again + max(graph.forward, graph.backward),
        split=again + max(graph.forward, graph.split),
        rebuilt=None,
    )


def _selected(table: list[UnitBytes], rows: np.ndarray) -> UnitBytes:
    """One unit whose bytes are arrays: of each candidate its row of `table`."""
    values: dict[str, Any] = {
        name: np.array([getattr(unit, name) for unit in table], np.int64)[rows] for name in FIELDS
    }
    return UnitBytes(**values)
