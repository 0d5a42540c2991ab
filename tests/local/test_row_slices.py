"""Slices of rows are replaced by staging and one transaction, and read by their filters."""

import datetime as dt
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest

from dagster_bq_connector import (
    BigQueryReader,
    BigQueryResource,
    DailyTable,
    DefaultStreamWriter,
    FileLoadsWriter,
    TableOptions,
    TableRef,
    TimePartitioning,
)
from dagster_bq_connector.errors import (
    PartitionError,
    RefusedError,
    UnsupportedError,
)
from dagster_bq_connector.table.row_slice import KeyFilter, RowSlice
from dagster_bq_connector.table.slice import INGESTION_TIME, TimeFilter
from support.slices import content, days, regions, rows_of, tables

BERLIN = "Europe/Berlin"
DAYS = ["2026-08-01", "2026-08-02", "2026-08-03"]


def test_keys_are_replaced_and_others_stay(
    dataset: str,
    project: str,
    load_writer: FileLoadsWriter,
    reader: BigQueryReader,
    bigquery: BigQueryResource,
) -> None:
    name = f"{dataset}.t"
    options = TableOptions(clustering=("region",))
    first = rows_of(("de", 1), ("at", 2), ("de", 3))
    made = load_writer.replace(first, regions(name, "de", "at", "ch", options=options))
    assert made.partitions == {"de": 2, "at": 1, "ch": 0}
    assert (made.rows, made.operation, len(made.jobs)) == (3, "replace", 2)
    assert made.table == TableRef(dataset, "t", project)
    assert load_writer.replace(rows_of(("de", 9)), regions(name, "de")).partitions == {"de": 1}
    assert content(reader, name) == [("at", 2), ("de", 9)]
    assert content(reader, regions(name, "de")) == [("de", 9)]
    assert content(reader, regions(name, "de", "at"), where="n < 5", columns=["n"]) == [(2,)]
    assert tables(bigquery, dataset) == ["t"]
    with bigquery.get_client() as client:
        assert client.get_table(name).clustering_fields == ["region"]


def test_a_slice_without_rows_is_emptied(
    dataset: str, load_writer: FileLoadsWriter, reader: BigQueryReader
) -> None:
    name = f"{dataset}.t"
    load_writer.replace(rows_of(("de", 1), ("at", 2)), name)
    nothing = rows_of(("de", 1)).slice(0, 0)
    assert load_writer.replace(nothing, regions(name, "de", "ch")).partitions == {"de": 0, "ch": 0}
    assert content(reader, name) == [("at", 2)]


@pytest.mark.parametrize("column", ["region", "LOWER(region)"])
@pytest.mark.parametrize("region", ["fr", None])
def test_a_row_of_no_part_is_named_before_anything_changes(
    dataset: str,
    load_writer: FileLoadsWriter,
    reader: BigQueryReader,
    bigquery: BigQueryResource,
    column: str,
    region: str | None,
) -> None:
    name = f"{dataset}.t"
    load_writer.replace(rows_of(("de", 1)), name)
    rows = rows_of(("de", 2), ("de", 3), (region, 4), (region, 5))
    text = rf"Row 2 belongs to another partition: '{column}' is {region or 'null'}.*No row was"
    for write in (load_writer.replace, load_writer.append):
        with pytest.raises(PartitionError, match=text.replace("(", r"\(").replace(")", r"\)")):
            write(rows, regions(name, "de", column=column))
    assert content(reader, name) == [("de", 1)]
    assert tables(bigquery, dataset) == ["t"]


def test_keys_that_do_not_fit_the_column(
    dataset: str, load_writer: FileLoadsWriter, reader: BigQueryReader
) -> None:
    name = f"{dataset}.t"
    load_writer.replace(rows_of(("de", 1)), name)
    with pytest.raises(PartitionError, match="key 'de' is no INTEGER, which column 'n' is"):
        load_writer.replace(rows_of(("de", 1)), regions(name, "de", column="n"))
    with pytest.raises(
        PartitionError, match="'nowhere' is neither a column of .*Unrecognized name"
    ):
        load_writer.replace(rows_of(("de", 1)), regions(name, "de", column="nowhere"))
    with pytest.raises(PartitionError, match="'nowhere' is neither a column"):
        reader.read(regions(name, "de", column="nowhere"))
    assert content(reader, name) == [("de", 1)]


def test_append_adds_what_belongs_to_the_slice(
    dataset: str, load_writer: FileLoadsWriter, reader: BigQueryReader
) -> None:
    """Of columns by a load job alone; of an expression through a staging table."""
    name = f"{dataset}.t"
    load_writer.replace(rows_of(("de", 1)), name)
    added = load_writer.append(rows_of(("de", 2)), regions(name, "de"))
    assert (added.operation, added.partitions, len(added.jobs)) == ("append", {"de": 1}, 1)
    checked = load_writer.append(rows_of(("dE", 3)), regions(name, "DE", column="UPPER(region)"))
    assert (checked.partitions, len(checked.jobs)) == ({"DE": 1}, 2)
    assert content(reader, name) == [("dE", 3), ("de", 1), ("de", 2)]


def test_a_stray_row_that_follows_streamed_batches_says_how_many_were_written(
    dataset: str,
    stream_writer: DefaultStreamWriter,
    load_writer: FileLoadsWriter,
    reader: BigQueryReader,
) -> None:
    name = f"{dataset}.t"
    pieces = [rows_of(("de", 1), ("de", 2)), rows_of(("de", 3)), rows_of(("de", 4), ("it", 5))]
    text = (
        r"Row 4 belongs to another .* the operation writes de of .* partition\. 3 row\(s\) of the"
    )
    with pytest.raises(PartitionError, match=text):
        stream_writer.append(iter(pieces), regions(name, "de"))
    assert content(reader, name) == [("de", 1), ("de", 2), ("de", 3)]
    for write in (load_writer.append, load_writer.replace):
        with pytest.raises(PartitionError, match=r"Row 4 .* partition\. No row was written\.$"):
            write(iter(pieces), regions(name, "de"))
    assert content(reader, name) == [("de", 1), ("de", 2), ("de", 3)]


def test_the_rows_of_a_slice_are_checked_before_they_are_streamed(
    dataset: str, stream_writer: DefaultStreamWriter, reader: BigQueryReader
) -> None:
    name = f"{dataset}.t"
    result = stream_writer.append(rows_of(("de", 1), ("de", 2)), regions(name, "de", "fr"))
    assert result.partitions == {"de": 2, "fr": 0}
    stray = rows_of(("de", 3), ("it", 4))
    with pytest.raises(PartitionError, match="Row 1 belongs to") as caught:
        stream_writer.append(stray, regions(name, "de", "fr"))
    assert str(caught.value).endswith("No row was written.")
    assert content(reader, name) == [("de", 1), ("de", 2)]
    by_expression = RowSlice.by_keys(name, "UPPER(region)", ["DE"])
    with pytest.raises(UnsupportedError, match="'UPPER\\(region\\)' is no column"):
        stream_writer.append(rows_of(("de", 5)), by_expression)


KINDS = {
    "DATE": pa.date32(),
    "DATETIME": pa.timestamp("us"),
    "TIMESTAMP": pa.timestamp("us", "UTC"),
    "INT64": pa.int64(),
    "STRING": pa.string(),
}


def moments_as(kind: str, moments: list[dt.datetime]) -> Any:
    """What a column of each type holds of moments in a zone."""
    if kind == "TIMESTAMP":
        return pa.array([moment.astimezone(dt.UTC) for moment in moments], KINDS[kind])
    if kind == "DATETIME":
        return pa.array([moment.replace(tzinfo=None) for moment in moments], KINDS[kind])
    dates = [moment.date() for moment in moments]
    if kind == "DATE":
        return pa.array(dates, KINDS[kind])
    texts = [date.isoformat() for date in dates]
    return pa.array(
        [int(text.replace("-", "")) for text in texts] if kind == "INT64" else texts, KINDS[kind]
    )


@pytest.mark.parametrize("zone", ["UTC", BERLIN])
@pytest.mark.parametrize("kind", KINDS)
def test_days_in_a_column_of_any_type(
    dataset: str, load_writer: FileLoadsWriter, reader: BigQueryReader, kind: str, zone: str
) -> None:
    """Public failure case 51: the literal follows the column, and the zone is honoured."""
    name, clocks = f"{dataset}.t", ZoneInfo(zone)
    edges = [dt.datetime(2026, 8, day, hour, tzinfo=clocks) for day in (1, 2) for hour in (0, 23)]
    rows = pa.table({"c": moments_as(kind, edges), "n": [1, 2, 3, 4]})
    both = days(name, "c", *DAYS[:2], zone=zone)
    assert load_writer.replace(rows, both).partitions == {DAYS[0]: 2, DAYS[1]: 2}
    second = days(name, "c", DAYS[1], zone=zone)
    new = pa.table({"c": moments_as(kind, edges[2:3]), "n": [5]})
    assert load_writer.replace(new, second).partitions == {DAYS[1]: 1}
    assert sorted(reader.read(name).to_arrow()["n"].to_pylist()) == [1, 2, 5]
    assert reader.read(second).to_arrow()["n"].to_pylist() == [5]
    first = reader.read(days(name, "c", DAYS[0], zone=zone)).to_arrow()
    assert sorted(first["n"].to_pylist()) == [1, 2]
    with pytest.raises(PartitionError, match="Row 0 belongs to another partition: 'c' is"):
        load_writer.replace(pa.table({"c": moments_as(kind, edges[:1]), "n": [9]}), second)


def test_an_hour_is_no_date(
    dataset: str, load_writer: FileLoadsWriter, reader: BigQueryReader
) -> None:
    name = f"{dataset}.t"
    rows = pa.table({"c": [dt.date(2026, 8, 1)]})
    load_writer.replace(rows, name)
    hour = DailyTable(name, column="c", granularity="hour").for_keys(["2026-08-01-13:00"])
    slice_ = RowSlice(TableRef.parse(name), (("2026-08-01-13:00", (hour.filter,)),))
    for use in (reader.read, lambda found: load_writer.replace(rows, found)):
        with pytest.raises(PartitionError, match="'c' is a DATE, which cannot be compared"):
            use(slice_)


def test_days_of_an_expression(
    dataset: str, load_writer: FileLoadsWriter, reader: BigQueryReader
) -> None:
    name, expression = f"{dataset}.t", "TIMESTAMP_SECONDS(ts)"
    midnight = int(dt.datetime(2026, 8, 1, tzinfo=ZoneInfo(BERLIN)).timestamp())
    rows = pa.table({"ts": [midnight, midnight + 86_399, midnight + 86_400], "n": [1, 2, 3]})
    both = days(name, expression, *DAYS[:2], zone=BERLIN)
    assert load_writer.replace(rows, both).partitions == {DAYS[0]: 2, DAYS[1]: 1}
    first = days(name, expression, DAYS[0], zone=BERLIN)
    load_writer.replace(rows.slice(1, 1), first)
    assert sorted(reader.read(name).to_arrow()["n"].to_pylist()) == [2, 3]
    assert reader.read(first).to_arrow()["n"].to_pylist() == [2]
    with pytest.raises(
        PartitionError, match=r"Row 2 .*TIMESTAMP_SECONDS\(ts\)' is 2026-08-01 22:00"
    ):
        load_writer.replace(rows, first)


def test_parts_of_days_and_regions(
    dataset: str, load_writer: FileLoadsWriter, reader: BigQueryReader
) -> None:
    name = f"{dataset}.t"
    daily = DailyTable(name, column="day")

    def grid(*keys: tuple[str, str]) -> RowSlice:
        parts = tuple(
            (f"{day}|{region}", (daily.for_keys([day]).filter, KeyFilter("region", (region,))))
            for day, region in keys
        )
        return RowSlice(TableRef.parse(name), parts)

    cells = [(day, region) for day in DAYS[:2] for region in ("de", "at")]
    rows = pa.table(
        {
            "day": [dt.date.fromisoformat(day) for day, _ in cells],
            "region": [region for _, region in cells],
            "n": range(4),
        }
    )
    assert load_writer.replace(rows, grid(*cells)).partitions == {f"{d}|{r}": 1 for d, r in cells}
    diagonal = grid(cells[0], cells[3])
    load_writer.replace(rows.slice(3), diagonal)
    assert sorted(reader.read(name).to_arrow()["n"].to_pylist()) == [1, 2, 3]
    assert reader.read(diagonal).to_arrow()["n"].to_pylist() == [3]
    with pytest.raises(PartitionError, match="'day' is 2026-08-01, 'region' is at"):
        load_writer.replace(rows.slice(1, 1), diagonal)


@pytest.mark.parametrize("column", ["region", "LOWER(region)", "day"])
def test_a_table_that_requires_a_partition_filter(
    dataset: str,
    load_writer: FileLoadsWriter,
    reader: BigQueryReader,
    bigquery: BigQueryResource,
    column: str,
) -> None:
    """Public failure case 55: replacing, reading and counting with a usable predicate."""
    name = f"{dataset}.t"
    options = TableOptions(TimePartitioning("day"), require_partition_filter=True)
    days_ = [dt.date(2026, 8, 1), None]
    old = pa.table({"region": ["de", "at"], "day": pa.array(days_, pa.date32()), "n": [1, 2]})
    load_writer.replace(old, name, options)
    slice_ = regions(name, "de", column=column)
    if column == "day":
        slice_ = days(name, "day", DAYS[0])
    new = old.slice(0, 1).set_column(2, "n", pa.array([3]))
    assert list(load_writer.replace(new, slice_).partitions.values()) == [1]
    assert reader.read(slice_).to_arrow()["n"].to_pylist() == [3]
    assert reader.read(slice_, where="n > 3").to_arrow().num_rows == 0
    with bigquery.get_client() as client:
        count = f"SELECT n FROM {name} WHERE day IS NULL OR day IS NOT NULL ORDER BY n"
        assert [row[0] for row in client.query_and_wait(count)] == [2, 3]


def test_a_filter_beside_partitions(
    dataset: str, load_writer: FileLoadsWriter, reader: BigQueryReader
) -> None:
    name = f"{dataset}.t"
    daily = DailyTable(name, column="day")
    rows = pa.table({"day": [dt.date.fromisoformat(day) for day in DAYS], "n": [1, 2, 3]})
    load_writer.replace(rows, daily.for_keys(DAYS))
    some = reader.read(daily.for_keys(DAYS[:2]), where="n > 1 OR n < 0", columns=["n"])
    assert some.to_arrow()["n"].to_pylist() == [2]
    commented = reader.read(daily.for_keys(DAYS[:2]), where="n > 1 -- not the first")
    assert commented.to_arrow()["n"].to_pylist() == [2]
    window = daily.for_keys([DAYS[1]]).filter
    numbers = regions(name, "1", "2", column="n")
    assert reader.read(numbers, where=window).to_arrow()["n"].to_pylist() == [2]
    with pytest.raises(UnsupportedError, match="where is int"):
        reader.read(numbers, where=1)  # type: ignore[arg-type]
    with pytest.raises(RefusedError):
        reader.read(numbers, where="n > (")


def test_windows_of_the_time_of_ingestion(
    dataset: str, load_writer: FileLoadsWriter, reader: BigQueryReader
) -> None:
    """They can be read. To write them is the work of partitions."""
    name = f"{dataset}.t"
    daily = DailyTable(name)
    load_writer.replace(pa.table({"n": [1]}), daily.for_keys([DAYS[0]]))
    load_writer.replace(pa.table({"n": [2]}), daily.for_keys([DAYS[1]]))
    slice_ = RowSlice(TableRef.parse(name), ((DAYS[1], (daily.for_keys([DAYS[1]]).filter,)),))
    assert isinstance(slice_.parts[0][1][0], TimeFilter)
    assert slice_.parts[0][1][0].column == INGESTION_TIME
    assert reader.read(slice_).to_arrow()["n"].to_pylist() == [2]
    assert reader.read(daily.for_keys(DAYS[:1]), where="n = 1").to_arrow().num_rows == 1
    with pytest.raises(
        UnsupportedError, match="rows are given their time of ingestion by BigQuery"
    ):
        load_writer.replace(pa.table({"n": [3]}), slice_)
    load_writer.replace(pa.table({"n": [4]}), regions(name, "4", "1", column="n"))
    assert sorted(reader.read(name).to_arrow()["n"].to_pylist()) == [2, 4]
