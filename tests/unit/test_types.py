"""Arrow types and BigQuery types, and casts that lose nothing."""

import datetime as dt
import re
from decimal import Decimal

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from google.cloud.bigquery import SchemaField

from dagster_bq_connector.errors import SchemaError
from dagster_bq_connector.schema.conform import Conformer
from dagster_bq_connector.schema.data import open_data
from dagster_bq_connector.schema.types import table_fields, wire_field

UTC = dt.UTC
MIB = 1024 * 1024
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
    "list_view": (pa.array([[0, 3, 9], [], [4]], pa.list_view(pa.int64())), "INTEGER"),
    "large list_view": (pa.array([[1], [2, 3]], pa.large_list_view(pa.int64())), "INTEGER"),
    "list of structs of lists": (pa.array([[{"a": [1], "b": "x"}], []]), "RECORD"),
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
        (pa.bool8(), "'c' has the Arrow type extension<arrow.bool8>"),
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


def test_the_largest_decimals_are_looked_at_without_a_carry() -> None:
    largest = Decimal("9" * 28 + "." + "9" * 10)
    batch = pa.record_batch({"c": pa.array([largest, Decimal(1)], pa.decimal128(38, 10))})
    done = Conformer(batch.schema, columns(c="NUMERIC"))(batch)
    assert [row.index for row in done.failed] == [0]
    largest = Decimal("9" * 29 + "." + "9" * 9)
    batch = pa.record_batch({"c": pa.array([largest], pa.decimal128(38, 9))})
    done = Conformer(batch.schema, [SchemaField("c", "NUMERIC", precision=31, scale=2)])(batch)
    assert [row.index for row in done.failed] == [0]


@pytest.mark.parametrize("name", CASES)
def test_slices_of_a_batch_are_cast_like_the_whole(name: str) -> None:
    array, _ = CASES[name]
    schema = pa.schema([("column", array.type)])
    conform = Conformer(schema, table_fields(schema))
    whole = pa.record_batch([pa.concat_arrays([array] * 5)], schema=schema)
    for start in range(len(whole)):
        part = conform(whole.slice(start, 3)).batch
        assert part["column"].to_pylist() == whole["column"].to_pylist()[start : start + 3]


def pieces(*arrays: pa.Array) -> list[pa.RecordBatch]:
    return [pa.record_batch({"c": array}) for array in arrays]


def conformed(data: object, column: SchemaField) -> list[object]:
    opened = open_data(data)
    conform = Conformer(opened.schema, [column])
    done = [conform(batch) for batch in opened.batches]
    assert [row for one in done for row in one.failed] == []
    return [value for one in done for value in one.batch["c"].to_pylist()]


def test_later_pieces_keep_their_own_types() -> None:
    """They were once cast to the first piece's, and lost fields, times and zones by it."""
    struct = SchemaField("c", "RECORD", fields=[SchemaField(n, "INTEGER") for n in "ab"])
    wider = pieces(pa.array([{"a": 1}]), pa.array([{"a": 2, "b": 3}]), pa.array([{"A": 4}]))
    assert conformed(wider, struct) == [
        {"a": 1, "b": None},
        {"a": 2, "b": 3},
        {"a": 4, "b": None},
    ]
    nothing_first = pieces(pa.nulls(1), pa.array(["x"]), pa.array(["y"]).dictionary_encode())
    assert conformed(nothing_first, SchemaField("c", "STRING")) == [None, "x", "y"]
    finer = pieces(pa.array([1], pa.timestamp("s")), pa.array([2_500], pa.timestamp("ms")))
    later = dt.datetime(1970, 1, 1, 0, 0, 2, 500_000)
    assert conformed(finer, SchemaField("c", "DATETIME"))[1] == later


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("INTEGER", pa.array([1]), pa.array(["12"])),
        ("DATE", pa.array([dt.date(2026, 8, 1)]), pa.array([dt.datetime(2026, 8, 1, 12, 30)])),
        (
            "TIMESTAMP",
            pa.array([dt.datetime(2026, 8, 1, tzinfo=UTC)]),
            pa.array([dt.datetime(2026, 8, 1)]),
        ),
        ("BOOLEAN", pa.array([True]), pa.array([7])),
    ],
)
def test_a_later_piece_that_does_not_fit_is_refused(
    kind: str, first: pa.Array, second: pa.Array
) -> None:
    with pytest.raises(SchemaError, match=f"'c' is {kind} and takes no Arrow"):
        conformed(pieces(first, second), SchemaField("c", kind))


NESTED = SchemaField(
    "c",
    "RECORD",
    fields=[SchemaField("must", "INTEGER", "REQUIRED"), SchemaField("list", "INTEGER", "REPEATED")],
)
MUST = pa.struct([("must", pa.int64()), ("list", pa.list_(pa.int64()))])


@pytest.mark.parametrize(
    ("array", "column", "bad", "reason"),
    [
        (
            pa.array([{"must": 1}, {"must": None}, None], MUST),
            NESTED,
            [1],
            "null in 'must', which is REQUIRED",
        ),
        (
            pa.array([{"must": 1, "list": [1, None]}, {"must": 2, "list": None}], MUST),
            NESTED,
            [0],
            "null in the array 'list'",
        ),
        (
            pa.array([[1], [1, None], None, [None]]),
            SchemaField("c", "INTEGER", "REPEATED"),
            [1, 3],
            "null in the array 'c'",
        ),
        (
            pa.array([Decimal("1.23"), Decimal("1.239"), None, Decimal("123456789")]),
            SchemaField("c", "NUMERIC", precision=10, scale=2),
            [1, 3],
            r"(more digits after the point|larger) than NUMERIC\(10, 2\)",
        ),
        (
            pa.array(["é", "éé", "ééé", None]),
            SchemaField("c", "STRING", max_length=2),
            [2],
            r"longer than STRING\(2\)",
        ),
        (
            pa.array([b"ab", b"abc"]),
            SchemaField("c", "BYTES", max_length=2),
            [1],
            r"longer than BYTES\(2\)",
        ),
    ],
)
def test_what_the_declared_column_asks_of_a_value(
    array: pa.Array, column: SchemaField, bad: list[int], reason: str
) -> None:
    batch = pa.record_batch({"c": array})
    done = Conformer(batch.schema, [column])(batch)
    assert [row.index for row in done.failed] == bad
    for row in done.failed:
        assert re.search(reason, row.reason), row
    assert done.batch.num_rows == len(array) - len(bad)


def test_a_struct_that_lacks_a_required_field_or_has_one_twice() -> None:
    with pytest.raises(SchemaError, match="'c' lacks the required field 'must'"):
        Conformer(pa.schema([("c", pa.struct([("list", pa.list_(pa.int64()))]))]), [NESTED])
    twins = pa.struct([("must", pa.int64()), ("MUST", pa.int64())])
    with pytest.raises(SchemaError, match="'must' and 'MUST'"):
        Conformer(pa.schema([("c", twins)]), [NESTED])


def test_very_many_bad_rows_are_all_named() -> None:
    odd = pa.array(range(100_000), pa.int64()).cast(pa.timestamp("ns"))
    batch = pa.record_batch({"c": odd})
    done = Conformer(batch.schema, columns(c="DATETIME"))(batch)
    assert len(done.failed) == 99_900
    assert done.batch.num_rows == 100
    assert done.failed[0].reason.startswith("1970-01-01 00:00:00.000000001 does not fit")


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
        "row 1, column 'a': null in 'a', which is REQUIRED"
    ]


def test_a_missing_column_is_added_when_the_rows_must_be_complete() -> None:
    batch = pa.record_batch({"b": [1]})
    table = [*columns(a="STRING", b="INTEGER"), SchemaField("c", "INTEGER", "REPEATED")]
    conformed = Conformer(batch.schema, table, complete=True)(batch)
    assert conformed.batch.to_pylist() == [{"b": 1, "a": None, "c": []}]


def test_the_door_takes_every_form_of_rows() -> None:
    table = pa.table({"a": [1, 2], "b": ["x", "y"]})
    forms = [
        table,
        table.to_batches()[0],
        table.to_reader(),
        pl.DataFrame(table),
        pl.DataFrame(table).lazy(),
        pd.DataFrame({"a": [1, 2], "b": ["x", "y"]}),
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
        (pl.DataFrame({"a": [object()]}), "'a' holds Python objects"),
        (pl.Series("a", [1]), "Series cannot be read as Arrow"),
        (pd.DataFrame({"a": [1, "x"]}), "DataFrame cannot be read as Arrow"),
    ],
)
def test_what_holds_no_rows_is_refused(data: object, blame: str) -> None:
    with pytest.raises(SchemaError, match=blame):
        list(open_data(data).batches)


def test_a_named_index_is_a_column_and_an_unnamed_one_is_not() -> None:
    frame = pd.DataFrame({"id": [1, 2], "v": [3, 4]})
    assert open_data(frame).schema.names == ["id", "v"]
    assert open_data(frame.set_index("id")).schema.names == ["id", "v"]
    assert open_data(frame.set_index(["id", "v"])).schema.names == ["id", "v"]
    assert open_data(frame[frame["id"] > 1]).schema.names == ["id", "v"]


def test_large_pieces_are_cut() -> None:
    table = pa.table({"c": pa.array([b"x" * MIB] * 100)})
    sizes = [batch.nbytes for batch in open_data(table).batches]
    assert len(sizes) >= 3
    assert max(sizes) <= 33 * MIB
