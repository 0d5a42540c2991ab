"""What BigQuery asks of values that have their column's wire type already."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from google.cloud.bigquery import SchemaField

from dagster_bq_connector.schema.place import Place, texts, where
from dagster_bq_connector.schema.types import MAX_BIGNUMERIC, MAX_NUMERIC, child_fields, type_name

# Seconds and days from 1970 to the first and to the last moment that BigQuery has.
FIRST_SECOND, LAST_SECOND = -62_135_596_800, 253_402_300_799
FIRST_DAY, LAST_DAY = -719_162, 2_932_896
_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
_DAY_MICROS = 86_400_000_000
# GoogleSQL's IntervalValue: 10,000 years of 12 months, or of 366 days. Its time part goes beyond
# what Arrow's nanoseconds can say; but it has whole microseconds only.
MAX_MONTHS, MAX_DAYS = 120_000, 3_660_000
_INTERVAL = np.dtype([("months", "<i4"), ("days", "<i4"), ("ns", "<i8")])
_YEARS = "is not within the years 1 to 9999: mend it"
_compute: Any = pc  # its stubs know a part of what it takes


def check_values(array: Any, column: SchemaField, place: Place, parent: Any = None) -> None:
    """Fail the rows of a column that BigQuery would refuse or change.

    Args:
        array: Values of the column's wire type. Structs and lists are looked into.
        column: The column.
        place: Takes the rows: null where none may be, a date or instant outside the years 1 to
            9999, a time outside the day, an interval that is too long or too fine, a range that
            does not end after it starts, too many digits for a NUMERIC(p, s), too long for a
            STRING(n) or BYTES(n).
        parent: The struct that the values belong to. Where it is null nothing is REQUIRED.
    """
    if column.mode == "REPEATED":
        elements, place = array.flatten(), place.elements(array)
        if elements.null_count:
            reason = f"null in the array {column.name!r}, which BigQuery does not have: drop it"
            place.fail(where(elements.is_null()), reason)
        array = elements
    elif column.mode == "REQUIRED" and array.null_count:
        missing = array.is_null()
        if parent is not None:
            missing = _compute.and_(missing, parent.is_valid())
        reason = f"null in {column.name!r}, which is REQUIRED: give it a value"
        place.fail(where(missing), reason)
    check = _CHECKS.get(type_name(column))
    if check is not None and len(array) > array.null_count:
        check(array, column, place)


def takes_any(column: SchemaField) -> bool:
    """Whether every value of the column's wire type is good, so that none need be looked at."""
    if column.mode != "NULLABLE":
        return False
    check = _CHECKS.get(type_name(column))
    unbounded = column.precision is None and column.max_length is None
    return check is None or (unbounded and check in (_check_digits, _check_length))


def outside_years(array: Any) -> Any:
    """Where dates or timestamps are not within the years 1 to 9999."""
    return _outside(_whole(array), *_year_bounds(array.type))


def _check_fields(array: Any, column: SchemaField, place: Place) -> None:
    for child, values in zip(child_fields(column), array.flatten(), strict=True):
        check_values(values, child, place.field(child.name), parent=array)


def _check_range(array: Any, column: SchemaField, place: Place) -> None:
    _check_fields(array, column, place)
    start, end = array.flatten()
    bad = where(_compute.greater_equal(start, end))
    if len(bad):
        rows = pa.array(bad, pa.int64())
        pairs = zip(texts(start.take(rows)), texts(end.take(rows)), strict=True)
        reasons = [f"the range starts at {a} and ends at {b}: it must end later" for a, b in pairs]
        place.fail(bad, reasons)


def _check_years(array: Any, column: SchemaField, place: Place) -> None:
    _fail_outside(array, _year_bounds(array.type), place, _YEARS)


def _check_time(array: Any, column: SchemaField, place: Place) -> None:
    _fail_outside(array, (0, _DAY_MICROS - 1), place, "microseconds are no time of day: mend it")


def _check_interval(array: Any, column: SchemaField, place: Place) -> None:
    parts = np.frombuffer(array.buffers()[1], _INTERVAL, len(array), array.offset * 16)
    long = (np.abs(parts["months"].astype(np.int64)) > MAX_MONTHS) | (
        np.abs(parts["days"].astype(np.int64)) > MAX_DAYS
    )
    fine = parts["ns"] % 1_000 != 0
    for mask, reason in (
        (long, "has more than 120,000 months or 3,660,000 days: mend it"),
        (fine, "is finer than a microsecond, the finest that BigQuery holds: round it first"),
    ):
        if mask.any():
            place.fail_values(array, _compute.and_(pa.array(mask), array.is_valid()), reason)


def _check_digits(array: Any, column: SchemaField, place: Place) -> None:
    if column.precision is None:
        return
    name, scale = type_name(column), column.scale or 0
    whole = column.precision - scale
    most_whole, most_fraction = MAX_NUMERIC if name == "NUMERIC" else MAX_BIGNUMERIC
    text = f"{name}({column.precision}, {scale})"
    if scale < most_fraction:
        # Towards zero, since a carry may need a digit that there is no room for.
        cut = _compute.round(array, ndigits=scale, round_mode="towards_zero")
        bad = where(_compute.not_equal(cut, array))
        place.fail(bad, f"more digits after the point than {text} takes: round it first")
    if whole < most_whole:
        bound = pa.scalar(Decimal(10**whole), array.type)
        bad = where(_compute.greater_equal(_compute.abs(array), bound))
        place.fail(bad, f"larger than {text} takes: mend it")


def _check_length(array: Any, column: SchemaField, place: Place) -> None:
    if column.max_length is None:
        return
    name = type_name(column)
    length = _compute.utf8_length if name == "STRING" else _compute.binary_length
    long = _compute.greater(length(array), column.max_length)
    place.fail(where(long), f"longer than {name}({column.max_length}) takes: shorten it")


def _fail_outside(array: Any, bounds: tuple[int, int], place: Place, reason: str) -> None:
    numbers = _whole(array)
    slots = np.frombuffer(array.buffers()[1], f"<i{array.type.bit_width // 8}")
    slots = slots[array.offset : array.offset + len(array)]
    if bounds[0] <= slots.min() and slots.max() <= bounds[1]:  # what stands at nulls included
        return
    bad = where(_outside(numbers, *bounds))
    # Python and Arrow have no text for most of them.
    values = numbers.take(pa.array(bad, pa.int64())).to_pylist()
    unit = "" if pa.types.is_time(array.type) else f" {_unit(array.type)} from 1970"
    place.fail(bad, [f"{value}{unit} {reason}" for value in values])


def _whole(array: Any) -> Any:
    return array.view(pa.int32() if array.type.bit_width == 32 else pa.int64())


def _outside(numbers: Any, least: int, most: int) -> Any:
    below = _compute.less(numbers, pa.scalar(least, numbers.type))
    return _compute.or_(below, _compute.greater(numbers, pa.scalar(most, numbers.type)))


def _year_bounds(kind: Any) -> tuple[int, int]:
    if pa.types.is_date32(kind):
        return FIRST_DAY, LAST_DAY
    per_second = _PER_SECOND[kind.unit]
    return FIRST_SECOND * per_second, (LAST_SECOND + 1) * per_second - 1


def _unit(kind: Any) -> str:
    return "days" if pa.types.is_date32(kind) else kind.unit


_CHECKS: dict[str, Callable[[Any, SchemaField, Place], None]] = {
    "RECORD": _check_fields,
    "RANGE": _check_range,
    "DATE": _check_years,
    "DATETIME": _check_years,
    "TIMESTAMP": _check_years,
    "TIME": _check_time,
    "INTERVAL": _check_interval,
    "NUMERIC": _check_digits,
    "BIGNUMERIC": _check_digits,
    "STRING": _check_length,
    "BYTES": _check_length,
}
