"""Two computations of which one runs at a time: who runs when, and what becomes of the other one
when one of them fails.
"""

import pytest

from megatron.distributed.interleaver import AbandonedError, Interleaver, yield_turn


def speaker(journal: list[str], name: str, times: int):
    """Logs its name and a number, and gives way after each; returns the name."""

    def speak() -> str:
        for number in range(times):
            journal.append(f"{name}{number}")
            yield_turn()
        journal.append(f"{name} ends")
        return name

    return speak


@pytest.mark.parametrize(
    "first, second, order",
    [
        (2, 2, "a0 b0 a1 b1 a ends b ends"),
        (3, 1, "a0 b0 a1 b ends a2 a ends"),
        (0, 2, "a ends b0 b1 b ends"),
        (2, 0, "a0 b ends a1 a ends"),
    ],
)
def test_they_take_turns(first, second, order):
    journal: list[str] = []
    turns = Interleaver()
    for _ in range(2):  # the thread is kept
        journal.clear()
        found = turns.run_overlapped(speaker(journal, "a", first), speaker(journal, "b", second))
        assert found == ("a", "b") and " ".join(journal) == order
    yield_turn()  # no other pass runs
    assert Interleaver.current is None


@pytest.mark.parametrize("fails", [0, 1])
@pytest.mark.parametrize("late", [False, True])
def test_a_failure_ends_both(fails, late):
    ends: dict[int, BaseException] = {}

    def work(index: int):
        def run() -> None:
            try:
                if late:
                    yield_turn()
                if index == fails:
                    raise ValueError("no such thing")
                yield_turn()
                yield_turn()
            except BaseException as error:
                ends[index] = error
                raise

        return run

    turns = Interleaver()
    with pytest.raises(ValueError, match="no such thing"):
        turns.run_overlapped(work(0), work(1))
    assert Interleaver.current is None and isinstance(ends[fails], ValueError)
    if late or fails == 1:  # else it never began
        assert isinstance(ends[1 - fails], AbandonedError)
    journal: list[str] = []  # the thread lives on
    turns.run_overlapped(speaker(journal, "a", 1), speaker(journal, "b", 1))
    assert len(journal) == 4
