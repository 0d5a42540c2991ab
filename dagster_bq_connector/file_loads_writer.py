"""`FileLoadsWriter`: load jobs from files, of rows or of files that exist already."""

from collections.abc import Sequence
from typing import Any, cast

import dagster as dg
import dagster_gcp
import pyarrow as pa
from google.cloud import storage
from pydantic import Field

from dagster_bq_connector.errors import ConfigurationError, UnsupportedError
from dagster_bq_connector.metadata import MaterializedWrite, log
from dagster_bq_connector.progress import Progress
from dagster_bq_connector.resources import Connected, TableLike
from dagster_bq_connector.schema.data import Data, open_data
from dagster_bq_connector.table.options import TableOptions
from dagster_bq_connector.table.row_slice import RowSlice
from dagster_bq_connector.table.slice import TableSlice
from dagster_bq_connector.write import file_loads
from dagster_bq_connector.write.jobs import FileFormat, Source
from dagster_bq_connector.write.key import WriteKey
from dagster_bq_connector.write.result import Operation, WriteResult
from dagster_bq_connector.write.source_files import SourceFiles
from dagster_bq_connector.write.staging import Staging
from dagster_bq_connector.write.targets import of_files
from dagster_bq_connector.writers import (
    BigQueryWriter,
    Destination,
    check_options,
    resolved,
)


class FileLoadsWriter(BigQueryWriter):
    """Writes by load jobs from Parquet files, which it stages in Cloud Storage and then deletes.

    Exactly once: a load job is atomic, and its id is made from the write key, so that a write that
    is tried again finds its job. By Google's documentation load jobs are free, and a table takes
    1,500 of them a day. When rows fail, nothing is written. What is more than one job takes is
    loaded into temporary tables of the same dataset, which one copy job puts into the table.

    A `RowSlice`, and columns of JSON, RANGE and INTERVAL, which no load job takes from Parquet, are
    loaded into a staging table of the same dataset, and written from there by one transaction. Its
    queries are billed as such. A transaction that another one excludes is tried again. When the
    process dies, such tables are dropped by BigQuery a day later.

    Attributes:
        gcs (GCSResource | None): dagster_gcp's connection to Cloud Storage, for the files. That of
            `bigquery` when not set.
    """

    staging: str = Field(description="gs://bucket or gs://bucket/prefix for the files.")
    gcs: dg.ResourceDependency[dagster_gcp.GCSResource | None] = cast(Any, None)

    def load_uris(
        self,
        uris: str | Sequence[str],
        table: TableLike | TableSlice,
        format: FileFormat = "parquet",
        operation: Operation = "append",
        if_empty: bool = False,
        skip_leading_rows: int = 0,
        schema: pa.Schema | None = None,
        options: TableOptions | None = None,
        key: str | None = None,
    ) -> MaterializedWrite:
        """Load files that are in Cloud Storage already. They stay there.

        The job always names the columns of the table, so that their types decide: nothing is
        guessed from the files.

        Args:
            uris: `gs://bucket/name`, one or several; one `*` in a name stands for any text.
            table: A table, a partition (`shop.orders$20260801`), or what `DailyTable.for_run`
                gives for one partition.
            format: `parquet`, `avro`, `csv` or `json_lines`. The columns of a CSV file are in the
                order of the table; those of the others are found by name.
            operation: `append`, or `replace` what is there.
            if_empty: Refuse a table or partition that has rows.
            skip_leading_rows: Lines of each CSV file before its first row.
            schema: The Arrow schema of a table that is created when it is missing.
            options: The layout of a table that is created; an existing one is checked against it.
            key: The write key, as for `append`. The same key with other files is a replay.

        Returns:
            What was loaded.

        Raises:
            SourceFileError: A file is missing, or of another format. Nothing was changed.
            ConfigurationError: An address that is none, or a bucket in another location than the
                dataset. Nothing was changed.
            TableNotFoundError: The table is missing, and no schema was given.
            UnsupportedError: Several partitions, a `RowSlice`, or more files than one write takes.
            SchemaError: An Avro column of several types.
            RefusedError: BigQuery refused the files, or the table has rows and `if_empty` is set.
            WriteKeyError, ConnectorError: As for `append`; nothing was changed.
        """
        _check_files(table, operation, schema)
        check_options(options)
        source = Source(format, skip_leading_rows)
        connected = Connected.to(self.bigquery)
        identity = self._key(connected, operation, table, key)
        place = resolved(connected, table)
        assert not isinstance(place, RowSlice)
        targets = of_files(place, self._drafts(connected, schema, operation), options)
        settings = self._settings(connected, targets, identity, operation)
        files = SourceFiles(self._storage(connected), connected.deadline)
        with Progress(f"Loading into {targets.table}", log()) as progress:
            result = file_loads.load_files(
                settings,
                targets,
                lambda: files.find(uris, source.format, targets.location),
                source,
                if_empty,
                progress,
            )
        return MaterializedWrite.of(result)

    def _append(
        self,
        connected: Connected,
        data: Data,
        table: Destination,
        options: TableOptions | None,
        key: WriteKey,
    ) -> WriteResult:
        return self._load(connected, data, table, options, key, "append")

    def _replace(
        self,
        connected: Connected,
        data: Data,
        table: Destination,
        options: TableOptions | None,
        key: WriteKey,
    ) -> WriteResult:
        return self._load(connected, data, table, options, key, "replace")

    def _load(
        self,
        connected: Connected,
        data: Data,
        table: Destination,
        options: TableOptions | None,
        key: WriteKey,
        operation: Operation,
    ) -> WriteResult:
        batches, client = open_data(data), self._storage(connected)
        staging = Staging(client, self.staging, key.attempt, connected.deadline)
        staging.check(connected.location)  # before a table is made
        targets = self._targets(connected, batches, table, options, operation)
        settings = self._settings(connected, targets, key, operation)
        with Progress(f"Loading into {targets.table}", log()) as progress:
            return file_loads.load(settings, staging, targets, batches, progress)

    def _storage(self, connected: Connected) -> storage.Client:
        """The Cloud Storage client.

        Raises:
            ConfigurationError: It or BigQuery is an emulator, and the other one is not.
        """
        if self.gcs is None:
            return connected.clients.cloud_storage(connected.billing_project)
        client = self.gcs.get_client()
        url = str(client.api_endpoint)
        emulator = url.startswith("http://")
        if emulator != bool(connected.clients.endpoints.emulators):
            one, other = ("gcs", "bigquery") if emulator else ("bigquery", "gcs")
            raise ConfigurationError(
                f"{one} is an emulator and {other} is not (the files would go to {url}): BigQuery "
                "loads from its own Cloud Storage. Nothing was written."
            )
        return client


def _check_files(table: object, operation: str, schema: object) -> None:
    """Refuse what files cannot be loaded for.

    Raises:
        UnsupportedError: They would go into a slice of a table's rows.
        ConfigurationError: The operation or the schema is none.
    """
    if schema is not None and not isinstance(schema, pa.Schema):
        raise ConfigurationError(
            f"schema is {type(schema).__name__}: pass a pyarrow.Schema, such as "
            'pa.schema([("id", pa.int64())]).'
        )
    if isinstance(table, RowSlice):
        raise UnsupportedError(
            f"Files cannot be loaded into a slice of the rows of {table.table}: load them into "
            "a table of their own, read that, and replace the slice."
        )
    if operation not in ("append", "replace"):
        raise ConfigurationError(f"operation={operation!r}: it is 'append' or 'replace'.")
