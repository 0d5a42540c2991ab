"""A day of orders, read from the events and written to a partition of its own."""

import dagster as dg

from dagster_bq_connector import (
    BigQueryReader,
    BigQueryResource,
    BigQueryWriter,
    DailyTable,
    FileLoadsWriter,
)

daily = DailyTable("shop.orders_by_day", column="created_at")


@dg.asset(partitions_def=daily.partitions_def("2026-08-01"), kinds={"bigquery"})
def orders_by_day(
    context: dg.AssetExecutionContext, reader: BigQueryReader, writer: BigQueryWriter
) -> dg.MaterializeResult:
    rows = reader.read(
        "shop.events", columns=["id", "amount", "created_at"], where=daily.where(context)
    )
    return writer.replace(rows, daily.for_run(context)).to_materialize_result()


bigquery = BigQueryResource(project=dg.EnvVar("GOOGLE_CLOUD_PROJECT"), location="EU")
defs = dg.Definitions(
    assets=[orders_by_day],
    resources={
        "reader": BigQueryReader(bigquery=bigquery),
        "writer": FileLoadsWriter(bigquery=bigquery, staging="gs://my-staging/dagster"),
    },
)
