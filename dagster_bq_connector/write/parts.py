"""What one load job takes: files in parts, each below the limits of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from google.cloud import bigquery

from dagster_bq_connector.table.ref import TableRef
from dagster_bq_connector.write.bucket import File
from dagster_bq_connector.write.jobs import JobSettings, Source, start_load
from dagster_bq_connector.write.load_errors import load_error
from dagster_bq_connector.write.proof import Work

# BigQuery takes 10,000 addresses and 15 TB a load job. Below the latter some room is left, since
# it may count other bytes than the files have.
MAX_URIS = 10_000
MAX_BYTES = 11 * 1024**4


def in_parts(files: Sequence[File]) -> list[list[File]]:
    """Divide files, in their order, so that a load job takes each part. One part at least."""
    parts: list[list[File]] = [[]]
    size = 0
    for file in files:
        if parts[-1] and (len(parts[-1]) >= MAX_URIS or size + file.bytes > MAX_BYTES):
            parts.append([])
            size = 0
        parts[-1].append(file)
        size += file.bytes
    return parts


def rows_in(files: Sequence[File]) -> int | None:
    """How many rows files hold, when that is known of all."""
    rows = [file.rows for file in files if file.rows is not None]
    return sum(rows) if len(rows) == len(files) else None


def temporary_load(
    settings: JobSettings,
    table: TableRef,
    columns: Sequence[bigquery.SchemaField],
    files: Sequence[File],
    source: Source,
    name: str,
) -> Work:
    """The load of files into a table that belongs to this attempt.

    Args:
        settings: Of the write.
        table: The table, or a partition of it.
        columns: Its columns.
        files: What one job takes.
        source: What they are.
        name: What tells the job from the others of the attempt.
    """
    append = bigquery.WriteDisposition.WRITE_APPEND

    def insert(job_id: str, labels: Mapping[str, str]) -> bigquery.LoadJob:
        config = settings.load_config(columns, append, labels, source)
        uris = [file.uri for file in files]
        return start_load(settings, uris, table.to_api(), config, job_id)

    what = f"Load into {table}"
    return Work(name, "", what, insert, rows_in(files), load_error, "load staging table")
