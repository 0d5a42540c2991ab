"""Append and replace by load jobs: rows become Parquet files in Cloud Storage, then one job each.

A load job is atomic: all its rows appear, and what they replace goes, at once. Where no load job
can do that (a slice of rows, or columns that Parquet cannot carry) the files are loaded into a
staging table, and one transaction does it from there: see transaction.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import pyarrow as pa

from dagster_bq_connector.errors import FailedRow, FailedRowsError, PartitionError
from dagster_bq_connector.progress import Progress
from dagster_bq_connector.schema.conform import Conformer
from dagster_bq_connector.schema.data import Batches
from dagster_bq_connector.write.bucket import File
from dagster_bq_connector.write.jobs import JobSettings, Source
from dagster_bq_connector.write.key import purpose_of
from dagster_bq_connector.write.loading import Loading
from dagster_bq_connector.write.plain import plain_batch, plain_schema
from dagster_bq_connector.write.proof import Outcome, Provers
from dagster_bq_connector.write.result import NOTHING_WRITTEN, WriteResult
from dagster_bq_connector.write.staging import Staged, Stager, Staging
from dagster_bq_connector.write.targets import Targets
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
        ConfigurationError: The staging bucket is missing, or elsewhere than the dataset.
        UnsupportedError: The rows are more than one write takes. No job was started.
        WriteKeyError: The key was used for something else. Nothing was changed.
        RefusedError: BigQuery failed a job. The other targets' jobs are as they ended.
    """
    purpose = purpose_of(targets, settings.operation, data.schema.names)
    provers = Provers(settings, purpose, progress)
    outcome = Outcome("file_loads", targets, settings.operation)
    if done := provers.found(targets):
        return outcome.result(done)
    staging.check(targets.location)
    try:
        staged = _stage(staging, targets, data, progress)
        outcome.bytes = sum(staged[target.id].bytes for target in targets.targets)
        if targets.staged:
            write_staged(provers, targets, partial(load_staging, staged), outcome)
        else:
            files = {target.id: staged[target.id].files for target in targets.targets}
            Loading(provers, targets).run(files, outcome)
    finally:
        staging.clear()
    return outcome.result(provers.proofs)


def load_files(
    settings: JobSettings,
    targets: Targets,
    find: Callable[[], Sequence[File]],
    source: Source,
    if_empty: bool,
    progress: Progress,
) -> WriteResult:
    """Load files that exist into one target.

    Args:
        settings: Of the jobs; see `write/proof.py` for what makes the write land once.
        targets: Where the rows go: one target.
        find: Looks up the files; not called when another attempt has done the write.
        source: What they are.
        if_empty: Whether a target that has rows is refused.
        progress: Is told of the jobs.

    Returns:
        What was loaded.

    Raises:
        UnsupportedError: They are more than one write takes. No job was started.
        ConfigurationError: They are elsewhere than the dataset. Nothing was changed.
        SourceFileError: One is missing, or has another format. Nothing was changed.
        WriteKeyError: The key was used for something else. Nothing was changed.
        RefusedError: BigQuery failed the job. Nothing was changed.
    """
    purpose = purpose_of(targets, settings.operation, [f"{source.format} files"])
    provers = Provers(settings, purpose, progress)
    outcome = Outcome("file_loads", targets, settings.operation)
    [target] = targets.targets
    if done := provers.found(targets):
        return outcome.result(done)
    files = find()
    outcome.bytes = sum(file.bytes for file in files)
    Loading(provers, targets, source, if_empty).run({target.id: files}, outcome)
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
