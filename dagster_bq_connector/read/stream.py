"""The rows of one read stream, resumed where it broke."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
from google.cloud.bigquery_storage_v1 import types

from dagster_bq_connector.errors import RefusedError, UnreachableError, explain
from dagster_bq_connector.faults import classify, error_code, error_text
from dagster_bq_connector.read.message import Message
from dagster_bq_connector.retry import PASSING, Backoff

METHOD = "/google.cloud.bigquery.storage.v1.BigQueryRead/ReadRows"
IDLE_SECONDS = 120.0

_Request: Any = types.ReadRowsRequest.pb()
_EXPIRED = re.compile(r"(session|stream)\b.{0,40}\bexpired", re.I)


class StreamReader:
    """Reads one stream from an offset, and goes on from the last row after a break."""

    def __init__(self, channel: grpc.Channel, stream: str, deadline: float) -> None:
        """Prepare to read; nothing is opened yet.

        Args:
            channel: The Storage API.
            stream: Resource name of the read stream.
            deadline: Seconds to try without a row before it fails. After two minutes without a
                message a call is given up as broken, and another one opened.
        """
        self._method = channel.unary_stream(METHOD, request_serializer=_Request.SerializeToString)
        self._stream, self._deadline = stream, deadline
        self._call: Any = None
        self._stopped = threading.Event()
        self._given_up = False
        self._message_awaited: float | None = None  # since when
        self._row_awaited = 0.0

    def messages(self) -> Iterator[Message]:
        """Yield the rows of the stream, each once. A message is fetched when it is asked for.

        Raises:
            ConnectorError: The stream cannot be read on.
        """
        offset, pauses = 0, self._pauses()
        while not self._stopped.is_set():
            try:
                for message in self._open(offset):
                    offset += message.rows
                    yield message
                    del message  # it is another thread's now
                    pauses = self._pauses()
            except grpc.RpcError as error:
                if self._stopped.is_set():
                    return
                self._stopped.wait(self._pause(error, pauses))
            else:
                return

    def stop(self) -> None:
        """End the call; `messages` ends soon after. Any thread may."""
        self._stopped.set()
        if self._call is not None:
            self._call.cancel()

    def check_idle(self) -> None:
        """Give the call up when nothing has come for too long; `messages` then opens another."""
        since, now = self._message_awaited, time.monotonic()
        if since is None or (now - since <= IDLE_SECONDS and self._left() > 0):
            return
        self._message_awaited = None
        self._given_up = True
        self._call.cancel()

    def _pauses(self) -> Iterator[float]:
        """Start to wait for a row: how long the consumer took for the last one does not count."""
        self._row_awaited = time.monotonic()
        return Backoff(deadline=math.inf).pauses()

    def _left(self) -> float:
        return self._row_awaited + self._deadline - time.monotonic()

    def _pause(self, error: grpc.RpcError, pauses: Iterator[float]) -> float:
        """Seconds to wait before the stream is opened again; or an error that explains."""
        fault, text = classify(error), error_text(error)
        if self._given_up:
            text = "nothing came, and the call was given up"
        if _EXPIRED.search(text) or error_code(error) is grpc.StatusCode.NOT_FOUND:
            raise RefusedError(
                f"Read stream {self._stream} is gone: a read session lasts six hours. Read the "
                f"table again, for new sessions with the rows of then. BigQuery said: {text}"
            ) from error
        if fault not in PASSING:
            raise explain(error, f"Read stream {self._stream}") from error
        if (left := self._left()) <= 0:
            raise UnreachableError(
                f"Read stream {self._stream}: no row within the deadline. Last: {text}"
            ) from error
        return min(left, next(pauses))

    def _open(self, offset: int) -> Iterator[Message]:
        metadata = (("x-goog-request-params", f"read_stream={self._stream}"),)
        request = _Request(read_stream=self._stream, offset=offset)
        self._given_up = False
        self._call = self._method(request, metadata=metadata)
        if self._stopped.is_set():  # while it was opened
            self._call.cancel()
        while (response := self._next()) is not None:
            message = Message.parse(response)
            if message.rows:
                yield message
            del response, message

    def _next(self) -> bytes | None:
        self._message_awaited = time.monotonic()
        try:
            return next(self._call, None)
        finally:
            self._message_awaited = None
