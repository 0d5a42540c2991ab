"""Casts of Arrow columns to what travels. A row that would lose something fails, and no other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as at

from dagster_bq_connector.schema.arrow import element_type, extension
from dagster_bq_connector.schema.exact import cast_flat
from dagster_bq_connector.schema.place import Numbers, Place

_compute: Any = pc  # its stubs know a part of what it takes


def cast_array(array: Any, kind: pa.DataType, place: Place) -> pa.Array[Any]:
    """Cast values to a wire type, columnar, however they are nested or encoded.

    Args:
        array: The values.
        kind: What they become. Structs are matched by the names of their fields, without case;
            fields that are missing become null.
        place: Takes the rows that cannot be cast. What their values become means nothing.

    Returns:
        The very same array when nothing had to change. A list is never null in it: BigQuery has
        no null arrays, so those become empty ones.
    """
    if at.is_null(array.type):
        return nulls(len(array), kind)
    if isinstance(array, pa.DictionaryArray):
        indices = array.indices.cast(pa.int64()).fill_null(-1).to_numpy()
        return _cast_entries(array.dictionary, indices, kind, place)
    if isinstance(array, pa.RunEndEncodedArray):
        ends = array.run_ends.to_numpy(zero_copy_only=False)
        rows = np.arange(array.offset, array.offset + len(array))
        return _cast_entries(array.values, np.searchsorted(ends, rows, side="right"), kind, place)
    if extension(array.type) == "arrow.json":
        return cast_array(array.storage, kind, place)
    if isinstance(kind, pa.ListType):
        return _cast_list(array, kind, place)
    if isinstance(kind, pa.StructType) and isinstance(array, pa.StructArray):
        return _cast_struct(array, kind, place)
    return cast_flat(array, kind, place)


def nulls(count: int, kind: Any) -> pa.Array[Any]:
    """`count` nulls; empty lists where there are no null ones."""
    if isinstance(kind, pa.ListType):
        offsets: Any = pa.array(np.zeros(count + 1, dtype=np.int32))
        return pa.ListArray.from_arrays(offsets, nulls(0, kind.value_type), type=kind)
    if isinstance(kind, pa.StructType):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        children = [nulls(count, field.type) for field in fields]
        mask = pa.array(np.ones(count, dtype=bool))
        return pa.StructArray.from_arrays(children, fields=fields, mask=mask)
    return pa.nulls(count, kind)


def _cast_entries(entries: Any, indices: Numbers, kind: pa.DataType, place: Place) -> pa.Array[Any]:
    """Values that stand once, however often they are used: cast first, then taken."""
    cast = cast_array(entries, kind, place.entries(indices))
    taken = cast.take(pa.array(indices, pa.int64(), mask=indices < 0))
    if at.is_nested(kind) and (indices < 0).any():  # no list may be null
        return cast_array(taken, kind, place)
    return taken


def _cast_list(array: Any, kind: pa.ListType[Any], place: Place) -> pa.Array[Any]:
    if at.is_map(array.type):
        array = array.cast(pa.list_(element_type(array.type)))
    elements = array.flatten()
    values = cast_array(elements, kind.value_type, place.elements(array))
    if values is elements and array.type == kind and not array.null_count:
        return array
    # The array types' own cast of list views is wrong; their lengths and values are right.
    lengths = _compute.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
    offsets = np.zeros(len(array) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    starts: Any = pa.array(offsets)
    return pa.ListArray.from_arrays(starts, values, type=kind)


def _cast_struct(array: Any, kind: pa.StructType, place: Place) -> pa.Array[Any]:
    given = {array.type.field(i).name.casefold(): i for i in range(array.type.num_fields)}
    fields = [kind.field(index) for index in range(kind.num_fields)]
    flat = array.flatten()  # null where the struct is: what stands below a null is no value
    children: list[pa.Array[Any]] = []
    for field in fields:
        index = given.get(field.name.casefold())
        children.append(
            nulls(len(array), field.type)
            if index is None
            else cast_array(flat[index], field.type, place.field(field.name))
        )
    same = all(child is other for child, other in zip(children, flat, strict=False))
    if same and array.type == kind:
        return array
    mask = array.is_null() if array.null_count else None
    return pa.StructArray.from_arrays(children, fields=fields, mask=mask)
