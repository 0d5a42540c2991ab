"""Storage Write and Read in Arrow: the types as the service takes and gives them."""

import datetime as dt
from decimal import Decimal

import pyarrow as pa
import pytest

INTERVAL = pa.month_day_nano_interval()
DAYS = pa.struct([("start", pa.date32()), ("end", pa.date32())])
COLUMNS = """
    id INT64, f FLOAT64, b BYTES, big BIGNUMERIC, span INTERVAL, days RANGE<DATE>, doc JSON,
    place GEOGRAPHY, r STRUCT<b BYTES, days RANGE<DATE>, doc JSON, list ARRAY<BYTES>>,
    rs ARRAY<STRUCT<span INTERVAL, big BIGNUMERIC>>, at DATETIME
"""
SCHEMA = pa.schema(
    [
        ("ID", pa.int64()),
        ("f", pa.float64()),
        ("b", pa.binary()),
        ("big", pa.decimal256(76, 38)),
        ("span", INTERVAL),
        ("days", DAYS),
        ("doc", pa.string()),
        ("place", pa.string()),
        (
            "r",
            pa.struct(
                [
                    ("list", pa.list_(pa.binary())),
                    ("b", pa.binary()),
                    ("doc", pa.string()),
                    ("days", DAYS),
                ]
            ),
        ),
        ("rs", pa.list_(pa.struct([("span", INTERVAL), ("big", pa.decimal256(76, 38))]))),
        ("at", pa.timestamp("us")),
    ]
)
SPAN = pa.MonthDayNano([14, 3, 4_294_000_000])
RANGE = {"start": dt.date(1, 1, 1), "end": None}
ROW = {
    "ID": 1,
    "f": float("inf"),
    "b": b"\x00\xff",
    "big": Decimal("-1E-18"),
    "span": SPAN,
    "days": RANGE,
    "doc": "null",
    "place": "POINT(1 2)",
    "r": {"list": [b"\xff"], "b": b"\xfe", "doc": '"x"', "days": RANGE},
    "rs": [{"span": SPAN, "big": Decimal(1)}, {"span": None, "big": None}],
    "at": dt.datetime(9999, 12, 31, 23, 59, 59, 999999),
}
EMPTY = dict.fromkeys(SCHEMA.names) | {"ID": 2, "rs": []}


def test_every_type_comes_back(lab):
    table = lab.make(COLUMNS)
    connection = lab.connect(lab.default_stream(table), SCHEMA)
    assert connection.send([ROW, EMPTY]).error.code == 0
    session = lab.session(table)
    full, empty = sorted(lab.read(session))
    names = pa.ipc.read_schema(pa.py_buffer(session.arrow_schema.serialized_schema)).names
    given = {name.replace("ID", "id"): value for name, value in ROW.items()}
    assert dict(zip(names, full, strict=True)) == given
    assert dict(zip(names, empty, strict=True)) == {
        name.replace("ID", "id"): value for name, value in EMPTY.items()
    }


def test_a_session_says_what_its_fields_are(lab):
    session = lab.session(lab.make(COLUMNS))
    schema = pa.ipc.read_schema(pa.py_buffer(session.arrow_schema.serialized_schema))
    name = b"ARROW:extension:name"
    marks = {field.name: field.metadata for field in schema}
    assert marks["doc"] == {name: b"google:sqlType:json"}
    assert marks["at"] == {name: b"google:sqlType:datetime"}
    assert marks["span"] == {name: b"google:sqlType:interval"}
    assert marks["days"] == {b"google:sqlType": b"range"}
    assert marks["place"][name] == b"google:sqlType:geography"
    assert marks["id"] is None
    record = schema.field("r").type
    assert record.field("doc").metadata == {name: b"google:sqlType:json"}
    assert schema.field("days").type == DAYS
    assert schema.field("span").type == INTERVAL


@pytest.mark.parametrize(
    "bad",
    [
        {"span": pa.MonthDayNano([-1, 0, 0])},
        {"span": pa.MonthDayNano([0, 0, 1_000])},
        {"rs": [{"span": pa.MonthDayNano([0, 0, 4_294_967_296_000_000])}]},
        {"big": Decimal("1E-19")},
        {"doc": "{no"},
        {"r": {"doc": "{no"}},
        {"rs": None},
    ],
)
def test_what_would_be_cut_fails_its_row(lab, bad):
    table = lab.make(COLUMNS)
    connection = lab.connect(lab.default_stream(table), SCHEMA)
    answer = connection.send([ROW, EMPTY | bad, EMPTY, EMPTY | bad])
    assert [error.index for error in answer.row_errors] == [1, 3]
    assert lab.rows(table, "id") == []
    assert connection.send([ROW]).error.code == 0
    assert lab.rows(table, "id") == [(1,)]
