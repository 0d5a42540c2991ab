"""One table of a stream while a plan is applied: its contract, its columns, its open append."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from google.cloud import bigquery
from google.cloud.bigquery import SchemaField

from dagster_bq_connector.cdc.apply.contract import Contracted, ensure, verify
from dagster_bq_connector.cdc.apply.keys import key_fields
from dagster_bq_connector.cdc.apply.survivors import Chooser, Shape, Survivors
from dagster_bq_connector.cdc.envelope.debezium_json import DebeziumJson
from dagster_bq_connector.cdc.event import Events, FailedEvent, Indices
from dagster_bq_connector.cdc.table import CdcTable
from dagster_bq_connector.clients import Clients
from dagster_bq_connector.progress import Progress
from dagster_bq_connector.table.admin import EnsuredTable, TableAdmin
from dagster_bq_connector.table.evolution import with_columns
from dagster_bq_connector.table.ref import TableRef
from dagster_bq_connector.write.default_stream import Appender
from dagster_bq_connector.write.protobuf import ProtobufEncoder

CHANGE_TYPE, SEQUENCE = "_CHANGE_TYPE", "_CHANGE_SEQUENCE_NUMBER"
PSEUDO_COLUMNS = (SchemaField(CHANGE_TYPE, "STRING"), SchemaField(SEQUENCE, "STRING"))
# Messages are kept until their rows are acknowledged, since BigQuery may refuse single rows, which
# then need the changes before them. Beyond this all answers are waited for.
HELD_BYTES = 64 * 1024 * 1024

_compute: Any = pc  # its stubs know a part of what it takes


class BigQuery(Protocol):
    """What applying changes needs of a connection."""

    @property
    def clients(self) -> Clients:
        """The clients."""
        ...

    @property
    def project(self) -> str:
        """The project of tables that name none."""
        ...

    @property
    def deadline(self) -> float:
        """Seconds that calls may go on without success."""
        ...

    @property
    def admin(self) -> TableAdmin:
        """Looks up and creates tables."""
        ...

    @property
    def rest(self) -> bigquery.Client:
        """The REST client."""
        ...


@dataclass
class TableApplied:
    """What was applied to one table.

    Attributes:
        upserts: Rows that were written.
        deletes: Deletes that were written.
        superseded: Changes that a later one of the same key and batch has replaced.
        failed: Changes that could not be applied.
        bytes: Bytes that were sent.
        columns: The table's columns; empty when nothing was to be applied.
        missing: Columns of the table that rows lacked, and that are null in them.
    """

    upserts: int = 0
    deletes: int = 0
    superseded: int = 0
    failed: int = 0
    bytes: int = 0
    columns: Sequence[SchemaField] = ()
    missing: set[str] = field(default_factory=set[str])


@dataclass
class Prepared:
    """What of a batch is to be written to one table.

    Attributes:
        chooser: Has chosen it, and can choose again.
        sequences: Of all changes of the batch.
        candidates: The changes of the table that may be chosen.
        survivors: What was chosen.
    """

    chooser: Chooser
    sequences: pa.Array[Any]
    candidates: Indices
    survivors: Survivors


Refused = Callable[[Events, list[FailedEvent]], None]


class ChangeAppender:
    """An open append of change rows to one table.

    Its writer schema always has both pseudo-columns: without them BigQuery would append each change
    as a row of its own. No column is REQUIRED in it, since deletes have but their key.
    """

    def __init__(
        self,
        connection: BigQuery,
        table: EnsuredTable,
        progress: Progress,
        look_up: Callable[[], EnsuredTable],
    ) -> None:
        """Nothing is opened before the first rows come."""
        self._connection, self._table, self._progress = connection, table, progress
        self._look_up = look_up
        self._appender: Appender | None = None
        self._position = 0

    @property
    def bytes(self) -> int:
        """Bytes of acknowledged requests."""
        return self._appender.bytes if self._appender else 0

    @property
    def busy(self) -> bool:
        """Whether rows are under way."""
        return self._appender is not None and self._appender.waiting

    def add(self, rows: pa.RecordBatch, deletes: pa.Array[Any], sequences: pa.Array[Any]) -> int:
        """Send rows; gives the position of the first one among all that were sent.

        Args:
            rows: In the wire types of the table's columns.
            deletes: Which of them are deletes.
            sequences: Their sequences.
        """
        kinds = _compute.if_else(deletes, "DELETE", "UPSERT")
        fields = [pa.field(column.name, pa.string()) for column in PSEUDO_COLUMNS]
        batch = pa.RecordBatch.from_arrays(
            [*rows.columns, kinds, sequences], schema=pa.schema([*rows.schema, *fields])
        )
        if self._appender is None:
            self._appender = Appender(
                self._connection.clients,
                _of_changes(self._table),
                batch.schema,
                self._progress,
                self._connection.deadline,
                look_up=lambda: _of_changes(self._look_up()),
                encoder=ProtobufEncoder,
            )
        first, self._position = self._position, self._position + batch.num_rows
        self._appender.add(batch, first)
        return first

    def settle(self) -> dict[int, str]:
        """Wait for all answers; gives the rows that were refused, by position, and why."""
        if self._appender is None:
            return {}
        self._appender.settle()
        refused = {row.index: row.reason for row in self._appender.failed}
        self._appender.failed.clear()
        return refused

    def close(self) -> None:
        """End the append, once all is settled."""
        if self._appender is not None:
            self._appender.close()

    def abandon(self) -> None:
        """End the append now."""
        if self._appender is not None:
            self._appender.abandon()


class Target:
    """One table of a stream while a plan is applied."""

    def __init__(
        self,
        connection: BigQuery,
        format: DebeziumJson,
        source: str,
        cdc: CdcTable,
        progress: Progress,
        refused: Refused,
        fills: bool = True,
    ) -> None:
        """Name the table; it is looked up at its first change.

        Args:
            connection: Where it is.
            format: Reads its rows.
            source: The source's table.
            cdc: What is asked for.
            progress: Counts acknowledged rows.
            refused: Takes the events that BigQuery has refused.
            fills: See `Shape`.
        """
        self.applied = TableApplied()
        self._connection, self._format, self._source = connection, format, source
        self._cdc, self._progress, self._refused, self._fills = cdc, progress, refused, fills
        self._ref = TableRef.parse(cdc.table, project=connection.project).at(None)
        self._contracted: Contracted | None = None
        self._appender: ChangeAppender | None = None
        self._held: list[tuple[int, Prepared]] = []  # with the position of their first row

    def prepare(self, events: Events, sequences: pa.Array[Any], candidates: Indices) -> Prepared:
        """Choose the rows of a batch. The table is made, or given columns, but no row is sent.

        Args:
            events: The batch.
            sequences: Of all its changes.
            candidates: The changes of this table, one at least, all with sequences.
        """
        wanted = self._format.columns(events, self._source) or []
        found = self._contracted
        if found is None:
            key = key_fields(events, int(candidates[0]))
            found = ensure(self._connection.admin, self._ref, self._cdc, key, wanted)
        evolves = self._cdc.evolution == "add"
        if evolves and with_columns(found.table.columns, wanted) != list(found.table.columns):
            self.settle()  # what is under way has not the columns
            table = self._connection.admin.add_columns(self._ref, wanted)
            # Whether the table itself is new is what the append must know.
            found = replace(found, table=replace(table, age=found.table.age))
        self._contracted = found
        shape = Shape(
            str(self._ref), self._source, found.table.columns, found.key, evolves, self._fills
        )
        chooser = Chooser(self._format, events, sequences, shape)
        survivors = chooser.choose(candidates)
        self.applied.columns = found.table.columns
        self.applied.superseded += len(candidates) - len(survivors.changes) - len(survivors.failed)
        return Prepared(chooser, sequences, candidates, survivors)

    def send(self, prepared: Prepared) -> None:
        """Send the rows that were chosen."""
        self._send(prepared)
        if self._appender is not None and not self._appender.busy:
            self.settle()  # which waits for nothing
        elif sum(held.chooser.events.messages.nbytes for _, held in self._held) > HELD_BYTES:
            self.settle()

    def settle(self) -> None:
        """Wait until all rows are acknowledged. In the place of those refused come others."""
        while self._appender is not None and self._held:
            reasons, held = self._appender.settle(), self._held
            self._held = []
            starts = [start for start, _ in held]
            by_batch: dict[int, dict[int, str]] = {}
            for position, reason in sorted(reasons.items()):
                number = bisect_right(starts, position) - 1
                by_batch.setdefault(number, {})[position - starts[number]] = reason
            for number, rows in by_batch.items():
                self._send_others(held[number][1], rows)

    def close(self) -> None:
        """End the append, once all is settled."""
        if self._appender is not None:
            self.applied.bytes = self._appender.bytes
            self._appender.close()

    def abandon(self) -> None:
        """End the append now."""
        if self._appender is not None:
            self._appender.abandon()

    def _send(self, prepared: Prepared) -> None:
        survivors = prepared.survivors
        self.applied.missing |= survivors.missing
        if not len(survivors.changes):
            return
        if self._appender is None:
            assert self._contracted is not None  # as prepared
            self._appender = ChangeAppender(
                self._connection, self._contracted.table, self._progress, self._look_up
            )
        deletes = _deletes(prepared)
        self.applied.deletes += (count := int(_compute.sum(deletes).as_py()))
        self.applied.upserts += len(deletes) - count
        sequences = prepared.sequences.take(pa.array(survivors.changes, pa.int64()))
        start = self._appender.add(survivors.batch, deletes, sequences)
        self._held.append((start, prepared))

    def _send_others(self, prepared: Prepared, rows: dict[int, str]) -> None:
        """Send the changes before those that BigQuery has refused, if there are any."""
        survivors, chooser = prepared.survivors, prepared.chooser
        places = np.array(list(rows), np.int64)
        changes = survivors.changes[places]
        count = int(_compute.sum(_deletes(prepared).take(pa.array(places, pa.int64()))).as_py())
        self.applied.deletes -= count
        self.applied.upserts -= len(rows) - count
        failed = [
            chooser.failed(change, f"BigQuery has refused the row: {reason}")
            for change, reason in zip(changes.tolist(), rows.values(), strict=True)
        ]
        others = chooser.but_for(changes.tolist(), prepared.candidates)
        failed += others.failed.values()
        self._refused(chooser.events, failed)
        self.applied.failed += len(failed)
        self.applied.superseded -= len(others.changes) + len(others.failed)
        left = prepared.candidates[~np.isin(prepared.candidates, changes)]
        self._send(replace(prepared, candidates=left, survivors=others))

    def _look_up(self) -> EnsuredTable:
        admin = self._connection.admin
        return verify(admin, self._ref, self._cdc, admin.get(self._ref)).table


def _deletes(prepared: Prepared) -> Any:
    changes = prepared.chooser.events.changes
    taken = pa.array(prepared.survivors.changes, pa.int64())
    return _compute.equal(changes.column("operation").take(taken).cast(pa.string()), "d")


def _of_changes(table: EnsuredTable) -> EnsuredTable:
    """The table as rows of changes see it."""
    columns = [
        SchemaField.from_api_repr({**column.to_api_repr(), "mode": "NULLABLE"})
        if column.mode == "REQUIRED"
        else column
        for column in table.columns
    ]
    return replace(table, columns=[*columns, *PSEUDO_COLUMNS])
