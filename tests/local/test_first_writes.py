"""The first write of an asset: how its table is laid out, and what is left when it is refused."""

import datetime as dt
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest
from google.cloud import bigquery as google

from dagster_bq_connector import BigQueryIOManager, BigQueryResource, FileLoadsWriter


def write(
    io_manager: BigQueryIOManager,
    rows: pa.Table,
    definition: dg.PartitionsDefinition[Any],
    key: str,
    expression: Any,
) -> None:
    """Materialize one partition of the asset `t`."""

    @dg.asset(partitions_def=definition, metadata={"partition_expr": expression})
    def t() -> pa.Table:
        return rows

    dg.materialize([t], resources={"io_manager": io_manager}, partition_key=key)


def layout(bigquery: BigQueryResource, table: str) -> google.TimePartitioning | None:
    with bigquery.get_client() as client:
        return client.get_table(table).time_partitioning


@pytest.mark.parametrize(
    ("key", "hour", "minute"),
    [("2026-03-29-01:00", 0, 5), ("2026-03-29-03:00", 1, 5)],
)
def test_the_hours_around_a_change_of_clocks_are_partitions(
    key: str,
    hour: int,
    minute: int,
    dataset: str,
    load_writer: FileLoadsWriter,
    bigquery: BigQueryResource,
) -> None:
    """The definition decides the layout: the hour before the change is two long by the clock."""
    io_manager = BigQueryIOManager(writer=load_writer, dataset=dataset)
    at = dt.datetime(2026, 3, 29, hour, minute, tzinfo=dt.UTC)
    hourly = dg.HourlyPartitionsDefinition("2026-03-29-00:00", timezone="Europe/Berlin")
    rows = pa.table({"at": pa.array([at], pa.timestamp("us", "UTC"))})
    write(io_manager, rows, hourly, key, "at")
    found = layout(bigquery, f"{dataset}.t")
    assert found is not None
    assert (found.field, found.type_) == ("at", "HOUR")
