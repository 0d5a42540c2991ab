"""Storage Read: rows in the Arrow types of the service, and of structs the selected fields only.

local-bigquery sends what DuckDB makes of a column. The service sends INTERVAL as Arrow's own,
BIGNUMERIC as decimal256, RANGE as a struct of start and end, and names JSON, GEOGRAPHY and
DATETIME in the metadata of their fields.

Seams: `read._column` (the expression of a column), `read._query` (its columns' types), and the
handler of ReadRows.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
from collections.abc import Container, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from google.cloud.bigquery_storage_v1 import types as storage

from dagster_bq_connector.local.upstream import BigQueryError, database, read, types

EXTENSION = "ARROW:extension:name"
MESSAGE_BYTES = 1024 * 1024
RANGE_NAMES = ("start", "end")
KINDS: dict[str, pa.DataType] = {
    "BOOLEAN": pa.bool_(),
    "INTEGER": pa.int64(),
    "FLOAT": pa.float64(),
    "NUMERIC": pa.decimal128(38, 9),
    "BIGNUMERIC": pa.decimal256(76, 38),
    "STRING": pa.string(),
    "BYTES": pa.binary(),
    "DATE": pa.date32(),
    "DATETIME": pa.timestamp("us"),
    "TIMESTAMP": pa.timestamp("us", "UTC"),
    "TIME": pa.time64("us"),
    "JSON": pa.string(),
    "GEOGRAPHY": pa.string(),
    "INTERVAL": pa.month_day_nano_interval(),
}
METADATA = {
    "DATETIME": {EXTENSION: "google:sqlType:datetime"},
    "GEOGRAPHY": {
        EXTENSION: "google:sqlType:geography",
        "ARROW:extension:metadata": '{"encoding": "WKT"}',
    },
    "INTERVAL": {EXTENSION: "google:sqlType:interval"},
    "JSON": {EXTENSION: "google:sqlType:json"},
    "RANGE": {"google:sqlType": "range"},
}

# The fields that a session wants of a column, by their lower-case names; empty for all.
Wanted = dict[str, Any]


@dataclass
class Selection:
    """What the session that is being made selects, as said and as a tree, and what it finds."""

    paths: list[str]
    wanted: Wanted
    columns: list[Any] = field(default_factory=list)


_selection: contextvars.ContextVar[Selection | None] = contextvars.ContextVar(
    "selection", default=None
)
_schemas: dict[str, pa.Schema] = {}  # by the name of the session
_column, _query = read._column, read._query


@contextlib.contextmanager
def selecting(session: storage.ReadSession) -> Generator[None]:
    """Make a session of Arrow: its `selected_fields` may name fields of structs."""
    wanted: Wanted = {}
    paths = list(session.read_options.selected_fields)
    for path in paths:
        _want(wanted, path.casefold().split("."))
    session.read_options.selected_fields = list(wanted)
    token = _selection.set(Selection(paths, wanted))
    try:
        yield
    finally:
        _selection.reset(token)


def _want(wanted: Wanted, path: Sequence[str]) -> None:
    head, *rest = path
    if not rest or wanted.get(head) == {}:  # the whole of it, perhaps beside fields of it
        wanted[head] = {}
    else:
        _want(wanted.setdefault(head, {}), rest)


def remember(made: storage.ReadSession, required: Container[str]) -> None:
    """Give a session that was made in `selecting` the service's schema.

    Args:
        made: The session.
        required: The names of columns that hold no null.
    """
    selection = _selection.get()
    assert selection is not None
    schema = pa.schema([_field(column, selection.wanted) for column in selection.columns])
    sent = pa.ipc.read_schema(pa.py_buffer(made.arrow_schema.serialized_schema))
    schema = pa.schema(
        [
            _with_digits(column, was).with_nullable(column.nullable and column.name not in required)
            for column, was in zip(schema, sent, strict=True)
        ]
    )
    made.read_options.selected_fields = selection.paths
    made.arrow_schema.serialized_schema = schema.serialize().to_pybytes()
    _schemas[made.name] = schema


def _with_digits(column: pa.Field[Any], sent: pa.Field[Any]) -> pa.Field[Any]:
    """NUMERIC(10, 2) keeps its digits."""
    known = pa.types.is_decimal128(column.type) and pa.types.is_decimal128(sent.type)
    return column.with_type(sent.type) if known else column


def query(path: str, options: Any, data_format: Any) -> tuple[str, list[Any]]:
    found, columns = _query(path, options, data_format)
    if selection := _selection.get():
        if unknown := _unknown(selection.wanted, columns):
            text = f"The following selected fields do not exist in the table schema: {unknown}"
            raise BigQueryError("invalid", f"request failed: {text}")
        selection.columns = columns
    return found, columns


def _unknown(wanted: Wanted, columns: Sequence[Any]) -> str | None:
    """A selected field that is not there."""
    known = {column.name.casefold(): column for column in columns}
    for name, children in wanted.items():
        if name not in known:
            return name
        if unknown := _unknown(children, known[name].fields or []):
            return f"{name}.{unknown}"
    return None


def column(name: str, t: Any, data_format: Any) -> str:
    selection = _selection.get()
    if selection is None:
        return _column(name, t, data_format)
    quoted = database.quote(name)
    wanted = selection.wanted.get(name.casefold(), {})
    return f"{_expression(quoted, t, wanted, itertools.count())} AS {quoted}"


def _expression(x: str, t: Any, wanted: Wanted, names: Iterator[int]) -> str:
    """SQL that gives what is sent of `x`, a value of the DuckDB type `t`."""
    if element := types._element(t):
        name = f"e{next(names)}"
        value = _expression(name, element, wanted, names)
        listed = x if value == name else f"list_transform({x}, lambda {name}: {value})"
        return f"coalesce({listed}, [])"
    if types._range(t):
        pairs = zip(RANGE_NAMES, types.RANGE_FIELDS, strict=True)
        members = ", ".join(f"'{name}': {x}.{known}" for name, known in pairs)
        return f"CASE WHEN {x} IS NULL THEN NULL ELSE {{{members}}} END"
    if t.id == "struct":
        members = {
            name: _expression(
                f"{x}.{database.quote(name)}", child, wanted.get(name.casefold(), {}), names
            )
            for name, child in types._children(t)
            if not wanted or name.casefold() in wanted
        }
        if not wanted and all(v == f"{x}.{database.quote(n)}" for n, v in members.items()):
            return x
        packed = ", ".join(f"{database.quote(n)} := {v}" for n, v in members.items())
        return f"CASE WHEN {x} IS NULL THEN NULL ELSE struct_pack({packed}) END"
    return types.encode(x, t) if types._scalar(t)[0] in ("JSON", "GEOGRAPHY") else x


def _field(column: Any, wanted: Wanted) -> pa.Field[Any]:
    """The Arrow field of a column of a table's schema."""
    wanted = wanted.get(column.name.casefold(), {})
    kind: pa.DataType
    if column.type == "RECORD":
        children = [c for c in column.fields if not wanted or c.name.casefold() in wanted]
        # Below a struct that is null there is nothing, no empty list either.
        kind = pa.struct([_field(child, wanted).with_nullable(True) for child in children])
    elif column.type == "RANGE":
        bound = KINDS[column.rangeElementType.type]
        kind = pa.struct([(name, bound) for name in RANGE_NAMES])
    else:
        kind = KINDS[column.type]
    repeated = column.mode == "REPEATED"
    if repeated:
        kind = pa.list_(pa.field("item", kind))
    metadata: Any = METADATA.get(column.type)
    return pa.field(column.name, kind, nullable=not repeated, metadata=metadata)


def read_rows(request: storage.ReadRowsRequest) -> Iterator[storage.ReadRowsResponse]:
    schema = _schemas.get(request.read_stream.rpartition("/streams/")[0])
    position = request.offset
    for response in read.read_rows(request):
        if schema is None:
            yield response
            continue
        rows = response.arrow_record_batch
        sent = pa.ipc.read_schema(pa.py_buffer(response.arrow_schema.serialized_schema))
        batch = pa.ipc.read_record_batch(pa.py_buffer(rows.serialized_record_batch), sent)
        response.arrow_schema.serialized_schema = schema.serialize().to_pybytes()
        for piece in _pieces(batch.cast(schema)):
            rows.serialized_record_batch = piece.serialize().to_pybytes()
            rows.row_count = response.row_count = piece.num_rows
            position += piece.num_rows
            stream = read._lookup(request.read_stream)
            stream.allocated = max(stream.allocated, position)  # so far it may be resumed
            yield response


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """A batch in parts that are as large as the service's messages."""
    rows = max(1, batch.num_rows * MESSAGE_BYTES // max(1, batch.nbytes))
    for start in range(0, max(1, batch.num_rows), rows):
        yield batch.slice(start, rows)


def install() -> None:
    read._column, read._query = column, query
