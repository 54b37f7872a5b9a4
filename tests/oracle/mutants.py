"""Changes of meaning, one function at a time: each makes the program train something else than its
flags ask for, and each must be found.

A mutant replaces functions of the product while its `patch` is open. `where` names the case of
cases.py in which the oracle must notice it, or the file of tests in which one must fail.
mutants_model.py and mutants_training.py hold the mutants; tests/parity/mutants.py has those of
layout: sums over ranks, orders of messages, shards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

Make = Callable[[Callable], Callable]


class Mutant(NamedTuple):
    """`patches`: (owner, name of its function, what makes a new one of the original)."""

    area: str
    name: str
    where: str
    patches: tuple[tuple[Any, str, Make], ...]

    @contextlib.contextmanager
    def patch(self) -> Iterator[None]:
        """While open the product is the mutant."""
        with contextlib.ExitStack() as stack:
            for owner, name, make in self.patches:
                changed = make(getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, changed))
            yield


MUTANTS: list[Mutant] = []


def mutant(area: str, name: str, where: str, owner: Any, function: str) -> Callable[[Make], Make]:
    """Registers a mutant: the decorated function makes the changed function of the original."""

    def register(make: Make) -> Make:
        MUTANTS.append(Mutant(area, name, where, ((owner, function, make),)))
        return make

    return register


def also(owner: Any, function: str) -> Callable[[Make], Make]:
    """One more patch of the last mutant."""

    def register(make: Make) -> Make:
        MUTANTS[-1] = MUTANTS[-1]._replace(patches=(*MUTANTS[-1].patches, (owner, function, make)))
        return make

    return register


def to(value: Any) -> Make:
    """The function gives way to `value`."""
    return lambda original: value


def by_name(name: str) -> Mutant:
    """Raises StopIteration for a name that no mutant has."""
    return next(each for each in all_mutants() if each.name == name)


def all_mutants() -> list[Mutant]:
    """Every mutant, those of the model first."""
    from oracle import mutants_model, mutants_training  # noqa: F401  # they register themselves

    return MUTANTS
