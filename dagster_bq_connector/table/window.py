"""Windows of time, compared by their instants whatever the clocks show."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """The time from `start` up to before `end`; both know their time zone.

    Windows of the same instants are equal. Python compares two datetimes of one zone by what its
    clocks show, which is the same twice when they go back.
    """

    start: datetime
    end: datetime

    @property
    def instants(self) -> tuple[datetime, datetime]:
        """Its ends in UTC, which can be compared."""
        return self.start.astimezone(UTC), self.end.astimezone(UTC)

    @property
    def length(self) -> timedelta:
        """The time that passes in it, whatever the clocks show."""
        start, end = self.instants
        return end - start

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Window) and self.instants == other.instants

    def __hash__(self) -> int:
        return hash(self.instants)

    def __str__(self) -> str:
        return f"[{self.start.isoformat()}, {self.end.isoformat()})"


def merged_windows(windows: Iterable[Window]) -> list[Window]:
    """Windows that touch become one: a filter of 31 days is one range."""
    merged: list[Window] = []
    reached = datetime.min.replace(tzinfo=UTC)
    for (start, end), window in sorted(
        ((window.instants, window) for window in windows), key=lambda found: found[0]
    ):
        if merged and start <= reached:
            if end > reached:
                merged[-1] = Window(merged[-1].start, window.end)
        else:
            merged.append(window)
        reached = max(reached, end)
    return merged


def comes_twice(moment: datetime) -> bool:
    """Whether the clocks show a moment twice, so that they do not tell what is before it.

    The first of all such moments is none of them: what they show earlier is before it.
    """
    earlier, here = (
        at.replace(fold=0).astimezone(UTC) < at.replace(fold=1).astimezone(UTC)
        for at in (moment - timedelta(microseconds=1), moment)
    )
    return here and (earlier or moment.fold == 1)
