"""Names of extension types, by which BigQuery tells apart what is one type to Arrow."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import pyarrow as pa

_NAME = b"ARROW:extension:name"
_KEYS = (_NAME, b"ARROW:extension:metadata")
# What Arrow's own type says already.
REDUNDANT = (b"google:sqlType:datetime", b"google:sqlType:interval")


def without_extensions(schema: pa.Schema, names: Container[bytes] | None = None) -> pa.Schema:
    """The same columns without the names of extension types, at every depth.

    Args:
        schema: The columns.
        names: The names to forget; all when None.
    """
    return pa.schema([_without(field, names) for field in schema])


def _without(field: pa.Field[Any], names: Container[bytes] | None) -> pa.Field[Any]:
    metadata: Any = field.metadata or {}
    if names is None or metadata.get(_NAME, b"") in names:
        metadata = {key: value for key, value in metadata.items() if key not in _KEYS}
    return field.with_type(_plain(field.type, names)).with_metadata(metadata)


def _plain(kind: Any, names: Container[bytes] | None) -> pa.DataType:
    if isinstance(kind, pa.StructType):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        return pa.struct([_without(field, names) for field in fields])
    if isinstance(kind, pa.ListType):
        return pa.list_(_without(kind.value_field, names))
    return kind
