"""One round trip through every path on a real project.

Runs with `make test-gcp` when BQ_TEST_PROJECT, BQ_TEST_DATASET (which exists, in the location
BQ_TEST_LOCATION, US when not set) and BQ_TEST_BUCKET (in the same location) are set. Credentials
are those of the environment.
"""

import datetime as dt
import os
import uuid
from collections.abc import Iterator

import pyarrow as pa
import pytest

from dagster_bq_connector import (
    BigQueryReader,
    BigQueryResource,
    DailyTable,
    DefaultStreamWriter,
    FileLoadsWriter,
)

NEEDED = ("BQ_TEST_PROJECT", "BQ_TEST_DATASET", "BQ_TEST_BUCKET")
pytestmark = pytest.mark.skipif(
    not all(os.environ.get(name) for name in NEEDED), reason=f"needs {', '.join(NEEDED)}"
)


@pytest.fixture
def service() -> BigQueryResource:
    return BigQueryResource(
        project=os.environ["BQ_TEST_PROJECT"], location=os.environ.get("BQ_TEST_LOCATION", "US")
    )


@pytest.fixture
def table(service: BigQueryResource) -> Iterator[str]:
    name = f"{os.environ['BQ_TEST_DATASET']}.test_{uuid.uuid4().hex[:12]}"
    yield name
    with service.get_client() as client:
        client.delete_table(name, not_found_ok=True)


def rows_of(*days: int) -> pa.Table:
    dates = [dt.date(2026, 8, day) for day in days for _ in range(3)]
    return pa.table({"day": pa.array(dates, pa.date32()), "n": list(range(len(dates)))})


def test_append_and_read(service: BigQueryResource, table: str) -> None:
    rows = rows_of(1, 2)
    assert DefaultStreamWriter(bigquery=service).append(rows, table).rows == 6
    got = BigQueryReader(bigquery=service).read(table, columns=["n"], where="n >= 2").to_arrow()
    assert sorted(got["n"].to_pylist()) == [2, 3, 4, 5]


def test_replace_a_partition(service: BigQueryResource, table: str) -> None:
    bucket = os.environ["BQ_TEST_BUCKET"]
    writer = FileLoadsWriter(bigquery=service, staging=f"gs://{bucket}/dagster-bq-connector")
    daily = DailyTable(table, column="day")
    writer.replace(rows_of(1, 2), daily.for_keys(["2026-08-01", "2026-08-02"]))
    writer.replace(rows_of(2).slice(0, 1), daily.for_keys(["2026-08-02"]))
    got = BigQueryReader(bigquery=service).read(table).to_arrow()
    assert got.group_by("day").aggregate([("n", "count")]).sort_by("day")[
        "n_count"
    ].to_pylist() == [3, 1]


def test_replace_a_whole_table(service: BigQueryResource, table: str) -> None:
    bucket = os.environ["BQ_TEST_BUCKET"]
    writer = FileLoadsWriter(bigquery=service, staging=f"gs://{bucket}/dagster-bq-connector")
    writer.replace(rows_of(1, 2), table)
    writer.replace(rows_of(3), table)
    assert BigQueryReader(bigquery=service).read(table).to_arrow().num_rows == 3
