"""The writers: one abstract resource, and one class for each write method."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import dagster as dg
import dagster_gcp
import pyarrow as pa
from google.cloud.bigquery import SchemaField
from pydantic import Field

from dagster_bq_connector.errors import (
    ConfigurationError,
    FailedRowsError,
    PartitionError,
    SchemaError,
    UnsupportedError,
)
from dagster_bq_connector.metadata import MaterializedWrite, job_labels, log, run_context, warn
from dagster_bq_connector.progress import Progress
from dagster_bq_connector.resources import STRICT, Connected, Destination
from dagster_bq_connector.schema.conform import Conformer
from dagster_bq_connector.schema.data import Batches, Data, open_data
from dagster_bq_connector.schema.types import table_fields
from dagster_bq_connector.table.admin import Creation, Draft, EnsuredTable, check_replaceable
from dagster_bq_connector.table.options import TableOptions
from dagster_bq_connector.table.ref import TableRef
from dagster_bq_connector.table.row_slice import RowSlice
from dagster_bq_connector.table.slice import TableSlice
from dagster_bq_connector.write import default_stream
from dagster_bq_connector.write.jobs import JobSettings
from dagster_bq_connector.write.key import WriteKey
from dagster_bq_connector.write.long_write import LongWrite
from dagster_bq_connector.write.result import Operation, WriteResult
from dagster_bq_connector.write.targets import (
    FindDraft,
    Targets,
    check_streamable,
    of_rows,
    of_slice,
    of_stream,
    of_table,
)
from dagster_bq_connector.write_keys import give_back, write_key

# Beyond that a process has no use for more: it cannot fill these.
MAX_CONNECTIONS = 64
Slice = TableSlice | RowSlice
WITHOUT_SCHEMA = "Files alone do not say its columns: create it, or pass schema=."
AS_IT_IS = Creation(tables=False, why_not="It was dropped while rows were appended.")


class BigQueryWriter(dg.ConfigurableResource[Any], ABC):
    """Writes tables. What writes is chosen by choosing one of its subclasses.

    Assets ask for this class; the definitions pass a `DefaultStreamWriter`, an
    `ExactlyOnceWriter` or a `FileLoadsWriter`.

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
        self,
        data: Data,
        table: Destination,
        options: TableOptions | None = None,
        key: str | None = None,
    ) -> MaterializedWrite:
        """Add rows to a table.

        Args:
            data: An Arrow table, batch or reader, a Polars or pandas frame, the rows of a read,
                any object with the Arrow C stream interface, or an iterable of any of them. Read
                once, a few batches at a time.
            table: The table. It is created when it is missing, if `create_table` allows it.
            options: The layout of a table that is created; an existing one is checked against it.
            key: The write key: what is written again under the same key lands once. By default it
                is made of the run, the step and the table; a retry of the step or of the run, and
                a re-execution from failure, have the same, and any other run another.

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
            WriteKeyError: The step has written to the table before, and no `key` tells the two
                apart; or the key was used for something else.
            UnreachableError: No answer within the deadline.
        """
        check_options(options)
        connected = Connected.to(self.bigquery)
        identity = self._key(connected, "append", table, key)
        with _given_back(identity):
            return MaterializedWrite.of(self._append(connected, data, table, options, identity))

    def replace(
        self,
        data: Data,
        table: Destination,
        options: TableOptions | None = None,
        key: str | None = None,
    ) -> MaterializedWrite:
        """Put rows in the place of those that are there: of the table, or of a part of it.

        Each table or partition changes at once, and not at all when it fails. Data without rows
        empties what it replaces.

        Args:
            data: As for `append`.
            table: A table, a partition (`shop.orders$20260801`), what `DailyTable.for_run`
                gives, or a `RowSlice`.
            options: As for `append`.
            key: As for `append`.

        Returns:
            What was written.

        Raises:
            UnsupportedError: The write method cannot replace, or BigQuery takes no DELETE on the
                table now and the part cannot be replaced without. No row was written.
            PartitionError: A row belongs to another partition. No row was written.
            RefusedError: BigQuery refused jobs; of several partitions the error says which.
            ConnectorError: As for `append`; no row was written.
        """
        check_options(options)
        connected = Connected.to(self.bigquery)
        identity = self._key(connected, "replace", table, key)
        with _given_back(identity):
            return MaterializedWrite.of(self._replace(connected, data, table, options, identity))

    def open(
        self, table: Destination, options: TableOptions | None = None, key: str | None = None
    ) -> LongWrite:
        """Begin a long append with checkpoints, as only `ExactlyOnceWriter` can.

        Raises:
            UnsupportedError: It is another writer.
        """
        raise UnsupportedError(
            f"{type(self).__name__} has no checkpoints: open with ExactlyOnceWriter, or append."
        )

    @abstractmethod
    def _append(
        self,
        connected: Connected,
        data: Data,
        table: Destination,
        options: TableOptions | None,
        key: WriteKey,
    ) -> WriteResult: ...

    @abstractmethod
    def _replace(
        self,
        connected: Connected,
        data: Data,
        table: Destination,
        options: TableOptions | None,
        key: WriteKey,
    ) -> WriteResult: ...

    def _key(
        self, connected: Connected, operation: Operation, table: Destination, key: str | None
    ) -> WriteKey:
        """The write key of a call.

        Raises:
            WriteKeyError: It cannot be told what makes this write another one.
        """
        return write_key(operation, resolved(connected, table), key)

    def _targets(
        self,
        connected: Connected,
        data: Batches,
        table: Destination,
        options: TableOptions | None,
        operation: Operation,
        streamed: bool = False,
    ) -> Targets:
        """Where the rows go by jobs, from files or from a staging table that streams fill."""
        find = self._drafts(connected, data.schema, operation)
        if isinstance(table, TableSlice):
            return of_slice(table.resolve(connected.project), find, options, streamed)
        if isinstance(table, RowSlice):
            slice_ = table.resolve(connected.project)
            return of_rows(slice_, find, options, connected.admin.draft_type, operation)
        return of_table(connected.resolve(table), find, options, streamed)

    def _settings(
        self, connected: Connected, targets: Targets, key: WriteKey, operation: Operation
    ) -> JobSettings:
        """What the jobs have in common.

        Raises:
            ConfigurationError: The resource and the dataset are in different locations.
        """
        there, here = targets.location, connected.location
        if there and here and there.casefold() != here.casefold():
            raise ConfigurationError(
                f"The location of the BigQuery resource is {here}, and {targets.table} is in "
                f"{there}. Set location={there!r}, or leave it out. No row was written."
            )
        labels = dict(connected.defaults.labels) | dict(job_labels(run_context()))
        rest, deadline = connected.rest, connected.deadline
        return JobSettings(rest, there, key, operation, labels, deadline, warn())

    def _streamed(
        self, connected: Connected, data: Batches, table: Destination, options: TableOptions | None
    ) -> tuple[EnsuredTable, Targets | None]:
        """The table that rows are streamed to, and what checks those of a slice.

        Raises:
            UnsupportedError: No stream leads there.
        """
        slice_, address = (table, table.table) if isinstance(table, Slice) else (None, table)
        ref = connected.resolve(address)
        check_streamed(ref)
        if slice_:
            check_streamable(slice_)
        layout = slice_.options if slice_ else None
        draft = self._drafts(connected, data.schema)(ref, options or layout)
        return of_stream(slice_, draft) if slice_ else (draft.make(), None)

    def _drafts(
        self, connected: Connected, schema: pa.Schema | None, operation: Operation = "append"
    ) -> FindDraft:
        """Finds tables for data of a schema, or what they will be.

        What it gives raises UnsupportedError when the table cannot be replaced.
        """
        creation = Creation(tables=self.create_table, datasets=self.create_dataset)
        if schema is None:
            creation = Creation(tables=False, why_not=WITHOUT_SCHEMA)

        def columns() -> Sequence[SchemaField]:
            return table_fields(schema) if schema is not None else ()

        def find(ref: TableRef, options: TableOptions | None) -> Draft:
            allowed = creation
            if schema is not None and ref.partition and not (options and options.partitioning):
                why_not = (
                    "How it would be partitioned is not known: pass options with a partitioning."
                )
                allowed = Creation(tables=False, why_not=why_not)
            draft = connected.admin.draft(ref, columns, options, allowed)
            if operation == "replace":
                check_replaceable(draft.table)
            if draft.given and schema is not None:
                # No table gets a column for data that does not fit the others.
                Conformer(schema, draft.table.columns)
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

    def _key(
        self, connected: Connected, operation: Operation, table: Destination, key: str | None
    ) -> WriteKey:
        if key is not None:
            raise UnsupportedError(
                "The default stream writes at least once, so it takes no write key: leave key= "
                "out, or use ExactlyOnceWriter or FileLoadsWriter."
            )
        return WriteKey.unique()

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
        ref = ensured.ref
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
        self,
        connected: Connected,
        data: Data,
        table: Destination,
        options: TableOptions | None,
        key: WriteKey,
    ) -> WriteResult:
        raise UnsupportedError(
            "The default stream only adds rows: replace with ExactlyOnceWriter or FileLoadsWriter."
        )


@contextmanager
def _given_back(key: WriteKey) -> Generator[None]:
    """The step may mend data that are refused, and write them under the key that it has."""
    try:
        yield
    except (FailedRowsError, PartitionError, SchemaError):
        give_back(key)
        raise


def check_streamed(ref: TableRef) -> None:
    """Refuse a partition as what rows are streamed to.

    Raises:
        UnsupportedError: It is one.
    """
    if ref.partition:
        raise UnsupportedError(
            f"BigQuery chooses the partition of a row that is streamed: append to {ref.at(None)}, "
            f"or write {ref} with FileLoadsWriter."
        )


def check_connections(connections: int) -> None:
    """Refuse a number of connections that helps nobody.

    Raises:
        ConfigurationError: It is none from 1 to 64.
    """
    if not 1 <= connections <= MAX_CONNECTIONS:
        raise ConfigurationError(
            f"connections={connections}: it must be from 1 to {MAX_CONNECTIONS}."
        )


def resolved(connected: Connected, table: Destination) -> TableRef | Slice:
    """A destination with its project."""
    if isinstance(table, Slice):
        return table.resolve(connected.project)
    return connected.resolve(table)


def check_options(options: object) -> None:
    """Refuse what is no layout of a table.

    Raises:
        ConfigurationError: It is none.
    """
    if options is not None and not isinstance(options, TableOptions):
        raise ConfigurationError(
            f"options is {type(options).__name__}: pass TableOptions(partitioning=..., ...)."
        )
