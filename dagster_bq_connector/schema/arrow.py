"""What an Arrow type holds, whatever its layout."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.types as at

MICROSECONDS = "us"
INTERVAL = pa.month_day_nano_interval()


def is_string(kind: pa.DataType) -> bool:
    """Text."""
    return at.is_string(kind) or at.is_large_string(kind) or at.is_string_view(kind)


def is_bytes(kind: pa.DataType) -> bool:
    """Bytes, of fixed size or not."""
    binary = at.is_binary(kind) or at.is_large_binary(kind) or at.is_binary_view(kind)
    return binary or at.is_fixed_size_binary(kind)


def is_instant(kind: pa.DataType) -> bool:
    """A timestamp with time zone."""
    return isinstance(kind, pa.TimestampType) and kind.tz is not None


def is_civil(kind: pa.DataType) -> bool:
    """A timestamp without time zone."""
    return isinstance(kind, pa.TimestampType) and kind.tz is None


def is_exact(kind: pa.DataType) -> bool:
    """An integer or a decimal."""
    return at.is_integer(kind) or at.is_decimal(kind)


def is_interval(kind: pa.DataType) -> bool:
    """Months, days and nanoseconds, or a duration, which is the last of them alone."""
    return kind == INTERVAL or at.is_duration(kind)


def is_list(kind: pa.DataType) -> bool:
    """Any of Arrow's list types; a map is a list of keys and values."""
    lists = at.is_list(kind) or at.is_large_list(kind) or at.is_fixed_size_list(kind)
    return lists or at.is_list_view(kind) or at.is_large_list_view(kind) or at.is_map(kind)


def element_type(kind: Any) -> pa.DataType:
    """The type of a list's values."""
    if at.is_map(kind):
        return pa.struct([kind.key_field.with_name("key"), kind.item_field.with_name("value")])
    return kind.value_type  # every list type has one, but they share no base class


def extension(kind: pa.DataType) -> str:
    """The name of an extension type; empty for any other."""
    return kind.extension_name if isinstance(kind, pa.BaseExtensionType) else ""


def is_bool(kind: pa.DataType) -> bool:
    """Booleans, of a bit or of a byte."""
    return at.is_boolean(kind) or extension(kind) == "arrow.bool8"


def is_uuid(kind: pa.DataType) -> bool:
    """Arrow's UUIDs."""
    return extension(kind) == "arrow.uuid"


def plain_type(kind: Any) -> pa.DataType:
    """The type of the values, below dictionaries, run ends and JSON, which is text."""
    if isinstance(kind, pa.DictionaryType) or at.is_run_end_encoded(kind):
        return plain_type(kind.value_type)
    if extension(kind) == "arrow.json":
        return plain_type(kind.storage_type)
    return kind
