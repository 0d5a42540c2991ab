"""Files that another system leaves in a bucket are loaded, a day at a time."""

import dagster as dg
import pyarrow as pa

from dagster_bq_connector import BigQueryResource, DailyTable, FileLoadsWriter

SCHEMA = pa.schema([("day", pa.date32()), ("item", pa.string()), ("sold", pa.int64())])
sales = DailyTable("shop.sales", column="day")


@dg.asset(partitions_def=sales.partitions_def("2026-08-01"), kinds={"bigquery"})
def sales_by_day(
    context: dg.AssetExecutionContext, writer: FileLoadsWriter
) -> dg.MaterializeResult:
    files = f"gs://my-staging/sales/{context.partition_key}/*.csv"
    return writer.load_uris(
        files,
        sales.for_run(context),
        format="csv",
        operation="replace",
        skip_leading_rows=1,
        schema=SCHEMA,
    ).to_materialize_result()


bigquery = BigQueryResource(project=dg.EnvVar("GOOGLE_CLOUD_PROJECT"), location="EU")
defs = dg.Definitions(
    assets=[sales_by_day],
    resources={
        "writer": FileLoadsWriter(
            bigquery=bigquery, staging="gs://my-staging/dagster", create_dataset=True
        ),
    },
)
