"""Appends that land once, however often their run is tried."""

import datetime as dt

import dagster as dg
import polars as pl

from dagster_bq_connector import BigQueryResource, BigQueryWriter, ExactlyOnceWriter

days = dg.DailyPartitionsDefinition("2026-08-01")


@dg.asset(partitions_def=days, retry_policy=dg.RetryPolicy(max_retries=3))
def payments(context: dg.AssetExecutionContext, writer: BigQueryWriter) -> dg.MaterializeResult:
    day = context.partition_time_window.start.date()
    rows = pl.DataFrame({"day": [day] * 2, "amount": [12.5, 3.0]})
    return writer.append(rows, "shop.payments").to_materialize_result()


@dg.asset(partitions_def=days)
def refunds(context: dg.AssetExecutionContext, writer: BigQueryWriter) -> None:
    day = context.partition_key
    for shop in ("berlin", "paris"):
        rows = pl.DataFrame({"day": [dt.date.fromisoformat(day)], "shop": [shop]})
        writer.append(rows, "shop.refunds", key=f"refunds {day} {shop}")


bigquery = BigQueryResource(project=dg.EnvVar("GOOGLE_CLOUD_PROJECT"), location="EU")
writer = ExactlyOnceWriter(bigquery=bigquery, create_dataset=True)
defs = dg.Definitions(assets=[payments, refunds], resources={"writer": writer})
