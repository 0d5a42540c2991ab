"""Dates, times, instants and intervals, in every form that Debezium gives them."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dagster_bq_connector.cdc.envelope.arrays import integers
from dagster_bq_connector.cdc.envelope.connect import Meaning
from dagster_bq_connector.cdc.envelope.forms import Forms, Misfit, shown

_MonthDayNano: Any = pa.MonthDayNano
_compute: Any = pc  # its stubs know a part of what it takes
_UNITS = {
    "io.debezium.time.Time": "ms",
    "io.debezium.time.MicroTime": "us",
    "io.debezium.time.NanoTime": "ns",
    "org.apache.kafka.connect.data.Time": "ms",
    "io.debezium.time.Timestamp": "ms",
    "io.debezium.time.MicroTimestamp": "us",
    "io.debezium.time.NanoTimestamp": "ns",
    "org.apache.kafka.connect.data.Timestamp": "ms",
    "io.debezium.time.MicroDuration": "us",
    "io.debezium.time.NanoDuration": "ns",
}
DAYS = ("io.debezium.time.Date", "org.apache.kafka.connect.data.Date")
_PER_SECOND = {"ms": 10**3, "us": 10**6, "ns": 10**9}
_DECLARED = {"connect": "ms", "microseconds": "us", "nanoseconds": "ns"}
# The years 1 to 9999.
_SECONDS = (-62_135_596_800, 253_402_300_799)
_DAYS = (-719_162, 2_932_896)
# What PostgreSQL's driver makes of infinite dates and timestamps: seen in captured events. A date
# is the greatest or smallest number of days since 2000, counted from 1970 and cut to 32 bits.
_INFINITE_DAYS = {-2_147_472_692: "infinity", -2_147_472_691: "-infinity"}
_INFINITE = {
    "ms": {9_223_372_036_825_200: "infinity", -9_223_372_036_832_400: "-infinity"},
    "us": {9_223_372_036_825_200_000: "infinity", -9_223_372_036_832_400_000: "-infinity"},
}
_INTERVAL = re.compile(
    r"(?P<sign>-?)P(?:(?P<years>-?\d+)Y)?(?:(?P<months>-?\d+)M)?(?:(?P<days>-?\d+)D)?"
    r"(?:T(?:(?P<hours>-?\d+)H)?(?:(?P<minutes>-?\d+)M)?"
    r"(?:(?P<seconds>-?\d*)(?:\.(?P<fraction>\d{1,9}))?S)?)?"
)
_ZERO_TAIL = r"(\.[0-9]{6})0+"
_FINE = "is finer than a microsecond, the finest that BigQuery holds: round it at the source"


def unit_of(meaning: Meaning | None, forms: Forms) -> str | None:
    """The unit of an integer that is a time or an instant; None when nothing says it."""
    if meaning is not None:
        return _UNITS.get(meaning.name)
    return _DECLARED.get(forms.time)


def days(values: Sequence[int | None]) -> Any:
    """Days since 1970 as dates.

    Raises:
        Misfit: One is not within the years 1 to 9999.
    """
    numbers = integers(values)
    _check(numbers, _DAYS, _INFINITE_DAYS, "days")
    return numbers.cast(pa.int32()).cast(pa.date32())


def instants(values: Sequence[int | None], meaning: Meaning | None, forms: Forms) -> Any:
    """Milli-, micro- or nanoseconds since 1970 as timestamps of that unit, without zone.

    Raises:
        Misfit: One is not within the years 1 to 9999, or nothing says the unit.
    """
    unit: Any = unit_of(meaning, forms)
    if unit is None:
        raise _no_unit(values, meaning)
    first, last = (second * _PER_SECOND[unit] for second in _SECONDS)
    bounds = (first, last + _PER_SECOND[unit] - 1)
    numbers = integers(values)
    _check(numbers, bounds, _INFINITE.get(unit, {}), unit)
    kind: Any = pa.timestamp(unit)
    return numbers.cast(kind)


def clock(values: Sequence[int | None], meaning: Meaning | None, forms: Forms) -> Any:
    """Milli-, micro- or nanoseconds of a day as times.

    Raises:
        Misfit: Nothing says the unit, or one is no time of day.
    """
    unit = unit_of(meaning, forms)
    if unit is None:
        raise _no_unit(values, meaning)
    numbers = integers(values)
    for value in _ends(numbers):
        if not 0 <= value < 86_400 * _PER_SECOND[unit]:
            raise Misfit(f"{value} {unit} is no time of day: mend it, or use a STRING column")
    if unit == "ms":
        return numbers.cast(pa.int32()).cast(pa.time32("ms"))
    return numbers.cast(pa.time64("us" if unit == "us" else "ns"))


def durations(values: Sequence[int | None], meaning: Meaning | None) -> Any:
    """Microseconds (or nanoseconds) as intervals. Debezium counts a month as 30.44 days in them."""
    unit: Any = "us" if meaning is None else _UNITS.get(meaning.name)
    if unit is None:
        raise Misfit(f"{shown(values[0])} has the type {meaning and meaning.type}: no interval")
    return integers(values).cast(pa.duration(unit))


def dates_of_texts(texts: Any) -> Any:
    """ISO dates; a zone of UTC after them means nothing."""
    _check_infinite(texts)
    return _compute.utf8_rtrim(texts, characters="Z").cast(pa.date32())


def clock_of_texts(texts: Any) -> Any:
    """ISO times. Those with a zone become that of UTC, as Debezium sends them."""
    civil = _compute.utf8_rtrim(_trimmed(texts), characters="Z")
    try:
        moments = _compute.binary_join_element_wise("1970-01-01", civil, "T")
        return moments.cast(pa.timestamp("us")).cast(pa.time64("us"))
    except pa.ArrowInvalid:
        return pa.array([t if t is None else _utc(t) for t in texts.to_pylist()], pa.time64("us"))


def instants_of_texts(texts: Any, kind: str) -> Any:
    """ISO timestamps as UTC.

    Args:
        texts: With a zone, or, for a DATETIME, without.
        kind: TIMESTAMP or DATETIME. The latter's are civil times of UTC.

    Raises:
        Misfit: One is infinite.
        pa.ArrowInvalid: One is no such text, or is finer than a microsecond.
    """
    try:
        return _moments(texts, kind)
    except pa.ArrowInvalid:
        _check_infinite(texts)
        return _moments(_trimmed(texts), kind)


def _moments(texts: Any, kind: str) -> Any:
    zoned, civil = pa.timestamp("us", "UTC"), pa.timestamp("us")
    if kind == "TIMESTAMP":
        return texts.cast(zoned)
    try:
        return texts.cast(zoned).cast(civil)
    except pa.ArrowInvalid:
        return texts.cast(civil)


def intervals_of_texts(texts: Any) -> Any:
    """ISO 8601 intervals, each part with its own sign.

    Raises:
        Misfit: One is something else.
    """
    values = [None if text is None else _interval(text) for text in texts.to_pylist()]
    return pa.array(values, pa.month_day_nano_interval())


def infinity_of(value: int, meaning: Meaning) -> str | None:
    """`infinity` or `-infinity`, when an integer stands for it."""
    if meaning.name in DAYS:
        return _INFINITE_DAYS.get(value)
    return _INFINITE.get(_UNITS.get(meaning.name, ""), {}).get(value)


def _ends(numbers: Any) -> list[int]:
    """The least and the greatest."""
    found = _compute.min_max(numbers).as_py()
    return [] if found["min"] is None else [found["min"], found["max"]]


def _check(numbers: Any, bounds: tuple[int, int], infinite: dict[int, str], unit: str) -> None:
    for value in _ends(numbers):
        if not bounds[0] <= value <= bounds[1]:
            if name := infinite.get(value):
                raise Misfit(f"{value} {_infinite(name)}")
            raise Misfit(
                f"{value} {unit} from 1970 is not within the years 1 to 9999: mend it, or use a "
                "STRING column"
            )


def _check_infinite(texts: Any) -> None:
    found = _compute.is_in(texts, value_set=pa.array(["infinity", "-infinity"]))
    if found.true_count:
        text = texts.filter(found)[0].as_py()
        raise Misfit(f"{text} {_infinite(text)}")


def _infinite(name: str) -> str:
    return (
        f"is PostgreSQL's {name}, which no date or time of BigQuery holds: use a STRING column, or "
        "mend it at the source"
    )


def _no_unit(values: Sequence[int | None], meaning: Meaning | None) -> Misfit:
    value = next((v for v in values if v is not None), None)
    if meaning is not None:
        return Misfit(f"{value} has the type {meaning.name or meaning.type}, which is no such time")
    return Misfit(
        f"{value} may be milli- or microseconds: time.precision.mode=adaptive decides it by the "
        "precision of the source's column, which the message does not say. Send schemas "
        "(value.converter.schemas.enable=true), or set time.precision.mode=microseconds on the "
        "connector and DebeziumJson(time_precision='microseconds')"
    )


def _trimmed(texts: Any) -> Any:
    """Without zeros beyond microseconds, which Arrow takes for digits that would be lost."""
    return _compute.replace_substring_regex(texts, _ZERO_TAIL, r"\1")


def _utc(text: str) -> dt.time:
    try:
        time = dt.time.fromisoformat(text)
    except ValueError:
        raise Misfit(f"{shown(text)} is no time of day") from None
    if re.search(r"\.\d{6}\d*[1-9]", text):
        raise Misfit(f"{text} {_FINE}")
    zone = time.utcoffset()
    if zone is None:
        return time
    return (dt.datetime.combine(dt.date(2000, 1, 2), time.replace(tzinfo=None)) - zone).time()


def _interval(text: str) -> pa.MonthDayNano:
    found = _INTERVAL.fullmatch(text)
    if found is None or text.endswith(("P", "T")):
        raise Misfit(f"{shown(text)} is no interval of ISO 8601")
    sign = -1 if found["sign"] else 1
    names = ("years", "months", "days", "hours", "minutes")
    parts = {name: int(found[name] or 0) for name in names}
    seconds = found["seconds"] or "0"
    nanos = int((found["fraction"] or "").ljust(9, "0"))
    # Debezium takes the fraction from a floating-point number and cuts it: PostgreSQL's 5.472
    # seconds, which have no nanoseconds, come as 5.471999999.
    nanos += nanos % 1000 == 999
    nanos = int(seconds if seconds != "-" else 0) * 10**9 + (
        -nanos if seconds.startswith("-") else nanos
    )
    nanos += (parts["hours"] * 60 + parts["minutes"]) * 60 * 10**9
    months = parts["years"] * 12 + parts["months"]
    try:
        return _MonthDayNano([sign * months, sign * parts["days"], sign * nanos])
    except OverflowError:
        raise Misfit(f"{shown(text)} is longer than an INTERVAL") from None
