"""Append over the default stream: at least once, visible as soon as it is acknowledged."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import pyarrow as pa
from google.cloud.bigquery import SchemaField

from dagster_bq_connector.clients import Clients
from dagster_bq_connector.errors import (
    ConnectorError,
    FailedRow,
    FailedRowsError,
    Fault,
    RefusedError,
    RequestTooLargeError,
    SchemaError,
    TableNotFoundError,
    UnreachableError,
)
from dagster_bq_connector.progress import Progress
from dagster_bq_connector.retry import PASSING, Backoff
from dagster_bq_connector.schema.conform import Conformer
from dagster_bq_connector.schema.data import Batches
from dagster_bq_connector.table.admin import EnsuredTable
from dagster_bq_connector.write.connection import (
    STALL_SECONDS,
    AppendRefused,
    Connection,
    append_rows,
)
from dagster_bq_connector.write.encode import Encoder, OversizedRow
from dagster_bq_connector.write.protobuf import encoder_for
from dagster_bq_connector.write.result import WriteResult

# The service takes 10 MiB; what it counts beside the rows is left some room.
REQUEST_LIMIT = int(9.5 * 1024 * 1024)
# Measured best for CPU caches and latency.
PREFERRED_BYTES = 2 * 1024 * 1024
# How long a table that was just created may be unknown to the Storage API.
NEW_TABLE_SECONDS = 120.0
SMALLEST_LIMIT = 64 * 1024  # a limit below this is no limit but a broken server

MakeEncoder: TypeAlias = Callable[[Sequence[SchemaField], pa.Schema, str], Encoder]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows of one batch; `indices` are their positions in the data, or where they begin there."""

    batch: pa.RecordBatch
    indices: np.ndarray[tuple[int], np.dtype[np.int64]] | int

    def index(self, row: int) -> int:
        return self.indices + row if isinstance(self.indices, int) else int(self.indices[row])

    def slice(self, start: int, rows: int) -> _Piece:
        indices = self.indices
        kept = indices + start if isinstance(indices, int) else indices[start : start + rows]
        return _Piece(self.batch.slice(start, rows), kept)

    def without(self, bad: Iterable[int]) -> _Piece:
        good = np.setdiff1d(np.arange(self.batch.num_rows), list(bad))
        first = self.indices
        kept = good + first if isinstance(first, int) else first[good]
        return _Piece(self.batch.take(pa.array(good, pa.int64())), kept)


@dataclass(frozen=True, slots=True)
class _Sent:
    answer: Future[int | None]
    piece: _Piece
    size: int
    at: float


def append(
    clients: Clients,
    table: EnsuredTable,
    data: Batches,
    progress: Progress,
    deadline: float,
    encoder: MakeEncoder = encoder_for,
) -> WriteResult:
    """Append rows and wait until every one is acknowledged.

    Args:
        clients: Where to.
        table: The table, which exists.
        data: The rows.
        progress: Counts acknowledged rows.
        deadline: Seconds without any success after which it fails.
        encoder: Makes the encoder from the table's columns, the schema and the stream's name.

    Returns:
        What was appended.

    Raises:
        SchemaError: The columns do not fit the table. Nothing was sent.
        FailedRowsError: Some rows were refused; the others are in the table.
        UnreachableError: Rows without acknowledgement may or may not be in the table.
        RefusedError: BigQuery refused the append as a whole.
    """
    appender = _Appender(clients, table, data.schema, progress, deadline, encoder)
    try:
        position = 0
        for batch in data.batches:
            appender.add(batch, position)
            position += batch.num_rows
        appender.settle()
    except BaseException:
        appender.connection.abandon()
        raise
    appender.connection.close()
    if appender.failed:
        rows = sorted(appender.failed, key=lambda row: row.index)
        raise FailedRowsError(table.ref, rows, appender.rows)
    return WriteResult(
        table=table.ref,
        method="default_stream",
        operation="append",
        rows=appender.rows,
        bytes=appender.bytes,
        columns=table.columns,
    )


class _Appender:
    """Sends pieces and deals with what becomes of them."""

    def __init__(
        self,
        clients: Clients,
        table: EnsuredTable,
        schema: pa.Schema,
        progress: Progress,
        deadline: float,
        encoder: MakeEncoder,
    ) -> None:
        self._clients, self._table, self._progress = clients, table, progress
        self._backoff = Backoff(deadline=deadline)
        self._stream = f"{table.ref.path}/streams/_default"
        self._conform = Conformer(schema, table.columns)
        self._encoder = encoder(table.columns, self._conform.schema, self._stream)
        self._sent: deque[_Sent] = deque()
        self._new_until = time.monotonic() + NEW_TABLE_SECONDS - table.age
        self._pauses: Iterator[float] | None = None  # since the last success
        self._paused = 0.0  # when the last pause ended
        self.connection = self._connect()
        self.rows = self.bytes = 0
        self.failed: list[FailedRow] = []

    def add(self, batch: pa.RecordBatch, position: int) -> None:
        """Send the rows of a batch that begins at `position` of the data."""
        conformed = self._conform(batch)
        self.failed += [row.moved(position) for row in conformed.failed]
        kept = conformed.positions
        self._send(_Piece(conformed.batch, position if kept is None else kept + position))
        self.settle(only_done=True)

    def settle(self, only_done: bool = False) -> None:
        """Deal with the answers, of those that are there or of all."""
        while self._sent and (not only_done or self._sent[0].answer.done()):
            sent = self._sent.popleft()
            try:
                sent.answer.result()
            except RequestTooLargeError:
                self._split(sent)
            except AppendRefused as refusal:
                self._refused(refusal, sent)
            else:
                self._pauses = None
                self.rows += sent.piece.batch.num_rows
                self.bytes += sent.size
                self._progress.advance(sent.piece.batch.num_rows)

    def _connect(self) -> Connection:
        call = append_rows(self._clients.channel, self._stream)
        stall = min(STALL_SECONDS, self._backoff.deadline)
        return Connection(call, self._encoder.first, backoff=self._backoff, stall=stall)

    def _send(self, piece: _Piece) -> None:
        if not piece.batch.num_rows:
            return
        limit = self._clients.request_limit or REQUEST_LIMIT
        for cut in self._encoder.cut(piece.batch, limit, min(PREFERRED_BYTES, limit)):
            if isinstance(cut, OversizedRow):
                self._oversized(piece.index(cut.start), cut.size, limit)
                continue
            part = piece.slice(cut.start, cut.rows)
            try:
                answer = self.connection.send(cut.payload)
            except AppendRefused as refusal:
                answer = Future[int | None]()
                answer.set_exception(refusal)
            size = len(cut.payload)
            self._sent.append(_Sent(answer, part, size, time.monotonic()))

    def _oversized(self, index: int, size: int, limit: int) -> None:
        reason = (
            f"it takes {size:,} bytes, and one request takes {limit:,}: shorten it, or write it "
            "with FileLoadsWriter"
        )
        self.failed.append(FailedRow(index, reason))

    def _split(self, sent: _Sent) -> None:
        """The server takes less than was thought: remember, and cut again."""
        if sent.piece.batch.num_rows == 1:
            self._oversized(sent.piece.index(0), sent.size, sent.size - 1)
            return
        limit = self._clients.request_limit or REQUEST_LIMIT
        self._clients.request_limit = max(SMALLEST_LIMIT, min(limit, sent.size // 2))
        self._send(sent.piece)

    def _refused(self, refusal: AppendRefused, sent: _Sent) -> None:
        fault = refusal.fault
        if fault is Fault.TOO_LARGE:
            self._split(sent)
        elif fault is Fault.ROWS:
            bad = dict(refusal.row_errors)
            self.failed += [FailedRow(sent.piece.index(row), text) for row, text in bad.items()]
            self._send(sent.piece.without(bad))
        elif self._passes(fault):
            self._pause(refusal, sent)
            self._send(sent.piece)
        else:
            raise self._error(refusal) from refusal

    def _passes(self, fault: Fault) -> bool:
        """Whether the same rows may be taken next time.

        A table that was created just now may be unknown, or denied, to the Storage API.
        """
        new = time.monotonic() < self._new_until
        return fault in PASSING or (new and fault in (Fault.TABLE_MISSING, Fault.DENIED))

    def _pause(self, refusal: AppendRefused, sent: _Sent) -> None:
        """Wait before the rows are sent again: once for all that was sent before the last pause."""
        if sent.at < self._paused:
            return
        self._pauses = self._pauses or self._backoff.pauses()
        if (pause := next(self._pauses, None)) is None:
            raise self._error(refusal) from refusal
        time.sleep(pause)
        if self.connection.failed:
            self.connection.abandon()
            self.connection = self._connect()
        self._paused = time.monotonic()

    def _error(self, refusal: AppendRefused) -> ConnectorError:
        if refusal.fault in (Fault.TABLE_MISSING, Fault.DENIED):
            return TableNotFoundError(
                f"Table {self._table.ref} is gone, or these credentials may not write to it "
                f"(bigquery.tables.updateData). BigQuery said: {refusal}"
            )
        if refusal.fault is Fault.SCHEMA_LAG:
            return SchemaError(
                f"Table {self._table.ref} lost a column, or gained it moments ago: {refusal}"
            )
        if refusal.fault in PASSING:
            return UnreachableError(
                f"Table {self._table.ref}: no success within the deadline. Last: {refusal}"
            )
        return RefusedError(f"Table {self._table.ref}: {refusal}")
