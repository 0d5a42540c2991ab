"""The first write of an asset: how its table is laid out, and what is left when it is refused."""

import datetime as dt
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest
from google.cloud import bigquery as google

from dagster_bq_connector import (
    BigQueryIOManager,
    BigQueryReader,
    BigQueryResource,
    DailyTable,
    DefaultStreamWriter,
    FileLoadsWriter,
)
from dagster_bq_connector.errors import ConfigurationError, PartitionError, UnsupportedError
from support.slices import content, tables


def write(
    io_manager: BigQueryIOManager,
    rows: pa.Table,
    definition: dg.PartitionsDefinition[Any],
    key: str,
    expression: Any,
) -> None:
    """Materialize one partition of the asset `t`."""

    @dg.asset(partitions_def=definition, metadata={"partition_expr": expression})
    def t() -> pa.Table:
        return rows

    dg.materialize([t], resources={"io_manager": io_manager}, partition_key=key)


def layout(bigquery: BigQueryResource, table: str) -> google.TimePartitioning | None:
    with bigquery.get_client() as client:
        return client.get_table(table).time_partitioning


@pytest.mark.parametrize(
    ("key", "hour", "minute"),
    [("2026-03-29-01:00", 0, 5), ("2026-03-29-03:00", 1, 5)],
)
def test_the_hours_around_a_change_of_clocks_are_partitions(
    key: str,
    hour: int,
    minute: int,
    dataset: str,
    load_writer: FileLoadsWriter,
    bigquery: BigQueryResource,
) -> None:
    """The definition decides the layout: the hour before the change is two long by the clock."""
    io_manager = BigQueryIOManager(writer=load_writer, dataset=dataset)
    at = dt.datetime(2026, 3, 29, hour, minute, tzinfo=dt.UTC)
    hourly = dg.HourlyPartitionsDefinition("2026-03-29-00:00", timezone="Europe/Berlin")
    rows = pa.table({"at": pa.array([at], pa.timestamp("us", "UTC"))})
    write(io_manager, rows, hourly, key, "at")
    found = layout(bigquery, f"{dataset}.t")
    assert found is not None
    assert (found.field, found.type_) == ("at", "HOUR")


DAY = dt.date(2026, 8, 1)
DAILY = dg.DailyPartitionsDefinition("2026-08-01", end_date="2026-08-05")
KEYS = dg.StaticPartitionsDefinition(["x", "y"])
ROWS = pa.table(
    {
        "day": [DAY],
        "days": [[DAY]],
        "at": pa.array([dt.datetime(2026, 8, 1, 3)], pa.timestamp("us")),
        "clock": [dt.time(1)],
        "f": [1.5],
        "n": [1],
        "raw": [b"x"],
        "select": ["x"],
        "s": [{"day": DAY, "names": ["x"], "f": 1.5}],
    }
)


@pytest.mark.parametrize(
    ("definition", "expression", "text"),
    [
        (DAILY, "dya", "'dya' is neither a column of"),
        (DAILY, "DATE(dya)", "neither a column of .* nor an expression"),
        (DAILY, "MAX(day)", "'MAX\\(day\\)' is neither"),
        (DAILY, "FIRST_VALUE(day) OVER (ORDER BY n)", "is neither"),
        (DAILY, "s.names", "'s.names' of .* is an array"),
        (DAILY, "s.f", "'s.f' is FLOAT; a window of time needs"),
        (DAILY, "days", "'days' of .* is an array"),
        (DAILY, "f", "'f' is FLOAT; a window of time needs"),
        (DAILY, "clock", "'clock' is TIME; a window of time needs"),
        (KEYS, "f", "'f' is FLOAT, which is not compared with partition keys"),
        (KEYS, "raw", "'raw' is BYTES, which is not compared with partition keys"),
        (KEYS, "n", "'x' is no INTEGER"),
        (KEYS, "n + 1", "'x' is no INTEGER"),
    ],
)
def test_a_first_write_that_is_refused_makes_no_table(
    definition: dg.PartitionsDefinition[Any],
    expression: str,
    text: str,
    dataset: str,
    load_writer: FileLoadsWriter,
    stream_writer: DefaultStreamWriter,
    bigquery: BigQueryResource,
) -> None:
    """Otherwise its table would be of a layout that nobody asked for, for good."""
    key = definition.get_partition_keys()[0]
    replacing = BigQueryIOManager(writer=load_writer, dataset=dataset)
    appending = BigQueryIOManager(writer=load_writer, dataset=dataset, mode="append")
    streaming = BigQueryIOManager(writer=stream_writer, dataset=dataset, mode="append")
    for io_manager in (replacing, appending):
        with pytest.raises(PartitionError, match=text):
            write(io_manager, ROWS, definition, key, expression)
    with pytest.raises((PartitionError, UnsupportedError)):
        write(streaming, ROWS, definition, key, expression)
    assert tables(bigquery, dataset) == []


@pytest.mark.parametrize("expression", ["", " ", {"": "day"}])
def test_an_asset_that_does_not_say_its_column_makes_no_table(
    expression: Any, dataset: str, load_writer: FileLoadsWriter, bigquery: BigQueryResource
) -> None:
    io_manager = BigQueryIOManager(writer=load_writer, dataset=dataset)
    with pytest.raises(ConfigurationError, match='"partition_expr": "created_at"'):
        write(io_manager, ROWS, DAILY, "2026-08-01", expression)
    assert tables(bigquery, dataset) == []


def test_a_misspelt_column_that_is_mended(
    dataset: str, load_writer: FileLoadsWriter, bigquery: BigQueryResource
) -> None:
    io_manager = BigQueryIOManager(writer=load_writer, dataset=dataset)
    with pytest.raises(PartitionError, match="dya"):
        write(io_manager, ROWS, DAILY, "2026-08-01", "dya")
    write(io_manager, ROWS, DAILY, "2026-08-01", "day")
    found = layout(bigquery, f"{dataset}.t")
    assert found is not None
    assert (found.field, found.type_) == ("day", "DAY")


@pytest.mark.parametrize("expression", ["DATE(at)", "s.day", "days[SAFE_OFFSET(0)]"])
def test_an_expression_over_the_columns_of_a_new_table(
    expression: str, dataset: str, load_writer: FileLoadsWriter, reader: BigQueryReader
) -> None:
    io_manager = BigQueryIOManager(writer=load_writer, dataset=dataset)
    write(io_manager, ROWS, DAILY, "2026-08-01", expression)
    assert content(reader, f"{dataset}.t", columns=["n"]) == [(1,)]


@pytest.mark.parametrize("day", [dt.date(2026, 8, 2), None])
def test_a_stray_row_of_a_first_write_leaves_at_most_an_empty_table_of_the_right_layout(
    day: dt.date | None,
    dataset: str,
    load_writer: FileLoadsWriter,
    reader: BigQueryReader,
    bigquery: BigQueryResource,
) -> None:
    io_manager = BigQueryIOManager(writer=load_writer, dataset=dataset)
    with pytest.raises(PartitionError, match=r"Row 1 belongs to .* No row was written\.$"):
        write(io_manager, pa.table({"day": [DAY, day]}), DAILY, "2026-08-01", "day")
    found = layout(bigquery, f"{dataset}.t")
    assert found is not None
    assert (found.field, found.type_) == ("day", "DAY")
    assert content(reader, f"{dataset}.t") == []


@pytest.mark.parametrize("shape", ["partitioned", "sharded"])
@pytest.mark.parametrize(
    ("column", "text"),
    [("dya", "has no column 'dya'"), ("f", "'f' of .* is FLOAT"), ("days", "is an array")],
)
def test_a_daily_table_of_a_column_that_is_no_time(
    shape: Any,
    column: str,
    text: str,
    dataset: str,
    load_writer: FileLoadsWriter,
    bigquery: BigQueryResource,
) -> None:
    daily = DailyTable(f"{dataset}.t", column=column, layout=shape)
    with pytest.raises(PartitionError, match=text):
        load_writer.replace(ROWS, daily.for_keys(["2026-08-01", "2026-08-02"]))
    assert tables(bigquery, dataset) == []
