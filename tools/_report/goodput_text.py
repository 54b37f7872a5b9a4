"""Goodput as text, for tools/goodput.py and report pages."""

from __future__ import annotations

from megatron.tools._report.goodput_account import CAUSES, Goodput

MEANINGS = {"productive": "steps that changed the weights", **CAUSES, "other": "not explained"}


def headline(found: Goodput) -> str:
    """One line."""
    return (
        f"goodput {found.share:.1%} of {found.wall:.1f} s, {found.starts} starts, "
        f"{found.replayed:.0f} steps repeated, {found.skipped:.0f} skipped"
    )


def fault(found: Goodput) -> str:
    """Why the causes do not add up to the wall time; empty when they do."""
    if found.adds_up:
        return ""
    much = f"all but {found.other:.1f} s of" if found.other > 0 else f"{-found.other:.1f} s beyond"
    return (
        f"the causes explain {much} the wall time, which is more than 1%: events are missing in "
        "events.jsonl, or the clocks of the nodes differ"
    )
