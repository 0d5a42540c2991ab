"""Batches become AppendRows requests, as bytes.

The requests are put together by hand: the official message classes copy the rows several times.
The numbers below are those of `google.cloud.bigquery.storage.v1.AppendRowsRequest`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

# Field number << 3 | 2 (length-delimited).
_WRITE_STREAM, _ARROW_ROWS, _TRACE_ID = b"\x0a", b"\x2a", b"\x32"
_WRITER_SCHEMA, _ROWS = b"\x0a", b"\x12"  # of AppendRowsRequest.ArrowData
_SERIALIZED = b"\x0a"  # of ArrowSchema and of ArrowRecordBatch

TRACE_ID = b"dagster-bq-connector"
OVERHEAD = 256  # bytes of tags and lengths around one batch, generously


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _field(tag: bytes, *parts: bytes | memoryview) -> bytes:
    """One length-delimited field. The parts are copied once."""
    return b"".join((tag, _varint(sum(len(part) for part in parts)), *parts))


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


class ArrowEncoder:
    """Encodes batches of one schema as `arrow_rows`."""

    def __init__(self, schema: pa.Schema, stream: str) -> None:
        """Keep what every connection sends first: the stream's name and the writer schema."""
        schema_bytes = memoryview(schema.serialize())
        self._writer_schema = _field(_WRITER_SCHEMA, _field(_SERIALIZED, schema_bytes))
        self._head = _field(_WRITE_STREAM, stream.encode()) + _field(_TRACE_ID, TRACE_ID)

    def first(self, payload: bytes) -> bytes:
        """The first request of a connection: the payload with all that must go before it."""
        start = 1
        while payload[start] & 0x80:
            start += 1
        rows = memoryview(payload)[start + 1 :]
        return self._head + _field(_ARROW_ROWS, self._writer_schema, rows)

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
        room = limit - len(self._head) - len(self._writer_schema) - OVERHEAD
        count = batch.num_rows
        step = max(1, min(count, int(count * preferred / max(1, batch.nbytes))))
        for start in range(0, count, step):
            yield from self._fit(batch, start, min(step, count - start), room)

    def _fit(
        self, batch: pa.RecordBatch, start: int, rows: int, room: int
    ) -> Iterator[Request | OversizedRow]:
        """Halve what does not fit: rows need not be of one size."""
        payload = self._payload(batch.slice(start, rows))
        if len(payload) <= room:
            yield Request(start, rows, payload)
        elif rows == 1:
            yield OversizedRow(start, len(payload))
        else:
            half = rows // 2
            yield from self._fit(batch, start, half, room)
            yield from self._fit(batch, start + half, rows - half, room)

    def _payload(self, batch: pa.RecordBatch) -> bytes:
        rows = memoryview(batch.serialize())
        body = _SERIALIZED + _varint(len(rows))
        inner = _ROWS + _varint(len(body) + len(rows)) + body
        return b"".join((_ARROW_ROWS, _varint(len(inner) + len(rows)), inner, rows))
