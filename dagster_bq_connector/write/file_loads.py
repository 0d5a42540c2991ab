"""Append and replace by load jobs: rows become Parquet files in Cloud Storage, then one job each.

A load job is atomic: all its rows appear, and what they replace goes, at once. Where no load job
can do that (a slice of rows, or columns that Parquet cannot carry) the files are loaded into a
staging table, and one transaction does it from there: see transaction.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import pyarrow as pa
from google.cloud import bigquery

from dagster_bq_connector.errors import FailedRow, FailedRowsError, PartitionError
from dagster_bq_connector.progress import Progress
from dagster_bq_connector.schema.conform import Conformer
from dagster_bq_connector.schema.data import Batches
from dagster_bq_connector.write.jobs import JobSettings, start_load
from dagster_bq_connector.write.key import purpose_of
from dagster_bq_connector.write.plain import plain_batch, plain_schema
from dagster_bq_connector.write.proof import Outcome, Provers, Work
from dagster_bq_connector.write.result import NOTHING_WRITTEN, WriteResult
from dagster_bq_connector.write.staging import Staged, Stager, Staging
from dagster_bq_connector.write.targets import Target, Targets
from dagster_bq_connector.write.transaction import load_staging, write_staged


def load(
    settings: JobSettings,
    staging: Staging,
    targets: Targets,
    data: Batches,
    progress: Progress,
) -> WriteResult:
    """Stage all rows, then run one load job a target, or one transaction.

    Args:
        settings: Of the jobs; see `write/proof.py` for what makes the write land once.
        staging: Where the files go; they are deleted afterwards.
        targets: Where the rows go.
        data: The rows; not read when another attempt has done the write.
        progress: Counts staged rows, then tells of the jobs.

    Returns:
        What was loaded.

    Raises:
        SchemaError: The columns do not fit. No row was written.
        FailedRowsError: Rows do not fit. No row was written.
        PartitionError: A row belongs to none of the targets. No row was written.
        WriteKeyError: The key was used for something else. Nothing was changed.
        RefusedError: BigQuery failed a job. The other targets' jobs are as they ended.
    """
    purpose = purpose_of(targets, settings.operation, data.schema.names)
    provers = Provers(settings, purpose, progress)
    outcome = Outcome("file_loads", targets, settings.operation)
    if done := provers.found([target.id for target in targets.targets]):
        return outcome.result(done)
    try:
        staged = _stage(staging, targets, data, progress)
        outcome.bytes = sum(staged[target.id].bytes for target in targets.targets)
        if targets.staged:
            write_staged(provers, targets, partial(load_staging, staged), outcome)
        else:
            provers.run([_work(settings, targets, each, staged) for each in targets.targets])
    finally:
        staging.clear()
    return outcome.result(provers.proofs)


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


def _work(
    settings: JobSettings, targets: Targets, target: Target, staged: Mapping[str, Staged]
) -> Work:
    """The load of a target's files."""
    replace = settings.operation == "replace"
    disposition = bigquery.WriteDisposition.WRITE_APPEND
    if replace and target.ref.partition:
        disposition = bigquery.WriteDisposition.WRITE_TRUNCATE
    elif replace:
        disposition = bigquery.WriteDisposition.WRITE_TRUNCATE_DATA  # schema and keys stay
    files, destination = staged[target.id], target.ref.to_api()

    def insert(job_id: str, labels: Mapping[str, str]) -> bigquery.LoadJob:
        config = settings.load_config(targets.columns, disposition, labels)
        return start_load(settings, files.uris, destination, config, job_id)

    return Work(target.id, target.key, f"Load into {target.ref}", insert, files.rows)
