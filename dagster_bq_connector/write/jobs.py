"""Jobs under an id of our own: asked for once, adopted when they are there already."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from google.cloud import bigquery

from dagster_bq_connector.errors import ConnectorError, Fault, RefusedError, classify, explain
from dagster_bq_connector.progress import Progress
from dagster_bq_connector.retry import Backoff, rest_options
from dagster_bq_connector.schema.names import has_flexible_name
from dagster_bq_connector.table.admin import REST_ERRORS
from dagster_bq_connector.write.result import Operation

Job: TypeAlias = bigquery.LoadJob | bigquery.QueryJob

CANCEL_SECONDS = 15.0
MAX_NAME = 512  # characters of a job's own name; BigQuery takes 1,024 for the whole id


@dataclass(frozen=True)
class JobSettings:
    """What all jobs of one write have in common.

    Attributes:
        client: Runs them.
        attempt: The id of the attempt, which is in the id of each.
        operation: Whether rows join what is there or take its place.
        labels: Their labels.
        deadline: Seconds that a call may go on without success. Jobs may run longer.
    """

    client: bigquery.Client
    attempt: str
    operation: Operation
    labels: Mapping[str, str]
    deadline: float

    def job_id(self, name: str) -> str:
        """The id of a job of this attempt."""
        return re.sub(r"[^A-Za-z0-9_-]", "_", f"dagster_bq_{self.attempt}_{name[:MAX_NAME]}")

    def load_config(
        self, columns: Sequence[bigquery.SchemaField], disposition: str
    ) -> bigquery.LoadJobConfig:
        """Of a load from Parquet into a table that exists."""
        parquet = bigquery.ParquetOptions()
        parquet.enable_list_inference = True
        config = bigquery.LoadJobConfig(
            source_format=bigquery.SourceFormat.PARQUET,
            write_disposition=disposition,
            create_disposition=bigquery.CreateDisposition.CREATE_NEVER,
            schema=list(columns),
            labels=dict(self.labels),
        )
        config.parquet_options = parquet
        if any(map(has_flexible_name, columns)):
            config.column_name_character_map = "V2"  # else Parquet takes plain names only
        return config

    def query_config(self) -> bigquery.QueryJobConfig:
        """Of a query that is run anew each time."""
        return bigquery.QueryJobConfig(labels=dict(self.labels), use_query_cache=False)


@dataclass(frozen=True)
class Running:
    """A job under way.

    Attributes:
        id: Its id.
        job: The job.
        what: What it does, for errors.
        rows: How many rows a load job must load; None for a query job.
    """

    id: str
    job: Job
    what: str
    rows: int | None = None


def start_load(
    client: bigquery.Client,
    uris: list[str],
    destination: bigquery.TableReference,
    config: bigquery.LoadJobConfig,
    job_id: str,
    deadline: float,
) -> bigquery.LoadJob:
    """Insert a load job. One with this id that is there already is taken for ours.

    Raises:
        ConnectorError: The job could not be inserted.
    """
    options: Any = rest_options(deadline)

    def insert() -> Any:
        return client.load_table_from_uri(
            uris, destination, job_id=job_id, job_config=config, **options
        )

    return _inserted(client, insert, job_id, f"Load job {job_id} into {destination}", options)


def start_query(
    client: bigquery.Client,
    sql: str,
    config: bigquery.QueryJobConfig,
    job_id: str,
    what: str,
    deadline: float,
) -> bigquery.QueryJob:
    """Insert a query job. One with this id that is there already is taken for ours.

    Args:
        client: Runs it.
        sql: One statement, or a script.
        config: Its configuration.
        job_id: Its id.
        what: What it does, for errors.
        deadline: Seconds that a call may go on without success.

    Raises:
        ConnectorError: The job could not be inserted, or BigQuery cannot read the SQL.
    """
    options: Any = rest_options(deadline)

    def insert() -> Any:
        return client.query(sql, job_id=job_id, job_config=config, job_retry=None, **options)

    return _inserted(client, insert, job_id, f"{what} (job {job_id})", options)


def _inserted(
    client: bigquery.Client, insert: Callable[[], Any], job_id: str, what: str, options: Any
) -> Any:
    """An insertion whose answer was lost is repeated by the client and then meets its own job.

    One that is interrupted (Dagster's Terminate, Ctrl-C) may have arrived: the job is cancelled.
    """
    try:
        return insert()
    except REST_ERRORS as error:
        if classify(error) is Fault.TAKEN:
            try:
                return client.get_job(job_id, location=client.location, **options)
            except REST_ERRORS as lost:
                raise explain(lost, what) from lost
        raise explain(error, what, client.location) from error
    except BaseException:
        once: Any = {"retry": None, "timeout": 5.0}
        with contextlib.suppress(*REST_ERRORS):
            client.cancel_job(job_id, location=client.location, **once)
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
                _wait(running.job, options, lambda state=state: progress.wait(state))
                _check_rows(running)
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


def _wait(job: Job, options: Any, tell: Callable[[], None]) -> None:
    """Google's own wait asks once a second at first; a small load is done sooner than that."""
    for pause in Backoff(initial=0.05, cap=10.0, deadline=math.inf).pauses():
        tell()
        if job.done(**options):
            break
        time.sleep(pause)
    failure: Any = job.exception()  # not result(), which fetches the rows of a query
    if failure is not None:
        raise failure


def _check_rows(running: Running) -> None:
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
