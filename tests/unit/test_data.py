"""The door: whatever holds rows becomes batches, or an error that names what does not."""

import datetime as dt
import uuid
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from google.cloud.bigquery import SchemaField

from dagster_bq_connector.errors import SchemaError
from dagster_bq_connector.schema.conform import Conformer
from dagster_bq_connector.schema.data import open_data
from dagster_bq_connector.schema.types import table_fields

MIB = 1024 * 1024
UTC = dt.UTC


def rows_of(data: object) -> list[dict[str, Any]]:
    return [row for batch in open_data(data).batches for row in batch.to_pylist()]


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
        [pl.DataFrame(table.slice(0, 1)).lazy(), pd.DataFrame({"a": [2], "b": ["y"]})],
    ]
    for form in forms:
        assert rows_of(form) == table.to_pylist(), type(form)


@pytest.mark.parametrize(
    ("data", "blame"),
    [
        (42, "int holds no rows"),
        ({"a": [1]}, "dict holds no rows"),
        ([], "iterable is empty"),
        ([{"a": 1}], "holds dict objects"),
        ([None], "NoneType holds no rows"),
        ([pa.table({"a": [1]}), None, pa.table({"a": [2]})], "Piece 2 .* NoneType holds no rows"),
        (
            [pa.table({"a": [1]}), pa.table({"b": [1]})],
            r"Piece 2 .* \['b'\].*The 1 row.s. before it fit",
        ),
        (
            [pd.DataFrame({"a": [1, 2]}), pd.DataFrame({"a": ["x", 1]})],
            "Piece 2 of the data: Column 'a' .* at row 1.*The 2 row.s. before it fit",
        ),
        (pl.Series("a", [1]), "Series cannot be read as Arrow"),
    ],
)
def test_what_holds_no_rows_is_refused(data: object, blame: str) -> None:
    with pytest.raises(SchemaError, match=blame):
        list(open_data(data).batches)


@pytest.mark.parametrize(
    ("values", "row", "shown"),
    [
        ([1, 2, "x", 3], 2, "'x'"),
        (["x", None, 1], 2, "1"),
        ([True, 1], 1, "1"),
        ([1, 2**70], 1, "1180591620717411303424"),
        ([Decimal("1"), Decimal("Infinity")], 1, r"Decimal\('Infinity'\)"),
        (["a", "\ud800"], 1, r"'\\ud800'"),
        (["a", object()], 1, "<object object"),
        ([{"x": 1}, {"x": "y"}], 1, "{'x': 'y'}"),
        ([dt.date(2026, 8, 1), dt.datetime(2026, 8, 1, 12)], 1, r"datetime\.datetime"),
        ([dt.datetime(2026, 8, 1, 12), dt.date(2026, 8, 1)], 1, r"datetime\.date\("),
        (
            [dt.datetime(2026, 8, 1), None, dt.datetime(2026, 8, 1, tzinfo=UTC)],
            2,
            r"datetime\.datetime",
        ),
        (["x" * 100, b"\xff"], 1, r"b'\\xff'"),
    ],
)
@pytest.mark.parametrize("before", [0, 1000])
def test_a_pandas_column_of_mixed_values_is_named_with_its_row(
    values: list[object], row: int, shown: str, before: int
) -> None:
    mixed = pd.Series([None] * before + values, dtype=object)
    frame = pd.DataFrame({"fine": range(len(mixed)), "mixed": mixed})
    blame = f"Column 'mixed' cannot be read as Arrow at row {before + row}, where it holds {shown}"
    with pytest.raises(SchemaError, match=blame) as caught:
        open_data(frame)
    assert "Give the column values of one type" in str(caught.value)


@pytest.mark.parametrize(
    ("frame", "blame"),
    [
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), "Duplicate column names"),
        (pd.DataFrame({"a": [1j]}), "'a' has the pandas type complex128, which"),
        (pd.DataFrame({"a": pd.arrays.SparseArray([1, 0])}), "'a' has the pandas type Sparse"),
        (pl.DataFrame({"a": [object()]}), "'a' holds Python objects"),
        (pl.DataFrame({"b": [2**100]}, {"b": pl.Int128}), "'b' has the Polars type Int128"),
        (
            pl.LazyFrame({"b": [{"x": 1}]}, {"b": pl.Struct({"x": pl.Int128})}),
            "'b' has the Polars type Struct.*cast it",
        ),
    ],
)
def test_a_frame_that_arrow_cannot_hold_is_named(frame: object, blame: str) -> None:
    with pytest.raises(SchemaError, match=blame):
        open_data(frame)


def test_what_pandas_calls_missing_is_null() -> None:
    frame = pd.DataFrame(
        {
            "decimal": [Decimal("1.5"), Decimal("NaN")],
            "float": [1.5, float("nan")],
            "moment": [pd.Timestamp("2026-08-01"), pd.NaT],
            "date": [dt.date(2026, 8, 1), pd.NaT],
            "text": ["x", pd.NA],
        }
    )
    assert rows_of(frame)[1] == dict.fromkeys(frame.columns)


def test_frames_have_the_types_of_their_values() -> None:
    """Public failure case 35: the first and the last day go as they are, past nanoseconds."""
    ids = [uuid.UUID(int=1), None]
    frame = pd.DataFrame(
        {
            "date": [dt.date(1, 1, 1), dt.date(9999, 12, 31)],
            "moment": pd.Series([dt.datetime(1, 1, 1), dt.datetime.max], dtype=object),
            "id": ids,
            "kind": pd.Categorical(["a", None]),
            "span": pd.to_timedelta([1, None], unit="s"),
        }
    )
    opened = open_data(frame)
    fields = table_fields(opened.schema)
    kinds = [field.field_type for field in fields]
    assert kinds == ["DATE", "DATETIME", "STRING", "STRING", "INTERVAL"]
    [batch] = opened.batches
    done = Conformer(opened.schema, fields)(batch)
    assert done.failed == []
    assert done.batch["id"].to_pylist() == [str(ids[0]), None]
    assert done.batch["moment"].to_pylist() == [dt.datetime(1, 1, 1), dt.datetime.max]
    period = pd.DataFrame({"p": pd.period_range("2026", periods=1, freq="D")})
    with pytest.raises(SchemaError, match="'p' has the Arrow type .*pass its storage"):
        table_fields(open_data(period).schema)


def test_polars_types_become_columns() -> None:
    frame = pl.DataFrame(
        {
            "category": pl.Series(["a", "b", None], dtype=pl.Categorical),
            "enum": pl.Series(["x", None, "x"], dtype=pl.Enum(["x"])),
            "time": [dt.time(1, 2, 3, 4), None, dt.time.max],
            "decimal": pl.Series(["1.5", None, "2"]).cast(pl.Decimal(10, 2)),
            "array": pl.Series([[1, 2], [3, 4], [5, 6]], dtype=pl.Array(pl.Int64, 2)),
            "struct": [{"x": [1]}, {"x": None}, None],
            "moment": pl.Series([0, 1_000, None], dtype=pl.Datetime("ns", "Europe/Berlin")),
        }
    )
    opened = open_data(frame)
    fields = table_fields(opened.schema)
    kinds = ["STRING", "STRING", "TIME", "NUMERIC", "INTEGER", "RECORD", "TIMESTAMP"]
    assert [field.field_type for field in fields] == kinds
    [batch] = opened.batches
    done = Conformer(opened.schema, fields)(batch)
    assert done.failed == []
    assert done.batch["category"].to_pylist() == ["a", "b", None]
    assert done.batch["enum"].to_pylist() == ["x", None, "x"]
    assert done.batch["time"].to_pylist() == frame["time"].to_list()
    assert done.batch["array"].to_pylist() == [[1, 2], [3, 4], [5, 6]]
    assert done.batch["struct"].to_pylist()[0] == {"x": [1]}


def test_a_lazy_frame_is_not_collected_whole() -> None:
    seen: list[int] = []

    def note(frame: pl.DataFrame) -> pl.DataFrame:
        seen.append(frame.height)
        return frame

    rows = 3_000_000
    lazy = pl.LazyFrame({"n": pl.int_range(rows, eager=True)}).map_batches(note, streamable=True)
    opened = open_data(lazy)
    assert opened.schema == pa.schema([("n", pa.int64())])
    first = next(opened.batches)
    assert sum(seen) < rows
    rest = list(opened.batches)
    assert first.num_rows + sum(batch.num_rows for batch in rest) == rows
    numbers = pa.chunked_array([batch["n"] for batch in [first, *rest]]).to_numpy()
    assert (numbers == range(rows)).all()
    empty = open_data(lazy.filter(pl.col("n") < 0))
    assert (empty.schema, list(empty.batches)) == (opened.schema, [])


def test_an_older_polars_collects_a_lazy_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(pl.LazyFrame, "collect_batches")
    assert rows_of(pl.LazyFrame({"a": [1, 2]})) == [{"a": 1}, {"a": 2}]


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


def test_texts_of_a_dictionary_are_cut_by_what_they_take_in_rows() -> None:
    """They would not fit one column of text otherwise, which ends at 2 GiB."""
    entries = pa.array(["x" * MIB, "y"])
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 3000 + [1]), entries)
    opened = open_data(pa.table({"c": column}))
    conform = Conformer(opened.schema, [SchemaField("c", "STRING")])
    rows = 0
    for batch in opened.batches:
        travels = conform(batch).batch
        assert travels.nbytes <= 33 * MIB
        rows += travels.num_rows
    assert rows == 3001


def test_pieces_are_opened_as_they_come() -> None:
    opened: list[int] = []

    def pieces() -> Iterator[pa.Table]:
        for number in range(3):
            opened.append(number)
            yield pa.table({"n": [number]})

    batches = open_data(pieces()).batches
    assert opened == [0]
    assert next(batches)["n"].to_pylist() == [0]
    assert next(batches)["n"].to_pylist() == [1]
    assert opened == [0, 1]
