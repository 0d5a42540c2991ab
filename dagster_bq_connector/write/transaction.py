"""Rows go from a staging table into their destination by one transaction.

The steps of an attempt, and what is left when the process dies between them:

    1. the staging table is made     it is dropped by BigQuery a day later
    2. a load job fills it           the same; the destination is as it was
    3. a query checks its rows       the same
    4. the transaction: DELETE of what is replaced, INSERT of what is staged, COMMIT
                                     BigQuery ends it by itself, with all of it or nothing
    5. the staging table is dropped  it is dropped by BigQuery a day later

An attempt shares nothing with another: its id is in the names of its table and of its jobs. So the
next one may start at once, and what an earlier one left behind changes nothing.
"""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
from dagster_bq_connector.retry import PASSING, Backoff, rest_options
from dagster_bq_connector.schema.types import type_name
from dagster_bq_connector.table.admin import REST_ERRORS
from dagster_bq_connector.table.literals import literal, quoted, table_sql
from dagster_bq_connector.table.membership import stray_text
from dagster_bq_connector.table.ref import TableRef
from dagster_bq_connector.table.row_slice import BoundSlice
from dagster_bq_connector.write.jobs import (
    JobSettings,
    Running,
    cancel_all,
    finish_all,
    start_load,
    start_query,
)
from dagster_bq_connector.write.plain import ROW, misfit, plain_columns, selected
from dagster_bq_connector.write.result import NOTHING_WRITTEN
from dagster_bq_connector.write.staging import Staged
from dagster_bq_connector.write.targets import Target, Targets

# How long a staging table is kept whose process died.
EXPIRATION = datetime.timedelta(days=1)

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
class Outcome:
    """What was done.

    Attributes:
        jobs: The ids of the jobs, in order.
        counts: Rows by partition key, as far as they were counted by BigQuery.
        done: The targets that were written.
    """

    jobs: list[str] = field(default_factory=list[str])
    counts: dict[str, int] = field(default_factory=dict[str, int])
    done: list[Target] = field(default_factory=list[Target])


def write_staged(
    settings: JobSettings, targets: Targets, staged: Mapping[str, Staged], progress: Progress
) -> Outcome:
    """Load the files into staging tables, then change each target by a transaction.

    Raises:
        PartitionError: A row belongs to no part of the slice. No row was written.
        FailedRowsError: Values that are none of their column. No row was written.
        UnsupportedError: BigQuery takes no DELETE on the table. No row was written.
        RefusedError: BigQuery failed a job. Of several targets, the error says which were written.
    """
    outcome, tables = Outcome(), _StagingTables(settings, targets)
    try:
        outcome.jobs += _load(settings, targets, tables, staged, progress)
        if targets.slice is not None and targets.slice.expressions:
            table = tables.of(targets.targets[0])
            outcome.counts = _count(settings, targets.slice, table, progress)
        for target in targets.targets:
            job = _Change(settings, targets, target, tables.of(target), staged[target.id].rows)
            outcome.jobs.append(job.commit(progress))
            outcome.done.append(target)
    except ConnectorError as error:
        if outcome.done:
            done = ", ".join(target.key for target in outcome.done)
            text = f"Only {done} of {targets.table} were written; then: {error}"
            raise RefusedError(text) from error
        raise
    finally:
        tables.drop()
    return outcome


class _StagingTables:
    """A table for each target, in the dataset of the target.

    Their names begin with an underscore, so that no wildcard over the users' tables finds them.
    """

    def __init__(self, settings: JobSettings, targets: Targets) -> None:
        self._settings, self._columns = settings, plain_columns(targets.columns)
        self._refs: dict[str, TableRef] = {}

    def of(self, target: Target) -> TableRef:
        """The staging table of a target; made when it is asked for first."""
        if target.id not in self._refs:
            name = f"_dagster_bq_{self._settings.attempt}_{len(self._refs)}"
            ref = TableRef(target.ref.dataset, name, target.ref.project)
            self._refs[target.id] = ref  # before it is there: a lost answer may have made it
            self._create(ref, target)
        return self._refs[target.id]

    def drop(self) -> None:
        """Drop all of them. When that fails, BigQuery does it a day after they were made."""
        options: Any = rest_options(min(self._settings.deadline, 30.0))
        for ref in self._refs.values():
            try:
                self._settings.client.delete_table(ref.to_api(), not_found_ok=True, **options)
            except REST_ERRORS:
                return

    def _create(self, ref: TableRef, target: Target) -> None:
        options: Any = rest_options(self._settings.deadline)
        table = bigquery.Table(ref.to_api(), schema=self._columns)
        table.expires = datetime.datetime.now(datetime.UTC) + EXPIRATION
        table.description = "Rows on their way into another table. It may be dropped."
        table.labels = dict(self._settings.labels)
        if target.encryption is not None:
            table.encryption_configuration = target.encryption
        try:
            # Under this name there is only what a try made whose answer was lost.
            self._settings.client.create_table(table, exists_ok=True, **options)
        except REST_ERRORS as error:
            raise explain(error, f"Staging table {ref}") from error


def _load(
    settings: JobSettings,
    targets: Targets,
    tables: _StagingTables,
    staged: Mapping[str, Staged],
    progress: Progress,
) -> list[str]:
    """Fill the staging tables, each with as many rows as were staged for it."""
    config = settings.load_config(
        plain_columns(targets.columns), bigquery.WriteDisposition.WRITE_EMPTY
    )
    jobs: list[Running] = []
    try:
        for number, target in enumerate(targets.targets):
            ref, files = tables.of(target), staged[target.id]
            job_id = settings.job_id(f"stage_{number}")
            job = start_load(
                settings.client, files.uris, ref.to_api(), config, job_id, settings.deadline
            )
            jobs.append(Running(job_id, job, f"Load into {ref}", files.rows))
    except BaseException:
        cancel_all(jobs)
        raise
    finish_all(jobs, settings.deadline, progress)
    return [job.id for job in jobs]


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


def _rows(settings: JobSettings, sql: str, name: str, progress: Progress) -> list[tuple[Any, ...]]:
    what, job_id = "Check of the staged rows", settings.job_id(name)
    job = start_query(
        settings.client, sql, settings.query_config(), job_id, what, settings.deadline
    )
    finish_all([Running(job_id, job, what)], settings.deadline, progress)
    try:
        options: Any = rest_options(settings.deadline)
        return [tuple(row.values()) for row in job.result(**options)]
    except REST_ERRORS as error:
        raise explain(error, f"{what} (job {job_id})") from error


@dataclass(frozen=True)
class _Change:
    """What one transaction does to one table."""

    settings: JobSettings
    targets: Targets
    target: Target
    staging: TableRef
    rows: int

    def commit(self, progress: Progress) -> str:
        """Run the transaction, again when another one was first. Gives the id of the job.

        A job that failed has changed nothing: its transaction was rolled back.
        """
        pauses = Backoff(initial=1.0, deadline=self.settings.deadline).pauses()
        number = 0
        while True:
            number += 1
            job_id = self.settings.job_id(f"commit_{self.target.id or 0}_{number}")
            job = start_query(
                self.settings.client,
                self.script(),
                self.settings.query_config(),
                job_id,
                f"Transaction on {self._table}",
                self.settings.deadline,
            )
            running = Running(job_id, job, f"Transaction on {self._table}")
            try:
                finish_all([running], self.settings.deadline, progress)
                return job_id
            except ConnectorError as error:
                fault = classify(error.__cause__) if error.__cause__ else Fault.REFUSED
                failed = job.error_result is not None  # otherwise how it ended is not known
                again = failed and fault in (*PASSING, Fault.STALE)
                pause = next(pauses, None) if again else None
                if pause is None:
                    raise self._explained(error, progress) from error
            progress.wait("another writer changed the table first; trying again")
            time.sleep(pause)

    def script(self) -> str:
        """The transaction. BigQuery rolls it back when the script ends before the COMMIT."""
        columns = ", ".join(quoted(column.name) for column in self.targets.columns)
        wrong = literal(f"{self.staging} does not hold the {self.rows} rows that were staged")
        delete = f"DELETE FROM {table_sql(self._table)} WHERE {self.target.rows};"
        return "\n".join(
            [
                "BEGIN TRANSACTION;",
                *([delete] if self.settings.operation == "replace" else []),
                f"INSERT INTO {table_sql(self._table)} ({columns})",
                f"SELECT {selected(self.targets.columns)} FROM {table_sql(self.staging)};",
                f"IF @@row_count != {self.rows} THEN RAISE USING MESSAGE = {wrong}; END IF;",
                "COMMIT TRANSACTION;",
            ]
        )

    @property
    def _table(self) -> TableRef:
        return self.target.ref.at(None)

    def _explained(self, error: ConnectorError, progress: Progress) -> ConnectorError:
        for pattern, remedy in _UNCHANGEABLE:
            if pattern.search(str(error)):
                return UnsupportedError(f"{self._table} was not changed: {remedy} ({error})")
        if not isinstance(error, RefusedError) or not error.__cause__:
            return error
        failed = self._failed_rows(error_text(error.__cause__), progress)
        return FailedRowsError(self._table, failed, written=0) if failed else error

    def _failed_rows(self, said: str, progress: Progress) -> list[FailedRow]:
        """The first row of each column that is no value of its type; `said` is BigQuery's word."""
        tests = {c.name: test for c in self.targets.columns if (test := misfit(c))}
        if not tests:
            return []
        firsts = ", ".join(f"MIN(IF({test}, {quoted(ROW)}, NULL))" for test in tests.values())
        sql = f"SELECT {firsts} FROM {table_sql(self.staging)}"
        name = f"misfits_{self.target.id or 0}"
        [rows] = _rows(self.settings, sql, name, progress)
        kinds = {column.name: type_name(column) for column in self.targets.columns}
        return [
            FailedRow(int(row), f"no {kinds[name]} that BigQuery takes: {said}", name)
            for name, row in zip(tests, rows, strict=True)
            if row is not None
        ]
