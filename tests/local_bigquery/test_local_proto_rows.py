"""Protobuf rows as the service reads them: names by annotation, packed times, bytes of decimals."""

import datetime as dt
import math
from decimal import Context, Decimal

import pytest
from dateutil.relativedelta import relativedelta
from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import DescriptorProto

EXACT = Context(prec=100)
INVALID, UNIMPLEMENTED = 3, 12
COLUMN_NAME = b"\xaa\x9b\xbc\xc7\x0d"  # the tag of field 454943157, of text
CIVIL = 2026 << 46 | 8 << 42 | 1 << 37 | 23 << 32 | 59 << 26 | 58 << 20 | 999_999


def descriptor(fields, **nested):
    """A message type of `number. name: kind`, annotated with the column that follows "as"."""
    made = DescriptorProto(name="Row")
    for name, inner in nested.items():
        made.nested_type.append(descriptor(inner))
        made.nested_type[-1].name = name
    for number, (name, kind) in enumerate(fields.items(), start=1):
        name, _, column = name.partition(" as ")
        label = "LABEL_REPEATED" if kind.startswith("repeated ") else "LABEL_OPTIONAL"
        kind = kind.removeprefix("repeated ")
        typed = f'type_name: "{kind}"' if kind in nested else f"type: TYPE_{kind.upper()}"
        text = f'name: "{name}" number: {number} label: {label} {typed}'
        field = text_format.Parse(text, made.field.add())
        if column:
            field.options.MergeFromString(
                COLUMN_NAME + bytes([len(column.encode())]) + column.encode()
            )
    return made


def send(lab, table, rows, *messages):
    return lab.connect(lab.default_stream(table), rows).send(list(messages))


def test_dates_and_times_are_numbers(lab, make_rows):
    table = lab.make("d DATE, t TIME, dt DATETIME, ts TIMESTAMP")
    rows = make_rows(descriptor({"d": "int32", "t": "int64", "dt": "int64", "ts": "int64"}))
    packed = {"d": -1, "t": CIVIL & (1 << 37) - 1, "dt": CIVIL, "ts": -1}
    assert send(lab, table, rows, packed).error.code == 0
    time = dt.time(23, 59, 58, 999_999)
    instant = dt.datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=dt.UTC)
    civil = dt.datetime.combine(dt.date(2026, 8, 1), time)
    assert lab.rows(table) == [(dt.date(1969, 12, 31), time, civil, instant)]


def test_dates_and_times_are_text(lab, make_rows):
    table = lab.make("d DATE, t TIME, dt DATETIME")
    rows = make_rows(d="string", t="string", dt="string")
    text = {"d": "2026-08-01", "t": "23:59:58.9", "dt": "2026-08-01T01:02:03"}
    assert send(lab, table, rows, text).error.code == 0
    [row] = lab.rows(table)
    assert row == (
        dt.date(2026, 8, 1),
        dt.time(23, 59, 58, 900_000),
        dt.datetime(2026, 8, 1, 1, 2, 3),
    )


@pytest.mark.parametrize("value", [0, 1, -1, 10**38 - 1, 1 - 10**38])
def test_decimals_are_scaled_integers_in_bytes(lab, make_rows, value):
    table = lab.make("n NUMERIC, b BIGNUMERIC")
    rows = make_rows(descriptor({"n": "bytes", "b": "bytes"}))
    packed = {
        "n": value.to_bytes((value ^ value >> 200).bit_length() // 8 + 1, "little", signed=True),
        "b": (value * 10**20).to_bytes(32, "little", signed=True),
    }
    assert send(lab, table, rows, packed).error.code == 0
    [row] = lab.rows(table)
    assert row == (Decimal(value).scaleb(-9, EXACT), Decimal(value).scaleb(-18, EXACT))


def test_a_field_is_the_column_of_its_annotation(lab, make_rows):
    table = lab.make("`order-no` INT64, s STRUCT<`7up` STRING>")
    made = descriptor({"a as order-no": "int64", "s": "S"}, S={"b as 7up": "string"})
    answer = send(lab, table, make_rows(made), {"a": 1, "s": {"b": "x"}})
    assert answer.error.code == 0
    assert lab.rows(table) == [(1, {"7up": "x"})]
    extra = make_rows(descriptor({"a as order-number": "int64"}))
    assert "order-number" in send(lab, table, extra, {"a": 1}).error.message


def test_ranges_are_messages_whose_missing_ends_are_open(lab, make_rows):
    table = lab.make("id INT64, r RANGE<DATE>, l ARRAY<RANGE<DATETIME>>")
    kinds = {"R": {"start": "int32", "end": "int32"}, "T": {"start": "int64", "end": "int64"}}
    rows = make_rows(descriptor({"id": "int64", "r": "R", "l": "repeated T"}, **kinds))
    messages = [{"id": 1, "r": {"start": 0}, "l": [{"end": CIVIL}]}, {"id": 2, "r": {}}, {"id": 3}]
    assert send(lab, table, rows, *messages).error.code == 0
    civil = dt.datetime(2026, 8, 1, 23, 59, 58, 999_999)
    assert lab.rows(table) == [
        (1, {"start": dt.date(1970, 1, 1), "end": None}, [{"start": None, "end": civil}]),
        (2, {"start": None, "end": None}, []),
        (3, None, []),
    ]


def test_intervals_are_text_and_refused_where_parquet_would_round_them(lab, make_rows):
    table = lab.make("i INTERVAL")
    rows = make_rows(i="string")
    assert send(lab, table, rows, {"i": "1-2 3 4:5:6.007"}).error.code == 0
    elapsed = relativedelta(
        years=1, months=2, days=3, hours=4, minutes=5, seconds=6, microseconds=7000
    )
    assert lab.rows(table) == [(elapsed,)]
    for text in ("0-0 0 0:0:0.000001", "-0-1 0 0:0:0", "0-0 -1 0:0:0", "0-0 0 -0:0:1"):
        answer = send(lab, table, rows, {"i": text})
        assert (answer.error.code, text in answer.error.message) == (UNIMPLEMENTED, True)
    assert send(lab, table, rows, {"i": "soon"}).row_errors[0].index == 0
    assert lab.rows(table) == [(elapsed,)]


def test_numbers_that_json_does_not_have(lab, make_rows):
    table = lab.make("id INT64, x FLOAT64, l ARRAY<FLOAT64>")
    rows = make_rows(descriptor({"id": "int64", "x": "double", "l": "repeated double"}))
    values = [math.inf, -math.inf, -0.0, math.nan]
    messages = [{"id": n, "x": x, "l": [x]} for n, x in enumerate(values)]
    assert send(lab, table, rows, *messages).error.code == 0
    assert [repr(x) for _, x, _ in lab.rows(table)] == list(map(repr, values))
    assert [repr(x) for *_, [x] in lab.rows(table)] == list(map(repr, values))


def test_bytes_and_json_within_structs_and_lists(lab, make_rows):
    """By insertAll, too, whose JSON has base64 and text there."""
    table = lab.make("s STRUCT<b BYTES, j JSON, n INT64>, l ARRAY<STRUCT<b ARRAY<BYTES>, j JSON>>")
    kinds = {
        "S": {"b": "bytes", "j": "string", "n": "int64"},
        "L": {"b": "repeated bytes", "j": "string"},
    }
    rows = make_rows(descriptor({"s": "S", "l": "repeated L"}, **kinds))
    packed = {"s": {"b": b"\0\xff", "j": '{"a": 1}', "n": 1}, "l": [{"b": [b"\xff"], "j": "2"}]}
    assert send(lab, table, rows, packed, {}, {"s": {}, "l": [{}]}).error.code == 0
    json = {"s": {"b": "AP8=", "j": '{"a": 1}', "n": 1}, "l": [{"b": ["/w=="], "j": "2"}]}
    assert lab.client.insert_rows_json(table, [json]) == []
    full = ({"b": b"\0\xff", "j": {"a": 1}, "n": 1}, [{"b": [b"\xff"], "j": 2}])
    bare = ({"b": None, "j": None, "n": None}, [{"b": [], "j": None}])
    assert sorted(lab.rows(table), key=repr) == sorted([full, full, bare, (None, [])], key=repr)


def test_a_descriptor_that_refers_to_another_file_is_refused(lab, make_rows):
    """Public failure case 14: google.protobuf.Timestamp "is not defined"."""
    table = lab.make("ts TIMESTAMP")
    connection = lab.connect(lab.default_stream(table), make_rows(ts="int64"))
    request = connection.request([{"ts": 0}])
    field = request.proto_rows.writer_schema.proto_descriptor.field[0]
    field.ClearField("type")
    field.type_name = ".google.protobuf.Timestamp"
    answer = connection.send_request(request)
    assert answer.error.code == INVALID
    assert "Invalid proto schema" in answer.error.message
