"""One AppendRows call: requests go out in order, acknowledgements come back in order.

Google's `AppendRowsStream` is not used: it polls for answers, gives answers to the wrong requests
when two threads send, has no back-pressure and does not send again what a broken call lost.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.cloud.bigquery_storage_v1 import types

from dagster_bq_connector.errors import (
    ConnectorError,
    Fault,
    QuotaError,
    RequestTooLargeError,
    UnreachableError,
    classify,
    classify_answer,
    error_text,
)
from dagster_bq_connector.retry import PASSING, Backoff

METHOD = "/google.cloud.bigquery.storage.v1.BigQueryWrite/AppendRows"
# In flight: more than a second's worth of the 10 MB/s that the service takes from a connection.
# More would only push the rows out of the processor's caches before they are sent.
WINDOW_BYTES = 16 * 1024 * 1024
WINDOW_REQUESTS = 1000  # of small ones the objects around them weigh more than their bytes
STALL_SECONDS = 60.0
# The service ends a call with an error after 600 seconds without a request; some networks sooner.
IDLE_SECONDS = 240.0

# The classes below proto-plus: parsing into them costs a third of parsing into the wrappers.
_Response: Any = types.AppendRowsResponse.pb()


class AppendRefused(ConnectorError):
    """The server answered a request with an error; the connection goes on.

    Attributes:
        fault: What it means.
        row_errors: (position in the request, message) of each bad row, when rows are to blame.
    """

    def __init__(self, fault: Fault, text: str, row_errors: list[tuple[int, str]]) -> None:
        super().__init__(text)
        self.fault, self.row_errors = fault, row_errors


@dataclass(slots=True, eq=False)
class _InFlight:
    payload: bytes
    answer: Future[int | None] = field(default_factory=lambda: Future[int | None]())


class Turnstile:
    """Where senders wait for room in the window of a connection, or of any one of several."""

    def __init__(self) -> None:
        """The lock is that of the connections too, so that no room is missed."""
        self.lock = threading.RLock()
        self.room = threading.Condition(self.lock)


def append_rows(channel: grpc.Channel, stream: str) -> Callable[[Iterator[bytes]], Any]:
    """The AppendRows method for one write stream: bytes in, bytes out."""
    method = channel.stream_stream(METHOD, request_serializer=None, response_deserializer=None)
    metadata = (("x-goog-request-params", f"write_stream={stream}"),)

    def open_call(requests: Iterator[bytes]) -> Any:
        return method(requests, metadata=metadata)

    return open_call


class Connection:
    """Sends requests over one AppendRows call, and opens it again when it breaks.

    Any thread may send. When the call breaks (the server restarts, the network went away, nothing
    was answered for `stall` seconds), a new one is opened, the head with the writer schema goes
    first, and every request without acknowledgement is sent again in its order. A call that has
    nothing to do for `idle` seconds is ended, and the next request opens another.

    Attributes:
        reconnects: How often a call broke while requests were under way.
        updated_schema: The table's schema (a protobuf `TableSchema`), once the server has told
            that it changed.
    """

    def __init__(
        self,
        open_call: Callable[[Iterator[bytes]], Any],
        first: Callable[[bytes], bytes],
        *,
        backoff: Backoff,
        window: int = WINDOW_BYTES,
        stall: float = STALL_SECONDS,
        idle: float = IDLE_SECONDS,
        turnstile: Turnstile | None = None,
        tell: Callable[[str], None] = lambda _: None,
        what: str = "The append",
    ) -> None:
        """Start with no call: it is opened for the first request.

        Args:
            open_call: Starts a call from an iterator of requests; gives an iterator of responses.
            first: Makes the first request of a call from a payload: it adds the writer schema.
            backoff: Pauses between failed openings, and how long to go on without any success.
            window: Bytes in flight at most; `send` waits for room.
            stall: Seconds without an acknowledgement after which the call is given up as broken.
            idle: Seconds without a request after which the call is ended.
            turnstile: Is shared by connections among which a sender chooses.
            tell: Is told, in a thread of the connection, what is waited for before another try.
            what: What errors are about.
        """
        self._open_call, self._first = open_call, first
        self._tell, self._what = tell, what
        self._backoff, self._stall, self._idle = backoff, stall, idle
        self._window = self._widest = window
        turnstile = turnstile or Turnstile()
        self._lock, self._room = turnstile.lock, turnstile.room
        self._changed = threading.Condition(self._lock)  # there is something for the call to do
        self._in_flight: deque[_InFlight] = deque()
        self._sent = 0  # how many of `_in_flight`, from the left, this call has taken
        self._bytes = 0
        self._call: Any = None
        self._generation = 0  # of calls; an old call's sender stops when it changes
        self._moved = time.monotonic()  # the last acknowledgement, or the first send after rest
        self._answers = 0
        self._resting = False  # the call was ended because there was nothing to do
        self._stalled: ConnectionError | None = None  # it was given up, for this reason
        self._closed = False
        self._ended = threading.Event()  # the same for the watch, which needs no lock to wait
        self._failure: ConnectorError | None = None
        self._threads: list[threading.Thread] = []
        self.reconnects = 0
        self.updated_schema: Any = None

    def send(self, payload: bytes) -> Future[int | None]:
        """Queue one request; wait while the window is full.

        Returns:
            What becomes of it: the offset of its first row, or None on a default stream. It fails
            with `AppendRefused` when the server refuses it, `RequestTooLargeError` when it must be
            split, and with the connection's error when that failed for good.

        Raises:
            ConnectorError: The connection has failed for good, or is closed.
        """
        request = _InFlight(payload)
        with self._lock:
            while not self.takes(len(payload)):
                self._check()
                self._room.wait()
            self._check()
            if not self._in_flight:
                self._moved = time.monotonic()
            self._in_flight.append(request)
            self._bytes += len(payload)
            if not self._threads:
                self._start()
            self._changed.notify_all()
        return request.answer

    def takes(self, size: int) -> bool:
        """Whether a request of `size` bytes need not wait; one alone is always taken."""
        if self._failure is not None or not self._in_flight:
            return self._failure is None
        return len(self._in_flight) < WINDOW_REQUESTS and self._bytes + size <= self._window

    @property
    def load(self) -> int:
        """Bytes in flight."""
        return self._bytes

    @property
    def failed(self) -> bool:
        """Whether it has failed for good: it takes no more requests, and all are answered."""
        return self._failure is not None

    def drain(self) -> None:
        """Wait until everything sent is answered, with success or not."""
        with self._lock:
            self._room.wait_for(lambda: not self._in_flight)

    def close(self) -> None:
        """Wait for all answers, then end the call. Safe to call twice."""
        self.drain()
        self._end()

    def abandon(self) -> None:
        """End the call now. Requests without answer fail."""
        with self._lock:
            self._fail(UnreachableError("The connection was closed before an answer came."))
        self._end()

    def _start(self) -> None:
        for run in (self._run, self._watch):
            thread = threading.Thread(target=run, name=f"append-rows{run.__name__}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _end(self) -> None:
        with self._lock:
            self._closed = True
            self._ended.set()
            self._cancel()
            self._changed.notify_all()
            self._room.notify_all()
            threads, self._threads = self._threads, []
        for thread in threads:
            thread.join()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise UnreachableError("The connection is closed.")

    def _watch(self) -> None:
        """Give up a call that has stalled (nothing comes back), and end one that is not used."""
        while not self._ended.wait(min(self._stall, self._idle) / 4):
            with self._lock:
                quiet = time.monotonic() - self._moved
                if self._in_flight and quiet > self._stall:
                    self._moved = time.monotonic()
                    text = f"nothing was acknowledged for {quiet:.0f} s"
                    self._stalled = ConnectionAbortedError(text)
                    self._cancel()
                elif not self._in_flight and quiet > self._idle:
                    self._resting = True
                    self._generation += 1  # what is sent from now on goes over the next call
                    self._changed.notify_all()
                    self._cancel()

    def _cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()

    def _run(self) -> None:
        """Open calls, one after the other, for as long as there is something to send."""
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001  # whoever waits must be told, whatever it was
            text = f"{self._what}: the connection failed: {type(error).__name__}: {error}"
            with self._lock:
                self._fail(_caused(UnreachableError(text), error))

    def _serve(self) -> None:
        pauses, last = self._backoff.pauses(), None
        while self._await_work():
            before = self._answers
            error = self._converse()
            if self._answers > before:
                pauses, last = self._backoff.pauses(), None
            if error is None:
                continue
            fault = classify(error)
            with self._lock:
                self.reconnects += 1
                pause = self._after(error, fault, last, pauses)
            last = fault
            if pause:
                self._tell(f"waiting {pause:.1f} s to connect again: {error_text(error)}")
                with self._lock:
                    self._changed.wait_for(lambda: self._closed, timeout=pause)

    def _await_work(self) -> bool:
        with self._lock:
            self._changed.wait_for(lambda: self._in_flight or self._closed)
            return not self._closed

    def _converse(self) -> Exception | None:
        """One call from its opening to its end. Returns why it ended, when that was too soon."""
        with self._lock:
            self._generation += 1
            self._sent, self._resting, self._stalled = 0, False, None
            requests = self._requests(self._generation)
        try:
            call = self._open_call(requests)
            with self._lock:
                self._call = call
                if self._closed:
                    call.cancel()
            for response in call:
                self._acknowledge(_Response.FromString(response))
            error: Exception | None = ConnectionResetError("the server ended the call")
        except (grpc.RpcError, ValueError) as failure:  # the latter of a channel that is closed
            error = failure
        with self._lock:
            self._call = None
            self._generation += 1  # the sender of this call stops
            self._changed.notify_all()
            return self._stalled or error if self._in_flight and not self._resting else None

    def _requests(self, generation: int) -> Iterator[bytes]:
        """What one call sends. gRPC reads it in a thread of its own."""
        dress = self._first
        while True:
            with self._lock:
                self._changed.wait_for(
                    lambda: (
                        generation != self._generation
                        or self._closed
                        or self._sent < len(self._in_flight)
                    )
                )
                if generation != self._generation or self._closed:
                    return
                payload = self._in_flight[self._sent].payload
                self._sent += 1
            yield dress(payload)
            dress = bytes  # gives back the same object

    def _acknowledge(self, response: Any) -> None:
        refusal = _refusal(response) if response.HasField("error") else None
        with self._lock:
            if response.HasField("updated_schema"):
                self.updated_schema = response.updated_schema
            if not self._in_flight:
                return  # abandoned
            request = self._take(0)
            self._moved = time.monotonic()
            if refusal is None:  # only success resets the deadline
                self._answers += 1
                self._window = min(self._widest, self._window + len(request.payload))
            elif refusal.fault is Fault.THROTTLED:
                self._narrow()
            self._room.notify_all()
        if refusal is not None:
            request.answer.set_exception(refusal)
        else:
            offset = response.append_result.offset
            has_offset = response.append_result.HasField("offset")
            request.answer.set_result(offset.value if has_offset else None)

    def _take(self, index: int) -> _InFlight:
        request = self._in_flight[index]
        del self._in_flight[index]
        self._sent = max(0, self._sent - 1)
        self._bytes -= len(request.payload)
        return request

    def _narrow(self) -> None:
        """Halve the window; a single request always fits."""
        self._window = max(1, self._window // 2)

    def _after(
        self, error: Exception, fault: Fault, last: Fault | None, pauses: Iterator[float]
    ) -> float:
        """Decide what a broken call means. Returns the seconds to wait before the next."""
        if not self._in_flight:
            return 0.0
        if fault is Fault.TOO_LARGE:
            sizes = [len(request.payload) for request in self._in_flight]
            refused = self._take(sizes.index(max(sizes)))
            refused.answer.set_exception(_caused(RequestTooLargeError(error_text(error)), error))
            self._room.notify_all()
            return 0.0
        if fault not in PASSING:
            self._fail(_caused(AppendRefused(fault, error_text(error), []), error))
            return 0.0
        if fault is Fault.THROTTLED:
            self._narrow()
        pause = next(pauses, None)
        if pause is None:
            said = f"nothing was acknowledged within the deadline. Last: {error_text(error)}"
            kind = QuotaError if fault is Fault.THROTTLED else UnreachableError
            self._fail(_caused(kind(f"{self._what}: {said}"), error))
            return 0.0
        drains = fault is Fault.BROKEN and last is not Fault.BROKEN
        return 0.0 if drains else pause  # another server is ready for those of one that drains

    def _fail(self, failure: ConnectorError) -> None:
        """Fail everything in flight and what would come. The lock is held."""
        self._failure = failure
        waiting, self._in_flight, self._bytes, self._sent = self._in_flight, deque(), 0, 0
        for request in waiting:
            request.answer.set_exception(failure)
        self._changed.notify_all()
        self._room.notify_all()


def _refusal(response: Any) -> AppendRefused:
    rows = [(int(error.index), str(error.message)) for error in response.row_errors]
    return AppendRefused(classify_answer(response), response.error.message, rows)


def _caused(failure: ConnectorError, cause: Exception) -> ConnectorError:
    failure.__cause__ = cause
    return failure
