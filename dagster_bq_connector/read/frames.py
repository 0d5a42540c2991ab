"""Rows as Polars and pandas frames: what becomes of the types that those do not have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.types as at

if TYPE_CHECKING:
    import pandas as pd

_MONTHS_DAYS_NANOSECONDS = np.dtype([("months", "<i4"), ("days", "<i4"), ("nanoseconds", "<i8")])
_INTERVAL = pa.struct([("months", pa.int32()), ("days", pa.int32()), ("nanoseconds", pa.int64())])


def polars_schema(schema: pa.Schema) -> pa.Schema:
    """The columns as Polars can hold them.

    BIGNUMERIC, whose 76 digits fit no decimal of Polars, becomes text; INTERVAL a struct of
    months, days and nanoseconds. Nothing is lost.
    """
    return pa.schema([field.with_type(_polars_type(field.type)) for field in schema])


def polars_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Rows of a read with the columns of `polars_schema`."""
    schema = polars_schema(batch.schema)
    if schema == batch.schema:
        return batch
    columns = [_polars_array(batch.column(i), field.type) for i, field in enumerate(schema)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def pandas_type(kind: Any) -> pd.ArrowDtype | None:
    """The pandas type of an Arrow type, for `to_pandas`.

    It is that same type, with which nothing is lost; but an INTERVAL becomes DateOffset objects,
    since pandas cannot even show a frame with Arrow's.
    """
    import pandas as pd

    return None if at.is_interval(kind) else pd.ArrowDtype(kind)


def _polars_type(kind: Any) -> pa.DataType:
    if at.is_decimal256(kind):
        return pa.string()
    if at.is_interval(kind):
        return _INTERVAL
    if isinstance(kind, pa.ListType):
        element = kind.value_field
        return pa.list_(element.with_type(_polars_type(element.type)))
    if isinstance(kind, pa.StructType):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        return pa.struct([field.with_type(_polars_type(field.type)) for field in fields])
    return kind


def _polars_array(array: Any, kind: Any) -> pa.Array[Any]:
    """An array as it was read, so neither a slice nor in chunks, as `kind` of `_polars_type`."""
    if array.type == kind:
        return array
    if at.is_interval(array.type):
        return _interval_parts(array)
    if isinstance(kind, pa.ListType):
        values = _polars_array(array.values, kind.value_type)
        return pa.ListArray.from_arrays(array.offsets, values, type=kind, mask=array.is_null())
    if isinstance(kind, pa.StructType):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        children = [_polars_array(array.field(i), field.type) for i, field in enumerate(fields)]
        return pa.StructArray.from_arrays(children, fields=fields, mask=array.is_null())
    return array.cast(kind)


def _interval_parts(array: Any) -> pa.Array[Any]:
    parts = np.frombuffer(array.buffers()[1], _MONTHS_DAYS_NANOSECONDS, len(array), 0)
    names = _MONTHS_DAYS_NANOSECONDS.names or ()
    children = [pa.array(np.ascontiguousarray(parts[name])) for name in names]
    fields = [_INTERVAL.field(index) for index in range(_INTERVAL.num_fields)]
    return pa.StructArray.from_arrays(children, fields=fields, mask=array.is_null())
