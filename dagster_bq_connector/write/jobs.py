"""Jobs under an id of our own: asked for once, adopted when they are there already."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from google.cloud import bigquery

from dagster_bq_connector.errors import ConnectorError, Fault, RefusedError, classify, explain
from dagster_bq_connector.progress import Progress
from dagster_bq_connector.retry import Backoff, rest_options
from dagster_bq_connector.table.admin import REST_ERRORS


def start_load(
    client: bigquery.Client,
    uris: list[str],
    destination: bigquery.TableReference,
    config: bigquery.LoadJobConfig,
    job_id: str,
    deadline: float,
) -> bigquery.LoadJob:
    """Insert a load job. One with this id that is there already is taken for ours.

    An insertion whose answer was lost is repeated by the client and then meets its own job.

    Raises:
        ConnectorError: The job could not be inserted.
    """
    options: Any = rest_options(deadline)
    try:
        return client.load_table_from_uri(
            uris, destination, job_id=job_id, job_config=config, **options
        )
    except REST_ERRORS as error:
        if classify(error) is Fault.TAKEN:
            found: Any = client.get_job(job_id, location=client.location, **options)
            return found
        raise explain(error, f"Load job {job_id} into {destination}") from error


CANCEL_SECONDS = 15.0


@dataclass(frozen=True)
class Running:
    """A load job under way.

    Attributes:
        id: Its id.
        job: The job.
        what: What it does, for errors.
        rows: How many rows it must load.
    """

    id: str
    job: bigquery.LoadJob
    what: str
    rows: int


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
    failures: list[ConnectorError] = []
    try:
        for done, running in enumerate(jobs):
            state = f"{done} of {len(jobs)} load jobs done"
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
            f"{len(failures)} of {len(jobs)} load jobs failed; the others are done. Run the "
            f"partitions of these again:\n{texts}"
        ) from failures[0]


def _wait(job: bigquery.LoadJob, options: Any, tell: Callable[[], None]) -> None:
    """Google's own wait asks once a second at first; a small load is done sooner than that."""
    for pause in Backoff(initial=0.05, cap=10.0, deadline=math.inf).pauses():
        tell()
        if job.done(**options):
            break
        time.sleep(pause)
    job.result(**options)


def _check_rows(running: Running) -> None:
    loaded = running.job.output_rows
    if loaded != running.rows:
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
