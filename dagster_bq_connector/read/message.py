"""A ReadRowsResponse, cut up by hand: protobuf would copy the rows twice."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from dagster_bq_connector.errors import RefusedError

# Field numbers of ReadRowsResponse, and of its ArrowRecordBatch.
_ARROW_BATCH, _ROW_COUNT, _SERIALIZED = 4, 6, 1
_FIXED = {1: 8, 5: 4}  # bytes of a field, by its wire type
_VARINT = 0
_NOTHING = memoryview(b"")


@dataclass(frozen=True, slots=True)
class Message:
    """Rows as they came.

    Attributes:
        rows: How many.
        data: The serialized Arrow batch; it keeps the whole response in memory.
    """

    rows: int
    data: memoryview

    @classmethod
    def parse(cls, response: bytes) -> Message:
        """Find the rows in a serialized ReadRowsResponse; other formats than Arrow hold none."""
        numbers, contents = _fields(memoryview(response))
        _, batch = _fields(contents.get(_ARROW_BATCH, _NOTHING))
        return cls(numbers.get(_ROW_COUNT, 0), batch.get(_SERIALIZED, _NOTHING))

    def decode(self, source: pa.Schema) -> pa.RecordBatch:
        """The rows.

        Args:
            source: The columns of the session.

        Raises:
            RefusedError: The server counted them otherwise, by which a stream would be resumed.
        """
        # Once they are copied: in the message they lie anywhere, and Arrow wants them aligned.
        buffer = pa.allocate_buffer(len(self.data))
        np.frombuffer(buffer, np.uint8)[:] = np.frombuffer(self.data, np.uint8)
        batch = pa.ipc.read_record_batch(buffer, source)
        if batch.num_rows != self.rows:
            raise RefusedError(f"The server sent {batch.num_rows} rows and counted {self.rows}.")
        return batch


def _fields(message: memoryview) -> tuple[dict[int, int], dict[int, memoryview]]:
    """The fields of a protobuf message, by their numbers: the integers, and the contents."""
    numbers: dict[int, int] = {}
    contents: dict[int, memoryview] = {}
    position = 0
    while position < len(message):
        key, position = _varint(message, position)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            numbers[number], position = _varint(message, position)
            continue
        if kind in _FIXED:
            size = _FIXED[kind]
        else:
            size, position = _varint(message, position)
        contents[number] = message[position : position + size]
        position += size
    return numbers, contents


def _varint(message: memoryview, position: int) -> tuple[int, int]:
    """A varint, and where it ends."""
    value = shift = 0
    while True:
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
