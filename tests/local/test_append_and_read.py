"""Rows in over the default stream and out over read sessions, against the local BigQuery."""

import datetime as dt
import gc
import pickle
import re
import socket
import threading
import time
from decimal import Decimal
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from dagster_bq_connector import (
    BigQueryReader,
    BigQueryResource,
    DailyTable,
    DefaultStreamWriter,
    RangePartitioning,
    TableOptions,
    TimePartitioning,
)
from dagster_bq_connector.errors import (
    ConfigurationError,
    DatasetNotFoundError,
    FailedRowsError,
    InvalidNameError,
    RefusedError,
    SchemaError,
    TableMismatchError,
    TableNotFoundError,
    UnreachableError,
    UnsupportedError,
)

UTC = dt.UTC
MOMENT = dt.datetime(2026, 8, 1, 1, 2, 3, 456789)
EVERY_TYPE = pa.table(
    {
        "int": pa.array([1, None, -(2**63)]),
        "small": pa.array([1, None, -128], pa.int8()),
        "float": pa.array([1.5, None, -0.0]),
        "bool": pa.array([True, None, False]),
        "string": pa.array(["é", None, ""]),
        "bytes": pa.array([b"\x00\xff", None, b""]),
        "numeric": pa.array([Decimal("1.000000001"), None, Decimal("-9")], pa.decimal128(38, 9)),
        "date": pa.array([dt.date(1, 1, 1), None, dt.date(9999, 12, 31)]),
        "timestamp": pa.array(
            [
                dt.datetime(2026, 8, 1, 1, 2, 3, 456789, UTC),
                None,
                dt.datetime(1960, 1, 1, tzinfo=UTC),
            ],
            pa.timestamp("us", "UTC"),
        ),
        "datetime": pa.array(
            [dt.datetime(2026, 8, 1, 1, 2, 3, 456789), None, dt.datetime(1, 1, 1)]
        ),
        "struct": pa.array([{"a": 1, "b": "x"}, None, {"a": None, "b": "y"}]),
        "list": pa.array([[1, 2], [], [3]]),
        "structs": pa.array([[{"a": 1}], [], [{"a": None}]]),
    }
)


def by_first_column(table: pa.Table) -> list[dict[str, object]]:
    return sorted(table.to_pylist(), key=repr)


def test_every_type_comes_back_exactly(
    dataset: str, stream_writer: DefaultStreamWriter, reader: BigQueryReader
) -> None:
    result = stream_writer.append(EVERY_TYPE, f"{dataset}.types")
    assert (result.rows, result.operation, result.method) == (3, "append", "default_stream")
    got = reader.read(f"{dataset}.types").to_arrow()
    assert by_first_column(got) == by_first_column(EVERY_TYPE)
    kinds = {field.name: field.type for field in got.schema}
    assert kinds["small"] == pa.int64()
    assert kinds["numeric"] == pa.decimal128(38, 9)
    assert kinds["datetime"] == pa.timestamp("us")


def test_json_is_json(
    dataset: str,
    stream_writer: DefaultStreamWriter,
    reader: BigQueryReader,
    bigquery: BigQueryResource,
) -> None:
    documents = pa.table(
        {"id": [1, 2, 3], "doc": pa.array(['{"a":[1]}', "null", None], pa.json_())}
    )
    stream_writer.append(documents, f"{dataset}.docs")
    with bigquery.get_client() as client:
        assert client.get_table(f"{dataset}.docs").schema[1].field_type == "JSON"
    rows = reader.read(f"{dataset}.docs").to_arrow().to_pylist()
    assert {row["id"]: row["doc"] for row in rows} == {1: '{"a":[1]}', 2: "null", 3: None}


def test_a_polars_date_is_a_date(
    dataset: str,
    stream_writer: DefaultStreamWriter,
    reader: BigQueryReader,
    bigquery: BigQueryResource,
) -> None:
    """Public failure case 52: it became DATETIME."""
    frame = pl.DataFrame({"day": [dt.date(2026, 8, 1), dt.date(2026, 8, 2)]})
    stream_writer.append(frame, f"{dataset}.days")
    with bigquery.get_client() as client:
        assert client.get_table(f"{dataset}.days").schema[0].field_type == "DATE"
    back = reader.read(f"{dataset}.days").to_polars()
    assert back.schema["day"] == pl.Date
    assert back.sort("day").equals(frame)


def test_columns_and_rows_are_chosen_by_the_server(
    dataset: str, stream_writer: DefaultStreamWriter, reader: BigQueryReader
) -> None:
    stream_writer.append(
        pa.table({"id": range(100), "name": [f"n{n}" for n in range(100)], "x": [0.5] * 100}),
        f"{dataset}.t",
    )
    rows = reader.read(f"{dataset}.t", columns=["name", "ID"], where="id >= 90 AND name != 'n95'")
    assert rows.schema.names == ["name", "id"]
    assert sorted(rows.to_arrow()["id"].to_pylist()) == [90, 91, 92, 93, 94, 96, 97, 98, 99]
    [session] = rows.sessions
    assert set(session.source.names) == {"id", "name"}  # "x" never travelled


def test_rows_can_be_taken_in_every_form_and_twice(
    dataset: str, stream_writer: DefaultStreamWriter, reader: BigQueryReader
) -> None:
    stream_writer.append(pa.table({"id": pa.array([1, None, 3])}), f"{dataset}.t")
    rows = reader.read(f"{dataset}.t")
    assert sorted(rows.to_polars()["id"].drop_nulls()) == [1, 3]
    assert str(rows.to_pandas()["id"].dtype) == "int64[pyarrow]"
    assert rows.to_reader().read_all().num_rows == 3
    assert pl.DataFrame(rows).height == 3
    assert sum(batch.num_rows for batch in rows) == 3
    assert pickle.loads(pickle.dumps(rows.sessions)) == rows.sessions


def test_a_read_is_frozen_when_it_is_opened(
    dataset: str, stream_writer: DefaultStreamWriter, reader: BigQueryReader
) -> None:
    stream_writer.append(pa.table({"id": [1]}), f"{dataset}.t")
    rows = reader.read(f"{dataset}.t")
    stream_writer.append(pa.table({"id": [2]}), f"{dataset}.t")
    assert rows.to_arrow()["id"].to_pylist() == [1]


def test_an_empty_table_and_an_empty_append(
    dataset: str, stream_writer: DefaultStreamWriter, reader: BigQueryReader
) -> None:
    empty = pa.table({"id": pa.array([], pa.int64()), "s": pa.array([], pa.string())})
    assert stream_writer.append(empty, f"{dataset}.t").rows == 0
    got = reader.read(f"{dataset}.t").to_arrow()
    assert (got.num_rows, got.schema.names) == (0, ["id", "s"])


def test_rows_of_a_read_go_straight_into_an_append(
    dataset: str, stream_writer: DefaultStreamWriter, reader: BigQueryReader
) -> None:
    many = pa.table({"id": range(20_000), "s": ["x" * 50] * 20_000})
    stream_writer.append(many.to_reader(max_chunksize=5_000), f"{dataset}.a")
    result = stream_writer.append(reader.read(f"{dataset}.a"), f"{dataset}.b")
    assert result.rows == 20_000
    assert sorted(reader.read(f"{dataset}.b").to_arrow()["id"].to_pylist()) == list(range(20_000))


@pytest.mark.parametrize(
    "options",
    [
        TableOptions(TimePartitioning("day", "day", dt.timedelta(days=30000)), clustering=("id",)),
        TableOptions(TimePartitioning("day", "month")),
        TableOptions(TimePartitioning()),
        TableOptions(RangePartitioning("id", 0, 100, 10)),
        TableOptions(primary_key=("id",), clustering=("id", "day")),
        TableOptions(labels={"team": "data"}, description="d", expiration=dt.timedelta(days=9)),
    ],
    ids=["day", "month", "ingestion", "range", "key", "labels"],
)
def test_a_table_is_made_as_asked_and_then_accepted(
    dataset: str,
    stream_writer: DefaultStreamWriter,
    bigquery: BigQueryResource,
    options: TableOptions,
) -> None:
    rows = pa.table({"id": [1], "day": [dt.date(2026, 8, 1)]})
    for _ in range(2):
        stream_writer.append(rows, f"{dataset}.t", options)
    with bigquery.get_client() as client:
        table = client.get_table(f"{dataset}.t")
    assert options.differences(table) == []
    assert tuple(table.clustering_fields or ()) == options.clustering
    assert table.labels == options.labels
    assert table.description == options.description
    assert (table.expires is None) == (options.expiration is None)
    if isinstance(options.partitioning, TimePartitioning) and options.partitioning.expiration:
        assert table.time_partitioning.expiration_ms == 30000 * 86_400_000


@pytest.mark.parametrize(
    ("options", "blame"),
    [
        (TableOptions(TimePartitioning("day")), "partitioned: asked for by day of day.*nothing"),
        (TableOptions(clustering=("id",)), "clustered by: asked for id, the table has none"),
        (TableOptions(primary_key=("id",)), "primary key: asked for id, the table has none"),
    ],
)
def test_a_table_with_another_layout_is_refused(
    dataset: str, stream_writer: DefaultStreamWriter, options: TableOptions, blame: str
) -> None:
    rows = pa.table({"id": [1], "day": [dt.date(2026, 8, 1)]})
    stream_writer.append(rows, f"{dataset}.t")
    with pytest.raises(TableMismatchError, match=blame):
        stream_writer.append(rows, f"{dataset}.t", options)


def test_creation_is_a_choice(dataset: str, bigquery: BigQueryResource) -> None:
    rows = pa.table({"id": [1]})
    never = DefaultStreamWriter(bigquery=bigquery, create_table=False)
    with pytest.raises(TableNotFoundError, match=f"{dataset}.t does not exist. create_table=False"):
        never.append(rows, f"{dataset}.t")
    missing = f"{dataset}_missing"
    writer = DefaultStreamWriter(bigquery=bigquery)
    remedy = f"dataset .*{missing}.*--location={bigquery.location} .*create_dataset=True"
    with pytest.raises(DatasetNotFoundError, match=remedy):
        writer.append(rows, f"{missing}.t")
    opted_in = DefaultStreamWriter(bigquery=bigquery, create_dataset=True)
    assert opted_in.append(rows, f"{missing}.t").rows == 1


def test_bad_rows_are_named_and_the_others_are_written(
    dataset: str,
    stream_writer: DefaultStreamWriter,
    reader: BigQueryReader,
    bigquery: BigQueryResource,
) -> None:
    with bigquery.get_client() as client:
        client.query_and_wait(f"CREATE TABLE {dataset}.t (id INT64 NOT NULL, n NUMERIC)")
    rows = pa.table(
        {
            "id": pa.array([1, None, 3, 2**63], pa.uint64()),
            "n": pa.array([Decimal(1), Decimal(2), Decimal("1E-10"), Decimal(4)]),
        }
    )
    with pytest.raises(FailedRowsError) as caught:
        stream_writer.append(rows, f"{dataset}.t")
    failed = {row.index: (row.column, row.reason) for row in caught.value.rows}
    assert set(failed) == {1, 2, 3}
    assert failed[1] == ("id", "null in 'id', which is REQUIRED: give it a value")
    assert failed[2][0] == "n"
    assert failed[3][0] == "id"
    assert caught.value.written == 1
    assert reader.read(f"{dataset}.t").to_arrow()["id"].to_pylist() == [1]


def test_of_pieces_that_do_not_all_fit_a_note_says_what_is_there(
    dataset: str, stream_writer: DefaultStreamWriter, reader: BigQueryReader
) -> None:
    table = f"{dataset}.t"
    with pytest.raises(SchemaError, match=r"The 2 row.s. before it fit") as caught:
        stream_writer.append([pa.table({"n": [1, 2]}), pa.table({"n": ["x"]})], table)
    [note] = caught.value.__notes__
    assert re.search(
        r"2 row.s. of this append were acknowledged|2 more were sent, and may be", note
    )
    assert reader.read(table).to_arrow().num_rows in (0, 2)


def test_a_row_too_large_for_a_request_is_named_among_good_ones(
    dataset: str, stream_writer: DefaultStreamWriter, reader: BigQueryReader
) -> None:
    rows = pa.table({"id": [1, 2, 3], "s": ["a", "b" * 11_000_000, "c"]})
    with pytest.raises(FailedRowsError, match=r"row 1: it takes 11,0.*FileLoadsWriter"):
        stream_writer.append(rows, f"{dataset}.t")
    assert sorted(reader.read(f"{dataset}.t").to_arrow()["id"].to_pylist()) == [1, 3]


def test_what_cannot_be_read_is_named(
    dataset: str,
    stream_writer: DefaultStreamWriter,
    reader: BigQueryReader,
    bigquery: BigQueryResource,
) -> None:
    stream_writer.append(pa.table({"id": [1], "s": pa.array([{"a": 1}])}), f"{dataset}.t")
    with pytest.raises(TableNotFoundError, match=f"{dataset}.nope"):
        reader.read(f"{dataset}.nope")
    with pytest.raises(SchemaError, match="no column 'zz'; it has id, s"):
        reader.read(f"{dataset}.t", columns=["id", "zz"])
    with pytest.raises(RefusedError, match="cannot be read where zz = 1: "):
        reader.read(f"{dataset}.t", where="zz = 1")
    with pytest.raises(InvalidNameError, match="'a/b'"):
        reader.read(f"{dataset}.a/b")
    with pytest.raises(UnsupportedError, match="one partition"):
        reader.read(f"{dataset}.t$20260801")
    with bigquery.get_client() as client:
        client.query_and_wait(f"CREATE VIEW {dataset}.v AS SELECT 1 AS x")
    with pytest.raises(UnsupportedError, match="is a VIEW"):
        reader.read(f"{dataset}.v")


def test_what_the_default_stream_cannot_do_is_refused_before_it_writes(
    dataset: str, stream_writer: DefaultStreamWriter, bigquery: BigQueryResource
) -> None:
    rows = pa.table({"id": [1], "day": [dt.date(2026, 8, 1)]})
    for attempt in (
        lambda: stream_writer.replace(rows, f"{dataset}.t"),
        lambda: stream_writer.append(rows, f"{dataset}.t$20260801"),
        lambda: stream_writer.append(rows, DailyTable(f"{dataset}.t").for_keys(["2026-08-01"])),
    ):
        with pytest.raises(UnsupportedError, match="FileLoadsWriter"):
            attempt()
    with bigquery.get_client() as client:
        assert list(client.list_tables(dataset)) == []


def test_a_column_that_the_table_lacks(
    dataset: str, stream_writer: DefaultStreamWriter, reader: BigQueryReader
) -> None:
    stream_writer.append(pa.table({"id": [1]}), f"{dataset}.t")
    with pytest.raises(SchemaError, match="no column 'more'"):
        stream_writer.append(pa.table({"id": [2], "more": [1]}), f"{dataset}.t")
    assert reader.read(f"{dataset}.t").to_arrow().num_rows == 1


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.local_only("it needs endpoints that lead nowhere")
def test_a_server_that_is_not_there(fields: dict[str, Any], dataset: str) -> None:
    """Both halves: REST, which is asked first, and the Storage API behind a REST that works."""
    nowhere = f"http://127.0.0.1:{free_port()}"
    rows = pa.table({"id": [1]})
    short = fields | {"deadline_seconds": 2}
    endpoints = {name: nowhere for name in fields if name.endswith("endpoint")}
    gone = BigQueryResource(**(short | endpoints))
    for attempt in (
        lambda: DefaultStreamWriter(bigquery=gone).append(rows, f"{dataset}.t"),
        lambda: BigQueryReader(bigquery=gone).read(f"{dataset}.t"),
    ):
        with pytest.raises(UnreachableError, match=f"{dataset}.t: no success within the deadline"):
            attempt()
    half = BigQueryResource(**(short | {"storage_endpoint": nowhere}))
    with pytest.raises(UnreachableError, match="t: nothing was acknowledged within the deadline"):
        DefaultStreamWriter(bigquery=half).append(rows, f"{dataset}.t")
    with pytest.raises(UnreachableError, match=f"Reading .*{dataset}.t"):
        BigQueryReader(bigquery=half).read(f"{dataset}.t")


def test_iteration_can_be_left_early(
    dataset: str, stream_writer: DefaultStreamWriter, reader: BigQueryReader
) -> None:
    stream_writer.append(pa.table({"id": range(5000)}), f"{dataset}.t")
    batches = iter(reader.read(f"{dataset}.t"))
    assert next(batches).num_rows > 0
    del batches
    gc.collect()
    deadline = time.monotonic() + 20
    while [thread for thread in threading.enumerate() if thread.name == "read-stream"]:
        assert time.monotonic() < deadline, "a reader stayed"
        time.sleep(0.01)
    assert reader.read(f"{dataset}.t").to_arrow().num_rows == 5000


def test_data_without_a_type_of_its_own_fits_a_table_that_is_there(
    dataset: str, stream_writer: DefaultStreamWriter, reader: BigQueryReader
) -> None:
    """A column of nulls only, or an empty pandas frame, says nothing about its types."""
    stream_writer.append(pa.table({"id": [1], "s": ["x"]}), f"{dataset}.t")
    stream_writer.append(pa.table({"id": [2], "s": pa.nulls(1)}), f"{dataset}.t")
    empty = pd.DataFrame({"id": [], "s": []}, dtype=object)
    assert stream_writer.append(empty, f"{dataset}.t").rows == 0
    rows = reader.read(f"{dataset}.t").to_arrow().to_pylist()
    assert sorted(rows, key=str) == [{"id": 1, "s": "x"}, {"id": 2, "s": None}]


def test_declared_limits_are_kept(
    dataset: str, stream_writer: DefaultStreamWriter, bigquery: BigQueryResource
) -> None:
    with bigquery.get_client() as client:
        client.query_and_wait(f"CREATE TABLE {dataset}.t (n NUMERIC(10, 2), s STRING(2))")
    rows = pa.table({"n": [Decimal("1.25"), Decimal("1.239")], "s": ["ab", "abc"]})
    with pytest.raises(FailedRowsError, match=r"NUMERIC\(10, 2\)") as caught:
        stream_writer.append(rows, f"{dataset}.t")
    assert [row.index for row in caught.value.rows] == [1]


def test_misuse_is_named(
    dataset: str,
    stream_writer: DefaultStreamWriter,
    reader: BigQueryReader,
    bigquery: BigQueryResource,
) -> None:
    daily = DailyTable(f"{dataset}.t", column="day")
    rows = pa.table({"id": [1]})
    stream_writer.append(rows, f"{dataset}.t")
    for wrong in (daily, None, rows):
        with pytest.raises(InvalidNameError, match="is no table: pass 'dataset.table'"):
            reader.read(wrong)
        with pytest.raises(InvalidNameError, match="is no table: pass 'dataset.table'"):
            stream_writer.append(rows, wrong)
    with pytest.raises(ConfigurationError, match="options is dict: pass TableOptions"):
        stream_writer.append(rows, f"{dataset}.t", {"clustering": ["id"]})
    with pytest.raises(ConfigurationError, match="write a tuple of column names"):
        TableOptions(clustering="id")
    with pytest.raises(ConfigurationError, match="it is a TimePartitioning or"):
        TableOptions(partitioning="day")
    with pytest.raises(ConfigurationError, match="granularity='week'"):
        TimePartitioning("day", "week")
    with pytest.raises(SchemaError, match="write a list of column names"):
        reader.read(f"{dataset}.t", columns="id")
    with pytest.raises(UnsupportedError, match="where is DailyTable: write SQL"):
        reader.read(f"{dataset}.t", where=daily)
    with bigquery.get_client() as client, pytest.raises(ConfigurationError, match="bigquery is "):
        BigQueryReader(bigquery=client).read(f"{dataset}.t")
