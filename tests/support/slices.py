"""Slices of a table with regions, and what a table holds."""

from typing import Any

import pyarrow as pa

from dagster_bq_connector import BigQueryReader, BigQueryResource, DailyTable, TableRef
from dagster_bq_connector.table.row_slice import KeyFilter, RowSlice

Content = list[tuple[object, ...]]


def regions(table: str | TableRef, *keys: str, column: str = "region", **more: Any) -> RowSlice:
    ref = TableRef.parse(table)
    return RowSlice(ref, tuple((key, (KeyFilter(column, (key,)),)) for key in keys), **more)


def days(table: str, column: str, *keys: str, zone: str = "UTC") -> RowSlice:
    daily = DailyTable(table, column=column, timezone=zone)
    return RowSlice(TableRef.parse(table), tuple((k, (daily.for_keys([k]).filter,)) for k in keys))


def rows_of(*pairs: tuple[str | None, int]) -> pa.Table:
    region, numbers = zip(*pairs, strict=True)
    return pa.table({"region": pa.array(region, pa.string()), "n": pa.array(numbers, pa.int64())})


def content(reader: BigQueryReader, table: str | RowSlice, **how: Any) -> Content:
    got = reader.read(table, **how).to_arrow()
    return sorted(tuple(row.values()) for row in got.to_pylist())


def tables(bigquery: BigQueryResource, dataset: str) -> list[str]:
    with bigquery.get_client() as client:
        return sorted(table.table_id for table in client.list_tables(dataset))
