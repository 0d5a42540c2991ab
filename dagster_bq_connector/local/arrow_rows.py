"""Storage Write: Arrow rows column by column, every type as the service takes it.

Upstream sends them through JSON, which has no bytes in structs, no intervals, no ranges and no
infinity. Here DuckDB reads the batch itself. What differs in form is written as an expression: a
RANGE is a struct of `start` and `end`, JSON and GEOGRAPHY are text. BIGNUMERIC has 18 digits after
the point, as everywhere here, and an INTERVAL that the lake would cut is refused. What sessions
send is in arrow.py.

streams.py calls `decoder` and staging.py `insert`.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import duckdb
import pyarrow as pa
from google.cloud.bigquery_storage_v1 import types as api

from dagster_bq_connector.local.upstream import database, types

Row = dict[str, Any]
BIGNUMERIC = pa.decimal128(38, 18)
# The lake's files are Parquet, whose intervals are three unsigned numbers of 32 bits: months, days
# and milliseconds. It would cut any other without a word.
HELD_INTERVAL = """
CASE WHEN year({x}) < 0 OR month({x}) < 0 OR day({x}) < 0 OR hour({x}) NOT BETWEEN 0 AND 1192
    OR minute({x}) < 0 OR microsecond({x}) < 0 OR microsecond({x}) % 1000 != 0
THEN error('The local BigQuery holds no INTERVAL that is negative, has 1,193 hours or more, or '
    || 'parts of a millisecond: ' || CAST({x} AS VARCHAR)) ELSE {x} END
"""
quote = database.quote


def decoder(request: api.AppendRowsRequest) -> Callable[[Any, Any], pa.RecordBatch] | None:
    """What reads the batches of a connection, when its schema is one of Arrow."""
    serialized = request.arrow_rows.writer_schema.serialized_schema
    if not serialized:
        return None
    schema = pa.ipc.read_schema(pa.py_buffer(serialized))

    def decode(request: api.AppendRowsRequest, _fields: Any) -> pa.RecordBatch:
        rows = request.arrow_rows.rows.serialized_record_batch
        return pa.ipc.read_record_batch(pa.py_buffer(rows), schema)

    return decode


def insert(table: str, fields: list[Any], batch: pa.RecordBatch, offset: str) -> list[Row]:
    """Put all the rows that can be into a table.

    Args:
        table: The quoted name of the table.
        fields: Its columns.
        batch: The rows.
        offset: A column of the batch that the table has beside `fields`.

    Returns:
        The row errors, as insertAll gives them; their rows are the only ones that are not in.
    """
    known = {field.name.casefold(): field for field in fields}
    names = itertools.count()
    selected, lists = [quote(offset)], list[str]()
    for given in batch.schema:
        if field := known.get(given.name.casefold()):
            value = _stored(quote(given.name), given.type, field, names)
            selected.append(f"{value} AS {quote(field.name)}")
            lists += [given.name] if field.mode == "REPEATED" else []
    statement = f"INSERT INTO {table} BY NAME SELECT {', '.join(selected)} FROM given"
    with database.cursor() as cur:
        return list(_insert(cur, statement, batch, lists, 0))


def _insert(
    cur: duckdb.DuckDBPyConnection, statement: str, batch: pa.RecordBatch, lists: list[str], at: int
) -> Iterator[Row]:
    """Halve what is refused until the bad rows are alone."""
    try:
        for name in lists:
            if batch.column(name).null_count:
                raise pa.ArrowInvalid(f"Field value of {name} cannot be empty.")
        narrow = batch.cast(_narrow_schema(batch.schema))
        cur.register("given", pa.Table.from_batches([narrow]))
        cur.execute(statement)
    except (duckdb.Error, pa.ArrowInvalid) as error:
        if len(batch) == 1:
            yield {"index": at, "errors": [{"message": str(error)}]}
            return
        half = len(batch) // 2
        yield from _insert(cur, statement, batch.slice(0, half), lists, at)
        yield from _insert(cur, statement, batch.slice(half), lists, at + half)


def _narrow_schema(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_type(_narrow(field.type)) for field in schema])


def _narrow(kind: Any) -> pa.DataType:
    """DuckDB has no decimals of 256 bits."""
    if pa.types.is_decimal256(kind):
        return BIGNUMERIC
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_narrow(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_narrow(field.type)) for field in kind])
    return kind


def _stored(x: str, kind: Any, field: Any, names: Iterator[int]) -> str:
    """SQL that makes an Arrow value what the table holds."""
    if field.mode == "REPEATED":
        element = f"e{next(names)}"
        value = _stored(element, kind.value_type, field.replace(mode="NULLABLE"), names)
        return f"list_transform({x}, lambda {element}: {value})"
    stored = types.duckdb_type(field)
    if field.type == "RANGE":
        ends = ", ".join(
            f"{name} := {x}.{quote(end)}"
            for name, end in zip(types.RANGE_FIELDS, ("start", "end"), strict=True)
        )
        return f"CAST(CASE WHEN {x} IS NOT NULL THEN struct_pack({ends}) END AS {stored})"
    if field.fields:
        given = {child.name.casefold(): child for child in kind}
        members: list[str] = []
        for child in field.fields:
            known = given.get(child.name.casefold())
            value = (
                _stored(f"{x}.{quote(known.name)}", known.type, child, names) if known else "NULL"
            )
            members.append(f"{quote(child.name)} := {value}")
        packed = f"struct_pack({', '.join(members)})"
        return f"CAST(CASE WHEN {x} IS NOT NULL THEN {packed} END AS {stored})"
    if field.type == "INTERVAL":
        return HELD_INTERVAL.format(x=x)
    return f"CAST({x} AS {stored})"
