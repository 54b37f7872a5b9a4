"""Which tests the default command runs.

Three sizes of a run: the default (minutes), `-m "not campaign"` (everything but the campaigns;
`bash scripts/test.sh full`) and `-m campaign` (hours). Tests that only the second one runs are
marked `full`: by hand, or by code where they are rows of a table.

A table is a parametrized test that is marked `table`, with these arguments, or that runs on several
processes (`gloo_world`), with `each_axis`:
- traits: gives what a row shows, of its parameters; by default `pairs`;
- always: ids of rows that the default command runs as well.

Its default rows show every trait that any of its rows of at most MOST_RANKS ranks shows: with
`pairs` every pair of values of two parameters or, in the tables of parity, of a feature and an axis
of the layout, and each precision. What a new feature or layout needs is therefore chosen without
being listed.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from itertools import combinations, product
from typing import Any

import pytest

Traits = frozenset[Hashable]


def one_in(every: int, cases: Sequence[tuple], names: Sequence[str] | None = None) -> list[Any]:
    """The cases as parameters of a test: one in `every` for each run, the others for `-m
    campaign`.
    """
    return [
        pytest.param(
            *case,
            id=None if names is None else names[index],
            marks=[pytest.mark.campaign] if index % every else [],
        )
        for index, case in enumerate(cases)
    ]


def cover(
    traits: Sequence[Set[Hashable]], costs: Sequence[float], always: Iterable[int] = ()
) -> set[int]:
    """Indices of cases that together have all traits, `always` among them. Greedy: the next case is
    the one with the most missing traits for its cost, the first of equals.
    """
    chosen = set(always)
    missing = set().union(*traits).difference(*(traits[index] for index in chosen))
    while missing:
        best = max(range(len(traits)), key=lambda i: (len(traits[i] & missing) / costs[i], -i))
        chosen.add(best)
        missing -= traits[best]
    return chosen


AXES = frozenset("tp sp cp dp pp ep etp zero a2a p2p allgather offload".split())
SCHEDULES = "gpipe|1f1b|interleaved|zero-bubble-v|zero-bubble|zbv|zb"
WORD = re.compile(
    rf"({SCHEDULES}|a2a\d*\+p2p|[tcdep]p\d+|etp\d+|sp|zero\d|shard\d|v\d|one|serial|mapping|"
    r"auto|kept|paired|a2a|p2p|allgather|offload|param-offload)"
)
FINE = re.compile(rf"zero\d|{SCHEDULES}")


def words_of(text: str) -> list[str]:
    """The words of a layout, "tp2 sp" or "tp2sp"; none of other text."""
    if not re.fullmatch(rf"({WORD.pattern}[ -]?)+", text):
        return []
    return [found[0] for found in WORD.finditer(text)]


def axes(layout: str) -> set[str]:
    """The axes of a layout: `tp` and `sp` of "tp2 sp serial"."""
    return {re.sub(r"\d+(\+p2p)?$", "", word) for word in layout.split()} & AXES


def traits_of_row(layout: str, *features: str) -> Traits:
    """Of a row of the table of parity: each feature with each axis and with each other, each pair
    of schedule and ZeRO stage, and the other words of the layout.
    """
    words = layout.split()
    fine = [word for word in words if FINE.fullmatch(word)]
    others = [word for word in words if not re.search(r"\d", word)]
    return frozenset(
        [
            *others,
            *product(features, axes(layout)),
            *combinations(features, 2),
            *combinations(sorted(fine), 2),
        ]
    )


def each_value(parameters: dict[str, Any]) -> Traits:
    """The values, for parameters that do not act on each other; of a layout its axes."""
    found: set[Hashable] = set()
    for name, value in parameters.items():
        shown = axes_of(value) or {repr(value)}
        found |= {(name, text) for text in shown}
    return frozenset(found)


def each_axis(parameters: dict[str, Any]) -> Traits:
    """The axes of layouts alone: other parameters have whatever value comes with them."""
    return frozenset(
        (name, axis) for name, value in parameters.items() for axis in ["", *axes_of(value)]
    )


def axes_of(value: Any) -> set[str]:
    """The axes of a layout; of a dataclass those of its numbers, where all above 2 are alike."""
    if isinstance(value, str):
        return {re.sub(r"\d+(\+p2p)?$", "", word) for word in words_of(value)}
    own = vars(value).items() if dataclasses.is_dataclass(value) else ()
    return {f"{name} {min(each, 3)}" for name, each in own if isinstance(each, int)}


def pairs(parameters: dict[str, Any]) -> Traits:
    """The pairs of values that a row of a table shows; of one parameter alone, its values."""
    for value in parameters.values():
        if hasattr(value, "layout"):
            # a narrow run takes three in one process and more steps: each pair is seen by `full`
            return traits_of_row(value.layout, value.feature) | {value.precision}
    given = {name: repr(value) for name, value in parameters.items()}
    if "layout" in given:
        del given["layout"]
        return traits_of_row(parameters["layout"], *given.values())
    return frozenset([*given.items(), *combinations(given.items(), 2)])


MOST_RANKS = 4  # of a default row: each rank's process costs seconds to start, on two cores


def ranks_of(parameters: dict[str, Any]) -> int:
    """Of a row that says how many it has (`world`); else 0."""
    return max((getattr(value, "world", 0) for value in parameters.values()), default=0)


def default_rows(
    given: Sequence[dict[str, Any]],
    ids: Sequence[str],
    traits: Callable[[dict[str, Any]], Traits] = pairs,
    always: Iterable[str] = (),
) -> set[int]:
    """Which rows of a table, given by their parameters, the default command runs: `always`, and a
    cover of what the rows of few ranks show. Of a table of many ranks alone, a cover of it all.
    """
    few = [index for index, each in enumerate(given) if ranks_of(each) <= MOST_RANKS]
    few = few or list(range(len(given)))
    named = {index for index, name in enumerate(ids) if name in set(always)}
    candidates = sorted({*few, *named})
    chosen = cover(
        [traits(given[index]) for index in candidates],
        [1.0 + ranks_of(given[index]) for index in candidates],
        [place for place, index in enumerate(candidates) if index in named],
    )
    return {candidates[place] for place in chosen}


def mark_tables(items: Iterable[pytest.Item]) -> None:
    """Mark as `full` what no default row of a table is."""
    tables: dict[tuple[str, Callable], list[Any]] = defaultdict(list)
    for item in items:
        given = hasattr(item, "callspec") and not item.get_closest_marker("campaign")
        given = given and not item.get_closest_marker("gpu")
        if given and (item.get_closest_marker("table") or "gloo_world" in item.fixturenames):
            tables[item.nodeid.split("[")[0], item.function].append(item)
    for rows in tables.values():
        marked = rows[0].get_closest_marker("table")
        options = marked.kwargs if marked else {"traits": each_axis}
        chosen = default_rows(
            [row.callspec.params for row in rows], [row.callspec.id for row in rows], **options
        )
        for index, row in enumerate(rows):
            if index not in chosen:
                row.add_marker("full")


# Files that take minutes, longest first: the processes of a whole run share files, and a long one
# at the end would keep one of them waiting.
LONG_FILES = tuple(
    f"tests/{name}.py"
    for name in (
        "parity/test_layouts",
        "slurm/test_slurm",
        "readme/test_readme",
        "unit/checkpoint/test_reshard",
        "kernels/test_manifest",
        "parity/test_check_parity",
        "unit/zero/test_live_bytes",
        "unit/distributed/test_processes",
        "unit/zero/test_zero",
        "unit/zero/test_streams",
        "parity/test_mutants",
        "oracle/test_oracle",
        "faults/test_pipeline_faults",
        "faults/test_silent_rank",
        "faults/test_training_kill",
    )
)
