"""Where values stand: in which column, and in which rows of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dagster_bq_connector.errors import FailedRow

Numbers: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"
# Positions of values, to the rows that hold them and, for each row, which of the positions it is.
Rows: TypeAlias = Callable[[Numbers], tuple[Numbers, Numbers]]

_compute: Any = pc  # its stubs know a part of what it takes


def _same(positions: Numbers) -> tuple[Numbers, Numbers]:
    return positions, np.arange(len(positions))


@dataclass(frozen=True, slots=True)
class Place:
    """The place of an array within a batch.

    Attributes:
        path: The column, with dots for fields of structs.
        failed: Takes the rows that fail, by their position in the batch.
        rows: Finds the rows of values.
    """

    path: str
    failed: dict[int, FailedRow]
    rows: Rows = _same

    def fail(self, positions: Numbers, reasons: Sequence[str] | str) -> None:
        """Fail the rows of the values at `positions`, each for its reason or all for one."""
        rows, which = self.rows(positions)
        for row, position in zip(rows.tolist(), which.tolist(), strict=True):
            reason = reasons if isinstance(reasons, str) else reasons[position]
            self.failed.setdefault(row, FailedRow(row, reason, self.path))

    def fail_values(self, array: pa.Array[Any], mask: Any, reason: str) -> bool:
        """Fail the rows of the values where `mask` is true. Each reason begins with its value."""
        bad = where(mask)
        if len(bad):
            values = texts(array.take(pa.array(bad, pa.int64())))
            self.fail(bad, [f"{value} {reason}" for value in values])
        return len(bad) > 0

    def field(self, name: str) -> Place:
        """The field of a struct whose values stand here."""
        return replace(self, path=f"{self.path}.{name}")

    def elements(self, array: Any) -> Place:
        """The elements of a list that stands here, as `flatten` gives them."""

        def rows(positions: Numbers) -> tuple[Numbers, Numbers]:
            lengths = _compute.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
            owners = np.repeat(np.arange(len(array)), lengths)
            return self.rows(owners[positions])

        return replace(self, rows=rows)

    def entries(self, indices: Numbers) -> Place:
        """The entries of a dictionary; `indices` has for each value here its entry, or -1."""

        def rows(positions: Numbers) -> tuple[Numbers, Numbers]:
            users = np.flatnonzero(np.isin(indices, positions))
            numbers, which = self.rows(users)
            return numbers, np.searchsorted(positions, indices[users[which]])

        return replace(self, rows=rows)


def where(mask: Any) -> Numbers:
    """The positions at which a boolean array is true."""
    if not mask.true_count:
        return np.empty(0, dtype=np.int64)
    return np.flatnonzero(_compute.fill_null(mask, False).to_numpy(zero_copy_only=False))


def texts(array: pa.Array[Any]) -> list[str]:
    """Values for people to read."""
    try:
        return [str(text) for text in array.cast(pa.string()).to_pylist()]
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):  # bytes; intervals
        return [str(value) for value in array.to_pylist()]
