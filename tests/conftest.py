"""What the tests share: a BigQuery, and names that no other test has.

It is a local BigQuery of each worker. With BQ_TEST_PROJECT, BQ_TEST_DATASET and BQ_TEST_BUCKET set,
tests/local runs unchanged on that project instead (`make test-gcp`).
"""

import os
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import hypothesis
import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory

from dagster_bq_connector import (
    BigQueryReader,
    BigQueryResource,
    DefaultStreamWriter,
    FileLoadsWriter,
)
from dagster_bq_connector.local import LocalBigQuery
from support.fake_storage import FakeStorage
from support.service import BUCKET, ON_SERVICE, PREFIX

# A busy machine is no failure, and a failure is repeated by its seed.
hypothesis.settings.register_profile(
    "tests",
    deadline=None,
    max_examples=100 if os.environ.get("SOAK") else 30,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("tests")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip on the service what cannot hold there; its marker says why."""
    for item in items if ON_SERVICE else []:
        marker = item.get_closest_marker("local_only")
        if "storage" in getattr(item, "fixturenames", ()):
            marker = pytest.mark.local_only("a scripted server stands in for the Storage API").mark
        if marker:
            item.add_marker(pytest.mark.skip(reason=marker.args[0]))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what the IO manager was shown to do: partitions x layout of the table x form."""
    grid: dict[str, dict[tuple[str, str], str]] = {}
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.stats.get(outcome, []):
            _, found, cell = report.nodeid.partition("test_io_manager_grid.py::test_grid[")
            if found and (report.when == "call" or outcome != "passed"):
                kind, form, layout = cell.removesuffix("]").split("-")
                grid.setdefault(kind, {})[form, layout] = "ok" if outcome == "passed" else "FAILED"
    if not grid:
        return
    layouts = list(dict.fromkeys(layout for cells in grid.values() for _, layout in cells))
    terminalreporter.section("the IO manager: partitions x layout of the table: forms of rows")
    terminalreporter.write_line(f"{'':10}" + "".join(f"{layout:30}" for layout in sorted(layouts)))
    for kind, cells in sorted(grid.items()):
        texts = [
            " ".join(
                form if text == "ok" else f"{text}:{form}"
                for (form, layout), text in sorted(cells.items())
                if layout == column
            )
            for column in sorted(layouts)
        ]
        terminalreporter.write_line(f"{kind:10}" + "".join(f"{text:30}" for text in texts))


@pytest.fixture(scope="session", autouse=True)
def _one_reading_of_migrations() -> Iterator[None]:
    """Each instance of Dagster has new databases, and reads all its migrations for each of them.

    Here they are read once.
    """
    read, known = ScriptDirectory.from_config, dict[str | None, ScriptDirectory]()

    def from_config(config: Config) -> ScriptDirectory:
        place = config.get_main_option("script_location")
        if place not in known:
            known[place] = read(config)
        return known[place]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScriptDirectory, "from_config", from_config)
        yield


@pytest.fixture(scope="session")
def local() -> Iterator[LocalBigQuery]:
    """A local BigQuery for all the tests of a worker, with a bucket for staging."""
    with LocalBigQuery() as local:
        yield local


@pytest.fixture(scope="session")
def fields(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The fields of a resource that is connected to it, whatever the environment says.

    A resource with other fields is made anew from these: Dagster does not see `model_copy`.
    """
    if ON_SERVICE:
        location = os.environ.get("BQ_TEST_LOCATION", "US")
        return {"project": os.environ["BQ_TEST_PROJECT"], "location": location}
    environment = request.getfixturevalue("local").environment
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
    if not ON_SERVICE:
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
def dataset(bigquery: BigQueryResource) -> Iterator[str]:
    """A dataset that only this test knows."""
    name = f"{PREFIX}_{uuid.uuid4().hex[:12]}"
    with bigquery.get_client() as client:
        client.create_dataset(name)
        yield name
        if ON_SERVICE:
            client.delete_dataset(name, delete_contents=True, not_found_ok=True)


@pytest.fixture
def project(fields: dict[str, Any]) -> str:
    return fields["project"]


@pytest.fixture
def reader(bigquery: BigQueryResource) -> BigQueryReader:
    return BigQueryReader(bigquery=bigquery)


@pytest.fixture
def stream_writer(bigquery: BigQueryResource) -> DefaultStreamWriter:
    return DefaultStreamWriter(bigquery=bigquery)


@pytest.fixture
def staging() -> str:
    """Where this test stages files, and no other."""
    return f"gs://{BUCKET}/dagster-bq-tests/{uuid.uuid4().hex}"


@pytest.fixture
def staged(bigquery: BigQueryResource, staging: str) -> Callable[[], list[str]]:
    """Lists the files that are there now."""

    def names() -> list[str]:
        connected = bigquery.connect()
        client = connected.clients.cloud_storage(connected.project)
        prefix = staging.removeprefix(f"gs://{BUCKET}/")
        return [blob.name for blob in client.list_blobs(BUCKET, prefix=prefix)]

    return names


@pytest.fixture
def load_writer(bigquery: BigQueryResource, staging: str) -> FileLoadsWriter:
    return FileLoadsWriter(bigquery=bigquery, staging=staging)


@pytest.fixture(autouse=True)
def _no_emulator_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that wants the emulators' variables sets them itself."""
    if ON_SERVICE:
        return
    for name in list(os.environ):
        if name.endswith("EMULATOR_HOST") or name in ("GOOGLE_CLOUD_PROJECT", "DAGSTER_HOME"):
            monkeypatch.delenv(name)
