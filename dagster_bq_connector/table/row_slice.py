"""`RowSlice`: rows of one table that filters tell apart, whatever its partitions are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from google.cloud.bigquery import SchemaField

from dagster_bq_connector.errors import PartitionError
from dagster_bq_connector.schema.types import type_name
from dagster_bq_connector.table.literals import key_value, literal, quoted, refuse_long
from dagster_bq_connector.table.options import (
    RangePartitioning,
    TableOptions,
    TimePartitioning,
)
from dagster_bq_connector.table.ref import TableRef
from dagster_bq_connector.table.slice import INGESTION_TIME, TimeFilter, find_column

Partitioning: TypeAlias = TimePartitioning | RangePartitioning | None
# A SQL expression over the columns of a table, to the type of its values.
ExpressionType: TypeAlias = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class KeyFilter:
    """Rows whose `column` holds one of `keys`. The literals follow the column's type.

    Attributes:
        column: A column, or any SQL expression over the columns of the table.
        keys: The partition keys.
    """

    column: str
    keys: tuple[str, ...]

    def sql(self, type_name: str, name: str | None = None) -> str:
        """The filter as SQL.

        Args:
            type_name: What the column is in the table: `STRING`, `INTEGER`, `BOOLEAN`, `DATE`,
                `DATETIME`, `TIMESTAMP`, `NUMERIC` or `BIGNUMERIC`.
            name: How the column is written in SQL; its quoted name when None.

        Raises:
            PartitionError: A key cannot be of that type, or there is no key.
        """
        if not self.keys:
            raise PartitionError(f"No partition key was given for column {self.column!r}.")
        values = [literal(key_value(key, type_name, self.column)) for key in self.keys]
        return f"{name or quoted(self.column)} IN ({', '.join(values)})"


def listed(keys: Iterable[str]) -> list[str]:
    """Partition keys as a list.

    Raises:
        PartitionError: They are one text, whose letters would be the keys, or no list at all.
    """
    given: object = keys
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise PartitionError(f"The partition keys are {given!r}: pass a list of texts.")
    return list(keys)


RowFilter: TypeAlias = KeyFilter | TimeFilter
Part: TypeAlias = tuple[str, tuple[RowFilter, ...]]


@dataclass(frozen=True)
class RowSlice:
    """Some rows of one table, in parts of which none overlap.

    Attributes:
        table: The table.
        parts: Each partition key of the operation, with the filters that all hold for its rows.
        options: The layout of a table that is created.

    Raises:
        PartitionError: There is no part, or one without a filter, which would be every row; or the
            table's address names a partition, to which the filters would not keep.
    """

    table: TableRef
    parts: tuple[Part, ...]
    options: TableOptions | None = None

    def __post_init__(self) -> None:
        if not self.parts:
            raise PartitionError(f"No partition of {self.table} was given: name at least one.")
        if self.table.partition:
            raise PartitionError(
                f"{self.table} is one partition, and a slice takes its rows from the whole table: "
                f"name {self.table.at(None)}, with a filter of the column that partitions it, too."
            )
        for key, filters in self.parts:
            if not filters:
                raise PartitionError(
                    f"Partition {key!r} of {self.table} has no filter, so it would be the whole "
                    "table: name the column that holds its key."
                )

    @classmethod
    def by_keys(
        cls,
        table: str | TableRef,
        column: str,
        keys: Iterable[str],
        options: TableOptions | None = None,
    ) -> RowSlice:
        """The rows whose column holds one of some keys, a part for each.

        Args:
            table: The table.
            column: A column, or any SQL expression over the columns of the table.
            keys: The keys, as text; compared as what the column is.
            options: The layout of a table that is created.

        Raises:
            PartitionError: The keys are no list of texts, or there is none.
        """
        found: list[object] = [*listed(keys)]
        for key in found:
            if not isinstance(key, str):
                raise PartitionError(f"{key!r} is no partition key of {table}: write it as text.")
        parts = tuple((key, (KeyFilter(column, (key,)),)) for key in map(str, found))
        return cls(TableRef.parse(table), parts, options)

    def resolve(self, project: str) -> RowSlice:
        """The same slice with the project that its table may lack."""
        return replace(self, table=TableRef.parse(self.table, project=project))

    def bind(
        self,
        columns: Sequence[SchemaField],
        partitioning: Partitioning,
        expression_type: ExpressionType,
    ) -> BoundSlice:
        """The slice with the types of what its filters compare.

        Args:
            columns: The columns of the table.
            partitioning: How the table is partitioned.
            expression_type: Gives the type of what is no column; asked once for each.

        Raises:
            PartitionError: An expression that the table does not take, or an array.
        """
        types: dict[str, str] = {}
        expressions: set[str] = set()
        for name in dict.fromkeys(f.column for _, filters in self.parts for f in filters):
            if column := find_column(columns, name):
                if column.mode == "REPEATED":
                    raise PartitionError(
                        f"Column {name!r} of {self.table} is an array, which holds no one key: use "
                        "another column, or an expression."
                    )
                types[name] = type_name(column)
            elif name == INGESTION_TIME:
                types[name] = "TIMESTAMP"
            else:
                types[name] = expression_type(name)
                expressions.add(name)
        return BoundSlice(self, types, frozenset(expressions), self._all_rows(partitioning))

    def _all_rows(self, partitioning: Partitioning) -> str:
        """What a required partition filter needs beside the filters; empty when they are one."""
        column = partitioning.column or INGESTION_TIME if partitioning else None
        if column is not None and all(
            any(filter_.column.casefold() == column.casefold() for filter_ in filters)
            for _, filters in self.parts
        ):
            return ""
        return every_row(partitioning)


@dataclass(frozen=True)
class BoundSlice:
    """A slice of a table whose columns are known.

    Attributes:
        slice: The slice.
        types: The type of each column and expression that its filters compare.
        expressions: Those of them that are no columns.
        every_row: What a required partition filter needs beside the filters; may be empty.
    """

    slice: RowSlice
    types: Mapping[str, str]
    expressions: frozenset[str]
    every_row: str

    def sql(self) -> str:
        """The rows of the slice as SQL that a table takes which requires a partition filter.

        Raises:
            PartitionError: A key does not fit its column, or BigQuery takes no SQL of that size.
        """
        parts = _merged([filters for _, filters in self.slice.parts])
        predicate = " OR ".join(f"({self._all(filters)})" for filters in parts)
        if self.every_row:
            predicate = f"({predicate}) AND {self.every_row}"
        return refuse_long(predicate, self.slice.table)

    def part_number(self) -> str:
        """SQL that gives the number of the part that a row belongs to, NULL for none."""
        cases = [
            f"WHEN {self._all(filters)} THEN {number}"
            for number, (_, filters) in enumerate(self.slice.parts)
        ]
        return refuse_long(f"CASE {' '.join(cases)} END", self.slice.table)

    @property
    def names(self) -> list[str]:
        """The columns and expressions of the filters, as they are written in SQL."""
        return [self._name(column) for column in self.types]

    def _all(self, filters: tuple[RowFilter, ...]) -> str:
        return " AND ".join(
            f"({filter_.sql(self.types[filter_.column], self._name(filter_.column))})"
            for filter_ in filters
        )

    def _name(self, column: str) -> str:
        if column in self.expressions:
            return f"({column})"
        return column if column == INGESTION_TIME else quoted(column)


def every_row(partitioning: Partitioning) -> str:
    """A filter that every row passes, and a table takes that requires a partition filter.

    Args:
        partitioning: How the table is partitioned; the filter is empty when it is not.
    """
    if partitioning is None:
        return ""
    name = INGESTION_TIME if partitioning.column is None else quoted(partitioning.column)
    return f"({name} IS NULL OR {name} IS NOT NULL)"


def _merged(parts: list[tuple[RowFilter, ...]]) -> list[tuple[RowFilter, ...]]:
    """The same rows in fewer parts: those that differ in one filter become one."""
    for position in range(max(map(len, parts))):
        groups: dict[object, list[tuple[RowFilter, ...]]] = {}
        for filters in parts:
            at = filters[position] if position < len(filters) else None
            what = (type(at), at.column) if at else None
            groups.setdefault((filters[:position], what, filters[position + 1 :]), []).append(
                filters
            )
        parts = [_joined(group, position) for group in groups.values()]
    return parts


def _joined(group: list[tuple[RowFilter, ...]], position: int) -> tuple[RowFilter, ...]:
    first = group[0]
    if len(group) == 1 or position >= len(first):
        return first
    filters = [filters[position] for filters in group]
    keys = tuple(dict.fromkeys(key for filter_ in filters for key in filter_.keys))
    joined: RowFilter = KeyFilter(first[position].column, keys)
    if isinstance(first[position], TimeFilter):
        times = [filter_ for filter_ in filters if isinstance(filter_, TimeFilter)]
        windows = tuple(dict.fromkeys(w for filter_ in times for w in filter_.windows))
        joined = TimeFilter(joined.column, windows, keys)
    return (*first[:position], joined, *first[position + 1 :])
