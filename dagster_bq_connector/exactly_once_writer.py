"""`ExactlyOnceWriter`: streams whose rows are seen once, all together."""

from typing import Literal

from pydantic import Field

from dagster_bq_connector.errors import WriteKeyError
from dagster_bq_connector.ledger import Ledger, open_ledger
from dagster_bq_connector.ledger.bigquery import DATASET
from dagster_bq_connector.metadata import MaterializedWrite, log, run_context
from dagster_bq_connector.progress import Progress
from dagster_bq_connector.resources import Connected, Destination
from dagster_bq_connector.schema.data import Batches, Data, open_data
from dagster_bq_connector.table.admin import EnsuredTable
from dagster_bq_connector.table.options import TableOptions
from dagster_bq_connector.table.ref import TableRef
from dagster_bq_connector.write.default_stream import Check
from dagster_bq_connector.write.exactly_once import Sending, append
from dagster_bq_connector.write.key import WriteKey
from dagster_bq_connector.write.long_write import LongWrite, Place
from dagster_bq_connector.write.replacement import replace_rows
from dagster_bq_connector.write.result import Operation, WriteResult
from dagster_bq_connector.write_keys import give_back, place_of
from dagster_bq_connector.writers import (
    BigQueryWriter,
    check_connections,
    check_options,
    check_streamed,
    resolved,
)


class OpenWrite(LongWrite):
    """A long append that is under way; see `ExactlyOnceWriter.open`."""

    def __enter__(self) -> "OpenWrite":
        return self

    def abandon(self) -> None:
        """Leave the write open. What was appended since the last checkpoint is never seen.

        The step may open it again.
        """
        super().abandon()
        give_back(self._key)

    @property
    def result(self) -> MaterializedWrite:
        """What is visible now, of all attempts; `to_materialize_result()` is for an asset."""
        return MaterializedWrite.of(super().result)


class ExactlyOnceWriter(BigQueryWriter):
    """Writes by pending streams of the Storage Write API, whose rows become visible at once.

    Exactly once: whatever dies, and however often the same write is tried, its rows are there once.
    What makes a write the same is its key; outside of a Dagster step, `key` must be given. When
    rows fail, nothing is written.

    `append` keeps in a ledger which streams hold the rows, before it commits them. `replace`
    streams into a staging table of the same dataset, and puts the rows into their place by one
    query job, whose id is made from the key; such queries are billed.
    """

    ledger: str = Field(
        default=DATASET,
        description="Where it is kept which writes were done: a dataset, project.dataset or "
        "gs://bucket/prefix.",
    )
    create_ledger: Literal["if_missing", "never"] = Field(
        default="if_missing", description="Whether a missing ledger dataset is created."
    )
    connections: int = Field(
        default=1,
        description="Streams of one write. BigQuery takes 5 to 10 MB/s over one: use more when "
        "that is what a write waits for.",
    )

    def open(
        self, table: Destination, options: TableOptions | None = None, key: str | None = None
    ) -> OpenWrite:
        """Begin a long append that makes its rows visible checkpoint by checkpoint.

        When it is opened again under the same key (by a retry, or after the process died), its
        `position` says where the last checkpoint was: read the source from there.

        Args:
            table: As for `append`.
            options: As for `append`.
            key: As for `append`.

        Returns:
            The write, for a `with` statement that closes it.

        Raises:
            WriteKeyError: The key was used for something else, or is missing.
            UnknownOutcomeError: It cannot be known whether what is recorded is visible.
            ConnectorError: The ledger or BigQuery cannot be reached.

        Example:
            ```python
            with writer.open("shop.events", key="events of 2026") as write:
                for chunk in source.chunks(after=write.position):
                    write.append(chunk.rows)
                    write.checkpoint(chunk.end)
            ```
        """
        check_options(options)
        check_connections(self.connections)
        connected = Connected.to(self.bigquery)
        target = resolved(connected, table)
        ref = target if isinstance(target, TableRef) else target.table
        check_streamed(ref)
        identity = self._key(connected, "append", table, key)

        def prepare(batches: Batches) -> tuple[EnsuredTable, Check | None]:
            ensured, checked = self._streamed(connected, batches, table, options)
            return ensured, checked.check if checked else None

        progress = Progress(f"Appending to {ref}", log())
        place = Place(ref, place_of(target), prepare)
        location = connected.location or connected.admin.location(ref)
        ledger = self._open_ledger(connected, location)
        return OpenWrite(self._sending(connected, progress), ledger, place, identity)

    def _key(
        self, connected: Connected, operation: Operation, table: Destination, key: str | None
    ) -> WriteKey:
        if key is None and run_context() is None:
            raise WriteKeyError(
                "No Dagster step runs in this thread, so nothing says which write this is: pass "
                'key="...", a text that is the same when the write is tried again.'
            )
        return super()._key(connected, operation, table, key)

    def _append(
        self,
        connected: Connected,
        data: Data,
        table: Destination,
        options: TableOptions | None,
        key: WriteKey,
    ) -> WriteResult:
        batches = open_data(data)
        check_connections(self.connections)
        ensured, checked = self._streamed(connected, batches, table, options)
        with Progress(f"Appending to {ensured.ref}", log()) as progress:
            return append(
                self._sending(connected, progress),
                self._open_ledger(connected, ensured.location),
                ensured,
                batches,
                key,
                place_of(resolved(connected, table)),
                checked.check if checked else None,
                checked.counts if checked else None,
            )

    def _replace(
        self,
        connected: Connected,
        data: Data,
        table: Destination,
        options: TableOptions | None,
        key: WriteKey,
    ) -> WriteResult:
        batches = open_data(data)
        check_connections(self.connections)
        targets = self._targets(connected, batches, table, options, "replace", streamed=True)
        settings = self._settings(connected, targets, key, "replace")
        with Progress(f"Replacing {targets.table}", log()) as progress:
            sending = self._sending(connected, progress)
            return replace_rows(sending, settings, targets, batches, progress)

    def _sending(self, connected: Connected, progress: Progress) -> Sending:
        return Sending(connected.clients, self.connections, progress, connected.deadline)

    def _open_ledger(self, connected: Connected, location: str | None) -> Ledger:
        """The ledger, in the location of the table when it must be created."""
        create = self.create_ledger == "if_missing"
        project, deadline = connected.billing_project, connected.deadline
        return open_ledger(
            connected.clients,
            project,
            self.ledger,
            connected.location or location,
            create,
            deadline,
        )
