"""Arrow types and BigQuery types, and casts that lose nothing."""

import datetime as dt
from decimal import Decimal

import polars as pl
import pyarrow as pa
import pytest
from google.cloud.bigquery import SchemaField

from dagster_bq_connector.errors import SchemaError
from dagster_bq_connector.schema.conform import Conformer
from dagster_bq_connector.schema.data import open_data
from dagster_bq_connector.schema.types import table_fields, wire_field

UTC = dt.UTC
CASES = {
    "int8": (pa.array([1, None], pa.int8()), "INTEGER"),
    "int64": (pa.array([-(2**63), 2**63 - 1]), "INTEGER"),
    "uint32": (pa.array([0, 2**32 - 1], pa.uint32()), "INTEGER"),
    "float32": (pa.array([1.5, None], pa.float32()), "FLOAT"),
    "bool": (pa.array([True, None]), "BOOLEAN"),
    "string": (pa.array(["é", None]), "STRING"),
    "large_string": (pa.array(["é", None], pa.large_string()), "STRING"),
    "string_view": (pa.array(["é", None], pa.string_view()), "STRING"),
    "dictionary": (pa.array(["a", None, "a"]).dictionary_encode(), "STRING"),
    "binary": (pa.array([b"\x00", None]), "BYTES"),
    "decimal": (pa.array([Decimal("1.5"), None], pa.decimal128(10, 2)), "NUMERIC"),
    "wide decimal": (pa.array([Decimal("1.5"), None], pa.decimal128(38, 10)), "BIGNUMERIC"),
    "date": (pa.array([dt.date(1, 1, 1), dt.date(9999, 12, 31)]), "DATE"),
    "instant": (pa.array([dt.datetime(2026, 8, 1, tzinfo=UTC), None]), "TIMESTAMP"),
    "civil": (pa.array([dt.datetime(1, 1, 1), None], pa.timestamp("s")), "DATETIME"),
    "json": (pa.array(['{"a": 1}', None], pa.json_()), "JSON"),
    "list": (pa.array([[1, 2], []]), "INTEGER"),
    "struct": (pa.array([{"a": 1, "b": "x"}, None]), "RECORD"),
    "list of structs": (pa.array([[{"a": 1}], []]), "RECORD"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_new_column_becomes_and_that_nothing_is_lost(name: str) -> None:
    array, type_name = CASES[name]
    schema = pa.schema([("column", array.type)])
    columns = table_fields(schema)
    assert columns[0].field_type == type_name
    assert columns[0].mode == ("REPEATED" if "list" in name else "NULLABLE")
    conformed = Conformer(schema, columns)(pa.record_batch([array], schema=schema))
    conformed.batch.validate(full=True)
    assert conformed.failed == []
    assert conformed.batch.schema.field(0).type == wire_field(columns[0]).type
    assert conformed.batch["column"].to_pylist() == array.to_pylist()


def test_a_null_list_travels_as_an_empty_one() -> None:
    batch = pa.record_batch({"a": pa.array([[1], None, [2, 3]])})
    conformed = Conformer(batch.schema, table_fields(batch.schema))(batch)
    assert conformed.batch["a"].to_pylist() == [[1], [], [2, 3]]
    assert conformed.batch["a"].null_count == 0


@pytest.mark.parametrize(
    ("kind", "blame"),
    [
        (pa.duration("s"), "'c' has the Arrow type duration"),
        (pa.null(), "'c' has the Arrow type null.*nulls only"),
        (pa.list_(pa.list_(pa.int64())), "'c' is a list of lists"),
        (pa.struct([]), "'c' is a struct without fields"),
        (pa.struct([("x", pa.struct([("y", pa.duration("s"))]))]), "'c.x.y' has the Arrow type"),
        (pa.decimal256(76, 10), "66 digits before"),
    ],
)
def test_a_type_that_cannot_be_stored_is_named(kind: pa.DataType, blame: str) -> None:
    with pytest.raises(SchemaError, match=blame):
        table_fields(pa.schema([("c", kind)]))


def test_columns_that_differ_by_case_only() -> None:
    with pytest.raises(SchemaError, match="'Id' and 'ID'"):
        table_fields(pa.schema([("Id", pa.int64()), ("ID", pa.int64())]))


def columns(**kinds: str) -> list[SchemaField]:
    return [SchemaField(name, kind) for name, kind in kinds.items()]


@pytest.mark.parametrize(
    ("kind", "into", "blame"),
    [
        (pa.string(), "INTEGER", "'c' is INTEGER and takes no Arrow string"),
        (pa.float64(), "INTEGER", "'c' is INTEGER and takes no Arrow double"),
        (pa.timestamp("us"), "TIMESTAMP", "no time zone"),
        (pa.list_(pa.int64()), "INTEGER", "'c' takes single values"),
        (pa.int64(), "INTERVAL", "'c' is INTERVAL"),
    ],
)
def test_types_that_do_not_fit_a_table(kind: pa.DataType, into: str, blame: str) -> None:
    with pytest.raises(SchemaError, match=blame):
        Conformer(pa.schema([("c", kind)]), columns(c=into))


def test_unknown_and_missing_columns_are_named() -> None:
    with pytest.raises(SchemaError, match="no column 'b', 'c'.*The table has a"):
        Conformer(pa.schema([("b", pa.int64()), ("c", pa.int64())]), columns(a="INTEGER"))
    required = [SchemaField("a", "INTEGER", "REQUIRED"), SchemaField("b", "INTEGER")]
    with pytest.raises(SchemaError, match="required column 'a'"):
        Conformer(pa.schema([("b", pa.int64())]), required)


def test_names_match_without_case_and_keep_the_tables() -> None:
    batch = pa.record_batch({"ORDER_id": [1]})
    conformed = Conformer(batch.schema, columns(Order_Id="INTEGER"))(batch)
    assert conformed.batch.schema.names == ["Order_Id"]


@pytest.mark.parametrize(
    ("array", "into", "bad"),
    [
        (pa.array([1, 2**64 - 1, 3], pa.uint64()), "INTEGER", [1]),
        (pa.array([1, 2**60 + 1, 3, 2**60 + 3]), "FLOAT", [1, 3]),
        (pa.array([Decimal("1"), Decimal("1E-10")], pa.decimal128(38, 10)), "NUMERIC", [1]),
        (pa.array([1_500, 1_501, 2_000], pa.timestamp("ns")), "DATETIME", [0, 1]),
    ],
)
def test_a_value_that_does_not_fit_fails_its_row_alone(
    array: pa.Array, into: str, bad: list[int]
) -> None:
    batch = pa.record_batch({"c": array, "row": list(range(len(array)))})
    conformed = Conformer(batch.schema, columns(c=into, row="INTEGER"))(batch)
    assert [row.index for row in conformed.failed] == bad
    assert {row.column for row in conformed.failed} == {"c"}
    good = [n for n in range(len(array)) if n not in bad]
    assert conformed.batch["row"].to_pylist() == good
    assert conformed.positions is not None
    assert conformed.positions.tolist() == good


def test_null_in_a_required_column_fails_its_row() -> None:
    batch = pa.record_batch({"a": pa.array([1, None])})
    conformed = Conformer(batch.schema, [SchemaField("a", "INTEGER", "REQUIRED")])(batch)
    assert [str(row) for row in conformed.failed] == [
        "row 1, column 'a': null in a column that is REQUIRED"
    ]


def test_a_missing_column_is_added_when_the_rows_must_be_complete() -> None:
    batch = pa.record_batch({"b": [1]})
    table = [*columns(a="STRING", b="INTEGER"), SchemaField("c", "INTEGER", "REPEATED")]
    conformed = Conformer(batch.schema, table, complete=True)(batch)
    assert conformed.batch.to_pylist() == [{"b": 1, "a": None, "c": []}]


def test_the_door_takes_every_form_of_rows() -> None:
    pandas = pytest.importorskip("pandas")
    table = pa.table({"a": [1, 2], "b": ["x", "y"]})
    forms = [
        table,
        table.to_batches()[0],
        table.to_reader(),
        pl.DataFrame(table),
        pl.DataFrame(table).lazy(),
        pandas.DataFrame({"a": [1, 2], "b": ["x", "y"]}),
        iter([table.slice(0, 1), pl.DataFrame(table.slice(1))]),
    ]
    for form in forms:
        opened = open_data(form)
        rows = [row for batch in opened.batches for row in batch.to_pylist()]
        assert rows == table.to_pylist(), type(form)


@pytest.mark.parametrize(
    ("data", "blame"),
    [
        (42, "int holds no rows"),
        ({"a": [1]}, "dict holds no rows"),
        ([], "iterable is empty"),
        ([{"a": 1}], "holds dict objects"),
        ([pa.table({"a": [1]}), pa.table({"b": [1]})], r"Piece 2 .* \['b'\]"),
    ],
)
def test_what_holds_no_rows_is_refused(data: object, blame: str) -> None:
    with pytest.raises(SchemaError, match=blame):
        list(open_data(data).batches)
