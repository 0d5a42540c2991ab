"""What a connector was told about the forms of its values, and what may go wrong with one."""

from __future__ import annotations

import base64
import hashlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dagster_bq_connector.cdc.event import Mask

TimePrecision: TypeAlias = Literal["adaptive", "connect", "microseconds", "nanoseconds"]
DecimalHandling: TypeAlias = Literal["precise", "string"]
BinaryHandling: TypeAlias = Literal["base64", "hex"]

_compute: Any = pc  # its stubs know a part of what it takes
_MARKER = "__debezium_unavailable_value"
_CODES = list(_MARKER.encode())
# Text and enums; bytes and precise decimals; bytes as hex; hstore as JSON; the UUID that Java's
# nameUUIDFromBytes makes of it.
_TEXTS = [
    _MARKER,
    base64.b64encode(_MARKER.encode()).decode(),
    _MARKER.encode().hex(),
    f'{{"{_MARKER}":"{_MARKER}"}}',
    str(uuid.UUID(bytes=hashlib.md5(_MARKER.encode()).digest(), version=3)),
]
_SIZES = [len(text) for text in _TEXTS]
_VALUES = pa.array(_TEXTS)


@dataclass(frozen=True)
class Forms:
    """How values are written where the message does not say it; see `DebeziumJson`."""

    time: TimePrecision = "adaptive"
    decimal: DecimalHandling = "precise"
    binary: BinaryHandling = "base64"


class Misfit(Exception):
    """A value that its column cannot take. The text says why, and what to do."""


def shown(value: Any) -> str:
    """A value for people, not too long."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def unavailable_texts(texts: pa.Array[Any]) -> Mask | None:
    """Which strings stand for a value that was not sent; None when none does."""
    lengths = _compute.binary_length(texts)
    likely = _compute.is_in(lengths, value_set=pa.array(_SIZES, pa.int32()))
    if not likely.true_count:
        return None
    found = _compute.is_in(texts, value_set=_VALUES)
    return found.to_numpy(zero_copy_only=False) if found.true_count else None


def unavailable_values(values: Sequence[Any]) -> Mask | None:
    """The same for lists and objects."""
    found = np.fromiter(map(_is_unavailable, values), np.bool_, len(values))
    return found if found.any() else None


def _is_unavailable(value: Any) -> bool:
    if isinstance(value, list):
        return (len(value) == 1 and value[0] in _TEXTS) or value == _CODES
    if isinstance(value, dict):
        if len(value) == 1:
            return _MARKER in value and value[_MARKER] in _TEXTS
        return value.get("value") in _TEXTS and "scale" in value
    return False
