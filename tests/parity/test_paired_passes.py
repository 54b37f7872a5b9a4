"""--overlap-moe-expert-parallel-comm: tokens travel while the other pass of a pair computes."""

from __future__ import annotations

from unittest import mock

from parity.layouts import Row
from parity.worker import run_case

from megatron.distributed.interleaver import Interleaver
from megatron.model.experts import dispatch, experts


class Journal:
    """What each pass of a pair does: exchanges that leave and that are awaited, and products."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, int]] = []  # what, of which pass of a pair, number
        self.count = 0

    def note(self, what: str, number: int) -> None:
        turns = Interleaver.current
        self.events.append((what, -1 if turns is None else turns.running, number))

    def start(self, real):
        def start(*args):
            self.count += 1
            number, handle = self.count, real(*args)
            self.note("leaves", number)
            wait = handle.wait

            def awaited():
                self.note("awaited", number)
                return wait()

            handle.wait = awaited
            return handle

        return start

    def product(self, real):
        def product(*args, **kwargs):
            self.note("product", 0)
            return real(*args, **kwargs)

        return product


def run_with_journal(flags: tuple[str, ...]) -> list[tuple[str, int, int]]:
    journal = Journal()
    start, product = dispatch.start_all_to_all_rows, experts.expert_gemms
    with (
        mock.patch.object(dispatch, "start_all_to_all_rows", journal.start(start)),
        mock.patch.object(experts, "expert_gemms", journal.product(product)),
    ):
        run_case(flags)
    return journal.events


def test_the_exchange_overlaps_the_gemms_of_the_other_pass(gloo_world):
    """In each pair of layers the backward pass sends two tensors out, the forward pass three: of
    the four journeys the two next to experts' GEMMs of the other pass overlap them,
    the two others overlap the rest of its layer.
    """
    row = Row("dp2 ep2 paired", "moe")
    for events in gloo_world(2).run(run_with_journal, row.flags(layout=True)):
        leaves = {number: at for at, (what, _, number) in enumerate(events) if what == "leaves"}
        overlapped = {"products": 0, "other": 0, "none": 0}
        for at, (what, own, number) in enumerate(events):
            if what != "awaited" or own < 0:
                continue
            between = [event for event in events[leaves[number] + 1 : at] if event[1] != own]
            if any(what == "product" for what, *_ in between):
                overlapped["products"] += 1
            else:
                overlapped["other" if between else "none"] += 1
        # steps, pairs of layers that both have experts, pairs of micro-batches in each step: 4
        # micro-batches on each rank
        pairs = 2 * 2 * 3
        assert sum(overlapped.values()) == 6 * pairs
        assert overlapped["products"] >= 3 * pairs and overlapped["none"] == 0, overlapped
