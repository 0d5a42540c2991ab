"""Values by the types of the table's columns: exact, or refused with a reason."""

import base64
import datetime as dt
import hashlib
import re
import struct
import uuid
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from google.cloud.bigquery import SchemaField
from hypothesis import given
from hypothesis import strategies as st

from dagster_bq_connector.cdc.envelope.debezium_json import DebeziumJson
from dagster_bq_connector.cdc.event import Rows
from dagster_bq_connector.cdc.ordering.postgres import PostgresLsn
from support.debezium import batch, event, with_schema

MARKER = "__debezium_unavailable_value"
ID = SchemaField("id", "INTEGER")
DECIMAL = {
    "type": "bytes",
    "name": "org.apache.kafka.connect.data.Decimal",
    "parameters": {"scale": "2"},
}


def named(kind: str, name: str, **parameters: str) -> dict[str, Any]:
    return {"type": kind, "name": f"io.debezium.{name}", "parameters": parameters}


def text_of(number: int) -> str:
    """The base64 of an unscaled number, as Java writes it."""
    size = (number + (number < 0)).bit_length() // 8 + 1
    return base64.b64encode(number.to_bytes(size, "big", signed=True)).decode()


def parsed(
    values: list[Any],
    column: SchemaField,
    schema: dict[str, Any] | None = None,
    envelope: DebeziumJson | None = None,
) -> Rows:
    """Values of a column `v`, a row each."""
    messages: list[tuple[Any, Any]] = []
    for number, value in enumerate(values):
        its: Any = event(after={"id": number, "v": value})
        if schema is not None:
            its = with_schema([{"type": "int32", "field": "id"}, {**schema, "field": "v"}], its)
        messages.append(({"id": number}, its))
    envelope = envelope or DebeziumJson()
    events = envelope.events(batch(*messages), PostgresLsn())
    assert events.changes.num_rows == len(values)
    return envelope.rows(events, np.arange(len(values)), [ID, column])


def one(value: Any, kind: str, schema: dict[str, Any] | None = None, **forms: Any) -> Any:
    """One value as its column has it."""
    mode = forms.pop("mode", "NULLABLE")
    column = SchemaField("v", kind, mode, fields=forms.pop("fields", ()))
    found = parsed([value], column, schema, DebeziumJson(**forms))
    assert not found.failed, found.failed
    return found.batch.column("v")[0].as_py()


def refused(value: Any, column: SchemaField | str, schema: Any = None, **forms: Any) -> str:
    """Why a value is refused, between two nulls that are not."""
    column = SchemaField("v", column) if isinstance(column, str) else column
    found = parsed([None, value, None], column, schema, DebeziumJson(**forms))
    assert found.kept.tolist() == [0, 2]
    assert [failed.message for failed in found.failed] == [1]
    assert str(found.failed[0].column).partition(".")[0] == "v"
    return found.failed[0].reason


MOMENT = dt.datetime(2023, 11, 14, 22, 13, 20, 4567)
EARLIER = dt.datetime(1969, 12, 31, 23, 59, 59, 999_999)
MILLIS = MOMENT.replace(microsecond=4000)
ZONED = MOMENT.replace(tzinfo=dt.UTC)
MICROS = 1_700_000_000_004_567  # public failure 33: the zeros of its fraction stay

GOOD: list[tuple[Any, str, dict[str, Any] | None, Any]] = [
    ("BNI=", "NUMERIC", DECIMAL, Decimal("12.34")),
    ("BNI=", "STRING", DECIMAL, "12.34"),
    ("BNI=", "INTEGER", {**DECIMAL, "parameters": {"scale": "0"}}, 1234),
    ("DA==", "NUMERIC", {**DECIMAL, "parameters": {"scale": "-2"}}, Decimal(1200)),
    (text_of(10**70), "BIGNUMERIC", {**DECIMAL, "parameters": {"scale": "38"}}, Decimal(10**32)),
    ({"scale": 2, "value": "BNI="}, "NUMERIC", None, Decimal("12.34")),
    ({"scale": 2, "value": "BNI="}, "STRING", None, "12.34"),
    ("12.34", "NUMERIC", {"type": "string"}, Decimal("12.34")),
    ("-0.000000001", "NUMERIC", {"type": "string"}, Decimal("-0.000000001")),
    (12.34, "NUMERIC", {"type": "double"}, Decimal("12.34")),
    (12, "NUMERIC", None, Decimal(12)),
    (-1, "NUMERIC", None, Decimal(-1)),
    (10**25, "NUMERIC", None, Decimal(10**25)),
    (2**63 - 1, "INTEGER", None, 2**63 - 1),
    (-(2**63), "INTEGER", None, -(2**63)),
    (1, "FLOAT", None, 1.0),
    ("-Infinity", "FLOAT", None, float("-inf")),
    (True, "BOOLEAN", None, True),
    (20_666, "DATE", None, dt.date(2026, 8, 1)),
    (-719_162, "DATE", named("int32", "time.Date"), dt.date(1, 1, 1)),
    (2_932_896, "DATE", None, dt.date(9999, 12, 31)),
    ("2026-08-01Z", "DATE", named("string", "time.IsoDate"), dt.date(2026, 8, 1)),
    (1_234, "TIME", named("int32", "time.Time"), dt.time(0, 0, 1, 234_000)),
    (1_234_567, "TIME", named("int64", "time.MicroTime"), dt.time(0, 0, 1, 234_567)),
    (1_234_567_000, "TIME", named("int64", "time.NanoTime"), dt.time(0, 0, 1, 234_567)),
    ("10:34:56.789012Z", "TIME", None, dt.time(10, 34, 56, 789_012)),
    ("10:34:56Z", "TIME", None, dt.time(10, 34, 56)),
    ("01:00:00+02:30", "TIME", None, dt.time(22, 30)),
    (MICROS // 1000, "DATETIME", named("int64", "time.Timestamp"), MILLIS),
    (MICROS, "DATETIME", named("int64", "time.MicroTimestamp"), MOMENT),
    (MICROS * 1000, "DATETIME", named("int64", "time.NanoTimestamp"), MOMENT),
    (MICROS, "TIMESTAMP", named("int64", "time.MicroTimestamp"), ZONED),
    (-1, "DATETIME", named("int64", "time.MicroTimestamp"), EARLIER),
    ("2023-11-14T22:13:20.004567Z", "TIMESTAMP", None, ZONED),
    ("2023-11-14T23:13:20.004567+01:00", "TIMESTAMP", None, ZONED),
    ("2023-11-14T22:13:20.004567000Z", "TIMESTAMP", None, ZONED),
    ("2023-11-14T22:13:20.004567Z", "DATETIME", named("string", "time.IsoTimestamp"), MOMENT),
    ("2023-11-14T22:13:20.004567", "DATETIME", None, MOMENT),
    (1_000_001, "INTERVAL", None, pa.MonthDayNano([0, 0, 1_000_001_000])),
    ("P1Y2M3DT4H5M6.78S", "INTERVAL", None, pa.MonthDayNano([14, 3, 14_706_780_000_000])),
    ("P-1Y2M-3DT-4H0M-0.5S", "INTERVAL", None, pa.MonthDayNano([-10, -3, -14_400_500_000_000])),
    ("P0Y0M0DT3H51M5.471999999S", "INTERVAL", None, pa.MonthDayNano([0, 0, 13_865_472_000_000])),
    ("P0Y0M0DT0H0M-59.999999999S", "INTERVAL", None, pa.MonthDayNano([0, 0, -60_000_000_000])),
    ("P0Y0M0DT0H0M0S", "INTERVAL", None, pa.MonthDayNano([0, 0, 0])),
    ("qgE=", "BYTES", named("bytes", "data.Bits", length="9"), b"\xaa\x01"),
    ("qgE=", "INTEGER", named("bytes", "data.Bits", length="9"), 0x1AA),
    ("", "BYTES", None, b""),
    ('{"a": [1, null]}', "JSON", named("string", "data.Json"), '{"a": [1, null]}'),
    ({"a": "b"}, "JSON", None, '{"a":"b"}'),
    ([[1], [2]], "JSON", None, "[[1],[2]]"),
    (7, "JSON", None, "7"),
    ("null", "JSON", None, "null"),
    ({"x": 1.5, "y": -2.0}, "GEOGRAPHY", None, "POINT(1.5 -2.0)"),
    (7, "STRING", {"type": "int32"}, "7"),
    (20_666, "STRING", named("int32", "time.Date"), "2026-08-01"),
    (1_234_567, "STRING", named("int64", "time.MicroTime"), "00:00:01.234567"),
    (True, "STRING", {"type": "boolean"}, "true"),
]


@pytest.mark.parametrize(("value", "kind", "schema", "wanted"), GOOD)
def test_forms(value: Any, kind: str, schema: dict[str, Any] | None, wanted: Any) -> None:
    assert one(value, kind, schema) == wanted
    assert one(None, kind, schema) is None


BAD: list[tuple[Any, str, dict[str, Any] | None, str]] = [
    (2**63, "INTEGER", None, "larger than INTEGER holds"),
    ("5", "INTEGER", None, "^5 is text"),
    (1.5, "INTEGER", None, "is a number, which a INTEGER column does not take"),
    (True, "INTEGER", None, "true or false"),
    (2**53 + 1, "FLOAT", None, "2\\*\\*53"),
    ("x", "FLOAT", None, "is text, and no number"),
    (0, "BOOLEAN", None, "an integer"),
    (5, "STRING", None, "an integer, which a STRING column does not take"),
    ({"a": 1}, "STRING", None, "no decimal"),
    ("NaN", "NUMERIC", {"type": "string"}, "NaN is no number .*STRING column"),
    ("abc", "NUMERIC", {"type": "string"}, "decimal_handling='precise'"),
    ("0.0000000001", "NUMERIC", {"type": "string"}, "more than 9 digits after the point"),
    (10**30, "NUMERIC", None, "more than 29 digits before the point"),
    ("BNI=", "NUMERIC", None, "decimal_handling='string'"),
    ({"scale": "x", "value": 1}, "NUMERIC", None, "no decimal"),
    (text_of(10**5_000), "BIGNUMERIC", DECIMAL, "more digits than BIGNUMERIC holds"),
    (10**100, "BIGNUMERIC", None, "does not fit"),
    (-719_163, "DATE", None, "years 1 to 9999"),
    ("infinity", "DATE", None, "PostgreSQL's infinity"),
    ("2026-13-01", "DATE", None, "does not fit a DATE column"),
    (-2_147_472_691, "DATE", None, "-infinity"),
    (86_400_000_000, "TIME", named("int64", "time.MicroTime"), "no time of day"),
    (1, "TIME", None, "time_precision='microseconds'"),
    (1, "TIMESTAMP", None, "time_precision='microseconds'"),
    (1, "DATETIME", {"type": "int64"}, "has the type int64"),
    (1_001, "DATETIME", named("int64", "time.NanoTimestamp"), "finer than a microsecond"),
    (9_223_372_036_825_200_000, "DATETIME", named("int64", "time.MicroTimestamp"), "infinity"),
    (-9_223_372_036_832_400, "DATETIME", named("int64", "time.Timestamp"), "-infinity"),
    ("-infinity", "TIMESTAMP", named("string", "time.ZonedTimestamp"), "-infinity"),
    ("2023-11-14T22:13:20", "TIMESTAMP", None, "does not fit a TIMESTAMP column"),
    ("2023-11-14T22:13:20.0045678Z", "TIMESTAMP", None, "does not fit a TIMESTAMP column"),
    ("P1W", "INTERVAL", None, "no interval"),
    ("P", "INTERVAL", None, "no interval"),
    ("*", "BYTES", None, "no base64"),
    ("{", "JSON", None, "no JSON document"),
    ({"wkb": "AQ=="}, "GEOGRAPHY", None, "no well-known binary"),
    ({"wkb": "AQ==", "srid": 3857}, "GEOGRAPHY", None, "SRID 3857"),
    ([1], "INTEGER", None, "an array"),
    ("x", "RECORD", None, "text"),
]


@pytest.mark.parametrize(("value", "kind", "schema", "text"), BAD)
def test_values_that_do_not_fit(
    value: Any, kind: str, schema: dict[str, Any] | None, text: str
) -> None:
    column = SchemaField(
        "v", kind, fields=[SchemaField("a", "INTEGER")] if kind == "RECORD" else ()
    )
    assert re.search(text, refused(value, column, schema))


def test_what_the_connector_was_told() -> None:
    assert one(MICROS, "TIMESTAMP", time_precision="microseconds") == ZONED
    assert one(MICROS * 1000, "DATETIME", time_precision="nanoseconds") == MOMENT
    assert one(1_234, "TIME", time_precision="connect") == dt.time(0, 0, 1, 234_000)
    assert one("12.34", "NUMERIC", decimal_handling="string") == Decimal("12.34")
    assert one("1234", "NUMERIC", decimal_handling="string") == Decimal(1234)
    assert one("deadbeef", "BYTES", binary_handling="hex") == b"\xde\xad\xbe\xef"
    assert "binary_handling='base64'" in refused("3q2+7w==", "BYTES", binary_handling="hex")
    assert "decimal_handling='string'" in refused(
        "12.34", SchemaField("v", "NUMERIC", precision=10, scale=2)
    )


def test_the_scale_of_bytes_is_that_of_the_column() -> None:
    column = SchemaField("v", "NUMERIC", precision=10, scale=2)
    assert parsed(["BNI=", None], column).batch.column("v").to_pylist() == [Decimal("12.34"), None]
    column = SchemaField("v", "NUMERIC", precision=10)
    assert parsed(["BNI="], column).batch.column("v").to_pylist() == [Decimal(1234)]


def test_unsigned_integers_of_64_bits() -> None:  # public failure 31
    unsigned = {"type": "int64", "parameters": {"__debezium.source.column.type": "BIGINT UNSIGNED"}}
    assert one(-1, "NUMERIC", unsigned) == Decimal(18446744073709551615)
    assert one(-1, "STRING", unsigned) == "18446744073709551615"
    assert one(7, "INTEGER", unsigned) == 7
    assert "larger than INTEGER" in refused(-1, "INTEGER", unsigned)


def test_arrays_and_records() -> None:
    column = SchemaField("v", "NUMERIC", "REPEATED", precision=10, scale=2)
    found = parsed([["BNI=", "AA=="], [], None, ["BNI=", None], "BNI="], column)
    assert found.batch.column("v").to_pylist() == [[Decimal("12.34"), Decimal(0)], [], []]
    assert [(failed.message, failed.column) for failed in found.failed] == [(3, "v"), (4, "v")]
    assert "JSON column" in found.failed[0].reason
    fields = [SchemaField("x", "FLOAT"), SchemaField("at", "DATE")]
    record = SchemaField("v", "RECORD", fields=fields)
    found = parsed([{"x": 1.5, "at": 1}, None, {"x": "y"}], record)
    assert found.batch.column("v").to_pylist() == [{"x": 1.5, "at": dt.date(1970, 1, 2)}, None]
    assert [(failed.message, failed.column) for failed in found.failed] == [(2, "v.x")]


def test_limits_of_the_column() -> None:
    assert "STRING(2)" in refused("abc", SchemaField("v", "STRING", max_length=2))
    small = SchemaField("v", "NUMERIC", precision=4, scale=2)
    assert "larger than NUMERIC(4, 2)" in refused(100, small)
    required = SchemaField("v", "STRING", "REQUIRED")
    found = parsed(["a", None, MARKER], required)
    assert found.kept.tolist() == [0, 2]
    assert found.unavailable["v"].tolist() == [False, True]


OCTETS = MARKER.encode()
DISGUISES: list[tuple[Any, str, str]] = [
    (MARKER, "STRING", "NULLABLE"),
    (MARKER, "JSON", "NULLABLE"),
    (base64.b64encode(OCTETS).decode(), "BYTES", "NULLABLE"),
    (base64.b64encode(OCTETS).decode(), "NUMERIC", "NULLABLE"),
    ({"scale": 0, "value": base64.b64encode(OCTETS).decode()}, "NUMERIC", "NULLABLE"),
    (OCTETS.hex(), "BYTES", "NULLABLE"),
    ([MARKER], "STRING", "REPEATED"),
    ([base64.b64encode(OCTETS).decode()], "BYTES", "REPEATED"),
    (list(OCTETS), "INTEGER", "REPEATED"),
    ([MARKER], "JSON", "NULLABLE"),
    ({MARKER: MARKER}, "JSON", "NULLABLE"),
    (f'{{"{MARKER}":"{MARKER}"}}', "JSON", "NULLABLE"),
    (
        [str(uuid.UUID(bytes=hashlib.md5(OCTETS).digest(), version=3))],
        "STRING",
        "REPEATED",
    ),
]


@pytest.mark.parametrize(("value", "kind", "mode"), DISGUISES)
def test_values_that_were_not_sent(value: Any, kind: str, mode: str) -> None:  # public failure 26
    found = parsed([None, value, None], SchemaField("v", kind, mode))
    assert not found.failed
    assert found.unavailable["v"].tolist() == [False, True, False]
    assert not found.batch.column("v")[1].as_py()


def test_values_that_are_like_those() -> None:
    texts = [MARKER + "x", MARKER[1:] + "x", "x" * len(MARKER)]
    found = parsed(texts, SchemaField("v", "STRING"))
    assert found.batch.column("v").to_pylist() == texts
    assert not found.unavailable
    lists = [[MARKER, "x"], ["x"], []]
    found = parsed(lists, SchemaField("v", "STRING", "REPEATED"))
    assert found.batch.column("v").to_pylist() == lists
    assert not found.unavailable


def test_geometries() -> None:
    def wkb(*parts: Any) -> dict[str, Any]:
        return {"wkb": base64.b64encode(b"".join(parts)).decode(), "srid": 4326}

    point = struct.pack("<BIIdd", 1, 0x20000001, 4326, 1.5, -2.5)
    line = struct.pack(">BIIdddd", 0, 2, 2, 0, 0, 1, 1)
    ring = struct.pack("<BIII", 1, 3, 1, 4) + struct.pack("<8d", 0, 0, 1, 0, 1, 1, 0, 0)
    many = struct.pack("<BII", 1, 4, 2) + struct.pack("<BIdd", 1, 1, 1, 2) * 2
    both = struct.pack("<BII", 1, 7, 2) + point + line
    assert [one(wkb(part), "GEOGRAPHY") for part in (point, line, ring, many, both)] == [
        "POINT(1.5 -2.5)",
        "LINESTRING(0.0 0.0, 1.0 1.0)",
        "POLYGON((0.0 0.0, 1.0 0.0, 1.0 1.0, 0.0 0.0))",
        "MULTIPOINT((1.0 2.0), (1.0 2.0))",
        "GEOMETRYCOLLECTION(POINT(1.5 -2.5), LINESTRING(0.0 0.0, 1.0 1.0))",
    ]
    high = struct.pack("<BIddd", 1, 1001, 1, 2, 3)
    assert "heights" in refused(wkb(high), "GEOGRAPHY")
    assert "heights" in refused(wkb(struct.pack("<BIddd", 1, 0x80000001, 1, 2, 3)), "GEOGRAPHY")


def test_many_bad_values_fail_alone() -> None:
    values = [n if n % 10 else "x" for n in range(200)]
    found = parsed(values, SchemaField("v", "INTEGER"))
    assert found.batch.column("v").to_pylist() == [n for n in range(200) if n % 10]
    assert [failed.message for failed in found.failed] == list(range(0, 200, 10))


@given(st.lists(st.none() | st.integers(-(2**80), 2**80), min_size=1, max_size=30))
def test_decimals_as_bytes(numbers: list[int | None]) -> None:
    values = [None if number is None else text_of(number) for number in numbers]
    found = parsed(values, SchemaField("v", "BIGNUMERIC"), DECIMAL)
    wanted = [None if number is None else Decimal(f"{number}E-2") for number in numbers]
    assert found.batch.column("v").to_pylist() == wanted


@given(st.lists(st.datetimes(), min_size=1, max_size=30))
def test_moments(moments: list[dt.datetime]) -> None:
    epoch = dt.datetime(1970, 1, 1)
    micros = [(moment - epoch) // dt.timedelta(microseconds=1) for moment in moments]
    schema = named("int64", "time.MicroTimestamp")
    found = parsed(micros, SchemaField("v", "DATETIME"), schema)
    assert found.batch.column("v").to_pylist() == moments
    texts = [f"{moment.isoformat()}Z" for moment in moments]
    found = parsed(texts, SchemaField("v", "TIMESTAMP"))
    assert [at.replace(tzinfo=None) for at in found.batch.column("v").to_pylist()] == moments
