"""The rows of one read stream, resumed where it broke."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import grpc
import pyarrow as pa
from google.cloud.bigquery_storage_v1 import types

from dagster_bq_connector.errors import Fault, UnreachableError, classify, error_text, explain
from dagster_bq_connector.retry import Backoff

METHOD = "/google.cloud.bigquery.storage.v1.BigQueryRead/ReadRows"
IDLE_SECONDS = 120.0

_Request: Any = types.ReadRowsRequest.pb()
_Response: Any = types.ReadRowsResponse.pb()


class StreamReader:
    """Reads one stream from an offset, and goes on from the last row after a break."""

    def __init__(
        self,
        channel: grpc.Channel,
        stream: str,
        source: pa.Schema,
        deadline: float,
    ) -> None:
        """Prepare to read; nothing is opened yet.

        Args:
            channel: The Storage API.
            stream: Resource name of the read stream.
            source: The columns as the service sends them.
            deadline: Seconds to try without a row before it fails. After two minutes without a
                message, or this time when it is shorter, a call is given up as broken.
        """
        self._method = channel.unary_stream(
            METHOD,
            request_serializer=_Request.SerializeToString,
            response_deserializer=_Response.FromString,
        )
        self._stream, self._source = stream, source
        self._backoff, self._idle = Backoff(deadline=deadline), min(IDLE_SECONDS, deadline)
        self._call: Any = None
        self._stopped = False
        self._awaiting: float | None = None  # since when a message is awaited

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the stream, each once.

        Raises:
            ConnectorError: The stream cannot be read on.
        """
        offset, pauses = 0, self._backoff.pauses()
        while not self._stopped:
            try:
                for batch in self._open(offset):
                    offset += batch.num_rows
                    pauses = self._backoff.pauses()
                    yield batch
            except grpc.RpcError as error:
                if self._stopped:
                    return
                if classify(error) not in (Fault.BROKEN, Fault.THROTTLED):
                    raise explain(error, f"Read stream {self._stream}") from error
                if (pause := next(pauses, None)) is None:
                    raise UnreachableError(
                        f"Read stream {self._stream}: no row within the deadline. "
                        f"Last: {error_text(error)}"
                    ) from error
                time.sleep(pause)
            else:
                return

    def stop(self) -> None:
        """End the call; `batches` ends soon after."""
        self._stopped = True
        if self._call is not None:
            self._call.cancel()

    def check_idle(self) -> None:
        """Give the call up when nothing has come for too long; `batches` then opens another."""
        since = self._awaiting
        if since is not None and time.monotonic() - since > self._idle and self._call is not None:
            self._awaiting = time.monotonic()
            self._call.cancel()

    def _next(self) -> Any:
        self._awaiting = time.monotonic()
        try:
            return next(self._call, None)
        finally:
            self._awaiting = None

    def _open(self, offset: int) -> Iterator[pa.RecordBatch]:
        metadata = (("x-goog-request-params", f"read_stream={self._stream}"),)
        request = _Request(read_stream=self._stream, offset=offset)
        self._call = self._method(request, metadata=metadata)
        if self._stopped:  # while it was opened
            self._call.cancel()
        while (response := self._next()) is not None:
            data = response.arrow_record_batch.serialized_record_batch
            if data:
                yield pa.ipc.read_record_batch(pa.py_buffer(data), self._source)
