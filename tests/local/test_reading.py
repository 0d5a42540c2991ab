"""Reads of the local BigQuery: every type, every choice of columns, every refusal, lazy frames."""

import datetime as dt
import threading
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from google.cloud import bigquery as google

from dagster_bq_connector import (
    BigQueryReader,
    BigQueryResource,
    DailyTable,
    DefaultStreamWriter,
    resources,
)
from dagster_bq_connector.errors import (
    PartitionFilterError,
    RefusedError,
    SchemaError,
    TableNotFoundError,
    UnsupportedError,
)
from dagster_bq_connector.read.request import ReadRequest

HARD_TYPES = """
    id INT64 NOT NULL, r RANGE<DATE>, i INTERVAL, t TIME, d DATETIME, j JSON, g GEOGRAPHY,
    b BIGNUMERIC, js ARRAY<JSON>, s STRUCT<j JSON, d DATETIME, b BIGNUMERIC, i INTERVAL>,
    bs ARRAY<BIGNUMERIC>, ss ARRAY<STRUCT<i INTERVAL, r RANGE<TIMESTAMP>>>
"""
HARD_VALUES = """
    1, RANGE(DATE '2026-01-01', NULL), MAKE_INTERVAL(1, 2, 3, 4, 5, 6), TIME '01:02:03.5',
    DATETIME '0001-01-02 03:04:05', JSON '{"a": [1]}', ST_GEOGPOINT(1, 2),
    BIGNUMERIC '12345678901234567890.000000000000000001', [JSON '1', JSON '"x"'],
    STRUCT(JSON 'null', DATETIME '9999-12-31 23:59:59', BIGNUMERIC '-0.5', MAKE_INTERVAL(0, 1)),
    [BIGNUMERIC '1', BIGNUMERIC '2'],
    [STRUCT(MAKE_INTERVAL(0, 0, 1), RANGE(NULL, TIMESTAMP '2027-01-01'))]
"""
LARGE = Decimal("12345678901234567890.000000000000000001")
NANOSECONDS = ((4 * 60 + 5) * 60 + 6) * 10**9
YEAR_2027 = dt.datetime(2027, 1, 1, tzinfo=dt.UTC)
HARD_ROW: dict[str, Any] = {
    "id": 1,
    "r": {"start": dt.date(2026, 1, 1), "end": None},
    "i": pa.MonthDayNano([14, 3, NANOSECONDS]),
    "t": dt.time(1, 2, 3, 500000),
    "d": dt.datetime(1, 1, 2, 3, 4, 5),
    "j": '{"a":[1]}',
    "g": "POINT(1 2)",
    "b": LARGE,
    "js": ["1", '"x"'],
    "s": {
        "j": "null",
        "d": dt.datetime(9999, 12, 31, 23, 59, 59),
        "b": Decimal("-0.5"),
        "i": pa.MonthDayNano([1, 0, 0]),
    },
    "bs": [Decimal(1), Decimal(2)],
    "ss": [{"i": pa.MonthDayNano([0, 1, 0]), "r": {"start": None, "end": YEAR_2027}}],
}
NULL_ROW = dict.fromkeys(HARD_ROW) | {"id": 2, "js": [], "bs": [], "ss": []}


@pytest.fixture
def client(bigquery: BigQueryResource) -> Iterator[google.Client]:
    with bigquery.get_client() as client:
        yield client


@pytest.fixture
def hard(client: google.Client, dataset: str) -> str:
    client.query_and_wait(f"CREATE TABLE {dataset}.hard ({HARD_TYPES})")
    client.query_and_wait(f"INSERT INTO {dataset}.hard SELECT {HARD_VALUES}")
    client.query_and_wait(f"INSERT INTO {dataset}.hard (id) VALUES (2)")
    return f"{dataset}.hard"


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[ReadRequest]:
    """The read sessions that are made."""
    made: list[ReadRequest] = []
    create = resources.create_session

    def noted(client: Any, request: ReadRequest, project: str, deadline: float) -> Any:
        made.append(request)
        return create(client, request, project, deadline)

    monkeypatch.setattr(resources, "create_session", noted)
    return made


def test_hard_types_as_arrow(hard: str, reader: BigQueryReader) -> None:
    rows = reader.read(hard)
    table = rows.to_arrow().sort_by("id")
    assert table.to_pylist() == [HARD_ROW, NULL_ROW]
    assert rows.to_reader().read_all().sort_by("id") == table
    kinds = {field.name: str(field.type) for field in rows.schema}
    assert kinds["b"] == "decimal256(76, 38)"
    assert kinds["i"] == "month_day_nano_interval"
    assert not rows.schema.field("id").nullable


def test_what_a_column_is_in_sql_stays_with_it(hard: str, reader: BigQueryReader) -> None:
    """JSON and GEOGRAPHY are strings to Arrow; for what Arrow says itself there is no need."""
    schema = reader.read(hard).schema
    names = {f.name: (f.metadata or {}).get(b"ARROW:extension:name", b"").decode() for f in schema}
    assert {name for name, kind in names.items() if kind == "google:sqlType:json"} == {"j", "js"}
    assert names["g"] == "google:sqlType:geography"
    assert names["d"] == names["i"] == ""
    inner = schema.field("s").type
    assert inner.field("j").metadata == {b"ARROW:extension:name": b"google:sqlType:json"}
    assert not inner.field("d").metadata


def check_hard_types(frame: pl.DataFrame) -> None:
    interval = pl.Struct({"months": pl.Int32, "days": pl.Int32, "nanoseconds": pl.Int64})
    moment = pl.Datetime("us")
    assert dict(frame.schema) == {
        "id": pl.Int64,
        "r": pl.Struct({"start": pl.Date, "end": pl.Date}),
        "i": interval,
        "t": pl.Time,
        "d": moment,
        "j": pl.String,
        "g": pl.String,
        "b": pl.String,
        "js": pl.List(pl.String),
        "s": pl.Struct({"j": pl.String, "d": moment, "b": pl.String, "i": interval}),
        "bs": pl.List(pl.String),
        "ss": pl.List(
            pl.Struct(
                {
                    "i": interval,
                    "r": pl.Struct(dict.fromkeys(["start", "end"], pl.Datetime("us", "UTC"))),
                }
            )
        ),
    }
    row, nulls = frame.sort("id").to_dicts()
    assert nulls == NULL_ROW
    assert row["i"] == {"months": 14, "days": 3, "nanoseconds": NANOSECONDS}
    assert row["ss"][0] == {
        "i": {"months": 0, "days": 1, "nanoseconds": 0},
        "r": {"start": None, "end": YEAR_2027},
    }
    assert Decimal(row["b"]) == LARGE
    assert [Decimal(text) for text in row["bs"]] == [1, 2]
    assert Decimal(row["s"]["b"]) == Decimal("-0.5")
    same = ("id", "r", "t", "d", "j", "g", "js")
    assert {name: row[name] for name in same} == {name: HARD_ROW[name] for name in same}
    exact = frame.select(pl.col("b").cast(pl.Decimal(38, 18))).drop_nulls()
    assert exact.item() == LARGE


def test_hard_types_as_polars(hard: str, reader: BigQueryReader) -> None:
    """Polars has no BIGNUMERIC and no INTERVAL, and would make a type of its own of a DATETIME."""
    check_hard_types(reader.read(hard).to_polars())


def test_hard_types_of_a_lazy_frame(hard: str, reader: BigQueryReader) -> None:
    frame = reader.scan(hard)
    promised = frame.collect_schema()
    check_hard_types(frame.collect())
    assert frame.collect().schema == promised


def test_others_get_plain_types_over_the_c_stream(hard: str, reader: BigQueryReader) -> None:
    rows = reader.read(hard, columns=["id", "d", "j", "g", "js", "t"])
    kinds = pl.DataFrame(rows).schema
    assert list(kinds.values()) == [
        pl.Int64,
        pl.Datetime("us"),
        pl.String,
        pl.String,
        pl.List(pl.String),
        pl.Time,
    ]


def test_hard_types_as_pandas(hard: str, reader: BigQueryReader) -> None:
    frame = reader.read(hard).to_pandas().sort_values("id", ignore_index=True)
    assert "DateOffset" in repr(frame)  # pandas cannot show Arrow's own intervals
    row = frame.iloc[0]
    assert row["b"] == LARGE
    assert row["i"] == pd.DateOffset(months=14, days=3, nanoseconds=NANOSECONDS)
    assert row["r"] == HARD_ROW["r"]
    assert row["t"] == HARD_ROW["t"]
    assert row["d"] == HARD_ROW["d"]
    assert frame["j"].dtype == pd.ArrowDtype(pa.string())
    assert frame["i"].isna().tolist() == [False, True]


def test_json_and_geography_stay_what_they_are_in_a_copy(
    client: google.Client,
    dataset: str,
    reader: BigQueryReader,
    stream_writer: DefaultStreamWriter,
) -> None:
    client.query_and_wait(
        f"CREATE TABLE {dataset}.a (id INT64 NOT NULL, j JSON, js ARRAY<JSON>, g GEOGRAPHY, "
        "s STRUCT<j JSON>, d DATETIME, text STRING)"
    )
    client.query_and_wait(
        f"INSERT INTO {dataset}.a SELECT 1, JSON '[1]', [JSON '2'], ST_GEOGPOINT(1, 2), "
        "STRUCT(JSON '3'), DATETIME '2026-01-01 00:00:00', '4'"
    )
    rows = reader.read(f"{dataset}.a")
    stream_writer.append(rows, f"{dataset}.b")
    stream_writer.append(rows.to_arrow(), f"{dataset}.c")
    first = client.get_table(f"{dataset}.a").schema
    values = rows.to_arrow().to_pylist()
    for copy in ("b", "c"):
        assert client.get_table(f"{dataset}.{copy}").schema == first
        assert reader.read(f"{dataset}.{copy}").to_arrow().to_pylist() == values


def test_columns_are_found_whatever_their_case_and_come_once(
    client: google.Client, dataset: str, reader: BigQueryReader
) -> None:
    client.query_and_wait(
        f"CREATE TABLE {dataset}.t AS SELECT 1 AS Id, 2 AS `order id`, 3 AS `größe`, "
        "STRUCT(4 AS a, STRUCT(5 AS x, 6 AS y) AS B) AS S, [STRUCT(7 AS p, 8 AS q)] AS l"
    )

    def read(*columns: str) -> dict[str, Any]:
        return reader.read(f"{dataset}.t", columns=list(columns)).to_arrow().to_pylist()[0]

    assert list(read("größe", "ID", "order id").items()) == [
        ("größe", 3),
        ("Id", 1),
        ("order id", 2),
    ]
    assert read("id", "ID", "Id") == {"Id": 1}
    assert read("s.b.Y", "id") == {"S": {"B": {"y": 6}}, "Id": 1}
    assert read("S.a", "s.B.x", "l.q") == {"S": {"a": 4, "B": {"x": 5}}, "l": [{"q": 8}]}
    assert read("s.a", "s", "s.b") == {"S": {"a": 4, "B": {"x": 5, "y": 6}}}
    where = "`order id` = 2 AND s.b.x = 5"
    assert reader.read(f"{dataset}.t", columns=["id"], where=where).to_arrow().num_rows == 1


def test_no_columns_are_rows_that_are_counted(
    client: google.Client,
    dataset: str,
    reader: BigQueryReader,
    sessions: list[ReadRequest],
) -> None:
    client.query_and_wait(
        f"CREATE TABLE {dataset}.t AS SELECT CAST(n AS STRING) AS s, [n] AS l, n AS id, n > 5 AS f "
        "FROM UNNEST(GENERATE_ARRAY(1, 10)) AS n"
    )
    rows = reader.read(f"{dataset}.t", columns=[], where="id > 3")
    assert rows.schema.names == []
    assert sum(batch.num_rows for batch in rows) == 7
    assert rows.to_arrow().num_rows == 7
    assert rows.to_polars().shape == (7, 0)
    assert [frame.shape for frame in rows.iter_polars()] == [(7, 0)]
    assert rows.to_pandas().shape == (7, 0)
    assert [request.selected for request in sessions] == [("f",)]


def test_an_unknown_column_is_named_with_what_may_be_meant(
    client: google.Client, dataset: str, reader: BigQueryReader
) -> None:
    more = ", ".join(f"c{number} INT64" for number in range(40))
    client.query_and_wait(f"CREATE TABLE {dataset}.t (amount INT64, s STRUCT<name STRING>, {more})")
    for given, meant in {"amuont": "amount", "name": "s.name", "s.nane": "s.name"}.items():
        blame = rf"{dataset}.t has no column {given!r} \(did you mean {meant!r}\?\); it has amount,"
        with pytest.raises(SchemaError, match=blame) as caught:
            reader.read(f"{dataset}.t", columns=["c1", given])
        assert str(caught.value).endswith("c27 and 12 more.")
    with pytest.raises(SchemaError, match=r"no column 'zzz'; it has"):
        reader.read(f"{dataset}.t", columns=["zzz"])
    with pytest.raises(SchemaError, match=r"no column 'amount.x'"):
        reader.read(f"{dataset}.t", columns=["amount.x"])


@pytest.mark.parametrize("filter_", ["id = ", "nope = 1", "id = 'x'", "id = 1; SELECT 2"])
def test_a_bad_filter_is_repeated_with_what_bigquery_said(
    client: google.Client, dataset: str, reader: BigQueryReader, filter_: str
) -> None:
    client.query_and_wait(f"CREATE TABLE {dataset}.t AS SELECT 1 AS id")
    with pytest.raises(RefusedError) as caught:
        reader.read(f"{dataset}.t", where=filter_)
    blame, _, said = str(caught.value).partition(f" cannot be read where {filter_}: ")
    assert blame.endswith(f"{dataset}.t")
    assert said
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    ("partitioning", "column", "usable"),
    [
        ("day", "day", "day >= '2026-08-01'"),
        ("RANGE_BUCKET(id, GENERATE_ARRAY(0, 100, 10))", "id", "id < 50"),
        ("_PARTITIONDATE", "_PARTITIONTIME", "_PARTITIONTIME > '2026-01-01'"),
    ],
)
def test_a_table_that_requires_a_partition_filter(
    client: google.Client,
    dataset: str,
    reader: BigQueryReader,
    sessions: list[ReadRequest],
    partitioning: str,
    column: str,
    usable: str,
) -> None:
    """Public failure case 55: reads without a predicate that BigQuery can use."""
    client.query_and_wait(
        f"CREATE TABLE {dataset}.t (id INT64, day DATE, x INT64) PARTITION BY {partitioning} "
        "OPTIONS (require_partition_filter = true)"
    )
    client.query_and_wait(f"INSERT INTO {dataset}.t (id, day, x) VALUES (1, '2026-08-01', 2)")
    blame = f'{dataset}.t can be read only with a filter on {column},.*where="{column} >= ...'
    with pytest.raises(PartitionFilterError, match=blame):
        reader.read(f"{dataset}.t")
    assert sessions == []  # that one is needless is known before
    with pytest.raises(PartitionFilterError, match=f"{blame}.*The filter was 'x = 2'.*said: "):
        reader.read(f"{dataset}.t", columns=["x"], where="x = 2")
    with pytest.raises(PartitionFilterError, match=blame):
        reader.scan(f"{dataset}.t")
    everything = f"{column} IS NULL OR {column} IS NOT NULL"
    for where in (usable, everything):
        assert reader.read(f"{dataset}.t", ["x"], where).to_arrow().to_pylist() == [{"x": 2}]
    assert reader.scan(f"{dataset}.t", where=usable).select("x").collect().rows() == [(2,)]


def test_the_filter_of_a_daily_table_is_one_that_is_required(
    client: google.Client, dataset: str, reader: BigQueryReader
) -> None:
    """Public failure case 55."""
    client.query_and_wait(
        f"CREATE TABLE {dataset}.t (id INT64, day DATE) PARTITION BY day "
        "OPTIONS (require_partition_filter = true)"
    )
    client.query_and_wait(f"INSERT INTO {dataset}.t VALUES (1, '2026-08-01'), (2, '2026-08-02')")
    days = DailyTable(f"{dataset}.t", column="day").for_keys(["2026-08-02"])
    assert reader.read(days).to_arrow()["id"].to_pylist() == [2]
    assert reader.scan(days).select("id").collect().rows() == [(2,)]


@pytest.mark.parametrize("kind", ["VIEW", "MATERIALIZED VIEW"])
def test_a_view_is_not_read(
    client: google.Client, dataset: str, reader: BigQueryReader, kind: str
) -> None:
    client.query_and_wait(f"CREATE TABLE {dataset}.t AS SELECT 1 AS id")
    client.query_and_wait(f"CREATE {kind} {dataset}.v AS SELECT id FROM {dataset}.t")
    for read in (reader.read, reader.scan):
        with pytest.raises(UnsupportedError, match=f"{dataset}.v is a {kind.replace(' ', '_')}"):
            read(f"{dataset}.v")


@pytest.fixture
def numbers(client: google.Client, dataset: str) -> str:
    client.query_and_wait(
        f"CREATE TABLE {dataset}.numbers AS SELECT n AS id, MOD(n, 7) AS k, n > 9 AS f, "
        "CAST(n AS STRING) AS s FROM UNNEST(GENERATE_ARRAY(1, 5000)) AS n"
    )
    return f"{dataset}.numbers"


def test_a_lazy_frame_reads_only_the_columns_of_its_query(
    numbers: str, reader: BigQueryReader, sessions: list[ReadRequest]
) -> None:
    frame = reader.scan(numbers, where="id > 1000")
    assert frame.collect_schema() == {
        "id": pl.Int64,
        "k": pl.Int64,
        "f": pl.Boolean,
        "s": pl.String,
    }
    assert len(sessions) == 1  # for the schema
    queries = {
        ("s",): frame.select("s"),
        ("id", "k"): frame.filter(pl.col("k") == 3).select("id"),
        ("k",): frame.group_by("k").agg(pl.len()),
        ("id",): frame.with_columns(z=pl.col("id") * 2).select("z"),
        ("f",): frame.select(pl.len()),  # the cheapest one, to be counted
        (): frame,
    }
    for columns, query in queries.items():
        del sessions[:]
        for engine in ("in-memory", "streaming"):
            query.collect(engine=engine)
        assert {request.selected for request in sessions} == {columns} or columns == ()
        assert {request.restriction for request in sessions} == {"id > 1000"}
        assert len(sessions) == 2


@pytest.mark.parametrize("engine", ["in-memory", "streaming"])
def test_a_lazy_frame_gives_what_an_eager_one_does(
    numbers: str, reader: BigQueryReader, engine: Any
) -> None:
    lazy, eager = reader.scan(numbers), reader.read(numbers).to_polars().sort("id")
    some = pl.col("k").is_in([1, 2]) & ~pl.col("s").str.ends_with("0")
    assert lazy.sort("id").collect(engine=engine).equals(eager)
    filtered = lazy.filter(some).select("s", "id").sort("id").collect(engine=engine)
    assert filtered.equals(eager.filter(some).select("s", "id"))
    assert lazy.select(pl.len()).collect(engine=engine).item() == 5000
    assert lazy.head(10).collect(engine=engine).height == 10
    assert lazy.filter(some).head(10).collect(engine=engine).height == 10
    assert lazy.head(10).filter(pl.col("id") < 0).collect(engine=engine).height == 0
    pairs = lazy.select("id", "k").join(lazy.select("id", "s"), on="id")
    assert pairs.collect(engine=engine).height == 5000


PLANS: dict[str, Callable[[pl.LazyFrame], pl.LazyFrame]] = {
    "number the rows": lambda frame: frame.with_row_index().select("index"),
    "number some": lambda frame: frame.head(10).with_row_index().select("index"),
    "count up": lambda frame: frame.select(pl.int_range(pl.len())),
    "constants": lambda frame: frame.drop("id", "k", "f", "s").with_columns(x=pl.lit(1)),
    "cross join": lambda frame: frame.join(
        pl.LazyFrame({"z": [1, 2]}), how="cross", maintain_order="left_right"
    ).select("z"),
}


@pytest.mark.parametrize("engine", ["in-memory", "streaming"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_lazy_frame_has_its_rows_when_no_column_is_needed(
    plan: str,
    numbers: str,
    reader: BigQueryReader,
    sessions: list[ReadRequest],
    engine: Any,
) -> None:
    eager = reader.read(numbers).to_polars()
    frame = PLANS[plan](reader.scan(numbers))
    del sessions[:]
    assert frame.collect(engine=engine).equals(PLANS[plan](eager.lazy()).collect())
    assert [request.selected for request in sessions] == [("f",)]


def test_a_lazy_frame_sees_the_table_as_it_is_when_it_is_collected(
    client: google.Client, numbers: str, reader: BigQueryReader
) -> None:
    frame = reader.scan(numbers).select("id")
    assert frame.collect().height == frame.collect().height == 5000
    client.query_and_wait(f"DELETE FROM {numbers} WHERE id > 10")
    assert frame.collect().height == 10
    client.query_and_wait(f"DELETE FROM {numbers} WHERE true")
    empty = frame.collect()
    assert (empty.height, empty.schema) == (0, {"id": pl.Int64})
    client.delete_table(numbers)
    for engine in ("in-memory", "streaming"):
        with pytest.raises(TableNotFoundError, match=numbers):
            frame.collect(engine=engine)
    with pytest.raises(TableNotFoundError, match=numbers):
        reader.scan(numbers)


def test_a_lazy_frame_that_stops_early_leaves_no_thread(
    numbers: str, reader: BigQueryReader
) -> None:
    frame = reader.scan(numbers)
    for engine in ("in-memory", "streaming"):
        assert frame.head(3).collect(engine=engine).height == 3
        assert frame.filter(pl.col("k") == 1).head(3).collect(engine=engine).height == 3
    end = time.monotonic() + 20
    while [thread for thread in threading.enumerate() if thread.name == "read-stream"]:
        assert time.monotonic() < end, "a reader stayed"
        time.sleep(0.01)
