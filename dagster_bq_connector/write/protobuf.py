"""Rows as protobuf, for what BigQuery does not take in Arrow, and the choice between the two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
from google.cloud.bigquery import SchemaField

from dagster_bq_connector.schema.proto import row_type
from dagster_bq_connector.schema.types import child_fields, type_name
from dagster_bq_connector.write.encode import (
    PROTO_ROWS,
    SERIALIZED,
    ArrowEncoder,
    Encoder,
    OversizedRow,
    Request,
)
from dagster_bq_connector.write.message import encode, fields
from dagster_bq_connector.write.wire import Numbers

# As much is encoded at a time: enough to be quick, and what is made in between (some fifty bytes a
# value, whatever its own size) stays small.
BLOCK_ROWS = 16_384
BLOCK_VALUES = 2**20
BLOCK_BYTES = 8 * 1024 * 1024  # in Arrow


class ProtobufEncoder(Encoder):
    """Encodes batches of one schema as `proto_rows`."""

    def __init__(self, columns: Sequence[SchemaField], schema: pa.Schema, stream: str) -> None:
        """Prepare requests of batches with this schema.

        Args:
            columns: The columns of the table, and any pseudo-columns; the schema's are among them.
            schema: The batches' columns, in the wire types of theirs.
            stream: The write stream's name.
        """
        known = {column.name.casefold(): column for column in columns}
        chosen = [known[name.casefold()] for name in schema.names]
        self._fields, self._values = fields(chosen), _count(chosen)
        super().__init__(PROTO_ROWS, row_type(chosen).SerializeToString(), stream)

    def cut(
        self, batch: pa.RecordBatch, limit: int, preferred: int
    ) -> Iterator[Request | OversizedRow]:
        """Cut a batch into requests: each row is encoded once, so its size is known."""
        room, count = self._room(limit), batch.num_rows
        most = count * BLOCK_BYTES // max(1, batch.nbytes)
        step = max(1, min(BLOCK_ROWS, BLOCK_VALUES // self._values, most))
        for start in range(0, count, step):
            rows, bounds = encode(SERIALIZED, self._fields, batch.slice(start, step))
            yield from self._cut(rows, bounds, start, room, max(1, min(preferred, room)))

    def _cut(
        self, rows: Numbers, bounds: Numbers, position: int, room: int, preferred: int
    ) -> Iterator[Request | OversizedRow]:
        """Cut rows that lie between `bounds` into requests of about one size."""
        size = int(bounds[-1])
        size = -(-size // -(-size // preferred))
        first, last = 0, len(bounds) - 1
        while first < last:
            start = bounds[first]
            fitting = int(np.searchsorted(bounds, start + size, side="right")) - 1
            stop = max(first + 1, fitting)
            taken = rows[start : bounds[stop]]
            if len(taken) <= room:
                payload = self._payload(b"", memoryview(taken))
                yield Request(position + first, stop - first, payload)
            else:
                yield OversizedRow(position + first, len(taken))
            first = stop


def encoder_for(columns: Sequence[SchemaField], schema: pa.Schema, stream: str) -> Encoder:
    """The encoder for batches of one schema: Arrow where BigQuery takes it, protobuf where not.

    Of all types, Google's table of those that Arrow rows may have lacks TIME only.

    Args:
        columns: The columns of the table; the schema's are among them.
        schema: The batches' columns, in the wire types of theirs.
        stream: The write stream's name.
    """
    sent = {name.casefold() for name in schema.names}
    if _have_time([column for column in columns if column.name.casefold() in sent]):
        return ProtobufEncoder(columns, schema, stream)
    return ArrowEncoder(schema, stream)


def _have_time(columns: Sequence[SchemaField]) -> bool:
    return any(type_name(column) == "TIME" or _have_time(column.fields) for column in columns)


def _count(columns: Sequence[SchemaField]) -> int:
    """The columns and all that is within them."""
    return sum(1 + _count(child_fields(column)) for column in columns)
