"""Assets that return and take frames; their tables are the IO manager's business."""

import dagster as dg
import polars as pl

from dagster_bq_connector import BigQueryIOManager, BigQueryResource, FileLoadsWriter

days = dg.DailyPartitionsDefinition("2026-08-01")


@dg.asset(partitions_def=days, metadata={"partition_expr": "day"})
def visits(context: dg.AssetExecutionContext) -> pl.DataFrame:
    day = context.partition_time_window.start.date()
    return pl.DataFrame({"day": [day] * 3, "page": ["/", "/a", "/"], "seconds": [3, 40, 5]})


@dg.asset(
    partitions_def=days,
    metadata={"partition_expr": "day"},
    ins={"visits": dg.AssetIn(metadata={"columns": ["day", "page"], "where": "seconds > 4"})},
)
def pages(visits: pl.LazyFrame) -> pl.LazyFrame:
    return visits.group_by("day", "page").len("visits")


bigquery = BigQueryResource(project=dg.EnvVar("GOOGLE_CLOUD_PROJECT"), location="EU")
writer = FileLoadsWriter(bigquery=bigquery, staging="gs://my-staging/dagster", create_dataset=True)
defs = dg.Definitions(
    assets=[visits, pages],
    resources={"io_manager": BigQueryIOManager(writer=writer, dataset="web")},
)
