"""Slices of rows: keys as literals, the SQL of many parts, and rows found in them by Arrow."""

import datetime as dt
import itertools
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest
from google.cloud.bigquery import SchemaField

from dagster_bq_connector import DailyTable, RangePartitioning, TableRef, TimePartitioning
from dagster_bq_connector.errors import PartitionError
from dagster_bq_connector.table import literals
from dagster_bq_connector.table.membership import Membership
from dagster_bq_connector.table.row_slice import (
    BoundSlice,
    KeyFilter,
    Partitioning,
    RowFilter,
    RowSlice,
    every_row,
)
from dagster_bq_connector.table.slice import TimeFilter

TABLE = TableRef("d", "t")
COLUMNS = [
    SchemaField("region", "STRING"),
    SchemaField("n", "INTEGER"),
    SchemaField("day", "DATE"),
    SchemaField("at", "TIMESTAMP"),
    SchemaField("civil", "DATETIME"),
    SchemaField("flag", "BOOLEAN"),
    SchemaField("price", "NUMERIC"),
    SchemaField("text", "STRING"),
]


def no_type(expression: str) -> str:
    raise AssertionError(f"{expression} is a column")


def bound(
    *parts: tuple[str, tuple[RowFilter, ...]],
    partitioning: Partitioning = None,
    find: Any = no_type,
) -> BoundSlice:
    return RowSlice(TABLE, parts).bind(COLUMNS, partitioning, find)


def keys(column: str, *values: str) -> list[tuple[str, tuple[RowFilter, ...]]]:
    return [(value, (KeyFilter(column, (value,)),)) for value in values]


def days(column: str, *values: str, zone: str = "UTC") -> list[tuple[str, tuple[TimeFilter, ...]]]:
    daily = DailyTable("d.t", column=column, timezone=zone)
    return [(value, (daily.for_keys([value]).filter,)) for value in values]


@pytest.mark.parametrize(
    ("kind", "key", "expected"),
    [
        ("STRING", "de", "'de'"),
        ("STRING", "it's \\ a\nb\x00ü", "'it\\'s \\\\ a\\nb\\U00000000ü'"),
        ("INTEGER", "7", "7"),
        ("INTEGER", "-9223372036854775808", "-9223372036854775808"),
        ("BOOLEAN", "True", "TRUE"),
        ("BOOLEAN", "false", "FALSE"),
        ("DATE", "2026-08-01", "DATE '2026-08-01'"),
        ("DATE", "0001-01-01", "DATE '0001-01-01'"),
        ("DATETIME", "2026-08-01 12:30", "DATETIME '2026-08-01 12:30:00'"),
        ("TIMESTAMP", "2026-08-01T12:30+02:00", "TIMESTAMP '2026-08-01 10:30:00+00:00'"),
        ("TIMESTAMP", "2026-08-01", "TIMESTAMP '2026-08-01 00:00:00+00:00'"),
        ("NUMERIC", "1.50", "BIGNUMERIC '1.50'"),
    ],
)
def test_a_key_is_a_literal_of_the_column(kind: str, key: str, expected: str) -> None:
    assert KeyFilter("c", (key,)).sql(kind) == f"`c` IN ({expected})"


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("INTEGER", "seven"),
        ("INTEGER", "7.0"),
        ("INTEGER", "9223372036854775808"),
        ("INTEGER", "٧"),
        ("BOOLEAN", "yes"),
        ("DATE", "20260801"),
        ("DATE", "2026-02-30"),
        ("DATETIME", "2026-08-01T00:00+00:00"),
        ("TIMESTAMP", "today"),
        ("NUMERIC", "NaN"),
        ("NUMERIC", "1.0000000001"),
        ("NUMERIC", "1e40"),
    ],
)
def test_a_key_that_is_none_of_its_column(kind: str, key: str) -> None:
    with pytest.raises(PartitionError) as caught:
        KeyFilter("c", (key,)).sql(kind)
    for named in (repr(key), "'c'", kind, "CAST(c AS STRING)"):
        assert named in str(caught.value)


def test_a_column_that_is_not_compared_with_keys() -> None:
    with pytest.raises(
        PartitionError, match="'c' is FLOAT, .* of one of the types BIGNUMERIC, BOO"
    ):
        KeyFilter("c", ("1.5",)).sql("FLOAT")
    with pytest.raises(PartitionError, match="No partition key was given for column 'c'"):
        KeyFilter("c", ()).sql("STRING")


def test_a_slice_that_would_be_the_whole_table() -> None:
    with pytest.raises(PartitionError, match="name at least one"):
        RowSlice(TABLE, ())
    with pytest.raises(PartitionError, match="'de' of d.t has no filter.*whole table"):
        RowSlice(TABLE, (("de", ()),))


def test_an_array_holds_no_one_key() -> None:
    columns = [SchemaField("tags", "STRING", "REPEATED")]
    slice_ = RowSlice(TABLE, tuple(keys("tags", "a")))
    with pytest.raises(PartitionError, match="'tags' of d.t is an array"):
        slice_.bind(columns, None, no_type)


def test_parts_of_one_column_are_one_list() -> None:
    assert bound(*keys("REGION", "de", "at")).sql() == "((`REGION` IN ('de', 'at')))"
    month = days("day", "2026-08-01", "2026-08-02", "2026-08-03")
    assert bound(*month).sql() == "(((`day` >= DATE '2026-08-01' AND `day` < DATE '2026-08-04')))"


def test_a_grid_of_days_and_regions_is_short() -> None:
    month = days("day", *[f"2026-08-{n:02d}" for n in range(1, 32)])
    regions = keys("region", *"abcdefgh")
    grid = [
        (f"{day}|{region}", (*day_filters, *region_filters))
        for (day, day_filters), (region, region_filters) in itertools.product(month, regions)
    ]
    sql = bound(*grid).sql()
    assert sql.count("DATE '") == 2
    assert sql.count("IN (") == 1
    without_one = bound(*grid[1:]).sql()  # not a rectangle: it is not one product of two lists
    assert without_one.count(" OR ") >= 1


def test_an_expression_keeps_its_own_type() -> None:
    asked: list[str] = []

    def find(expression: str) -> str:
        asked.append(expression)
        return "TIMESTAMP"

    filters = days("TIMESTAMP_SECONDS(n)", "2026-08-01", "2026-08-03", zone="Europe/Berlin")
    slice_ = bound(*filters, find=find)
    assert asked == ["TIMESTAMP_SECONDS(n)"]
    assert slice_.expressions == {"TIMESTAMP_SECONDS(n)"}
    name = "(TIMESTAMP_SECONDS(n))"
    assert f"{name} >= TIMESTAMP '2026-07-31 22:00:00+00:00'" in slice_.sql()
    assert slice_.names == [name]
    assert slice_.part_number().count("WHEN") == 2


@pytest.mark.parametrize(
    ("partitioning", "expected"),
    [
        (None, ""),
        (TimePartitioning("day"), "(`day` IS NULL OR `day` IS NOT NULL)"),
        (TimePartitioning(), "(_PARTITIONTIME IS NULL OR _PARTITIONTIME IS NOT NULL)"),
        (RangePartitioning("n", 0, 9, 1), "(`n` IS NULL OR `n` IS NOT NULL)"),
    ],
)
def test_a_predicate_for_a_required_partition_filter(
    partitioning: Partitioning, expected: str
) -> None:
    """Public failure case 55: a filter of another column would be refused without it."""
    assert every_row(partitioning) == expected
    sql = bound(*keys("region", "de"), partitioning=partitioning).sql()
    own = "((`region` IN ('de')))"
    assert sql == (f"({own}) AND {expected}" if expected else own)


def test_a_filter_of_the_partition_column_is_enough() -> None:
    assert (
        "IS NULL"
        not in bound(*days("day", "2026-08-01"), partitioning=TimePartitioning("DAY")).sql()
    )


def test_a_filter_too_long_for_bigquery() -> None:
    many = keys("region", *(f"{n:0200d}" for n in range(6000)))
    with pytest.raises(PartitionError, match=r"has 1,2\d\d,\d\d\d bytes.*fewer partitions"):
        bound(*many).sql()
    assert literals.MAX_SQL_BYTES < 2**20


def batch(**columns: Any) -> pa.RecordBatch:
    return pa.record_batch(columns)


def test_rows_are_counted_by_key() -> None:
    members = Membership(bound(*keys("region", "de", "at", "ch")))
    rows = batch(Region=["de", "at", "de"], n=[1, 2, 3])
    assert members.count(rows, 0) == {"de": 2, "at": 1}
    assert members.count(rows.slice(1, 1), 0) == {"at": 1}
    assert members.count(rows.slice(0, 0), 0) == {}


@pytest.mark.parametrize(
    ("column", "values", "names"),
    [
        ("n", pa.array([7, -1], pa.int64()), ("7", "-1")),
        ("flag", pa.array([True, False]), ("true", "FALSE")),
        ("price", pa.array([Decimal("1.5"), Decimal("-2")], pa.decimal128(38, 9)), ("1.50", "-2")),
        ("day", pa.array([dt.date(2026, 8, 1), dt.date(1, 1, 1)]), ("2026-08-01", "0001-01-01")),
        (
            "at",
            pa.array([0, 3_600_000_000], pa.timestamp("us", "UTC")),
            ("1970-01-01", "1970-01-01T02:00+01:00"),
        ),
        (
            "civil",
            pa.array([0, 1], pa.timestamp("us")),
            ("1970-01-01", "1970-01-01T00:00:00.000001"),
        ),
    ],
)
def test_keys_of_every_type_are_found_by_arrow(
    column: str, values: "pa.Array[Any]", names: tuple[str, str]
) -> None:
    members = Membership(bound(*keys(column, *names)))
    assert members.count(pa.record_batch({column: values}), 0) == dict.fromkeys(names, 1)


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "America/New_York"])
@pytest.mark.parametrize(
    ("column", "kind"),
    [("day", pa.date32()), ("civil", pa.timestamp("us")), ("at", pa.timestamp("us", "UTC"))],
)
def test_times_are_found_by_the_clocks_of_the_zone(
    zone: str, column: str, kind: pa.DataType
) -> None:
    """Over the change of clocks, and to the microsecond."""
    names = ["2026-03-28", "2026-03-29", "2026-03-30", "2026-11-01"]
    members = Membership(bound(*days(column, *names, zone=zone)))
    starts = [dt.datetime.fromisoformat(name).replace(tzinfo=ZoneInfo(zone)) for name in names]
    ends = [start + dt.timedelta(days=1) for start in starts]
    moments = [*starts, *((end.astimezone(dt.UTC) - dt.timedelta.resolution) for end in ends)]
    local = [moment.astimezone(ZoneInfo(zone)).replace(tzinfo=None) for moment in moments]
    if column == "at":
        values = pa.array([moment.astimezone(dt.UTC) for moment in moments], kind)
    else:
        values = pa.array(local, pa.timestamp("us")).cast(kind, safe=False)
    assert members.count(pa.record_batch({column: values}), 0) == dict.fromkeys(names, 2)
    after = pa.array([ends[-1].astimezone(dt.UTC)], pa.timestamp("us", "UTC"))
    if column != "at":
        after = pa.array([ends[-1].replace(tzinfo=None)], pa.timestamp("us")).cast(kind)
    with pytest.raises(PartitionError, match=f"Row 5 belongs to another partition: {column!r} is"):
        members.count(pa.record_batch({column: after}), 5)


def test_times_as_text_and_as_numbers() -> None:
    names = ["2026-08-01", "2026-08-02"]
    text = Membership(bound(*days("text", *names)))
    assert text.count(batch(text=names), 0) == dict.fromkeys(names, 1)
    number = Membership(bound(*days("n", *names)))
    assert number.count(batch(n=[20260802, 20260801]), 0) == dict.fromkeys(names, 1)
    with pytest.raises(PartitionError, match="Row 0 belongs to another partition: 'n' is 20260803"):
        number.count(batch(n=[20260803]), 0)


def test_parts_of_two_columns() -> None:
    """A row belongs to a part by all its filters; a week and its days are told apart by region."""
    week = DailyTable("d.t", column="day").for_keys([f"2026-08-{n:02d}" for n in range(3, 10)])
    parts = [
        ("week|de", (week.filter, KeyFilter("region", ("de",)))),
        *(
            (f"{day}|at", (*filters, KeyFilter("region", ("at", "ch"))))
            for day, filters in days("day", "2026-08-03", "2026-08-04")
        ),
    ]
    members = Membership(bound(*parts))
    dates = [dt.date(2026, 8, 3), dt.date(2026, 8, 9), dt.date(2026, 8, 3), dt.date(2026, 8, 4)]
    rows = batch(day=dates, region=["de", "de", "ch", "at"])
    assert members.count(rows, 0) == {"week|de": 2, "2026-08-03|at": 1, "2026-08-04|at": 1}
    stray = batch(day=[dt.date(2026, 8, 9)], region=["at"])
    with pytest.raises(PartitionError) as caught:
        members.count(stray, 0)
    for named in ("Row 0", "'day' is 2026-08-09", "'region' is at", "week|de", "Filter the rows"):
        assert named in str(caught.value)


def test_parts_of_different_columns_and_two_filters_of_one() -> None:
    parts = [
        ("de", (KeyFilter("region", ("de",)), KeyFilter("region", ("de", "at")))),
        ("seven", (KeyFilter("n", ("7",)), KeyFilter("region", ("at",)))),
    ]
    members = Membership(bound(*parts))
    assert members.count(batch(region=["de", "at"], n=[7, 7]), 0) == {"de": 1, "seven": 1}
    with pytest.raises(PartitionError, match="Row 1 "):
        members.count(batch(region=["de", "at"], n=[7, 8]), 0)


def test_null_belongs_to_no_part() -> None:
    for parts in (keys("region", "de"), days("day", "2026-08-01")):
        column = parts[0][1][0].column
        kind = {"region": pa.string(), "day": pa.date32()}[column]
        with pytest.raises(PartitionError, match=f"Row 3 belongs .*{column!r} is null"):
            Membership(bound(*parts)).count(pa.record_batch({column: pa.array([None], kind)}), 3)


def test_data_without_the_column() -> None:
    with pytest.raises(PartitionError, match="lacks the column 'region'"):
        Membership(bound(*keys("region", "de"))).count(batch(n=[1]), 0)


def test_many_keys_are_counted_in_one_go() -> None:
    names = [f"k{n}" for n in range(5000)]
    members = Membership(bound(*keys("region", *names)))
    counted = members.count(batch(region=names * 3), 0)
    assert counted == dict.fromkeys(names, 3)
    text = f"writes {', '.join(names[:10])} and 4990 more of d.t"
    with pytest.raises(PartitionError, match=text):
        members.count(batch(region=["other"]), 0)


@pytest.mark.parametrize(
    ("table", "given", "blame"),
    [
        ("d.t", "de", "partition keys are 'de': pass a list"),
        ("d.t", 7, "partition keys are 7: pass a list"),
        ("d.t", [7], "7 is no partition key of d.t"),
        ("d.t", [None], "None is no partition key of d.t"),
        ("d.t", [], "name at least one"),
        ("d.t$20260801", ["2026-08-01"], r"t\$20260801 is one partition"),
    ],
)
def test_keys_are_a_list_of_texts_of_a_whole_table(table: str, given: Any, blame: str) -> None:
    """The letters of a text would be keys, and other partitions would lose rows."""
    with pytest.raises(PartitionError, match=blame):
        RowSlice.by_keys(table, "region", given)
    with pytest.raises(PartitionError, match=blame):
        DailyTable(table, column="day").for_keys(given)
