"""Casts of flat Arrow arrays that lose nothing: the values that would are found, not rounded."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as at

from dagster_bq_connector.schema.arrow import INTERVAL, is_string, is_uuid
from dagster_bq_connector.schema.limits import outside_years
from dagster_bq_connector.schema.place import Place

_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
_DAY_MS = 86_400_000
_EXACT_FLOAT = 2**53  # integers beyond have no float64 of their own
_MAX_INT64 = 2**63 - 1
_compute: Any = pc  # its stubs know a part of what it takes


class Misfits(NamedTuple):
    """Which values a cast would change.

    Attributes:
        mask: True where it would.
        reason: Why, to be put after the value.
    """

    mask: Any
    reason: str


def cast_flat(array: pa.Array[Any], kind: pa.DataType, place: Place) -> pa.Array[Any]:
    """Cast values that are neither nested nor encoded.

    Args:
        array: The values.
        kind: What they become.
        place: Takes the rows that cannot be cast; their values become null.
    """
    if array.type == kind:
        return array
    if at.is_decimal(array.type) and array.type.bit_width < 128:  # they have few functions
        array = array.cast(pa.decimal128(array.type.precision, array.type.scale))
    if at.is_floating(array.type) and array.type.bit_width < 64:  # exact; and one case less
        array = array.cast(pa.float32()).cast(pa.float64())
    # Floats are rounded to decimals without a word. All other casts refuse what they would change.
    if not (at.is_floating(array.type) and at.is_decimal(kind)):
        try:
            return _cast(array, kind)
        except pa.ArrowInvalid:
            pass
    for misfits in _misfits(array, kind):
        if place.fail_values(array, misfits.mask, misfits.reason):
            array = _compute.if_else(misfits.mask, pa.scalar(None, array.type), array)
    try:
        return _cast(array, kind)
    except pa.ArrowInvalid:
        return _cast_piecewise(array, kind, place)


def _cast(array: Any, kind: pa.DataType) -> pa.Array[Any]:
    """Cast, or raise pa.ArrowInvalid."""
    if isinstance(array, pa.ExtensionArray):
        if is_uuid(array.type) and is_string(kind):
            return _uuid_text(array.storage)
        return _cast(array.storage, kind)
    if kind == INTERVAL:
        return _interval(array)
    if at.is_decimal(kind) and at.is_integer(array.type):
        array = array.cast(pa.decimal128(20, 0))  # pyarrow asks for room for any 64-bit integer
    return array.cast(kind)


def _cast_piecewise(array: pa.Array[Any], kind: Any, place: Place) -> pa.Array[Any]:
    """Halve until only the bad values are left: for what is very rare, as a text of 2 GiB."""
    parts: list[pa.Array[Any]] = []
    todo = [(0, len(array))]
    while todo:
        start, stop = todo.pop()
        try:
            parts.append(_cast(array.slice(start, stop - start), kind))
        except pa.ArrowInvalid as error:
            if stop - start > 1:
                middle = (start + stop) // 2
                todo += [(middle, stop), (start, middle)]
                continue
            reason = f"the value does not fit: {str(error).splitlines()[0]}"
            place.fail(np.array([start]), reason)
            parts.append(pa.nulls(1, kind))
    return pa.concat_arrays(parts)


def _misfits(array: Any, kind: Any) -> list[Misfits]:
    """What a cast would change. Each step is made after the last one's values are gone."""
    for takes, find in _FINDERS:
        if takes(array.type, kind):
            return find(array, kind)
    return []


def _finer(array: Any, kind: Any) -> list[Misfits]:
    """Times and timestamps: of finer units than microseconds, or so coarse that they overflow."""
    divisor = _PER_SECOND[array.type.unit] // _PER_SECOND[kind.unit]
    if divisor <= 1:
        return [Misfits(outside_years(array), "is not within the years 1 to 9999: mend it")]
    reason = "is finer than a microsecond, the finest that BigQuery holds: round it first"
    return [Misfits(_not_multiple(array.cast(pa.int64()), divisor), reason)]


def _days(array: Any, _kind: Any) -> list[Misfits]:
    reason = "has a time of day, which a DATE would lose: cut it off, or use a DATETIME column"
    return [Misfits(_not_multiple(array.cast(pa.int64()), _DAY_MS), reason)]


def _durations(array: Any, _kind: Any) -> list[Misfits]:
    per_unit = 1_000_000_000 // _PER_SECOND[array.type.unit]
    beyond = _compute.greater(_compute.abs(array.cast(pa.int64())), _MAX_INT64 // per_unit)
    return [Misfits(beyond, f"{array.type.unit} is too long for an INTERVAL: mend it")]


def _digits(array: Any, kind: Any) -> list[Misfits]:
    found: list[Misfits] = []
    given: Any = array.type
    whole, fraction = kind.precision - kind.scale, kind.scale
    if given.precision - given.scale > whole:
        beyond = _compute.greater_equal(_compute.abs(array), _scalar(10**whole, given))
        found.append(Misfits(beyond, f"has more than {whole} digits before the point: mend it"))
    if given.scale > fraction:
        # Towards zero, since a carry may need a digit that there is no room for.
        cut = _compute.round(array, ndigits=fraction, round_mode="towards_zero")
        reason = f"has more than {fraction} digits after the point: round it first"
        found.append(Misfits(_compute.not_equal(cut, array), reason))
    return found


def _whole(array: Any, _kind: Any) -> list[Misfits]:
    """Decimals and unsigned integers that become INTEGER."""
    reason = "is larger than INTEGER holds: mend it, or use a NUMERIC column"
    if at.is_uint64(array.type):
        return [Misfits(_compute.greater(array, pa.scalar(_MAX_INT64, pa.uint64())), reason)]
    cut = _compute.round(array, ndigits=0, round_mode="towards_zero")
    found = [Misfits(_compute.not_equal(cut, array), "is no whole number: round it first")]
    if array.type.precision - array.type.scale >= 19:
        above = _compute.greater(array, _scalar(_MAX_INT64, array.type))
        below = _compute.less(array, _scalar(-_MAX_INT64 - 1, array.type))
        found.append(Misfits(_compute.or_(above, below), reason))
    return found


def _large(array: Any, _kind: Any) -> list[Misfits]:
    above = _compute.greater(array, pa.scalar(_EXACT_FLOAT, array.type))
    if at.is_signed_integer(array.type):
        above = _compute.or_(above, _compute.less(array, pa.scalar(-_EXACT_FLOAT, array.type)))
    reason = "is larger than 2**53, so a FLOAT may not hold it: use an INTEGER or NUMERIC column"
    return [Misfits(above, reason)]


def _floats(array: Any, kind: Any) -> list[Misfits]:
    """A float is a decimal of n digits after the point when 2**n times itself is whole."""
    values = array.fill_null(0).to_numpy(zero_copy_only=False)
    infinite = ~np.isfinite(values)
    with np.errstate(invalid="ignore", over="ignore"):  # of those that are infinite already
        scaled = values * 2.0**kind.scale
        inexact = (scaled != np.floor(scaled)) & ~infinite
    large = (np.abs(values) >= 10.0 ** (kind.precision - kind.scale)) & ~infinite
    digits = f"no decimal of {kind.scale} digits after the point equals"
    return [
        Misfits(pa.array(infinite), "is no number that a decimal can hold: make it null"),
        Misfits(pa.array(large), "is larger than the column holds: mend it"),
        Misfits(pa.array(inexact), f"is a float that {digits}: round it, as with cast(pa.{kind})"),
    ]


def _not_multiple(whole: Any, divisor: int) -> Any:
    coarse = _compute.multiply(_compute.divide(whole, divisor), divisor)
    return _compute.not_equal(coarse, whole)


def _scalar(number: int, kind: Any) -> Any:
    return pa.scalar(Decimal(number), kind)


def _interval(array: Any) -> pa.Array[Any]:
    """Durations as intervals of nanoseconds alone.

    Raises:
        pa.ArrowInvalid: One is too long.
    """
    nanoseconds = array.cast(pa.duration("ns")).cast(pa.int64())
    parts = np.zeros(len(array), dtype=[("months", "<i4"), ("days", "<i4"), ("ns", "<i8")])
    parts["ns"] = nanoseconds.fill_null(0).to_numpy(zero_copy_only=False)
    buffers = [_validity(array), pa.py_buffer(parts)]
    return pa.Array.from_buffers(INTERVAL, len(array), buffers)


def _uuid_text(storage: Any) -> pa.Array[Any]:
    """The 36 characters of UUIDs."""
    count = len(storage)
    filled = storage.fill_null(bytes(16))
    raw = np.frombuffer(filled.buffers()[1], np.uint8, count * 16, filled.offset * 16)
    digits = np.frombuffer(b"0123456789abcdef", np.uint8)
    text = np.full((count, 36), ord("-"), np.uint8)
    columns = [c for c in range(36) if c not in (8, 13, 18, 23)]
    text[:, columns[::2]] = digits[raw.reshape(count, 16) >> 4]
    text[:, columns[1::2]] = digits[raw.reshape(count, 16) & 15]
    offsets = np.arange(0, (count + 1) * 36, 36, dtype=np.int32)
    buffers = [_validity(storage), pa.py_buffer(offsets), pa.py_buffer(text)]
    return pa.Array.from_buffers(pa.string(), count, buffers)


def _validity(array: Any) -> pa.Buffer | None:
    if not array.null_count:
        return None
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    return pa.py_buffer(np.packbits(valid, bitorder="little"))


_Takes = Callable[[pa.DataType, pa.DataType], bool]
_FINDERS: tuple[tuple[_Takes, Callable[[Any, Any], list[Misfits]]], ...] = (
    (lambda given, wanted: at.is_timestamp(wanted) or at.is_time(wanted), _finer),
    (lambda given, wanted: at.is_date64(given), _days),
    (lambda given, wanted: at.is_duration(given), _durations),
    (lambda given, wanted: at.is_floating(given) and at.is_decimal(wanted), _floats),
    (lambda given, wanted: at.is_decimal(given) and at.is_decimal(wanted), _digits),
    (lambda given, wanted: at.is_integer(wanted), _whole),
    (lambda given, wanted: at.is_floating(wanted), _large),
)
