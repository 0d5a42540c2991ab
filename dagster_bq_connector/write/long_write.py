"""A long append that shows progress: a buffered stream, seen checkpoint by checkpoint.

What stands in the ledger entry is the truth: how many rows of which stream are to be seen, and the
position in the source that they reach to. The steps, and what is left when the process dies:

    1. rows are appended                    nothing of them is visible
    2. checkpoint: the entry is changed     the next attempt makes these rows visible
    3. flush: they are visible              the next attempt flushes again, which does no harm

The next attempt first takes the entry over, so that the one before can record nothing more. Then it
flushes what is recorded, and goes on from the position with a stream of its own: what the other
sent after its last checkpoint is never seen.

A stream is ended after the entry names it no more, since BigQuery may refuse to flush one that is.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeAlias

import pyarrow as pa

from dagster_bq_connector.errors import (
    ConnectorError,
    FailedRow,
    FailedRowsError,
    LedgerError,
    RefusedError,
    UnknownOutcomeError,
    WriteKeyError,
)
from dagster_bq_connector.ledger import Entry, Key, Ledger
from dagster_bq_connector.schema.conform import Conformer
from dagster_bq_connector.schema.data import Batches, Data, open_data
from dagster_bq_connector.table.admin import EnsuredTable
from dagster_bq_connector.table.ref import TableRef
from dagster_bq_connector.write.default_stream import Check
from dagster_bq_connector.write.entries import checked
from dagster_bq_connector.write.exactly_once import Sending
from dagster_bq_connector.write.key import WriteKey, purpose_of
from dagster_bq_connector.write.own_stream import OwnStreams, RowsRefused
from dagster_bq_connector.write.piece import Piece
from dagster_bq_connector.write.result import WriteResult
from dagster_bq_connector.write.steps import step
from dagster_bq_connector.write.streams import StreamGone, Type

OPEN, CLOSING, CLOSED = "open", "closing", "closed"
FIELDS = ("attempt", "stream", "offset", "rows", "position")  # that the next attempt needs

# Finds or creates the table for rows, and what checks that they belong there.
Prepare: TypeAlias = Callable[[Batches], tuple[EnsuredTable, Check | None]]


@dataclass(frozen=True)
class Place:
    """What is written.

    Attributes:
        table: The table.
        text: The table, or the part of it, as the key's purpose names it.
        prepare: Finds or creates it.
    """

    table: TableRef
    text: str
    prepare: Prepare


class LongWrite:
    """An append that is under way. Use it as a context manager: an error leaves it open.

    Attributes:
        position: What the last checkpoint recorded: where to go on. None before the first one.
        done: Whether the write was closed before: there is nothing left to do.
    """

    def __init__(self, sending: Sending, ledger: Ledger, place: Place, key: WriteKey) -> None:
        """Begin the write, or go on with it where the last checkpoint was.

        Raises:
            WriteKeyError: The key was used for something else.
            UnknownOutcomeError: It cannot be known whether what is recorded is visible.
            ConnectorError: The ledger or BigQuery cannot be reached.
        """
        self._sending, self._ledger, self._place, self._key = sending, ledger, place, key
        self._purpose = purpose_of(place.text, "long append", [])
        self._streams: OwnStreams | None = None
        self._table: EnsuredTable | None = None
        self._check: Check | None = None
        self._broken = False
        self._given = 0  # rows that this attempt was given
        self._bytes = 0
        self._entry = self._take_over()
        self._before = int(self._entry.value["rows"])
        self.position: Any = self._entry.value["position"]
        self.done = self._entry.value["state"] == CLOSED

    def append(self, data: Data) -> None:
        """Send rows. They are visible after the next `checkpoint`.

        Args:
            data: As for `BigQueryWriter.append`.

        Raises:
            SchemaError, FailedRowsError, PartitionError: Rows do not fit. Open the write again to
                go on from the last checkpoint.
            WriteKeyError: Another attempt has taken the write over.
            ConnectorError: They could not be sent; the same holds.
        """
        self._usable()
        self._broken = True  # until all of it is sent
        batches = open_data(data)
        streams, conform, names = self._opened(batches)
        try:
            for batch in batches.batches:
                conformed = conform(batch)
                if self._check is not None:
                    self._check(conformed.batch, self._given)
                if conformed.failed:
                    raise RowsRefused([row.moved(self._given) for row in conformed.failed])
                streams.send(Piece(conformed.batch.select(names), self._given))
                self._given += batch.num_rows
        except RowsRefused as refused:
            raise self._failed(refused.rows) from refused
        except ConnectorError as error:
            self._refuse_overtaken(error)
            raise
        self._broken = False

    def checkpoint(self, position: Any) -> None:
        """Make all rows visible that were appended, and record the position they reach to.

        Args:
            position: Where the source stands, as a JSON value.

        Raises:
            LedgerError: The position is no JSON, or too large for the ledger. Nothing was
                recorded, and the write can go on with another one.
            WriteKeyError: Another attempt has taken the write over. Its rows count, and those
                since the last checkpoint of this one are not seen.
            ConnectorError: It could not be recorded, or not be made visible; the next attempt
                knows, and goes on from what was recorded.
        """
        self._usable()
        _check_position(position)
        self._record(OPEN, position)
        self.position = self._entry.value["position"]  # as the next attempt will read it

    def close(self) -> None:
        """Make all rows visible, and end the write. Repeating it does no harm.

        Raises:
            ConnectorError: As for `checkpoint`.
        """
        if self.done:
            return
        self._usable()
        self._record(CLOSING, self.position)
        stream = self._entry.value["stream"]
        self._change(_without_stream(self._entry, CLOSED), "close")
        self.done = True
        try:
            self._end(stream)
        finally:
            self._abandon()

    def abandon(self) -> None:
        """Leave the write open. What was appended since the last checkpoint is never seen."""
        self._broken = True
        self._abandon()

    @property
    def result(self) -> WriteResult:
        """What is visible now, of all attempts."""
        streams = self._streams
        return WriteResult(
            table=self._place.table,
            method="exactly_once",
            operation="append",
            rows=int(self._entry.value["rows"]),
            bytes=self._bytes + (streams.bytes if streams else 0),
            columns=self._table.columns if self._table else (),
            replayed=self.done and streams is None,
            reconnects=streams.reconnects if streams else 0,
        )

    def __enter__(self) -> LongWrite:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None and not self._broken:
                self.close()
        finally:
            if not self.done:
                self.abandon()

    def _take_over(self) -> Entry:
        """The entry, of which this attempt is the owner now."""
        key = Key("write", self._key.text)
        value = {
            "state": OPEN,
            "table": str(self._place.table),
            "purpose": self._purpose,
            "attempt": self._key.attempt,
            "stream": None,
            "offset": 0,
            "rows": 0,
            "position": None,
        }
        with step("begin"):
            entry = self._ledger.create(key, value).entry
        while entry is not None and entry.value.get("attempt") != self._key.attempt:
            checked(entry, self._key, self._purpose, (OPEN, CLOSING, CLOSED), FIELDS)
            if entry.value["state"] == CLOSED:
                return entry
            with step("take over"):
                mine = {**entry.value, "attempt": self._key.attempt}
                entry = self._ledger.compare_and_set(entry, mine).entry
        if entry is None:
            raise UnknownOutcomeError(
                f"The ledger entry of {self._key.text!r} was deleted while its write went on."
            )
        return self._settled(entry)

    def _settled(self, entry: Entry) -> Entry:
        """Make visible what is recorded of the attempt before, and end its stream."""
        stream, state = entry.value["stream"], entry.value["state"]
        if stream is None and state == OPEN:
            return entry
        try:
            if stream is not None:
                self._sending.streams.flush(stream, entry.value["offset"])
        except StreamGone as gone:
            raise UnknownOutcomeError(
                f"Whether the last rows of write key {self._key.text!r} are visible in "
                f"{self._place.table} cannot be known: its stream is gone ({gone}). Its ledger "
                f"entry {entry.key.name} says {entry.value['rows']} rows up to position "
                f"{entry.value['position']!r}. Look in the table; then set the entry's stream "
                "to null and its rows and position to what is there "
                "(python -m dagster_bq_connector.ledger), and write again."
            ) from gone
        self._entry = entry
        if state == CLOSING:
            self._change(_without_stream(entry, CLOSED), "close")
        else:
            self._change(_without_stream(entry, OPEN), "settle")
        self._end(stream)
        return self._entry

    def _record(self, state: str, position: Any) -> None:
        """Checkpoint: what is to be seen is recorded, then shown."""
        counts = self._acknowledged()
        value = {**self._entry.value, "state": state, "position": position}
        for name, rows in counts.items():
            value |= {"stream": name, "offset": rows, "rows": self._before + rows}
        self._change(value, "checkpoint")
        try:
            for name, rows in counts.items():
                self._sending.streams.flush(name, rows, self._table)
        except ConnectorError as error:
            self._refuse_overtaken(error)
            raise

    def _acknowledged(self) -> Mapping[str, int]:
        """The rows that the stream holds, once all that were sent are in it."""
        try:
            return self._streams.acknowledged() if self._streams else {}
        except RowsRefused as refused:
            self._broken = True
            raise self._failed(refused.rows) from refused
        except ConnectorError as error:
            self._broken = True
            self._refuse_overtaken(error)
            raise

    def _refuse_overtaken(self, error: ConnectorError) -> None:
        """Say why a stream takes no more rows, when it was ended by who took the write over."""
        stands = self._ledger.get(self._entry.key)
        if stands is None or stands.value.get("attempt") != self._key.attempt:
            raise self._overtaken() from error

    def _overtaken(self) -> WriteKeyError:
        self._broken = True
        return WriteKeyError(
            f"Another attempt at write key {self._key.text!r} has taken it over, or somebody "
            "deleted its ledger entry. What this one appended since its last checkpoint is "
            "not seen; let the other one go on."
        )

    def _end(self, stream: str | None) -> None:
        """Let a stream take no more rows. Nothing depends on that: BigQuery removes it one day."""
        if stream is not None:
            with contextlib.suppress(ConnectorError):
                self._sending.streams.finalize(stream)

    def _change(self, value: Mapping[str, Any], name: str) -> None:
        with step(name):
            written = self._ledger.compare_and_set(self._entry, value)
        stands = written.entry
        ours = stands is not None and stands.value.get("attempt") == self._key.attempt
        if stands is None or not (ours and written.won):
            raise self._overtaken()
        self._entry = stands

    def _opened(self, batches: Batches) -> tuple[OwnStreams, Conformer, list[str]]:
        """The stream, what makes rows fit the table, and the order in which columns travel.

        It is that of the table: a stream is told its columns once, and each append may have them
        in another order, or lack others.
        """
        if self._table is None:
            self._table, self._check = self._place.prepare(batches)
        conform = Conformer(batches.schema, self._table.columns, complete=True)
        names = [column.name for column in self._table.columns]
        if self._streams is None:
            schema = pa.schema([conform.schema.field(name) for name in names])
            self._streams = self._sending.open(self._table, schema, Type.BUFFERED, 1)
        return self._streams, conform, names

    def _failed(self, rows: list[FailedRow]) -> FailedRowsError:
        written = int(self._entry.value["rows"]) - self._before
        remedy = "open the write again, to go on from its last checkpoint"
        return FailedRowsError(self._place.table, rows, written, remedy)

    def _usable(self) -> None:
        if self.done or self._broken:
            if self.done:
                raise RefusedError(
                    f"This write into {self._place.table} is closed, and its key is used up: what "
                    "comes now is another write, and needs another key."
                )
            raise RefusedError(
                f"This write into {self._place.table} is broken: a call of it has failed, an error "
                "has left its block, or another thread appends. Open it again under its key to go "
                "on from the last checkpoint."
            )

    def _abandon(self) -> None:
        if self._streams is not None:
            self._streams.abandon()


def _without_stream(entry: Entry, state: str) -> dict[str, Any]:
    """The value of an entry whose rows are all visible."""
    return {**entry.value, "state": state, "stream": None, "offset": 0}


def _check_position(position: Any) -> None:
    """Refuse what no ledger can keep.

    Raises:
        LedgerError: It is no JSON.
    """
    try:
        json.dumps(position, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise LedgerError(
            f"The position of a checkpoint is no JSON: {error}. Pass a text, a finite number, a "
            "boolean, None, or a list or dict of such; of a moment its isoformat()."
        ) from error
