"""What the tests share: one local BigQuery a worker, and names that no other test has."""

import os
import uuid
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from dagster_bq_connector import (
    BigQueryReader,
    BigQueryResource,
    DefaultStreamWriter,
    FileLoadsWriter,
)
from dagster_bq_connector.local import LocalBigQuery
from support.fake_storage import FakeStorage

BUCKET = "staging"


@pytest.fixture(scope="session")
def local() -> Iterator[LocalBigQuery]:
    """A local BigQuery for all the tests of a worker, with a bucket for staging."""
    with LocalBigQuery() as local:
        yield local


@pytest.fixture(scope="session")
def fields(local: LocalBigQuery) -> dict[str, Any]:
    """The fields of a resource that is connected to it, whatever the environment says.

    A resource with other fields is made anew from these: Dagster does not see `model_copy`.
    """
    environment = local.environment
    return {
        "project": environment["GOOGLE_CLOUD_PROJECT"],
        "location": "US",
        "api_endpoint": environment["BIGQUERY_EMULATOR_HOST"],
        "storage_endpoint": f"http://{environment['BIGQUERY_STORAGE_EMULATOR_HOST']}",
        "cloud_storage_endpoint": environment["STORAGE_EMULATOR_HOST"],
        "deadline_seconds": 60,
    }


@pytest.fixture(scope="session")
def bigquery(fields: dict[str, Any]) -> BigQueryResource:
    resource = BigQueryResource(**fields)
    connected = resource.connect()
    connected.clients.cloud_storage(connected.project).create_bucket(BUCKET)
    return resource


@pytest.fixture
def storage() -> Iterator[FakeStorage]:
    """A Storage API whose answers the test scripts."""
    server = FakeStorage()
    yield server
    server.stop()


@pytest.fixture
def channel(storage: FakeStorage) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(storage.address) as channel:
        yield channel


@pytest.fixture
def dataset(bigquery: BigQueryResource) -> str:
    """A dataset that only this test knows."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    with bigquery.get_client() as client:
        client.create_dataset(name)
    return name


@pytest.fixture
def reader(bigquery: BigQueryResource) -> BigQueryReader:
    return BigQueryReader(bigquery=bigquery)


@pytest.fixture
def stream_writer(bigquery: BigQueryResource) -> DefaultStreamWriter:
    return DefaultStreamWriter(bigquery=bigquery)


@pytest.fixture
def load_writer(bigquery: BigQueryResource) -> FileLoadsWriter:
    return FileLoadsWriter(bigquery=bigquery, staging=f"gs://{BUCKET}/files")


@pytest.fixture(autouse=True)
def _no_emulator_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that wants the emulators' variables sets them itself."""
    for name in list(os.environ):
        if name.endswith("EMULATOR_HOST") or name in ("GOOGLE_CLOUD_PROJECT", "DAGSTER_HOME"):
            monkeypatch.delenv(name)
