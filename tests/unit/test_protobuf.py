"""The protobuf encoder, read back field by field by Google's own runtime."""

import datetime as dt
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from google.cloud.bigquery import SchemaField
from google.cloud.bigquery_storage_v1 import types
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_bq_connector.errors import SchemaError
from dagster_bq_connector.schema.proto import row_type
from dagster_bq_connector.write import message, protobuf
from dagster_bq_connector.write.encode import TRACE_ID, ArrowEncoder, OversizedRow, Request
from dagster_bq_connector.write.protobuf import ProtobufEncoder, encoder_for
from support import protobuf_rows
from support.protobuf_rows import WIRE, batch_of, column_name, exact, message_class, read

STREAM = "projects/p/datasets/d/tables/t/streams/_default"
LIMIT, PREFERRED = 2**23, 2**21
Wire = types.AppendRowsRequest.pb()
Kind = FieldDescriptorProto


def cut(
    columns: Sequence[SchemaField],
    batch: pa.RecordBatch,
    limit: int = LIMIT,
    preferred: int = PREFERRED,
) -> list[Request | OversizedRow]:
    encoder = ProtobufEncoder(columns, batch.schema, STREAM)
    return list(encoder.cut(batch, limit, preferred))


def serialized(
    columns: Sequence[SchemaField], batch: pa.RecordBatch, **options: int
) -> Iterator[bytes]:
    """The messages in the requests of a batch."""
    for request in cut(columns, batch, **options):
        assert isinstance(request, Request)
        found = Wire.FromString(request.payload).proto_rows.rows.serialized_rows
        assert len(found) == request.rows
        yield from found


def messages(
    columns: Sequence[SchemaField], batch: pa.RecordBatch, **options: int
) -> list[dict[str, Any]]:
    """The rows of a batch, from the bytes of its requests."""
    kind = message_class(row_type(columns))
    found = serialized(columns, batch, **options)
    return [read(kind.FromString(row), columns) for row in found]


def values(kind: str, given: Sequence[Any]) -> list[Any]:
    """What Google's runtime finds in a column of one type."""
    column = SchemaField("x", kind)
    kind_of_row = message_class(row_type([column]))
    batch = batch_of([column], [{"x": value} for value in given])
    return [kind_of_row.FromString(row).x for row in serialized([column], batch)]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_rows_of_any_columns_are_read_back(data: st.DataObject) -> None:
    columns = data.draw(protobuf_rows.columns())
    rows = data.draw(protobuf_rows.rows(columns))
    start = data.draw(st.integers(0, len(rows) - 1))
    batch = batch_of(columns, rows).slice(start)
    assert exact(messages(columns, batch)) == exact(rows[start:])


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_a_batch_is_the_sum_of_its_rows(data: st.DataObject) -> None:
    """What is done for all rows at once (one size, small numbers) changes no byte of any."""
    columns = data.draw(protobuf_rows.columns(depth=2))
    rows = data.draw(protobuf_rows.rows(columns))
    batch = batch_of(columns, rows)
    alone = [row for n in range(len(rows)) for row in serialized(columns, batch.slice(n, 1))]
    assert list(serialized(columns, batch)) == alone


def test_what_is_beyond_32_bits_comes_out_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = [SchemaField("s", "STRING"), SchemaField("l", "STRING", "REPEATED")]
    batch = batch_of(columns, [{"s": "a", "l": ["b", "cd"]}, {"s": None, "l": []}])
    expected = list(serialized(columns, batch))
    monkeypatch.setattr(message, "_WIDE", 0)
    assert list(serialized(columns, batch)) == expected


@pytest.mark.parametrize("bits", range(0, 64, 7))
def test_numbers_of_every_length(bits: int) -> None:
    edges = [min(2**bits + offset, 2**63 - 1) for offset in (-1, 0, 1)]
    for numbers in (edges, [-n for n in edges], [*edges, 0], [*edges, -1], edges * 1000):
        assert values("INTEGER", numbers) == numbers


def test_a_default_is_there_and_null_is_not() -> None:
    zeros: dict[str, Any] = {
        "BOOLEAN": False,
        "INTEGER": 0,
        "FLOAT": 0.0,
        "NUMERIC": Decimal(0),
        "BIGNUMERIC": Decimal(0),
        "STRING": "",
        "BYTES": b"",
        "DATE": dt.date(1970, 1, 1),
        "DATETIME": dt.datetime(1, 1, 1),
        "TIMESTAMP": dt.datetime(1970, 1, 1, tzinfo=dt.UTC),
        "TIME": dt.time(),
        "JSON": "",
        "GEOGRAPHY": "",
        "INTERVAL": pa.MonthDayNano([0, 0, 0]),
    }
    assert list(zeros) == list(WIRE)
    columns = [SchemaField(kind, kind) for kind in zeros]
    columns += [
        SchemaField("r", "RANGE", range_element_type="DATE"),
        SchemaField("s", "RECORD", fields=columns[:2]),
    ]
    lists = {f"{kind}s": kind for kind in zeros}
    columns += [SchemaField(name, kind, "REPEATED") for name, kind in lists.items()]
    there = zeros | {"r": {"start": None, "end": None}, "s": {"BOOLEAN": None, "INTEGER": None}}
    rows = [
        there | {name: [zeros[kind]] for name, kind in lists.items()},
        dict.fromkeys(there) | {name: [] for name in lists},
    ]
    assert messages(columns, batch_of(columns, rows)) == rows
    [_, nothing] = serialized(columns, batch_of(columns, rows))
    assert nothing == b""


def test_what_lies_beneath_nulls_is_left_out() -> None:
    """Arrow says nothing of the values there: they may be anything."""
    here = np.array([True, False, True])
    buried = pa.py_buffer(np.packbits(here, bitorder="little"))

    def hide(array: Any) -> Any:
        children = [array.values] if isinstance(array, pa.ListArray) else None
        buffers = [buried, *array.buffers()[1 : 2 if children else None]]
        return pa.Array.from_buffers(array.type, 3, buffers, children=children)

    numbers, texts = pa.array([1, -(2**63), 3]), pa.array(["a", "buried", "c"])
    lists = pa.array([[1], [2, 3], []])
    mask = pa.array(~here)
    some = pa.array([None, 7, 8])
    names = ["n", "t", "l", "some"]
    deep = pa.StructArray.from_arrays([numbers, texts, lists, some], names, mask=mask)
    assert deep.field(1).null_count == 0
    batch = pa.record_batch(
        {
            "n": hide(numbers),
            "t": hide(texts),
            "l": hide(lists),
            "d": hide(pa.array([0, 2**62, 0]).cast(pa.timestamp("us"))),
            "s": deep,
        }
    )
    assert batch.column("l").null_count == 1
    inner = [
        SchemaField("n", "INTEGER"),
        SchemaField("t", "STRING"),
        SchemaField("l", "INTEGER", "REPEATED"),
    ]
    deeper = [*inner, SchemaField("some", "INTEGER")]
    columns = [*inner, SchemaField("d", "DATETIME"), SchemaField("s", "RECORD", fields=deeper)]
    first, hidden, last = messages(columns, batch)
    assert hidden == {"n": None, "t": None, "l": [], "d": None, "s": None}
    assert first["s"] == {"n": 1, "t": "a", "l": [1], "some": None}
    assert last["s"] == {"n": 3, "t": "c", "l": [], "some": 8}
    assert (first["l"], last["t"]) == ([1], "c")


def test_the_forms_that_google_documents() -> None:
    """Dates as days, timestamps as microseconds, civil times packed, decimals as their encoder."""
    assert values("DATE", [dt.date(1, 1, 1), dt.date(9999, 12, 31)]) == [-719_162, 2_932_896]
    assert values("TIMESTAMP", [dt.datetime(1969, 12, 31, 23, 59, 59, 999_999, dt.UTC)]) == [-1]
    civil = dt.datetime(2026, 8, 1, 23, 59, 58, 999_999)
    packed = 2026 << 46 | 8 << 42 | 1 << 37 | 23 << 32 | 59 << 26 | 58 << 20 | 999_999
    assert values("DATETIME", [civil]) == [packed]
    assert values("TIME", [civil.time()]) == [packed & (1 << 37) - 1]
    numbers = [Decimal(n).scaleb(-9) for n in (0, 127, 128, -128, -129, 2**63)]
    assert values("NUMERIC", numbers) == [
        *(b"\0", b"\x7f", b"\x80\0", b"\x80", b"\x7f\xff"),
        b"\0" * 7 + b"\x80\0",
    ]
    assert values("BIGNUMERIC", [Decimal("1E-38"), Decimal(-1)])[0] == b"\x01"


@pytest.mark.parametrize(
    ("months", "days", "nanos", "text"),
    [
        (0, 0, 0, "0-0 0 0:0:0"),
        (14, 3, 3_723_500_000_000, "1-2 3 1:2:3.500000"),
        (-1, -3, -1_000, "-0-1 -3 -0:0:0.000001"),
        (-25, 0, 90_000 * 10**9, "-2-1 0 25:0:0"),
        (120_000, -3_660_000, 1, "10000-0 -3660000 0:0:0.000000001"),
        (0, 0, -(2**63), "0-0 0 -2562047:47:16.854775808"),
    ],
)
def test_intervals_are_text(months: int, days: int, nanos: int, text: str) -> None:
    assert values("INTERVAL", [pa.MonthDayNano([months, days, nanos])]) == [text]


def all_fields(message: DescriptorProto) -> Iterator[FieldDescriptorProto]:
    yield from message.field
    for nested in message.nested_type:
        yield from all_fields(nested)


def test_timestamps_are_numbers_and_the_descriptor_stands_alone() -> None:
    """Public failure case 14: google.protobuf.Timestamp "is not defined"."""
    inner = [
        SchemaField("ts", "TIMESTAMP", "REQUIRED"),
        SchemaField("r", "RANGE", range_element_type="TIMESTAMP"),
        SchemaField("all", "TIMESTAMP", "REPEATED"),
    ]
    nested = SchemaField("s", "RECORD", fields=inner)
    outer = SchemaField("s", "RECORD", "REPEATED", fields=[nested])
    descriptor = row_type([*inner, outer])
    message_class(descriptor)  # from nothing but itself
    own = {f"{message.name}" for message in descriptor.nested_type}
    for field in all_fields(descriptor):
        if field.type == Kind.TYPE_MESSAGE:
            assert field.type_name in own
        else:
            assert field.type == Kind.TYPE_INT64
    assert not any(message.nested_type for message in descriptor.nested_type)


def test_the_descriptor_is_proto2() -> None:
    columns = [
        SchemaField("a", "INTEGER", "REQUIRED"),
        SchemaField("b", "INT64"),
        SchemaField("c", "FLOAT64", "REPEATED"),
        SchemaField("d", "STRING", "REPEATED"),
        SchemaField("e", "BOOL", "REPEATED"),
    ]
    descriptor = row_type(columns)
    assert [field.number for field in descriptor.field] == [1, 2, 3, 4, 5]
    assert [field.label for field in descriptor.field] == [
        Kind.LABEL_REQUIRED,
        Kind.LABEL_OPTIONAL,
        *[Kind.LABEL_REPEATED] * 3,
    ]
    assert [field.options.packed for field in descriptor.field] == [False, False, True, False, True]
    assert not descriptor.oneof_decl
    assert not any(field.HasField("proto3_optional") for field in descriptor.field)


def test_names_that_protobuf_does_not_have_are_annotated() -> None:
    legal = ["select", "foo_bar", "fooBar", "column_1", "Record_0"]
    names = ["order-no", "7up", "überflüssig", *legal]
    inner = [SchemaField(name, "INTEGER") for name in names]
    columns = [*inner, SchemaField("größe in m", "RECORD", fields=inner)]
    descriptor = row_type(columns)
    assert all(
        field.name.isascii() and field.name.isidentifier() for field in all_fields(descriptor)
    )
    lower = [field.name.lower() for field in descriptor.field]
    assert len(set(lower)) == len(lower)
    fields = message_class(descriptor).DESCRIPTOR.fields
    assert [column_name(field) for field in fields] == [*names, "größe in m"]
    plain = [field.name for field in fields if not field.GetOptions().ByteSize()]
    assert plain == legal
    rows = [dict.fromkeys(names, 1) | {"größe in m": dict.fromkeys(names, 2)}]
    assert messages(columns, batch_of(columns, rows)) == rows


def test_columns_go_by_the_order_of_the_data_and_may_be_more_in_the_table() -> None:
    columns = [SchemaField("a", "INTEGER"), SchemaField("B", "STRING"), SchemaField("c", "TIME")]
    batch = batch_of([columns[1], columns[0]], [{"B": "x", "a": 1}])
    encoder = ProtobufEncoder(columns, batch.schema, STREAM)
    [request] = encoder.cut(batch, LIMIT, PREFERRED)
    first = Wire.FromString(encoder.first(request.payload))
    descriptor = first.proto_rows.writer_schema.proto_descriptor
    assert [field.name for field in descriptor.field] == ["B", "a"]
    [row] = first.proto_rows.rows.serialized_rows
    found = message_class(descriptor).FromString(row)
    assert (found.B, found.a) == ("x", 1)


def test_a_first_request_has_what_later_ones_lack() -> None:
    columns = [SchemaField("a", "INTEGER")]
    batch = batch_of(columns, [{"a": 1}])
    encoder = ProtobufEncoder(columns, batch.schema, STREAM)
    [request] = encoder.cut(batch, LIMIT, PREFERRED)
    first, later = Wire.FromString(encoder.first(request.payload)), Wire.FromString(request.payload)
    assert (first.write_stream, first.trace_id.encode()) == (STREAM, TRACE_ID)
    assert first.proto_rows.writer_schema.proto_descriptor == row_type(columns)
    assert first.proto_rows.rows == later.proto_rows.rows
    assert not later.write_stream
    assert not later.proto_rows.HasField("writer_schema")


TEXT = [SchemaField("id", "INTEGER"), SchemaField("s", "STRING")]


@pytest.mark.parametrize("block", [1, 7, 1000])
def test_requests_are_cut_by_their_bytes(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(protobuf, "BLOCK_ROWS", block)
    rows = [{"id": n, "s": "é" * (n * 37 % 400)} for n in range(1000)]
    batch = batch_of(TEXT, rows)
    encoder = ProtobufEncoder(TEXT, batch.schema, STREAM)
    requests = list(encoder.cut(batch, 20_000, 9_000))
    position = 0
    for request in requests:
        assert isinstance(request, Request)
        assert request.start == position
        position += request.rows
        assert len(request.payload) <= 9_000 + 1_000  # preferred, and at most a row
        assert len(encoder.first(request.payload)) <= 20_000
    assert position == 1000
    assert messages(TEXT, batch, limit=20_000, preferred=9_000) == rows
    if block == 1000:
        total = sum(len(request.payload) for request in requests)
        assert len(requests) <= 2 * total // 9_000  # half of what they may have, at least


def test_a_limit_counts_the_head_of_a_first_request() -> None:
    batch = batch_of(TEXT, [{"id": n, "s": "x" * 100} for n in range(500)])
    encoder = ProtobufEncoder(TEXT, batch.schema, STREAM)
    limit = 3_000
    for request in encoder.cut(batch, limit, limit):
        assert isinstance(request, Request)
        assert len(encoder.first(request.payload)) <= limit


def test_rows_that_fit_no_request_are_told_from_those_that_do() -> None:
    sizes = [10, 50_000, 10, 20, 30_000, 19_000, 5]
    rows = [{"id": n, "s": "x" * size} for n, size in enumerate(sizes)]
    found = cut(TEXT, batch_of(TEXT, rows), 20_000, 20_000)
    oversized = {row.start: row.size for row in found if isinstance(row, OversizedRow)}
    assert set(oversized) == {1, 4}
    assert 50_000 < oversized[1] < 50_020
    kept = [row.start + n for row in found if isinstance(row, Request) for n in range(row.rows)]
    assert kept == [0, 2, 3, 5, 6]


def test_no_row_fits_beside_a_head_that_is_too_large() -> None:
    found = cut(TEXT, batch_of(TEXT, [{"id": 1, "s": ""}, {"id": 2, "s": ""}]), 100, 100)
    assert [type(row) for row in found] == [OversizedRow, OversizedRow]


def test_no_rows_are_no_requests() -> None:
    assert cut(TEXT, batch_of(TEXT, [])) == []


@pytest.mark.parametrize(
    ("column", "encoder"),
    [
        (SchemaField("x", "TIME"), ProtobufEncoder),
        (SchemaField("x", "TIME", "REPEATED"), ProtobufEncoder),
        (
            SchemaField(
                "x",
                "RECORD",
                "REPEATED",
                fields=[SchemaField("y", "RECORD", fields=[SchemaField("z", "TIME")])],
            ),
            ProtobufEncoder,
        ),
        (SchemaField("x", "INTERVAL"), ArrowEncoder),
        (SchemaField("x", "RANGE", range_element_type="DATE"), ArrowEncoder),
        (SchemaField("x", "DATETIME"), ArrowEncoder),
    ],
)
def test_only_what_arrow_cannot_carry_goes_as_protobuf(column: SchemaField, encoder: type) -> None:
    schema = batch_of([column], []).schema
    other = SchemaField("unsent", "TIME")
    assert type(encoder_for([column, other], schema, STREAM)) is encoder


def test_a_type_that_is_not_known_is_refused_by_name() -> None:
    for column in (SchemaField("x", "HYPERCUBE"), SchemaField("x", "RANGE")):
        with pytest.raises(SchemaError, match="'x'"):
            row_type([column])
