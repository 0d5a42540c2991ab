"""However Arrow lays values out, the same ones travel."""

from typing import Any

import numpy as np
import pyarrow as pa
from google.cloud.bigquery import SchemaField
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_bq_connector.schema.conform import Conformer
from support.every_type import EVERY_TYPE, multiset, tables

# Other types that hold every value of a wire type.
SAME: dict[pa.DataType, list[pa.DataType]] = {
    pa.string(): [pa.large_string(), pa.string_view(), pa.dictionary(pa.uint8(), pa.string())],
    pa.binary(): [pa.large_binary(), pa.binary_view(), pa.dictionary(pa.int32(), pa.binary())],
    pa.int64(): [pa.decimal128(19, 0), pa.decimal256(30, 2), pa.dictionary(pa.int8(), pa.int64())],
    pa.decimal128(38, 9): [pa.decimal256(38, 9), pa.decimal256(60, 20)],
    pa.date32(): [pa.date64()],
    pa.time64("us"): [pa.time64("ns")],
    pa.timestamp("us", "UTC"): [pa.timestamp("us", "Asia/Tokyo")],
}


@st.composite
def layouts(draw: st.DrawFn, kind: Any) -> pa.DataType:
    """A type with room for the values of a wire type."""
    if isinstance(kind, pa.StructType):
        fields = [
            field.with_type(draw(layouts(field.type))).with_name(draw(cases(field.name)))
            for field in kind
        ]
        return pa.struct(draw(st.permutations(fields)))
    if isinstance(kind, pa.ListType):
        make = draw(st.sampled_from([pa.list_, pa.large_list, pa.list_view, pa.large_list_view]))
        return make(draw(layouts(kind.value_type)))
    return draw(st.sampled_from([kind, *SAME.get(kind, [])]))


def cases(name: str) -> st.SearchStrategy[str]:
    return st.sampled_from([name, name.upper()])


def renamed(value: Any, kind: Any) -> Any:
    """A value whose structs have the names that the type gives their fields."""
    if value is None:
        return None
    if isinstance(kind, pa.StructType):
        known = {name.casefold(): inner for name, inner in value.items()}
        return {f.name: renamed(known[f.name.casefold()], f.type) for f in kind}
    if isinstance(value, list):
        return [renamed(element, kind.value_type) for element in value]
    return value


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_values_travel_the_same_in_any_layout(data: st.DataObject) -> None:
    fields, rows = data.draw(tables(EVERY_TYPE))
    kinds = [data.draw(layouts(field.type)) for field in rows.schema]
    arrays = [
        pa.array([renamed(value, kind) for value in column.to_pylist()], kind)
        for column, kind in zip(rows.columns, kinds, strict=True)
    ]
    batch = pa.record_batch(arrays, names=rows.schema.names)
    start = data.draw(st.integers(0, rows.num_rows - 1))
    done = Conformer(batch.schema, fields)(batch.slice(start))
    done.batch.validate(full=True)
    assert done.failed == []
    assert done.batch.schema.types == rows.schema.types
    wanted = rows.slice(start)
    assert multiset(pa.Table.from_batches([done.batch]), fields) == multiset(wanted, fields)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_entries_that_are_used_often_are_cast_once(data: st.DataObject) -> None:
    """Dictionaries and run ends of every type, nested ones too."""
    fields, rows = data.draw(tables(EVERY_TYPE))
    batch = rows.combine_chunks().to_batches()[0]
    picks = st.lists(st.integers(0, batch.num_rows - 1), min_size=1, max_size=8)
    indices = data.draw(picks)
    wanted = multiset(rows.take(indices), fields)
    encoded = [pa.DictionaryArray.from_arrays(pa.array(indices), c) for c in batch.columns]
    assert taken(encoded, fields) == wanted
    ends = pa.array(np.arange(1, len(indices) + 1, dtype=np.int32))
    runs = [
        pa.RunEndEncodedArray.from_arrays(ends, c.take(pa.array(indices))) for c in batch.columns
    ]
    assert taken(runs, fields) == wanted


def taken(arrays: list[pa.Array], fields: list[SchemaField]) -> list[Any]:
    batch = pa.record_batch(arrays, names=[field.name for field in fields])
    done = Conformer(batch.schema, fields)(batch)
    assert done.failed == []
    return multiset(pa.Table.from_batches([done.batch]), fields)
