"""Tables are looked up, created when they are missing, and checked when they are not."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from google.api_core.exceptions import GoogleAPICallError, RetryError
from google.auth.exceptions import GoogleAuthError
from google.cloud import bigquery
from requests import RequestException

from dagster_bq_connector.errors import (
    DatasetNotFoundError,
    Fault,
    PartitionError,
    TableMismatchError,
    TableNotFoundError,
    classify,
    error_text,
    explain,
)
from dagster_bq_connector.retry import Backoff, rest_options
from dagster_bq_connector.schema.types import type_name
from dagster_bq_connector.table.evolution import with_columns
from dagster_bq_connector.table.literals import table_sql
from dagster_bq_connector.table.options import TableOptions, partitioning_of
from dagster_bq_connector.table.ref import TableRef
from dagster_bq_connector.table.row_slice import Partitioning, every_row

Columns: TypeAlias = Callable[[], Sequence[bigquery.SchemaField]]

# What Google's REST client raises.
REST_ERRORS = (GoogleAPICallError, RetryError, GoogleAuthError, RequestException)


@dataclass(frozen=True, slots=True)
class Creation:
    """What may be created for a write.

    Attributes:
        tables: Create a missing table from the data's schema and the `TableOptions`.
        datasets: Create a missing dataset, in the location of the client.
        why_not: The remedy to name when a missing table may not be created.
    """

    tables: bool = True
    datasets: bool = False
    why_not: str = "create_table=False: create it, or allow it."


@dataclass(frozen=True)
class EnsuredTable:
    """A table that exists.

    Attributes:
        ref: Its address, without partition.
        columns: Its columns.
        age: Seconds since it was created. The Storage API may not know a new one for a while.
        partitioning: How it is partitioned, without the expiration of its partitions.
        encryption: The customer's key that encrypts it, if one does.
        location: Where its dataset is.
    """

    ref: TableRef
    columns: Sequence[bigquery.SchemaField]
    age: float
    partitioning: Partitioning = None
    encryption: bigquery.EncryptionConfiguration | None = None
    location: str | None = None


class TableAdmin:
    """Looks up and creates tables through one REST client."""

    def __init__(self, client: bigquery.Client, deadline: float) -> None:
        """Use `client`; each call may retry for `deadline` seconds."""
        self._client, self._deadline = client, deadline
        self._options: Any = rest_options(deadline)

    def get(self, ref: TableRef) -> bigquery.Table:
        """The table's metadata.

        Raises:
            TableNotFoundError: It is not there.
            DatasetNotFoundError: Its dataset is not there.
            UnreachableError: No answer within the deadline.
        """
        try:
            return self._client.get_table(ref.at(None).to_api(), **self._options)
        except REST_ERRORS as error:
            raise explain(error, f"Table {ref}") from error

    def ensure(
        self,
        ref: TableRef,
        columns: Columns,
        options: TableOptions | None,
        creation: Creation,
    ) -> EnsuredTable:
        """The table, made when it is missing. Losing a race to create it is success.

        With `evolution="add"` in the options, an existing table gets the columns that it lacks.

        Args:
            ref: The address; a partition in it is ignored.
            columns: Gives the columns of a new table, and those that an existing one may lack;
                otherwise not called for one that exists.
            options: The layout of a new table, and what an existing one is checked against.
            creation: What may be created.

        Raises:
            TableNotFoundError: It is missing and may not be created.
            DatasetNotFoundError: Its dataset is missing and may not be created.
            TableMismatchError: It exists with another layout.
        """
        ref = ref.at(None)
        try:
            table = self.get(ref)
        except DatasetNotFoundError:
            if not creation.datasets:
                raise
            self._create_dataset(ref)
            table = self._create(ref, columns, options, creation)
        except TableNotFoundError:
            table = self._create(ref, columns, options, creation)
        if options and (differences := options.differences(table)):
            raise TableMismatchError(
                f"Table {ref} is not laid out as asked; {'; '.join(differences)}. Change the "
                "options, or write to another table: BigQuery cannot change it in place."
            )
        if options and options.evolution == "add":
            table = self._add_columns(ref, table, columns())
        now = datetime.datetime.now(datetime.UTC)
        age = (now - (table.created or now)).total_seconds()
        layout, encryption = partitioning_of(table), table.encryption_configuration
        return EnsuredTable(ref, table.schema, age, layout, encryption, table.location)

    def expression_type(self, ref: TableRef, partitioning: Partitioning, expression: str) -> str:
        """The type of a SQL expression over the columns of a table, found by a dry run.

        Args:
            ref: The table.
            partitioning: How it is partitioned: it may require a filter of any query.
            expression: The expression, without aggregates.

        Raises:
            PartitionError: The table does not take the expression.
        """
        where = f" WHERE {every_row(partitioning)}" if partitioning else ""
        query = f"SELECT ({expression}) AS value FROM {table_sql(ref)}{where}"
        config = bigquery.QueryJobConfig(dry_run=True, use_query_cache=False)
        try:
            job = self._client.query(query, job_config=config, job_retry=None, **self._options)
        except REST_ERRORS as error:
            if classify(error) is not Fault.REFUSED:
                raise explain(error, f"Table {ref}") from error
            raise PartitionError(
                f"{expression!r} is neither a column of {ref} nor an expression over its columns: "
                f"{error_text(error)}"
            ) from error
        return type_name((job.schema or [])[0])

    def _add_columns(
        self, ref: TableRef, table: bigquery.Table, wanted: Sequence[bigquery.SchemaField]
    ) -> bigquery.Table:
        """The table with all columns. Whoever changes it at the same time is not undone."""
        found: list[bigquery.Table] = [table]

        def add() -> bigquery.Table:
            table = found.pop() if found else self.get(ref)
            columns = with_columns(table.schema, wanted)
            if columns == list(table.schema):
                return table
            table.schema = columns
            return self._client.update_table(table, ["schema"], **self._options)  # with its etag

        try:
            return Backoff(deadline=self._deadline).call(add, repeat_on={Fault.STALE})
        except REST_ERRORS as error:
            raise explain(error, f"Table {ref}") from error

    def _create(
        self,
        ref: TableRef,
        columns: Columns,
        options: TableOptions | None,
        creation: Creation,
    ) -> bigquery.Table:
        if not creation.tables:
            raise TableNotFoundError(f"Table {ref} does not exist. {creation.why_not}")
        table = bigquery.Table(ref.to_api(), schema=list(columns()))
        if options:
            options.apply(table)
            if options.expiration:
                table.expires = datetime.datetime.now(datetime.UTC) + options.expiration
        try:
            return self._client.create_table(table, **self._options)
        except REST_ERRORS as error:
            if classify(error) is Fault.TAKEN:
                return self.get(ref)
            if classify(error) is Fault.DATASET_MISSING and creation.datasets:
                self._create_dataset(ref)
                return self._create(ref, columns, options, replace(creation, datasets=False))
            raise explain(error, f"Table {ref}") from error

    def _create_dataset(self, ref: TableRef) -> None:
        dataset = bigquery.Dataset(bigquery.DatasetReference(ref.to_api().project, ref.dataset))
        dataset.location = self._client.location
        try:
            self._client.create_dataset(dataset, **self._options)
        except REST_ERRORS as error:
            if classify(error) is Fault.TAKEN:
                return
            raise explain(error, f"Dataset {ref.project}.{ref.dataset}") from error
