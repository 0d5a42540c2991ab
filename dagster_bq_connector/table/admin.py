"""Tables are looked up, created when they are missing, and checked when they are not."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
    UnsupportedError,
    classify,
    error_text,
    explain,
)
from dagster_bq_connector.retry import Backoff, rest_options
from dagster_bq_connector.schema.types import type_name
from dagster_bq_connector.table.evolution import with_columns
from dagster_bq_connector.table.literals import nulls_sql, table_sql
from dagster_bq_connector.table.options import TableOptions, partitioning_of
from dagster_bq_connector.table.ref import TableRef
from dagster_bq_connector.table.row_slice import Partitioning, every_row

Columns: TypeAlias = Callable[[], Sequence[bigquery.SchemaField]]

# What looks like a table and takes no rows, by the type that BigQuery gives it.
READ_ONLY = ("VIEW", "MATERIALIZED_VIEW", "SNAPSHOT")
# A label of tables that a change stream of this library writes to.
CDC_LABEL = "dagster_bq_cdc"
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
    """A table that exists, or that of a `Draft`, which may not yet.

    Attributes:
        ref: Its address, without partition.
        columns: Its columns.
        age: Seconds since it was created. The Storage API may not know a new one for a while.
        partitioning: How it is partitioned, without the expiration of its partitions.
        encryption: The customer's key that encrypts it, if one does.
        location: Where its dataset is.
        unchanged: Seconds since it was last changed; None when it was created now.
        streamed: Whether it is labelled as one that a change stream writes to.
    """

    ref: TableRef
    columns: Sequence[bigquery.SchemaField]
    age: float
    partitioning: Partitioning = None
    encryption: bigquery.EncryptionConfiguration | None = None
    location: str | None = None
    unchanged: float | None = None
    streamed: bool = False


@dataclass(frozen=True)
class Draft:
    """A table as a write needs it, for what can be refused before anything is made or changed.

    Attributes:
        table: The table as it is, or as it will be.
        given: The columns of the data, when the table is made or changed for them; empty when it
            stays as it is.
        make: Makes or changes the table, if need be, and gives it as it is then.
    """

    table: EnsuredTable
    given: Sequence[bigquery.SchemaField]
    make: Callable[[], EnsuredTable]


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
            raise explain(error, f"Table {ref}", self._client.location) from error

    def location(self, ref: TableRef) -> str | None:
        """Where a table's dataset is; None when it is not there yet, or may not be seen.

        Raises:
            ConnectorError: It cannot be looked up.
        """
        dataset = bigquery.DatasetReference(ref.to_api().project, ref.dataset)
        try:
            return str(self._client.get_dataset(dataset, **self._options).location)
        except REST_ERRORS as error:
            if classify(error) in (Fault.DATASET_MISSING, Fault.DENIED):
                return None
            raise explain(error, f"Dataset {ref.project}.{ref.dataset}") from error

    def draft(
        self,
        ref: TableRef,
        columns: Columns,
        options: TableOptions | None,
        creation: Creation,
    ) -> Draft:
        """What the table is, or will be for some data. Nothing is made or changed yet.

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
            UnsupportedError: It is a view, or something else that takes no rows.
        """
        ref = ref.at(None)
        try:
            there = self.get(ref)
        except (TableNotFoundError, DatasetNotFoundError) as error:
            if isinstance(error, DatasetNotFoundError) and not creation.datasets:
                raise
            if not creation.tables:
                text = f"Table {ref} does not exist. {creation.why_not}"
                raise TableNotFoundError(text) from error
            new = _new_table(ref, given := columns(), options)
            make = partial(self._create, ref, given, options, creation)
            return Draft(ensured(ref, new), given, make)
        if there.table_type in READ_ONLY:
            kind = there.table_type.lower().replace("_", " ")
            raise UnsupportedError(f"{ref} is a {kind}: write to a table.")
        _check_layout(ref, there, options)
        table = ensured(ref, there, there.modified)
        if not options or options.evolution != "add":
            return Draft(table, (), lambda: table)
        wanted = columns()
        more = with_columns(there.schema, wanted)
        if more == list(there.schema):
            return Draft(table, (), lambda: table)
        make = partial(self._add_columns, ref, there, wanted)
        return Draft(replace(table, columns=more), wanted, make)

    def expression_type(self, ref: TableRef, partitioning: Partitioning, expression: str) -> str:
        """The type of a SQL expression over what a table has, found by a dry run.

        Args:
            ref: The table.
            partitioning: How it is partitioned: it may require a filter of any query.
            expression: The expression, which may use pseudo-columns.

        Raises:
            PartitionError: The table does not take the expression, or it is no value of a row.
        """
        return self._type_of(ref, expression, table_sql(ref), every_row(partitioning) or "TRUE")

    def draft_type(self, table: EnsuredTable, expression: str) -> str:
        """The type of a SQL expression over columns that a table has, or will have.

        Args:
            table: The table, which need not exist.
            expression: The expression.

        Raises:
            PartitionError: It is none over these columns, or no value of a row.
        """
        return self._type_of(table.ref, expression, f"(SELECT {nulls_sql(table.columns)})", "TRUE")

    def _type_of(self, ref: TableRef, expression: str, source: str, where: str) -> str:
        # In a WHERE, because that takes neither aggregates nor analytic functions.
        query = (
            f"SELECT ({expression}) AS value FROM {source} "
            f"WHERE ({expression}) IS NOT NULL AND {where}"
        )
        config = bigquery.QueryJobConfig(dry_run=True, use_query_cache=False)
        try:
            job = self._client.query(query, job_config=config, job_retry=None, **self._options)
        except REST_ERRORS as error:
            if classify(error) is not Fault.REFUSED:
                raise explain(error, f"Table {ref}", self._client.location) from error
            raise PartitionError(
                f"{expression!r} is neither a column of {ref} nor an expression over its columns: "
                f"{error_text(error)}"
            ) from error
        value = (job.schema or [])[0]
        if value.mode == "REPEATED":
            raise PartitionError(f"{expression!r} of {ref} is an array, which holds no one key.")
        return type_name(value)

    def add_columns(self, ref: TableRef, wanted: Sequence[bigquery.SchemaField]) -> EnsuredTable:
        """Give a table the columns that it lacks, as NULLABLE ones; see `with_columns`.

        Raises:
            ConnectorError: It is gone, or BigQuery does not take them.
        """
        return self._add_columns(ref, self.get(ref), wanted)

    def change(
        self, ref: TableRef, how: Callable[[bigquery.Table], Sequence[str]]
    ) -> bigquery.Table:
        """Change a table's metadata. Whoever changes it at the same time is not undone.

        Args:
            ref: The table.
            how: Changes what was read of it, and gives the names of the properties that it has
                changed; none when all is as it should be. Called again when somebody else was
                first.

        Returns:
            The table as it is then.

        Raises:
            ConnectorError: It is gone, or BigQuery does not take the change.
        """
        return self._changed(ref, self.get(ref), how)

    def create(self, table: bigquery.Table) -> bool:
        """Create a table. False when there is one of its name, as when somebody else was first.

        Raises:
            ConnectorError: Its dataset is missing, or BigQuery refuses it.
        """
        try:
            self._client.create_table(table, **self._options)
        except REST_ERRORS as error:
            if classify(error) is Fault.TAKEN:
                return False
            raise explain(error, f"Table {table.reference}", self._client.location) from error
        return True

    def _add_columns(
        self, ref: TableRef, table: bigquery.Table, wanted: Sequence[bigquery.SchemaField]
    ) -> EnsuredTable:
        def add(table: bigquery.Table) -> Sequence[str]:
            columns = with_columns(table.schema, wanted)
            if columns == list(table.schema):
                return ()
            table.schema = columns
            return ("schema",)

        return ensured(ref, self._changed(ref, table, add))

    def _changed(
        self, ref: TableRef, table: bigquery.Table, how: Callable[[bigquery.Table], Sequence[str]]
    ) -> bigquery.Table:
        found: list[bigquery.Table] = [table]

        def change() -> bigquery.Table:
            table = found.pop() if found else self.get(ref)
            if not (properties := how(table)):
                return table
            return self._client.update_table(table, list(properties), **self._options)  # its etag

        try:
            return Backoff(deadline=self._deadline).call(change, {Fault.STALE})
        except REST_ERRORS as error:
            raise explain(error, f"Table {ref}", self._client.location) from error

    def _create(
        self,
        ref: TableRef,
        columns: Sequence[bigquery.SchemaField],
        options: TableOptions | None,
        creation: Creation,
    ) -> EnsuredTable:
        """The table, made. Losing a race to create it is success if it is as asked."""
        try:
            table = _new_table(ref, columns, options)
            return ensured(ref, self._client.create_table(table, **self._options))
        except REST_ERRORS as error:
            if classify(error) is Fault.TAKEN:
                return self.draft(ref, lambda: columns, options, creation).make()
            if classify(error) is Fault.DATASET_MISSING and creation.datasets:
                self._create_dataset(ref)
                return self._create(ref, columns, options, replace(creation, datasets=False))
            raise explain(error, f"Table {ref}", self._client.location) from error

    def _create_dataset(self, ref: TableRef) -> None:
        dataset = bigquery.Dataset(bigquery.DatasetReference(ref.to_api().project, ref.dataset))
        dataset.location = self._client.location
        try:
            self._client.create_dataset(dataset, **self._options)
        except REST_ERRORS as error:
            if classify(error) is Fault.TAKEN:
                return
            raise explain(error, f"Dataset {ref.project}.{ref.dataset}") from error


def check_replaceable(table: EnsuredTable) -> None:
    """Refuse to replace rows that a change stream writes, before anything is staged.

    Raises:
        UnsupportedError: The table's label says so.
    """
    if table.streamed:
        raise UnsupportedError(
            f"{table.ref} was not changed: change data capture streams into it, as its label "
            f"{CDC_LABEL} says. BigQuery takes no UPDATE, DELETE or MERGE there, and rows that "
            "were replaced would not be those of its source. Write its changes by CDC, or replace "
            "another table. If no stream writes to it any more, take the label away."
        )


def _new_table(
    ref: TableRef, columns: Sequence[bigquery.SchemaField], options: TableOptions | None
) -> bigquery.Table:
    table = bigquery.Table(ref.to_api(), schema=list(columns))
    if options:
        options.apply(table)
        if options.expiration:
            table.expires = datetime.datetime.now(datetime.UTC) + options.expiration
    return table


def _check_layout(ref: TableRef, table: bigquery.Table, options: TableOptions | None) -> None:
    if options and (differences := options.differences(table)):
        raise TableMismatchError(
            f"Table {ref} is not laid out as asked; {'; '.join(differences)}. Change the "
            "options, or write to another table: BigQuery cannot change it in place."
        )


def ensured(
    ref: TableRef, table: bigquery.Table, changed: datetime.datetime | None = None
) -> EnsuredTable:
    """What is needed of a table's metadata.

    Args:
        ref: Its address.
        table: The metadata.
        changed: When it was last changed, if that was before now.
    """
    age, unchanged = _seconds_since(table.created) or 0.0, _seconds_since(changed)
    layout, encryption = partitioning_of(table), table.encryption_configuration
    streamed = CDC_LABEL in (table.labels or {})
    return EnsuredTable(
        ref, table.schema, age, layout, encryption, table.location, unchanged, streamed
    )


def _seconds_since(moment: datetime.datetime | None) -> float | None:
    return (datetime.datetime.now(datetime.UTC) - moment).total_seconds() if moment else None
