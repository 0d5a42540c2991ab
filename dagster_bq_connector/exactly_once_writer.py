"""`ExactlyOnceWriter`: streams whose rows are seen once, all together."""

from typing import Literal

from pydantic import Field

from dagster_bq_connector.errors import WriteKeyError
from dagster_bq_connector.ledger import Ledger, open_ledger
from dagster_bq_connector.ledger.bigquery import DATASET
from dagster_bq_connector.metadata import log, run_context
from dagster_bq_connector.progress import Progress
from dagster_bq_connector.resources import Connected, Destination
from dagster_bq_connector.schema.data import Data, open_data
from dagster_bq_connector.table.options import TableOptions
from dagster_bq_connector.write.exactly_once import Sending, append
from dagster_bq_connector.write.jobs import JobSettings
from dagster_bq_connector.write.key import WriteKey
from dagster_bq_connector.write.replacement import replace_rows
from dagster_bq_connector.write.result import Operation, WriteResult
from dagster_bq_connector.write_keys import place_of
from dagster_bq_connector.writers import (
    BigQueryWriter,
    check_connections,
    labels_of,
    resolved,
)


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
        labels = labels_of(connected)
        settings = JobSettings(
            connected.rest, targets.location, key, "replace", labels, connected.deadline
        )
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
