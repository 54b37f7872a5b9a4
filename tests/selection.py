"""Which tests the default command runs.

Three sizes of a run: the default (minutes), `-m "not campaign"` (everything but the campaigns;
`bash scripts/test.sh full`) and `-m campaign` (hours). Tests that only the second one runs are
marked `full`: by hand, or by code where they are rows of a table.

A table is a parametrized test that is marked `table`, with these arguments, that has several
parameters, or that runs on several processes (`gloo_world`), with `each_axis`:
- traits: gives what a row shows, of its parameters; by default `each_value`;
- always: ids of rows that the default command runs as well.

Its default rows show every trait that any of its rows of at most MOST_RANKS ranks shows: with
`each_value` every value of a parameter or, in the tables of parity, every feature, axis of the
layout and precision. What a new feature or layout needs is therefore chosen without being listed.
Pairs of values are seen by `full`.

Of a parametrized test that is marked `default("id", ...)` the default command runs these rows.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
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


def without_sizes(words: Iterable[str]) -> set[str]:
    """Words of a layout without their numbers: `tp` of "tp2"."""
    return {re.sub(r"\d+(\+p2p)?$", "", word) for word in words}


def axes(layout: str) -> set[str]:
    """The axes of a layout: `tp` and `sp` of "tp2 sp serial"."""
    return without_sizes(layout.split()) & AXES


def traits_of_row(row: Any) -> Traits:
    """Of a row of the table of parity: its feature, its precision, and those of its layout."""
    return frozenset([row.feature, row.precision, *layout_traits(row.layout)])


def layout_traits(layout: str) -> set[str]:
    """Axes, ZeRO stage, schedule, and the other words of a layout without a number."""
    words = layout.split()
    return axes(layout) | {
        word for word in words if FINE.fullmatch(word) or not re.search(r"\d", word)
    }


def each_value(parameters: dict[str, Any]) -> Traits:
    """The values, for parameters that do not act on each other; of a layout its axes."""
    found: set[Hashable] = set()
    for name, value in parameters.items():
        if hasattr(value, "layout") and hasattr(value, "feature"):
            return traits_of_row(value)
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
        return without_sizes(words_of(value))
    own = vars(value).items() if dataclasses.is_dataclass(value) else ()
    return {f"{name} {min(each, 3)}" for name, each in own if isinstance(each, int)}


MOST_RANKS = 4  # of a default row: each rank's process costs seconds to start, on two cores


def ranks_of(parameters: dict[str, Any]) -> int:
    """Of a row that has the number (`world`); else 0."""
    return max((getattr(value, "world", 0) for value in parameters.values()), default=0)


def cost_of(parameters: dict[str, Any]) -> float:
    """Of a row, in CPU time, roughly: its ranks, times the micro-batches of a step that come with
    some words of its layout.
    """
    layout = " ".join(str(getattr(value, "layout", "")) for value in parameters.values())
    return 1.0 + ranks_of(parameters) * (1 + ("pp" in layout) + 2 * ("paired" in layout))


def default_rows(
    given: Sequence[dict[str, Any]],
    ids: Sequence[str],
    traits: Callable[[dict[str, Any]], Traits] = each_value,
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
        [cost_of(given[index]) for index in candidates],
        [place for place, index in enumerate(candidates) if index in named],
    )
    return {candidates[place] for place in chosen}


def named_rows(rows: Sequence[pytest.Item], names: Sequence[str]) -> set[int]:
    """Which rows `default(names)` chooses; all of those that were asked for by their id.

    Raises pytest.UsageError for a name that no row has.
    """
    ids = [row.callspec.id for row in rows]
    unknown = sorted(set(names) - set(ids))
    if unknown and not any("::" in str(each) for each in rows[0].config.args):
        raise pytest.UsageError(f"{rows[0].location[2]}: no row is called {unknown}, only {ids}")
    return {i for i, each in enumerate(ids) if each in names} or set(range(len(rows)))


def mark_tables(items: Iterable[pytest.Item]) -> None:
    """Mark as `full` what no default row of a table is."""
    tables: dict[tuple[str, Callable], list[Any]] = defaultdict(list)
    for item in items:
        given = hasattr(item, "callspec") and not item.get_closest_marker("campaign")
        given = given and not (item.get_closest_marker("gpu") or item.get_closest_marker("full"))
        named = item.get_closest_marker("table") or item.get_closest_marker("default")
        if given and (named or "gloo_world" in item.fixturenames or len(item.callspec.params) > 1):
            tables[item.nodeid.split("[")[0], item.function].append(item)
    for rows in tables.values():
        if named := rows[0].get_closest_marker("default"):
            chosen = named_rows(rows, named.args)
        else:
            marked = rows[0].get_closest_marker("table")
            on_ranks = "gloo_world" in rows[0].fixturenames
            options = marked.kwargs if marked else {"traits": each_axis} if on_ranks else {}
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
        "readme/test_readme",  # the quickstart
        "parity/test_layouts",
        "oracle/test_oracle",
        "unit/training/test_training",
        "unit/checkpoint/test_reshard",
        "kernels/test_attention",
        "unit/zero/test_zero",
        "faults/test_goodput",
        "unit/zero/test_live_bytes",
        "kernels/test_self_check",
        "parity/test_bits",
        "unit/checkpoint/test_checkpoint_balance",
        "unit/checkpoint/test_tiers",
    )
)
