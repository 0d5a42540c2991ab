"""A long append is seen checkpoint by checkpoint, and goes on where it was left."""

import datetime as dt
import threading
from typing import Any

import pyarrow as pa
import pytest
from google.api_core.exceptions import NotFound
from google.cloud import bigquery as google

from dagster_bq_connector import BigQueryReader, BigQueryResource, ExactlyOnceWriter
from dagster_bq_connector.errors import (
    ConfigurationError,
    FailedRowsError,
    LedgerError,
    RefusedError,
    SchemaError,
    UnknownOutcomeError,
    UnsupportedError,
    WriteKeyError,
)
from dagster_bq_connector.ledger import BigQueryLedger, Key
from dagster_bq_connector.write import steps
from dagster_bq_connector.write.streams import Streams


@pytest.fixture
def writer(bigquery: BigQueryResource, dataset: str) -> ExactlyOnceWriter:
    return ExactlyOnceWriter(bigquery=bigquery, ledger=f"{dataset}_ledger")


def rows_of(*numbers: int) -> pa.Table:
    return pa.table({"n": pa.array(numbers, pa.int64())})


def numbers(reader: BigQueryReader, table: str) -> list[int]:
    return sorted(reader.read(table).to_arrow()["n"].to_pylist())


def test_rows_are_seen_after_each_checkpoint(
    dataset: str, writer: ExactlyOnceWriter, reader: BigQueryReader
) -> None:
    name = f"{dataset}.t"
    with writer.open(name, key=f"{dataset} k") as write:
        assert (write.position, write.done) == (None, False)
        write.append(rows_of(1, 2))
        assert numbers(reader, name) == []
        write.checkpoint({"page": 1})
        assert numbers(reader, name) == [1, 2]
        assert write.position == {"page": 1}
        write.append([rows_of(3), rows_of(4)])
        write.append(rows_of())
    assert numbers(reader, name) == [1, 2, 3, 4]
    assert (write.result.rows, write.result.replayed) == (4, False)
    assert write.result.to_metadata()["dagster/row_count"] == 4


def test_what_cannot_be_streamed_is_refused_before_the_first_row(
    dataset: str, bigquery: BigQueryResource, writer: ExactlyOnceWriter
) -> None:
    with pytest.raises(UnsupportedError, match=r"append to .*\.t, or write .* FileLoadsWriter"):
        writer.open(f"{dataset}.t$20260801", key=f"{dataset} k")
    many = ExactlyOnceWriter(bigquery=bigquery, ledger=writer.ledger, connections=1_000)
    with pytest.raises(ConfigurationError, match="connections=1000"):
        many.open(f"{dataset}.t", key=f"{dataset} k")
    with bigquery.get_client() as client, pytest.raises(NotFound):
        client.get_dataset(writer.ledger)


def test_a_ledger_is_made_where_the_table_is(
    dataset: str, fields: dict[str, Any], bigquery: BigQueryResource
) -> None:
    with bigquery.get_client() as client:
        there = google.Dataset(f"{client.project}.{dataset}_eu")
        there.location = "EU"
        client.create_dataset(there)
        anywhere = BigQueryResource(**{**fields, "location": None})
        ledger = f"{dataset}_ledger"
        writer = ExactlyOnceWriter(bigquery=anywhere, ledger=ledger)
        with writer.open(f"{dataset}_eu.t", key=f"{dataset} k") as write:
            write.append(rows_of(1))
        assert client.get_dataset(ledger).location == "EU"


def test_each_append_may_have_its_columns_in_another_order(
    dataset: str, writer: ExactlyOnceWriter, reader: BigQueryReader
) -> None:
    name = f"{dataset}.t"
    with writer.open(name, key=f"{dataset} k") as write:
        write.append(pa.table({"a": [1], "b": [2], "text": ["x"]}))
        write.append(pa.table({"text": ["y"], "B": [4], "a": [3]}))
        write.append(pa.table({"b": [6]}))
    rows = reader.read(name).to_arrow().sort_by("b").to_pylist()
    assert [(row["a"], row["b"], row["text"]) for row in rows] == [
        (1, 2, "x"),
        (3, 4, "y"),
        (None, 6, None),
    ]


def test_a_closed_write_is_a_replay(
    dataset: str, writer: ExactlyOnceWriter, reader: BigQueryReader
) -> None:
    name = f"{dataset}.t"
    with writer.open(name, key=f"{dataset} k") as write:
        write.append(rows_of(1))
        write.checkpoint(1)
    with writer.open(name, key=f"{dataset} k") as again:
        assert (again.done, again.position) == (True, 1)
        with pytest.raises(RefusedError, match="is closed"):
            again.append(rows_of(2))
    assert (again.result.rows, again.result.replayed) == (1, True)
    assert "dagster/column_schema" in write.result.to_metadata()
    assert "dagster/column_schema" not in again.result.to_metadata()  # else it would be of none
    assert numbers(reader, name) == [1]


def test_an_error_leaves_it_open_for_the_next_attempt(
    dataset: str, writer: ExactlyOnceWriter, reader: BigQueryReader
) -> None:
    name = f"{dataset}.t"

    def fail() -> None:
        with writer.open(name, key=f"{dataset} k") as write:
            write.append(rows_of(1, 2))
            write.checkpoint(2)
            write.append(rows_of(3, 4))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert numbers(reader, name) == [1, 2]
    with writer.open(name, key=f"{dataset} k") as write:
        assert write.position == 2
        write.append(rows_of(3))
        write.checkpoint(3)
    assert numbers(reader, name) == [1, 2, 3]
    assert write.result.rows == 3


def test_who_comes_second_takes_over(
    dataset: str, writer: ExactlyOnceWriter, reader: BigQueryReader
) -> None:
    name = f"{dataset}.t"
    first = writer.open(name, key=f"{dataset} k")
    first.append(rows_of(1))
    first.checkpoint(1)
    first.append(rows_of(2))
    second = writer.open(name, key=f"{dataset} k")
    assert second.position == 1
    with pytest.raises(WriteKeyError, match="taken it over"):
        first.checkpoint(2)
    first.abandon()
    second.append(rows_of(2, 3))
    second.close()
    second.close()
    assert numbers(reader, name) == [1, 2, 3]


def test_rows_for_a_stream_that_another_attempt_has_ended(
    dataset: str, writer: ExactlyOnceWriter, reader: BigQueryReader
) -> None:
    """They were sent too late; the error says that the write was taken over, not how it showed."""
    name = f"{dataset}.t"
    first = writer.open(name, key=f"{dataset} k")
    first.append(rows_of(1))
    first.checkpoint(1)
    with writer.open(name, key=f"{dataset} k") as second:
        first.append(rows_of(2))
        with pytest.raises(WriteKeyError, match="taken it over"):
            first.checkpoint(2)
        second.append(rows_of(2))
    with pytest.raises(RefusedError, match="broken"):
        first.append(rows_of(3))
    first.abandon()
    assert numbers(reader, name) == [1, 2]


@pytest.mark.parametrize(
    ("closing", "last"),
    [
        (True, "flush stream"),
        (True, "close"),
        (True, "finalize stream"),
        (False, "flush stream"),
        (False, "settle"),
        (False, "finalize stream"),
    ],
)
def test_a_stream_that_was_ended_is_not_flushed_again(
    dataset: str,
    writer: ExactlyOnceWriter,
    reader: BigQueryReader,
    monkeypatch: pytest.MonkeyPatch,
    closing: bool,
    last: str,
) -> None:
    """Users of other clients report INVALID_ARGUMENT for that. A process dies after each step."""
    finalize, flush, ended = Streams.finalize, Streams.flush, set[str]()

    def note(self: Streams, name: str) -> int:
        ended.add(name)
        return finalize(self, name)

    def refuse(self: Streams, name: str, *more: Any) -> None:
        assert name not in ended
        flush(self, name, *more)

    def die(step: str, over: bool) -> None:
        if over and step == last:
            raise KeyboardInterrupt

    monkeypatch.setattr(Streams, "finalize", note)
    monkeypatch.setattr(Streams, "flush", refuse)
    name, key = f"{dataset}.t", f"{dataset} k"
    write = writer.open(name, key=key)
    write.append(rows_of(1))
    write.checkpoint(1)
    write.append(rows_of(2))
    monkeypatch.setattr(steps, "_observers", [*steps._observers, die])
    with pytest.raises(KeyboardInterrupt):
        write.close() if closing else writer.open(name, key=key)
    steps._observers.remove(die)
    write.abandon()
    with writer.open(name, key=key) as again:
        assert (again.done, again.position) == (closing, 1)
    assert writer.open(name, key=key).done
    assert numbers(reader, name) == ([1, 2] if closing else [1])


def test_a_write_that_cannot_be_closed_ends_its_call(
    dataset: str, writer: ExactlyOnceWriter
) -> None:
    def calls() -> set[threading.Thread]:
        return {each for each in threading.enumerate() if each.name.startswith("append-rows")}

    name, before = f"{dataset}.t", calls()

    def overtaken() -> None:
        with writer.open(name, key=f"{dataset} k") as write:
            write.append(rows_of(1))
            write.checkpoint(1)
            writer.open(name, key=f"{dataset} k")

    with pytest.raises(WriteKeyError, match="taken it over"):
        overtaken()
    assert calls() <= before


def test_positions_are_what_the_next_attempt_reads(
    dataset: str, writer: ExactlyOnceWriter, reader: BigQueryReader
) -> None:
    name, key = f"{dataset}.t", f"{dataset} k"
    write = writer.open(name, key=key)
    for position in (object(), {1}, dt.datetime(2026, 8, 1), float("nan"), b"x"):
        with pytest.raises(LedgerError, match="position of a checkpoint is no JSON.*isoformat"):
            write.checkpoint(position)
    write.append(rows_of(1))
    with pytest.raises(LedgerError, match="keep the ledger in Cloud Storage"):
        write.checkpoint("x" * 20_000)
    offsets: dict[int, Any] = {7: (1, 2)}
    write.checkpoint(offsets)
    offsets[7] = (3, 4)
    assert write.position == {"7": [1, 2]}
    write.close()
    assert writer.open(name, key=key).position == {"7": [1, 2]}
    with pytest.raises(RefusedError, match="is closed, and its key is used up"):
        write.append(rows_of(2))
    assert numbers(reader, name) == [1]


def test_a_bad_row_breaks_the_write_and_is_named(
    dataset: str, writer: ExactlyOnceWriter, reader: BigQueryReader
) -> None:
    name = f"{dataset}.t"
    write = writer.open(name, key=f"{dataset} k")
    write.append(rows_of(1, 2))
    write.checkpoint(2)
    bad = pa.table({"n": pa.array([3, 2**70], pa.decimal128(30, 0))})
    with pytest.raises(FailedRowsError, match="2 row.s. were.* open the write again") as caught:
        write.append(bad)
    assert ([row.index for row in caught.value.rows], caught.value.written) == ([3], 2)
    with pytest.raises(RefusedError, match="broken"):
        write.checkpoint(4)
    write.abandon()
    with writer.open(name, key=f"{dataset} k") as again, pytest.raises(SchemaError):
        again.append(pa.table({"other": [1]}))
    assert numbers(reader, name) == [1, 2]


def test_a_key_of_another_write_is_refused(dataset: str, writer: ExactlyOnceWriter) -> None:
    writer.append(rows_of(1), f"{dataset}.t", key=f"{dataset} k")
    with pytest.raises(WriteKeyError, match="was used already"):
        writer.open(f"{dataset}.t", key=f"{dataset} k")
    with pytest.raises(WriteKeyError, match='pass key="..."'):
        writer.open(f"{dataset}.t")


def test_a_recorded_stream_that_is_gone_is_not_guessed(
    dataset: str, writer: ExactlyOnceWriter, bigquery: BigQueryResource, project: str
) -> None:
    with writer.open(f"{dataset}.t", key=f"{dataset} k") as write:
        write.append(rows_of(1))
        write.checkpoint(1)
        write.append(rows_of(2))
        write.abandon()
    connected = bigquery.connect()
    ledger = BigQueryLedger(connected.rest, project, f"{dataset}_ledger", "US", False, 30)
    entry = ledger.get(Key("write", f"key {dataset} k"))
    assert entry is not None
    gone: dict[str, Any] = {"stream": f"{entry.value['stream']}gone"}
    ledger.compare_and_set(entry, {**entry.value, **gone})
    with pytest.raises(UnknownOutcomeError, match="cannot be known.*1 rows up to position 1"):
        writer.open(f"{dataset}.t", key=f"{dataset} k")
