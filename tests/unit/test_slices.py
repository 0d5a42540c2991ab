"""Partition keys, windows of time, partition ids, and the rows that belong to them."""

import datetime as dt
import itertools
import re
from typing import Any
from zoneinfo import ZoneInfo

import dagster as dg
import pyarrow as pa
import pytest
from google.cloud import bigquery

from dagster_bq_connector import DailyTable, TableOptions, TableRef, TimePartitioning
from dagster_bq_connector.errors import ConfigurationError, InvalidNameError, PartitionError
from dagster_bq_connector.table.slice import TableSlice, TimeFilter, window_of
from dagster_bq_connector.table.window import Window

BERLIN = ZoneInfo("Europe/Berlin")
DATE, DATETIME = pa.date32(), pa.timestamp("us")
TIMESTAMP = pa.timestamp("us", "UTC")


def ids(daily: DailyTable, kind: pa.DataType | None, *keys: str) -> list[str]:
    return list(daily.for_keys(keys).partitions(kind))


@pytest.mark.parametrize(
    ("granularity", "key", "expected"),
    [
        ("hour", "2026-08-01-13:00", "2026080113"),
        ("day", "2026-08-01", "20260801"),
        ("month", "2026-08-01", "202608"),
    ],
)
def test_keys_become_ids(granularity: str, key: str, expected: str) -> None:
    daily = DailyTable("d.t", column="c", granularity=granularity)  # type: ignore[arg-type]
    for kind in (DATETIME, TIMESTAMP, None):
        assert ids(daily, kind, key) == [expected]


def test_a_day_of_another_zone() -> None:
    daily = DailyTable("d.t", column="c", timezone="Europe/Berlin")
    assert ids(daily, DATE, "2026-08-01") == ["20260801"]
    assert ids(daily, DATETIME, "2026-08-01") == ["20260801"]
    with pytest.raises(PartitionError, match="'2026-08-01' of d.t .* not one day of UTC"):
        ids(daily, TIMESTAMP, "2026-08-01")
    sharded = DailyTable("d.t", column="c", timezone="Europe/Berlin", layout="sharded")
    assert ids(sharded, TIMESTAMP, "2026-08-01") == ["20260801"]


def test_hours_of_a_zone_whose_clocks_change_are_no_partitions_of_the_calendar() -> None:
    """One hour of it is there twice: two keys would replace one partition."""
    hourly = DailyTable("d.t", column="c", timezone="Europe/Berlin", granularity="hour")
    for kind in (DATE, DATETIME):
        with pytest.raises(PartitionError, match="has an hour twice"):
            ids(hourly, kind, "2026-08-01-02:00")
    definition = hourly.partitions_def("2026-10-25-00:00", end="2026-10-25-05:00")
    keys = definition.get_partition_keys()
    assert len(keys) == 6
    assert ids(hourly, TIMESTAMP, *keys) == [f"20261024{h}" for h in (22, 23)] + [
        f"20261025{h:02d}" for h in range(4)
    ]
    fixed = DailyTable("d.t", column="c", timezone="Asia/Kolkata", granularity="hour")
    assert ids(fixed, DATETIME, "2026-08-01-02:00") == ["2026080102"]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("DATE", "(`c` >= DATE '2026-08-01' AND `c` < DATE '2026-08-03')"),
        (
            "DATETIME",
            "(`c` >= DATETIME '2026-08-01 00:00:00' AND `c` < DATETIME '2026-08-03 00:00:00')",
        ),
        (
            "TIMESTAMP",
            "(`c` >= TIMESTAMP '2026-07-31 22:00:00+00:00'"
            " AND `c` < TIMESTAMP '2026-08-02 22:00:00+00:00')",
        ),
    ],
)
def test_the_literals_of_a_filter_follow_the_column(kind: str, expected: str) -> None:
    daily = DailyTable("d.t", column="c", timezone="Europe/Berlin")
    assert daily.for_keys(["2026-08-01", "2026-08-02"]).filter.sql(kind) == expected


@pytest.mark.parametrize(
    ("granularity", "key", "text", "number"),
    [
        ("day", "2026-08-01", "'2026-08-01'", "20260801"),
        ("hour", "2026-08-01-13:00", "'2026-08-01-13:00'", "202608011300"),
        ("month", "2026-08-01", "'2026-08-01'", "20260801"),
    ],
)
def test_text_holds_the_key_and_a_number_its_digits(
    granularity: str, key: str, text: str, number: str
) -> None:
    daily = DailyTable("d.t", column="c", granularity=granularity)  # type: ignore[arg-type]
    found = daily.for_keys([key]).filter
    assert found.sql("STRING") == f"`c` IN ({text})"
    assert found.sql("INTEGER") == f"`c` IN ({number})"
    assert found.sql("STRING", "(LOWER(c))") == f"(LOWER(c)) IN ({text})"


def test_windows_without_keys_are_no_text() -> None:
    windows = DailyTable("d.t", column="c").for_keys(["2026-08-01"]).filter.windows
    with pytest.raises(PartitionError, match="'c' is STRING.*keys of the windows are not known"):
        TimeFilter("c", windows).sql("STRING")
    with pytest.raises(PartitionError, match="No window of time"):
        TimeFilter("c", ()).sql("DATE")


def table(layout: TimePartitioning | None, kind: str = "DATE") -> bigquery.Table:
    found = bigquery.Table("p.d.t", schema=[bigquery.SchemaField("C", kind)])
    TableOptions(layout).apply(found)
    return found


def test_whole_partitions_of_a_table_as_it_stands() -> None:
    day = DailyTable("d.t", column="c").for_keys(["2026-08-01"])
    assert day.is_partitions_of(table(TimePartitioning("c")))
    for other in (None, TimePartitioning(), TimePartitioning("c", "hour"), TimePartitioning("x")):
        assert not day.is_partitions_of(table(other))
    ingested = DailyTable("d.t").for_keys(["2026-08-01"])
    assert ingested.is_partitions_of(table(TimePartitioning()))
    sharded = DailyTable("d.t", column="c", layout="sharded").for_keys(["2026-08-01"])
    assert not sharded.is_partitions_of(table(TimePartitioning("c")))
    berlin = DailyTable("d.t", column="c", timezone="Europe/Berlin").for_keys(["2026-08-01"])
    assert berlin.is_partitions_of(table(TimePartitioning("c"), "DATETIME"))
    assert not berlin.is_partitions_of(table(TimePartitioning("c"), "TIMESTAMP"))


def test_a_week_is_no_partition() -> None:
    monday = dt.datetime(2026, 8, 3, tzinfo=BERLIN)
    week = Window(monday, monday + dt.timedelta(days=7))
    slice_ = TableSlice(TableRef("d", "t"), "c", "day", (("2026-08-03", week),))
    assert not slice_.is_partitions_of(table(TimePartitioning("c")))
    with pytest.raises(PartitionError, match="'2026-08-03' of d.t .* is not one day: use the part"):
        slice_.partitions(DATE)


@pytest.mark.parametrize(
    ("id_", "granularity", "start", "end"),
    [
        ("2026080113", "hour", (2026, 8, 1, 13), (2026, 8, 1, 14)),
        ("20261231", "day", (2026, 12, 31), (2027, 1, 1)),
        ("202612", "month", (2026, 12, 1), (2027, 1, 1)),
        ("2028", "year", (2028, 1, 1), (2029, 1, 1)),
    ],
)
def test_the_time_of_a_partition_id(
    id_: str, granularity: Any, start: tuple[int, ...], end: tuple[int, ...]
) -> None:
    window = window_of(id_, granularity)
    utc = ZoneInfo("UTC")
    assert window == Window(dt.datetime(*start, tzinfo=utc), dt.datetime(*end, tzinfo=utc))  # type: ignore[misc]


@pytest.mark.parametrize("id_", ["__NULL__", "__UNPARTITIONED__", "12", "20261301", "2026080113"])
def test_an_id_that_is_no_day(id_: str) -> None:
    assert window_of(id_, "day") is None


def test_a_filter_of_days_apart_and_of_a_column_that_is_no_time() -> None:
    daily = DailyTable("d.t", column="c")
    both = daily.for_keys(["2026-08-01", "2026-08-05"]).filter
    assert both.sql("DATE").count("OR") == 1
    with pytest.raises(PartitionError, match="'c' is FLOAT"):
        both.sql("FLOAT")
    hourly = DailyTable("d.t", column="c", granularity="hour").for_keys(["2026-08-01-13:00"])
    with pytest.raises(PartitionError, match="'c' is a DATE"):
        hourly.filter.sql("DATE")


@pytest.mark.parametrize("kind", [DATE, DATETIME, TIMESTAMP])
def test_rows_are_split_by_partition_in_their_order(kind: pa.DataType) -> None:
    days = [dt.datetime(2026, 8, 1 + n % 3, tzinfo=dt.UTC) for n in range(9)]
    batch = pa.record_batch({"n": list(range(9)), "c": pa.array(days).cast(kind)})
    daily = DailyTable("d.t", column="C")
    slice_ = daily.for_keys([f"2026-08-0{n}" for n in (1, 2, 3)])
    parts = {id_: rows["n"].to_pylist() for id_, rows in slice_.split(batch, 0)}
    assert parts == {"20260801": [0, 3, 6], "20260802": [1, 4, 7], "20260803": [2, 5, 8]}


def test_a_sharded_row_belongs_to_the_day_of_the_zone() -> None:
    late = dt.datetime(2026, 7, 31, 22, 30, tzinfo=dt.UTC)  # half past midnight in Berlin
    batch = pa.record_batch({"c": pa.array([late], TIMESTAMP)})
    daily = DailyTable("d.t", column="c", timezone="Europe/Berlin", layout="sharded")
    assert [id_ for id_, _ in daily.for_keys(["2026-08-01"]).split(batch, 0)] == ["20260801"]
    assert str(daily.for_keys(["2026-08-01"]).address("20260801")) == "d.t_20260801"


@pytest.mark.parametrize(
    ("value", "partition"), [(dt.date(2026, 8, 2), "20260802"), (None, "__NULL__")]
)
def test_a_row_of_another_partition_is_named(value: dt.date | None, partition: str) -> None:
    batch = pa.record_batch({"c": pa.array([dt.date(2026, 8, 1), value], DATE)})
    slice_ = DailyTable("d.t", column="c").for_keys(["2026-08-01"])
    with pytest.raises(PartitionError, match=f"Row 101 .*partition {partition}.*20260801 of d.t"):
        list(slice_.split(batch, 100))


def test_rows_without_a_column_go_to_the_one_partition() -> None:
    batch = pa.record_batch({"n": [1]})
    daily = DailyTable("d.t")
    assert [id_ for id_, _ in daily.for_keys(["2026-08-01"]).split(batch, 0)] == ["20260801"]
    with pytest.raises(PartitionError, match="2 partitions cannot be told apart"):
        list(daily.for_keys(["2026-08-01", "2026-08-02"]).split(batch, 0))


def test_data_without_the_column_or_with_a_wrong_one() -> None:
    slice_ = DailyTable("d.t", column="c").for_keys(["2026-08-01"])
    with pytest.raises(PartitionError, match="lacks the column 'c'"):
        list(slice_.split(pa.record_batch({"n": [1]}), 0))
    with pytest.raises(PartitionError, match="'c' has the Arrow type int64"):
        list(slice_.split(pa.record_batch({"c": [1]}), 0))


@pytest.mark.parametrize(
    ("granularity", "key"),
    [
        ("day", "2026-08"),
        ("day", "nonsense"),
        ("day", "9999-12-31"),
        ("day", dt.date(2026, 8, 1)),
        ("hour", "2026-08-01"),
        ("hour", "2026-08-01-13:30"),
        ("month", "2026-08-15"),
    ],
)
def test_a_key_that_is_none_is_named(granularity: str, key: Any) -> None:
    """Also one between two partitions, which Dagster rounds up to the next."""
    daily = DailyTable("d.t", column="c", granularity=granularity)  # type: ignore[arg-type]
    with pytest.raises(PartitionError, match=re.escape(f"{key!r} is no partition key of d.t")):
        daily.for_keys([key])


def test_no_key_is_no_filter() -> None:
    with pytest.raises(PartitionError, match="name at least one"):
        DailyTable("d.t", column="c").for_keys([])


def test_years_that_python_does_not_have() -> None:
    slice_ = DailyTable("d.t", column="c").for_keys(["2026-08-01"])
    old = pa.record_batch({"c": pa.array([dt.date(999, 12, 31)], DATE)})
    with pytest.raises(PartitionError, match="c' is 0999-12-31 .partition 09991231"):
        list(slice_.split(old, 0))
    late = pa.record_batch({"c": pa.array([10_000_000], pa.int32()).cast(DATE)})
    with pytest.raises(PartitionError, match=r"partition 29349\d+"):
        list(slice_.split(late, 0))


def test_the_layout_of_a_table_that_is_created() -> None:
    daily = DailyTable("d.t", column="c", options=TableOptions(clustering=("a",)))
    options = daily.for_keys(["2026-08-01"]).options
    assert options == TableOptions(TimePartitioning("c", "day"), clustering=("a",))
    sharded = DailyTable("d.t", column="c", layout="sharded").for_keys(["2026-08-01"])
    assert sharded.options == TableOptions()


def test_a_daily_table_that_cannot_be() -> None:
    with pytest.raises(InvalidNameError):
        DailyTable("no good")
    for wrong in (
        {"granularity": "daily"},
        {"layout": "shard"},
        {"timezone": "Mars/Olympus"},
    ):
        with pytest.raises(ConfigurationError, match=next(iter(wrong))):
            DailyTable("d.t", **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="decides the partitioning"):
        DailyTable("d.t", options=TableOptions(partitioning=TimePartitioning()))


def hours(*keys: str) -> TimeFilter:
    daily = DailyTable("d.t", column="c", timezone="Europe/Berlin", granularity="hour")
    return daily.for_keys(keys).filter


def test_windows_are_instants_when_an_hour_comes_twice() -> None:
    """Python takes 02:30 for 02:30, whichever of the two it is."""
    starts = [dt.datetime(2026, 10, 25, 2, tzinfo=BERLIN, fold=fold) for fold in (0, 1)]
    first, second = (Window(start, start.replace(minute=30)) for start in starts)
    assert first.start == second.start
    assert first != second
    assert len({first, second, Window(first.start, first.end)}) == 2
    assert second.length == dt.timedelta(minutes=30)
    assert Window(*starts).length == dt.timedelta(hours=1)


@pytest.mark.parametrize(
    ("keys", "spans"),
    [
        (["02:00"], [(0, 1)]),
        (["02:00+0100"], [(1, 2)]),
        (["01:00", "02:00"], [(-1, 1)]),
        (["02:00+0100", "02:00"], [(0, 2)]),
        (["01:00", "02:00+0100"], [(-1, 0), (1, 2)]),
        (["02:00", "03:00"], [(0, 1), (2, 3)]),
    ],
)
def test_hours_that_touch_become_one(keys: list[str], spans: list[tuple[int, int]]) -> None:
    midnight = dt.datetime(2026, 10, 25, tzinfo=dt.UTC)
    expected = [
        f"(`c` >= TIMESTAMP '{midnight + dt.timedelta(hours=start)}'"
        f" AND `c` < TIMESTAMP '{midnight + dt.timedelta(hours=end)}')"
        for start, end in spans
    ]
    assert hours(*[f"2026-10-25-{key}" for key in keys]).sql("TIMESTAMP") == " OR ".join(expected)


@pytest.mark.parametrize(
    ("keys", "start", "end"),
    [
        (["01:00"], 1, 2),
        (["03:00"], 3, 4),
        (["02:00", "02:00+0100"], 2, 3),
        (["01:00", "02:00", "02:00+0100", "03:00"], 1, 4),
    ],
)
def test_an_hour_that_comes_twice_is_read_by_the_clock_as_a_whole(
    keys: list[str], start: int, end: int
) -> None:
    assert hours(*[f"2026-10-25-{key}" for key in keys]).sql("DATETIME") == (
        f"(`c` >= DATETIME '2026-10-25 0{start}:00:00'"
        f" AND `c` < DATETIME '2026-10-25 0{end}:00:00')"
    )


@pytest.mark.parametrize(
    "keys", [["02:00"], ["02:00+0100"], ["01:00", "02:00"], ["02:00+0100", "03:00"]]
)
def test_one_of_two_hours_that_the_clocks_show_alike(keys: list[str]) -> None:
    found = hours(*[f"2026-10-25-{key}" for key in keys])
    text = "'c' is a DATETIME, and .* clocks of Europe/Berlin show twice .* timezone='UTC'"
    with pytest.raises(PartitionError, match=text):
        found.sql("DATETIME")
    assert found.sql("TIMESTAMP")


def test_half_of_an_hour_that_comes_twice() -> None:
    """By the clocks, its first and its second time are the same rows."""
    start = dt.datetime(2026, 10, 25, 2, tzinfo=BERLIN)
    halves = [start.replace(minute=minute, fold=fold) for fold in (0, 1) for minute in (0, 30)]
    for first, last in itertools.pairwise([*halves, start.replace(hour=3)]):
        window = Window(first, last)
        with pytest.raises(PartitionError, match="show twice"):
            TimeFilter("c", (window,)).bounds(window, "DATETIME")
    whole = Window(start, start.replace(hour=3))
    assert TimeFilter("c", (whole,)).bounds(whole, "DATETIME") == (
        dt.datetime(2026, 10, 25, 2),
        dt.datetime(2026, 10, 25, 3),
    )


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/Havana"])
def test_a_day_by_the_clocks_may_begin_at_a_time_that_comes_twice(zone: str) -> None:
    """A business day of Berlin that begins at two, and a day of Havana, where midnight does."""
    hour = 2 if zone == "Europe/Berlin" else 0
    day = dt.date(2026, 10, 25) if hour else dt.date(2026, 11, 1)
    start = day - dt.timedelta(days=1)
    daily = dg.DailyPartitionsDefinition(str(start), timezone=zone, hour_offset=hour)
    for key in (str(start), str(day)):
        found = daily.time_window_for_partition_key(key)
        window = Window(found.start, found.end)
        first, last = TimeFilter("c", (window,)).bounds(window, "DATETIME")
        assert (str(first), last - first) == (f"{key} 0{hour}:00:00", dt.timedelta(days=1))
