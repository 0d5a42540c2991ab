"""Columns that no load job takes from Parquet: by a staging table, in every way of writing."""

import datetime as dt
from typing import Any

import pyarrow as pa
import pytest
from google.cloud import bigquery as google

from dagster_bq_connector import (
    BigQueryReader,
    BigQueryResource,
    DailyTable,
    FileLoadsWriter,
    TableOptions,
    TableRef,
    TimePartitioning,
)
from dagster_bq_connector.errors import FailedRowsError, PartitionError, RefusedError
from dagster_bq_connector.table.row_slice import KeyFilter, RowSlice

DOCUMENTS = ['{"a":1}', "null", None, '"x"']
DAYS = ["2026-08-01", "2026-08-02"]


def documents(*texts: str | None, days: list[str] | None = None) -> pa.Table:
    table = pa.table({"n": range(len(texts)), "doc": pa.array(texts, pa.json_())})
    if days is None:
        return table
    dates = [dt.date.fromisoformat(day) for day in days]
    return table.append_column("day", pa.array(dates, pa.date32()))


def select(bigquery: BigQueryResource, sql: str) -> list[tuple[Any, ...]]:
    with bigquery.get_client() as client:
        return [tuple(row) for row in client.query_and_wait(sql)]


def stored(bigquery: BigQueryResource, table: str) -> list[tuple[Any, ...]]:
    """Number, document as text, and whether it is NULL: JSON's own null is none."""
    sql = f"SELECT n, IF(doc IS NULL, NULL, TO_JSON_STRING(doc)), doc IS NULL FROM {table}"
    return select(bigquery, f"{sql} ORDER BY n, 2")


def create(bigquery: BigQueryResource, table: str, *columns: google.SchemaField) -> None:
    with bigquery.get_client() as client:
        client.create_table(google.Table(f"{client.project}.{table}", schema=list(columns)))


def test_json_of_a_whole_table(
    dataset: str, load_writer: FileLoadsWriter, bigquery: BigQueryResource
) -> None:
    """Public failure case 42: JSON's null is not NULL, and the way is chosen by itself."""
    name = f"{dataset}.t"
    expected = [(0, '{"a":1}', False), (1, "null", False), (2, None, True), (3, '"x"', False)]
    result = load_writer.append(documents(*DOCUMENTS), name)
    assert (result.rows, result.partitions, len(result.jobs)) == (4, {}, 2)
    assert stored(bigquery, name) == expected
    with bigquery.get_client() as client:
        assert client.get_table(name).schema[1].field_type == "JSON"
        assert [table.table_id for table in client.list_tables(dataset)] == ["t"]
    load_writer.append(documents("[]"), name)
    assert len(stored(bigquery, name)) == 5
    load_writer.replace(documents("[2.5]"), name)
    assert stored(bigquery, name) == [(0, "[2.5]", False)]
    load_writer.replace(documents("1").slice(1), name)
    assert stored(bigquery, name) == []


def test_json_of_partitions(
    dataset: str, load_writer: FileLoadsWriter, bigquery: BigQueryResource
) -> None:
    """Several partitions change by one transaction; the way by the address does the same."""
    name = f"{dataset}.t"
    daily = DailyTable(name, column="day")
    both = load_writer.replace(documents("1", "2", days=DAYS), daily.for_keys(DAYS))
    assert both.partitions == dict.fromkeys(DAYS, 1)
    assert load_writer.replace(documents("3", days=DAYS[1:]), daily.for_keys(DAYS[1:])).rows == 1
    load_writer.replace(documents("4", days=DAYS[:1]), f"{name}$20260801")
    load_writer.append(documents("5", days=DAYS[:1]), f"{name}$20260801")
    assert [row[1] for row in stored(bigquery, name)] == ["3", "4", "5"]
    for table in (daily.for_keys(DAYS[:1]), f"{name}$20260801"):
        with pytest.raises(PartitionError, match="Row 1 belongs to another partition"):
            load_writer.replace(documents("6", "7", days=DAYS), table)
    assert len(stored(bigquery, name)) == 3
    ingested = DailyTable(f"{dataset}.u")
    load_writer.replace(documents("1"), ingested.for_keys(DAYS[:1]))
    load_writer.replace(documents("2"), ingested.for_keys(DAYS[1:]))
    load_writer.replace(documents("3"), f"{dataset}.u$20260801")
    assert sorted(row[1] for row in stored(bigquery, f"{dataset}.u")) == ["2", "3"]


def test_json_of_shards_and_of_slices(
    dataset: str, load_writer: FileLoadsWriter, bigquery: BigQueryResource
) -> None:
    sharded = DailyTable(f"{dataset}.s", column="day", layout="sharded")
    result = load_writer.replace(documents("1", "2", days=DAYS), sharded.for_keys(DAYS))
    assert result.partitions == dict.fromkeys(DAYS, 1)
    load_writer.replace(documents("3", days=DAYS[1:]), sharded.for_keys(DAYS[1:]))
    found = [stored(bigquery, f"{dataset}.s_{day.replace('-', '')}")[0][1] for day in DAYS]
    assert found == ["1", "3"]
    name = f"{dataset}.t"
    load_writer.append(documents("1", "2"), name)
    slice_ = RowSlice(TableRef.parse(name), (("0", (KeyFilter("n", ("0",)),)),))
    assert load_writer.replace(documents("9"), slice_).partitions == {"0": 1}
    assert load_writer.append(documents("8"), slice_).partitions == {"0": 1}
    assert [row[1] for row in stored(bigquery, name)] == ["8", "9", "2"]


@pytest.mark.parametrize("nested", [False, True])
def test_json_that_is_none_is_named(
    dataset: str, load_writer: FileLoadsWriter, bigquery: BigQueryResource, nested: bool
) -> None:
    name = f"{dataset}.t"
    json = google.SchemaField("doc", "JSON", "REPEATED" if nested else "NULLABLE")
    create(bigquery, name, google.SchemaField("n", "INT64"), json)
    texts = ["1", None, "{", "}"]
    values: list[Any] = [[text, "2"] if text else [] for text in texts] if nested else texts
    rows = pa.table({"n": range(4), "doc": values})
    with pytest.raises(FailedRowsError) as caught:
        load_writer.append(rows, name)
    [failed] = caught.value.rows
    assert (failed.index, failed.column, caught.value.written) == (2, "doc", 0)
    assert failed.reason.startswith("no JSON that BigQuery takes: ")
    assert select(bigquery, f"SELECT COUNT(*) FROM {name}") == [(0,)]
    with bigquery.get_client() as client:
        assert [table.table_id for table in client.list_tables(dataset)] == ["t"]


def test_ranges_intervals_and_what_is_nested(
    dataset: str, load_writer: FileLoadsWriter, bigquery: BigQueryResource
) -> None:
    name, json = f"{dataset}.t", google.SchemaField("doc", "JSON")
    inner = google.SchemaField("inner", "RECORD", "REPEATED", fields=[json])
    create(
        bigquery,
        name,
        google.SchemaField("n", "INT64", "REQUIRED"),
        google.SchemaField("dates", "RANGE", range_element_type="DATE"),
        google.SchemaField("span", "INTERVAL"),
        google.SchemaField("outer", "RECORD", fields=[json, inner]),
        google.SchemaField("place", "GEOGRAPHY"),
        google.SchemaField("price", "NUMERIC", precision=5, scale=2),
    )
    day = dt.date(2026, 8, 1)
    span = pa.struct([("start", pa.date32()), ("end", pa.date32())])
    rows = pa.table(
        {
            "n": [1, 2, 3],
            "dates": pa.array(
                [{"start": day, "end": None}, None, {"start": None, "end": day}], span
            ),
            "span": pa.array(
                [(14, 3, 4_005_006_000_000), None, (0, 0, 0)], pa.month_day_nano_interval()
            ),
            "outer": [
                {"doc": "1", "inner": [{"doc": "null"}, {"doc": None}]},
                None,
                {"doc": "null", "inner": []},
            ],
            "place": ["POINT(1 2)", None, "POINT(3 4)"],
            "price": pa.array(["1.25", None, "-2"]).cast(pa.decimal128(5, 2)),
        }
    )
    load_writer.append(rows, name)
    columns = (
        "RANGE_START(dates), RANGE_END(dates), dates IS NULL, "
        "span = CAST('1-2 3 1:6:45.006' AS INTERVAL), span IS NULL, "
        "TO_JSON_STRING(`outer`), `outer` IS NULL, ST_ASTEXT(place), price = NUMERIC '1.25'"
    )
    nested = '{"doc":1,"inner":[{"doc":null},{"doc":null}]}'
    assert select(bigquery, f"SELECT {columns} FROM {name} ORDER BY n") == [
        (day, None, False, True, False, nested, False, "POINT(1 2)", True),
        (None, None, True, None, True, "null", True, None, None),
        (None, day, False, False, False, '{"doc":null,"inner":[]}', False, "POINT(3 4)", False),
    ]
    nulls = "SELECT COUNTIF(`outer`.doc IS NULL), COUNTIF(i.doc IS NULL)"
    assert select(bigquery, f"{nulls} FROM {name}, UNNEST(`outer`.inner) AS i") == [(0, 1)]
    backwards = pa.table({"n": [4], "dates": pa.array([{"start": day, "end": day}], span)})
    with pytest.raises(FailedRowsError, match="row 0, column 'dates'"):
        load_writer.append(backwards, name)


def test_geography_needs_no_staging_table(
    dataset: str, load_writer: FileLoadsWriter, reader: BigQueryReader, bigquery: BigQueryResource
) -> None:
    name = f"{dataset}.t"
    create(
        bigquery, name, google.SchemaField("place", "GEOGRAPHY"), google.SchemaField("at", "TIME")
    )
    rows = pa.table({"place": ["POINT(1 2)", None], "at": [dt.time(1, 2, 3, 4), None]})
    assert len(load_writer.replace(rows, name).jobs) == 1
    assert reader.read(name).to_arrow().to_pylist() == rows.to_pylist()


def test_a_shard_that_fails_among_others(
    dataset: str,
    load_writer: FileLoadsWriter,
    bigquery: BigQueryResource,
) -> None:
    """Each shard changes at once; the error says which have."""
    sharded = DailyTable(f"{dataset}.s", column="day", layout="sharded")
    good = documents("1", "2", days=DAYS)
    load_writer.replace(good, sharded.for_keys(DAYS))
    bad = documents("3", "{", days=DAYS)
    with pytest.raises(RefusedError, match="Only 2026-08-01 were written, of 2 partitions or tab"):
        load_writer.replace(bad, sharded.for_keys(DAYS))
    found = [stored(bigquery, f"{dataset}.s_{day.replace('-', '')}")[0][1] for day in DAYS]
    assert found == ["3", "2"]
    with bigquery.get_client() as client:
        assert len(list(client.list_tables(dataset))) == 2


def test_json_of_a_table_that_requires_a_partition_filter(
    dataset: str, load_writer: FileLoadsWriter, bigquery: BigQueryResource
) -> None:
    """Public failure case 55: the whole of it too."""
    name = f"{dataset}.t"
    options = TableOptions(TimePartitioning("day"), require_partition_filter=True)
    load_writer.replace(documents("1", days=DAYS[:1]), name, options)
    load_writer.replace(documents("2", days=DAYS[1:]), name)
    assert [row[1] for row in stored(bigquery, f"{name} WHERE day IS NULL OR day IS NOT NULL")] == [
        "2"
    ]
