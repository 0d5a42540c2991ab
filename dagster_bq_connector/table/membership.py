"""Which part of a slice each row belongs to, column by column."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dagster_bq_connector.errors import PartitionError
from dagster_bq_connector.schema.types import SCALARS
from dagster_bq_connector.table.literals import key_value
from dagster_bq_connector.table.row_slice import BoundSlice, KeyFilter, RowFilter
from dagster_bq_connector.table.slice import TimeFilter

Codes: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"

SHOWN = 10  # partition keys in an error
_compute: Any = pc  # its stubs know a part of what it takes


class _Classes(Protocol):
    """Divides the values of a column into classes that no filter tells apart further."""

    size: int

    def of(self, values: pa.Array[Any]) -> Codes:
        """The class of each value, from 0; -1 for null and for what no filter knows."""
        ...

    def held_by(self, filter_: RowFilter) -> set[int]:
        """The classes whose values pass a filter."""
        ...


class _Values:
    """The values that filters name one by one, each a class."""

    def __init__(self, filters: Sequence[RowFilter], type_name: str) -> None:
        self._type = type_name
        values = dict.fromkeys(value for filter_ in filters for value in self._named(filter_))
        self._numbers = {value: number for number, value in enumerate(values)}
        self._known: Any = pa.array(list(values), SCALARS[type_name].wire)
        self.size = len(self._numbers)

    def of(self, values: pa.Array[Any]) -> Codes:
        found = _compute.index_in(values, self._known, skip_nulls=True)
        return found.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)

    def held_by(self, filter_: RowFilter) -> set[int]:
        return {self._numbers[value] for value in self._named(filter_)}

    def _named(self, filter_: RowFilter) -> list[Any]:
        if isinstance(filter_, TimeFilter):
            return filter_.values(self._type)
        return [key_value(key, self._type, filter_.column) for key in filter_.keys]


class _Times:
    """The times between the ends of all windows, each a class."""

    def __init__(self, filters: Sequence[RowFilter], type_name: str) -> None:
        self._type = type_name
        ends = {end for filter_ in filters for window in self._bounds(filter_) for end in window}
        self._ends = np.array(sorted(ends), dtype=np.int64)
        self.size = len(ends) + 1

    def of(self, values: pa.Array[Any]) -> Codes:
        whole = pa.int32() if isinstance(values, pa.Date32Array) else pa.int64()
        numbers = values.cast(whole).fill_null(0).to_numpy(zero_copy_only=False)
        classes = np.searchsorted(self._ends, numbers.astype(np.int64), side="right")
        return np.where(values.is_valid().to_numpy(zero_copy_only=False), classes, -1)

    def held_by(self, filter_: RowFilter) -> set[int]:
        held: set[int] = set()
        for start, end in self._bounds(filter_):
            first, last = np.searchsorted(self._ends, [start, end])
            held.update(range(int(first) + 1, int(last) + 1))
        return held

    def _bounds(self, filter_: RowFilter) -> list[tuple[int, int]]:
        assert isinstance(filter_, TimeFilter)  # others are values
        bounds = (filter_.bounds(window, self._type) for window in filter_.windows)
        return [(self._number(start), self._number(end)) for start, end in bounds]

    def _number(self, moment: date) -> int:
        """What Arrow stores of a moment: days or microseconds since 1970."""
        stored: Any = pa.scalar(moment, SCALARS[self._type].wire)
        return int(stored.value)


class Membership:
    """Counts the rows of a slice by part, and refuses those that belong to none."""

    def __init__(self, bound: BoundSlice) -> None:
        """Look at the filters of a slice that compares columns alone.

        Raises:
            PartitionError: A key does not fit its column.
        """
        self._bound = bound
        grouped: dict[tuple[str, bool], list[RowFilter]] = {}
        for _, filters in bound.slice.parts:
            for filter_ in filters:
                grouped.setdefault(self._group(filter_), []).append(filter_)
        self._classes: dict[tuple[str, bool], _Classes] = {
            group: (_Values if group[1] else _Times)(filters, bound.types[group[0]])
            for group, filters in grouped.items()
        }
        self._parts = self._parts_by_classes()

    def count(self, batch: pa.RecordBatch, first: int) -> dict[str, int]:
        """The number of rows by part.

        Args:
            batch: Rows as they travel.
            first: Position of its first row in the data, for the error.

        Raises:
            PartitionError: A row belongs to no part, or the data lacks a column.
        """
        codes = {group: c.of(self._column(batch, group[0])) for group, c in self._classes.items()}
        owners = np.full(batch.num_rows, -1, dtype=np.int64)
        for groups, parts in self._parts.items():
            open_ = np.flatnonzero(owners < 0)
            owners[open_] = self._owners(groups, parts, [codes[group][open_] for group in groups])
        if len(strays := np.flatnonzero(owners < 0)):
            raise PartitionError(self._stray(batch, int(strays[0]), first))
        numbers, counts = np.unique(owners, return_counts=True)
        keys = [key for key, _ in self._bound.slice.parts]
        return {
            keys[number]: count
            for number, count in zip(numbers.tolist(), counts.tolist(), strict=True)
        }

    def _group(self, filter_: RowFilter) -> tuple[str, bool]:
        """The filters that one kind of classes serves: those of a column, by value or by time."""
        by_value = self._bound.types[filter_.column] in ("STRING", "INTEGER")
        return filter_.column, by_value or isinstance(filter_, KeyFilter)

    def _parts_by_classes(
        self,
    ) -> dict[tuple[tuple[str, bool], ...], dict[tuple[int, ...], int]]:
        """For each set of columns that parts filter by: classes of these, to the part's number."""
        found: dict[tuple[tuple[str, bool], ...], dict[tuple[int, ...], int]] = {}
        for number, (_, filters) in enumerate(self._bound.slice.parts):
            held: dict[tuple[str, bool], set[int]] = {}
            for filter_ in filters:
                group = self._group(filter_)
                classes = self._classes[group].held_by(filter_)
                held[group] = held[group] & classes if group in held else classes
            parts = found.setdefault(tuple(sorted(held)), {})
            for combination in itertools.product(*(held[group] for group in sorted(held))):
                parts.setdefault(combination, number)
        return found

    def _owners(
        self,
        groups: tuple[tuple[str, bool], ...],
        parts: dict[tuple[int, ...], int],
        codes: list[Codes],
    ) -> Codes:
        """The number of the part of each row, -1 for none."""
        combined = np.zeros(len(codes[0]), dtype=np.int64)
        for group, column in zip(groups, codes, strict=True):
            # Numbered anew at each column, so that the product of many columns fits.
            combined = np.unique(combined, return_inverse=True)[1]
            combined = combined * (self._classes[group].size + 1) + column + 1
        _, rows, inverse = np.unique(combined, return_index=True, return_inverse=True)
        owners = [parts.get(tuple(int(column[row]) for column in codes), -1) for row in rows]
        return np.array(owners, dtype=np.int64)[inverse]

    def _column(self, batch: pa.RecordBatch, name: str) -> pa.Array[Any]:
        for index, known in enumerate(batch.schema.names):
            if known.casefold() == name.casefold():
                return batch.column(index)
        raise PartitionError(
            f"The data lacks the column {name!r}, which decides the partition of a row of "
            f"{self._bound.slice.table}."
        )

    def _stray(self, batch: pa.RecordBatch, row: int, first: int) -> str:
        values = {
            name: self._column(batch, name).slice(row, 1).cast(pa.string())[0].as_py()
            for name in self._bound.types
        }
        return stray_text(self._bound, first + row, values)


def stray_text(bound: BoundSlice, row: int, values: Mapping[str, str | None]) -> str:
    """What is wrong with a row that belongs to no part of a slice.

    What has been written by then is for those to add who know.

    Args:
        bound: The slice.
        row: Position of the row in the data.
        values: What the row has in the columns and expressions of the filters.
    """
    held = ", ".join(f"{name!r} is {value or 'null'}" for name, value in values.items())
    keys = [key for key, _ in bound.slice.parts]
    shown = ", ".join(keys[:SHOWN]) + (f" and {len(keys) - SHOWN} more" * (len(keys) > SHOWN))
    return (
        f"Row {row} belongs to another partition: {held}, and the operation writes {shown} of "
        f"{bound.slice.table}. Filter the rows, or run that partition."
    )
