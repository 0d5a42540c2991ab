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
    TableMismatchError,
    TableNotFoundError,
    classify,
    explain,
)
from dagster_bq_connector.retry import rest_options
from dagster_bq_connector.table.options import TableOptions
from dagster_bq_connector.table.ref import TableRef

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
    """

    ref: TableRef
    columns: Sequence[bigquery.SchemaField]
    age: float


class TableAdmin:
    """Looks up and creates tables through one REST client."""

    def __init__(self, client: bigquery.Client, deadline: float) -> None:
        """Use `client`; each call may retry for `deadline` seconds."""
        self._client = client
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

        Args:
            ref: The address; a partition in it is ignored.
            columns: Gives the columns of a new table; not called for one that exists.
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
        now = datetime.datetime.now(datetime.UTC)
        return EnsuredTable(ref, table.schema, (now - (table.created or now)).total_seconds())

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
            self._client.create_dataset(dataset, exists_ok=True, **self._options)
        except REST_ERRORS as error:
            raise explain(error, f"Dataset {ref.project}.{ref.dataset}") from error
