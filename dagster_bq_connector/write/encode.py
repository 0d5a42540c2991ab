"""Batches become AppendRows requests, as bytes.

The requests are put together by hand: the official message classes copy the rows several times.
The numbers below are those of `google.cloud.bigquery.storage.v1.AppendRowsRequest`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from dagster_bq_connector.schema.proto import delimited, varint

WRITE_STREAM, PROTO_ROWS, ARROW_ROWS, TRACE = 1, 4, 5, 6
# Of ArrowData and ProtoData alike: the schema and the rows, each a message whose first field has
# the bytes.
WRITER_SCHEMA, ROWS, SERIALIZED = 1, 2, 1

TRACE_ID = b"dagster-bq-connector"
OVERHEAD = 256  # bytes of tags and lengths around one batch, generously


@dataclass(frozen=True, slots=True)
class Request:
    """The rows of one AppendRows request.

    Attributes:
        start: Position of its first row in the batch that it was cut from.
        rows: How many rows it holds.
        payload: The whole request but for what the first one of a connection adds.
    """

    start: int
    rows: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class OversizedRow:
    """A row that is larger than a whole request may be.

    Attributes:
        start: Position of the row in the batch that it was cut from.
        size: Bytes of its request.
    """

    start: int
    size: int


class Encoder(ABC):
    """Encodes batches of one schema."""

    def __init__(self, kind: int, schema: bytes | memoryview, stream: str) -> None:
        """Keep what every connection sends first: the stream's name and the writer schema.

        Args:
            kind: The field of the request that holds the rows.
            schema: The writer schema, serialized.
            stream: The write stream's name.
        """
        self._kind = kind
        self._writer_schema = delimited(WRITER_SCHEMA, delimited(SERIALIZED, schema))
        self._head = delimited(WRITE_STREAM, stream.encode()) + delimited(TRACE, TRACE_ID)

    def first(self, payload: bytes) -> bytes:
        """The first request of a connection: the payload with all that must go before it."""
        start = 1
        while payload[start] & 0x80:
            start += 1
        rows = memoryview(payload)[start + 1 :]
        return self._head + delimited(self._kind, self._writer_schema, rows)

    @abstractmethod
    def cut(
        self, batch: pa.RecordBatch, limit: int, preferred: int
    ) -> Iterator[Request | OversizedRow]:
        """Cut a batch into requests by their size on the wire.

        Args:
            batch: Rows as they travel.
            limit: Bytes that no request may exceed, its head included.
            preferred: Bytes that a request should have, at most `limit`.

        Yields:
            Requests in the order of the rows, and the rows that do not fit even alone.
        """

    def _room(self, limit: int) -> int:
        """What is left of a request, also a first one, for the rows."""
        return limit - len(self._head) - len(self._writer_schema) - OVERHEAD

    def _payload(self, head: bytes, rows: memoryview) -> bytes:
        """A request.

        Args:
            head: What stands before the rows within their message.
            rows: The rows, which are copied once.
        """
        size = len(head) + len(rows)
        tag = varint(ROWS << 3 | 2) + varint(size)
        return delimited(self._kind, tag, head, rows)


class ArrowEncoder(Encoder):
    """Encodes batches of one schema as `arrow_rows`."""

    def __init__(self, schema: pa.Schema, stream: str) -> None:
        """Prepare requests of batches with this schema."""
        super().__init__(ARROW_ROWS, memoryview(schema.serialize()), stream)

    def cut(
        self, batch: pa.RecordBatch, limit: int, preferred: int
    ) -> Iterator[Request | OversizedRow]:
        """Cut a batch into requests: by guess, and halved where that was wrong."""
        room = self._room(limit)
        count = batch.num_rows
        size = pa.ipc.get_record_batch_size(batch)  # of what nbytes asks of every buffer, a third
        step = max(1, min(count, int(count * preferred / size)))
        for start in range(0, count, step):
            yield from self._fit(batch, start, min(step, count - start), room)

    def _fit(
        self, batch: pa.RecordBatch, start: int, rows: int, room: int
    ) -> Iterator[Request | OversizedRow]:
        """Halve what does not fit: rows need not be of one size."""
        serialized = memoryview(batch.slice(start, rows).serialize())
        head = varint(SERIALIZED << 3 | 2) + varint(len(serialized))
        payload = self._payload(head, serialized)
        if len(payload) <= room:
            yield Request(start, rows, payload)
        elif rows == 1:
            yield OversizedRow(start, len(payload))
        else:
            half = rows // 2
            yield from self._fit(batch, start, half, room)
            yield from self._fit(batch, start + half, rows - half, room)
