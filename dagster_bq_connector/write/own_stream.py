"""Rows into write streams of one attempt, each row at its offset, so that none arrives twice."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import pyarrow as pa

from dagster_bq_connector.clients import Clients
from dagster_bq_connector.errors import (
    ConnectorError,
    FailedRow,
    Fault,
    RefusedError,
    RequestTooLargeError,
    explain_fault,
)
from dagster_bq_connector.progress import Progress
from dagster_bq_connector.retry import PASSING, Backoff
from dagster_bq_connector.schema.proto import delimited, varint
from dagster_bq_connector.table.admin import EnsuredTable
from dagster_bq_connector.write.connection import (
    IDLE_SECONDS,
    STALL_SECONDS,
    AppendRefused,
    Connection,
    Turnstile,
    append_rows,
)
from dagster_bq_connector.write.default_stream import (
    PREFERRED_BYTES,
    REQUEST_LIMIT,
    SCHEMA_LAG_SECONDS,
    SMALLEST_LIMIT,
)
from dagster_bq_connector.write.encode import Encoder, OversizedRow
from dagster_bq_connector.write.piece import Piece
from dagster_bq_connector.write.pool import POOL_BYTES, SMALLEST_WINDOW, WINDOW_BYTES
from dagster_bq_connector.write.protobuf import encoder_for
from dagster_bq_connector.write.steps import step
from dagster_bq_connector.write.streams import Streams, Type

OFFSET, VALUE = 2, 1  # field numbers of AppendRowsRequest.offset, and of its Int64Value


@dataclass(frozen=True, slots=True)
class _Sent:
    answer: Future[int | None]
    piece: Piece
    offset: int
    size: int


class OwnStream:
    """One stream: what is sent to it, and what is acknowledged.

    Requests go out one after the other without waiting. When one is refused, those after it are,
    too, since rows are missing before them: so all are sent again from that one on, in order.

    Attributes:
        name: Its resource name.
        rows: Rows that are acknowledged.
        bytes: Bytes of them.
    """

    def __init__(
        self,
        name: str,
        encoder: Encoder,
        open_connection: Callable[[Callable[[bytes], bytes], str], Connection],
        clients: Clients,
        progress: Progress,
        deadline: float,
    ) -> None:
        """Begin at offset 0; nothing is sent yet."""
        self.name, self._encoder, self._clients = name, encoder, clients
        self._open, self._progress, self._deadline = open_connection, progress, deadline
        self._connection = self._open(self._first, name)
        self._sent: deque[_Sent] = deque()
        self._next = 0
        self._waits: dict[Fault, Iterator[float]] = {}
        self.rows = self.bytes = self._reconnects = 0

    @property
    def load(self) -> int:
        """Bytes in flight."""
        return self._connection.load

    @property
    def held(self) -> int:
        """Bytes of the requests whose rows are kept, since they may have to be sent again."""
        return sum(sent.size for sent in self._sent)

    @property
    def reconnects(self) -> int:
        """How often a call broke while requests were under way."""
        return self._reconnects + self._connection.reconnects

    def send(self, piece: Piece) -> None:
        """Send rows at the next offset.

        Raises:
            RowsRefused: A row is too large for any request.
            ConnectorError: The stream takes no more rows.
        """
        limit = self._clients.request_limit or REQUEST_LIMIT
        for cut in self._encoder.cut(piece.batch, limit, min(PREFERRED_BYTES, limit)):
            if isinstance(cut, OversizedRow):
                raise _Oversized(piece.index(cut.start), cut.size, limit)
            payload = _at(self._next) + cut.payload
            try:
                with step("append rows"):
                    answer = self._connection.send(payload)
            except AppendRefused as refusal:
                answer = Future[int | None]()
                answer.set_exception(refusal)
            part = piece.slice(cut.start, cut.rows)
            self._sent.append(_Sent(answer, part, self._next, len(payload)))
            self._next += cut.rows

    def settle(self, only_done: bool = False) -> None:
        """Deal with the answers, of those that are there or of all."""
        while self._sent and (not only_done or self._sent[0].answer.done()):
            try:
                self._sent[0].answer.result()
            except RequestTooLargeError:
                self._halve(self._sent[0])
            except AppendRefused as refusal:
                if refusal.fault is Fault.TAKEN:  # an earlier try of this very request was taken
                    self._acknowledged()
                    if self._connection.failed:  # the call has ended, for those behind it too
                        self._again()
                else:
                    self._refused(refusal)
            else:
                self._acknowledged()

    def close(self) -> None:
        """Wait for all answers, then end the call."""
        self._connection.close()

    def abandon(self) -> None:
        """End the call now."""
        self._connection.abandon()

    def _first(self, payload: bytes) -> bytes:
        length = 2 + payload[1]
        return payload[:length] + self._encoder.first(payload[length:])

    def _acknowledged(self) -> None:
        sent = self._sent.popleft()
        self._waits.clear()
        self.rows += sent.piece.batch.num_rows
        self.bytes += sent.size
        self._progress.advance(sent.piece.batch.num_rows)

    def _refused(self, refusal: AppendRefused) -> None:
        fault, sent = refusal.fault, self._sent[0]
        if fault is Fault.TOO_LARGE:
            self._halve(sent)
        elif fault is Fault.ROWS:
            bad = [FailedRow(sent.piece.index(row), text) for row, text in refusal.row_errors]
            raise RowsRefused(bad)
        elif fault in PASSING or fault is Fault.SCHEMA_LAG:
            self._pause(refusal)
            self._again()
        elif fault is Fault.STREAM_OVER:
            raise RefusedError(
                f"Write stream {self.name} takes no more rows: {refusal}. What of it is not "
                "visible yet will never be: write again."
            ) from refusal
        elif fault is Fault.GAP:
            raise RefusedError(
                f"Write stream {self.name} has lost rows that it had acknowledged: {refusal}"
            ) from refusal
        else:
            raise explain_fault(fault, str(refusal), f"Write stream {self.name}") from refusal

    def _halve(self, sent: _Sent) -> None:
        """The server takes less than was thought: remember, and cut again."""
        limit = self._clients.request_limit or REQUEST_LIMIT
        if sent.piece.batch.num_rows == 1:
            raise _Oversized(sent.piece.index(0), sent.size, sent.size - 1)
        half = max(SMALLEST_LIMIT, min(limit, sent.size // 2))
        self._clients.remember_request_limit(half)
        self._again()

    def _pause(self, refusal: AppendRefused) -> None:
        fault = refusal.fault
        if fault not in self._waits:
            deadline = SCHEMA_LAG_SECONDS if fault is Fault.SCHEMA_LAG else self._deadline
            self._waits[fault] = Backoff(initial=0.25, deadline=deadline).pauses()
        if (pause := next(self._waits[fault], None)) is None:
            raise explain_fault(fault, str(refusal), f"Write stream {self.name}") from refusal
        self._progress.wait(f"waiting {pause:.1f} s to try again: {refusal}")
        time.sleep(pause)

    def _again(self) -> None:
        """Send what is not acknowledged again, in order, once every answer is there."""
        self._connection.drain()
        self._reconnects += self._connection.reconnects
        self._connection.abandon()
        self._connection = self._open(self._first, self.name)
        waiting, self._sent = list(self._sent), deque()
        self._next = waiting[0].offset if waiting else self._next
        for sent in waiting:
            self.send(sent.piece)


class RowsRefused(ConnectorError):
    """BigQuery refused rows; who sent them knows of the others that failed."""

    def __init__(self, rows: list[FailedRow]) -> None:
        super().__init__(f"{len(rows)} rows were refused")
        self.rows = rows


class _Oversized(RowsRefused):
    def __init__(self, index: int, size: int, limit: int) -> None:
        reason = (
            f"it takes {size:,} bytes, and one request takes {limit:,}: shorten it, or write it "
            "with FileLoadsWriter"
        )
        super().__init__([FailedRow(index, reason)])


class OwnStreams:
    """Streams of one attempt to one table, for what one alone is too slow for.

    A stream is made when all those before it have something in flight.
    """

    def __init__(
        self,
        clients: Clients,
        streams: Streams,
        table: EnsuredTable,
        schema: pa.Schema,
        kind: Type,
        count: int,
        progress: Progress,
        deadline: float,
    ) -> None:
        """Prepare up to `count` streams; none is made before rows are sent.

        Args:
            clients: Where to.
            streams: The control calls.
            table: The table, which exists.
            schema: The rows' columns, in the wire types of the table's.
            kind: `PENDING`, `BUFFERED` or `COMMITTED`.
            count: How many at most.
            progress: Counts acknowledged rows, and is told of waits.
            deadline: Seconds without any success after which it fails.
        """
        self._clients, self._control, self._table, self._schema = clients, streams, table, schema
        self._kind, self._count, self._progress, self._deadline = kind, count, progress, deadline
        self._turnstile = Turnstile()
        self._streams: list[OwnStream] = []

    def send(self, piece: Piece) -> None:
        """Send rows over the stream with the least in flight; wait while all are full.

        Raises:
            RowsRefused: BigQuery refuses rows.
            ConnectorError: A stream takes no more rows.
        """
        if not piece.batch.num_rows:
            return
        self._choose().send(piece)
        for each in self._streams:
            each.settle(only_done=True)

    def acknowledged(self) -> dict[str, int]:
        """Wait for all answers; more rows may follow.

        Returns:
            The rows that each stream holds, by its name.

        Raises:
            RowsRefused: BigQuery refuses rows.
            ConnectorError: A stream takes no more rows.
        """
        for each in self._streams:
            each.settle()
        return {each.name: each.rows for each in self._streams}

    def finish(self) -> dict[str, int]:
        """Wait for all answers and finalize the streams.

        Returns:
            The rows of each stream, by its name.

        Raises:
            RefusedError: A stream holds another number of rows than were acknowledged.
            ConnectorError: As for `send`.
        """
        self.acknowledged()
        for each in self._streams:
            each.close()
        counts = {each.name: self._control.finalize(each.name) for each in self._streams}
        for each in self._streams:
            if (held := counts[each.name]) != each.rows:
                raise RefusedError(
                    f"Write stream {each.name} holds {held} rows of {each.rows} acknowledged. "
                    "Nothing of it is visible: write again."
                )
        return counts

    def abandon(self) -> None:
        """End all calls now. What the streams hold is never seen."""
        for each in self._streams:
            each.abandon()

    @property
    def held(self) -> int:
        """Bytes of the requests whose rows are kept, since they may have to be sent again."""
        return sum(each.held for each in self._streams)

    @property
    def bytes(self) -> int:
        """Bytes that were acknowledged."""
        return sum(each.bytes for each in self._streams)

    @property
    def reconnects(self) -> int:
        """How often a call broke while requests were under way."""
        return sum(each.reconnects for each in self._streams)

    def _choose(self) -> OwnStream:
        idle = [each for each in self._streams if not each.load]
        if not idle and len(self._streams) < self._count:
            self._streams.append(self._make(len(self._streams)))
            return self._streams[-1]
        return min(idle or self._streams, key=lambda each: each.load)

    def _make(self, number: int) -> OwnStream:
        name = self._control.create(self._table, self._kind)
        encoder = encoder_for(self._table.columns, self._schema, name)
        window = max(SMALLEST_WINDOW, min(WINDOW_BYTES, POOL_BYTES // self._count))
        channel = self._clients.append_channel(number)

        def connect(first: Callable[[bytes], bytes], name: str) -> Connection:
            return Connection(
                append_rows(channel, name),
                first,
                backoff=Backoff(deadline=self._deadline),
                window=window,
                stall=min(STALL_SECONDS, self._deadline),
                idle=IDLE_SECONDS,
                turnstile=self._turnstile,
                tell=self._progress.wait,
                what=f"Write stream {name}",
            )

        return OwnStream(name, encoder, connect, self._clients, self._progress, self._deadline)


def _at(offset: int) -> bytes:
    """The field of a request that says where its first row goes."""
    return delimited(OFFSET, varint(VALUE << 3) + varint(offset) if offset else b"")
