"""Assets of every kind of partitions, and the rows that belong to each of their partitions."""

import datetime as dt
from collections.abc import Sequence
from typing import Any

import dagster as dg
import pandas as pd
import polars as pl
import pyarrow as pa

DAILY = dg.DailyPartitionsDefinition("2026-08-01", end_date="2026-09-30")
CITIES = dg.StaticPartitionsDefinition(["berlin", "o'hare", "paris"])
# A name for the kind, its definition, the column of it, and two keys.
KINDS: dict[str, tuple[dg.PartitionsDefinition[Any] | None, Any, Sequence[str]]] = {
    "none": (None, None, ["", ""]),
    "hourly": (
        dg.HourlyPartitionsDefinition("2026-08-01-00:00", end_date="2026-08-03-00:00"),
        "at",
        ["2026-08-01-05:00", "2026-08-01-06:00"],
    ),
    "daily": (DAILY, "day", ["2026-08-01", "2026-08-02"]),
    "weekly": (
        dg.WeeklyPartitionsDefinition("2026-08-02", end_date="2026-09-30"),
        "day",
        ["2026-08-02", "2026-08-09"],
    ),
    "monthly": (
        dg.MonthlyPartitionsDefinition("2026-08-01", end_date="2026-12-01"),
        "day",
        ["2026-08-01", "2026-09-01"],
    ),
    "static": (CITIES, "city", ["o'hare", "paris"]),
    "dynamic": (dg.DynamicPartitionsDefinition(name="cities"), "city", ["o'hare", "paris"]),
    "multi": (
        dg.MultiPartitionsDefinition({"day": DAILY, "city": CITIES}),
        {"day": "day", "city": "city"},
        ["o'hare|2026-08-01", "o'hare|2026-08-02"],
    ),
}
FORMS: dict[str, Any] = {
    "arrow": pa.Table,
    "polars": pl.DataFrame,
    "lazy": pl.LazyFrame,
    "pandas": pd.DataFrame,
}
SCHEMA = pa.schema(
    {
        "id": pa.int64(),
        "at": pa.timestamp("us", "UTC"),
        "day": pa.date32(),
        "city": pa.string(),
        "amount": pa.decimal128(38, 9),
    }
)


def rows_of(keys: Sequence[str], count: int, first: int = 0) -> pa.Table:
    """`count` rows for each partition key."""
    return pa.Table.from_pylist(
        [_row(key, first + count * n + i) for n, key in enumerate(keys) for i in range(count)],
        schema=SCHEMA,
    )


def _row(key: str, number: int) -> dict[str, object]:
    city, at = "berlin", dt.datetime(2026, 8, 1, 7, tzinfo=dt.UTC)
    for part in filter(None, key.split("|")):
        if part[:2] == "20":
            text = part if len(part) > 10 else f"{part}-00:00"
            at = dt.datetime.strptime(text, "%Y-%m-%d-%H:%M").replace(tzinfo=dt.UTC)
        else:
            city = part
    at += dt.timedelta(minutes=number % 60)
    return {"id": number, "at": at, "day": at.date(), "city": city, "amount": number}


def as_form(table: pa.Table, form: str) -> Any:
    """A table as one of FORMS."""
    if form == "arrow":
        return table
    if form == "pandas":
        return table.to_pandas(types_mapper=pd.ArrowDtype)
    frame = pl.from_arrow(table)
    return frame.lazy() if form == "lazy" else frame


def as_table(data: Any) -> pa.Table:
    """Any of FORMS as a table, or a reader."""
    if isinstance(data, pa.RecordBatchReader):
        return data.read_all()
    if isinstance(data, pa.Table):
        return data
    if isinstance(data, pd.DataFrame):
        return pa.Table.from_pandas(data, preserve_index=False)
    return data.lazy().collect().to_arrow()


def ids(data: Any) -> list[int]:
    """The ids in it, sorted."""
    return sorted(as_table(data)["id"].to_pylist())
