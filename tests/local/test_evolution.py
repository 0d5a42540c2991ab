"""Columns that a table lacks: an error that says what to do, or added when that is allowed."""

import datetime as dt
import threading

import pyarrow as pa
import pytest
from google.api_core import exceptions as api
from google.cloud import bigquery as google

from dagster_bq_connector import (
    BigQueryReader,
    BigQueryResource,
    DailyTable,
    DefaultStreamWriter,
    FileLoadsWriter,
    TableOptions,
    TableRef,
)
from dagster_bq_connector.errors import (
    AccessDeniedError,
    PartitionError,
    SchemaError,
    TableMismatchError,
)
from dagster_bq_connector.table.row_slice import KeyFilter, RowSlice
from dagster_bq_connector.table.slice import TableSlice, TimeFilter

ADD = TableOptions(evolution="add")
DAY = dt.date(2026, 8, 1)
OLD = pa.table({"n": [1], "day": [DAY]})
NEW = pa.table({"more": ["x"], "n": [2], "day": [DAY], "s": [{"a": 1}]})


def modes(bigquery: BigQueryResource, table: str) -> dict[str, str]:
    with bigquery.get_client() as client:
        return {field.name: field.mode for field in client.get_table(table).schema}


def rows(reader: BigQueryReader, table: str) -> list[dict[str, object]]:
    return sorted(reader.read(table).to_arrow().to_pylist(), key=lambda row: str(row["n"]))


def test_a_column_that_the_table_lacks_is_an_error_that_says_what_to_do(
    dataset: str, load_writer: FileLoadsWriter, bigquery: BigQueryResource
) -> None:
    """Public failure case 54: never half a write, never another schema by surprise."""
    name = f"{dataset}.t"
    load_writer.replace(OLD, name)
    for write in (load_writer.replace, load_writer.append):
        with pytest.raises(
            SchemaError, match=r"no column 'more', 's': .*TableOptions\(evolution='a"
        ):
            write(NEW, name)
    assert list(modes(bigquery, name)) == ["n", "day"]


def test_a_replaced_table_gets_the_column(
    dataset: str, load_writer: FileLoadsWriter, reader: BigQueryReader, bigquery: BigQueryResource
) -> None:
    """Public failure case 54: the second run adds a column."""
    name = f"{dataset}.t"
    required = pa.schema([pa.field("n", pa.int64(), nullable=False), pa.field("day", pa.date32())])
    load_writer.replace(OLD.cast(required), name)
    load_writer.replace(NEW, name, ADD)
    assert modes(bigquery, name) == {
        "n": "REQUIRED",
        "day": "NULLABLE",
        "more": "NULLABLE",
        "s": "NULLABLE",
    }
    assert rows(reader, name) == [{"n": 2, "day": DAY, "more": "x", "s": {"a": 1}}]
    deeper = pa.table({"n": [3], "s": [{"A": 2, "b": "y"}]})
    load_writer.append(deeper, name, ADD)
    assert rows(reader, name)[1] == {"n": 3, "day": None, "more": None, "s": {"a": 2, "b": "y"}}
    load_writer.replace(OLD, name)  # less than the table has is no reason to change it
    assert rows(reader, name) == [{"n": 1, "day": DAY, "more": None, "s": None}]


def test_partitions_and_slices_get_the_column_too(
    dataset: str, load_writer: FileLoadsWriter, reader: BigQueryReader
) -> None:
    name = f"{dataset}.t"
    daily = DailyTable(name, column="day", options=ADD)
    load_writer.replace(OLD, daily.for_keys(["2026-08-01"]))
    load_writer.replace(NEW.select(["more", "n", "day"]), daily.for_keys(["2026-08-01"]))
    assert rows(reader, name) == [{"n": 2, "day": DAY, "more": "x"}]
    slice_ = RowSlice(TableRef.parse(name), (("2", (KeyFilter("n", ("2",)),)),), ADD)
    load_writer.replace(NEW, slice_)
    assert rows(reader, name) == [{"n": 2, "day": DAY, "more": "x", "s": {"a": 1}}]


def test_streamed_rows_get_the_column(
    dataset: str, stream_writer: DefaultStreamWriter, reader: BigQueryReader
) -> None:
    name = f"{dataset}.t"
    stream_writer.append(OLD, name)
    stream_writer.append(NEW, name, ADD)
    assert rows(reader, name)[1] == {"n": 2, "day": DAY, "more": "x", "s": {"a": 1}}


def test_a_type_is_never_changed(
    dataset: str, load_writer: FileLoadsWriter, bigquery: BigQueryResource
) -> None:
    name = f"{dataset}.t"
    load_writer.replace(OLD, name)
    with pytest.raises(SchemaError, match="'n' is INTEGER and takes no Arrow string"):
        load_writer.replace(pa.table({"n": ["x"]}), name, ADD)
    with pytest.raises(TableMismatchError):
        load_writer.replace(NEW, name, TableOptions(clustering=("n",), evolution="add"))
    assert list(modes(bigquery, name)) == ["n", "day"]


@pytest.mark.parametrize(
    ("rows", "kind", "text"),
    [
        ({"day": [DAY], "n": ["text"]}, SchemaError, "'n' is INTEGER and takes no Arrow string"),
        ({"day": ["2026-08-01"], "n": [1]}, SchemaError, "'day' is DATE and takes no Arrow string"),
        ({"n": [1]}, PartitionError, "lacks the column 'day'"),
    ],
)
@pytest.mark.parametrize("partitioned", [True, False])
def test_data_that_do_not_fit_add_no_column(
    rows: dict[str, list[object]],
    kind: type[Exception],
    text: str,
    partitioned: bool,
    dataset: str,
    load_writer: FileLoadsWriter,
    stream_writer: DefaultStreamWriter,
    bigquery: BigQueryResource,
) -> None:
    name = f"{dataset}.t"
    daily = DailyTable(name, column="day", options=ADD)
    slice_: TableSlice | RowSlice = daily.for_keys(["2026-08-01"])
    if not partitioned:
        filter_ = TimeFilter("day", tuple(window for _, window in slice_.windows))
        slice_ = RowSlice(TableRef.parse(name), (("2026-08-01", (filter_,)),), ADD)
    load_writer.replace(OLD, slice_)
    data = pa.table({**rows, "more": ["x"]})
    for write in (load_writer.replace, load_writer.append, stream_writer.append):
        with pytest.raises(kind, match=text):
            write(data, slice_)
    assert list(modes(bigquery, name)) == ["n", "day"]


@pytest.mark.parametrize(
    ("column", "key"), [("n", "one"), ("N * 2", "one"), ("nothing", "1"), ("UPPER(n)", "1")]
)
def test_a_slice_that_does_not_fit_adds_no_column(
    column: str,
    key: str,
    dataset: str,
    load_writer: FileLoadsWriter,
    bigquery: BigQueryResource,
) -> None:
    name = f"{dataset}.t"
    load_writer.replace(OLD, name)
    for write in (load_writer.replace, load_writer.append):
        with pytest.raises(PartitionError):
            write(NEW, RowSlice.by_keys(name, column, [key], ADD))
    assert list(modes(bigquery, name)) == ["n", "day"]


def test_a_shard_that_does_not_fit_leaves_the_others(
    dataset: str, load_writer: FileLoadsWriter, bigquery: BigQueryResource
) -> None:
    daily = DailyTable(f"{dataset}.t", column="day", layout="sharded", options=ADD)
    load_writer.replace(OLD, daily.for_keys(["2026-08-01"]))
    load_writer.replace(pa.table({"n": ["text"], "day": [DAY]}), f"{dataset}.t_20260802")
    with pytest.raises(SchemaError, match="'n' is STRING and takes no Arrow int64"):
        load_writer.replace(NEW, daily.for_keys(["2026-08-01", "2026-08-02", "2026-08-03"]))
    assert list(modes(bigquery, f"{dataset}.t_20260801")) == ["n", "day"]
    with bigquery.get_client() as client:
        found = sorted(table.table_id for table in client.list_tables(dataset))
    assert found == ["t_20260801", "t_20260802"]


def test_a_column_that_is_new_may_be_in_the_expression(
    dataset: str, load_writer: FileLoadsWriter, reader: BigQueryReader
) -> None:
    name = f"{dataset}.t"
    load_writer.replace(OLD, name)
    load_writer.append(NEW, RowSlice.by_keys(name, "UPPER(more)", ["X"], ADD))
    assert rows(reader, name)[1] == {"n": 2, "day": DAY, "more": "x", "s": {"a": 1}}


def test_two_writers_that_add_columns_at_once(
    dataset: str, load_writer: FileLoadsWriter, bigquery: BigQueryResource
) -> None:
    name = f"{dataset}.t"
    load_writer.replace(OLD, name)
    failures: list[Exception] = []

    def write(number: int) -> None:
        try:
            load_writer.append(pa.table({"n": [number], f"c{number}": [number]}), name, ADD)
        except Exception as error:  # noqa: BLE001  # shown by the assertion below
            failures.append(error)

    threads = [threading.Thread(target=write, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sorted(modes(bigquery, name)) == ["c0", "c1", "c2", "c3", "day", "n"]


def test_an_update_that_another_one_was_before(
    dataset: str,
    load_writer: FileLoadsWriter,
    bigquery: BigQueryResource,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the other one added stays."""
    name = f"{dataset}.t"
    load_writer.replace(OLD, name)
    update, tried = google.Client.update_table, list[list[str]]()

    def beaten(self: google.Client, table: google.Table, *arguments: object, **options: object):
        tried.append([field.name for field in table.schema])
        if len(tried) == 1:
            other = self.get_table(table.reference)
            other.schema = [*other.schema, google.SchemaField("theirs", "STRING")]
            update(self, other, ["schema"])
        return update(self, table, *arguments, **options)

    monkeypatch.setattr(google.Client, "update_table", beaten)
    load_writer.append(NEW, name, ADD)
    assert tried == [["n", "day", "more", "s"], ["n", "day", "theirs", "more", "s"]]
    assert list(modes(bigquery, name)) == ["n", "day", "theirs", "more", "s"]


def test_a_table_that_may_not_be_changed(
    dataset: str, load_writer: FileLoadsWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{dataset}.t"
    load_writer.replace(OLD, name)

    def denied(*_: object, **__: object) -> None:
        raise api.Forbidden("Permission bigquery.tables.update denied")

    monkeypatch.setattr(google.Client, "update_table", denied)
    with pytest.raises(AccessDeniedError, match="bigquery.tables.update"):
        load_writer.append(NEW, name, ADD)
