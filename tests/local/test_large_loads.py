"""Loads beyond what one job takes: several jobs into temporary tables, and one copy."""

import datetime as dt
import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pytest
from google.api_core import exceptions as api
from google.cloud import bigquery as google

from dagster_bq_connector import (
    BigQueryReader,
    BigQueryResource,
    DailyTable,
    FileLoadsWriter,
    RowSlice,
    TableOptions,
    TimePartitioning,
)
from dagster_bq_connector.errors import RefusedError, SchemaError, UnsupportedError
from dagster_bq_connector.write import load_pace, loading, parts, proof, staging
from support.http_proxy import PASSED, Call, HttpProxy, Verdict

DAYS = ["2026-08-01", "2026-08-02"]


@pytest.fixture
def small_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of some hundred rows, and one file a job."""
    monkeypatch.setattr(staging, "FILE_BYTES", 1_000)
    monkeypatch.setattr(parts, "MAX_URIS", 1)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The tables of each copy job that is inserted from now on."""
    found: list[list[str]] = []
    copy = google.Client.copy_table

    def spy(self: google.Client, sources: Any, *arguments: Any, **options: Any) -> Any:
        found.append([source.table_id for source in sources])
        return copy(self, sources, *arguments, **options)

    monkeypatch.setattr(google.Client, "copy_table", spy)
    return found


def rows_of(*days: str, each: int = 500, first: int = 0) -> pa.Table:
    dates = [dt.date.fromisoformat(day) for day in days for _ in range(each)]
    count = len(dates)
    return pa.table({"day": dates, "n": pa.array(range(first, first + count), pa.int64())})


def numbers(reader: BigQueryReader, table: str) -> list[int]:
    return sorted(reader.read(table, ["n"]).to_arrow()["n"].to_pylist())


def tables(bigquery: BigQueryResource, dataset: str) -> list[str]:
    with bigquery.get_client() as client:
        return sorted(table.table_id for table in client.list_tables(dataset))


@pytest.mark.usefixtures("small_jobs")
def test_an_append_lands_once_by_one_copy(
    dataset: str,
    load_writer: FileLoadsWriter,
    reader: BigQueryReader,
    bigquery: BigQueryResource,
    copies: list[list[str]],
) -> None:
    name, layout = f"{dataset}.t", TableOptions(TimePartitioning("day"), clustering=("n",))
    load_writer.append(rows_of(*DAYS, each=2), name, layout)
    copies.clear()
    rows = rows_of(*DAYS, first=1_000)
    result = load_writer.append(rows, name, key=f"{dataset} large")
    again = load_writer.append(rows, name, key=f"{dataset} large")
    assert (result.rows, again.rows, again.replayed) == (1_000, 1_000, True)
    [sources] = copies
    assert len(sources) > 2
    assert len(result.jobs) == len(sources) + 1
    assert numbers(reader, name) == [0, 1, 2, 3, *range(1_000, 2_000)]
    assert tables(bigquery, dataset) == ["t"]


@pytest.mark.usefixtures("small_jobs")
def test_a_replaced_table_keeps_its_schema_and_keys(
    dataset: str,
    load_writer: FileLoadsWriter,
    reader: BigQueryReader,
    bigquery: BigQueryResource,
    copies: list[list[str]],
) -> None:
    name = f"{dataset}.t"
    with bigquery.get_client() as client:
        client.query_and_wait(
            f"CREATE TABLE {name} (day DATE NOT NULL, n INT64 NOT NULL OPTIONS(description='a "
            "number'), PRIMARY KEY (n) NOT ENFORCED) PARTITION BY day CLUSTER BY n"
        )
    load_writer.append(rows_of(*DAYS, each=2, first=7), name)
    before = described(bigquery, name)
    assert load_writer.replace(rows_of(*DAYS), name, key=f"{dataset} all").rows == 1_000
    assert copies
    assert numbers(reader, name) == list(range(1_000))
    assert described(bigquery, name) == before


def described(bigquery: BigQueryResource, name: str) -> Any:
    with bigquery.get_client() as client:
        found = client.get_table(name).to_api_repr()
    return [
        found.get(part)
        for part in ("schema", "timePartitioning", "clustering", "tableConstraints", "labels")
    ]


@pytest.mark.usefixtures("small_jobs")
@pytest.mark.parametrize("column", ["day", None])
def test_partitions_are_replaced_by_a_copy_each(
    dataset: str,
    load_writer: FileLoadsWriter,
    reader: BigQueryReader,
    bigquery: BigQueryResource,
    copies: list[list[str]],
    column: str | None,
) -> None:
    name = f"{dataset}.t"
    layout = TableOptions(TimePartitioning(column))
    for day in DAYS:
        load_writer.append(rows_of(day, each=2), f"{name}${day.replace('-', '')}", layout)
    copies.clear()
    target = f"{name}$20260801"
    result = load_writer.replace(rows_of(DAYS[0], first=10), target, key=f"{dataset} one")
    assert result.rows == 500
    assert len(copies) == 1
    assert numbers(reader, name) == [0, 1, *range(10, 510)]
    assert tables(bigquery, dataset) == ["t"]


@pytest.mark.usefixtures("small_jobs")
def test_large_and_small_partitions_in_one_write(
    dataset: str, load_writer: FileLoadsWriter, reader: BigQueryReader, copies: list[list[str]]
) -> None:
    daily = DailyTable(f"{dataset}.t", column="day")
    load_writer.replace(rows_of(*DAYS, each=2), daily.for_keys(DAYS))
    copies.clear()
    rows = pa.concat_tables([rows_of(DAYS[0], first=10), rows_of(DAYS[1], each=3, first=5_000)])
    result = load_writer.replace(rows, daily.for_keys(DAYS), key=f"{dataset} both")
    assert result.partitions == {DAYS[0]: 500, DAYS[1]: 3}
    assert len(copies) == 1
    assert numbers(reader, f"{dataset}.t") == [*range(10, 510), 5_000, 5_001, 5_002]


@pytest.mark.usefixtures("small_jobs")
def test_a_slice_is_staged_by_several_jobs(
    dataset: str, load_writer: FileLoadsWriter, reader: BigQueryReader
) -> None:
    load_writer.append(rows_of(*DAYS, each=2), f"{dataset}.t")
    slice_ = RowSlice.by_keys(f"{dataset}.t", "day", DAYS[:1])
    result = load_writer.replace(rows_of(DAYS[0], first=10), slice_, key=f"{dataset} slice")
    assert len(result.jobs) > 3
    assert numbers(reader, f"{dataset}.t") == [2, 3, *range(10, 510)]


@pytest.mark.usefixtures("small_jobs")
def test_too_many_jobs_for_a_copy_start_none(
    dataset: str,
    load_writer: FileLoadsWriter,
    reader: BigQueryReader,
    bigquery: BigQueryResource,
    staged: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = f"{dataset}.t"
    load_writer.append(rows_of(DAYS[0], each=2), name)
    monkeypatch.setattr(loading, "MAX_COPY_SOURCES", 2)
    before = jobs_of(bigquery)
    with pytest.raises(UnsupportedError, match="one copy takes the tables of 2. Nothing was chang"):
        load_writer.replace(rows_of(*DAYS), name, key=f"{dataset} too many")
    assert jobs_of(bigquery) == before
    assert (numbers(reader, name), tables(bigquery, dataset), staged()) == ([0, 1], ["t"], [])


def jobs_of(bigquery: BigQueryResource) -> set[str]:
    with bigquery.get_client() as client:
        return {job.job_id for job in client.list_jobs()}


@pytest.mark.usefixtures("small_jobs")
def test_a_failed_copy_changes_nothing(
    dataset: str,
    load_writer: FileLoadsWriter,
    reader: BigQueryReader,
    bigquery: BigQueryResource,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = f"{dataset}.t"
    load_writer.append(rows_of(DAYS[0], each=2), name)
    start = loading.start_copy

    def broken(settings: Any, sources: Any, destination: Any, config: Any, job_id: str) -> Any:
        missing = google.TableReference(
            sources[0].dataset_id
            and google.DatasetReference(sources[0].project, sources[0].dataset_id),
            "gone",
        )
        return start(settings, [missing, *sources], destination, config, job_id)

    monkeypatch.setattr(loading, "start_copy", broken)
    with pytest.raises(Exception, match="gone"):
        load_writer.replace(rows_of(*DAYS), name, key=f"{dataset} broken")
    assert (numbers(reader, name), tables(bigquery, dataset)) == ([0, 1], ["t"])
    monkeypatch.setattr(loading, "start_copy", start)
    assert load_writer.replace(rows_of(*DAYS), name, key=f"{dataset} broken").rows == 1_000


@pytest.mark.usefixtures("small_jobs")
def test_temporary_tables_expire_by_themselves(
    dataset: str,
    load_writer: FileLoadsWriter,
    bigquery: BigQueryResource,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Public failure case 28: what a process that died left behind goes by itself."""

    def denied(*_: Any, **__: Any) -> None:
        raise api.Forbidden("no")

    monkeypatch.setattr(google.Client, "delete_table", denied)
    load_writer.append(rows_of(DAYS[0]), f"{dataset}.t")
    left = [table for table in tables(bigquery, dataset) if table != "t"]
    assert len(left) > 1
    for name in left:
        assert name.startswith("_dagster_bq_")
        with bigquery.get_client() as client:
            table = client.get_table(f"{dataset}.{name}")
        assert table.expires is not None
        assert table.created is not None
        assert dt.timedelta(hours=23) < table.expires - table.created < dt.timedelta(hours=25)


def test_parts_are_cut_by_bytes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "MAX_BYTES", 100)
    files = [parts.File(f"gs://b/{size}", size) for size in (60, 40, 1, 250, 99, 1)]
    sizes = [[file.bytes for file in part] for part in parts.in_parts(files)]
    assert sizes == [[60, 40], [1], [250], [99, 1]]
    assert parts.in_parts([]) == [[]]


def test_a_second_run_adds_a_column(
    dataset: str, load_writer: FileLoadsWriter, reader: BigQueryReader
) -> None:
    """Public failure case 54: a replacement takes the new column, and appends go on."""
    name = f"{dataset}.t"
    load_writer.replace(rows_of(DAYS[0], each=2), name)
    wider = rows_of(DAYS[0], each=2).append_column("extra", pa.array(["a", "b"]))
    with pytest.raises(SchemaError, match="evolution='add'"):
        load_writer.replace(wider, name)
    load_writer.replace(wider, name, TableOptions(evolution="add"))
    load_writer.append(wider, name)
    load_writer.append(rows_of(DAYS[0], each=1), name)
    found = reader.read(name, ["extra"]).to_arrow()["extra"].to_pylist()
    assert sorted(found, key=str) == [None, "a", "a", "b", "b"]


# A job that BigQuery failed for its rate, which the local one never does.
RATE_LIMITED = {
    "reason": "rateLimitExceeded",
    "message": "Exceeded rate limits: too many table update operations for this table.",
}


class FailedJobs:
    """Loads that never run: it answers their insertion, and for each who asks they have failed."""

    def __init__(self, count: int) -> None:
        self.left, self.jobs = count, dict[str, Any]()

    def __call__(self, call: Call) -> Verdict:
        path = urlsplit(call.path).path
        if call.method == "POST" and path.endswith("/jobs") and self.left:
            self.left -= 1
            job = json.loads(call.body)
            job["status"] = {"state": "RUNNING"}
            self.jobs[job["jobReference"]["jobId"]] = {
                **job,
                "status": {"state": "DONE", "errorResult": RATE_LIMITED, "errors": [RATE_LIMITED]},
            }
            return Verdict(arrives=False, status=200, content=json.dumps(job).encode())
        if call.method == "GET" and (job := self.jobs.get(path.rpartition("/")[2])):
            return Verdict(arrives=False, status=200, content=json.dumps(job).encode())
        return PASSED


@pytest.fixture
def proxied(fields: dict[str, Any], staging: str) -> Iterator[tuple[HttpProxy, FileLoadsWriter]]:
    with HttpProxy(fields["api_endpoint"]) as proxy:
        bigquery = BigQueryResource(**fields | {"api_endpoint": proxy.url})
        yield proxy, FileLoadsWriter(bigquery=bigquery, staging=staging)


@pytest.mark.local_only("a proxy stands between, which has no certificate of Google's")
@pytest.mark.parametrize("large", [False, True])
def test_a_job_that_failed_for_its_rate_runs_again(
    dataset: str,
    proxied: tuple[HttpProxy, FileLoadsWriter],
    reader: BigQueryReader,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    large: bool,
) -> None:
    """Public failure case 57: a load job that is DONE with rateLimitExceeded gets the next id."""
    proxy, writer = proxied
    if large:
        request.getfixturevalue("small_jobs")
    monkeypatch.setattr(proof.time, "sleep", lambda _: None)
    proxy.decide = failed = FailedJobs(2)
    result = writer.append(rows_of(DAYS[0]), f"{dataset}.t", key=f"{dataset} rate")
    assert len(failed.jobs) == 2
    assert not set(failed.jobs) & set(result.jobs)
    assert numbers(reader, f"{dataset}.t") == list(range(500))
    if not large:
        first, second = failed.jobs
        assert (second, *result.jobs) == (f"{first}_1", f"{first}_2")


@pytest.mark.local_only("a proxy stands between, which has no certificate of Google's")
def test_a_job_that_failed_for_good_is_not_run_again(
    dataset: str, proxied: tuple[HttpProxy, FileLoadsWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, writer = proxied
    said = {"reason": "invalid", "message": "Something is wrong with it."}
    monkeypatch.setitem(globals(), "RATE_LIMITED", said)
    proxy.decide = failed = FailedJobs(5)
    with pytest.raises(RefusedError, match="Something is wrong"):
        writer.append(rows_of(DAYS[0]), f"{dataset}.t", key=f"{dataset} bad")
    assert len(failed.jobs) == 1


def test_a_load_of_other_rows_than_were_staged_is_no_success_later(
    dataset: str, load_writer: FileLoadsWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = property(lambda self: 499)
    monkeypatch.setattr(google.LoadJob, "output_rows", rows)
    for _ in range(2):
        with pytest.raises(RefusedError, match="loaded 499 rows of 500 staged"):
            load_writer.append(rows_of(DAYS[0]), f"{dataset}.t", key=f"{dataset} fewer")


def test_a_pace_that_uses_up_the_day_is_told(
    dataset: str, load_writer: FileLoadsWriter, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(load_pace, "WARN_AT", 4)
    monkeypatch.setattr(load_pace, "WARN_EVERY", 2)
    for number in range(5):
        load_writer.append(rows_of(DAYS[0], each=1), f"{dataset}.t", key=f"{dataset} {number}")
    [warning] = [record.message for record in caplog.records if "load jobs" in record.message]
    assert "this process has started 4 load jobs within 24 hours" in warning
    assert "1,500 a table a day" in warning


def test_loads_of_others_are_seen_by_their_change(
    dataset: str, load_writer: FileLoadsWriter, bigquery: BigQueryResource, caplog: Any
) -> None:
    with bigquery.get_client() as client:
        client.query_and_wait(
            f"CREATE TABLE {dataset}.t AS SELECT DATE '2026-08-01' AS day, 1 AS n"
        )
    load_writer.append(rows_of(DAYS[0], each=1), f"{dataset}.t", key=f"{dataset} a")
    load_writer.append(rows_of(DAYS[0], each=1), f"{dataset}.t", key=f"{dataset} b")
    told = [record.message for record in caplog.records if "by no load job" in record.message]
    assert len(told) == 1
    assert "more than one in 58 s" in told[0]
