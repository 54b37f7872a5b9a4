"""Two computations of which one runs at a time: who runs when, and what becomes of the other one
when one of them fails.
"""

import threading

import pytest
import torch

from megatron.distributed.turns import AbandonedError, Turns, give_way


def speaker(said: list[str], name: str, times: int):
    """Says its name and a number, and gives way after each; returns the name."""

    def speak() -> str:
        for number in range(times):
            said.append(f"{name}{number}")
            give_way()
        said.append(f"{name} ends")
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
    said: list[str] = []
    turns = Turns()
    for _ in range(2):  # the thread is kept
        said.clear()
        found = turns.together(speaker(said, "a", first), speaker(said, "b", second))
        assert found == ("a", "b") and " ".join(said) == order
    give_way()  # nobody is there
    assert Turns.current is None


def test_each_has_a_thread_that_differentiates():
    threads = set()

    def work():
        threads.add(threading.current_thread())
        assert torch.is_grad_enabled()
        give_way()

    Turns().together(work, work)
    assert len(threads) == 2


def test_one_that_gives_way_within_a_backward_pass():
    said: list[str] = []

    class Exchanged(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, dy):
            said.append("dy is on its way")
            give_way()
            said.append("dy is there")
            return 2 * dy

    x = torch.ones(3, requires_grad=True)
    y = Exchanged.apply(x)

    def forward() -> torch.Tensor:
        said.append("forward pass")
        other = torch.ones(3, requires_grad=True)
        return (3 * other).sum()

    _, z = Turns().together(lambda: y.sum().backward(), forward)
    assert said == ["dy is on its way", "forward pass", "dy is there"]
    assert torch.equal(x.grad, torch.full((3,), 2.0)) and z.requires_grad


@pytest.mark.parametrize("fails", [0, 1])
@pytest.mark.parametrize("late", [False, True])
def test_a_failure_ends_both(fails, late):
    ends: dict[int, BaseException] = {}

    def work(index: int):
        def run() -> None:
            try:
                if late:
                    give_way()
                if index == fails:
                    raise ValueError("no such thing")
                give_way()
                give_way()
            except BaseException as error:
                ends[index] = error
                raise

        return run

    turns = Turns()
    with pytest.raises(ValueError, match="no such thing"):
        turns.together(work(0), work(1))
    assert Turns.current is None and isinstance(ends[fails], ValueError)
    if late or fails == 1:  # else it never began
        assert isinstance(ends[1 - fails], AbandonedError)
    said: list[str] = []
    turns.together(speaker(said, "a", 1), speaker(said, "b", 1))
    assert len(said) == 4
