"""Rows go from a staging table into their destination by one transaction.

The steps of an attempt, and what is left when the process dies between them:

    1. the staging table is made     it is dropped by BigQuery a day later
    2. load jobs or streams fill it  the same; the destination is as it was
    3. a query checks its rows       the same
    4. the transaction: DELETE of what is replaced, INSERT of what is staged, COMMIT
                                     BigQuery ends it by itself, with all of it or nothing
       (an append: the INSERT alone; a partition by the time of ingestion: a query with the
       partition as its destination)
    5. the staging table is dropped  it is dropped by BigQuery a day later

An attempt shares nothing with another: its id is in the names of its table and of its jobs. So the
next one may start at once, and what an earlier one left behind changes nothing. The transaction
alone has an id that all attempts share (see proof.py): it succeeds once.

An append is no script, since a script that is cancelled after its COMMIT has failed and yet has
changed the table: the next attempt would append the rows again. One statement is done when its job
is, or not at all.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from google.cloud import bigquery

from dagster_bq_connector.errors import (
    ConnectorError,
    FailedRow,
    FailedRowsError,
    Fault,
    PartitionError,
    RefusedError,
    UnsupportedError,
    classify,
    error_text,
    explain,
)
from dagster_bq_connector.progress import Progress
from dagster_bq_connector.retry import rest_options
from dagster_bq_connector.schema.types import type_name
from dagster_bq_connector.table.admin import REST_ERRORS
from dagster_bq_connector.table.literals import literal, quoted, table_sql
from dagster_bq_connector.table.membership import stray_text
from dagster_bq_connector.table.ref import TableRef
from dagster_bq_connector.table.row_slice import BoundSlice
from dagster_bq_connector.write.jobs import (
    PARQUET,
    JobSettings,
    Running,
    finish_all,
    start_query,
)
from dagster_bq_connector.write.key import purpose_of
from dagster_bq_connector.write.parts import in_parts, temporary_load
from dagster_bq_connector.write.plain import ROW, misfit, plain_columns, selected
from dagster_bq_connector.write.proof import Outcome, Provers, Work
from dagster_bq_connector.write.result import NOTHING_WRITTEN, Operation
from dagster_bq_connector.write.staging import Staged
from dagster_bq_connector.write.steps import step
from dagster_bq_connector.write.targets import Target, Targets

# How long a staging table is kept whose process died.
EXPIRATION = datetime.timedelta(days=1)

_DISPOSITIONS: Mapping[Operation, str] = {
    "append": bigquery.WriteDisposition.WRITE_APPEND,
    "replace": bigquery.WriteDisposition.WRITE_TRUNCATE,
}

# What BigQuery says of a table that takes no DELETE, most telling first.
_UNCHANGEABLE: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(r"upsert stream|change data capture", re.I),
        "change data capture streams into it, and BigQuery takes no DELETE there. Write its "
        "changes by CDC, or replace another table.",
    ),
    (
        re.compile(r"streaming buffer", re.I),
        "some of its rows were streamed in the last 30 minutes, and a transaction cannot delete "
        "those yet. Try again later, or replace the whole table or partition by load jobs.",
    ),
)


@dataclass
class Filled:
    """What is in the staging tables.

    Attributes:
        rows: How many rows, by the id of the target.
        bytes: Bytes that brought them, when that is not known already.
        jobs: The ids of the jobs that brought them.
    """

    rows: Mapping[str, int]
    bytes: int = 0
    jobs: list[str] = field(default_factory=list[str])


def write_staged(provers: Provers, targets: Targets, fill: Fill, outcome: Outcome) -> None:
    """Fill staging tables, then change each target by a transaction.

    Args:
        provers: Runs the transactions; it has their proofs afterwards.
        targets: What is changed.
        fill: Brings the rows into the staging tables.
        outcome: Is told what was done.

    Raises:
        PartitionError: A row belongs to no part of the slice. No row was written.
        FailedRowsError: Values that are none of their column. No row was written.
        UnsupportedError: BigQuery takes no DELETE on the table. No row was written.
        RefusedError: BigQuery failed a job. Of several targets, the error says which were written.
    """
    settings, progress = provers.settings, provers.progress
    tables = StagingTables(settings)
    try:
        filled = fill(settings, targets, tables, progress)
        outcome.jobs += filled.jobs
        outcome.bytes = outcome.bytes or filled.bytes
        if targets.slice is not None and targets.slice.expressions:
            table = tables.of(targets.targets[0])
            outcome.counts = _count(settings, targets.slice, table, progress)
        for target in targets.targets:
            # A single statement cannot check that, as a transaction does.
            if not target.rows or settings.operation == "append":
                _check_count(settings, tables.of(target), filled.rows[target.id], progress)
        changes = [
            _Change(settings, targets, each, tables.of(each), filled.rows[each.id], progress)
            for each in targets.targets
        ]
        provers.run([change.work() for change in changes])
    finally:
        tables.drop()


class StagingTables:
    """A table for each target, in the dataset of the target.

    Their names begin with an underscore, so that no wildcard over the users' tables finds them.
    """

    def __init__(self, settings: JobSettings) -> None:
        self._settings = settings
        self._refs: dict[str, TableRef] = {}

    def of(self, target: Target) -> TableRef:
        """The staging table of a target, which was created."""
        return self._refs[target.id]

    def drop(self) -> None:
        """Drop all of them. When that fails, BigQuery does it a day after they were made."""
        options: Any = rest_options(min(self._settings.deadline, 30.0))
        for ref in self._refs.values():
            try:
                with step("drop staging table"):
                    self._settings.client.delete_table(ref.to_api(), not_found_ok=True, **options)
            except REST_ERRORS:
                return

    def create(self, target: Target, columns: Sequence[bigquery.SchemaField]) -> TableRef:
        """Create the staging table of a target.

        Raises:
            ConnectorError: It cannot be created.
        """
        ref = self._next(target)
        self._refs[target.id] = ref  # before it is there: a lost answer may have made it
        return self._create(target, ref, bigquery.Table(ref.to_api(), schema=list(columns)))

    def create_like(self, target: Target, table: bigquery.Table, number: int) -> TableRef:
        """Create one of several tables of a target, of which a copy makes the target's own.

        Args:
            target: The target.
            table: Its table, whose columns, layout and keys the copy needs.
            number: Which one.

        Raises:
            ConnectorError: It cannot be created.
        """
        ref = self._next(target)
        self._refs[f"{target.id} {number}"] = ref
        like = bigquery.Table(ref.to_api(), schema=table.schema)
        like.time_partitioning = table.time_partitioning
        like.range_partitioning = table.range_partitioning
        like.clustering_fields = table.clustering_fields
        like.require_partition_filter = table.require_partition_filter
        if table.table_constraints is not None:
            like.table_constraints = table.table_constraints
        return self._create(target, ref, like)

    def _next(self, target: Target) -> TableRef:
        name = f"_dagster_bq_{self._settings.key.attempt}_{len(self._refs)}"
        return TableRef(target.ref.dataset, name, target.ref.project)

    def _create(self, target: Target, ref: TableRef, table: bigquery.Table) -> TableRef:
        options: Any = rest_options(self._settings.deadline)
        table.expires = datetime.datetime.now(datetime.UTC) + EXPIRATION
        table.description = "Rows on their way into another table. It may be dropped."
        table.labels = dict(self._settings.labels)
        if target.encryption is not None:
            table.encryption_configuration = target.encryption
        try:
            with step("create staging table"):
                self._settings.client.create_table(table, **options)
        except REST_ERRORS as error:
            # Under this name there is only what a try made whose answer was lost. Google's
            # exists_ok=True would look it up, and wait for that answer without end.
            if classify(error) is Fault.TAKEN:
                return ref
            raise explain(error, f"Staging table {ref}") from error
        return ref


Fill: TypeAlias = Callable[[JobSettings, Targets, StagingTables, Progress], Filled]


def load_staging(
    staged: Mapping[str, Staged],
    settings: JobSettings,
    targets: Targets,
    tables: StagingTables,
    progress: Progress,
) -> Filled:
    """Fill the staging tables by load jobs, each with as many rows as were staged for it."""
    columns, loads = plain_columns(targets.columns), list[Work]()
    for target in targets.targets:
        ref = tables.create(target, columns)
        for part in in_parts(staged[target.id].files):
            name = f"stage_{len(loads)}"
            loads.append(temporary_load(settings, ref, columns, part, PARQUET, name))
    provers = Provers(settings, purpose_of(targets, "stage", []), progress, temporary=True)
    rows = {target.id: staged[target.id].rows for target in targets.targets}
    return Filled(rows, jobs=[proof.id for proof in provers.run(loads)])


def _count(
    settings: JobSettings, bound: BoundSlice, table: TableRef, progress: Progress
) -> dict[str, int]:
    """The rows of each part, counted by BigQuery: it alone knows what expressions give.

    Raises:
        PartitionError: A row belongs to no part.
    """
    sql = (
        f"SELECT {bound.part_number()} AS part, COUNT(*) AS found, MIN({quoted(ROW)}) AS first "
        f"FROM {table_sql(table)} GROUP BY part"
    )
    keys = [key for key, _ in bound.slice.parts]
    counts = dict.fromkeys(keys, 0)
    for part, found, first in _rows(settings, sql, "parts", progress):
        if part is None:
            values = ", ".join(f"FORMAT('%t', {name})" for name in bound.names)
            row = f"SELECT {values} FROM {table_sql(table)} WHERE {quoted(ROW)} = {first}"
            [stray] = _rows(settings, row, "stray", progress)
            text = stray_text(bound, first, dict(zip(bound.types, stray, strict=True)))
            raise PartitionError(f"{text} {NOTHING_WRITTEN}")
        counts[keys[part]] = found
    return counts


def _check_count(settings: JobSettings, table: TableRef, rows: int, progress: Progress) -> None:
    sql = f"SELECT COUNT(*) FROM {table_sql(table)}"
    [(held,)] = _rows(settings, sql, f"count_{table.table}", progress)
    if held != rows:
        raise RefusedError(f"{table} holds {held} rows of {rows} that were staged.")


def _rows(settings: JobSettings, sql: str, name: str, progress: Progress) -> list[tuple[Any, ...]]:
    what, job_id = "Check of the staged rows", settings.job_id(name)
    job = start_query(settings, sql, settings.query_config(), job_id, what)
    finish_all([Running(job_id, job, what)], settings.deadline, progress)
    try:
        options: Any = rest_options(settings.deadline)
        return [tuple(row.values()) for row in job.result(**options)]
    except (*REST_ERRORS, TimeoutError) as error:  # the latter of `result` alone
        raise explain(error, f"{what} (job {job_id})") from error


@dataclass(frozen=True)
class _Change:
    """What one transaction does to one table."""

    settings: JobSettings
    targets: Targets
    target: Target
    staging: TableRef
    rows: int
    progress: Progress

    def work(self) -> Work:
        """The change, as a job that runs with success once.

        A job that failed has changed nothing: its transaction was rolled back. (Only one that was
        cancelled after its COMMIT has; then it replaces the same rows again.)
        """
        what = f"Query into {self.target.ref}"
        if self.target.rows:
            kind = "Transaction on" if self.settings.operation == "replace" else "Insert into"
            what = f"{kind} {self._table}"

        def insert(job_id: str, labels: Mapping[str, str]) -> bigquery.QueryJob:
            config = self.settings.query_config(labels)
            if self.target.rows:
                return start_query(self.settings, self.script(), config, job_id, what)
            config.destination = self.target.ref.to_api()
            config.create_disposition = bigquery.CreateDisposition.CREATE_NEVER
            config.write_disposition = _DISPOSITIONS[self.settings.operation]
            return start_query(self.settings, self._select, config, job_id, what)

        return Work(self.target.id, self.target.key, what, insert, self.rows, self._explained)

    def script(self) -> str:
        """The transaction. BigQuery rolls it back when the script ends before the COMMIT."""
        columns = ", ".join(quoted(column.name) for column in self.targets.columns)
        insert = f"INSERT INTO {table_sql(self._table)} ({columns})\n{self._select};"
        if self.settings.operation == "append":
            return insert
        wrong = literal(f"{self.staging} does not hold the {self.rows} rows that were staged")
        return "\n".join(
            [
                "BEGIN TRANSACTION;",
                f"DELETE FROM {table_sql(self._table)} WHERE {self.target.rows};",
                insert,
                f"IF @@row_count != {self.rows} THEN RAISE USING MESSAGE = {wrong}; END IF;",
                "COMMIT TRANSACTION;",
            ]
        )

    @property
    def _select(self) -> str:
        return f"SELECT {selected(self.targets.columns)} FROM {table_sql(self.staging)}"

    @property
    def _table(self) -> TableRef:
        return self.target.ref.at(None)

    def _explained(self, error: ConnectorError) -> ConnectorError:
        for pattern, remedy in _UNCHANGEABLE:
            if pattern.search(str(error)):
                text = f"{self._table} was not changed: {remedy} ({error})"
                return _caused(UnsupportedError(text), error)
        if not isinstance(error, RefusedError) or not error.__cause__:
            return error
        failed = self._failed_rows(error_text(error.__cause__))
        return _caused(FailedRowsError(self._table, failed, written=0), error) if failed else error

    def _failed_rows(self, said: str) -> list[FailedRow]:
        """The first row of each column that is no value of its type; `said` is BigQuery's word."""
        tests = {c.name: test for c in self.targets.columns if (test := misfit(c))}
        if not tests:
            return []
        firsts = ", ".join(f"MIN(IF({test}, {quoted(ROW)}, NULL))" for test in tests.values())
        sql = f"SELECT {firsts} FROM {table_sql(self.staging)}"
        name = f"misfits_{self.target.id or 0}"
        [rows] = _rows(self.settings, sql, name, self.progress)
        kinds = {column.name: type_name(column) for column in self.targets.columns}
        return [
            FailedRow(int(row), f"no {kinds[name]} that BigQuery takes: {said}", name)
            for name, row in zip(tests, rows, strict=True)
            if row is not None
        ]


def _caused(error: ConnectorError, cause: Exception) -> ConnectorError:
    error.__cause__ = cause
    return error
