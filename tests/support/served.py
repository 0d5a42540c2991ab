"""A table of numbers that a fake server sends over read streams."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pyarrow as pa
from google.cloud.bigquery_storage_v1 import types

from support.fake_storage import FakeStorage

SCHEMA = pa.schema([("id", pa.int64())])


class Served:
    """Each stream has the numbers from 0, in messages of as many rows; resumed at any of them.

    Attributes:
        offsets: Where calls began, in their order.
        sent: Messages that were handed to gRPC.
        open: Calls that are under way.
    """

    def __init__(self, storage: FakeStorage, streams: int, messages: int, rows: int) -> None:
        self.messages, self.rows = messages, rows
        self.offsets: list[int] = []
        self.sent = self.open = 0
        self.calls: Counter[str] = Counter()
        self._lock = threading.Lock()
        storage.session = types.ReadSession(
            name="s",
            arrow_schema=types.ArrowSchema(serialized_schema=SCHEMA.serialize().to_pybytes()),
            streams=[types.ReadStream(name=f"s/{n}") for n in range(streams)],
            estimated_row_count=streams * messages * rows,
        )
        storage.read = self.read

    def read(self, request: types.ReadRowsRequest, context: grpc.ServicerContext) -> Iterator[Any]:
        with self._lock:
            self.offsets.append(request.offset)
            self.calls[request.read_stream] += 1
            self.open += 1
        if not context.add_callback(self._closed):  # it is closed already
            self._closed()
        for number in range(request.offset // self.rows, self.messages):
            with self._lock:
                self.sent += 1
            yield response(range(number * self.rows, (number + 1) * self.rows))

    def _closed(self) -> None:
        with self._lock:
            self.open -= 1

    def until(self, number: int, then: Callable[[Any], None], times: int = 1) -> Any:
        """A `read` whose first calls of a stream, so many of them, do `then` at a message."""

        def read(request: types.ReadRowsRequest, context: grpc.ServicerContext) -> Iterator[Any]:
            sent = self.read(request, context)
            for index, message in enumerate(sent, request.offset // self.rows):
                at = index - request.offset // self.rows
                if at == number and self.calls[request.read_stream] <= times:
                    then(context)
                yield message

        return read


def response(numbers: range) -> types.ReadRowsResponse:
    batch = pa.record_batch([pa.array(numbers, pa.int64())], schema=SCHEMA)
    data = types.ArrowRecordBatch(serialized_record_batch=batch.serialize().to_pybytes())
    return types.ReadRowsResponse(arrow_record_batch=data, row_count=len(numbers))


def stall(context: grpc.ServicerContext) -> None:
    """Send nothing more, and do not close, until the caller gives up."""
    gone = threading.Event()
    if context.add_callback(gone.set):
        gone.wait()
