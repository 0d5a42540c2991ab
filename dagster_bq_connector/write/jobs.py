"""Jobs under an id of our own: asked for once, adopted when they are there already."""

from __future__ import annotations

import contextlib
import logging
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from google.cloud import bigquery

from dagster_bq_connector.errors import (
    ConfigurationError,
    ConnectorError,
    Fault,
    RefusedError,
    classify,
    explain,
)
from dagster_bq_connector.progress import Progress
from dagster_bq_connector.retry import Backoff, rest_options
from dagster_bq_connector.schema.names import has_flexible_name
from dagster_bq_connector.table.admin import REST_ERRORS
from dagster_bq_connector.write.key import WriteKey
from dagster_bq_connector.write.result import Operation

Job: TypeAlias = bigquery.LoadJob | bigquery.QueryJob | bigquery.CopyJob
FileFormat = Literal["parquet", "avro", "csv", "json_lines"]

CANCEL_SECONDS = 15.0
MAX_NAME = 512  # characters of a job's own name; BigQuery takes 1,024 for the whole id

_FORMATS: Mapping[FileFormat, str] = {
    "parquet": bigquery.SourceFormat.PARQUET,
    "avro": bigquery.SourceFormat.AVRO,
    "csv": bigquery.SourceFormat.CSV,
    "json_lines": bigquery.SourceFormat.NEWLINE_DELIMITED_JSON,
}


@dataclass(frozen=True)
class Source:
    """What the files of a load are.

    Attributes:
        format: Their format.
        skip_leading_rows: Lines of a CSV file before its first row.
    """

    format: FileFormat = "parquet"
    skip_leading_rows: int = 0

    def __post_init__(self) -> None:
        if self.format not in _FORMATS:
            raise ConfigurationError(f"format={self.format!r}: it is one of {', '.join(_FORMATS)}.")
        lines: object = self.skip_leading_rows
        if type(lines) is not int or lines < 0 or (lines and self.format != "csv"):
            raise ConfigurationError(
                f"skip_leading_rows={lines!r}: it is a number of lines of CSV files."
            )

    def apply(self, config: bigquery.LoadJobConfig) -> None:
        """Configure a load of such files, whose columns are named by the job."""
        config.source_format = _FORMATS[self.format]
        if self.format == "parquet":
            config.parquet_options = bigquery.ParquetOptions()
            config.parquet_options.enable_list_inference = True
        elif self.format == "avro":
            config.use_avro_logical_types = True  # else a TIMESTAMP would be a number
        elif self.format == "csv":
            config.skip_leading_rows = self.skip_leading_rows


PARQUET = Source()


@dataclass(frozen=True)
class JobSettings:
    """What all jobs of one write have in common.

    Attributes:
        client: Runs them.
        location: Where they run: that of the dataset.
        key: The write, and the attempt at it.
        operation: Whether rows join what is there or take its place.
        labels: Their labels.
        deadline: Seconds that a call may go on without success. Jobs may run longer.
        warn: Is told what a person should know.
    """

    client: bigquery.Client
    location: str | None
    key: WriteKey
    operation: Operation
    labels: Mapping[str, str]
    deadline: float
    warn: Callable[[str], None] = logging.getLogger("dagster_bq_connector").warning

    def job_id(self, name: str, number: int = 0) -> str:
        """The id of a job of this attempt alone, after `number` that have failed."""
        return _job_id(self.key.attempt, name, str(number) if number else "")

    def proof_id(self, name: str, number: int) -> str:
        """The id of the job that proves the write, after `number` that have failed."""
        return _job_id(self.key.id, name, str(number) if number else "")

    def load_config(
        self,
        columns: Sequence[bigquery.SchemaField],
        disposition: str,
        labels: Mapping[str, str] | None = None,
        source: Source = PARQUET,
    ) -> bigquery.LoadJobConfig:
        """Of a load from files into a table that exists."""
        config = bigquery.LoadJobConfig(
            write_disposition=disposition,
            create_disposition=bigquery.CreateDisposition.CREATE_NEVER,
            schema=list(columns),
            labels=dict(labels or self.labels),
        )
        source.apply(config)
        if any(map(has_flexible_name, columns)):
            config.column_name_character_map = "V2"  # else Parquet takes plain names only
        return config

    def query_config(self, labels: Mapping[str, str] | None = None) -> bigquery.QueryJobConfig:
        """Of a query that is run anew each time."""
        labels = dict(labels or self.labels)
        return bigquery.QueryJobConfig(labels=labels, use_query_cache=False)


def _job_id(*parts: str) -> str:
    text = "_".join(part[:MAX_NAME] for part in ("dagster_bq", *parts) if part)
    return re.sub(r"[^A-Za-z0-9_-]", "_", text)


@dataclass(frozen=True)
class Running:
    """A job under way.

    Attributes:
        id: Its id.
        job: The job.
        what: What it does, for errors.
        rows: How many rows a load job must load; None when that is not known.
    """

    id: str
    job: Job
    what: str
    rows: int | None = None


def start_load(
    settings: JobSettings,
    uris: Sequence[str],
    destination: bigquery.TableReference,
    config: bigquery.LoadJobConfig,
    job_id: str,
) -> bigquery.LoadJob:
    """Insert a load job, or look up the one that bears this id already.

    Raises:
        ConnectorError: The job could not be inserted.
    """
    options: Any = rest_options(settings.deadline)

    def insert() -> Any:
        return settings.client.load_table_from_uri(
            uris,
            destination,
            job_id=job_id,
            job_config=config,
            location=settings.location,
            **options,
        )

    return _inserted(settings, insert, job_id, f"Load job {job_id} into {destination}", config)


def start_copy(
    settings: JobSettings,
    sources: Sequence[bigquery.TableReference],
    destination: bigquery.TableReference,
    config: bigquery.CopyJobConfig,
    job_id: str,
) -> bigquery.CopyJob:
    """Insert a copy job, or look up the one that bears this id already.

    Raises:
        ConnectorError: The job could not be inserted.
    """
    options: Any = rest_options(settings.deadline)

    def insert() -> Any:
        return settings.client.copy_table(
            sources,
            destination,
            job_id=job_id,
            job_config=config,
            location=settings.location,
            **options,
        )

    return _inserted(settings, insert, job_id, f"Copy job {job_id} into {destination}", config)


def start_query(
    settings: JobSettings, sql: str, config: bigquery.QueryJobConfig, job_id: str, what: str
) -> bigquery.QueryJob:
    """Insert a query job, or look up the one that bears this id already.

    Args:
        settings: Of the write.
        sql: One statement, or a script.
        config: Its configuration.
        job_id: Its id.
        what: What it does, for errors.

    Raises:
        ConnectorError: The job could not be inserted, or BigQuery cannot read the SQL.
    """
    options: Any = rest_options(settings.deadline)

    def insert() -> Any:
        return settings.client.query(
            sql,
            job_id=job_id,
            job_config=config,
            job_retry=None,
            location=settings.location,
            **options,
        )

    return _inserted(settings, insert, job_id, f"{what} (job {job_id})", config)


def _inserted(
    settings: JobSettings, insert: Callable[[], Any], job_id: str, what: str, config: Any
) -> Any:
    """An insertion whose answer was lost is repeated by the client and then meets its own job.

    One that is interrupted (Dagster's Terminate, Ctrl-C) may have arrived: the job is cancelled.
    """
    options: Any = rest_options(settings.deadline)
    try:
        return insert()
    except REST_ERRORS as error:
        if classify(error) is Fault.TAKEN:
            try:
                return settings.client.get_job(job_id, location=settings.location, **options)
            except REST_ERRORS as lost:
                raise explain(lost, what) from lost
        raise explain(error, what, settings.client.location) from error
    except BaseException:
        once: Any = {"retry": None, "timeout": 5.0}
        with contextlib.suppress(*REST_ERRORS):
            job: Any = settings.client.get_job(job_id, location=settings.location, **once)
            if job.labels == config.labels:  # and not that of another attempt
                job.cancel(**once)
        raise


def finish_all(jobs: Sequence[Running], deadline: float, progress: Progress) -> None:
    """Wait for the end of jobs, however long they run. When interrupted, cancel them.

    Args:
        jobs: The jobs.
        progress: Is told how many are done.
        deadline: Seconds that a job's state may be unknown for.

    Raises:
        ConnectorError: A job failed, cannot be asked about, or loaded another number of rows
            than were staged. All jobs have ended by then, or cannot be asked about.
    """
    options: Any = rest_options(deadline)
    loads = all(isinstance(running.job, bigquery.LoadJob) for running in jobs)
    kind = "load jobs" if loads else "query jobs"
    failures: list[ConnectorError] = []
    try:
        for done, running in enumerate(jobs):
            state = f"{done} of {len(jobs)} {kind} done"
            try:
                wait_for(running.job, options, lambda state=state: progress.wait(state))
                check_rows(running)
            except REST_ERRORS as error:
                failure = explain(error, f"{running.what} (job {running.id})")
                failure.__cause__ = error
                failures.append(failure)
            except RefusedError as error:
                failures.append(error)
    except BaseException:  # Dagster's Terminate and Ctrl-C arrive as exceptions of the main thread
        cancel_all(jobs)
        raise
    if len(failures) == 1 == len(jobs):
        raise failures[0]
    if failures:
        texts = "\n".join(f"  {failure}" for failure in failures)
        raise RefusedError(
            f"{len(failures)} of {len(jobs)} {kind} failed; the others are done. Run the "
            f"partitions of these again:\n{texts}"
        ) from failures[0]


def wait_for(job: Job, options: Any, tell: Callable[[], None]) -> None:
    """Wait for the end of a job, however long it runs.

    Google's own wait asks once a second at first; a small load is done sooner than that.

    Args:
        job: The job.
        options: Of each call.
        tell: Is called before each.

    Raises:
        GoogleAPICallError: The job failed, or cannot be asked about.
    """
    for pause in Backoff(initial=0.05, cap=10.0, deadline=math.inf).pauses():
        tell()
        if job.done(**options):
            break
        time.sleep(pause)
    failure: Any = job.exception()  # not result(), which fetches the rows of a query
    if failure is not None:
        raise failure


def check_rows(running: Running) -> None:
    """Refuse a load job that has loaded another number of rows than were staged.

    Raises:
        RefusedError: It has.
    """
    if running.rows is None or not isinstance(running.job, bigquery.LoadJob):
        return
    if (loaded := running.job.output_rows) != running.rows:
        raise RefusedError(
            f"{running.what} (job {running.id}) loaded {loaded} rows of {running.rows} staged."
        )


def cancel_all(jobs: Sequence[Running]) -> None:
    """Ask BigQuery to end jobs, for a quarter of a minute: somebody waits for the interruption."""
    end = time.monotonic() + CANCEL_SECONDS
    for running in jobs:
        left = end - time.monotonic()
        if left <= 0:
            return
        try:
            running.job.cancel(retry=None, timeout=min(left, 5.0))
        except REST_ERRORS:
            continue
