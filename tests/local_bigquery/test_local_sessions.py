"""Storage Read: sessions are frozen, and can look back."""

import datetime
import time

import pytest
from google.api_core import exceptions
from google.cloud.bigquery_storage_v1 import types


@pytest.fixture
def table(lab):
    name = lab.make("id INT64, name STRING")
    lab.sql(f"INSERT INTO `{name}` VALUES (1, 'a'), (2, 'b'), (3, 'c')")
    return name


OLD = [(1, "a"), (2, "b"), (3, "c")]


@pytest.mark.parametrize(
    "change",
    [
        "DELETE FROM `{}` WHERE id = 1",
        "UPDATE `{}` SET name = 'x' WHERE true",
        "INSERT INTO `{}` VALUES (4, 'd')",
        "TRUNCATE TABLE `{}`",
        "CREATE OR REPLACE TABLE `{}` (other INT64)",
        "ALTER TABLE `{}` ADD COLUMN more INT64",
        "DROP TABLE `{}`",
    ],
)
def test_a_session_is_frozen_when_it_is_made(lab, table, change):
    session = lab.session(table)
    assert session.estimated_row_count == 3
    lab.sql(change.format(table))
    assert lab.read(session) == OLD
    assert lab.read(session) == OLD


def test_a_stream_is_resumed_in_the_frozen_rows(lab, table):
    session = lab.session(table)
    lab.sql(f"DELETE FROM `{table}` WHERE id = 1")
    whole, rest = lab.read(session), lab.read(session, offset=1)
    assert whole == OLD
    assert len(rest) == 2
    assert set(rest) < set(whole)


def test_streamed_rows_do_not_enter_an_older_session(lab, table, make_rows):
    session = lab.session(table)
    connection = lab.connect(lab.default_stream(table), make_rows(id="int64", name="string"))
    assert connection.send([{"id": 4, "name": "d"}]).error.code == 0
    assert lab.read(session) == OLD
    assert len(lab.read(lab.session(table))) == 4


def test_columns_and_restriction(lab, table):
    options = types.ReadSession.TableReadOptions(
        selected_fields=["name"], row_restriction="id >= 2 AND name != 'c'"
    )
    session = lab.session(table, read_options=options)
    lab.sql(f"UPDATE `{table}` SET name = 'x' WHERE true")
    assert lab.read(session) == [("b",)]


def moment() -> datetime.datetime:
    time.sleep(0.05)
    now = datetime.datetime.now(datetime.UTC)
    time.sleep(0.05)
    return now


def test_snapshot_time(lab, table):
    then = moment()
    lab.sql(f"DELETE FROM `{table}` WHERE id = 1")
    middle = moment()
    lab.sql(f"UPDATE `{table}` SET name = 'x' WHERE true")

    def at(when):
        modifiers = types.ReadSession.TableModifiers(snapshot_time=when)
        return lab.read(lab.session(table, table_modifiers=modifiers))

    assert at(then) == OLD
    assert at(middle) == OLD[1:]
    assert at(moment()) == [(2, "x"), (3, "x")]
    options = types.ReadSession.TableReadOptions(row_restriction="id < 3")
    modifiers = types.ReadSession.TableModifiers(snapshot_time=then)
    session = lab.session(table, table_modifiers=modifiers, read_options=options)
    assert lab.read(session) == OLD[:2]


def test_snapshot_time_before_the_table(lab):
    before = moment()
    table = lab.make("id INT64")
    modifiers = types.ReadSession.TableModifiers(snapshot_time=before)
    with pytest.raises(exceptions.InvalidArgument, match="time travel"):
        lab.session(table, table_modifiers=modifiers)


def test_sessions_during_writes_are_whole(lab, make_rows, together):
    """Rows come in pairs: a session never sees half of a request."""
    table = lab.make("id INT64, name STRING")
    rows = make_rows(id="int64", name="string")
    connection = lab.connect(lab.default_stream(table), rows, lab.new_writer())

    def write():
        for index in range(8):
            assert connection.send([{"id": index}, {"id": index}]).error.code == 0

    def look():
        for _ in range(8):
            session = lab.session(table)
            assert session.estimated_row_count % 2 == 0
            assert len(lab.read(session)) == session.estimated_row_count

    assert together([write, look]) == [None, None]


def test_a_snapshot_time_in_the_future_is_refused(lab, table):
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=5)
    modifiers = types.ReadSession.TableModifiers(snapshot_time=later)
    with pytest.raises(exceptions.InvalidArgument, match="future"):
        lab.session(table, table_modifiers=modifiers)


def test_a_partition_decorator_is_refused(lab):
    table = lab.make("id INT64, day DATE", "PARTITION BY day")
    for decorator in ("$20260101", "$__NULL__", "$x"):
        with pytest.raises(exceptions.InvalidArgument, match="Partition decorators"):
            lab.session(f"{table}{decorator}")
