"""The steps of a write by name: the places where a process may die.

Each change that outlives a process stands in a `step`. Whoever proves that nothing is lost and
nothing comes twice observes the steps, and kills the process before and after each.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

# Called with the name of a step, and whether it is over.
Observer = Callable[[str, bool], None]

_observers: list[Observer] = []


def observe(observer: Observer) -> None:
    """Tell of each step from now on, in the thread that takes it."""
    _observers.append(observer)


@contextmanager
def step(name: str) -> Generator[None]:
    """A change that outlives the process is made within.

    Args:
        name: What is done, such as `create stream`.
    """
    for observer in _observers:
        observer(name, False)
    yield
    for observer in _observers:
        observer(name, True)
