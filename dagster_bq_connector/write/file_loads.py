"""Append and replace by load jobs: rows become Parquet files in Cloud Storage, then one job each.

A load job is atomic: all its rows appear, and what they replace goes, at once. Where no load job
can do that (a slice of rows, or columns that Parquet cannot carry) the files are loaded into a
staging table, and one transaction does it from there: see transaction.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
from google.cloud import bigquery

from dagster_bq_connector.errors import (
    ConnectorError,
    FailedRow,
    FailedRowsError,
    PartitionError,
    RefusedError,
)
from dagster_bq_connector.progress import Progress
from dagster_bq_connector.schema.conform import Conformer
from dagster_bq_connector.schema.data import Batches
from dagster_bq_connector.write.jobs import (
    JobSettings,
    Running,
    cancel_all,
    finish_all,
    start_load,
)
from dagster_bq_connector.write.plain import plain_batch, plain_schema
from dagster_bq_connector.write.result import NOTHING_WRITTEN, Operation, WriteResult
from dagster_bq_connector.write.staging import Staged, Stager, Staging
from dagster_bq_connector.write.targets import Target, Targets
from dagster_bq_connector.write.transaction import write_staged


def load(
    client: bigquery.Client,
    staging: Staging,
    targets: Targets,
    data: Batches,
    *,
    operation: Operation,
    labels: Mapping[str, str],
    progress: Progress,
    deadline: float,
) -> WriteResult:
    """Stage all rows, then run one load job a target, or one transaction.

    Args:
        client: Runs the jobs.
        staging: Where the files go; they are deleted afterwards.
        targets: Where the rows go.
        data: The rows.
        operation: Whether the rows join what is there or take its place.
        labels: Labels of the jobs.
        progress: Counts staged rows, then tells of the jobs.
        deadline: Seconds that a call may go on without success. Jobs may run longer.

    Returns:
        What was loaded.

    Raises:
        SchemaError: The columns do not fit. No row was written.
        FailedRowsError: Rows do not fit. No row was written.
        PartitionError: A row belongs to none of the targets. No row was written.
        RefusedError: BigQuery failed a job. The other targets' jobs are as they ended.
    """
    settings = JobSettings(client, staging.attempt, operation, labels, deadline)
    try:
        staged = _stage(staging, targets, data, progress)
        if targets.staged:
            outcome = write_staged(settings, targets, staged, progress)
            jobs, counts = outcome.jobs, outcome.counts or dict(targets.counts)
        else:
            jobs = [job.id for job in _run_jobs(settings, targets, staged, progress)]
            counts = dict(targets.counts)
    finally:
        staging.clear()
    files = [staged[target.id] for target in targets.targets]
    by_target = {t.key: f.rows for t, f in zip(targets.targets, files, strict=True) if t.key}
    return WriteResult(
        table=targets.table,
        method="file_loads",
        operation=operation,
        rows=sum(file.rows for file in files),
        bytes=sum(file.bytes for file in files),
        columns=targets.columns,
        partitions=counts or by_target,
        jobs=jobs,
    )


def _stage(
    staging: Staging, targets: Targets, data: Batches, progress: Progress
) -> Mapping[str, Staged]:
    """Write every row to a file of its target, if all rows are good."""
    conform = Conformer(data.schema, targets.columns, complete=True)
    stager = Stager(staging, progress)
    failed, position = list[FailedRow](), 0
    for batch in data.batches:
        conformed = conform(batch)
        failed += [row.moved(position) for row in conformed.failed]
        if not failed:
            rows = conformed.batch
            if targets.staged:
                rows = plain_batch(rows, targets.columns, position)
            for target, part in _split(targets, rows, position):
                stager.add(target, part)
        position += batch.num_rows
    if failed:
        raise FailedRowsError(targets.table, failed, written=0)
    schema = plain_schema(conform.schema, targets.columns) if targets.staged else conform.schema
    stager.finish([target.id for target in targets.targets], schema)
    return stager.staged


def _split(
    targets: Targets, rows: pa.RecordBatch, position: int
) -> Iterator[tuple[str, pa.RecordBatch]]:
    try:
        yield from targets.split(rows, position)
    except PartitionError as error:
        raise PartitionError(f"{error} {NOTHING_WRITTEN}") from None


def _run_jobs(
    settings: JobSettings, targets: Targets, staged: Mapping[str, Staged], progress: Progress
) -> list[Running]:
    """Start a job for each target, and wait for all that were started."""
    jobs: list[Running] = []
    refused: ConnectorError | None = None
    try:
        for target in targets.targets:
            job = _start(settings, targets, target, staged[target.id])
            jobs.append(job)  # one by one: those before a failure must be kept
    except ConnectorError as error:
        refused = error
    except BaseException:
        cancel_all(jobs)
        raise
    finish_all(jobs, settings.deadline, progress)
    if refused is not None:
        raise _unfinished(targets, jobs, refused) from refused
    return jobs


def _unfinished(targets: Targets, jobs: Sequence[Running], error: ConnectorError) -> ConnectorError:
    """Some jobs were never started. Those that were are done."""
    if not jobs:
        return error
    done = ", ".join(target.key or target.id for target in targets.targets[: len(jobs)])
    return RefusedError(f"Only {done} of {targets.table} were written; then: {error}")


def _start(settings: JobSettings, targets: Targets, target: Target, staged: Staged) -> Running:
    replace = settings.operation == "replace"
    disposition = bigquery.WriteDisposition.WRITE_APPEND
    if replace and target.ref.partition:
        disposition = bigquery.WriteDisposition.WRITE_TRUNCATE
    elif replace:
        disposition = bigquery.WriteDisposition.WRITE_TRUNCATE_DATA  # schema and keys stay
    config = settings.load_config(targets.columns, disposition)
    job_id = settings.job_id(target.id or target.ref.table)
    destination = target.ref.to_api()
    job = start_load(settings.client, staged.uris, destination, config, job_id, settings.deadline)
    return Running(job_id, job, f"Load into {target.ref}", staged.rows)
