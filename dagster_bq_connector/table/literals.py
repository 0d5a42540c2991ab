"""Partition keys as values of a column's type, and values as SQL."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from typing import Any

from google.cloud.bigquery import SchemaField

from dagster_bq_connector.errors import PartitionError
from dagster_bq_connector.schema.types import MAX_BIGNUMERIC, MAX_NUMERIC, child_fields, type_name
from dagster_bq_connector.table.ref import TableRef

MAX_SQL_BYTES = 1_000_000  # BigQuery takes 1 MiB for a query and for a row restriction
_INTEGER = re.compile(r"[+-]?\d+", re.ASCII)
_DATE = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
_MAX_INTEGER = 2**63
_SQL_NAMES = {"FLOAT": "FLOAT64"}  # of the names that the API has, the one that SQL has not
_ESCAPES = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\r": "\\r"}


def key_value(key: str, type_name: str, column: str) -> Any:
    """A partition key as a value of the column that holds it.

    Args:
        key: The key, such as `de`, `7`, `2026-08-01` or `true`. A time without zone is UTC for a
            TIMESTAMP column.
        type_name: The BigQuery type of the column, as `schema.types.type_name` gives it.
        column: What to call the column.

    Raises:
        PartitionError: The key cannot be one, or values of the type are not compared with keys.
    """
    parse = _PARSERS.get(type_name)
    if parse is None:
        known = ", ".join(sorted(_PARSERS))
        raise PartitionError(
            f"Column {column!r} is {type_name}, which is not compared with partition keys: use a "
            f"column, or an expression, of one of the types {known}."
        )
    value: Any = None
    try:
        value = parse(key)
    except (ValueError, InvalidOperation):
        value = None
    if value is None:
        raise PartitionError(
            f"Partition key {key!r} is no {type_name}, which column {column!r} is: write the keys "
            "as that type, or compare with another column or expression, such as "
            f"CAST({column} AS STRING)."
        )
    return value


def literal(value: Any) -> str:
    """A value as a SQL literal of its type."""
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return f"'{''.join(map(_escaped, value))}'"
    if isinstance(value, datetime):
        return _moment(value)
    if isinstance(value, date):
        return f"DATE '{value.isoformat()}'"
    return f"BIGNUMERIC '{value:f}'"  # it compares with NUMERIC too


def quoted(column: str) -> str:
    """A column's name as SQL. BigQuery takes no backtick in a name."""
    return f"`{column}`"


def table_sql(ref: TableRef) -> str:
    """A table's name as SQL, without partition."""
    reference = ref.to_api()
    return quoted(f"{reference.project}.{ref.dataset}.{ref.table}")


def nulls_sql(columns: Sequence[SchemaField]) -> str:
    """Columns of these names and types for a SELECT that reads no table.

    Types of several parts are put together from theirs, since the local BigQuery casts to none.
    """
    return ", ".join(f"{_null_sql(column)} AS {quoted(column.name)}" for column in columns)


def refuse_long(sql: str, what: object) -> str:
    """The same SQL.

    Raises:
        PartitionError: BigQuery takes no query of this size.
    """
    if (size := len(sql.encode())) > MAX_SQL_BYTES:
        raise PartitionError(
            f"{what}: the filter of these partitions has {size:,} bytes, and BigQuery takes "
            f"{MAX_SQL_BYTES:,}: take fewer partitions at a time. Neighbouring times are one "
            "range, so an expression that makes times of text is short, such as "
            "PARSE_TIMESTAMP('%Y-%m-%d-%H:%M', hour). BigQueryReader.read(table) reads the whole "
            "table, without a filter."
        )
    return sql


def _null_sql(column: SchemaField) -> str:
    kind = type_name(column)
    if kind == "RECORD":
        value = f"STRUCT({nulls_sql(column.fields)})"
    elif kind == "RANGE":
        value = f"RANGE({', '.join(map(_null_sql, child_fields(column)))})"
    else:
        value = f"CAST(NULL AS {_SQL_NAMES.get(kind, kind)})"
    return f"[{value}]" if column.mode == "REPEATED" else value


def _moment(moment: datetime) -> str:
    if moment.tzinfo is None:
        return f"DATETIME '{moment.isoformat(sep=' ')}'"
    instant = moment.astimezone(UTC).replace(tzinfo=None)
    return f"TIMESTAMP '{instant.isoformat(sep=' ')}+00:00'"


def _escaped(character: str) -> str:
    if character.isprintable():
        return _ESCAPES.get(character, character)
    return _ESCAPES.get(character) or f"\\U{ord(character):08x}"


def _integer(key: str) -> int | None:
    if not _INTEGER.fullmatch(key):
        return None
    number = int(key)
    return number if -_MAX_INTEGER <= number < _MAX_INTEGER else None


def _boolean(key: str) -> bool | None:
    return {"true": True, "false": False}.get(key.casefold())


def _date(key: str) -> date | None:
    return date.fromisoformat(key) if _DATE.fullmatch(key) else None


def _datetime(key: str) -> datetime | None:
    moment = datetime.fromisoformat(key)
    return moment if moment.tzinfo is None else None


def _timestamp(key: str) -> datetime:
    moment = datetime.fromisoformat(key)
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment


def _decimal(whole: int, fraction: int) -> Callable[[str], Decimal | None]:
    """Of at most so many digits before and after the point."""

    def parse(key: str) -> Decimal | None:
        number = Decimal(key)
        if not number.is_finite() or number.adjusted() >= whole:
            return None
        exponent = number.normalize().as_tuple().exponent
        return number if isinstance(exponent, int) and exponent >= -fraction else None

    return parse


_PARSERS: dict[str, Callable[[str], Any]] = {
    "BIGNUMERIC": _decimal(*MAX_BIGNUMERIC),
    "BOOLEAN": _boolean,
    "DATE": _date,
    "DATETIME": _datetime,
    "INTEGER": _integer,
    "NUMERIC": _decimal(*MAX_NUMERIC),
    "STRING": str,
    "TIMESTAMP": _timestamp,
}
