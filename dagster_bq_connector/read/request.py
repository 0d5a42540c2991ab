"""What is read: a table, some of its columns, some of its rows."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from google.cloud.bigquery import SchemaField, Table

from dagster_bq_connector.errors import PartitionFilterError, SchemaError, UnsupportedError
from dagster_bq_connector.schema.types import type_name
from dagster_bq_connector.table.ref import TableRef
from dagster_bq_connector.table.slice import INGESTION_TIME, TimeFilter

# SQL, or a window of time whose literals follow the type of the column.
Where: TypeAlias = str | TimeFilter

SHOWN_COLUMNS = 30  # in an error
# The types of few bytes, fewest first.
_BYTES = ("BOOLEAN", "DATE", "INTEGER", "FLOAT", "TIME", "DATETIME", "TIMESTAMP", "NUMERIC")


@dataclass(frozen=True)
class ReadRequest:
    """One table to read.

    Attributes:
        table: Its address.
        columns: The columns of the rows, in this order, as the table spells them; all when None.
            A field of a struct is named with dots and gives the struct with that field only.
        selected: The columns that travel, all when empty. For no columns at all it is one that is
            cheap to read, by which the rows are counted.
        restriction: A row filter in SQL, evaluated by BigQuery; empty for all rows.
        filter_column: The column that every filter must name; None when the table requires none.
        max_streams: Read streams at most.
    """

    table: TableRef
    columns: tuple[str, ...] | None = None
    selected: tuple[str, ...] = ()
    restriction: str = ""
    filter_column: str | None = None
    max_streams: int = 1


def plan_read(
    table: Table, ref: TableRef, columns: Sequence[str] | None, where: Where | None, streams: int
) -> ReadRequest:
    """Check a read against the table before a session is made.

    Args:
        table: The table's metadata.
        ref: Its address.
        columns: Names of the columns; all when None. One that is named twice comes once.
        where: The row filter.
        streams: Read streams at most.

    Raises:
        SchemaError: A column that the table does not have.
        PartitionFilterError: The table requires a filter, and there is none.
        UnsupportedError: A view, or a single partition by address.
    """
    if table.table_type in ("VIEW", "MATERIALIZED_VIEW"):
        raise UnsupportedError(
            f"{ref} is a {table.table_type}: only tables can be read by a read session. Query it "
            "with bigquery.get_client() for now."
        )
    if ref.partition:
        raise UnsupportedError(
            f"{ref} is one partition: read {ref.at(None)} with where= on the column that "
            "partitions it."
        )
    paths = None if columns is None else _paths(table, ref, columns)
    restriction, filter_column = _restriction(table, ref, where), _filter_column(table)
    if filter_column and not restriction:
        raise PartitionFilterError(missing_filter(ref, filter_column))
    return ReadRequest(
        table=ref,
        columns=paths,
        selected=_selected(table, paths),
        restriction=restriction,
        filter_column=filter_column,
        max_streams=streams,
    )


def missing_filter(ref: TableRef, column: str) -> str:
    """What to tell somebody who reads without the filter that the table requires."""
    return (
        f"{ref} can be read only with a filter on {column}, by which it is partitioned: pass "
        f'where="{column} >= ...", or where="{column} IS NULL OR {column} IS NOT NULL" for all '
        "its rows."
    )


def _paths(table: Table, ref: TableRef, columns: Sequence[str]) -> tuple[str, ...]:
    """The columns as the table spells them, each once."""
    if isinstance(columns, str):
        raise SchemaError(f"columns={columns!r}: write a list of column names.")
    found = {name: _path(table.schema, name) for name in columns}
    for name, path in found.items():
        if path is None:
            close = difflib.get_close_matches(name, _all_paths(table.schema), n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise SchemaError(f"{ref} has no column {name!r}{hint}; it has {_known(table)}.")
    paths = dict.fromkeys(path for path in found.values() if path is not None)
    return tuple(path for path in paths if not any(_within(path, other) for other in paths))


def _path(columns: Sequence[SchemaField], name: str) -> str | None:
    """How the table spells a column or field, whatever the case of `name`."""
    head, dot, rest = name.partition(".")
    for column in columns:
        if column.name.casefold() == head.casefold():
            path = _path(column.fields, rest) if dot else ""
            return None if path is None else f"{column.name}{dot}{path}"
    return None


def _within(path: str, other: str) -> bool:
    """Whether `path` is a field of `other`."""
    return path.startswith(f"{other}.")


def _all_paths(columns: Sequence[SchemaField], prefix: str = "") -> list[str]:
    paths: list[str] = []
    for column in columns:
        paths += [f"{prefix}{column.name}", *_all_paths(column.fields, f"{prefix}{column.name}.")]
    return paths


def _known(table: Table) -> str:
    names = [column.name for column in table.schema]
    more = f" and {len(names) - SHOWN_COLUMNS} more" if len(names) > SHOWN_COLUMNS else ""
    return ", ".join(names[:SHOWN_COLUMNS]) + more


def _selected(table: Table, paths: tuple[str, ...] | None) -> tuple[str, ...]:
    if paths is None:
        return ()
    if paths:
        return paths
    cheapest = min(table.schema, key=_cost, default=None)
    return (cheapest.name,) if cheapest else ()


def _cost(column: SchemaField) -> int:
    """A rank of columns by the bytes that they cost a row."""
    if column.mode == "REPEATED" or column.fields:
        return len(_BYTES) + 1
    name = type_name(column)
    return _BYTES.index(name) if name in _BYTES else len(_BYTES)


def _filter_column(table: Table) -> str | None:
    if not table.require_partition_filter:
        return None
    if table.range_partitioning:
        return table.range_partitioning.field
    return (table.time_partitioning and table.time_partitioning.field) or INGESTION_TIME


def _restriction(table: Table, ref: TableRef, where: Where | None) -> str:
    given: object = where
    if given is not None and not isinstance(given, (str, TimeFilter)):
        raise UnsupportedError(
            f"where is {type(given).__name__}: write SQL, or pass what where() of a DailyTable "
            "gives."
        )
    if not isinstance(where, TimeFilter):
        return where or ""
    if where.column == INGESTION_TIME:
        return where.sql("TIMESTAMP")
    column = _find(table.schema, where.column)
    if column is None:
        raise SchemaError(f"{ref} has no column {where.column!r}, by which the rows are filtered.")
    return where.sql(type_name(column))


def _find(columns: Sequence[SchemaField], name: str) -> SchemaField | None:
    head, _, rest = name.partition(".")
    for column in columns:
        if column.name.casefold() == head.casefold():
            return _find(column.fields, rest) if rest else column
    return None
