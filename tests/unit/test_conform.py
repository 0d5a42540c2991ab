"""Batches as one table takes them: columns by name, rows that fail named, pieces as they are."""

import datetime as dt

import pyarrow as pa
import pytest
from google.cloud.bigquery import SchemaField

from dagster_bq_connector.errors import SchemaError
from dagster_bq_connector.schema.conform import Conformer
from dagster_bq_connector.schema.data import open_data

UTC = dt.UTC


def column(
    kind: str, mode: str = "NULLABLE", fields: list[SchemaField] | None = None
) -> SchemaField:
    return SchemaField("c", kind, mode, fields=fields or ())


NESTED = column(
    "RECORD",
    fields=[SchemaField("must", "INTEGER", "REQUIRED"), SchemaField("list", "INTEGER", "REPEATED")],
)
MUST = pa.struct([("must", pa.int64()), ("list", pa.list_(pa.int64()))])


@pytest.mark.parametrize(
    ("array", "bad", "place"),
    [
        (pa.array([{"must": 1}, {"must": None}, None], MUST), [1], "c.must"),
        (
            pa.array([{"must": 1, "list": [1, None]}, {"must": 2, "list": None}], MUST),
            [0],
            "c.list",
        ),
    ],
)
def test_what_is_required_of_a_field(array: pa.Array, bad: list[int], place: str) -> None:
    batch = pa.record_batch({"c": array})
    done = Conformer(batch.schema, [NESTED])(batch)
    assert [(row.index, row.column) for row in done.failed] == [(row, place) for row in bad]


def test_the_first_reason_of_a_row_is_kept() -> None:
    batch = pa.record_batch({"c": pa.array([None, 1]), "d": pa.array([1, 2**60])})
    into = [column("INTEGER", "REQUIRED"), SchemaField("d", "FLOAT")]
    done = Conformer(batch.schema, into)(batch)
    assert [(row.index, row.column) for row in done.failed] == [(0, "c"), (1, "d")]
    assert done.batch.num_rows == 0


def test_names_match_without_case_and_keep_the_tables() -> None:
    batch = pa.record_batch({"ORDER_id": [1]})
    conformed = Conformer(batch.schema, [SchemaField("Order_Id", "INTEGER")])(batch)
    assert conformed.batch.schema.names == ["Order_Id"]


def test_a_missing_column_is_added_when_the_rows_must_be_complete() -> None:
    batch = pa.record_batch({"b": [1]})
    table = [
        SchemaField("a", "STRING"),
        SchemaField("b", "INTEGER"),
        SchemaField("c", "INTEGER", "REPEATED"),
        SchemaField("r", "RANGE", range_element_type="DATE"),
    ]
    conformed = Conformer(batch.schema, table, complete=True)(batch)
    assert conformed.batch.to_pylist() == [{"b": 1, "a": None, "c": [], "r": None}]


def pieces(*arrays: pa.Array) -> list[pa.RecordBatch]:
    return [pa.record_batch({"c": array}) for array in arrays]


def conformed(data: object, into: SchemaField) -> list[object]:
    opened = open_data(data)
    conform = Conformer(opened.schema, [into])
    done = [conform(batch) for batch in opened.batches]
    assert [row for one in done for row in one.failed] == []
    return [value for one in done for value in one.batch["c"].to_pylist()]


def test_later_pieces_keep_their_own_types() -> None:
    """They were once cast to the first piece's, and lost fields, times and zones by it."""
    struct = column("RECORD", fields=[SchemaField(n, "INTEGER") for n in "ab"])
    wider = pieces(pa.array([{"a": 1}]), pa.array([{"a": 2, "b": 3}]), pa.array([{"A": 4}]))
    assert conformed(wider, struct) == [
        {"a": 1, "b": None},
        {"a": 2, "b": 3},
        {"a": 4, "b": None},
    ]
    nothing_first = pieces(pa.nulls(1), pa.array(["x"]), pa.array(["y"]).dictionary_encode())
    assert conformed(nothing_first, column("STRING")) == [None, "x", "y"]
    finer = pieces(pa.array([1], pa.timestamp("s")), pa.array([2_500], pa.timestamp("ms")))
    later = dt.datetime(1970, 1, 1, 0, 0, 2, 500_000)
    assert conformed(finer, column("DATETIME"))[1] == later


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
    blame = f"'c' is {kind} and takes no Arrow.*The 1 row.s. before it fit"
    with pytest.raises(SchemaError, match=blame):
        conformed(pieces(first, second), column(kind))
