"""Appends and replacements under a write key land once, whichever attempt brings them."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from dagster_bq_connector import (
    BigQueryReader,
    BigQueryResource,
    BigQueryWriter,
    ExactlyOnceWriter,
    FailedRowsError,
    FileLoadsWriter,
)
from dagster_bq_connector.errors import (
    LedgerError,
    SchemaError,
    UnknownOutcomeError,
    UnsupportedError,
    WriteKeyError,
)
from dagster_bq_connector.ledger import BigQueryLedger, Key, Ledger
from dagster_bq_connector.write import own_stream, steps


@pytest.fixture
def ledger_home(dataset: str) -> str:
    return f"{dataset}_ledger"


@pytest.fixture
def once(bigquery: BigQueryResource, ledger_home: str) -> ExactlyOnceWriter:
    return ExactlyOnceWriter(bigquery=bigquery, ledger=ledger_home)


@pytest.fixture
def ledger(bigquery: BigQueryResource, ledger_home: str) -> Ledger:
    connected = bigquery.connect()
    return BigQueryLedger(connected.rest, connected.project, ledger_home, "US", True, 30)


@pytest.fixture(params=["exactly_once", "file_loads"])
def keyed(request: pytest.FixtureRequest) -> BigQueryWriter:
    """The writers that take a key."""
    name = {"exactly_once": "once", "file_loads": "load_writer"}[request.param]
    return request.getfixturevalue(name)


@pytest.fixture
def observed() -> Iterator[Callable[[steps.Observer], None]]:
    """Observes the steps of this test alone."""
    before = list(steps._observers)
    yield steps.observe
    steps._observers[:] = before


def rows_of(*numbers: int) -> pa.Table:
    return pa.table(
        {
            "n": pa.array(numbers, pa.int64()),
            "text": pa.array([f"row {n}" for n in numbers], pa.string()),
        }
    )


def numbers(reader: BigQueryReader, table: str) -> list[int]:
    return sorted(reader.read(table, ["n"]).to_arrow()["n"].to_pylist())


def test_the_same_key_lands_once(
    dataset: str, keyed: BigQueryWriter, reader: BigQueryReader
) -> None:
    name = f"{dataset}.t"
    first = keyed.append(rows_of(1, 2), name, key=f"{dataset} monday")
    again = keyed.append(rows_of(1, 2), name, key=f"{dataset} monday")
    other = keyed.append(rows_of(3), name, key=f"{dataset} tuesday")
    assert [first.replayed, again.replayed, other.replayed] == [False, True, False]
    assert [first.rows, again.rows, other.rows] == [2, 2, 1]
    assert again.to_metadata()["dagster_bq/replayed"] is True
    assert numbers(reader, name) == [1, 2, 3]


def test_a_replay_reads_no_row(dataset: str, keyed: BigQueryWriter, reader: BigQueryReader) -> None:
    """Rows that were read again need not be the same, and need not be read."""
    name = f"{dataset}.t"
    keyed.append(rows_of(1, 2), name, key=f"{dataset} k")

    def broken() -> Iterator[pa.Table]:
        yield rows_of(7)
        raise AssertionError("read on")

    assert keyed.append(broken(), name, key=f"{dataset} k").replayed
    assert numbers(reader, name) == [1, 2]


def test_a_replayed_replacement_leaves_what_came_later(
    dataset: str, keyed: BigQueryWriter, reader: BigQueryReader
) -> None:
    name = f"{dataset}.t"
    keyed.replace(rows_of(1), name, key=f"{dataset} a")
    keyed.replace(rows_of(2), name, key=f"{dataset} b")
    assert keyed.replace(rows_of(1), name, key=f"{dataset} a").replayed
    assert numbers(reader, name) == [2]
    assert not keyed.replace(rows_of(1), name, key=f"{dataset} c").replayed
    assert numbers(reader, name) == [1]


def test_a_key_is_of_one_table_one_operation_and_one_schema(
    dataset: str, keyed: BigQueryWriter, reader: BigQueryReader
) -> None:
    name = f"{dataset}.t"
    keyed.append(rows_of(1), name, key=f"{dataset} k")
    keyed.append(rows_of(1), f"{dataset}.other", key=f"{dataset} other")
    wrong: list[Callable[[], Any]] = [
        lambda: keyed.append(rows_of(2), f"{dataset}.other", key=f"{dataset} k"),
        lambda: keyed.append(rows_of(2).select(["n"]), name, key=f"{dataset} k"),
    ]
    if isinstance(keyed, FileLoadsWriter):  # whose appends and replacements are both proved by jobs
        wrong.append(lambda: keyed.replace(rows_of(2), name, key=f"{dataset} k"))
    for write in wrong:
        with pytest.raises(WriteKeyError, match=f"Write key 'key {dataset} k' was used already"):
            write()
    assert numbers(reader, name) == numbers(reader, f"{dataset}.other") == [1]


def test_without_a_step_exactly_once_asks_for_a_key(dataset: str, once: ExactlyOnceWriter) -> None:
    with pytest.raises(WriteKeyError, match='pass key="..."'):
        once.append(rows_of(1), f"{dataset}.t")
    for key in ("", " ", "\ud800"):
        with pytest.raises(WriteKeyError, match="a write key is a text"):
            once.append(rows_of(1), f"{dataset}.t", key=key)


def test_only_exactly_once_has_checkpoints(
    dataset: str, stream_writer: BigQueryWriter, load_writer: BigQueryWriter
) -> None:
    for writer in (stream_writer, load_writer):
        with pytest.raises(UnsupportedError, match="has no checkpoints: open with ExactlyOnceW"):
            writer.open(f"{dataset}.t", key="k")


def test_the_default_stream_takes_no_key(dataset: str, stream_writer: BigQueryWriter) -> None:
    with pytest.raises(UnsupportedError, match="at least once"):
        stream_writer.append(rows_of(1), f"{dataset}.t", key=f"{dataset} k")


def test_nothing_is_seen_when_a_row_is_bad(
    dataset: str, once: ExactlyOnceWriter, reader: BigQueryReader
) -> None:
    name = f"{dataset}.t"
    once.append(rows_of(1), name, key=f"{dataset} first")
    big = pa.table({"n": pa.array([2, 2**70], pa.decimal128(30, 0)), "text": ["a", "b"]})
    with pytest.raises(FailedRowsError, match="; 0 row.s. were.* write all") as caught:
        once.append(big, name, key=f"{dataset} second")
    assert ([row.index for row in caught.value.rows], caught.value.written) == ([1], 0)
    with pytest.raises(SchemaError):
        once.append(pa.table({"other": [1]}), name, key=f"{dataset} second")
    assert numbers(reader, name) == [1]
    once.append(rows_of(2), name, key=f"{dataset} second")  # a key whose write failed is free
    assert numbers(reader, name) == [1, 2]


def test_no_rows_are_a_write_too(
    dataset: str, keyed: BigQueryWriter, reader: BigQueryReader
) -> None:
    name = f"{dataset}.t"
    assert keyed.append(rows_of(), name, key=f"{dataset} none").rows == 0
    assert keyed.append(rows_of(1), name, key=f"{dataset} none").replayed
    assert numbers(reader, name) == []


def test_a_view_takes_no_rows(
    dataset: str, keyed: BigQueryWriter, stream_writer: BigQueryWriter, bigquery: BigQueryResource
) -> None:
    with bigquery.get_client() as client:
        client.query_and_wait(f"CREATE VIEW {dataset}.v AS SELECT 1 AS n, 'a' AS text")
    for number, write in enumerate([keyed.append, keyed.replace]):
        with pytest.raises(UnsupportedError, match="v is a view: write to a table"):
            write(rows_of(1), f"{dataset}.v", key=f"{dataset} {number}")
    with pytest.raises(UnsupportedError, match="v is a view"):
        stream_writer.append(rows_of(1), f"{dataset}.v")


def test_data_without_columns_empty_nothing(
    dataset: str, keyed: BigQueryWriter, reader: BigQueryReader
) -> None:
    """An empty frame of a source that has failed is no table without rows."""
    table = f"{dataset}.kept"
    keyed.append(rows_of(1), table, key=f"{dataset} rows")
    for number, data in enumerate([pd.DataFrame(), pl.DataFrame(), rows_of(1).select([])]):
        for write in (keyed.replace, keyed.append):
            with pytest.raises(SchemaError, match="The data has no columns"):
                write(data, table, key=f"{write.__name__} {number}")
    assert reader.read(table).to_arrow().num_rows == 1


def test_of_pieces_that_do_not_all_fit_nothing_is_written(
    dataset: str, keyed: BigQueryWriter, reader: BigQueryReader
) -> None:
    """And the error does not say that something may have been."""
    table = f"{dataset}.kept"
    keyed.append(rows_of(1), table, key="rows")
    pieces = [rows_of(2, 3), pa.table({"n": ["x"], "text": ["y"]})]
    with pytest.raises(SchemaError, match=r"takes no Arrow string.* The 2 row.s. before it fit\.$"):
        keyed.append(pieces, table, key=f"{dataset} pieces")
    assert numbers(reader, table) == [1]


def test_several_streams_are_committed_together(
    dataset: str,
    bigquery: BigQueryResource,
    ledger_home: str,
    reader: BigQueryReader,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(own_stream, "PREFERRED_BYTES", 20_000)
    writer = ExactlyOnceWriter(bigquery=bigquery, ledger=ledger_home, connections=4)
    pieces = [rows_of(*range(start, start + 5_000)) for start in range(0, 50_000, 5_000)]
    result = writer.append(pieces, f"{dataset}.t", key=f"{dataset} many")
    assert 1 < len(result.streams) <= 4
    assert numbers(reader, f"{dataset}.t") == list(range(50_000))


def test_a_smaller_limit_is_found_and_nothing_comes_twice(
    dataset: str, once: ExactlyOnceWriter, reader: BigQueryReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that is too large makes a gap before those behind it: all go again, in order."""
    monkeypatch.setattr(own_stream, "REQUEST_LIMIT", 40 * 1024 * 1024)
    monkeypatch.setattr(own_stream, "PREFERRED_BYTES", 12 * 1024 * 1024)
    monkeypatch.setattr(type(once.bigquery.connect().clients), "request_limit", None)
    limits: list[int] = []

    def remember(self: object, size: int) -> None:
        limits.append(size)
        monkeypatch.setattr(own_stream, "REQUEST_LIMIT", size)

    monkeypatch.setattr(type(once.bigquery.connect().clients), "remember_request_limit", remember)
    text = "x" * 1000
    pieces = [
        pa.table({"n": range(start, start + 15_000), "text": [text] * 15_000})
        for start in range(0, 60_000, 15_000)
    ]
    once.append(pieces, f"{dataset}.t", key=f"{dataset} large")
    assert limits
    assert numbers(reader, f"{dataset}.t") == list(range(60_000))


def test_racing_attempts_write_once(
    dataset: str, keyed: BigQueryWriter, reader: BigQueryReader
) -> None:
    name, results, failures = f"{dataset}.t", list[Any](), list[Exception]()
    keyed.append(rows_of(), name, key=f"{dataset} make the table")
    barrier = threading.Barrier(5)

    def attempt() -> None:
        barrier.wait()
        try:
            results.append(keyed.append(rows_of(1, 2, 3), name, key=f"{dataset} race"))
        except Exception as error:  # noqa: BLE001  # shown by the assertion below
            failures.append(error)

    threads = [threading.Thread(target=attempt) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sorted(result.replayed for result in results) == [False, True, True, True, True]
    assert numbers(reader, name) == [1, 2, 3]


def test_a_prepared_write_whose_stream_is_gone_is_not_guessed(
    dataset: str, once: ExactlyOnceWriter, ledger: Ledger, reader: BigQueryReader, project: str
) -> None:
    name = f"{dataset}.t"
    once.append(rows_of(1), name, key=f"{dataset} first")
    entry = ledger.get(Key("write", f"key {dataset} first"))
    assert entry is not None
    gone = f"projects/{project}/datasets/{dataset}/tables/t/streams/gone"
    value = {**entry.value, "state": "prepared", "streams": [gone]}
    ledger.create(Key("write", f"key {dataset} second"), value)
    with pytest.raises(UnknownOutcomeError, match="cannot be known.*Look in the table"):
        once.append(rows_of(1), name, key=f"{dataset} second")
    assert numbers(reader, name) == [1]


def test_an_entry_that_was_set_to_half_a_value_is_named(
    dataset: str, once: ExactlyOnceWriter, ledger: Ledger, reader: BigQueryReader
) -> None:
    name = f"{dataset}.t"
    once.append(rows_of(1), name, key="first")
    once.open(name, key="long").abandon()
    for key, states in (("first", "prepared, committed"), ("long", "open, closing, closed")):
        entry = ledger.get(Key("write", f"key {key}"))
        assert entry is not None
        write = once.open if key == "long" else partial(once.append, rows_of(1))
        half: dict[str, Any] = {name: entry.value[name] for name in ("purpose", "state")}
        for value, blame in (
            ({"state": "committed"}, "lacks purpose, attempt, .*a whole new value"),
            (half, "lacks attempt, stream.*, rows, "),
            ({**entry.value, "state": "Committed"}, f"'Committed', which is none of {states}"),
        ):
            stands = ledger.get(entry.key)
            assert stands is not None
            ledger.compare_and_set(stands, value)
            with pytest.raises(LedgerError, match=f"{entry.key.name} .*{blame}"):
                write(name, key=key)
    assert numbers(reader, name) == [1]


def test_a_prepared_write_is_committed_by_whoever_finds_it(
    dataset: str,
    once: ExactlyOnceWriter,
    reader: BigQueryReader,
    observed: Callable[[steps.Observer], None],
) -> None:
    name = f"{dataset}.t"
    once.append(rows_of(), name, key=f"{dataset} make the table")

    def die(step: str, over: bool) -> None:
        if (step, over) == ("commit streams", False) and threading.current_thread() is dying:
            raise KeyboardInterrupt

    def attempt() -> None:
        with pytest.raises(KeyboardInterrupt):
            once.append(rows_of(1, 2), name, key=f"{dataset} k")

    dying = threading.Thread(target=attempt)
    observed(die)
    dying.start()
    dying.join()
    assert numbers(reader, name) == []
    result = once.append(rows_of(8, 9), name, key=f"{dataset} k")
    assert (result.replayed, result.rows) == (True, 2)
    assert numbers(reader, name) == [1, 2]
