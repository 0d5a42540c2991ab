"""What a table's columns become when the data has more of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.cloud.bigquery import SchemaField

from dagster_bq_connector.schema.types import type_name


def with_columns(
    columns: Sequence[SchemaField], wanted: Sequence[SchemaField]
) -> list[SchemaField]:
    """The columns of a table and those that it lacks, which become NULLABLE.

    Args:
        columns: What the table has; they stay as they are, but for structs that get more fields.
        wanted: What the data has. Names are compared without case, and types not at all.
    """
    there = {column.name.casefold(): column for column in wanted}
    kept = [_with_fields(column, there.get(column.name.casefold())) for column in columns]
    known = {column.name.casefold() for column in columns}
    return kept + [_optional(column) for column in wanted if column.name.casefold() not in known]


def _with_fields(column: SchemaField, wanted: SchemaField | None) -> SchemaField:
    if wanted is None or type_name(column) != "RECORD" or type_name(wanted) != "RECORD":
        return column
    fields = with_columns(column.fields, wanted.fields)
    return column if fields == list(column.fields) else _changed(column, fields=_to_api(fields))


def _optional(column: SchemaField) -> SchemaField:
    """The rows that are there have no value in it."""
    return column if column.mode != "REQUIRED" else _changed(column, mode="NULLABLE")


def _changed(column: SchemaField, **properties: Any) -> SchemaField:
    """The same column, with whatever else BigQuery knows of it."""
    return SchemaField.from_api_repr({**column.to_api_repr(), **properties})


def _to_api(fields: Sequence[SchemaField]) -> list[dict[str, Any]]:
    return [dict(field.to_api_repr()) for field in fields]
