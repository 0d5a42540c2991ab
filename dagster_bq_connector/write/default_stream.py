"""Append over the default stream: at least once, visible as soon as it is acknowledged."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeAlias

import pyarrow as pa
from google.cloud.bigquery import SchemaField

from dagster_bq_connector.clients import Clients
from dagster_bq_connector.errors import (
    AccessDeniedError,
    ConnectorError,
    FailedRow,
    FailedRowsError,
    Fault,
    PartitionError,
    RequestTooLargeError,
    SchemaError,
    TableNotFoundError,
    explain_fault,
)
from dagster_bq_connector.progress import Progress
from dagster_bq_connector.retry import PASSING, Backoff
from dagster_bq_connector.schema.conform import Conformer
from dagster_bq_connector.schema.data import Batches
from dagster_bq_connector.table.admin import EnsuredTable
from dagster_bq_connector.write.connection import (
    IDLE_SECONDS,
    STALL_SECONDS,
    AppendRefused,
    Connection,
    Turnstile,
    append_rows,
)
from dagster_bq_connector.write.encode import Encoder, OversizedRow
from dagster_bq_connector.write.piece import Piece, Sent
from dagster_bq_connector.write.pool import Pool
from dagster_bq_connector.write.protobuf import encoder_for
from dagster_bq_connector.write.result import NOTHING_WRITTEN, WriteResult
from dagster_bq_connector.write.steps import step

# The service takes 10 MiB; what it counts beside the rows is left some room.
REQUEST_LIMIT = int(9.5 * 1024 * 1024)
# Measured best for CPU caches and latency.
PREFERRED_BYTES = 2 * 1024 * 1024
SMALLEST_LIMIT = 64 * 1024  # a limit below this is no limit but a broken server
# How long a table that was just created may be unknown to the Storage API, and a column that was
# just added: the service takes minutes to notice.
NEW_TABLE_SECONDS = 120.0
SCHEMA_LAG_SECONDS = 600.0
POLL = Backoff(initial=0.25, cap=15.0)

MakeEncoder: TypeAlias = Callable[[Sequence[SchemaField], pa.Schema, str], Encoder]
# Looks at rows as they travel, the first of which has a position in the data.
Check: TypeAlias = Callable[[pa.RecordBatch, int], object]

_MISSING = (Fault.TABLE_MISSING, Fault.DENIED)
# A default stream is never over: what the server says of it passes with another call.
_PASSING = PASSING | {Fault.STREAM_OVER}
_NEW_CALL = (Fault.SCHEMA_LAG, Fault.STREAM_OVER)


def append(
    clients: Clients,
    table: EnsuredTable,
    data: Batches,
    progress: Progress,
    deadline: float,
    *,
    connections: int = 1,
    look_up: Callable[[], EnsuredTable] | None = None,
    check: Check | None = None,
    encoder: MakeEncoder = encoder_for,
) -> WriteResult:
    """Append rows and wait until every one is acknowledged.

    Args:
        clients: Where to.
        table: The table, which exists.
        data: The rows. A later batch may have columns that the first one has not.
        progress: Counts acknowledged rows, and is told of waits.
        deadline: Seconds without any success after which it fails.
        connections: AppendRows calls at once.
        look_up: Finds the table as it is now, for when it changes under way.
        check: Raises for rows that do not belong here, before they are sent.
        encoder: Makes the encoder from the table's columns, the schema and the stream's name.

    Returns:
        What was appended.

    Raises:
        SchemaError: The columns do not fit the table. Nothing was sent, or the table changed, and
            a note of the error says how many rows are in it.
        FailedRowsError: Some rows were refused; the others are in the table.
        PartitionError: `check` refused a row. It says how many rows before it were written.
        TableNotFoundError: The table is gone.
        UnreachableError: Rows without acknowledgement may or may not be in the table.
        QuotaError: BigQuery takes no more for now.
        RefusedError: BigQuery refused the append as a whole.
    """
    appender = Appender(
        clients,
        table,
        data.schema,
        progress,
        deadline,
        connections=connections,
        look_up=look_up,
        encoder=encoder,
    )
    try:
        position = 0
        for batch in data.batches:
            appender.add(batch, position, check)
            position += batch.num_rows
        appender.settle()
    except BaseException as error:
        appender.abandon()
        if isinstance(error, ConnectorError):
            error.add_note(appender.so_far())
        raise
    appender.close()
    if appender.failed:
        rows = sorted(appender.failed, key=lambda row: row.index)
        raise FailedRowsError(table.ref, rows, appender.rows)
    return WriteResult(
        table=table.ref,
        method="default_stream",
        operation="append",
        rows=appender.rows,
        bytes=appender.bytes,
        columns=appender.table.columns,
        reconnects=appender.reconnects,
    )


class Appender:
    """An append that stays open: batches are added, and their answers are dealt with as they come.

    Attributes:
        table: The table as it is known now.
        rows: Rows that are acknowledged.
        bytes: Bytes of their requests.
        failed: Rows that no retry can save. Who has dealt with them may take them out.
    """

    def __init__(
        self,
        clients: Clients,
        table: EnsuredTable,
        schema: pa.Schema,
        progress: Progress,
        deadline: float,
        *,
        connections: int = 1,
        look_up: Callable[[], EnsuredTable] | None = None,
        encoder: MakeEncoder = encoder_for,
    ) -> None:
        """Prepare an append of data whose first batch has this schema; no call is opened yet.

        The arguments and what it raises are those of `append`.
        """
        self._clients, self._progress, self._look_up = clients, progress, look_up
        self._deadline, self._make_encoder = deadline, encoder
        self._stream = f"{table.ref.path}/streams/_default"
        self._know(table)
        self._schema = schema
        self._conform = Conformer(schema, table.columns)
        self._encoder = self._encoder_for(self._conform)
        self._told: Any = None  # the last change of the table that was taken in
        self._sent: deque[Sent] = deque()
        self._waits: dict[Fault, Iterator[float]] = {}  # since the last success
        self._paused = 0.0  # when the last pause ended
        self.rows = self.bytes = 0
        self.failed: list[FailedRow] = []
        self._pool = Pool(self._connect, connections)

    @property
    def reconnects(self) -> int:
        """How often a call broke while requests were under way."""
        return self._pool.reconnects

    @property
    def waiting(self) -> bool:
        """Whether rows were sent whose answers have not been dealt with."""
        return bool(self._sent)

    def add(self, batch: pa.RecordBatch, position: int, check: Check | None = None) -> None:
        """Send the rows of a batch that begins at `position` of the data."""
        self._follow(batch.schema)
        conformed = self._conform(batch)
        if check is not None:
            self._check(check, conformed.batch, position)
        self.failed += [row.moved(position) for row in conformed.failed]
        kept = conformed.positions
        self._send(Piece(conformed.batch, position if kept is None else kept + position))
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
                self._waits.clear()
                self.rows += sent.piece.batch.num_rows
                self.bytes += sent.size
                self._progress.advance(sent.piece.batch.num_rows)

    def close(self) -> None:
        """End the calls, once all is settled."""
        self._pool.close()

    def abandon(self) -> None:
        """End the calls now. What is not acknowledged may or may not be in the table."""
        self._pool.abandon()

    def _connect(self, number: int, turnstile: Turnstile, window: int) -> Connection:
        """A connection for rows as they travel now."""
        return Connection(
            append_rows(self._clients.append_channel(number), self._stream),
            self._encoder.first,
            backoff=Backoff(deadline=self._deadline),
            window=window,
            stall=min(STALL_SECONDS, self._deadline),
            idle=IDLE_SECONDS,
            turnstile=turnstile,
            tell=self._progress.wait,
            what=f"Table {self.table.ref}",
        )

    def so_far(self) -> str:
        """What became of the rows of an append that failed."""
        bad = "".join(f"\n  {row}" for row in self.failed[: FailedRowsError.SHOWN])
        named = f"\n{len(self.failed)} row(s) were refused by then:{bad}" if bad else ""
        sent = sum(sent.piece.batch.num_rows for sent in self._sent)
        doubt = f" {sent} more were sent, and may be in the table, too." if sent else ""
        return (
            f"{self.rows} row(s) of this append were acknowledged before it failed.{doubt}{named}"
        )

    def _check(self, check: Check, batch: pa.RecordBatch, position: int) -> None:
        """Refuse rows that do not belong here. Those of the batches before it are written."""
        try:
            check(batch, position)
        except PartitionError as error:
            self.settle()  # so that the number is true
            written = f"{self.rows} row(s) of the same append were written before it was found."
            raise PartitionError(f"{error} {written if self.rows else NOTHING_WRITTEN}") from None

    def _encoder_for(self, conform: Conformer) -> Encoder:
        return self._make_encoder(self.table.columns, conform.schema, self._stream)

    def _know(self, table: EnsuredTable) -> None:
        self.table = table
        self._new_until = time.monotonic() + NEW_TABLE_SECONDS - table.age

    def _follow(self, schema: pa.Schema) -> None:
        """Take in what has changed since the last batch: the table's columns, or the data's."""
        told = self._pool.updated_schema
        same = schema.equals(self._schema) or set(schema.names) == set(self._schema.names)
        if same and told in (None, self._told):
            return
        self.settle()  # what is under way stays as it was encoded
        conform, self._told = self._look_again(schema), told
        if conform.schema != self._conform.schema:
            self._encoder = self._encoder_for(conform)
            self._pool.renew()  # a call takes rows of the one schema that it began with
        self._schema, self._conform = schema, conform

    def _look_again(self, schema: pa.Schema) -> Conformer:
        """Look the table up as it is now, and match columns of data to it.

        Raises:
            SchemaError: It does not have the columns.
            TableNotFoundError: It is gone.
        """
        if self._look_up is not None:
            self._know(self._look_up())
        try:
            return Conformer(schema, self.table.columns)
        except SchemaError as error:
            raise SchemaError(
                f"Table {self.table.ref} has changed while rows were appended, and takes these no "
                f"more. {error}"
            ) from error

    def _send(self, piece: Piece, first: bool = False) -> None:
        """Send rows. The answers are dealt with after those of all others, or before them."""
        if not piece.batch.num_rows:
            return
        sent: list[Sent] = []
        limit = self._clients.request_limit or REQUEST_LIMIT
        for cut in self._encoder.cut(piece.batch, limit, min(PREFERRED_BYTES, limit)):
            if isinstance(cut, OversizedRow):
                self._oversized(piece.index(cut.start), cut.size, limit)
                continue
            try:
                with step("append rows"):
                    answer = self._pool.send(cut.payload)
            except AppendRefused as refusal:
                answer = Future[int | None]()
                answer.set_exception(refusal)
            part, size = piece.slice(cut.start, cut.rows), len(cut.payload)
            sent.append(Sent(answer, part, size, time.monotonic()))
        if first:
            self._sent.extendleft(reversed(sent))
        else:
            self._sent.extend(sent)

    def _oversized(self, index: int, size: int, limit: int) -> None:
        reason = (
            f"it takes {size:,} bytes, and one request takes {limit:,}: shorten it, or write it "
            "with FileLoadsWriter"
        )
        self.failed.append(FailedRow(index, reason))

    def _split(self, sent: Sent) -> None:
        """The server takes less than was thought: remember, and cut again."""
        if sent.piece.batch.num_rows == 1:
            self._oversized(sent.piece.index(0), sent.size, sent.size - 1)
            return
        limit = self._clients.request_limit or REQUEST_LIMIT
        half = max(SMALLEST_LIMIT, min(limit, sent.size // 2))
        self._clients.remember_request_limit(half)
        self._send(sent.piece)

    def _refused(self, refusal: AppendRefused, sent: Sent) -> None:
        fault = refusal.fault
        if fault is Fault.TOO_LARGE:
            self._split(sent)
        elif fault is Fault.ROWS:
            bad = dict(refusal.row_errors)
            self.failed += [FailedRow(sent.piece.index(row), text) for row, text in bad.items()]
            self._send(sent.piece.without(bad))
        elif fault not in _PASSING and fault not in _MISSING and fault is not Fault.SCHEMA_LAG:
            raise self._error(refusal) from refusal
        elif sent.at < self._paused:
            self._send(sent.piece)  # the last pause was for it too
        else:
            self._pause(refusal)
            self._send(sent.piece, first=True)  # if it is refused again, the others need not try

    def _pause(self, refusal: AppendRefused) -> None:
        """Wait for a refusal to pass, if it may."""
        fault = refusal.fault
        if fault not in self._waits:
            self._waits[fault] = self._pauses(fault)
        if (pause := next(self._waits[fault], None)) is None:
            raise self._error(refusal) from refusal
        self._progress.wait(f"waiting {pause:.1f} s to try again: {refusal}")
        time.sleep(pause)
        if fault in _NEW_CALL:
            self._pool.renew()  # the server looks at the table's columns when a call begins
        else:
            self._pool.mend()
        self._paused = time.monotonic()

    def _pauses(self, fault: Fault) -> Iterator[float]:
        """How to wait; not at all for a table or column that is not new but gone."""
        if fault in _PASSING:
            return Backoff(deadline=self._deadline).pauses()
        if fault is Fault.SCHEMA_LAG or time.monotonic() >= self._new_until:
            self._look_again(self._schema)
        new = self._new_until - time.monotonic()
        lag = SCHEMA_LAG_SECONDS if fault is Fault.SCHEMA_LAG else new
        return replace(POLL, deadline=lag).pauses()

    def _error(self, refusal: AppendRefused) -> ConnectorError:
        table = self.table.ref
        if refusal.fault is Fault.TABLE_MISSING:
            return TableNotFoundError(
                f"Table {table} is gone, or these credentials may not write to it "
                f"(bigquery.tables.updateData). BigQuery said: {refusal}"
            )
        if refusal.fault is Fault.DENIED:
            return AccessDeniedError(
                f"Table {table}: these credentials may not write to it "
                f"(bigquery.tables.updateData). BigQuery said: {refusal}"
            )
        if refusal.fault is Fault.SCHEMA_LAG:
            named = [name for name in self._conform.schema.names if repr(name) in str(refusal)]
            columns = ", ".join(map(repr, named or self._conform.schema.names))
            return SchemaError(
                f"Table {table} has the columns of the rows ({columns}), but BigQuery's Storage "
                f"API has not noticed within {SCHEMA_LAG_SECONDS / 60:.0f} minutes: append the "
                f"rows again later, or write them with FileLoadsWriter. BigQuery said: {refusal}"
            )
        return explain_fault(refusal.fault, str(refusal), f"Table {table}")
