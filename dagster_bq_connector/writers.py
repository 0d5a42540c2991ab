"""The writers: one abstract resource, and one class for each write method."""

from abc import ABC, abstractmethod
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import dagster as dg
import dagster_gcp
from pydantic import Field

from dagster_bq_connector.errors import ConfigurationError, UnsupportedError
from dagster_bq_connector.metadata import MaterializedWrite, job_labels, log, run_context
from dagster_bq_connector.progress import Progress
from dagster_bq_connector.resources import STRICT, Connected, Destination
from dagster_bq_connector.schema.conform import Conformer
from dagster_bq_connector.schema.data import Batches, Data, open_data
from dagster_bq_connector.schema.types import table_fields
from dagster_bq_connector.table.admin import Creation, Draft
from dagster_bq_connector.table.options import TableOptions
from dagster_bq_connector.table.ref import TableRef
from dagster_bq_connector.table.row_slice import RowSlice
from dagster_bq_connector.table.slice import TableSlice
from dagster_bq_connector.write import default_stream, file_loads
from dagster_bq_connector.write.result import Operation, WriteResult
from dagster_bq_connector.write.staging import Staging
from dagster_bq_connector.write.targets import (
    FindDraft,
    Targets,
    check_streamable,
    of_rows,
    of_slice,
    of_stream,
    of_table,
)

# Beyond that a process has no use for more: it cannot fill these.
MAX_CONNECTIONS = 64
Slice = TableSlice | RowSlice
AS_IT_IS = Creation(tables=False, why_not="It was dropped while rows were appended.")


class BigQueryWriter(dg.ConfigurableResource[Any], ABC):
    """Writes tables. What writes is chosen by choosing one of its subclasses.

    Assets ask for this class; the definitions pass a `DefaultStreamWriter` or a `FileLoadsWriter`.

    Attributes:
        bigquery (BigQueryResource): The connection, ours or that of dagster_gcp.
    """

    model_config = STRICT
    replaces: ClassVar[bool] = True
    """Whether `replace` is one of the things that it can do."""

    bigquery: dg.ResourceDependency[dagster_gcp.BigQueryResource]
    create_table: bool = Field(
        default=True, description="Create missing tables from the data's schema and the options."
    )
    create_dataset: bool = Field(
        default=False, description="Create missing datasets, in the location of the resource."
    )

    def append(
        self, data: Data, table: Destination, options: TableOptions | None = None
    ) -> MaterializedWrite:
        """Add rows to a table.

        Args:
            data: An Arrow table, batch or reader, a Polars or pandas frame, the rows of a read,
                any object with the Arrow C stream interface, or an iterable of any of them. Read
                once, a few batches at a time.
            table: The table. It is created when it is missing, if `create_table` allows it.
            options: The layout of a table that is created; an existing one is checked against it.

        Returns:
            What was written; `to_materialize_result()` makes it an asset's result.

        Raises:
            SchemaError: The columns do not fit the table. Nothing was written.
            FailedRowsError: Some rows do not fit; it says which, and what was written.
            PartitionError: A row belongs to another partition; it says what was written.
            TableNotFoundError, DatasetNotFoundError: It is missing and may not be created.
            TableMismatchError: The table is laid out otherwise than `options` ask.
            UnsupportedError: The write method does not take a type, or a partition.
            AccessDeniedError: The credentials do not allow it.
            RefusedError, QuotaError: BigQuery refused the write.
            UnreachableError: No answer within the deadline.
        """
        _refuse_other_options(options)
        return MaterializedWrite.of(self._append(Connected.to(self.bigquery), data, table, options))

    def replace(
        self, data: Data, table: Destination, options: TableOptions | None = None
    ) -> MaterializedWrite:
        """Put rows in the place of those that are there: of the table, or of a part of it.

        Each table or partition changes at once, and not at all when it fails. Data without rows
        empties what it replaces.

        Args:
            data: As for `append`.
            table: A table, a partition (`shop.orders$20260801`), what `DailyTable.for_run`
                gives, or a `RowSlice`.
            options: As for `append`.

        Returns:
            What was written.

        Raises:
            UnsupportedError: The write method cannot replace, or BigQuery takes no DELETE on the
                table now and the part cannot be replaced without. No row was written.
            PartitionError: A row belongs to another partition. No row was written.
            RefusedError: BigQuery refused jobs; of several partitions the error says which.
            ConnectorError: As for `append`; no row was written.
        """
        _refuse_other_options(options)
        return MaterializedWrite.of(
            self._replace(Connected.to(self.bigquery), data, table, options)
        )

    @abstractmethod
    def _append(
        self, connected: Connected, data: Data, table: Destination, options: TableOptions | None
    ) -> WriteResult: ...

    @abstractmethod
    def _replace(
        self, connected: Connected, data: Data, table: Destination, options: TableOptions | None
    ) -> WriteResult: ...

    def _drafts(self, connected: Connected, data: Batches) -> FindDraft:
        """Finds tables for this data, or what they will be."""
        creation = Creation(tables=self.create_table, datasets=self.create_dataset)

        def find(ref: TableRef, options: TableOptions | None) -> Draft:
            allowed = creation
            if ref.partition and not (options and options.partitioning):
                why_not = (
                    "How it would be partitioned is not known: pass options with a partitioning."
                )
                allowed = Creation(tables=False, why_not=why_not)
            columns = partial(table_fields, data.schema)
            draft = connected.admin.draft(ref, columns, options, allowed)
            if draft.given:  # no table gets a column for data that does not fit the others
                Conformer(data.schema, draft.table.columns)
            return draft

        return find


class DefaultStreamWriter(BigQueryWriter):
    """Appends over the Storage Write API's default stream.

    At least once: a retry after a lost acknowledgement can write rows twice. Rows are visible as
    soon as they are acknowledged. Over several connections they arrive in no order. When rows fail,
    all the others are written.
    """

    replaces: ClassVar[bool] = False
    """It only adds rows."""

    connections: int = Field(
        default=1,
        description="AppendRows connections of one append. BigQuery takes 5 to 10 MB/s over one: "
        "use more when that is what an append waits for.",
    )

    def _append(
        self, connected: Connected, data: Data, table: Destination, options: TableOptions | None
    ) -> WriteResult:
        batches = open_data(data)
        slice_, address = (table, table.table) if isinstance(table, Slice) else (None, table)
        ref = connected.resolve(address)
        if ref.partition:
            raise UnsupportedError(
                f"BigQuery chooses the partition of a row that is streamed: append to "
                f"{ref.at(None)}, or write {ref} with FileLoadsWriter."
            )
        if not 1 <= self.connections <= MAX_CONNECTIONS:
            raise ConfigurationError(
                f"connections={self.connections}: it must be from 1 to {MAX_CONNECTIONS}."
            )
        if slice_:
            check_streamable(slice_)
        layout = slice_.options if slice_ else None
        draft = self._drafts(connected, batches)(ref, options or layout)
        ensured, checked = of_stream(slice_, draft) if slice_ else (draft.make(), None)
        with Progress(f"Appending to {ref}", log()) as progress:
            result = default_stream.append(
                connected.clients,
                ensured,
                batches,
                progress,
                connected.deadline,
                connections=self.connections,
                look_up=lambda: connected.admin.draft(ref, lambda: (), None, AS_IT_IS).table,
                check=checked.check if checked else None,
            )
        return replace(result, partitions=dict(checked.counts)) if checked else result

    def _replace(
        self, connected: Connected, data: Data, table: Destination, options: TableOptions | None
    ) -> WriteResult:
        raise UnsupportedError("The default stream only adds rows: replace with FileLoadsWriter.")


class FileLoadsWriter(BigQueryWriter):
    """Writes by load jobs from Parquet files, which it stages in Cloud Storage and then deletes.

    Load jobs are atomic; by Google's documentation they are free, and a table takes 1,500 of them
    a day. When rows fail, nothing is written.

    A `RowSlice`, and columns of JSON, RANGE and INTERVAL, which no load job takes from Parquet, are
    loaded into a staging table of the same dataset, and written from there by one transaction. Its
    queries are billed as such. A transaction that another one excludes is tried again. When the
    process dies, the staging table is dropped by BigQuery a day later.
    """

    staging: str = Field(description="gs://bucket or gs://bucket/prefix for the files.")

    def _append(
        self, connected: Connected, data: Data, table: Destination, options: TableOptions | None
    ) -> WriteResult:
        return self._load(connected, data, table, options, "append")

    def _replace(
        self, connected: Connected, data: Data, table: Destination, options: TableOptions | None
    ) -> WriteResult:
        return self._load(connected, data, table, options, "replace")

    def _load(
        self,
        connected: Connected,
        data: Data,
        table: Destination,
        options: TableOptions | None,
        operation: Operation,
    ) -> WriteResult:
        batches, deadline = open_data(data), connected.deadline
        billing, clients = connected.billing_project, connected.clients
        staging = Staging(clients, billing, self.staging, deadline)
        targets = self._targets(connected, batches, table, options, operation)
        labels = dict(connected.defaults.labels) | dict(job_labels(run_context()))
        with Progress(f"Loading into {targets.table}", log()) as progress:
            return file_loads.load(
                connected.rest,
                staging,
                targets,
                batches,
                operation=operation,
                labels=labels,
                progress=progress,
                deadline=deadline,
            )

    def _targets(
        self,
        connected: Connected,
        data: Batches,
        table: Destination,
        options: TableOptions | None,
        operation: Operation,
    ) -> Targets:
        find = self._drafts(connected, data)
        if isinstance(table, TableSlice):
            return of_slice(table.resolve(connected.project), find, options)
        if isinstance(table, RowSlice):
            slice_ = table.resolve(connected.project)
            return of_rows(slice_, find, options, connected.admin.draft_type, operation)
        return of_table(connected.resolve(table), find, options)


def _refuse_other_options(options: object) -> None:
    if options is not None and not isinstance(options, TableOptions):
        raise ConfigurationError(
            f"options is {type(options).__name__}: pass TableOptions(partitioning=..., ...)."
        )
