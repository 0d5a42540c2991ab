"""Storage Read: sessions are frozen, and can look back."""

import datetime
import decimal
import time

import pyarrow as pa
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


def test_rows_have_the_arrow_types_of_the_service(lab):
    table = lab.make(
        "id INT64 NOT NULL, r RANGE<DATE>, i INTERVAL, t TIME, d DATETIME, j JSON, g GEOGRAPHY, "
        "n NUMERIC, n2 NUMERIC(10, 2), b BIGNUMERIC, js ARRAY<JSON>, "
        "s STRUCT<j JSON, n BIGNUMERIC>, ss ARRAY<STRUCT<i INTERVAL, r RANGE<TIMESTAMP>>>"
    )
    lab.sql(f"""
        INSERT INTO `{table}` SELECT 1, RANGE(DATE '2026-01-01', NULL), MAKE_INTERVAL(1, 2, 3, 4),
          TIME '01:02:03.5', DATETIME '2026-01-02 03:04:05', JSON '{{"a": 1}}', ST_GEOGPOINT(1, 2),
          1.5, 2.5, BIGNUMERIC '3.5', [JSON '[1]', JSON '"x"'],
          STRUCT(JSON '7', BIGNUMERIC '4.5'),
          [STRUCT(MAKE_INTERVAL(0, 0, 1), RANGE(TIMESTAMP '2026-01-01', TIMESTAMP '2027-01-01'))]
    """)
    lab.sql(f"INSERT INTO `{table}` (id) VALUES (2)")
    session = lab.session(table)
    schema = pa.ipc.read_schema(pa.py_buffer(session.arrow_schema.serialized_schema))
    json = {b"ARROW:extension:name": b"google:sqlType:json"}
    bignumeric, interval = pa.decimal256(76, 38), pa.month_day_nano_interval()
    instant = pa.timestamp("us", "UTC")
    days = pa.struct([("start", pa.date32()), ("end", pa.date32())])
    spans = pa.struct([("start", instant), ("end", instant)])
    assert {field.name: (field.type, field.nullable) for field in schema} == {
        "id": (pa.int64(), False),
        "r": (days, True),
        "i": (interval, True),
        "t": (pa.time64("us"), True),
        "d": (pa.timestamp("us"), True),
        "j": (pa.string(), True),
        "g": (pa.string(), True),
        "n": (pa.decimal128(38, 9), True),
        "n2": (pa.decimal128(10, 2), True),
        "b": (bignumeric, True),
        "js": (pa.list_(pa.field("item", pa.string())), False),
        "s": (pa.struct([("j", pa.string()), ("n", bignumeric)]), True),
        "ss": (pa.list_(pa.field("item", pa.struct([("i", interval), ("r", spans)]))), False),
    }
    assert schema.field("j").metadata == json
    assert schema.field("js").metadata == json
    assert schema.field("s").type.field("j").metadata == json
    assert schema.field("d").metadata == {b"ARROW:extension:name": b"google:sqlType:datetime"}
    assert schema.field("g").metadata[b"ARROW:extension:name"] == b"google:sqlType:geography"
    assert schema.field("r").metadata == {b"google:sqlType": b"range"}
    [row, nulls] = lab.read(session)
    moments = [datetime.datetime(year, 1, 1, tzinfo=datetime.UTC) for year in (2026, 2027)]
    assert dict(zip(schema.names, row, strict=True)) == {
        "id": 1,
        "r": {"start": datetime.date(2026, 1, 1), "end": None},
        "i": pa.MonthDayNano([14, 3, 4 * 3600 * 10**9]),
        "t": datetime.time(1, 2, 3, 500000),
        "d": datetime.datetime(2026, 1, 2, 3, 4, 5),
        "j": '{"a":1}',
        "g": "POINT(1 2)",
        "n": decimal.Decimal("1.5"),
        "n2": decimal.Decimal("2.5"),
        "b": decimal.Decimal("3.5"),
        "js": ["[1]", '"x"'],
        "s": {"j": "7", "n": decimal.Decimal("4.5")},
        "ss": [{"i": pa.MonthDayNano([0, 1, 0]), "r": {"start": moments[0], "end": moments[1]}}],
    }
    assert nulls == (2, *[None] * 9, [], None, [])


def test_fields_of_structs_can_be_selected(lab):
    table = lab.make(
        "id INT64, S STRUCT<a INT64, B STRUCT<x INT64, y STRING>>, "
        "l ARRAY<STRUCT<p INT64, q INT64>>"
    )
    lab.sql(f"INSERT INTO `{table}` VALUES (1, (2, (3, 'y')), [(4, 5)]), (6, NULL, [])")

    def selected(*fields):
        options = types.ReadSession.TableReadOptions(selected_fields=list(fields))
        session = lab.session(table, read_options=options)
        assert list(session.read_options.selected_fields) == list(fields)
        return lab.read(session)

    assert selected("s.b.X", "l.q") == [(None, []), ({"B": {"x": 3}}, [{"q": 5}])]
    assert selected("s.a", "s", "id")[0] == (1, {"a": 2, "B": {"x": 3, "y": "y"}})
    for missing in ("zz", "s.zz", "s.b.zz"):
        with pytest.raises(exceptions.InvalidArgument, match=f"do not exist.*: {missing}"):
            selected("id", missing)


@pytest.mark.parametrize(
    ("partitioning", "column", "usable"),
    [
        ("PARTITION BY day", "day", "day > '2026-01-01'"),
        ("PARTITION BY RANGE_BUCKET(id, GENERATE_ARRAY(0, 100, 10))", "id", "id < 5"),
        ("PARTITION BY _PARTITIONDATE", "_PARTITIONTIME", "_PARTITIONTIME > '2026-01-01'"),
    ],
)
def test_a_required_partition_filter_is_required(lab, partitioning, column, usable):
    """Public failure case 55: reads of such a table."""
    options = "OPTIONS (require_partition_filter = true)"
    table = lab.make("id INT64, day DATE, x INT64", f"{partitioning} {options}")

    def session(restriction):
        options = types.ReadSession.TableReadOptions(row_restriction=restriction)
        return lab.session(table, read_options=options)

    for unusable in ("", "x = 1"):
        blame = rf"without a filter over column\(s\) '{column}'"
        with pytest.raises(exceptions.InvalidArgument, match=blame):
            session(unusable)
    assert lab.read(session(usable)) == []


def test_a_restriction_is_one_expression(lab, table):
    options = types.ReadSession.TableReadOptions(row_restriction="id = 1; SELECT 1")
    with pytest.raises(exceptions.InvalidArgument, match="Syntax error"):
        lab.session(table, read_options=options)


def test_messages_are_of_the_size_of_the_service_and_resumed_between(lab):
    table = lab.make("id INT64, text STRING")
    lab.sql(
        f"INSERT INTO `{table}` SELECT id, REPEAT('x', 1000) "
        "FROM UNNEST(GENERATE_ARRAY(1, 3000)) AS id"
    )
    [stream] = lab.session(table).streams
    answers = iter(lab.reader.read_rows(stream.name))
    first = next(answers)
    assert 0 < first.row_count < 3000
    assert len(first.arrow_record_batch.serialized_record_batch) < 2 * 1024 * 1024
    rest = lab.reader.read_rows(stream.name, offset=first.row_count)
    assert first.row_count + sum(answer.row_count for answer in rest) == 3000
