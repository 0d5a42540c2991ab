"""A run that is terminated in Dagster, or gets SIGTERM, leaves nothing visible and nothing running.

The runs are processes that Dagster launches, with a process for each step.
"""

import json
import os
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest
from google.cloud import bigquery as google

from dagster_bq_connector import BigQueryReader, BigQueryResource, FileLoadsWriter
from support import held_assets
from support.held_assets import CONNECTION, ROWS
from support.page import Page
from support.service import BUCKET

pytestmark = pytest.mark.local_only("it keeps all workers of the server busy")
WORKERS = 8  # of the local BigQuery, for jobs
ENDLESS = """
WITH RECURSIVE numbers AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM numbers WHERE n < 1000000000)
SELECT MAX(n) FROM numbers
"""
CASES = [
    ("once", "append", "rows", "terminate"),
    ("once", "append", "rows", "SIGTERM"),
    ("once", "append", "commit streams", "terminate"),
    ("once", "replace", "insert job", "terminate"),
    ("load", "append", "insert job", "SIGTERM"),
    ("load", "replace", "insert job", "terminate"),
]


@pytest.fixture(scope="module")
def prefix() -> str:
    return f"held_{uuid.uuid4().hex[:12]}"


@pytest.fixture(scope="module")
def page(fields: dict[str, Any], bigquery: object, prefix: str) -> Iterator[Page]:
    connection = {"fields": fields, "ledger": prefix, "staging": f"gs://{BUCKET}/{prefix}"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CONNECTION, json.dumps(connection))
        with Page(Path(held_assets.__file__)) as page:
            yield page


@contextmanager
def busy(client: google.Client) -> Iterator[None]:
    """All workers of the local BigQuery are taken: jobs wait until this is over."""
    config = google.QueryJobConfig(create_session=True)
    session = client.query("SELECT 1", job_config=config)
    session.result()
    assert session.session_info is not None
    same = google.ConnectionProperty("session_id", session.session_info.session_id)
    config = google.QueryJobConfig(connection_properties=[same])
    queries = [ENDLESS] + ["SELECT 1"] * (WORKERS - 1)  # which wait for the first one's session
    jobs = [client.query(sql, job_config=config) for sql in queries]
    try:
        yield
    finally:
        for job in jobs:
            job.cancel()


def wait_for(path: Path) -> None:
    end = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.02)


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_terminated(
    case: tuple[str, str, str, str],
    dataset: str,
    prefix: str,
    page: Page,
    bigquery: BigQueryResource,
    load_writer: FileLoadsWriter,
    reader: BigQueryReader,
    tmp_path: Path,
) -> None:
    writer, operation, step, how = case
    table = f"{dataset}.t"
    load_writer.append(pa.table({"part": [1, 2], "n": [-1, -2]}), table)

    def numbers() -> list[int]:
        return sorted(reader.read(table).to_arrow()["n"].to_pylist())

    order = {"writer": writer, "operation": operation, "table": table, "step": step}
    config = {"ops": {"held": {"config": {**order, "flags": str(tmp_path)}}}}
    run = page.launch("held_job", config)
    wait_for(tmp_path / "here")
    with bigquery.get_client() as client:
        if step == "insert job":
            with busy(client):
                (tmp_path / "go").touch()
                wait_for(tmp_path / "inserted")
                ended = end(page, run, how, tmp_path)
        else:
            ended = end(page, run, how, tmp_path)
        jobs = [
            job for job in client.list_jobs(all_users=True) if run.run_id in job.labels.values()
        ]
        for job in jobs:
            with_end(job)
        tables = [each.table_id for each in client.list_tables(dataset)]
    assert ended.status is (
        dg.DagsterRunStatus.CANCELED if how == "terminate" else dg.DagsterRunStatus.FAILURE
    )
    assert numbers() == [-2, -1]
    assert tables == ["t"]
    assert files(bigquery, prefix) == []
    stopped = [job for job in jobs if job.error_result]
    assert [job.error_result["reason"] for job in stopped] == ["stopped"] * (step == "insert job")

    (tmp_path / "free").touch()
    again = page.ended(page.again(page.run(run.run_id), "FROM_FAILURE"))
    assert again.status is dg.DagsterRunStatus.SUCCESS
    assert numbers() == [-2, *([-1] if operation == "append" else []), *range(2 * ROWS)]


def end(page: Page, run: dg.DagsterRun, how: str, flags: Path) -> dg.DagsterRun:
    """Terminate a run, and wait for its end."""
    if how == "terminate":
        page.terminate(run)
    else:
        os.kill(int((flags / "pid").read_text()), signal.SIGTERM)
    return page.ended(run)


def with_end(job: Any) -> None:
    """Wait for the end of a job, whatever it was."""
    deadline = time.monotonic() + 30
    while not job.done():
        assert time.monotonic() < deadline, job.job_id
        time.sleep(0.1)


def files(bigquery: BigQueryResource, prefix: str) -> list[str]:
    """The staged files that are left."""
    connected = bigquery.connect()
    client = connected.clients.cloud_storage(connected.project)
    return [blob.name for blob in client.list_blobs(BUCKET, prefix=prefix)]
