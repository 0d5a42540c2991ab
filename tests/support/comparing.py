"""Whether a table holds what the source's table holds, column by column.

Values of the source are read by PostgreSQL itself, not through what is tested; by the type of the
column that they should be in, both sides are brought to one form in which equal values are equal.
"""

import datetime as dt
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Any

import psycopg
import pyarrow as pa
from google.cloud.bigquery import Client, SchemaField

Row = Mapping[str, Any]
QUERY_SECONDS = 120
SHOWN = 5
# How the source writes what has no counterpart among Python's values.
TEXT = "CASE WHEN {0} IS NOT NULL THEN format('%s', {0}) END"
INTERVAL = (
    "CASE WHEN {0} IS NOT NULL THEN ARRAY[extract(year FROM {0}) * 12 + extract(month FROM {0}), "
    "extract(day FROM {0}), (extract(hour FROM {0}) * 3600 + extract(minute FROM {0}) * 60) "
    "* 1000000 + extract(microsecond FROM {0})]::bigint[] END"
)


@dataclass
class Difference:
    """How a table differs from the source's.

    Attributes:
        rows: Of the source.
        missing: Keys that the table lacks.
        extra: Keys that only the table has.
        different: Keys whose rows differ, each with what differs.
        doubled: Keys that the table has more than once.
        columns: Columns that only one side has.
    """

    rows: int = 0
    missing: list[Any] = field(default_factory=list[Any])
    extra: list[Any] = field(default_factory=list[Any])
    different: dict[Any, str] = field(default_factory=dict[Any, str])
    doubled: list[Any] = field(default_factory=list[Any])
    columns: list[str] = field(default_factory=list[str])

    @property
    def counts(self) -> dict[str, int]:
        """How many there are of each kind."""
        kinds = ("missing", "extra", "different", "doubled", "columns")
        return {kind: len(getattr(self, kind)) for kind in kinds}

    def __str__(self) -> str:
        """What differs, a few of each kind; empty when nothing does."""
        lines: list[str] = []
        for kind, count in self.counts.items():
            if count:
                found: Any = getattr(self, kind)
                named = found.items() if kind == "different" else found
                lines.append(f"{kind} ({count}): {list(named)[:SHOWN]}")
        return "\n".join(lines)


def compare_table(
    connection: psycopg.Connection[Any], source: str, client: Client, table: str
) -> Difference:
    """Compare a table of BigQuery with one of PostgreSQL.

    Args:
        connection: To the source.
        source: `schema.table`.
        client: Of BigQuery.
        table: `project.dataset.table`.
    """
    columns = list(client.get_table(table, timeout=QUERY_SECONDS).schema)
    # A client makes values of JSON, of which a text is like a document that is a text.
    parts = [
        f"IF(`{column.name}` IS NULL, NULL, TO_JSON_STRING(`{column.name}`)) AS `{column.name}`"
        if column.field_type == "JSON"
        else f"`{column.name}`"
        for column in columns
    ]
    query = client.query(f"SELECT {', '.join(parts)} FROM `{table}`", timeout=QUERY_SECONDS)
    found = [dict(row.items()) for row in query.result(timeout=QUERY_SECONDS)]
    return compare_rows(connection, source, columns, found)


def compare_rows(
    connection: psycopg.Connection[Any],
    source: str,
    columns: Sequence[SchemaField],
    found: Iterable[Row],
) -> Difference:
    """Compare rows with a table of PostgreSQL.

    Args:
        connection: To the source.
        source: `schema.table`.
        columns: Of the rows.
        found: The rows, each by its columns' names.
    """
    names, key = _names(connection, source), _key(connection, source)
    shared = [column for column in columns if column.name in names]
    expected = _source_rows(connection, source, shared)
    difference = Difference(len(expected))
    given = {column.name for column in columns}
    difference.columns = sorted(given.symmetric_difference(names))
    keyed = [(_key_of(row, key, shared), row) for row in found]
    times = Counter(each for each, _ in keyed)
    difference.doubled = [each for each, count in times.items() if count > 1]
    rows = dict(keyed)
    wanted = {_key_of(row, key, shared): row for row in expected}
    difference.missing = [each for each in wanted if each not in rows]
    difference.extra = [each for each in rows if each not in wanted]
    for each, row in wanted.items():
        if each in rows and (text := _unequal(row, rows[each], shared)):
            difference.different[each] = text
    return difference


def _names(connection: psycopg.Connection[Any], source: str) -> list[str]:
    statement = """
        SELECT attname FROM pg_attribute
        WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum
    """
    return [name for (name,) in connection.execute(statement, [source])]


def _key(connection: psycopg.Connection[Any], source: str) -> list[str]:
    statement = """
        SELECT attname FROM pg_index JOIN pg_attribute
        ON attrelid = indrelid AND attnum = ANY (indkey)
        WHERE indrelid = %s::regclass AND indisprimary
        ORDER BY array_position(indkey, attnum)
    """
    return [name for (name,) in connection.execute(statement, [source])]


def _source_rows(
    connection: psycopg.Connection[Any], source: str, columns: Sequence[SchemaField]
) -> list[Row]:
    parts = [f"{_expression(column)} AS {column.name}" for column in columns]
    cursor = connection.execute(f"SELECT {', '.join(parts)} FROM {source}".encode())
    names = [column.name for column in columns]
    return [dict(zip(names, row, strict=True)) for row in cursor]


def _expression(column: SchemaField) -> str:
    if column.mode == "REPEATED":
        return column.name
    if column.field_type in ("STRING", "JSON"):
        return TEXT.format(column.name)
    return INTERVAL.format(column.name) if column.field_type == "INTERVAL" else column.name


def _key_of(row: Row, key: Sequence[str], columns: Sequence[SchemaField]) -> Any:
    of_key = {column.name: column for column in columns if column.name in key}
    return tuple(plain(row[name], of_key[name]) for name in key)


def _unequal(expected: Row, found: Row, columns: Sequence[SchemaField]) -> str:
    """Which columns differ, with both values."""
    parts: list[str] = []
    for column in columns:
        right, is_ = plain(expected[column.name], column), plain(found[column.name], column)
        if right != is_:
            parts.append(f"{column.name}: {_short(is_)} instead of {_short(right)}")
    return ", ".join(parts)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:50]}… ({len(text)})"


def plain(value: Any, column: SchemaField) -> Any:
    """A value in the form in which it is compared."""
    if column.mode == "REPEATED":  # BigQuery has no null arrays
        single = SchemaField(column.name, column.field_type)
        return tuple(plain(element, single) for element in value or ())
    if value is None:
        return None
    if column.field_type in ("FLOAT", "FLOAT64"):
        return repr(float(value))  # tells -0.0 from 0.0, and nan is itself
    if column.field_type in ("NUMERIC", "BIGNUMERIC"):
        return Fraction(value) if Decimal(value).is_finite() else None
    if column.field_type == "JSON":
        return json.dumps(json.loads(value), sort_keys=True)
    if column.field_type == "INTERVAL":
        return _interval(value)
    if column.field_type == "TIMESTAMP":
        return value.astimezone(dt.UTC)
    return value


def _interval(value: Any) -> tuple[int, int, int]:
    """Months, days and microseconds."""
    if isinstance(value, pa.MonthDayNano):
        return value.months, value.days, value.nanoseconds // 1000
    if isinstance(value, list):
        return value[0], value[1], value[2]
    seconds = (value.hours * 60 + value.minutes) * 60 + value.seconds
    return value.years * 12 + value.months, value.days, seconds * 1_000_000 + value.microseconds
