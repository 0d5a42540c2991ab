"""Values that would lose something fail their row, and no other; all else is cast."""

import datetime as dt
import re
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from google.cloud.bigquery import SchemaField
from hypothesis import given
from hypothesis import strategies as st

from dagster_bq_connector.schema.conform import Conformed, Conformer

UTC = dt.UTC
FIRST, LAST = -62_135_596_800, 253_402_300_799  # seconds of the years 1 to 9999
INTERVAL = pa.month_day_nano_interval()


def column(kind: str, mode: str = "NULLABLE", **more: Any) -> SchemaField:
    return SchemaField("c", kind, mode, **more)


def cast(array: pa.Array, into: SchemaField) -> Conformed:
    batch = pa.record_batch({"c": array, "row": list(range(len(array)))})
    done = Conformer(batch.schema, [into, SchemaField("row", "INTEGER")])(batch)
    done.batch.validate(full=True)
    return done


def raw(numbers: list[int | None], kind: pa.DataType) -> pa.Array:
    """Values that Python has no objects for."""
    width = pa.int32() if kind.bit_width == 32 else pa.int64()
    return pa.array(numbers, width).view(kind)


FINE = "is finer than a microsecond"
YEARS = "is not within the years 1 to 9999"
# Values, the column, the rows that fail, and what is said of the first of them.
BAD: dict[str, tuple[pa.Array, SchemaField, list[int], str]] = {
    "uint64": (
        pa.array([1, 2**64 - 1, None, 2**63 - 1], pa.uint64()),
        column("INTEGER"),
        [1],
        "18446744073709551615 is larger than INTEGER holds.*use a NUMERIC column",
    ),
    "decimal to integer": (
        pa.array([Decimal("1.5"), Decimal(2**63), Decimal(-(2**63)), None], pa.decimal128(38, 1)),
        column("INTEGER"),
        [0, 1],
        "1.5 is no whole number: round it first",
    ),
    "wide decimal to integer": (
        pa.array([Decimal(2) ** 200, Decimal(-(2**63) - 1), Decimal(7)], pa.decimal256(76, 0)),
        column("INTEGER"),
        [0, 1],
        "is larger than INTEGER holds",
    ),
    "integer to float": (
        pa.array([1, 2**60 + 1, 2**53, -(2**53) - 1]),
        column("FLOAT"),
        [1, 3],
        r"1152921504606846977 is larger than 2\*\*53.*use an INTEGER or NUMERIC column",
    ),
    "unsigned to float": (pa.array([2**64 - 1, 1], pa.uint64()), column("FLOAT"), [0], "2\\*\\*53"),
    "float to numeric": (
        pa.array([0.5, 0.1, float("nan"), None, 1e29, float("-inf"), 2.0**-9, 2.0**-10]),
        column("NUMERIC"),
        [1, 2, 4, 5, 7],
        "0.1 is a float that no decimal of 9 digits.*round it, as with cast",
    ),
    "float32 to bignumeric": (
        pa.array([0.1, 2e38, float("inf"), 2.0**-40], pa.float32()),
        column("BIGNUMERIC"),
        [1, 2, 3],
        "is larger than the column holds",
    ),
    "nan to numeric": (
        pa.array([float("nan")], pa.float16()),
        column("NUMERIC"),
        [0],
        "nan is no number that a decimal can hold: make it null",
    ),
    "fine decimal": (
        pa.array([Decimal("1"), Decimal("1E-10"), None], pa.decimal128(38, 10)),
        column("NUMERIC"),
        [1],
        "1E-10 has more than 9 digits after the point: round it first",
    ),
    "large decimal": (
        pa.array(
            [Decimal(10) ** 29, -(Decimal(10) ** 29), Decimal(10) ** 28], pa.decimal128(38, 0)
        ),
        column("NUMERIC"),
        [0, 1],
        "has more than 29 digits before the point",
    ),
    "largest decimal without a carry": (
        pa.array([Decimal("9" * 28 + "." + "9" * 10), Decimal(1)], pa.decimal128(38, 10)),
        column("NUMERIC"),
        [0],
        "digits after the point",
    ),
    "decimal of 76 digits": (
        pa.array([Decimal(10) ** 38, Decimal(10) ** 37, Decimal(10) ** 65], pa.decimal256(76, 10)),
        column("BIGNUMERIC"),
        [0, 2],
        "has more than 38 digits before the point",
    ),
    "decimal32": (
        pa.array([Decimal("0.5"), Decimal("2")], pa.decimal32(5, 1)),
        column("INTEGER"),
        [0],
        "0.5 is no whole number",
    ),
    "nanoseconds": (
        pa.array([1_500, 1_000, None], pa.timestamp("ns")),
        column("DATETIME"),
        [0],
        f"1970-01-01 00:00:00.000001500 {FINE}.*round it first",
    ),
    "nanoseconds before 1970": (
        pa.array([-1, -1_000], pa.timestamp("ns", "Mars/Crater")),
        column("TIMESTAMP"),
        [0],
        f"1969-12-31 23:59:59.999999999Z {FINE}",
    ),
    "time of nanoseconds": (pa.array([1_001, 1_000], pa.time64("ns")), column("TIME"), [0], FINE),
    "no time of day": (
        raw([0, 86_399_999_999, 86_400_000_000, -1], pa.time64("us")),
        column("TIME"),
        [2, 3],
        "86400000000 microseconds are no time of day",
    ),
    "no time of day in seconds": (
        raw([86_400, 1], pa.time32("s")),
        column("TIME"),
        [0],
        "no time of day",
    ),
    "date with a time": (
        raw([86_400_000, 86_400_001, None], pa.date64()),
        column("DATE"),
        [1],
        "1970-01-02 has a time of day, which a DATE would lose: cut it off, or use a DATETIME",
    ),
    "dates": (
        raw([-719_162, -719_163, 2_932_896, 2_932_897, None], pa.date32()),
        column("DATE"),
        [1, 3],
        f"-719163 days from 1970 {YEARS}",
    ),
    "date64 of no year": (
        raw([2**62 // 86_400_000 * 86_400_000], pa.date64()),
        column("DATE"),
        [0],
        "",
    ),
    "civil": (
        raw(
            [FIRST * 10**6, FIRST * 10**6 - 1, LAST * 10**6 + 999_999, (LAST + 1) * 10**6],
            pa.timestamp("us"),
        ),
        column("DATETIME"),
        [1, 3],
        YEARS,
    ),
    "seconds": (
        raw([FIRST, FIRST - 1, LAST, LAST + 1, 2**62, None], pa.timestamp("s", "UTC")),
        column("TIMESTAMP"),
        [1, 3, 4],
        YEARS,
    ),
    "milliseconds": (raw([2**62, 0], pa.timestamp("ms")), column("DATETIME"), [0], YEARS),
    "long interval": (
        pa.array(
            [
                pa.MonthDayNano([120_000, -3_660_000, 2**63 - 1 - 807]),
                pa.MonthDayNano([120_001, 0, 0]),
                None,
                pa.MonthDayNano([0, -3_660_001, 0]),
            ],
            INTERVAL,
        ),
        column("INTERVAL"),
        [1, 3],
        "has more than 120,000 months or 3,660,000 days",
    ),
    "fine interval": (
        pa.array([pa.MonthDayNano([0, 0, -1]), pa.MonthDayNano([0, 0, -1000])], INTERVAL),
        column("INTERVAL"),
        [0],
        FINE,
    ),
    "long duration": (
        pa.array([2**62, 1, None, -(2**63)], pa.duration("us")),
        column("INTERVAL"),
        [0, 3],
        "4611686018427387904 us is too long for an INTERVAL",
    ),
    "fine duration": (pa.array([1, 1000], pa.duration("ns")), column("INTERVAL"), [0], FINE),
    "null": (
        pa.array([1, None]),
        column("INTEGER", "REQUIRED"),
        [1],
        "null in 'c', which is REQUIRED: give it a value",
    ),
    "null in a list": (
        pa.array([[1], [1, None], None, [None]]),
        column("INTEGER", "REPEATED"),
        [1, 3],
        "null in the array 'c', which BigQuery does not have: drop it",
    ),
    "digits after the point": (
        pa.array([Decimal("1.23"), Decimal("1.239"), None, Decimal("123456789")]),
        column("NUMERIC", precision=10, scale=2),
        [1, 3],
        r"more digits after the point than NUMERIC\(10, 2\) takes: round it first",
    ),
    "digits before the point": (
        pa.array(
            [Decimal(10) ** 25, Decimal(10) ** 25 - 1, -(Decimal(10) ** 25)], pa.decimal128(38, 0)
        ),
        column("NUMERIC", precision=25),
        [0, 2],
        r"larger than NUMERIC\(25, 0\) takes",
    ),
    "many digits before the point": (
        pa.array([Decimal(10**37), Decimal(10**37 - 1)], pa.decimal256(76, 38)),
        column("BIGNUMERIC", precision=75, scale=38),
        [0],
        r"larger than BIGNUMERIC\(75, 38\) takes",
    ),
    "text": (
        pa.array(["é", "éé", "ééé", None]),
        column("STRING", max_length=2),
        [2],
        r"longer than STRING\(2\) takes: shorten it",
    ),
    "bytes": (
        pa.array([b"ab", b"abc"]),
        column("BYTES", max_length=2),
        [1],
        r"longer than BYTES\(2\)",
    ),
    "range": (
        pa.array(
            [
                {"start": dt.date(2026, 8, 2), "end": dt.date(2026, 8, 1)},
                {"start": dt.date(2026, 8, 1), "end": dt.date(2026, 8, 1)},
                {"start": dt.date(2026, 8, 1), "end": None},
                None,
                {"start": None, "end": None},
                {"start": dt.date(1, 1, 1), "end": dt.date(9999, 12, 31)},
            ]
        ),
        column("RANGE", range_element_type="DATE"),
        [0, 1],
        "the range starts at 2026-08-02 and ends at 2026-08-01: it must end later",
    ),
    "dictionary": (
        pa.DictionaryArray.from_arrays(
            pa.array([1, 0, None, 1]), pa.array([1_000, 1_001, 1_002], pa.timestamp("ns"))
        ),
        column("DATETIME"),
        [0, 3],
        FINE,
    ),
    "run ends": (
        pa.RunEndEncodedArray.from_arrays(
            pa.array([2, 3, 5], pa.int32()), pa.array([1_001, 1_000, None], pa.timestamp("ns"))
        ),
        column("DATETIME"),
        [0, 1],
        FINE,
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_value_that_does_not_fit_fails_its_row_alone(name: str) -> None:
    """Public failure cases 35 and 37 among them: no date and no decimal is changed silently."""
    array, into, bad, reason = BAD[name]
    done = cast(array, into)
    assert [row.index for row in done.failed] == bad
    assert {row.column for row in done.failed} == {"c"}
    assert re.search(reason, done.failed[0].reason), done.failed[0]
    good = [n for n in range(len(array)) if n not in bad]
    assert done.batch["row"].to_pylist() == good
    assert done.positions is not None
    assert done.positions.tolist() == good


@pytest.mark.parametrize("name", [name for name in BAD if BAD[name][1].mode == "NULLABLE"])
def test_a_value_that_does_not_fit_is_found_however_deep_it_is(name: str) -> None:
    """In a list of structs, at places that the rows before them shift."""
    array, into, bad, _ = BAD[name]
    leaf = SchemaField("x", into.field_type, fields=into.fields, **settings(into))
    into = column("RECORD", "REPEATED", fields=[leaf])
    structs = pa.StructArray.from_arrays([array], ["x"])
    # Row 0 has no element, row 1 is null, row n has n-1 elements, all but the last of them good.
    good = structs.slice(next(n for n in range(len(array) + 1) if n not in bad), 1)
    if not len(good):
        good = pa.nulls(1, structs.type)
    parts, offsets = [], [0, 0, 0]
    for n in range(len(array)):
        parts += [*[good] * n, structs.slice(n, 1)]
        offsets.append(offsets[-1] + n + 1)
    mask = pa.array([n == 1 for n in range(len(array) + 2)])
    lists = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), join(parts), mask=mask)
    done = cast(lists, into)
    assert [row.index for row in done.failed] == [n + 2 for n in bad]
    assert {row.column for row in done.failed} == {"c.x"}
    assert done.batch["row"].to_pylist() == [
        0, 1, *(n + 2 for n in range(len(array)) if n not in bad)
    ]  # fmt: skip


def settings(field: SchemaField) -> dict[str, Any]:
    names = ("precision", "scale", "max_length", "range_element_type")
    return {name: value for name in names if (value := getattr(field, name)) is not None}


def join(parts: list[pa.Array]) -> pa.Array:
    """Encoded arrays cannot be joined, so their values are."""
    child = [part.field(0) for part in parts]
    if isinstance(child[0], pa.RunEndEncodedArray):
        child = [pc.run_end_decode(each) for each in child]
    return pa.StructArray.from_arrays([pa.concat_arrays(child)], ["x"])


def test_what_stands_below_a_null_is_no_value() -> None:
    odd = pa.array([1_001, 1_000], pa.timestamp("ns"))
    hidden = pa.StructArray.from_arrays([odd], ["x"], mask=pa.array([True, False]))
    done = cast(hidden, column("RECORD", fields=[SchemaField("x", "DATETIME", "REQUIRED")]))
    assert done.failed == []
    assert done.batch["c"].to_pylist()[0] is None


def test_very_many_bad_rows_are_all_named() -> None:
    odd = pa.array(range(100_000), pa.int64()).cast(pa.timestamp("ns"))
    batch = pa.record_batch({"c": odd})
    done = Conformer(batch.schema, [column("DATETIME")])(batch)
    assert len(done.failed) == 99_900
    assert done.batch.num_rows == 100
    assert done.failed[0].reason.startswith("1970-01-01 00:00:00.000000001 is finer")


def exact_decimal(number: float, digits: int) -> Decimal | None:
    """What a float is, when a decimal of so many digits after the point is that, too."""
    if number != number or number in (float("inf"), float("-inf")):
        return None
    exact = Decimal(number)
    exponent = exact.as_tuple().exponent
    assert isinstance(exponent, int)
    return exact if -exponent <= digits else None


@pytest.mark.parametrize(("kind", "digits", "most"), [("NUMERIC", 9, 29), ("BIGNUMERIC", 38, 38)])
@given(data=st.data())
def test_a_float_becomes_the_decimal_that_it_is_or_none(
    kind: str, digits: int, most: int, data: st.DataObject
) -> None:
    halves = st.tuples(st.integers(-(2**53), 2**53), st.integers(-digits - 2, 80))
    numbers = st.floats() | halves.map(lambda pair: float(pair[0]) * 2.0 ** pair[1])
    given_ = data.draw(st.lists(numbers, min_size=1, max_size=20))
    done = cast(pa.array(given_, pa.float64()), column(kind))
    expected = [exact_decimal(number, digits) for number in given_]
    expected = [d if d is not None and abs(d) < Decimal(10) ** most else None for d in expected]
    assert [row.index for row in done.failed] == [n for n, d in enumerate(expected) if d is None]
    assert done.batch["c"].to_pylist() == [d for d in expected if d is not None]


@given(micros=st.lists(st.integers(FIRST * 10**6, LAST * 10**6), min_size=1))
def test_moments_of_any_year_keep_their_microseconds(micros: list[int]) -> None:
    """Public failure case 35: through nanoseconds they were cut, or wrapped around."""
    for kind, into in ((pa.timestamp("us"), "DATETIME"), (pa.timestamp("us", "UTC"), "TIMESTAMP")):
        done = cast(pa.array(micros, kind), column(into))
        assert done.failed == []
        assert done.batch["c"].cast(pa.int64()).to_pylist() == micros
    days = [number // 86_400_000_000 for number in micros]
    assert cast(pa.array(days, pa.int32()).view(pa.date32()), column("DATE")).failed == []
