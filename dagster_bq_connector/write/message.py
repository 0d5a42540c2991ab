"""Batches become protobuf messages: the parts of all columns (wire.py), put together by row.

A struct costs no copy: its parts are its length and the parts of its fields. A list costs one: its
elements are put together, and then the bytes of every row's elements lie beside each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from google.cloud.bigquery import SchemaField

from dagster_bq_connector.schema.proto import is_packed, varint
from dagster_bq_connector.schema.types import child_fields, type_name
from dagster_bq_connector.write.wire import (
    VALUES,
    Long,
    Numbers,
    Part,
    Short,
    Sizes,
    Values,
    varints,
)

_compute: Any = pc  # its stubs know a part of what it takes
_WIDE = 2**31  # bytes, which take offsets of 64 bits
_VARINT, _FIXED64, _DELIMITED = 0, 1, 2  # wire types
_WIRE_TYPES = dict.fromkeys(
    ("BOOLEAN", "INTEGER", "DATE", "DATETIME", "TIMESTAMP", "TIME"), _VARINT
) | {"FLOAT": _FIXED64}


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a message.

    Attributes:
        tag: What stands before its value; nothing when every element has a tag of its own.
        values: How a value that is no message is encoded.
        fields: The fields of a message.
        element: One value of a field that is repeated.
    """

    tag: bytes
    values: Values | None = None
    fields: tuple[Field, ...] = ()
    element: Field | None = None


def fields(columns: Sequence[SchemaField]) -> tuple[Field, ...]:
    """The fields of the messages whose type is `schema.proto.row_type(columns)`."""
    return tuple(_field(number, column) for number, column in enumerate(columns, start=1))


def _field(number: int, column: SchemaField) -> Field:
    name = type_name(column)
    nested, values = fields(child_fields(column)), VALUES.get(name)
    if is_packed(column):
        return Field(_tag(number, _DELIMITED), element=Field(b"", values))
    field = Field(_tag(number, _WIRE_TYPES.get(name, _DELIMITED)), values, nested)
    return Field(b"", element=field) if column.mode == "REPEATED" else field


def _tag(number: int, wire_type: int) -> bytes:
    return varint(number << 3 | wire_type)


def encode(number: int, columns: Sequence[Field], batch: pa.RecordBatch) -> tuple[Numbers, Numbers]:
    """Encode every row as a message.

    Args:
        number: Of the repeated field that the messages are.
        columns: The fields of a message, as the columns of the batch.
        batch: At least one row.

    Returns:
        The bytes (uint8) of all rows, each with its tag and length; and where the rows begin in
        them, with the end of the last.
    """
    parts = _message(columns, batch.columns)
    return _join(_tagged(_tag(number, _DELIMITED), parts, None), batch.num_rows)


def _message(columns: Sequence[Field], arrays: Iterable[pa.Array[Any]]) -> list[Part]:
    """The length of a message, and its fields."""
    pairs = zip(columns, arrays, strict=True)
    parts = [part for field, array in pairs for part in _encode(field, array)]
    sizes: Sizes = 0
    for part in parts:
        sizes = sizes + part.sizes
    if isinstance(sizes, int):
        length = varint(sizes)
        return [Short(list(length), len(length)), *parts]
    return [varints(sizes.view(np.uint64)), *parts]


def _encode(field: Field, array: Any) -> list[Part]:
    """What a column writes into every row."""
    valid: Numbers | None = None
    if array.null_count:
        valid = array.is_valid().to_numpy(zero_copy_only=False)
    if field.element is not None:
        return _repeated(field, field.element, array, valid)
    if field.values is not None:
        return _tagged(field.tag, field.values(array), valid)
    nested = [array.field(index) for index in range(array.type.num_fields)]
    return _tagged(field.tag, _message(field.fields, nested), valid)


def _repeated(field: Field, element: Field, array: Any, valid: Numbers | None) -> list[Part]:
    bounds = array.offsets.to_numpy()
    elements = array.values.slice(bounds[0], bounds[-1] - bounds[0])
    if not len(elements):
        return []
    data, ends = _join(_encode(element, elements), len(elements))
    ends = ends[bounds - bounds[0]]
    sizes = np.diff(ends)
    if valid is not None:
        sizes = np.where(valid, sizes, 0)
    values = Long(data, ends[:-1], sizes)
    if not field.tag:
        return [values]
    length: Part = varints(sizes.view(np.uint64))
    return [*_tagged(field.tag, [length], sizes > 0), values]


def _tagged(tag: bytes, parts: list[Part], there: Numbers | None) -> list[Part]:
    """Put a tag before the parts, and leave out the rows that are not there (None: all are)."""
    head = parts[0]
    assert isinstance(head, Short)
    head.words, head.sizes = [*tag, *head.words], head.sizes + len(tag)
    if there is not None:
        for part in parts:
            part.sizes = np.where(there, part.sizes, 0)
    return parts


def _join(parts: Sequence[Part], rows: int) -> tuple[Numbers, Numbers]:
    """Put the parts together, row after row. Returns the bytes, and where the rows begin."""
    pieces = _pieces(parts, rows)
    data, size = pieces[0].data, pieces[0].sizes
    if len(pieces) == 1 and isinstance(size, int) and len(data) == rows * size:
        return data, np.arange(rows + 1) * size  # nothing is between them
    data = np.concatenate([piece.data for piece in pieces])
    # Binary values of one array, piece by piece; between any two of them a value that is not used.
    kind, offset = (pa.binary(), np.int32)
    if len(data) >= _WIDE:
        kind, offset = (pa.large_binary(), np.int64)
    bounds = np.empty((len(pieces), rows, 2), offset)
    base = 0
    for bound, piece in zip(bounds, pieces, strict=True):
        places = piece.starts + base
        bound[:, 0] = places
        places += piece.sizes
        bound[:, 1] = places
        base += len(piece.data)
    buffers = [None, pa.py_buffer(bounds), pa.py_buffer(data)]
    values = pa.Array.from_buffers(kind, bounds.size - 1, buffers)
    taken = _compute.take(values, _order(len(pieces), rows), boundscheck=False)
    _, ends, data = taken.buffers()
    starts = np.frombuffer(ends, offset)[:: len(pieces)]
    return np.frombuffer(data, np.uint8), starts.astype(np.int64)


@lru_cache(maxsize=4)  # batches are mostly of one length
def _order(pieces: int, rows: int) -> pa.Array[Any]:
    """Which of the values to take: of each row all pieces, every second value."""
    places: Any = np.arange(0, 2 * pieces * rows, 2).reshape(pieces, rows).T
    return pa.array(places.ravel(), pa.int64())


def _pieces(parts: Sequence[Part], rows: int) -> list[Long]:
    """Short parts become one piece with those before them that have one size in all rows."""
    pieces: list[Long] = []
    run: list[Short] = []
    for part in parts:
        if isinstance(part, Short):
            run.append(part)
            if isinstance(part.sizes, int):
                continue
        if run:
            pieces.append(_lay(run, rows))
            run = []
        if isinstance(part, Long):
            pieces.append(part)
    return [*pieces, _lay(run, rows)] if run else pieces


def _lay(run: Sequence[Short], rows: int) -> Long:
    """Lay the words of every row beside each other, as records of one width."""
    words: list[int | Numbers] = []
    kinds: list[Any] = []
    places: list[int] = []
    start = width = 0
    sizes: Sizes = 0
    for part in run:
        place = start
        for word in part.words:
            words.append(word)
            kinds.append(np.dtype(np.uint8) if isinstance(word, int) else word.dtype)
            places.append(place)
            place += kinds[-1].itemsize
        sizes = sizes + part.sizes
        if isinstance(sizes, int):
            start = sizes
        width = max(width, place)
    names = [str(index) for index in range(len(words))]
    layout: Any = {"names": names, "formats": kinds, "offsets": places, "itemsize": width}
    records: Any = np.empty(rows, np.dtype(layout))
    for name, word in zip(names, words, strict=True):
        records[name] = word  # what a row does not use of it, the next word overwrites
    return Long(records.view(np.uint8), np.arange(0, rows * width, width), sizes)
