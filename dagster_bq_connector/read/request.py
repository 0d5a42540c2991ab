"""What is read: a table, some of its columns, some of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from google.cloud.bigquery import SchemaField, Table

from dagster_bq_connector.errors import SchemaError, UnsupportedError
from dagster_bq_connector.schema.types import type_name
from dagster_bq_connector.table.ref import TableRef
from dagster_bq_connector.table.slice import INGESTION_TIME, TimeFilter

# SQL, or a window of time whose literals follow the type of the column.
Where: TypeAlias = str | TimeFilter


@dataclass(frozen=True)
class ReadRequest:
    """One table to read.

    Attributes:
        table: Its address.
        columns: The columns to read, in this order; all when None. A field of a struct is named
            with dots and gives the struct with that field only.
        restriction: A row filter in SQL, evaluated by BigQuery; empty for all rows.
        max_streams: Read streams at most.
    """

    table: TableRef
    columns: tuple[str, ...] | None
    restriction: str
    max_streams: int


def plan_read(
    table: Table, ref: TableRef, columns: Sequence[str] | None, where: Where | None, streams: int
) -> ReadRequest:
    """Check a read against the table before a session is made.

    Args:
        table: The table's metadata.
        ref: Its address.
        columns: Names of the columns; all when None.
        where: The row filter.
        streams: Read streams at most.

    Raises:
        SchemaError: A column that the table does not have.
        UnsupportedError: A view, or a single partition by address.
    """
    if table.table_type not in ("TABLE", None):
        raise UnsupportedError(
            f"{ref} is a {table.table_type}: only tables can be read by a read session. Query it "
            "with bigquery.get_client() for now."
        )
    if ref.partition:
        raise UnsupportedError(
            f"{ref} is one partition: read {ref.at(None)} with where= on the column that "
            "partitions it."
        )
    if isinstance(columns, str):
        raise SchemaError(f"columns={columns!r}: write a list of column names.")
    names = tuple(columns) if columns is not None else None
    for name in names or ():
        if _find(table.schema, name) is None:
            known = ", ".join(column.name for column in table.schema)
            raise SchemaError(f"{ref} has no column {name!r}; it has {known}.")
    return ReadRequest(ref, names, _restriction(table, ref, where), streams)


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
