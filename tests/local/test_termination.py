"""A run that is terminated in Dagster, or gets SIGTERM, leaves nothing visible and nothing running.

The runs are processes that Dagster launches; in some of them the step has a process of its own.
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
from dagster._core.definitions.reconstruct import ReconstructableJob, ReconstructableRepository
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
    ("once", "append", "rows", "multiprocess", "terminate"),
    ("once", "append", "commit streams", "in_process", "terminate"),
    ("load", "append", "insert job", "multiprocess", "SIGTERM"),
]
if os.environ.get("SOAK"):  # each of them takes a quarter of a minute
    CASES += [
        ("once", "replace", "insert job", "in_process", "terminate"),
        ("once", "append", "rows", "in_process", "SIGTERM"),
        ("load", "replace", "insert job", "in_process", "terminate"),
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
    case: tuple[str, str, str, str, str],
    dataset: str,
    prefix: str,
    page: Page,
    bigquery: BigQueryResource,
    load_writer: FileLoadsWriter,
    reader: BigQueryReader,
    tmp_path: Path,
) -> None:
    writer, operation, step, executor, how = case
    table = f"{dataset}.t"
    load_writer.append(pa.table({"part": [1, 2], "n": [-1, -2]}), table)

    def numbers() -> list[int]:
        return sorted(reader.read(table).to_arrow()["n"].to_pylist())

    order = {
        "writer": writer,
        "operation": operation,
        "table": table,
        "step": step,
        "flags": str(tmp_path),
        "own_process": executor == "multiprocess",
    }
    ops = {"held": {"config": order}}
    run = page.launch("held_job", {"ops": ops, "execution": {"config": {executor: {}}}})
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
    again = dg.execute_job(
        held_job(),
        page.instance,
        run_config={"ops": ops, "execution": {"config": {"in_process": {}}}},
        reexecution_options=dg.ReexecutionOptions.from_failure(run.run_id, page.instance),
    )
    assert again.success
    assert numbers() == [-2, *([-1] if operation == "append" else []), *range(2 * ROWS)]


def held_job() -> ReconstructableJob:
    repository = ReconstructableRepository.for_file(held_assets.__file__, "defs")
    return repository.get_reconstructable_job("held_job")


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
