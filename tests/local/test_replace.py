"""Partitions and tables are replaced by load jobs, at once or not at all."""

import datetime as dt
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from google.cloud.bigquery import LoadJob

from dagster_bq_connector import (
    BigQueryReader,
    BigQueryResource,
    DailyTable,
    DefaultStreamWriter,
    FileLoadsWriter,
    RangePartitioning,
    TableOptions,
    TimePartitioning,
)
from dagster_bq_connector.errors import (
    ConfigurationError,
    FailedRowsError,
    PartitionError,
    RefusedError,
    SchemaError,
    TableNotFoundError,
    UnreachableError,
)
from dagster_bq_connector.write import loading, proof, staging

UTC = dt.UTC
DAYS = ["2026-08-01", "2026-08-02", "2026-08-03"]


def rows_of(*days: str, tag: str = "new", each: int = 3) -> pa.Table:
    dates = [dt.date.fromisoformat(day) for day in days for _ in range(each)]
    return pa.table(
        {
            "day": pa.array(dates, pa.date32()),
            "n": pa.array(range(len(dates)), pa.int64()),
            "tag": [tag] * len(dates),
        }
    )


def content(reader: BigQueryReader, table: str) -> list[tuple[object, ...]]:
    got = reader.read(table).to_arrow()
    return sorted(tuple(row.values()) for row in got.to_pylist())


def expected(*tables: pa.Table) -> list[tuple[object, ...]]:
    return sorted(tuple(row.values()) for table in tables for row in table.to_pylist())


def test_partitions_are_replaced_and_others_stay(
    dataset: str, load_writer: FileLoadsWriter, reader: BigQueryReader, bigquery: BigQueryResource
) -> None:
    name = f"{dataset}.t"
    daily = DailyTable(name, column="day", options=TableOptions(clustering=("n",)))
    old = rows_of(*DAYS, tag="old")
    result = load_writer.replace(old, daily.for_keys(DAYS))
    assert result.partitions == dict.fromkeys(DAYS, 3)
    assert (result.rows, len(result.jobs)) == (9, 3)
    new = rows_of(DAYS[1], each=5)
    assert load_writer.replace(new, daily.for_keys([DAYS[1]])).partitions == {DAYS[1]: 5}
    kept = old.filter(pa.compute.not_equal(old["day"], dt.date(2026, 8, 2)))
    assert content(reader, name) == expected(kept, new)
    with bigquery.get_client() as client:
        table = client.get_table(name)
        assert (table.time_partitioning.field, table.clustering_fields) == ("day", ["n"])
        assert [t.table_id for t in client.list_tables(dataset)] == ["t"]


def test_one_partition_by_address(
    dataset: str, load_writer: FileLoadsWriter, reader: BigQueryReader
) -> None:
    name = f"{dataset}.t"
    daily = DailyTable(name, column="day")
    load_writer.replace(rows_of(*DAYS, tag="old"), daily.for_keys(DAYS))
    load_writer.replace(rows_of(DAYS[0]), f"{name}$20260801")
    assert content(reader, name) == sorted(
        expected(rows_of(DAYS[0]))
        + [row for row in expected(rows_of(*DAYS, tag="old")) if row[0] != dt.date(2026, 8, 1)]
    )


def test_a_partition_without_rows_is_emptied(
    dataset: str, load_writer: FileLoadsWriter, reader: BigQueryReader
) -> None:
    name = f"{dataset}.t"
    daily = DailyTable(name, column="day")
    load_writer.replace(rows_of(*DAYS), daily.for_keys(DAYS))
    only_second = rows_of(DAYS[1])
    result = load_writer.replace(only_second, daily.for_keys(DAYS))
    assert result.partitions == {DAYS[0]: 0, DAYS[1]: 3, DAYS[2]: 0}
    assert content(reader, name) == expected(only_second)
    load_writer.replace(only_second.slice(0, 0), daily.for_keys(DAYS))
    assert content(reader, name) == []


def test_a_row_of_another_partition_changes_nothing(
    dataset: str,
    load_writer: FileLoadsWriter,
    reader: BigQueryReader,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Public failure case 45: rows of several dates for one `$partition` start no load."""
    name = f"{dataset}.t"
    daily = DailyTable(name, column="day")
    load_writer.replace(rows_of(*DAYS, tag="old"), daily.for_keys(DAYS))
    before = content(reader, name)

    def no_job(*_: object) -> None:
        raise AssertionError("a job was started")

    monkeypatch.setattr(loading, "start_load", no_job)
    with pytest.raises(PartitionError, match=r"Row 3 belongs to another partition.*20260802"):
        load_writer.replace(rows_of(*DAYS[:2]), daily.for_keys(DAYS[:1]))
    for write in (load_writer.replace, load_writer.append):
        with pytest.raises(PartitionError, match=r"Row 3 belongs to another.*writes 20260801 of"):
            write(rows_of(*DAYS[:2]), f"{name}$20260801")
    assert content(reader, name) == before


def test_rows_of_a_partition_that_only_bigquery_can_tell(
    dataset: str, load_writer: FileLoadsWriter, reader: BigQueryReader
) -> None:
    name = f"{dataset}.t"
    options = TableOptions(RangePartitioning("n", 0, 10, 5))
    load_writer.replace(rows_of(DAYS[0]), f"{name}$0", options)
    before = content(reader, name)
    with pytest.raises(RefusedError, match="belong to different partitions"):
        load_writer.replace(rows_of(DAYS[0], each=6), f"{name}$0")
    assert content(reader, name) == before


def test_a_whole_table_keeps_its_key_and_modes(
    dataset: str, load_writer: FileLoadsWriter, reader: BigQueryReader, bigquery: BigQueryResource
) -> None:
    name = f"{dataset}.t"
    with bigquery.get_client() as client:
        client.query_and_wait(
            f"CREATE TABLE {name} (day DATE, n INT64 NOT NULL, tag STRING, more STRING, "
            "PRIMARY KEY (n) NOT ENFORCED)"
        )
    for tag in ("old", "new"):
        load_writer.replace(rows_of(DAYS[0], tag=tag), name)
    got = reader.read(name).to_arrow().to_pylist()
    assert {row["tag"] for row in got} == {"new"}
    assert {row["more"] for row in got} == {None}
    with bigquery.get_client() as client:
        table = client.get_table(name)
    assert table.table_constraints.primary_key.columns == ["n"]
    assert {field.name: field.mode for field in table.schema}["n"] == "REQUIRED"
    assert len(table.schema) == 4


def test_append_by_load_jobs_adds(
    dataset: str, load_writer: FileLoadsWriter, reader: BigQueryReader
) -> None:
    name = f"{dataset}.t"
    for _ in range(2):
        result = load_writer.append(rows_of(DAYS[0]), name)
    assert (result.operation, result.rows) == ("append", 3)
    assert len(content(reader, name)) == 6
    daily = DailyTable(f"{dataset}.d", column="day")
    for _ in range(2):
        load_writer.append(rows_of(*DAYS), daily.for_keys(DAYS))
    assert len(content(reader, f"{dataset}.d")) == 18


@pytest.mark.parametrize("granularity", ["hour", "month"])
@pytest.mark.parametrize("kind", [pa.timestamp("us", "UTC"), pa.timestamp("us")])
def test_hours_and_months(
    dataset: str,
    load_writer: FileLoadsWriter,
    reader: BigQueryReader,
    granularity: str,
    kind: pa.DataType,
) -> None:
    daily = DailyTable(f"{dataset}.t", column="at", granularity=granularity)  # type: ignore[arg-type]
    keys = {
        "hour": ["2026-08-01-13:00", "2026-08-01-14:00"],
        "month": ["2026-08-01", "2026-09-01"],
    }[granularity]
    moments = {
        "hour": [dt.datetime(2026, 8, 1, 13, 59), dt.datetime(2026, 8, 1, 14)],
        "month": [dt.datetime(2026, 8, 31, 23), dt.datetime(2026, 9, 1)],
    }[granularity]
    zoned = [moment.replace(tzinfo=UTC) if kind.tz else moment for moment in moments]
    rows = pa.table({"at": pa.array(zoned, kind), "n": [1, 2]})
    load_writer.replace(rows, daily.for_keys(keys))
    load_writer.replace(rows.slice(1), daily.for_keys(keys[1:]))
    assert content(reader, f"{dataset}.t") == expected(rows)
    assert reader.read(daily.for_keys(keys[:1])).to_arrow()["n"].to_pylist() == [1]


def test_days_of_another_zone_in_a_datetime_column(
    dataset: str, load_writer: FileLoadsWriter, reader: BigQueryReader
) -> None:
    berlin = DailyTable(f"{dataset}.t", column="at", timezone="Europe/Berlin")
    rows = pa.table({"at": [dt.datetime(2026, 8, 1, 0, 30)], "n": [1]})
    load_writer.replace(rows, berlin.for_keys(["2026-08-01"]))
    assert reader.read(berlin.for_keys(["2026-08-01"])).to_arrow().num_rows == 1
    instants = pa.table({"at": pa.array([dt.datetime(2026, 8, 1, tzinfo=UTC)])})
    other = DailyTable(f"{dataset}.u", column="at", timezone="Europe/Berlin")
    with pytest.raises(PartitionError, match="not one day of UTC"):
        load_writer.replace(instants, other.for_keys(["2026-08-01"]))


def test_a_table_a_day(
    dataset: str, load_writer: FileLoadsWriter, reader: BigQueryReader, bigquery: BigQueryResource
) -> None:
    daily = DailyTable(f"{dataset}.t", column="day", layout="sharded")
    load_writer.replace(rows_of(*DAYS, tag="old"), daily.for_keys(DAYS))
    load_writer.replace(rows_of(DAYS[1]), daily.for_keys([DAYS[1]]))
    with bigquery.get_client() as client:
        names = sorted(table.table_id for table in client.list_tables(dataset))
    assert names == ["t_20260801", "t_20260802", "t_20260803"]
    assert content(reader, f"{dataset}.t_20260802") == expected(rows_of(DAYS[1]))
    both = reader.read(daily.for_keys(DAYS[:2]), columns=["tag", "day"]).to_arrow()
    assert both.schema.names == ["tag", "day"]
    assert sorted(both["tag"].to_pylist()) == ["new"] * 3 + ["old"] * 3


def test_the_time_of_ingestion(
    dataset: str, load_writer: FileLoadsWriter, reader: BigQueryReader, bigquery: BigQueryResource
) -> None:
    name = f"{dataset}.t"
    daily = DailyTable(name)
    for day, n in ((DAYS[0], 1), (DAYS[1], 2), (DAYS[0], 3)):
        load_writer.replace(pa.table({"n": [n]}), daily.for_keys([day]))
    with bigquery.get_client() as client:
        query = f"SELECT FORMAT_DATE('%F', DATE(_PARTITIONTIME)), n FROM {name} ORDER BY 1"
        assert [tuple(row) for row in client.query_and_wait(query)] == [(DAYS[0], 3), (DAYS[1], 2)]
    assert reader.read(daily.for_keys([DAYS[0]])).to_arrow()["n"].to_pylist() == [3]
    with pytest.raises(PartitionError, match="2 partitions cannot be told apart"):
        load_writer.replace(pa.table({"n": [1]}), daily.for_keys(DAYS[:2]))


def test_rows_that_do_not_fit_change_nothing(
    dataset: str, load_writer: FileLoadsWriter, reader: BigQueryReader
) -> None:
    name = f"{dataset}.t"
    numeric = pa.decimal128(38, 9)
    load_writer.replace(pa.table({"n": pa.array([Decimal(1)], numeric)}), name)
    bad = pa.table({"n": pa.array([Decimal(2), Decimal("1E-10")], pa.decimal128(38, 10))})
    with pytest.raises(FailedRowsError, match=r"0 row\(s\) were.*\n  row 1, column 'n'"):
        load_writer.replace(bad, name)
    with pytest.raises(SchemaError, match="no column 'other'"):
        load_writer.replace(pa.table({"other": [1]}), name)
    assert content(reader, name) == [(Decimal(1),)]


def sizes_of_files(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of Arrow of each file that is staged from now on."""
    sizes: list[int] = []
    write = staging.Staging.write

    def spy(self, batches, into):
        sizes.append(sum(batch.nbytes for batch in batches))
        write(self, batches, into)

    monkeypatch.setattr(staging.Staging, "write", spy)
    return sizes


def test_large_rows_are_staged_in_files_of_bounded_size(
    dataset: str,
    load_writer: FileLoadsWriter,
    reader: BigQueryReader,
    bigquery: BigQueryResource,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staging, "FILE_BYTES", 100_000)
    monkeypatch.setattr(staging, "BUFFER_BYTES", 250_000)
    staged = sizes_of_files(monkeypatch)
    many = pa.table({"n": range(50_000), "m": range(50_000)})
    load_writer.replace(many.to_reader(max_chunksize=1000), f"{dataset}.t")
    assert len(staged) >= 8
    assert max(staged) <= 120_000
    assert reader.read(f"{dataset}.t").to_arrow().num_rows == 50_000


def test_the_files_are_gone_afterwards(
    dataset: str, load_writer: FileLoadsWriter, staged: Callable[[], list[str]]
) -> None:
    load_writer.replace(rows_of(*DAYS), f"{dataset}.t")
    daily = DailyTable(f"{dataset}.d", column="day")
    with pytest.raises(PartitionError):
        load_writer.replace(rows_of(*DAYS), daily.for_keys(DAYS[:1]))
    assert staged() == []


def test_a_staging_address_that_cannot_be_used(
    dataset: str, bigquery: BigQueryResource, load_writer: FileLoadsWriter
) -> None:
    nowhere = FileLoadsWriter(bigquery=bigquery, staging="gs://no-such-bucket/x")
    with pytest.raises(ConfigurationError, match="gs://no-such-bucket does not exist: look at"):
        nowhere.replace(rows_of(DAYS[0]), f"{dataset}.t")
    for address in ("/tmp/x", "gs://../x", "gs://a bucket", "gs://no-such-bucket/*"):
        wrong = FileLoadsWriter(bigquery=bigquery, staging=address)
        with pytest.raises(ConfigurationError, match="write gs://bucket"):
            wrong.replace(rows_of(DAYS[0]), f"{dataset}.t")
    with bigquery.get_client() as client:
        assert list(client.list_tables(dataset)) == []


def test_times_and_nested_columns_travel_by_file(
    dataset: str, load_writer: FileLoadsWriter, reader: BigQueryReader
) -> None:
    rows = pa.table(
        {
            "clock": pa.array([dt.time(1, 2, 3, 4)]),
            "at": pa.array([dt.datetime(2026, 8, 1, 1, 2, 3, 4)]),
            "instant": pa.array([dt.datetime(2026, 8, 1, 1, 2, 3, 4, UTC)]),
            "price": pa.array([Decimal("1.000000001")], pa.decimal128(38, 9)),
            "raw": pa.array([b"\x00\xff"]),
            "list": pa.array([[1, 2]]),
            "structs": pa.array([[{"a": 1, "b": ["x"]}]]),
        }
    )
    load_writer.replace(rows, f"{dataset}.t")
    assert reader.read(f"{dataset}.t").to_arrow().to_pylist() == rows.to_pylist()


def test_options_of_the_caller_keep_the_partitioning(
    dataset: str, load_writer: FileLoadsWriter, bigquery: BigQueryResource
) -> None:
    daily = DailyTable(f"{dataset}.t", column="day")
    options = TableOptions(clustering=("n",))
    load_writer.replace(rows_of(DAYS[0]), daily.for_keys(DAYS[:1]), options)
    with bigquery.get_client() as client:
        table = client.get_table(f"{dataset}.t")
    assert (table.time_partitioning.field, table.clustering_fields) == ("day", ["n"])


def test_a_partition_of_a_table_that_is_not_there(
    dataset: str, load_writer: FileLoadsWriter, bigquery: BigQueryResource
) -> None:
    with pytest.raises(TableNotFoundError, match="pass options with a partitioning"):
        load_writer.replace(rows_of(DAYS[0]), f"{dataset}.t$20260801")
    with bigquery.get_client() as client:
        assert list(client.list_tables(dataset)) == []
    options = TableOptions(TimePartitioning("day"))
    load_writer.replace(rows_of(DAYS[0]), f"{dataset}.t$20260801", options)


def test_shards_of_other_columns(
    dataset: str, load_writer: FileLoadsWriter, reader: BigQueryReader
) -> None:
    daily = DailyTable(f"{dataset}.t", column="day", layout="sharded")
    load_writer.replace(rows_of(DAYS[0]), daily.for_keys(DAYS[:1]))
    more = rows_of(DAYS[1]).append_column("extra", pa.array([1, 2, 3]))
    load_writer.replace(more, daily.for_keys(DAYS[1:2]))
    with pytest.raises(SchemaError, match="t_20260802 has the columns .*extra"):
        reader.read(daily.for_keys(DAYS[:2]))
    both = reader.read(daily.for_keys(DAYS[:2]), columns=["tag", "n"])
    assert both.to_arrow().num_rows == 6
    with pytest.raises(SchemaError, match="have not the same columns"):
        load_writer.replace(rows_of(*DAYS[:2]), daily.for_keys(DAYS[:2]))


def test_a_job_that_cannot_be_started_among_others(
    dataset: str,
    load_writer: FileLoadsWriter,
    reader: BigQueryReader,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those before it are done, and the error says which."""
    daily = DailyTable(f"{dataset}.t", column="day")
    load_writer.replace(rows_of(*DAYS, tag="old"), daily.for_keys(DAYS))
    start, started = loading.start_load, []

    def third_fails(settings, uris, destination, *arguments):
        started.append(destination)
        if len(started) == 3:
            raise UnreachableError("no answer")
        return start(settings, uris, destination, *arguments)

    monkeypatch.setattr(loading, "start_load", third_fails)
    with pytest.raises(RefusedError, match="Only 2026-08-01, 2026-08-02 were written"):
        load_writer.replace(rows_of(*DAYS), daily.for_keys(DAYS))
    tags = {row[0].isoformat(): row[2] for row in content(reader, f"{dataset}.t")}
    assert tags == {DAYS[0]: "new", DAYS[1]: "new", DAYS[2]: "old"}


def test_an_interrupted_replace_cancels_its_jobs_and_leaves_no_files(
    dataset: str,
    load_writer: FileLoadsWriter,
    staged: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    daily = DailyTable(f"{dataset}.t", column="day")
    cancelled: list[str] = []
    monkeypatch.setattr(
        LoadJob, "cancel", lambda self, **_: cancelled.append(self.job_id), raising=True
    )

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(proof, "wait_for", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_writer.replace(rows_of(*DAYS), daily.for_keys(DAYS))
    assert len(cancelled) == 3
    assert staged() == []


def test_one_large_batch_becomes_several_files(
    dataset: str, load_writer: FileLoadsWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "FILE_BYTES", 100_000)
    sizes = sizes_of_files(monkeypatch)
    load_writer.replace(pa.table({"n": range(50_000)}), f"{dataset}.t")
    assert len(sizes) >= 4
    assert max(sizes) <= 101_000


@pytest.mark.parametrize("method", ["stream", "load"])
@pytest.mark.parametrize("kind", ["arrow", "pandas", "reader"])
def test_pieces_may_share_memory_that_is_filled_anew(
    method: str,
    kind: str,
    dataset: str,
    stream_writer: DefaultStreamWriter,
    load_writer: FileLoadsWriter,
    reader: BigQueryReader,
) -> None:
    """A generator that fills one buffer for all its pieces: the rows are those of each piece."""
    size, count = 1_000, 8
    values = np.empty((size, 1), dtype=np.int64)
    frame = pd.DataFrame(values, columns=["id"], copy=False)

    def pieces() -> Iterator[Any]:
        for number in range(count):
            values[:, 0] = np.arange(number * size, (number + 1) * size)
            column = pa.Array.from_buffers(pa.int64(), size, [None, pa.py_buffer(values)])
            yield frame if kind == "pandas" else pa.record_batch({"id": column})

    writer = stream_writer if method == "stream" else load_writer
    data: Any = pieces()
    if kind == "reader":
        data = pa.RecordBatchReader.from_batches(pa.schema({"id": pa.int64()}), data)
    assert writer.append(data, f"{dataset}.t").rows == size * count
    found = reader.read(f"{dataset}.t").to_arrow()["id"].to_pylist()
    assert sorted(found) == list(range(size * count))
