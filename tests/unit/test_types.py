"""Which BigQuery type an Arrow type becomes, which column takes it, and what neither has."""

import datetime as dt
import uuid
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from google.cloud.bigquery import SchemaField

from dagster_bq_connector.errors import SchemaError
from dagster_bq_connector.schema.conform import Conformer
from dagster_bq_connector.schema.types import table_fields, wire_field

UTC = dt.UTC
ID = uuid.UUID("00010203-0405-0607-0809-0a0b0c0d0e0f")
INTERVAL = pa.month_day_nano_interval()
NUMBERS = pa.array([1, None, 1, 3])
RUNS = pa.RunEndEncodedArray.from_arrays(
    pa.array([1, 3, 4], pa.int32()), pa.array(["a", None, "b"])
)
# What a new table's column becomes, and what stands in it, if that is not what was given.
CASES: dict[str, tuple[Any, ...]] = {
    "int8": (pa.array([1, None], pa.int8()), "INTEGER"),
    "int64": (pa.array([-(2**63), 2**63 - 1]), "INTEGER"),
    "uint32": (pa.array([0, 2**32 - 1], pa.uint32()), "INTEGER"),
    "uint64": (pa.array([0, 2**63 - 1], pa.uint64()), "INTEGER"),
    "float16": (pa.array([1.5, None], pa.float16()), "FLOAT"),
    "float32": (pa.array([1.5, None], pa.float32()), "FLOAT"),
    "float64": (pa.array([float("inf"), None, -0.0]), "FLOAT"),
    "bool": (pa.array([True, None]), "BOOLEAN"),
    "bool8": (
        pa.ExtensionArray.from_storage(pa.bool8(), pa.array([0, None, 2], pa.int8())),
        "BOOLEAN",
        [False, None, True],
    ),
    "string": (pa.array(["é", None]), "STRING"),
    "large_string": (pa.array(["é", None], pa.large_string()), "STRING"),
    "string_view": (pa.array(["é", None], pa.string_view()), "STRING"),
    "dictionary": (pa.array(["a", None, "a"]).dictionary_encode(), "STRING"),
    "dictionary of views": (
        pa.DictionaryArray.from_arrays(
            pa.array([1, None, 0]), pa.array(["a", "b"], pa.string_view())
        ),
        "STRING",
    ),
    "run ends": (RUNS, "STRING"),
    "uuid": (
        pa.ExtensionArray.from_storage(pa.uuid(), pa.array([ID.bytes, None], pa.binary(16))),
        "STRING",
        [str(ID), None],
    ),
    "binary": (pa.array([b"\x00", None]), "BYTES"),
    "large_binary": (pa.array([b"\x00", None], pa.large_binary()), "BYTES"),
    "binary_view": (pa.array([b"\x00", None], pa.binary_view()), "BYTES"),
    "fixed binary": (pa.array([b"ab", None], pa.binary(2)), "BYTES"),
    "decimal": (pa.array([Decimal("1.5"), None], pa.decimal128(10, 2)), "NUMERIC"),
    "decimal32": (pa.array([Decimal("1.5"), None], pa.decimal32(5, 2)), "NUMERIC"),
    "decimal64": (pa.array([Decimal("1.5"), None], pa.decimal64(15, 2)), "NUMERIC"),
    "decimal of thousands": (pa.array([Decimal(15000), None], pa.decimal128(5, -3)), "NUMERIC"),
    "largest numeric": (
        pa.array([Decimal("9" * 29 + "." + "9" * 9)], pa.decimal128(38, 9)),
        "NUMERIC",
    ),
    "wide decimal": (pa.array([Decimal("1.5"), None], pa.decimal128(38, 10)), "BIGNUMERIC"),
    "largest decimal": (
        pa.array([Decimal("9" * 38 + "." + "9" * 38)], pa.decimal256(76, 38)),
        "BIGNUMERIC",
    ),
    "date": (pa.array([dt.date(1, 1, 1), dt.date(9999, 12, 31)]), "DATE"),
    "date64": (pa.array([dt.date(1, 1, 1), None], pa.date64()), "DATE"),
    "instant": (pa.array([dt.datetime(2026, 8, 1, tzinfo=UTC), None]), "TIMESTAMP"),
    "instant elsewhere": (
        pa.array([0, None], pa.timestamp("ns", "Europe/Berlin")),
        "TIMESTAMP",
        [dt.datetime(1970, 1, 1, tzinfo=UTC), None],
    ),
    "civil": (pa.array([dt.datetime(1, 1, 1), None], pa.timestamp("s")), "DATETIME"),
    "civil of nanoseconds": (
        pa.array([1_500_000, None], pa.timestamp("ns")),
        "DATETIME",
        [dt.datetime(1970, 1, 1, 0, 0, 0, 1500), None],
    ),
    "time32": (pa.array([dt.time(23, 59, 59), None], pa.time32("s")), "TIME"),
    "time64": (
        pa.array([86_399_999_999_000, None], pa.time64("ns")),
        "TIME",
        [dt.time.max, None],
    ),
    "interval": (pa.array([pa.MonthDayNano([14, -3, -1000]), None], INTERVAL), "INTERVAL"),
    "duration": (
        pa.array([-90, None], pa.duration("s")),
        "INTERVAL",
        [pa.MonthDayNano([0, 0, -90_000_000_000]), None],
    ),
    "json": (pa.array(['{"a": 1}', None], pa.json_()), "JSON"),
    "list": (pa.array([[1, 2], []]), "INTEGER"),
    "large list": (pa.array([[1, 2], []], pa.large_list(pa.int64())), "INTEGER"),
    "fixed-size list": (pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2)), "INTEGER"),
    "list_view": (pa.array([[0, 3, 9], [], [4]], pa.list_view(pa.int64())), "INTEGER"),
    "large list_view": (pa.array([[1], [2, 3]], pa.large_list_view(pa.int64())), "INTEGER"),
    "list of dictionaries": (
        pa.ListArray.from_arrays([0, 2, 4], pa.array(["x", "y", "x", "x"]).dictionary_encode()),
        "STRING",
    ),
    "dictionary with lists": (
        pa.DictionaryArray.from_arrays(pa.array([1, 0, 1]), pa.array([[1], [2, 3]])),
        "INTEGER",
    ),
    "list of structs of lists": (pa.array([[{"a": [1], "b": "x"}], []]), "RECORD"),
    "map, which is a list": (
        pa.array([[("a", 1), ("b", None)], []], pa.map_(pa.string(), pa.int32())),
        "RECORD",
        [[{"key": "a", "value": 1}, {"key": "b", "value": None}], []],
    ),
    "struct": (pa.array([{"a": 1, "b": "x"}, None]), "RECORD"),
    "struct of anything": (
        pa.array(
            [{"a": 0, "b": "x", "c": [1]}, None, {"a": None, "b": None, "c": None}],
            pa.struct(
                [
                    ("a", pa.timestamp("ns")),
                    ("b", pa.string_view()),
                    ("c", pa.large_list(pa.uint8())),
                ]
            ),
        ),
        "RECORD",
        [
            {"a": dt.datetime(1970, 1, 1), "b": "x", "c": [1]},
            None,
            {"a": None, "b": None, "c": []},
        ],
    ),
    "list of structs": (pa.array([[{"a": 1}], []]), "RECORD"),
}


def conform(array: pa.Array, columns: list[SchemaField]) -> pa.RecordBatch:
    """The batch that travels, of which no row failed."""
    batch = pa.record_batch({"column": array})
    conformed = Conformer(batch.schema, columns)(batch)
    conformed.batch.validate(full=True)
    assert conformed.failed == []
    return conformed.batch


@pytest.mark.parametrize("name", CASES)
def test_what_a_new_column_becomes_and_that_nothing_is_lost(name: str) -> None:
    array, type_name, *other = CASES[name]
    columns = table_fields(pa.schema([("column", array.type)]))
    assert columns[0].field_type == type_name
    assert columns[0].mode == ("REPEATED" if "list" in name else "NULLABLE")
    batch = conform(array, columns)
    assert batch.schema.field(0).type == wire_field(columns[0]).type
    assert batch["column"].to_pylist() == (other[0] if other else array.to_pylist())


@pytest.mark.parametrize("name", CASES)
def test_slices_of_a_batch_are_cast_like_the_whole(name: str) -> None:
    array = CASES[name][0]
    columns = table_fields(pa.schema([("column", array.type)]))
    many = pa.concat_arrays([array] * 5) if name != "run ends" else array
    whole = conform(many, columns)["column"].to_pylist()
    for start in range(len(many)):
        part = conform(many.slice(start, 3), columns)
        assert part["column"].to_pylist() == whole[start : start + 3]


@pytest.mark.parametrize("kind", ["int64", "string", "struct", "list", "interval", "date"])
def test_what_needs_no_cast_is_not_copied(kind: str) -> None:
    array = CASES[kind][0]
    batch = conform(array, table_fields(pa.schema([("column", array.type)])))
    given = [buffer.address for buffer in array.buffers() if buffer]
    assert [b.address for b in batch["column"].buffers() if b] == given


def test_a_list_that_is_null_travels_as_an_empty_one() -> None:
    """Public failure case 41: BigQuery has no null arrays."""
    lists = [pa.list_, pa.large_list, pa.list_view, pa.large_list_view]
    for kind in [*(make(pa.int64()) for make in lists), pa.list_(pa.int64(), 1)]:
        column = conform(
            pa.array([[1], None, [3]], kind), [SchemaField("column", "INTEGER", "REPEATED")]
        )
        assert column["column"].to_pylist() == [[1], [], [3]]
        assert column["column"].null_count == 0
    within = pa.array([{"x": None}, None, {"x": [1]}], pa.struct([("x", pa.list_(pa.int64()))]))
    inner = conform(within, table_fields(pa.schema([("column", within.type)])))["column"]
    assert inner.to_pylist() == [{"x": []}, None, {"x": [1]}]
    assert inner.field(0).null_count == 0
    encoded = pa.DictionaryArray.from_arrays(pa.array([0, None, 1]), pa.array([[1], None]))
    batch = conform(encoded, [SchemaField("column", "INTEGER", "REPEATED")])
    assert batch["column"].to_pylist() == [[1], [], []]


def test_a_column_of_nulls_goes_into_any_that_may_be_null() -> None:
    inner = [SchemaField("x", "INTEGER", "REPEATED"), SchemaField("y", "DATE")]
    for column, value in (
        (SchemaField("column", "NUMERIC"), None),
        (SchemaField("column", "INTERVAL"), None),
        (SchemaField("column", "RECORD", fields=inner), None),
        (SchemaField("column", "RANGE", range_element_type="DATE"), None),
        (SchemaField("column", "INTEGER", "REPEATED"), []),
    ):
        assert conform(pa.nulls(2), [column])["column"].to_pylist() == [value] * 2
    empty = pa.array([[], None], pa.list_(pa.null()))
    batch = conform(empty, [SchemaField("column", "STRING", "REPEATED")])
    assert batch["column"].to_pylist() == [[], []]


DATES = pa.struct([("start", pa.date32()), ("end", pa.date32())])
MOMENTS = pa.struct([("start", pa.timestamp("us", "UTC")), ("end", pa.timestamp("us", "UTC"))])


def marked(kind: pa.DataType, **metadata: str) -> pa.Field:
    return pa.field("c", kind, metadata={k.replace("__", ":"): v for k, v in metadata.items()})


@pytest.mark.parametrize(
    ("field", "type_name", "element"),
    [
        (marked(DATES, google__sqlType="range"), "RANGE", "DATE"),
        (marked(pa.list_(MOMENTS), google__sqlType="range"), "RANGE", "TIMESTAMP"),
        (marked(DATES, ARROW__extension__name="google:sqlType:range"), "RANGE", "DATE"),
        (marked(DATES), "RECORD", None),
        (marked(pa.string(), ARROW__extension__name="google:sqlType:json"), "JSON", None),
        (marked(pa.list_(pa.string()), ARROW__extension__name="google:sqlType:json"), "JSON", None),
        (marked(pa.list_(pa.json_())), "JSON", None),
        (marked(pa.string(), ARROW__extension__name="google:sqlType:geography"), "GEOGRAPHY", None),
        (marked(INTERVAL, ARROW__extension__name="google:sqlType:interval"), "INTERVAL", None),
        (marked(pa.timestamp("us"), ARROW__extension__name="google:sqlType:x"), "DATETIME", None),
    ],
)
def test_what_a_read_session_says_of_a_field_makes_the_same_column(
    field: pa.Field, type_name: str, element: str | None
) -> None:
    [column] = table_fields(pa.schema([field]))
    assert column.field_type == type_name
    found = column.range_element_type
    assert (found.element_type if found else None) == element


def test_a_field_that_is_never_null_is_required() -> None:
    keyed = pa.struct([pa.field("x", pa.int64(), nullable=False), ("y", pa.int64())])
    fields = table_fields(pa.schema([pa.field("c", keyed, nullable=False)]))
    assert [fields[0].mode, *(child.mode for child in fields[0].fields)] == [
        "REQUIRED",
        "REQUIRED",
        "NULLABLE",
    ]
    [column] = table_fields(pa.schema([("m", pa.map_(pa.string(), pa.list_(pa.int64())))]))
    assert [(child.name, child.mode) for child in column.fields] == [
        ("key", "REQUIRED"),
        ("value", "REPEATED"),
    ]


UNION = pa.UnionArray.from_sparse(pa.array([0, 1], pa.int8()), [pa.array([1, 2]), pa.array("xy")])


@pytest.mark.parametrize(
    ("kind", "blame"),
    [
        (pa.null(), "'c' has the Arrow type null.*nulls only.*cast it, or drop it"),
        (UNION.type, "'c' has the Arrow type sparse_union.*several types: cast them to one"),
        (pa.opaque(pa.int32(), "a", "b"), "'c' has the Arrow type ext.*opaque.*pass its storage"),
        (pa.fixed_shape_tensor(pa.int8(), [2]), "'c' has the Arrow type ext.*pass its storage"),
        (pa.list_(pa.list_(pa.int64())), "'c' is a list of lists.*wrap the inner list"),
        (pa.list_(pa.map_(pa.string(), pa.int64())), "'c' is a list of lists"),
        (pa.struct([("x", pa.list_(pa.list_view(pa.int64())))]), "'c.x' is a list of lists"),
        (pa.struct([]), "'c' is a struct without fields: drop it, or give it one"),
        (pa.list_(pa.struct([("x", pa.struct([]))])), "'c.x' is a struct without fields"),
        (pa.struct([("x", pa.struct([("y", pa.null())]))]), "'c.x.y' has the Arrow type"),
        (pa.struct([("x", pa.int64()), ("X", pa.int64())]), "'c.x' and 'c.X' are one column"),
        (pa.decimal256(76, 10), "66 digits before and 10 after.*cast it to a smaller decimal"),
        (pa.decimal128(38, -1), "39 digits before and 0 after"),
    ],
)
def test_a_type_that_cannot_be_stored_is_named(kind: pa.DataType, blame: str) -> None:
    """Public failure case 40 among them: a struct without fields."""
    with pytest.raises(SchemaError, match=blame):
        table_fields(pa.schema([("c", kind)]))


@pytest.mark.parametrize(
    "kind", [DATES.field(0).type, pa.struct([("start", pa.date32()), ("end", pa.time32("s"))])]
)
def test_a_range_that_is_none_is_named(kind: pa.DataType) -> None:
    broken = pa.struct([("start", kind), ("stop", kind)])
    with pytest.raises(SchemaError, match="'c' is marked as a RANGE but is no struct of"):
        table_fields(pa.schema([marked(broken, google__sqlType="range")]))


def columns(**kinds: str) -> list[SchemaField]:
    return [SchemaField(name, kind) for name, kind in kinds.items()]


@pytest.mark.parametrize(
    ("kind", "into", "blame"),
    [
        (pa.string(), "INTEGER", "'c' is INTEGER and takes no Arrow string: cast it to int64"),
        (pa.float64(), "INTEGER", "'c' is INTEGER and takes no Arrow double: cast it to int64"),
        (pa.timestamp("us"), "TIMESTAMP", "no time zone: say which one"),
        (pa.timestamp("us", "UTC"), "DATETIME", "is an instant: say in which time zone"),
        (pa.list_(pa.int64()), "INTEGER", "'c' takes single values"),
        (pa.int64(), "INTERVAL", "'c' is INTERVAL and takes no Arrow int64"),
        (pa.struct([("a", pa.int64())]), "JSON", "'c' is JSON.*pass the JSON as text"),
        (pa.opaque(pa.string(), "a", "b"), "STRING", "'c' is STRING.*pass its storage"),
        (UNION.type, "INTEGER", "'c' is INTEGER.*several types"),
        (pa.date32(), "RECORD", "'c' is RECORD and takes no Arrow date32.*pass a struct"),
        (pa.int64(), "SPACETIME", "'c' is SPACETIME, which this library does not carry"),
    ],
)
def test_types_that_do_not_fit_a_table(kind: pa.DataType, into: str, blame: str) -> None:
    with pytest.raises(SchemaError, match=blame):
        Conformer(pa.schema([("c", kind)]), columns(c=into))


def test_a_range_needs_both_its_ends() -> None:
    column = SchemaField("c", "RANGE", range_element_type="DATE")
    halves = pa.struct([("start", pa.date32())])
    with pytest.raises(SchemaError, match="'c' lacks the required field 'end'"):
        Conformer(pa.schema([("c", halves)]), [column])
    ends = pa.struct([("start", pa.date32()), ("end", pa.string())])
    with pytest.raises(SchemaError, match="'c.end' is DATE and takes no Arrow string"):
        Conformer(pa.schema([("c", ends)]), [column])
    with pytest.raises(SchemaError, match="'c' is RANGE .*: pass a struct of a start and an end"):
        Conformer(pa.schema([("c", pa.string())]), [column])


def test_ends_of_a_range_are_cast_like_columns() -> None:
    ends = pa.struct([("END", pa.timestamp("ms", "Asia/Tokyo")), ("Start", pa.null())])
    array = pa.array([{"END": dt.datetime(2026, 8, 1, tzinfo=UTC), "Start": None}, None], ends)
    batch = conform(array, [SchemaField("column", "RANGE", range_element_type="TIMESTAMP")])
    assert batch["column"].type == MOMENTS
    later = dt.datetime(2026, 8, 1, tzinfo=UTC)
    assert batch["column"].to_pylist() == [{"start": None, "end": later}, None]


def test_a_map_goes_into_a_repeated_record_of_key_and_value() -> None:
    fields = [SchemaField("KEY", "STRING", "REQUIRED"), SchemaField("Value", "NUMERIC")]
    maps = pa.array([[("a", 1)], None, []], pa.map_(pa.string(), pa.int64()))
    batch = conform(maps, [SchemaField("column", "RECORD", "REPEATED", fields=fields)])
    assert batch["column"].to_pylist() == [[{"KEY": "a", "Value": Decimal(1)}], [], []]
    other = [SchemaField("key", "STRING"), SchemaField("count", "INTEGER")]
    column = SchemaField("c", "RECORD", "REPEATED", fields=other)
    with pytest.raises(SchemaError, match="'c' has no field 'value'"):
        Conformer(pa.schema([("c", maps.type)]), [column])


def test_unknown_and_missing_columns_are_named() -> None:
    with pytest.raises(SchemaError, match="no column 'b', 'c'.*The table has a"):
        Conformer(pa.schema([("b", pa.int64()), ("c", pa.int64())]), columns(a="INTEGER"))
    required = [SchemaField("a", "INTEGER", "REQUIRED"), SchemaField("b", "INTEGER")]
    with pytest.raises(SchemaError, match="required column 'a'"):
        Conformer(pa.schema([("b", pa.int64())]), required)


def test_a_struct_that_lacks_a_required_field_or_has_one_twice() -> None:
    fields = [SchemaField("must", "INTEGER", "REQUIRED"), SchemaField("list", "INTEGER")]
    nested = SchemaField("c", "RECORD", fields=fields)
    with pytest.raises(SchemaError, match="'c' lacks the required field 'must'"):
        Conformer(pa.schema([("c", pa.struct([("list", pa.int64())]))]), [nested])
    twins = pa.struct([("must", pa.int64()), ("MUST", pa.int64())])
    with pytest.raises(SchemaError, match="'c.must' and 'c.MUST'"):
        Conformer(pa.schema([("c", twins)]), [nested])
